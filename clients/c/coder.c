#include "coder.h"

#include <stddef.h>

#define RATE(n) 131072U / (2 * (n) + 3)
#define FOUR(n) RATE(n), RATE(n + 1), RATE(n + 2), RATE(n + 3)
#define SIXTEEN(n) FOUR(n), FOUR(n + 4), FOUR(n + 8), FOUR(n + 12)
#define QUARTER(n) SIXTEEN(n), SIXTEEN(n + 16), SIXTEEN(n + 32), SIXTEEN(n + 48)

const uint32_t RATES[CONTEXT_LIMIT + 1] = {QUARTER(0), QUARTER(64), QUARTER(128), QUARTER(192)};

Encoder start_encoding(uint32_t *words, int64_t room)
{
    Encoder encoder = {words, room, 0, 0, UINT64_MAX};

    return encoder;
}

/* Write the last two words; return the number of all words.
 *
 * Any number in the interval would do for the decoder. The one with the most zero bits at its end is written,
 * because zero bytes at the end of a section are left out.
 */
int64_t finish_encoding(Encoder *encoder)
{
    uint64_t above = 0;

    for (int zeros = 63; zeros >= 0; zeros--) {
        uint64_t mask = ((uint64_t)1 << zeros) - 1;

        above = ((encoder->low + mask) & ~mask) - encoder->low;
        if (above < encoder->span) {
            break;
        }
    }
    narrow(encoder, above, (uint64_t)1 << 32);
    if (encoder->position + 2 <= encoder->room) {
        encoder->words[encoder->position] = (uint32_t)(encoder->low >> 32);
        encoder->words[encoder->position + 1] = (uint32_t)encoder->low;
    }
    return encoder->position + 2;
}

Decoder start_decoding(const uint32_t *words, int64_t length)
{
    Decoder decoder = {words, length, 0, 0, UINT64_MAX};

    decoder.code = next_word(&decoder) << 32;
    decoder.code |= next_word(&decoder);
    return decoder;
}

void reset_contexts(Context *contexts, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        contexts[i].p = 32768;
        contexts[i].seen = 0;
    }
}

static void make_jumps(Table *table)
{
    for (int i = 0, s = 0; i < TOTAL >> JUMP_BITS; i++) {
        while (table->sums[s + 1] <= (uint32_t)i << JUMP_BITS) {
            s++;
        }
        table->jump[i] = (uint8_t)s;
    }
}

/* Compute the sums from the counts. A frequency is about proportional to its count, and at least 1. */
static void make_sums(Table *table)
{
    int64_t total = 0, share;

    for (int s = 0; s < table->symbols; s++) {
        total += table->counts[s];
    }
    share = ((int64_t)(TOTAL - table->symbols) << 32) / total;
    table->sums[0] = 0;
    for (int s = 0; s + 1 < table->symbols; s++) {
        table->sums[s + 1] = table->sums[s] + 1 + (uint32_t)((table->counts[s] * share) >> 32);
    }
    table->sums[table->symbols] = TOTAL;
    if (table->decodes) {
        make_jumps(table);
    }
}

/* Start with the counts that the caller has set, to encode or to decode. */
void start_table(Table *table, int decodes)
{
    table->decodes = decodes;
    make_sums(table);
    table->due = FIRST_REBUILD;
}

/* Make the sums anew; from 128 items on, also reduce all counts by a quarter. */
void rebuild_table(Table *table)
{
    make_sums(table);
    if (table->due < LONGEST_REBUILD) {
        table->due *= 2;
        return;
    }
    for (int s = 0; s < table->symbols; s++) {
        int64_t reduced = table->counts[s] - (table->counts[s] >> 2);

        table->counts[s] = reduced > 1 ? reduced : 1;
    }
    table->due += LONGEST_REBUILD;
}
