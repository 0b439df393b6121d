/* Decode a message: its coordinates, then its values. */
#include <string.h>

#include "allocate.h"
#include "bases.h"
#include "frame.h"
#include "kernels.h"
#include "layout.h"
#include "sets.h"

/* A section of a message. */
typedef struct {
    const uint8_t *bytes;
    size_t length;
} Section;

/* Return the words of a section, each written upper byte first; NULL if there is no memory. */
static uint32_t *words_of(Section section, int64_t *n)
{
    size_t count = section.length / 4 + (section.length % 4 != 0);
    uint32_t *words = allocate(count, sizeof *words);

    for (size_t i = 0; words && i < section.length; i++) {
        words[i / 4] |= (uint32_t)section.bytes[i] << (24 - 8 * (i % 4));
    }
    *n = (int64_t)count;
    return words;
}

/* Check 9: the section ends where the decoder, which has read so many words, ended. */
static int check_end(Section section, int64_t words, int early, int more)
{
    size_t most = 4 * (size_t)words, least = most - 8;

    if (section.length < least) {
        return early;
    }
    if (section.length > most || (section.length > least && section.bytes[section.length - 1] == 0)) {
        return more;
    }
    return CFEDAVG_OK;
}

static int read_key(Section section, cfedavg_payload *payload)
{
    uint64_t key = get_bytes(section.bytes, 8);

    memcpy(&payload->key, &key, sizeof key);
    payload->keep = get_bytes(section.bytes + 8, 8);
    if (payload->keep > MOST_KEEP ||
        cfedavg_draw(payload->key, payload->keep, payload->d, payload->indices, payload->k) != payload->k) {
        return CFEDAVG_WRONG_KEY;
    }
    return CFEDAVG_OK;
}

/* Read the section of a list; `where` is that of the header. */
static int read_list(Section section, int where, const cfedavg_layout *layout, cfedavg_payload *payload)
{
    static const int FAULTS[] = {CFEDAVG_OK, CFEDAVG_INDEX_BEYOND, CFEDAVG_INDEX_NUMBER, CFEDAVG_NO_MEMORY};
    int64_t length, read = 0;
    uint32_t *words = words_of(section, &length);
    int fault = NO_MEMORY;

    if (words) {
        fault = (where == CFEDAVG_CHUNKED ? cfedavg_decode_chunks : cfedavg_decode_indices)(
            words, length, payload->indices, (int64_t)payload->k, layout->d, layout->shapes, layout->tensors, &read);
    }
    free(words);
    if (fault) {
        return FAULTS[fault];
    }
    return check_end(section, read, CFEDAVG_INDICES_END_EARLY, CFEDAVG_INDICES_HAVE_MORE);
}

static int read_basis(Section section, const cfedavg_layout *layout, cfedavg_payload *payload)
{
    if (payload->where == CFEDAVG_ROTATED) {
        uint64_t key = get_bytes(section.bytes, 8);

        memcpy(&payload->key, &key, sizeof key);
        payload->rotated = (uint32_t)get_bytes(section.bytes + 8, 4);
    } else {
        payload->rank = (uint32_t)get_bytes(section.bytes, 4);
    }
    return check_basis(layout, payload);
}

static int read_coordinates(Section section, int where, const cfedavg_layout *layout, cfedavg_payload *payload)
{
    if (payload->where == CFEDAVG_ALL) {
        return CFEDAVG_OK;
    }
    if (is_basis(payload->where)) {
        return read_basis(section, layout, payload);
    }
    payload->indices = allocate(payload->k, sizeof *payload->indices);
    if (!payload->indices) {
        return CFEDAVG_NO_MEMORY;
    }
    return payload->where == CFEDAVG_DRAWN ? read_key(section, payload) : read_list(section, where, layout, payload);
}

/* Decode section 2 into `numbers`: signs and magnitudes. */
static int read_numbers(Section section, const cfedavg_layout *layout, const cfedavg_payload *payload,
                        int64_t largest, uint16_t *numbers)
{
    int64_t length, read = NO_ROOM;
    uint32_t *words;
    ValueRows rows;

    if (payload->k == 0) {
        return CFEDAVG_OK;
    }
    make_rows_of(&rows, layout, payload);
    words = words_of(section, &length);
    if (words && payload->kind >= CFEDAVG_PER_LEVEL) {
        read = cfedavg_decode_levels(words, length, numbers, (int64_t)payload->k, payload->indices, rows.shapes,
                                     rows.tensors, least_of(payload->kind), largest);
    } else if (words) {
        read = cfedavg_decode_numbers(words, length, numbers, (int64_t)payload->k, payload->indices, rows.ends,
                                      rows.n, is_float(payload->kind), largest);
    }
    free(words);
    if (read == NO_ROOM) {
        return CFEDAVG_NO_MEMORY;
    }
    if (read == 0) {
        return is_float(payload->kind) ? CFEDAVG_VALUE_NOT_FINITE : CFEDAVG_LEVEL_TOO_LARGE;
    }
    return check_end(section, read, CFEDAVG_VALUES_END_EARLY, CFEDAVG_VALUES_HAVE_MORE);
}

/* Store value i, given as bits. */
static void store(cfedavg_payload *payload, uint64_t i, uint64_t bits)
{
    uint32_t narrow = (uint32_t)bits;

    if (payload->kind == CFEDAVG_FP64) {
        memcpy((double *)payload->values + i, &bits, sizeof bits);
    } else if (payload->kind == CFEDAVG_FP32) {
        memcpy((float *)payload->values + i, &narrow, sizeof narrow);
    } else if (payload->kind == CFEDAVG_BF16) {
        ((uint16_t *)payload->values)[i] = (uint16_t)bits;
    } else {
        int level = (int)(bits & (SIGN - 1));

        level = bits & SIGN ? -level : level;
        if (payload->kind != CFEDAVG_INT16) {
            ((int8_t *)payload->values)[i] = (int8_t)level;
        } else {
            ((int16_t *)payload->values)[i] = (int16_t)level;
        }
    }
}

static int read_plain(Section copied, cfedavg_payload *payload)
{
    int size = size_of(payload->kind);

    for (uint64_t i = 0; i < payload->k; i++) {
        uint64_t bits = get_bytes(copied.bytes + i * (uint64_t)size, size);

        if (size == 4 ? !is_finite_fp32(bits) : !is_finite_fp64(bits)) {
            return CFEDAVG_VALUE_NOT_FINITE;
        }
        store(payload, i, bits);
    }
    return CFEDAVG_OK;
}

static int read_scales(Section copied, cfedavg_payload *payload)
{
    uint64_t n;

    payload->block = (uint32_t)get_bytes(copied.bytes, 4);
    payload->top = (uint16_t)get_bytes(copied.bytes + 4, 2);
    if (!top_fits(payload->kind, payload->top)) {
        return CFEDAVG_WRONG_TOP;
    }
    n = count_scales(payload->kind, payload->k, payload->block, payload->top);
    payload->scales = allocate(n, sizeof *payload->scales);
    if (!payload->scales) {
        return CFEDAVG_NO_MEMORY;
    }
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)get_bytes(copied.bytes + SCALES + 4 * i, 4);

        if (!is_finite_fp32(bits)) {
            return CFEDAVG_SCALE_NOT_FINITE;
        }
        memcpy(payload->scales + i, &bits, sizeof bits);
    }
    return CFEDAVG_OK;
}

/* Decode coded values: the upper 16 bits of each from section 2, the lower ones from section 3. */
static int read_coded(Section coded, Section copied, const cfedavg_layout *layout, cfedavg_payload *payload)
{
    int64_t largest = is_float(payload->kind) ? largest_of(payload->kind) : payload->top;
    int lower = is_float(payload->kind) ? size_of(payload->kind) - 2 : 0, error;
    uint16_t *numbers = allocate(payload->k, sizeof *numbers);

    if (!numbers) {
        return CFEDAVG_NO_MEMORY;
    }
    error = read_numbers(coded, layout, payload, largest, numbers);
    for (uint64_t i = 0; i < payload->k && !error; i++) {
        uint64_t bits = get_bytes(copied.bytes + i * (uint64_t)lower, lower);

        store(payload, i, bits | (uint64_t)numbers[i] << 8 * lower);
    }
    free(numbers);
    return error;
}

static int read_values(Section coded, Section copied, int coding, const cfedavg_layout *layout,
                       cfedavg_payload *payload)
{
    int error = is_float(payload->kind) ? CFEDAVG_OK : read_scales(copied, payload);

    if (error) {
        return error;
    }
    payload->values = allocate(payload->k, (size_t)size_of(payload->kind));
    if (!payload->values) {
        return CFEDAVG_NO_MEMORY;
    }
    return coding == PLAIN ? read_plain(copied, payload) : read_coded(coded, copied, layout, payload);
}

static int read_sections(const uint8_t *data, const cfedavg_header *header, const cfedavg_layout *layout,
                         cfedavg_payload *payload)
{
    Section sections[3];
    const uint8_t *at = data + HEADER;
    int error;

    for (int i = 0; i < 3; i++) {
        sections[i].bytes = at;
        sections[i].length = (size_t)header->lengths[i];
        at += header->lengths[i];
    }
    error = read_coordinates(sections[0], header->where, layout, payload);
    return error ? error : read_values(sections[1], sections[2], header->coding, layout, payload);
}

int cfedavg_decode(const uint8_t *data, size_t length, const cfedavg_layout *layout, const cfedavg_limits *limits,
                   cfedavg_payload *payload, cfedavg_header *header)
{
    static const cfedavg_limits DEFAULT = {0};
    cfedavg_payload made = {0};
    cfedavg_header found;
    uint64_t d = (uint64_t)layout->d, most;
    int error;

    limits = limits ? limits : &DEFAULT;
    most = limits->max_bytes ? limits->max_bytes : 16 * d + 65536;
    error = length > most ? CFEDAVG_TOO_LONG : cfedavg_read_header(data, length, &found);
    if (!error) {
        error = check_frame(&found, data, length, layout->schema, d, limits);
    }
    if (error) {
        return error;
    }
    made.d = d;
    made.k = found.k;
    made.where = found.where == CFEDAVG_CHUNKED ? CFEDAVG_LISTED : found.where;
    made.kind = found.kind;
    error = read_sections(data, &found, layout, &made);
    if (error) {
        cfedavg_free_payload(&made);
        return error;
    }
    made.kind = made.kind == CFEDAVG_FEW ? CFEDAVG_INT8 : made.kind;
    *payload = made;
    if (header) {
        *header = found;
    }
    return CFEDAVG_OK;
}

void cfedavg_free_payload(cfedavg_payload *payload)
{
    free(payload->indices);
    free(payload->values);
    free(payload->scales);
    memset(payload, 0, sizeof *payload);
}
