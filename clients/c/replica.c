/* Add the values of messages to a model copy: see src/cfedavg/federate/replica.py. All copies of a version
 * must be bitwise equal, so every operation and its order count. */
#include <float.h>
#include <string.h>

#include "kernels.h"
#include "vectors.h"

#define PART 256 /* values that are added to bf16 numbers at once, for vector instructions */

static const float TOP = FLT_MAX, TOP_BF16 = 0x1.FEp127F;

static float clamp(float value, float most)
{
    value = value > -most ? value : -most;
    return value < most ? value : most;
}

static float number_at(const void *numbers, int format, int64_t i)
{
    if (format == NUMBERS_FLOAT) {
        return ((const float *)numbers)[i];
    }
    return (float)(format == NUMBERS_INT8 ? ((const int8_t *)numbers)[i] : ((const int16_t *)numbers)[i]);
}

/* Return where the run of values with the scale of value i ends, or the array. */
static int64_t end_of_block(int64_t i, int64_t block, int64_t n)
{
    int64_t left = block - i % block;

    return n - i < left ? n : i + left;
}

/* Return a number of the copy after a value is added to it. */
static float add_single(float w, float value)
{
    float total = w + clamp(value, TOP);

    return total != 0 ? total : 0.0F; /* no -0 */
}

int64_t cfedavg_add(float *w, const int64_t *at, int64_t n, const void *numbers, int format,
                    const float *scales, int64_t block, int64_t first, int64_t stop)
{
    int64_t i = first;

    while (i < n) {
        int64_t end = end_of_block(i, block, n);
        float scale = scales[i / block];

        for (; i < end; i++) {
            if ((uint64_t)at[i] >= (uint64_t)stop) {
                return i;
            }
            w[at[i]] = add_single(w[at[i]], number_at(numbers, format, i) * scale);
        }
    }
    return i;
}

float cfedavg_value(const cfedavg_payload *payload, uint64_t i)
{
    uint64_t block = payload->block ? i / payload->block : 0;
    float scale;
    int level;

    switch (payload->kind) {
    case CFEDAVG_FP32:
        return ((const float *)payload->values)[i];
    case CFEDAVG_FP64:
        return (float)((const double *)payload->values)[i];
    case CFEDAVG_BF16:
        return cfedavg_from_bf16(((const uint16_t *)payload->values)[i]);
    case CFEDAVG_PER_LEVEL:
        level = ((const int8_t *)payload->values)[i];
        scale = payload->scales[block * payload->top + (uint64_t)(level < 0 ? -level : level) - 1];
        return level < 0 ? -scale : scale;
    default:
        scale = payload->scales[block];
        return clamp(number_at(payload->values, payload->kind == CFEDAVG_INT8 ? NUMBERS_INT8 : NUMBERS_INT16,
                               (int64_t)i) * scale, TOP);
    }
}

void cfedavg_receive(float *w, const cfedavg_payload *payload)
{
    for (uint64_t i = 0; i < payload->k; i++) {
        int64_t at = payload->indices ? payload->indices[i] : (int64_t)i;

        w[at] = add_single(w[at], cfedavg_value(payload, i));
    }
}

/* Add a value to the bf16 number whose bits are the upper half of `word`; return the bits of the sum. Round to the
 * nearest, ties to even. */
static uint32_t add_one(uint32_t word, float value)
{
    float sum;

    memcpy(&sum, &word, sizeof sum);
    sum = clamp(sum + clamp(value, TOP), TOP_BF16);
    memcpy(&word, &sum, sizeof word);
    word = (word + ((word >> 16) & 1) + 0x7FFF) >> 16;
    return word != 0x8000 ? word : 0; /* no -0 */
}

WIDE_VECTORS static void add_values(uint32_t *words, const float *values, int64_t n)
{
    for (int64_t j = 0; j < n; j++) {
        words[j] = add_one(words[j], values[j]);
    }
}

/* Add n values, at most PART: numbers[first] times the scale and so on, at coordinates `at`. */
static void add_part(uint16_t *w, const int64_t *at, const void *numbers, int format, int64_t first, float scale,
                     int64_t n)
{
    uint32_t words[PART];
    float values[PART] = {0};

    for (int64_t j = 0; j < n; j++) {
        words[j] = (uint32_t)w[at[j]] << 16;
        values[j] = number_at(numbers, format, first + j) * scale;
    }
    add_values(words, values, n);
    for (int64_t j = 0; j < n; j++) {
        w[at[j]] = (uint16_t)words[j];
    }
}

int64_t cfedavg_add_to_bf16(uint16_t *w, const int64_t *at, int64_t n, const void *numbers, int format,
                            const float *scales, int64_t block, int64_t first, int64_t stop)
{
    int64_t i = first;

    while (i < n && (uint64_t)at[i] < (uint64_t)stop) {
        int64_t end = end_of_block(i, block, n);

        end = end - i < PART ? end : i + PART;
        while (at[end - 1] >= stop) {
            end--;
        }
        add_part(w, at + i, numbers, format, i, scales[i / block], end - i);
        i = end;
    }
    return i;
}

void cfedavg_receive_bf16(uint16_t *w, const cfedavg_payload *payload)
{
    for (uint64_t i = 0; i < payload->k; i++) {
        int64_t at = payload->indices ? payload->indices[i] : (int64_t)i;

        w[at] = (uint16_t)add_one((uint32_t)w[at] << 16, cfedavg_value(payload, i));
    }
}
