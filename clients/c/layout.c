#include "layout.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "allocate.h"
#include "bytes.h"
#include "kernels.h"

#define MOST_LINES ((uint64_t)1 << 31) /* rows or columns of a tensor are fewer */

static void add_text(Sha256 *hash, const char *text)
{
    add_to_sha256(hash, text, strlen(text));
}

/* Add a UTF-16 unit, or an ASCII character that JSON escapes, as \uXXXX. */
static void add_unit(Sha256 *hash, uint32_t unit)
{
    char text[8];

    snprintf(text, sizeof text, "\\u%04x", (unsigned)(unit & 0xFFFF));
    add_text(hash, text);
}

static void add_character(Sha256 *hash, uint32_t code)
{
    static const char ESCAPED[] = "\"\\\b\f\n\r\t", LETTERS[] = "\"\\bfnrt";
    const char *found = code && code < 128 ? strchr(ESCAPED, (int)code) : NULL;
    char pair[3] = {'\\', 0, 0};

    if (found) {
        pair[1] = LETTERS[found - ESCAPED];
        add_text(hash, pair);
    } else if (code >= 0x10000) {
        add_unit(hash, 0xD7C0 + (code >> 10));
        add_unit(hash, 0xDC00 + (code & 0x3FF));
    } else if (code < 32 || code > 126) {
        add_unit(hash, code);
    } else {
        pair[0] = (char)code;
        add_text(hash, pair);
    }
}

/* Read a character of UTF-8 and move *text behind it; return 0 at the end and UINT32_MAX if it is not valid. */
static uint32_t next_character(const char **text)
{
    static const uint32_t LEAST[4] = {0, 0x80, 0x800, 0x10000};
    const unsigned char *at = (const unsigned char *)*text;
    int more = at[0] >= 0xF0 ? 3 : at[0] >= 0xE0 ? 2 : at[0] >= 0xC0 ? 1 : 0;
    uint32_t code = more ? at[0] & (0x3FU >> more) : at[0];

    if (at[0] >= 0xF8 || (at[0] >= 0x80 && at[0] < 0xC0)) {
        return UINT32_MAX;
    }
    for (int i = 1; i <= more; i++) {
        if ((at[i] & 0xC0) != 0x80) {
            return UINT32_MAX;
        }
        code = code << 6 | (at[i] & 0x3FU);
    }
    *text += more + (code != 0);
    return code < LEAST[more] || code > 0x10FFFF || (code >> 11) == 27 ? UINT32_MAX : code;
}

static int add_string(Sha256 *hash, const char *text)
{
    uint32_t code;

    add_text(hash, "\"");
    while ((code = next_character(&text)) != 0) {
        if (code == UINT32_MAX) {
            return CFEDAVG_BAD_ARGUMENT;
        }
        add_character(hash, code);
    }
    add_text(hash, "\"");
    return CFEDAVG_OK;
}

static void add_shape(Sha256 *hash, const cfedavg_tensor *tensor)
{
    char text[24];

    add_text(hash, "[");
    for (size_t axis = 0; axis < tensor->axes; axis++) {
        snprintf(text, sizeof text, "%s%" PRIu64, axis ? ", " : "", tensor->shape[axis]);
        add_text(hash, text);
    }
    add_text(hash, "]");
}

/* Hash the JSON text [[names], [shapes], [dtypes]]. */
static int hash_schema(const cfedavg_tensor *tensors, size_t n, uint64_t *schema)
{
    Sha256 hash;
    uint8_t digest[32];
    int error = CFEDAVG_OK;

    start_sha256(&hash);
    for (int part = 0; part < 3; part++) {
        add_text(&hash, part ? "], [" : "[[");
        for (size_t i = 0; i < n && !error; i++) {
            add_text(&hash, i ? ", " : "");
            if (part == 1) {
                add_shape(&hash, &tensors[i]);
            } else {
                error = add_string(&hash, part ? tensors[i].dtype : tensors[i].name);
            }
        }
    }
    add_text(&hash, "]]");
    finish_sha256(&hash, digest);
    *schema = get_bytes(digest, 8);
    return error;
}

/* Compute rows, columns and depth of a tensor. A tensor with fewer than two axes has one row and one column. */
static int view(const cfedavg_tensor *tensor, int64_t shape[3])
{
    uint64_t sides[3] = {1, 1, 1};
    size_t skipped = tensor->axes > 1 ? 0 : 2;

    shape[0] = shape[1] = shape[2] = 0;
    for (size_t axis = 0; axis < tensor->axes; axis++) {
        if (tensor->shape[axis] == 0) {
            return CFEDAVG_OK; /* no elements, whatever the other axes are */
        }
    }
    for (size_t axis = 0; axis < tensor->axes; axis++) {
        size_t side = axis + skipped < 2 ? axis + skipped : 2;

        if (tensor->shape[axis] > (uint64_t)MOST_CELLS / (sides[0] * sides[1] * sides[2])) {
            return CFEDAVG_BAD_ARGUMENT;
        }
        sides[side] *= tensor->shape[axis];
    }
    for (int side = 0; side < 3; side++) {
        shape[side] = (int64_t)sides[side];
    }
    return sides[0] < MOST_LINES && sides[1] < MOST_LINES ? CFEDAVG_OK : CFEDAVG_BAD_ARGUMENT;
}

/* Fill in d, the shapes, and the number of rows. */
static int measure(cfedavg_layout *layout, const cfedavg_tensor *tensors, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int64_t *shape = layout->shapes + 3 * layout->tensors, size;

        if (view(&tensors[i], shape)) {
            return CFEDAVG_BAD_ARGUMENT;
        }
        size = shape[0] * shape[1] * shape[2];
        layout->d += size;
        layout->rows += size ? shape[0] : 0;
        layout->tensors += size != 0;
        if (layout->d > MOST_CELLS) {
            return CFEDAVG_BAD_ARGUMENT;
        }
    }
    return CFEDAVG_OK;
}

static void end_rows(cfedavg_layout *layout)
{
    int64_t end = 0, *next = layout->row_ends;

    for (int64_t tensor = 0; tensor < layout->tensors; tensor++) {
        const int64_t *shape = layout->shapes + 3 * tensor;

        for (int64_t row = 0; row < shape[0]; row++) {
            end += shape[1] * shape[2];
            *next++ = end;
        }
    }
}

int cfedavg_make_layout(const cfedavg_tensor *tensors, size_t n, cfedavg_layout **layout)
{
    cfedavg_layout *made = calloc(1, sizeof *made);
    int error = CFEDAVG_NO_MEMORY;

    if (made && (made->shapes = allocate(n, 3 * sizeof *made->shapes)) != NULL) {
        error = measure(made, tensors, n);
    }
    if (!error) {
        error = hash_schema(tensors, n, &made->schema);
    }
    if (!error && (made->row_ends = allocate((uint64_t)made->rows, sizeof *made->row_ends)) == NULL) {
        error = CFEDAVG_NO_MEMORY;
    }
    if (error) {
        cfedavg_free_layout(made);
        return error;
    }
    end_rows(made);
    *layout = made;
    return CFEDAVG_OK;
}

void cfedavg_free_layout(cfedavg_layout *layout)
{
    if (layout) {
        free(layout->shapes);
        free(layout->row_ends);
        free(layout);
    }
}

uint64_t cfedavg_length(const cfedavg_layout *layout)
{
    return (uint64_t)layout->d;
}

uint64_t cfedavg_schema(const cfedavg_layout *layout)
{
    return layout->schema;
}
