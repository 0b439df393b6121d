/* Values in another basis: see docs/wire.md and src/cfedavg/core/bases.py. All receivers must compute the same bits,
 * so every operation and its order count. */
#include "bases.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "allocate.h"
#include "frame.h"
#include "layout.h"

void make_rows_of(ValueRows *rows, const cfedavg_layout *layout, const cfedavg_payload *payload)
{
    int64_t k = (int64_t)payload->k;

    if (is_basis(payload->where)) {
        rows->one[0] = rows->one[1] = 1;
        rows->one[2] = rows->one[3] = k;
        rows->shapes = rows->one;
        rows->ends = rows->one + 3;
        rows->tensors = rows->n = 1;
    } else {
        rows->shapes = layout->shapes;
        rows->tensors = layout->tensors;
        rows->ends = layout->row_ends;
        rows->n = layout->rows;
    }
}

/* Return how many outer products a tensor of this shape is, or 0 if it is sent as it is. */
static int64_t rank_of(const int64_t shape[3], uint32_t rank)
{
    int64_t rows = shape[0], columns = shape[1] * shape[2], own = rows < columns ? rows : columns;

    own = own < rank ? own : rank;
    /* (rows + columns) own < rows columns, where the product may be as large as 2^56 */
    return own <= rows * columns / (rows + columns) && (rows + columns) * own < rows * columns ? own : 0;
}

/* Return the length of a block of so many numbers with zeros: the next power of two. */
static uint64_t fill(uint64_t numbers)
{
    uint64_t n = 1;

    while (n < numbers) {
        n <<= 1;
    }
    return n;
}

uint64_t cfedavg_count(const cfedavg_layout *layout, int where, uint32_t rotated, uint32_t rank)
{
    uint64_t d = (uint64_t)layout->d, count = 0;

    if (where == CFEDAVG_ROTATED && rotated) {
        return d % rotated ? d - d % rotated + fill(d % rotated) : d;
    }
    if (where != CFEDAVG_FACTORED) {
        return d;
    }
    for (int64_t tensor = 0; tensor < layout->tensors; tensor++) {
        const int64_t *shape = layout->shapes + 3 * tensor;
        int64_t own = rank_of(shape, rank), columns = shape[1] * shape[2];

        count += (uint64_t)(own ? (shape[0] + columns) * own : shape[0] * columns);
    }
    return count;
}

int check_basis(const cfedavg_layout *layout, const cfedavg_payload *payload)
{
    if (payload->where == CFEDAVG_ROTATED && (payload->rotated == 0 || (payload->rotated & (payload->rotated - 1)))) {
        return CFEDAVG_WRONG_ROTATION;
    }
    if (payload->where == CFEDAVG_FACTORED && payload->rank == 0) {
        return CFEDAVG_WRONG_RANK;
    }
    return payload->k == cfedavg_count(layout, payload->where, payload->rotated, payload->rank) ? CFEDAVG_OK
                                                                                               : CFEDAVG_OTHER_BASIS;
}

static double value_at(const cfedavg_payload *payload, uint64_t i)
{
    return payload->kind == CFEDAVG_FP64 ? ((const double *)payload->values)[i] : (double)cfedavg_value(payload, i);
}

/* Store number j of the vector, rounded to fp32 unless the values are fp64. */
static void store(cfedavg_payload *vector, int64_t j, double number)
{
    if (vector->kind == CFEDAVG_FP64) {
        ((double *)vector->values)[j] = number;
        return;
    }
    number = number > -FLT_MAX ? number : -FLT_MAX;
    ((float *)vector->values)[j] = (float)(number < FLT_MAX ? number : FLT_MAX);
}

/* Replace v by its Walsh-Hadamard transform. */
static void transform(double *v, uint64_t n)
{
    for (uint64_t step = 1; step < n; step *= 2) {
        for (uint64_t start = 0; start < n; start += 2 * step) {
            for (uint64_t i = start; i < start + step; i++) {
                double a = v[i], b = v[i + step];

                v[i] = a + b;
                v[i + step] = a - b;
            }
        }
    }
}

static int turn_back(const cfedavg_payload *payload, cfedavg_payload *vector)
{
    uint64_t d = payload->d, width = payload->rotated, from = 0;
    double *v = allocate(width < d ? width : fill(d), sizeof *v);

    if (!v) {
        return CFEDAVG_NO_MEMORY;
    }
    for (uint64_t start = 0; start < d; start += width) {
        uint64_t numbers = d - start < width ? d - start : width, n = fill(numbers);
        double share = sqrt(1 / (double)n);

        for (uint64_t i = 0; i < n; i++) {
            v[i] = value_at(payload, from + i);
        }
        transform(v, n);
        for (uint64_t i = 0; i < numbers; i++) {
            double number = v[i] * share;

            store(vector, (int64_t)(start + i),
                  cfedavg_bits53(payload->key, start + i) & 1 ? -number : number);
        }
        from += n;
    }
    free(v);
    return CFEDAVG_OK;
}

/* Store P Q^T, one product after another; `from` is the first value of P. Return the first value after Q. */
static uint64_t multiply(const cfedavg_payload *payload, uint64_t from, int64_t rows, int64_t columns, int64_t rank,
                         cfedavg_payload *vector, int64_t to)
{
    uint64_t of_q = from + (uint64_t)(rows * rank);

    for (int64_t a = 0; a < rows; a++) {
        for (int64_t b = 0; b < columns; b++) {
            double total = value_at(payload, from + (uint64_t)(a * rank)) * value_at(payload, of_q + (uint64_t)(b * rank));

            for (int64_t i = 1; i < rank; i++) {
                total += value_at(payload, from + (uint64_t)(a * rank + i)) *
                         value_at(payload, of_q + (uint64_t)(b * rank + i));
            }
            store(vector, to++, total);
        }
    }
    return of_q + (uint64_t)(columns * rank);
}

static void multiply_all(const cfedavg_layout *layout, const cfedavg_payload *payload, cfedavg_payload *vector)
{
    uint64_t from = 0;
    int64_t to = 0;

    for (int64_t tensor = 0; tensor < layout->tensors; tensor++) {
        const int64_t *shape = layout->shapes + 3 * tensor;
        int64_t columns = shape[1] * shape[2], size = shape[0] * columns, own = rank_of(shape, payload->rank);

        if (own) {
            from = multiply(payload, from, shape[0], columns, own, vector, to);
        }
        for (int64_t j = 0; j < size && !own; j++) {
            store(vector, to + j, value_at(payload, from++));
        }
        to += size;
    }
}

int cfedavg_expand(const cfedavg_layout *layout, const cfedavg_payload *payload, cfedavg_payload *expanded)
{
    cfedavg_payload vector = {0};
    int error = CFEDAVG_OK;

    if (!is_basis(payload->where) || payload->d != (uint64_t)layout->d || check_basis(layout, payload)) {
        return CFEDAVG_BAD_ARGUMENT;
    }
    vector.d = vector.k = payload->d;
    vector.where = CFEDAVG_ALL;
    vector.kind = payload->kind == CFEDAVG_FP64 ? CFEDAVG_FP64 : CFEDAVG_FP32;
    vector.values = allocate(vector.k, (size_t)size_of(vector.kind));
    if (!vector.values) {
        return CFEDAVG_NO_MEMORY;
    }
    if (payload->where == CFEDAVG_ROTATED) {
        error = turn_back(payload, &vector);
    } else {
        multiply_all(layout, payload, &vector);
    }
    if (error) {
        cfedavg_free_payload(&vector);
        return error;
    }
    *expanded = vector;
    return CFEDAVG_OK;
}
