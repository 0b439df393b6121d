/* The k largest magnitudes of a vector: see src/cfedavg/compress/numerics.py, which explains the method.
 *
 * Magnitudes are compared by their bits: read as integers, these have the same order.
 */
#include <math.h>
#include <string.h>

#include "allocate.h"
#include "kernels.h"
#include "vectors.h"

#define BINS 13     /* the leading bits that decide an entry's bin */
#define LINE 16     /* entries that are sampled together: a cache line */
#define SAMPLES 256 /* lines that are sampled */
#define DIGIT 11    /* bits of one step of the radix select */
#define PART 4096   /* entries that `cfedavg_collect` compares at once, for vector instructions */

static uint64_t bits_at(const void *bits, int size, int64_t i)
{
    return size == 4 ? ((const uint32_t *)bits)[i] : ((const uint64_t *)bits)[i];
}

/* Count LINE of every `stride` entries in bins by their leading bits; return how many were counted. */
static int64_t count_sample(int64_t *bins, const void *bits, int size, int64_t d, int64_t stride, int shift)
{
    int64_t seen = 0;

    for (int64_t start = 0; start < d; start += stride) {
        int64_t end = start + LINE < d ? start + LINE : d;

        for (int64_t i = start; i < end; i++) {
            bins[(bits_at(bits, size, i) >> shift) & ((1 << BINS) - 1)]++;
        }
        seen += end - start;
    }
    return seen;
}

/* Return a bound, the bits of a magnitude that about k entries reach; with stride = LINE, at least k. */
int64_t cfedavg_find_bound(const void *bits, int size, int64_t d, int64_t k, int64_t stride, int64_t slack,
                           int width)
{
    int64_t bins[1 << BINS] = {0}, edge = 1 << BINS, seen, wanted = k;

    seen = count_sample(bins, bits, size, d, stride, width - BINS);
    if (seen != d) {
        double share = (double)(k * seen) / (double)d;

        wanted = slack * ((int64_t)(share + 3 * sqrt(share)) + 4);
    }
    while (edge > 0 && wanted > 0) {
        edge--;
        wanted -= bins[edge];
    }
    return edge << (width - BINS);
}

/* reached[i] says whether entry i is not below the bound; "not below", so that NaN counts. */
WIDE_VECTORS static void compare_fp32(uint8_t *reached, const float *values, int64_t n, float bound)
{
    for (int64_t i = 0; i < n; i++) {
        reached[i] = !(fabsf(values[i]) < bound);
    }
}

WIDE_VECTORS static void compare_fp64(uint8_t *reached, const double *values, int64_t n, double bound)
{
    for (int64_t i = 0; i < n; i++) {
        reached[i] = !(fabs(values[i]) < bound);
    }
}

/* Fill `found` with the indices of entries whose magnitude is not below `bound`; return their number. `found` must
 * have room for 8 more indices than there are entries. */
int64_t cfedavg_collect(const void *values, int size, int64_t d, double bound, int64_t *found)
{
    uint8_t reached[PART];
    int64_t n = 0;

    for (int64_t start = 0; start < d; start += PART) {
        int64_t count = d - start < PART ? d - start : PART;

        if (count < PART) {
            memset(reached, 0, sizeof reached);
        }
        if (size == 4) {
            compare_fp32(reached, (const float *)values + start, count, (float)bound);
        } else {
            compare_fp64(reached, (const double *)values + start, count, bound);
        }
        for (int64_t eight = 0; eight < count; eight += 8) {
            uint64_t any;

            memcpy(&any, reached + eight, sizeof any);
            if (any) {
                for (int64_t i = eight; i < eight + 8; i++) {
                    found[n] = start + i; /* overwritten next if reached[i] is 0; a branch would be slower */
                    n += reached[i];
                }
            }
        }
    }
    return n;
}

/* Return the `wanted`-th largest magnitude, and in *ties how many entries that equal it are wanted.
 *
 * The result is known down to bit `below`. Of the entries with the same bits down to there, the `wanted`
 * largest belong to the k largest.
 */
static int64_t select_smallest(const int64_t *magnitudes, int64_t n, int width, int64_t wanted, int64_t *ties)
{
    int64_t smallest = 0;
    int below = width;

    while (below > 0) {
        int digit = below < DIGIT ? below : DIGIT, above = below;
        int64_t bins[1 << DIGIT] = {0}, edge = (1 << digit) - 1;

        below -= digit;
        for (int64_t i = 0; i < n; i++) {
            if (magnitudes[i] >> above == smallest >> above) {
                bins[(magnitudes[i] >> below) & edge]++;
            }
        }
        while (edge > 0 && wanted > bins[edge]) {
            wanted -= bins[edge];
            edge--;
        }
        smallest |= edge << below;
    }
    *ties = wanted;
    return smallest;
}

/* Fill `indices` with the k of `found` that have the largest magnitudes; return the largest's bits. */
int64_t cfedavg_pick(const void *bits, int size, const int64_t *found, int64_t n, int width, int64_t *indices,
                     int64_t k)
{
    int64_t *magnitudes = allocate((uint64_t)n, sizeof *magnitudes), top = 0, smallest, ties, at = 0;

    if (!magnitudes) {
        return NO_ROOM;
    }
    for (int64_t i = 0; i < n; i++) {
        magnitudes[i] = (int64_t)(bits_at(bits, size, found[i]) & (((uint64_t)1 << width) - 1));
        top = magnitudes[i] > top ? magnitudes[i] : top;
    }
    smallest = select_smallest(magnitudes, n, width, k, &ties);
    for (int64_t i = 0; i < n && at < k; i++) {
        int equal = (magnitudes[i] == smallest) & (ties > 0);

        indices[at] = found[i]; /* overwritten next if it is not taken; a branch would be slower */
        at += (magnitudes[i] > smallest) | equal;
        ties -= equal;
    }
    free(magnitudes);
    return top;
}

/* Turn the bits of a magnitude into the number. */
static double number_of(int64_t bits, int size)
{
    uint32_t narrow = (uint32_t)bits;
    float single;
    double wide;

    memcpy(&single, &narrow, sizeof single);
    memcpy(&wide, &bits, sizeof wide);
    return size == 4 ? (double)single : wide;
}

/* Collect at least k entries that hold the k largest: first by a sample, at last by a count of all. */
static int64_t collect_enough(const void *values, int size, int64_t d, int64_t k, int64_t *found)
{
    int64_t sampled = d / SAMPLES > LINE ? d / SAMPLES : LINE, n = 0;
    const int64_t strides[] = {sampled, sampled, LINE}, slacks[] = {1, 2, 1};

    for (int i = 0; i < 3 && (i == 0 || n < k); i++) {
        int64_t bound = cfedavg_find_bound(values, size, d, k, strides[i], slacks[i], 8 * size - 1);

        n = cfedavg_collect(values, size, d, number_of(bound, size), found);
    }
    return n;
}

int cfedavg_find_largest(const void *values, int kind, uint64_t d, uint64_t k, int64_t *indices)
{
    int size = kind == CFEDAVG_FP64 ? 8 : 4;
    int64_t *found, n, top, infinity = size == 4 ? (int64_t)0x7F800000 : (int64_t)0x7FF0000000000000;

    if ((kind != CFEDAVG_FP32 && kind != CFEDAVG_FP64) || k < 1 || k > d || d > (uint64_t)MOST_CELLS) {
        return CFEDAVG_BAD_ARGUMENT;
    }
    found = allocate(d + 8, sizeof *found);
    if (!found) {
        return CFEDAVG_NO_MEMORY;
    }
    n = collect_enough(values, size, (int64_t)d, (int64_t)k, found);
    top = cfedavg_pick(values, size, found, n, 8 * size - 1, indices, (int64_t)k);
    free(found);
    if (top == NO_ROOM) {
        return CFEDAVG_NO_MEMORY;
    }
    return top < infinity ? CFEDAVG_OK : CFEDAVG_NOT_FINITE;
}
