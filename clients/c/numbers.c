/* Keyed random numbers, sums of squares, and rounding: see src/cfedavg/core/keys.py and arrays.py. */
#include <math.h>
#include <string.h>

#include "kernels.h"

#define GOLDEN 0x9E3779B97F4A7C15U

static const float LARGEST_BF16 = 0x1.FEp127F;

int cfedavg_kernels(void)
{
    return KERNELS;
}

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
}

uint64_t cfedavg_bits53(int64_t key, uint64_t coordinate)
{
    return mix((uint64_t)key + (coordinate + 1) * GOLDEN) >> 11;
}

int64_t cfedavg_key(uint64_t seed, uint64_t round, uint64_t client, uint64_t purpose)
{
    const uint64_t parts[] = {seed, round, client, purpose};
    uint64_t word = 0;
    int64_t key;

    for (int i = 0; i < 4; i++) {
        word = mix((word ^ parts[i]) + GOLDEN);
    }
    memcpy(&key, &word, sizeof key);
    return key;
}

uint64_t cfedavg_draw(int64_t key, uint64_t keep, uint64_t d, int64_t *indices, uint64_t room)
{
    return (uint64_t)cfedavg_draw_into(key, (int64_t)keep, (int64_t)d, indices, (int64_t)room);
}

int64_t cfedavg_draw_into(int64_t key, int64_t keep, int64_t d, int64_t *indices, int64_t room)
{
    int64_t n = 0;

    for (int64_t j = 0; j < d; j++) {
        if ((int64_t)cfedavg_bits53(key, (uint64_t)j) < keep) {
            if (n < room) {
                indices[n] = j;
            }
            n++;
        }
    }
    return n;
}

/* Add squares to eight sums in turn: the same bits on every machine and for any number of threads. */
double cfedavg_squares(const void *values, int size, int64_t n)
{
    const float *singles = values;
    const double *doubles = values;
    double s[8] = {0.0};
    int64_t end = n / 8 * 8;

    for (int64_t i = 0; i < end; i += 8) {
        for (int j = 0; j < 8; j++) {
            double value = size == 4 ? (double)singles[i + j] : doubles[i + j];

            s[j] += value * value;
        }
    }
    for (int64_t i = end; i < n; i++) {
        double value = size == 4 ? (double)singles[i] : doubles[i];

        s[0] += value * value;
    }
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

double cfedavg_norm2(const float *values, uint64_t n)
{
    return cfedavg_squares(values, 4, (int64_t)n);
}

uint16_t cfedavg_to_bf16(float value)
{
    uint32_t bits;

    value = fminf(fmaxf(value, -LARGEST_BF16), LARGEST_BF16);
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16);
}

float cfedavg_from_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &wide, sizeof value);
    return value;
}

/* The scale of a block is its largest magnitude divided by `top`; a level is the nearest multiple of it. */
void cfedavg_to_levels(const float *values, uint64_t n, uint32_t block, int top, int8_t *levels, float *scales)
{
    for (uint64_t start = 0; block && start < n; start += block) {
        uint64_t end = n - start < block ? n : start + block;
        double largest = 0.0, scale;

        for (uint64_t i = start; i < end; i++) {
            largest = fmax(largest, fabs((double)values[i]));
        }
        *scales = (float)(largest / top);
        scale = (double)*scales++;
        for (uint64_t i = start; i < end; i++) {
            double step = scale > 0 ? (double)values[i] / scale : copysign(values[i] != 0, (double)values[i]) * top;

            levels[i] = (int8_t)fmin(fmax(rint(step), -top), top);
        }
    }
}
