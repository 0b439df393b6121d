/* Coordinates of which each chunk sends equally many: see docs/wire.md and src/cfedavg/wire/chunks.py. */
#include "chunks.h"

#include "allocate.h"
#include "bits.h"
#include "coder.h"
#include "kernels.h"
#include "sets.h"

#define LENGTH_BITS 5 /* of the exponent of a chunk's length */
#define CLASSES 19    /* contexts of a piece's count: by the mean to expect, */
#define COUNTS 32     /* and by the count itself */
#define WEIGHT 2      /* of a column that has sent nothing yet */
#define PRECISE 24    /* bits of a probability of a position */
#define WHOLE ((int64_t)1 << PRECISE)
#define SCALE_BITS 50
#define RENEWAL 16 /* weights are renewed after 1, 2, 4, 8, 16 rows of a tensor, then after every 16 */

/* How far the coder is: a piece is what a row and a chunk have in common. */
typedef struct {
    int s;     /* a chunk has 2^s coordinates */
    int64_t n; /* of which it sends n */
    int64_t d;
    int64_t at; /* the first coordinate of the piece */
    int64_t left; /* how many coordinates the chunk has still to send */
    int64_t room; /* in the chunk, from `at` on */
    int64_t size; /* of the piece */
    int64_t row;  /* the first coordinate of the row */
    int64_t width;
    int64_t *before; /* the sums of the weights in a row; NULL if all weights are equal */
    uint32_t *sent;  /* by each column, in the tensor's rows so far */
    Context contexts[CLASSES * COUNTS];
} Walk;

static void start_walk(Walk *walk, int64_t d, int s, int64_t n)
{
    walk->s = s;
    walk->n = n;
    walk->d = d;
    walk->at = walk->left = walk->room = 0;
    reset_contexts(walk->contexts, CLASSES * COUNTS);
}

static void renew_weights(Walk *walk)
{
    for (int64_t c = 0; c < walk->width; c++) {
        walk->before[c + 1] = walk->before[c] + WEIGHT + walk->sent[c];
    }
}

/* Start a tensor of so many rows; return whether there is memory. The caller must call `end_tensor` in both cases. */
static int start_tensor(Walk *walk, int64_t rows, int64_t width)
{
    walk->width = width;
    walk->before = NULL;
    walk->sent = NULL;
    if (rows == 1) {
        return 1;
    }
    walk->before = allocate((uint64_t)width + 1, sizeof *walk->before);
    walk->sent = allocate((uint64_t)width, sizeof *walk->sent);
    if (!walk->before || !walk->sent) {
        return 0;
    }
    renew_weights(walk);
    return 1;
}

static void end_tensor(Walk *walk)
{
    free(walk->before);
    free(walk->sent);
}

/* Begin the piece at `at`. */
static void start_piece(Walk *walk)
{
    int64_t rest = walk->row + walk->width - walk->at;

    if (walk->room == 0) {
        int64_t length = (int64_t)1 << walk->s;

        walk->room = walk->d - walk->at < length ? walk->d - walk->at : length;
        walk->left = walk->n < walk->room ? walk->n : walk->room;
    }
    walk->size = rest < walk->room ? rest : walk->room;
}

static void end_piece(Walk *walk, const int64_t *indices, int64_t count)
{
    for (int64_t i = 0; i < count && walk->sent; i++) {
        walk->sent[indices[i] - walk->row]++;
    }
    walk->at += walk->size;
    walk->left -= count;
    walk->room -= walk->size;
}

/* Renew the weights after so many rows if it is time; return when it is time again. */
static int64_t end_row(Walk *walk, int64_t rows, int64_t due)
{
    if (rows != due) {
        return due;
    }
    if (walk->before) {
        renew_weights(walk);
    }
    return due < RENEWAL ? 2 * due : due + RENEWAL;
}

/* Return the least count of the piece, the largest one in *most, and its first context. */
static int64_t bound_count(Walk *walk, int64_t *most, Context **contexts)
{
    int64_t elsewhere = walk->room - walk->size, mean = 4 * walk->left * walk->size / walk->room;
    int which = bit_length((uint64_t)mean);

    *contexts = walk->contexts + COUNTS * (which < CLASSES ? which : CLASSES - 1);
    *most = walk->left < walk->size ? walk->left : walk->size;
    return walk->left > elsewhere ? walk->left - elsewhere : 0;
}

static int64_t sum_before(const Walk *walk, int64_t place)
{
    return walk->before ? walk->before[place] : WEIGHT * place;
}

/* Where the next of j positions may lie, in the places of the row from `first` to before `stop`. */
typedef struct {
    int64_t first;
    int64_t stop;
    int64_t j;
    int64_t all; /* the sum of the weights before `stop` */
    int64_t scale;
} Range;

static Range make_range(const Walk *walk, int64_t first, int64_t stop, int64_t j)
{
    Range range = {first, stop, j, sum_before(walk, stop), 0};

    range.scale = ((int64_t)1 << SCALE_BITS) / (range.all - sum_before(walk, first));
    return range;
}

/* Return where the part of the interval begins that stands for a position. */
static int64_t edge(const Walk *walk, const Range *range, int64_t place)
{
    int64_t share = ((range->all - sum_before(walk, place)) * range->scale) >> (SCALE_BITS - PRECISE);
    int64_t power = WHOLE, cells = range->stop - range->first;

    if (place == range->first) {
        return 0;
    }
    for (int64_t j = range->j; j > 0; j >>= 1) {
        if (j & 1) {
            power = (power * share) >> PRECISE;
        }
        share = (share * share) >> PRECISE;
    }
    return place - range->first + (((WHOLE - cells) * (WHOLE - power)) >> PRECISE);
}

static void put_positions(Encoder *encoder, const Walk *walk, const int64_t *indices, int64_t count)
{
    int64_t first = walk->at - walk->row, stop = first + walk->size;

    for (int64_t i = 0; i < count; i++) {
        int64_t place = indices[i] - walk->row;

        if (stop - first > count - i) {
            Range range = make_range(walk, first, stop, count - i);
            uint64_t unit = encoder->span >> PRECISE;
            uint64_t above = (uint64_t)edge(walk, &range, place);

            narrow(encoder, unit * above, unit * ((uint64_t)edge(walk, &range, place + 1) - above));
        }
        first = place + 1;
    }
}

/* Decode the position in a range and the part of the interval that stands for it. */
static int64_t take_position(Decoder *decoder, const Walk *walk, const Range *range)
{
    uint64_t unit = decoder->span >> PRECISE, found = decoder->code / unit;
    int64_t share = found < (uint64_t)WHOLE ? (int64_t)found : WHOLE - 1; /* a forged message may have more */
    int64_t low = range->first, high = range->stop, above = 0, beyond = WHOLE;

    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2, begins = edge(walk, range, middle);

        if (begins <= share) {
            low = middle;
            above = begins;
        } else {
            high = middle;
            beyond = begins;
        }
    }
    widen(decoder, decoder->code - unit * (uint64_t)above, unit * (uint64_t)(beyond - above));
    return low;
}

static int take_positions(Decoder *decoder, const Walk *walk, int64_t *indices, int64_t count)
{
    int64_t first = walk->at - walk->row, stop = first + walk->size;

    for (int64_t i = 0; i < count; i++) {
        int64_t place = first;

        if (stop - first > count - i) {
            Range range = make_range(walk, first, stop, count - i);

            place = take_position(decoder, walk, &range);
        }
        if (place + count - i > stop) {
            return BEYOND;
        }
        indices[i] = walk->row + place;
        first = place + 1;
    }
    return FINE;
}

/* Encode the piece, whose coordinates are the first ones of n; return how many it has. */
static int64_t put_piece(Encoder *encoder, Walk *walk, const int64_t *indices, int64_t n)
{
    Context *contexts;
    int64_t most, least = bound_count(walk, &most, &contexts), count = 0;

    while (count < n && indices[count] < walk->at + walk->size) {
        count++;
    }
    for (int64_t i = least; i < most && i <= count; i++) {
        put_bit(encoder, &contexts[i < COUNTS ? i : COUNTS - 1], i == count);
    }
    put_positions(encoder, walk, indices, count);
    return count;
}

int64_t cfedavg_encode_chunks(uint32_t *words, int64_t room, const int64_t *indices, int64_t n, int64_t d,
                              const int64_t *shapes, int64_t tensors, int64_t s, int64_t of_chunk)
{
    Encoder encoder = start_encoding(words, room);
    Walk walk;
    int64_t a = 0;

    start_walk(&walk, d, (int)s, of_chunk);
    put_number(&encoder, (uint64_t)s, LENGTH_BITS);
    put_number(&encoder, (uint64_t)of_chunk, (int)s);
    for (int64_t tensor = 0; tensor < tensors; tensor++) {
        const int64_t *shape = shapes + 3 * tensor;
        int fits = start_tensor(&walk, shape[0], shape[1] * shape[2]);

        for (int64_t row = 0, due = 1; row < shape[0] && fits; row++) {
            walk.row = walk.at;
            while (walk.at < walk.row + walk.width) {
                int64_t count;

                start_piece(&walk);
                count = put_piece(&encoder, &walk, indices + a, n - a);
                end_piece(&walk, indices + a, count);
                a += count;
            }
            due = end_row(&walk, row + 1, due);
        }
        end_tensor(&walk);
        if (!fits) {
            return NO_ROOM;
        }
    }
    return finish_encoding(&encoder);
}

/* Decode the piece into `indices`; return FINE or BEYOND. */
static int take_piece(Decoder *decoder, Walk *walk, int64_t *indices, int64_t *count)
{
    Context *contexts;
    int64_t most, i = bound_count(walk, &most, &contexts);

    while (i < most && !take_bit(decoder, &contexts[i < COUNTS ? i : COUNTS - 1])) {
        i++;
    }
    *count = i;
    return take_positions(decoder, walk, indices, i);
}

static int take_tensor(Decoder *decoder, Walk *walk, int64_t rows, int64_t *indices, int64_t *a)
{
    for (int64_t row = 0, due = 1; row < rows; row++) {
        walk->row = walk->at;
        while (walk->at < walk->row + walk->width) {
            int64_t count;

            start_piece(walk);
            if (take_piece(decoder, walk, indices + *a, &count)) {
                return BEYOND;
            }
            end_piece(walk, indices + *a, count);
            *a += count;
        }
        due = end_row(walk, row + 1, due);
    }
    return FINE;
}

int cfedavg_decode_chunks(const uint32_t *words, int64_t length, int64_t *indices, int64_t n, int64_t d,
                          const int64_t *shapes, int64_t tensors, int64_t *read)
{
    Decoder decoder = start_decoding(words, length);
    int s = (int)take_number(&decoder, LENGTH_BITS), fault = FINE;
    int64_t of_chunk = (int64_t)take_number(&decoder, s), a = 0;
    Walk walk;

    if (s < SHORTEST || s > LONGEST || of_chunk == 0 || count_in_chunks(d, s, of_chunk) != (uint64_t)n) {
        *read = decoder.position;
        return OTHER_NUMBER;
    }
    start_walk(&walk, d, s, of_chunk);
    for (int64_t tensor = 0; tensor < tensors && !fault; tensor++) {
        const int64_t *shape = shapes + 3 * tensor;
        int fits = start_tensor(&walk, shape[0], shape[1] * shape[2]);

        fault = fits ? take_tensor(&decoder, &walk, shape[0], indices, &a) : NO_MEMORY;
        end_tensor(&walk);
    }
    *read = decoder.position;
    return fault;
}

uint64_t count_in_chunks(int64_t d, int s, int64_t n)
{
    uint64_t rest = (uint64_t)d & (((uint64_t)1 << s) - 1);

    return ((uint64_t)d >> s) * (uint64_t)n + ((uint64_t)n < rest ? (uint64_t)n : rest);
}

int find_chunk(const int64_t *indices, int64_t k, int64_t d, int64_t *n)
{
    for (int s = SHORTEST; s <= LONGEST && d >> s >= 2; s++) {
        int64_t found = 0, at = 0;

        while (found < k && indices[found] >> s == 0) {
            found++;
        }
        if (found == 0 || found == (int64_t)1 << s || count_in_chunks(d, s, found) != (uint64_t)k) {
            continue;
        }
        while (at < k && indices[at] >> s == at / found) {
            at++;
        }
        if (at == k) {
            *n = found;
            return s;
        }
    }
    return 0;
}
