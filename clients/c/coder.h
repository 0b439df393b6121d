/* The range coder of docs/wire.md. It is in a header because the compiler must inline it: most of the time of a
 * message is spent here.
 *
 * The encoder holds the interval [low, low + span). The decoder holds `code`, which is the number that the
 * message encodes, minus low. When the span falls below 2^32, the encoder writes a word of 32 bits, or the
 * decoder reads one.
 */
#ifndef CFEDAVG_CODER_H
#define CFEDAVG_CODER_H

#include <stdint.h>

#define CONTEXT_LIMIT 255 /* after this many bits, a context gives older bits less weight */
#define CERTAIN 32        /* every probability is at least 32 / 2^16 away from 0 and from 1 */
#define COUNT_CONTEXTS 48
#define TOTAL_BITS 16
#define TOTAL (1 << TOTAL_BITS) /* the frequencies of a table add up to this */
#define SEEN 32                 /* what a coded symbol adds to its count */
#define FIRST_REBUILD 16        /* a table is rebuilt after 16, 32, 64, 128 items, then every 128 */
#define LONGEST_REBUILD 128
#define MOST_SYMBOLS 256
#define JUMP_BITS 9

/* A probability of a 1 in units of 2^-16, and how many bits it has seen. */
typedef struct {
    uint16_t p;
    uint16_t seen;
} Context;

/* Frequencies of symbols. counts[s] grows with each symbol s; symbol s has the range sums[s] to sums[s + 1]. */
typedef struct {
    int symbols;
    int decodes; /* whether `jump` is kept */
    int64_t due; /* after how many items the table is rebuilt */
    int64_t counts[MOST_SYMBOLS];
    uint32_t sums[MOST_SYMBOLS + 1];
    uint8_t jump[TOTAL >> JUMP_BITS]; /* entry i is the symbol whose range contains i * 2^JUMP_BITS */
} Table;

typedef struct {
    uint32_t *words;
    int64_t room; /* words after this many are counted but not written */
    int64_t position;
    uint64_t low;
    uint64_t span;
} Encoder;

typedef struct {
    const uint32_t *words;
    int64_t length; /* words after the last one read as 0 */
    int64_t position;
    uint64_t code;
    uint64_t span;
} Decoder;

Encoder start_encoding(uint32_t *words, int64_t room);
int64_t finish_encoding(Encoder *encoder);
Decoder start_decoding(const uint32_t *words, int64_t length);
void reset_contexts(Context *contexts, int64_t n);
void start_table(Table *table, int decodes);
void rebuild_table(Table *table);

/* After n bits, a bit moves the probability by 1 / (n + 1.5) of its distance to that bit: RATES[n] / 2^16. */
extern const uint32_t RATES[CONTEXT_LIMIT + 1];

static inline void learn(Context *context, int bit)
{
    uint64_t rate = RATES[context->seen];
    uint32_t p = context->p, up = p + (uint32_t)((65536 - p) * rate >> 16), down = p - (uint32_t)(p * rate >> 16);

    up = up < 65536 - CERTAIN ? up : 65536 - CERTAIN;
    down = down > CERTAIN ? down : CERTAIN;
    context->p = (uint16_t)(bit ? up : down);
    context->seen = (uint16_t)(context->seen + (context->seen < CONTEXT_LIMIT));
}

/* Add 1 to the number that the written words form. The carry never passes the first word. */
static inline void carry(Encoder *encoder)
{
    int64_t back = encoder->position - 1;

    if (back >= encoder->room) {
        return; /* the words did not fit; the caller sees it by their number */
    }
    while (back >= 0 && ++encoder->words[back] == 0) {
        back--;
    }
}

/* Narrow the interval to `span` numbers from low + above on. */
static inline void narrow(Encoder *encoder, uint64_t above, uint64_t span)
{
    uint64_t low = encoder->low + above;

    if (low < encoder->low) {
        carry(encoder);
    }
    if (span < (uint64_t)1 << 32) {
        if (encoder->position < encoder->room) {
            encoder->words[encoder->position] = (uint32_t)(low >> 32);
        }
        encoder->position++;
        low <<= 32;
        span <<= 32;
    }
    encoder->low = low;
    encoder->span = span;
}

static inline void put_bit(Encoder *encoder, Context *context, int bit)
{
    uint64_t one = (encoder->span >> 16) * context->p;

    learn(context, bit);
    narrow(encoder, bit ? 0 : one, bit ? one : encoder->span - one);
}

/* Encode a number of `bits` bits, 16 at a time, upper bits first. */
static inline void put_number(Encoder *encoder, uint64_t number, int bits)
{
    while (bits > 0) {
        int part = bits < 16 ? bits : 16;
        uint64_t span = encoder->span >> part;

        bits -= part;
        narrow(encoder, span * ((number >> bits) & (((uint64_t)1 << part) - 1)), span);
    }
}

/* Encode a number from 0 up: first the bit length of number + 1, then its bits below the leading 1. */
static inline void put_count(Encoder *encoder, Context *contexts, uint64_t number)
{
    int below = 0;

    while ((number + 1) >> (below + 1)) {
        put_bit(encoder, &contexts[below], 0);
        below++;
    }
    put_bit(encoder, &contexts[below], 1);
    put_number(encoder, number + 1 - ((uint64_t)1 << below), below);
}

static inline void put_symbol(Encoder *encoder, const Table *table, int symbol)
{
    uint64_t unit = encoder->span >> TOTAL_BITS;
    uint32_t below = table->sums[symbol];

    narrow(encoder, unit * below, unit * (table->sums[symbol + 1] - below));
}

static inline uint64_t next_word(Decoder *decoder)
{
    int64_t at = decoder->position++;

    return at < decoder->length ? decoder->words[at] : 0;
}

static inline void widen(Decoder *decoder, uint64_t code, uint64_t span)
{
    if (span < (uint64_t)1 << 32) {
        code = code << 32 | next_word(decoder);
        span <<= 32;
    }
    decoder->code = code;
    decoder->span = span;
}

static inline int take_bit(Decoder *decoder, Context *context)
{
    uint64_t one = (decoder->span >> 16) * context->p;
    int bit = decoder->code < one;

    learn(context, bit);
    widen(decoder, decoder->code - (bit ? 0 : one), bit ? one : decoder->span - one);
    return bit;
}

static inline uint64_t take_number(Decoder *decoder, int bits)
{
    uint64_t number = 0;

    while (bits > 0) {
        int part = bits < 16 ? bits : 16;
        uint64_t span = decoder->span >> part, most = ((uint64_t)1 << part) - 1;
        uint64_t digit = decoder->code / span;

        digit = digit < most ? digit : most; /* a forged message may announce more */
        bits -= part;
        widen(decoder, decoder->code - digit * span, span);
        number = number << part | digit;
    }
    return number;
}

/* Decode a number that `put_count` encoded: at most 2^48 - 2. */
static inline uint64_t take_count(Decoder *decoder, Context *contexts)
{
    int below = 0;

    while (!take_bit(decoder, &contexts[below]) && below < COUNT_CONTEXTS - 1) {
        below++;
    }
    return take_number(decoder, below) + ((uint64_t)1 << below) - 1;
}

/* Return the symbol whose range contains `share`. `jump` says where the search starts. */
static inline int find_symbol(const Table *table, uint32_t share)
{
    int symbol = table->jump[share >> JUMP_BITS];

    while (table->sums[symbol + 1] <= share) {
        symbol++;
    }
    return symbol;
}

static inline int take_symbol(Decoder *decoder, const Table *table)
{
    uint64_t unit = decoder->span >> TOTAL_BITS, share = decoder->code / unit;
    int symbol = find_symbol(table, (uint32_t)(share < TOTAL ? share : TOTAL - 1));
    uint32_t below = table->sums[symbol];

    widen(decoder, decoder->code - unit * below, unit * (table->sums[symbol + 1] - below));
    return symbol;
}

/* Count one item of the table: a number or a gap. */
static inline void end_item(Table *table, int64_t items)
{
    if (items == table->due) {
        rebuild_table(table);
    }
}

#endif
