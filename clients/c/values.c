/* The section of coded values: see docs/wire.md and src/cfedavg/wire/values.py.
 *
 * A number is a magnitude of 15 bits with the sign in the bit above.
 */
#include "allocate.h"
#include "coder.h"
#include "kernels.h"

#define MAGNITUDE 15
#define MASK ((1 << MAGNITUDE) - 1)
#define LEADING 8 /* a symbol has at most this many bits; the other bits are equally likely */

/* Start the table for numbers from 0 to `spread`; return how many bits of a number are below its symbol. */
static int start_numbers(Table *table, int spread, int decodes)
{
    int copied = 0;

    while (spread >> (copied + LEADING)) {
        copied++;
    }
    table->symbols = (spread >> copied) + 1;
    for (int s = 0; s < table->symbols; s++) {
        table->counts[s] = 1;
    }
    start_table(table, decodes);
    return copied;
}

static void count_symbol(Table *table, int symbol)
{
    table->counts[symbol] += SEEN;
    if (symbol > 0) {
        table->counts[symbol - 1] += SEEN / 2;
    }
    if (symbol + 1 < table->symbols) {
        table->counts[symbol + 1] += SEEN / 2;
    }
}

/* The rows of all tensors, each with a context for the signs of its values. */
typedef struct {
    const int64_t *indices; /* NULL if all coordinates are sent */
    const int64_t *ends;
    int64_t n;
    int64_t row;
    Context *signs;
} Rows;

static int make_rows(Rows *rows, const int64_t *indices, const int64_t *ends, int64_t n)
{
    Rows made = {indices, ends, n, 0, allocate((uint64_t)n, sizeof(Context))};

    *rows = made;
    if (made.signs) {
        reset_contexts(made.signs, n + 1);
    }
    return made.signs != NULL;
}

/* Return the context of number i. Call it with rising i. */
static Context *sign_of(Rows *rows, int64_t i)
{
    int64_t index = rows->indices ? rows->indices[i] : i;

    while (rows->row < rows->n && index >= rows->ends[rows->row]) {
        rows->row++;
    }
    return &rows->signs[rows->row];
}

static int64_t put_numbers(Encoder *encoder, const uint16_t *numbers, int64_t n, Rows *rows, int zero_has_sign,
                           int64_t largest)
{
    int lowest = MASK, highest = 0, copied;
    Table table;

    for (int64_t i = 0; i < n; i++) {
        int magnitude = numbers[i] & MASK;

        lowest = magnitude < lowest ? magnitude : lowest;
        highest = magnitude > highest ? magnitude : highest;
    }
    if (highest > largest) {
        return 0;
    }
    put_number(encoder, (uint64_t)lowest, MAGNITUDE);
    put_number(encoder, (uint64_t)(highest - lowest), MAGNITUDE);
    copied = start_numbers(&table, highest - lowest, 0);
    for (int64_t i = 0; i < n; i++) {
        int magnitude = numbers[i] & MASK, symbol = (magnitude - lowest) >> copied;

        put_symbol(encoder, &table, symbol);
        count_symbol(&table, symbol);
        put_number(encoder, (uint64_t)(magnitude - lowest), copied);
        if (magnitude || zero_has_sign || highest == 0) {
            put_bit(encoder, sign_of(rows, i), numbers[i] >> MAGNITUDE);
        }
        end_item(&table, i + 1);
    }
    return finish_encoding(encoder);
}

int64_t cfedavg_encode_numbers(uint32_t *words, int64_t room, const uint16_t *numbers, int64_t n,
                               const int64_t *indices, const int64_t *row_ends, int64_t rows, int zero_has_sign,
                               int64_t largest)
{
    Encoder encoder = start_encoding(words, room);
    Rows of;
    int64_t made;

    if (!make_rows(&of, indices, row_ends, rows)) {
        return NO_ROOM;
    }
    made = put_numbers(&encoder, numbers, n, &of, zero_has_sign, largest);
    free(of.signs);
    return made;
}

static int64_t take_numbers(Decoder *decoder, uint16_t *numbers, int64_t n, Rows *rows, int zero_has_sign,
                            int64_t largest)
{
    int lowest = (int)take_number(decoder, MAGNITUDE), spread = (int)take_number(decoder, MAGNITUDE), copied;
    Table table;

    if (lowest + spread > largest) {
        return 0;
    }
    copied = start_numbers(&table, spread, 1);
    for (int64_t i = 0; i < n; i++) {
        int symbol = take_symbol(decoder, &table), magnitude, sign = 0;

        count_symbol(&table, symbol);
        magnitude = lowest + (symbol << copied) + (int)take_number(decoder, copied);
        if (magnitude > largest) {
            return 0;
        }
        if (magnitude || zero_has_sign || lowest + spread == 0) {
            sign = take_bit(decoder, sign_of(rows, i));
        }
        numbers[i] = (uint16_t)(magnitude | sign << MAGNITUDE);
        end_item(&table, i + 1);
    }
    return decoder->position;
}

int64_t cfedavg_decode_numbers(const uint32_t *words, int64_t length, uint16_t *numbers, int64_t n,
                               const int64_t *indices, const int64_t *row_ends, int64_t rows, int zero_has_sign,
                               int64_t largest)
{
    Decoder decoder = start_decoding(words, length);
    Rows of;
    int64_t read;

    if (!make_rows(&of, indices, row_ends, rows)) {
        return NO_ROOM;
    }
    read = take_numbers(&decoder, numbers, n, &of, zero_has_sign, largest);
    free(of.signs);
    return read;
}
