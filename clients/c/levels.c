/* Levels that their neighbours predict, kinds PER_LEVEL and FEW: see docs/wire.md and src/cfedavg/wire/levels.py.
 *
 * A number is a magnitude of 15 bits with the sign in the bit above.
 */
#include <string.h>

#include "allocate.h"
#include "bits.h"
#include "coder.h"
#include "kernels.h"

#define SIGN_BIT 15
#define MASK ((1 << SIGN_BIT) - 1)
#define STATES 8
#define MOST_BITS 7 /* of a magnitude: `top` is at most 127 */
#define SLOW 3      /* a magnitude moves the running mean by 1 / 2^SLOW of its distance */
#define MEAN_BITS 16
#define CERTAIN_VOTE 255 /* the largest vote of a row or a column */
#define WEIGHT 8         /* the most by which a sign moves a vote */
#define DIFFERENCES 17   /* contexts for a difference from the votes, by the bits of both */
#define FINAL ((int64_t)1 << 20) /* the lead that decides; kind PER_LEVEL never decides */

/* The place of a coordinate; rows and columns are counted over all tensors. */
typedef struct {
    const int64_t *indices; /* NULL if all coordinates are sent */
    const int64_t *shapes;
    int64_t tensor; /* the next one */
    int64_t end;
    int64_t row_end;
    int64_t row;
    int64_t rows;  /* of all tensors up to this one */
    int64_t first; /* column of the tensor */
    int64_t width; /* coordinates in a row */
    int64_t depth; /* coordinates where a row and a column meet */
    int64_t index;
} Place;

typedef struct {
    int least; /* magnitude: 0 or 1 */
    int top;
    int bits; /* of a magnitude less the least */
    uint32_t mean;
    int64_t lead;  /* by how much the rows' contexts have been better than the votes so far */
    int64_t final; /* the lead that decides */
    Context magnitudes[STATES << MOST_BITS];
    Context differences[DIFFERENCES];
    Context *of_rows;
    int16_t *row_votes;
    int16_t *column_votes;
    Place place;
} Model;

/* Start a model; return whether there is memory. The caller must call `free_model` in both cases. */
static int make_model(Model *model, const int64_t *indices, const int64_t *shapes, int64_t tensors, int64_t least,
                      int64_t top)
{
    int64_t rows = 0, columns = 0;

    memset(model, 0, sizeof *model);
    for (int64_t tensor = 0; tensor < tensors; tensor++) {
        rows += shapes[3 * tensor];
        columns += shapes[3 * tensor + 1];
    }
    model->least = (int)least;
    model->final = least ? INT64_MAX : FINAL;
    model->top = (int)top;
    model->bits = bit_length((uint64_t)(top - least));
    model->mean = 1U << (MEAN_BITS - 1);
    model->place.indices = indices;
    model->place.shapes = shapes;
    model->of_rows = allocate((uint64_t)rows, sizeof *model->of_rows);
    model->row_votes = allocate((uint64_t)rows, sizeof *model->row_votes);
    model->column_votes = allocate((uint64_t)columns, sizeof *model->column_votes);
    reset_contexts(model->magnitudes, STATES << MOST_BITS);
    reset_contexts(model->differences, DIFFERENCES);
    if (model->of_rows) {
        reset_contexts(model->of_rows, rows);
    }
    return model->of_rows && model->row_votes && model->column_votes;
}

static void free_model(Model *model)
{
    free(model->of_rows);
    free(model->row_votes);
    free(model->column_votes);
}

/* Move to the coordinate of value i. Call it with rising i. */
static void move_place(Place *place, int64_t i)
{
    int64_t index = place->indices ? place->indices[i] : i;

    while (index >= place->end) {
        const int64_t *shape = place->shapes + 3 * place->tensor++;

        place->first += place->tensor > 1 ? place->width / place->depth : 0;
        place->depth = shape[2];
        place->width = shape[1] * shape[2];
        place->row = place->rows;
        place->row_end = place->end + place->width;
        place->end += shape[0] * place->width;
        place->rows += shape[0];
    }
    while (index >= place->row_end) {
        place->row++;
        place->row_end += place->width;
    }
    place->index = index;
}

static int64_t column_of(const Place *place)
{
    int64_t offset = place->index - (place->row_end - place->width);

    return place->first + (place->depth > 1 ? offset / place->depth : offset);
}

static void move_mean(Model *model, int magnitude)
{
    int steps = model->top > model->least ? model->top - model->least : 1;
    uint32_t share = (uint32_t)((magnitude - model->least) * (65535 / steps));

    model->mean = model->mean + (share >> SLOW) - (model->mean >> SLOW);
}

static int clip(int number, int most)
{
    number = number > -most ? number : -most;
    return number < most ? number : most;
}

/* Let the row and the column learn a sign, each with the weight of the other. */
static void move_votes(int16_t *of_row, int16_t *of_column, int negative)
{
    int sign = negative ? -1 : 1, row = *of_row, column = *of_column;

    if (row == 0 && column == 0) {
        *of_row = (int16_t)sign;
        *of_column = 1;
        return;
    }
    *of_row = (int16_t)clip(row + sign * clip(column, WEIGHT), CERTAIN_VOTE);
    *of_column = (int16_t)clip(column + sign * clip(row, WEIGHT), CERTAIN_VOTE);
}

/* Return the squared error of the probability of a 1, p, if the bit is `bit`, in units of 2^-16. */
static int64_t error_of(uint32_t p, int bit)
{
    int64_t missed = bit ? 65536 - (int64_t)p : p;

    return missed * missed >> 16;
}

/* Code a bit with an encoder, or with a decoder if `encoder` is NULL; return the bit. */
static int code_bit(Encoder *encoder, Decoder *decoder, Context *context, int bit)
{
    if (!encoder) {
        return take_bit(decoder, context);
    }
    put_bit(encoder, context, bit);
    return bit;
}

/* Code a sign likewise. */
static int code_sign(Model *model, Encoder *encoder, Decoder *decoder, int bit)
{
    Context *of_row = &model->of_rows[model->place.row], *of_votes;
    int16_t *row = &model->row_votes[model->place.row], *column;
    int expected = 0, which = 0;
    uint32_t by_votes, by_row = of_row->p;

    if (model->lead >= model->final) {
        return code_bit(encoder, decoder, of_row, bit);
    }
    column = &model->column_votes[column_of(&model->place)];
    if (*row && *column) {
        which = bit_length((uint64_t)abs(*row)) + bit_length((uint64_t)abs(*column));
        expected = (*row < 0) != (*column < 0);
    }
    of_votes = &model->differences[which];
    by_votes = of_votes->p;
    if (model->lead > 0) {
        bit = code_bit(encoder, decoder, of_row, bit);
        learn(of_votes, bit ^ expected);
    } else {
        bit = code_bit(encoder, decoder, of_votes, bit ^ expected) ^ expected;
    }
    if (model->lead > -model->final) {
        if (model->lead <= 0) {
            learn(of_row, bit);
        }
        model->lead += error_of(by_votes, bit ^ expected) - error_of(by_row, bit);
    }
    move_votes(row, column, bit);
    return bit;
}

static int64_t put_levels(Encoder *encoder, Model *model, const uint16_t *numbers, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int magnitude = numbers[i] & MASK, node = 1;
        Context *state = model->magnitudes + ((model->mean >> (MEAN_BITS - 3)) << model->bits);

        if (magnitude < model->least || magnitude > model->top) {
            return 0;
        }
        for (int below = model->bits - 1; below >= 0; below--) {
            int digit = (magnitude - model->least) >> below & 1;

            put_bit(encoder, &state[node], digit);
            node = 2 * node + digit;
        }
        move_mean(model, magnitude);
        if (magnitude) {
            move_place(&model->place, i);
            code_sign(model, encoder, NULL, numbers[i] >> SIGN_BIT);
        }
    }
    return finish_encoding(encoder);
}

int64_t cfedavg_encode_levels(uint32_t *words, int64_t room, const uint16_t *numbers, int64_t n,
                              const int64_t *indices, const int64_t *shapes, int64_t tensors, int64_t least,
                              int64_t top)
{
    Encoder encoder = start_encoding(words, room);
    Model model;
    int64_t made = NO_ROOM;

    if (make_model(&model, indices, shapes, tensors, least, top)) {
        made = put_levels(&encoder, &model, numbers, n);
    }
    free_model(&model);
    return made;
}

static int64_t take_levels(Decoder *decoder, Model *model, uint16_t *numbers, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int magnitude, node = 1;
        Context *state = model->magnitudes + ((model->mean >> (MEAN_BITS - 3)) << model->bits);

        for (int bit = 0; bit < model->bits; bit++) {
            node = 2 * node + take_bit(decoder, &state[node]);
        }
        magnitude = node - (1 << model->bits) + model->least;
        if (magnitude > model->top) {
            return 0;
        }
        move_mean(model, magnitude);
        if (magnitude) {
            move_place(&model->place, i);
            magnitude |= code_sign(model, NULL, decoder, 0) << SIGN_BIT;
        }
        numbers[i] = (uint16_t)magnitude;
    }
    return decoder->position;
}

int64_t cfedavg_decode_levels(const uint32_t *words, int64_t length, uint16_t *numbers, int64_t n,
                              const int64_t *indices, const int64_t *shapes, int64_t tensors, int64_t least,
                              int64_t top)
{
    Decoder decoder = start_decoding(words, length);
    Model model;
    int64_t read = NO_ROOM;

    if (make_model(&model, indices, shapes, tensors, least, top)) {
        read = take_levels(&decoder, &model, numbers, n);
    }
    free_model(&model);
    return read;
}
