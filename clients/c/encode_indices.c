/* The section of listed coordinates: see docs/wire.md and src/cfedavg/wire/indices.py. */
#include <math.h>
#include <string.h>

#include "allocate.h"
#include "kernels.h"
#include "sets.h"

/* The sent coordinates of one tensor as rows, columns and positions in the group where these meet. */
typedef struct {
    int64_t n;
    int64_t depth;
    uint32_t *row;
    uint32_t *column;
    int64_t *inner;
    int64_t *position; /* in the coordinate's block; blocks follow each other */
    Lines rows;
    Lines columns;
    int64_t sent[BANDS * BANDS]; /* of each block */
} Tensor;

static int make_tensor(Tensor *tensor, int64_t n, const int64_t shape[3])
{
    uint64_t room = (uint64_t)n;
    int rows = make_lines(&tensor->rows, shape[0]), columns = make_lines(&tensor->columns, shape[1]);

    tensor->n = n;
    tensor->depth = shape[2];
    tensor->row = allocate(room, sizeof *tensor->row);
    tensor->column = allocate(room, sizeof *tensor->column);
    tensor->inner = allocate(room, sizeof *tensor->inner);
    tensor->position = allocate(room, sizeof *tensor->position);
    if (rows || columns || !tensor->row || !tensor->column || !tensor->inner || !tensor->position) {
        return NO_MEMORY;
    }
    return FINE;
}

static void free_tensor(Tensor *tensor)
{
    free_lines(&tensor->rows);
    free_lines(&tensor->columns);
    free(tensor->row);
    free(tensor->column);
    free(tensor->inner);
    free(tensor->position);
}

/* Compute the row, the column and the place within of each index. The tensor begins at `start`. */
static void locate(Tensor *tensor, const int64_t *indices, int64_t start)
{
    int64_t depth = tensor->depth, width = tensor->columns.n * depth, row_start = start;
    uint32_t row = 0;

    for (int64_t i = 0; i < tensor->n; i++) {
        int64_t offset, column;

        while (indices[i] >= row_start + width) { /* faster than a division */
            row++;
            row_start += width;
        }
        offset = indices[i] - row_start;
        column = depth > 1 ? offset / depth : offset;
        tensor->row[i] = row;
        tensor->column[i] = (uint32_t)column;
        tensor->inner[i] = offset - column * depth;
    }
}

static int block_of(const Tensor *tensor, int64_t i)
{
    return tensor->rows.band[tensor->row[i]] * BANDS + tensor->columns.band[tensor->column[i]];
}

static void count_sent(Tensor *tensor)
{
    memset(tensor->sent, 0, sizeof tensor->sent);
    for (int64_t i = 0; i < tensor->n; i++) {
        tensor->sent[block_of(tensor, i)]++;
    }
}

/* Encode each block: how many of its coordinates are sent, then their positions. */
static void put_blocks(Encoder *encoder, Tensor *tensor, Context *contexts)
{
    int64_t ends[BANDS * BANDS], end = 0;

    count_sent(tensor);
    sort_lines(&tensor->rows);
    sort_lines(&tensor->columns);
    for (int block = 0; block < BANDS * BANDS; block++) {
        ends[block] = end;
        end += tensor->sent[block];
    }
    for (int64_t i = 0; i < tensor->n; i++) {
        uint32_t column = tensor->column[i];
        int64_t width = tensor->columns.size[tensor->columns.band[column]];
        int64_t cell = tensor->rows.rank[tensor->row[i]] * width + tensor->columns.rank[column];

        tensor->position[ends[block_of(tensor, i)]++] = cell * tensor->depth + tensor->inner[i];
    }
    for (int x = 1; x < BANDS; x++) {
        for (int y = 1; y < BANDS; y++) {
            int64_t size = tensor->rows.size[x] * tensor->columns.size[y] * tensor->depth;
            int64_t n = tensor->sent[x * BANDS + y];

            if (size) {
                put_count(encoder, contexts, (uint64_t)n);
                put_set(encoder, tensor->position + ends[x * BANDS + y] - n, n, 0, size);
            }
        }
    }
}

/* Encode a tensor by the bands that cost the fewest bits. */
static int put_bands_and_blocks(Encoder *encoder, Tensor *tensor, Context *contexts, const int64_t *indices,
                                int64_t start)
{
    Lines *rows = &tensor->rows, *columns = &tensor->columns;
    int mode;

    locate(tensor, indices, start);
    if (assign_bands(rows, tensor->row, tensor->n) || assign_bands(columns, tensor->column, tensor->n)) {
        return NO_MEMORY;
    }
    count_sent(tensor);
    mode = choose_mode(rows, columns, tensor->sent, tensor->depth);
    put_number(encoder, (uint64_t)mode, 2);
    if (mode == 0) {
        put_set(encoder, indices, tensor->n, start, rows->n * columns->n * tensor->depth);
        return FINE;
    }
    if (mode & BY_ROWS) {
        put_bands(encoder, rows);
    } else {
        use_one_band(rows);
    }
    if (mode & BY_COLUMNS) {
        put_bands(encoder, columns);
    } else {
        use_one_band(columns);
    }
    put_blocks(encoder, tensor, contexts);
    return FINE;
}

/* Encode `indices`, the n > 0 sent coordinates of one tensor, whose first coordinate is `start`. */
static int put_tensor(Encoder *encoder, Context *contexts, const int64_t *indices, int64_t n, int64_t start,
                      const int64_t shape[3])
{
    Tensor tensor;
    int fault;

    if (shape[0] * shape[1] == 1) {
        put_set(encoder, indices, n, start, shape[2]);
        return FINE;
    }
    fault = make_tensor(&tensor, n, shape);
    if (!fault) {
        fault = put_bands_and_blocks(encoder, &tensor, contexts, indices, start);
    }
    free_tensor(&tensor);
    return fault;
}

static int put_tensors(Encoder *encoder, const int64_t *indices, int64_t n, const int64_t *shapes,
                       int64_t tensors)
{
    Context of_tensors[COUNT_CONTEXTS], of_blocks[COUNT_CONTEXTS];
    int64_t start = 0, a = 0;

    reset_contexts(of_tensors, COUNT_CONTEXTS);
    reset_contexts(of_blocks, COUNT_CONTEXTS);
    put_number(encoder, 1, 1);
    for (int64_t tensor = 0; tensor < tensors; tensor++) {
        const int64_t *shape = shapes + 3 * tensor;
        int64_t end = start + shape[0] * shape[1] * shape[2], b = a;

        while (b < n && indices[b] < end) {
            b++;
        }
        put_count(encoder, of_tensors, (uint64_t)(b - a));
        if (b > a && put_tensor(encoder, of_blocks, indices + a, b - a, start, shape)) {
            return NO_MEMORY;
        }
        start = end;
        a = b;
    }
    return FINE;
}

int64_t cfedavg_encode_indices(uint32_t *words, int64_t room, const int64_t *indices, int64_t n, int64_t d,
                               const int64_t *shapes, int64_t tensors)
{
    Encoder encoder = start_encoding(words, room);
    double bits;

    if (put_tensors(&encoder, indices, n, shapes, tensors)) {
        return NO_ROOM;
    }
    bits = 32.0 * (double)encoder.position + 64.0 - log2((double)encoder.span); /* so far, approximately */
    if (bits < cost_of_set(d, n)) {
        return finish_encoding(&encoder);
    }
    encoder = start_encoding(words, room);
    put_number(&encoder, 0, 1);
    put_set(&encoder, indices, n, 0, d);
    return finish_encoding(&encoder);
}

int cfedavg_are_increasing(const int64_t *indices, int64_t n, int64_t d)
{
    int64_t before = -1;

    for (int64_t i = 0; i < n; i++) {
        if (indices[i] <= before) {
            return 0;
        }
        before = indices[i];
    }
    return before < d;
}
