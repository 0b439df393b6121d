#include "sets.h"

#include <math.h>
#include <string.h>

#include "allocate.h"

#define STEPS 16  /* symbols: 0 to 14 end a gap after so many steps; 15 means that the gap goes on */
#define TRUST 256 /* the first table has the weight of so many coded gaps */

/* Start the table for the gaps between n of `size` positions; return the bits of a step.
 *
 * The counts are those that TRUST gaps between random positions would give on average.
 */
static int start_gaps(Table *table, int64_t size, int64_t n, int decodes)
{
    int step = 0;
    int64_t empty, left = (int64_t)TRUST * SEEN << 30;

    while ((size / n) >> (step + 2)) {
        step++;
    }
    while (size >> 31) { /* keeps the products below 2^63 */
        size >>= 1;
        n = (n + 1) >> 1 < size ? (n + 1) >> 1 : size;
    }
    empty = ((size - n) << 30) / size;
    for (int i = 0; i < step; i++) {
        empty = (empty * empty) >> 30;
    }
    table->symbols = STEPS;
    for (int s = 0; s < STEPS - 1; s++) {
        int64_t further = (left >> 30) * empty, count = (left - further) >> 30;

        table->counts[s] = count > 1 ? count : 1;
        left = further;
    }
    table->counts[STEPS - 1] = left >> 30 > 1 ? left >> 30 : 1;
    start_table(table, decodes);
    return step;
}

/* Encode n increasing positions from `start` to start + size - 1. The decoder must know n. */
void put_set(Encoder *encoder, const int64_t *positions, int64_t n, int64_t start, int64_t size)
{
    Table table;
    int step;
    int64_t following = start;

    if (n == 0 || n == size) {
        return;
    }
    step = start_gaps(&table, size, n, 0);
    for (int64_t i = 0; i < n; i++) {
        int64_t gap = positions[i] - following, steps = gap >> step;

        following = positions[i] + 1;
        while (steps >= STEPS - 1) {
            put_symbol(encoder, &table, STEPS - 1);
            table.counts[STEPS - 1] += SEEN;
            steps -= STEPS - 1;
        }
        put_symbol(encoder, &table, (int)steps);
        table.counts[steps] += SEEN;
        put_number(encoder, (uint64_t)gap, step);
        end_item(&table, i + 1);
    }
}

/* Fill `positions`, which count from 0; return BEYOND if one is `size` or more. */
int take_set(Decoder *decoder, int64_t *positions, int64_t n, int64_t size)
{
    Table table;
    int step;
    int64_t following = 0;

    if (n == 0 || n == size) {
        for (int64_t i = 0; i < n; i++) {
            positions[i] = i;
        }
        return FINE;
    }
    step = start_gaps(&table, size, n, 1);
    for (int64_t i = 0; i < n; i++) {
        int symbol = take_symbol(decoder, &table);

        table.counts[symbol] += SEEN;
        while (symbol == STEPS - 1) {
            following += (int64_t)(STEPS - 1) << step;
            if (following >= size) {
                return BEYOND;
            }
            symbol = take_symbol(decoder, &table);
            table.counts[symbol] += SEEN;
        }
        positions[i] = following + ((int64_t)symbol << step) + (int64_t)take_number(decoder, step);
        following = positions[i] + 1;
        if (following > size) {
            return BEYOND;
        }
        end_item(&table, i + 1);
    }
    return FINE;
}

/* Allocate for n lines; return FINE or NO_MEMORY. The caller must call `free_lines` in both cases. */
int make_lines(Lines *lines, int64_t n)
{
    memset(lines, 0, sizeof *lines);
    lines->n = n;
    lines->band = allocate((uint64_t)n, sizeof *lines->band);
    lines->rank = allocate((uint64_t)n, sizeof *lines->rank);
    lines->order = allocate((uint64_t)n, sizeof *lines->order);
    return lines->band && lines->rank && lines->order ? FINE : NO_MEMORY;
}

void free_lines(Lines *lines)
{
    free(lines->band);
    free(lines->rank);
    free(lines->order);
}

/* Give each line a band by how many of the n sent coordinates it has; line[i] is the line of coordinate i. */
int assign_bands(Lines *lines, const uint32_t *line, int64_t n)
{
    int64_t used = 0, *sent = allocate((uint64_t)lines->n, sizeof *sent);

    if (!sent) {
        return NO_MEMORY;
    }
    for (int64_t i = 0; i < n; i++) {
        used += sent[line[i]]++ == 0;
    }
    memset(lines->size, 0, sizeof lines->size);
    for (int64_t i = 0; i < lines->n; i++) {
        int64_t share = sent[i] * used; /* share / n is what line i sends, divided by the mean of used lines */
        int above = (2 * share >= n) + (share >= n) + (share >= 2 * n);

        lines->band[i] = (uint8_t)(share == 0 ? 0 : 1 + above);
        lines->size[lines->band[i]]++;
    }
    free(sent);
    return FINE;
}

/* Put all lines into band 1, which is the rule for lines without bands. */
void use_one_band(Lines *lines)
{
    memset(lines->band, 1, (size_t)lines->n);
}

/* Compute size, rank, start and order from the bands. */
void sort_lines(Lines *lines)
{
    int64_t start = 0;

    memset(lines->size, 0, sizeof lines->size);
    for (int64_t i = 0; i < lines->n; i++) {
        lines->rank[i] = (uint32_t)lines->size[lines->band[i]]++;
    }
    for (int band = 0; band < BANDS; band++) {
        lines->start[band] = start;
        start += lines->size[band];
    }
    for (int64_t i = 0; i < lines->n; i++) {
        lines->order[lines->start[lines->band[i]] + lines->rank[i]] = (uint32_t)i;
    }
}

/* The bits of a band say whether it is 0, 1, 2, 3. Their probabilities depend on the band before. */
void put_bands(Encoder *encoder, const Lines *lines)
{
    Context contexts[BAND_CONTEXTS];
    int before = 0;

    reset_contexts(contexts, BAND_CONTEXTS);
    for (int64_t i = 0; i < lines->n; i++) {
        int band = lines->band[i];

        for (int each = 0; each <= band && each < BANDS - 1; each++) {
            put_bit(encoder, &contexts[before * (BANDS - 1) + each], each == band);
        }
        before = band;
    }
}

void take_bands(Decoder *decoder, Lines *lines)
{
    Context contexts[BAND_CONTEXTS];
    int before = 0;

    reset_contexts(contexts, BAND_CONTEXTS);
    for (int64_t i = 0; i < lines->n; i++) {
        int band = 0;

        while (band < BANDS - 1 && !take_bit(decoder, &contexts[before * (BANDS - 1) + band])) {
            band++;
        }
        lines->band[i] = (uint8_t)band;
        before = band;
    }
}

/* The approximate number of bits of a set. This and the next two functions choose the bands, so their
 * operations and their order are those of src/cfedavg/wire/sets.py: the bytes of a message depend on them. */
double cost_of_set(int64_t size, int64_t n)
{
    int64_t rest = size - n;

    if (n <= 0 || n >= size) {
        return 0.0;
    }
    return (double)n * log2((double)size / (double)n) + (double)rest * log2((double)size / (double)rest);
}

static double cost_of_bands(const Lines *lines)
{
    double bits = 16.0;

    for (int band = 0; band < BANDS; band++) {
        if (lines->size[band]) {
            double size = (double)lines->size[band];

            bits += size * log2((double)lines->n / size);
        }
    }
    return bits;
}

/* Return which bands take the fewest bits. sent[x * BANDS + y] counts the coordinates of a block. */
int choose_mode(const Lines *rows, const Lines *columns, const int64_t sent[BANDS * BANDS], int64_t depth)
{
    double by_rows = cost_of_bands(rows), by_columns = cost_of_bands(columns), both = by_rows + by_columns;
    double best;
    int64_t n = 0;

    for (int block = 0; block < BANDS * BANDS; block++) {
        n += sent[block];
    }
    for (int x = 1; x < BANDS; x++) {
        int64_t in_rows = 0, in_columns = 0;

        for (int y = 1; y < BANDS; y++) {
            both += 8 + cost_of_set(rows->size[x] * columns->size[y] * depth, sent[x * BANDS + y]);
            in_rows += sent[x * BANDS + y];
            in_columns += sent[y * BANDS + x];
        }
        by_rows += 8 + cost_of_set(rows->size[x] * columns->n * depth, in_rows);
        by_columns += 8 + cost_of_set(rows->n * columns->size[x] * depth, in_columns);
    }
    best = fmin(fmin(cost_of_set(rows->n * columns->n * depth, n), by_rows), fmin(by_columns, both));
    if (best == both) {
        return BY_ROWS | BY_COLUMNS;
    }
    return best == by_rows ? BY_ROWS : best == by_columns ? BY_COLUMNS : 0;
}
