/* The section of listed coordinates: see docs/wire.md and src/cfedavg/wire/indices.py. */
#include "allocate.h"
#include "bits.h"
#include "kernels.h"
#include "sets.h"

/* What a tensor of the message has: its bands, and a bit for each coordinate that is sent. */
typedef struct {
    Lines rows;
    Lines columns;
    int64_t depth;
    uint64_t *sent;
} Tensor;

/* Set the bits of the coordinates that `block` holds, which is where row band x and column band y meet. */
static void mark_block(const Tensor *tensor, const int64_t *block, int64_t n, int x, int y)
{
    const Lines *columns = &tensor->columns;
    int64_t depth = tensor->depth, width = columns->size[y] * depth, row_first = 0;
    const uint32_t *row = tensor->rows.order + tensor->rows.start[x];

    for (int64_t i = 0; i < n; i++) {
        int64_t offset, column, position;

        while (block[i] >= row_first + width) {
            row++;
            row_first += width;
        }
        offset = block[i] - row_first;
        column = depth > 1 ? offset / depth : offset;
        position = (int64_t)*row * columns->n + columns->order[columns->start[y] + column];
        position = position * depth + offset - column * depth;
        tensor->sent[position >> 6] |= (uint64_t)1 << (position & 63);
    }
}

/* Decode all blocks of a tensor; `positions` is scratch memory for its n coordinates. */
static int take_blocks(Decoder *decoder, Context *contexts, Tensor *tensor, int64_t *positions, int64_t n)
{
    int64_t a = 0;

    sort_lines(&tensor->rows);
    sort_lines(&tensor->columns);
    for (int x = 1; x < BANDS; x++) {
        for (int y = 1; y < BANDS; y++) {
            int64_t size = tensor->rows.size[x] * tensor->columns.size[y] * tensor->depth, count;

            if (size == 0) {
                continue;
            }
            count = (int64_t)take_count(decoder, contexts);
            if (count > size || count > n - a) {
                return OTHER_NUMBER;
            }
            if (take_set(decoder, positions + a, count, size)) {
                return BEYOND;
            }
            mark_block(tensor, positions + a, count, x, y);
            a += count;
        }
    }
    return a < n ? OTHER_NUMBER : FINE;
}

static void take_or_use_one(Decoder *decoder, Lines *lines, int has_bands)
{
    if (has_bands) {
        take_bands(decoder, lines);
    } else {
        use_one_band(lines);
    }
}

/* Decode a tensor with bands. Its size in cells is that of the model, so the bits are no surprise. */
static int take_banded(Decoder *decoder, Context *contexts, int mode, int64_t *positions, int64_t n,
                       const int64_t shape[3])
{
    uint64_t words = (uint64_t)((shape[0] * shape[1] * shape[2] + 63) / 64);
    Tensor tensor;
    int fault = make_lines(&tensor.rows, shape[0]), other = make_lines(&tensor.columns, shape[1]);

    tensor.depth = shape[2];
    tensor.sent = allocate(words, sizeof *tensor.sent);
    if (fault || other || !tensor.sent) {
        fault = NO_MEMORY;
    } else {
        take_or_use_one(decoder, &tensor.rows, mode & BY_ROWS);
        take_or_use_one(decoder, &tensor.columns, mode & BY_COLUMNS);
        fault = take_blocks(decoder, contexts, &tensor, positions, n);
    }
    if (!fault) {
        cfedavg_list_ones(tensor.sent, (int64_t)words, positions, n);
    }
    free_lines(&tensor.rows);
    free_lines(&tensor.columns);
    free(tensor.sent);
    return fault;
}

/* Fill `positions` with the sent coordinates of one tensor, counted from the tensor's start. */
static int take_tensor(Decoder *decoder, Context *contexts, int64_t *positions, int64_t n,
                       const int64_t shape[3])
{
    int mode = shape[0] * shape[1] > 1 ? (int)take_number(decoder, 2) : 0;

    if (mode == 0) {
        return take_set(decoder, positions, n, shape[0] * shape[1] * shape[2]);
    }
    return take_banded(decoder, contexts, mode, positions, n, shape);
}

static int take_tensors(Decoder *decoder, int64_t *indices, int64_t n, const int64_t *shapes, int64_t tensors)
{
    Context of_tensors[COUNT_CONTEXTS], of_blocks[COUNT_CONTEXTS];
    int64_t start = 0, a = 0;

    reset_contexts(of_tensors, COUNT_CONTEXTS);
    reset_contexts(of_blocks, COUNT_CONTEXTS);
    for (int64_t tensor = 0; tensor < tensors; tensor++) {
        const int64_t *shape = shapes + 3 * tensor;
        int64_t size = shape[0] * shape[1] * shape[2], count = (int64_t)take_count(decoder, of_tensors);
        int fault;

        if (count > size || count > n - a) {
            return OTHER_NUMBER;
        }
        fault = count ? take_tensor(decoder, of_blocks, indices + a, count, shape) : FINE;
        if (fault) {
            return fault;
        }
        for (int64_t i = a; i < a + count; i++) {
            indices[i] += start;
        }
        start += size;
        a += count;
    }
    return a == n ? FINE : OTHER_NUMBER;
}

int cfedavg_decode_indices(const uint32_t *words, int64_t length, int64_t *indices, int64_t n, int64_t d,
                           const int64_t *shapes, int64_t tensors, int64_t *read)
{
    Decoder decoder = start_decoding(words, length);
    int fault;

    if (d > MOST_CELLS) {
        return NO_MEMORY;
    }
    if (take_number(&decoder, 1)) {
        fault = take_tensors(&decoder, indices, n, shapes, tensors);
    } else {
        fault = take_set(&decoder, indices, n, d);
    }
    *read = decoder.position;
    return fault;
}

/* Fill `found` with the positions of the 1 bits, in increasing order. */
void cfedavg_list_ones(const uint64_t *bits, int64_t n, int64_t *found, int64_t room)
{
    int64_t at = 0;

    for (int64_t i = 0; i < n; i++) {
        for (uint64_t word = bits[i]; word && at < room; word &= word - 1) {
            found[at++] = (i << 6) + lowest_one(word);
        }
    }
}
