/* Encode a payload: check it, code its coordinates and its values, put the parts together. */
#include <math.h>
#include <string.h>

#include "allocate.h"
#include "bases.h"
#include "bits.h"
#include "chunks.h"
#include "frame.h"
#include "kernels.h"
#include "layout.h"

/* A coded section: its words, and its length in bytes. */
typedef struct {
    uint32_t *words;
    size_t length;
} Coded;

/* The parts of a message while it is made. */
typedef struct {
    const cfedavg_layout *layout;
    const cfedavg_payload *payload;
    int where;    /* as the header says it */
    int kind;     /* likewise */
    Coded places; /* with CFEDAVG_LISTED */
    Coded values; /* with coding CODED */
    int coding;
} Message;

/* Return the kind in the header: levels of few magnitudes have one of their own. */
static int kind_of(const cfedavg_payload *payload)
{
    int is_few = payload->kind == CFEDAVG_INT8 && payload->top >= 2 && payload->top <= MOST_FEW;

    return is_few ? CFEDAVG_FEW : payload->kind;
}

/* Return the upper 16 bits of value i (sign and magnitude of a level), and its lower bits in *lower. */
static uint16_t number_at(const cfedavg_payload *payload, uint64_t i, uint64_t *lower)
{
    uint64_t bits = 0;
    uint32_t narrow;
    int level;

    *lower = 0;
    switch (payload->kind) {
    case CFEDAVG_FP32:
        memcpy(&narrow, (const float *)payload->values + i, sizeof narrow);
        *lower = narrow & 0xFFFF;
        return (uint16_t)(narrow >> 16);
    case CFEDAVG_FP64:
        memcpy(&bits, (const double *)payload->values + i, sizeof bits);
        *lower = bits & 0xFFFFFFFFFFFFU;
        return (uint16_t)(bits >> 48);
    case CFEDAVG_BF16:
        return ((const uint16_t *)payload->values)[i];
    case CFEDAVG_INT8:
    case CFEDAVG_PER_LEVEL:
        level = ((const int8_t *)payload->values)[i];
        break;
    default:
        level = ((const int16_t *)payload->values)[i];
    }
    return (uint16_t)(level < 0 ? -level | SIGN : level);
}

static int check_levels(const cfedavg_payload *payload)
{
    uint64_t scales = count_scales(payload->kind, payload->k, payload->block, payload->top);

    if (!top_fits(payload->kind, payload->top)) {
        return CFEDAVG_WRONG_TOP;
    }
    for (uint64_t i = 0; i < scales; i++) {
        if (!isfinite(payload->scales[i])) {
            return CFEDAVG_SCALE_NOT_FINITE;
        }
    }
    for (uint64_t i = 0; i < payload->k; i++) {
        int level = payload->kind != CFEDAVG_INT16 ? ((const int8_t *)payload->values)[i]
                                                   : ((const int16_t *)payload->values)[i];

        if (level > payload->top || level < -(int)payload->top) {
            return CFEDAVG_LEVEL_TOO_LARGE;
        }
        if (level == 0 && payload->kind == CFEDAVG_PER_LEVEL) {
            return CFEDAVG_LEVEL_ZERO;
        }
    }
    return CFEDAVG_OK;
}

static int check_floats(const cfedavg_payload *payload)
{
    for (uint64_t i = 0; i < payload->k; i++) {
        uint64_t lower;
        int magnitude = number_at(payload, i, &lower) & (SIGN - 1);

        if (magnitude > largest_of(payload->kind)) {
            return CFEDAVG_VALUE_NOT_FINITE;
        }
    }
    return CFEDAVG_OK;
}

static int check_payload(const cfedavg_payload *payload, const cfedavg_layout *layout)
{
    uint64_t d = (uint64_t)layout->d;
    int basis = is_basis(payload->where), error;

    if (payload->where < CFEDAVG_ALL || payload->where > CFEDAVG_FACTORED || payload->kind < CFEDAVG_FP32 ||
        payload->kind > CFEDAVG_PER_LEVEL || payload->keep > MOST_KEEP) {
        return CFEDAVG_BAD_ARGUMENT;
    }
    error = basis ? check_basis(layout, payload) : CFEDAVG_OK;
    if (error) {
        return error;
    }
    if (payload->d != d || (payload->k > d && !basis) || (payload->where == CFEDAVG_ALL && payload->k != d)) {
        return CFEDAVG_OTHER_LENGTH;
    }
    if (payload->where != CFEDAVG_ALL && !basis &&
        !cfedavg_are_increasing(payload->indices, (int64_t)payload->k, (int64_t)d)) {
        return CFEDAVG_NOT_INCREASING;
    }
    return is_float(payload->kind) ? check_floats(payload) : check_levels(payload);
}

/* Leave out the zero bytes at the end of the last two words: the decoder reads zeros there. */
static size_t trimmed(const uint32_t *words, int64_t n)
{
    size_t length = 4 * (size_t)n, least = length - 8;

    while (length > least && (words[(length - 1) / 4] >> (24 - 8 * ((length - 1) % 4)) & 0xFF) == 0) {
        length--;
    }
    return length;
}

static void write_coded(uint8_t *to, const Coded *coded)
{
    for (size_t i = 0; i < coded->length; i++) {
        to[i] = (uint8_t)(coded->words[i / 4] >> (24 - 8 * (i % 4)));
    }
}

/* Keep the coded places if they are shorter than those that the message has; `n` is the number of their words. */
static int keep_places(Message *message, uint32_t *words, int64_t n, int64_t room, int where)
{
    size_t length;

    if (n < 0 || n > room) {
        free(words);
        return CFEDAVG_NO_MEMORY;
    }
    length = trimmed(words, n);
    if (message->places.words && length >= message->places.length) {
        free(words);
        return CFEDAVG_OK;
    }
    free(message->places.words);
    message->places.words = words;
    message->places.length = length;
    message->where = where;
    return CFEDAVG_OK;
}

/* Code the places by chunks, if each sends equally many. */
static int code_chunks(Message *message)
{
    const cfedavg_layout *layout = message->layout;
    const int64_t *indices = message->payload->indices;
    int64_t k = (int64_t)message->payload->k, n, room;
    int s = find_chunk(indices, k, layout->d, &n);
    uint32_t *words;

    if (!s) {
        return CFEDAVG_OK;
    }
    /* A position takes at most 25 bits, and each bit of a count 11: one for each piece and each coordinate. */
    room = (36 * k + 11 * (layout->rows + (layout->d >> s) + 1)) / 32 + 64;
    words = reserve((uint64_t)room, sizeof(uint32_t));
    if (!words) {
        return CFEDAVG_NO_MEMORY;
    }
    n = cfedavg_encode_chunks(words, room, indices, k, layout->d, layout->shapes, layout->tensors, s, n);
    return keep_places(message, words, n, room, CFEDAVG_CHUNKED);
}

static int code_places(Message *message)
{
    const cfedavg_layout *layout = message->layout;
    int64_t k = (int64_t)message->payload->k, room, lines = 0, n;
    uint32_t *words;
    int error;

    /* A gap takes at most a symbol of 16 bits, on average a quarter of a symbol more, and the mean gap's bits. */
    room = k * (24 + bit_length((uint64_t)(layout->d / (k ? k : 1)))) / 32;
    for (int64_t tensor = 0; tensor < layout->tensors; tensor++) {
        lines += layout->shapes[3 * tensor] + layout->shapes[3 * tensor + 1];
    }
    room += 512 * layout->tensors + 2 * lines + 64;
    words = reserve((uint64_t)room, sizeof(uint32_t));
    if (!words) {
        return CFEDAVG_NO_MEMORY;
    }
    n = cfedavg_encode_indices(words, room, message->payload->indices, k, layout->d, layout->shapes,
                               layout->tensors);
    error = keep_places(message, words, n, room, CFEDAVG_LISTED);
    return error ? error : code_chunks(message);
}

static int code_numbers(Message *message, uint16_t *numbers)
{
    const cfedavg_payload *payload = message->payload;
    ValueRows rows;
    const int64_t *indices = payload->where == CFEDAVG_ALL ? NULL : payload->indices;
    /* A number takes at most 34 bits: 16 for the symbol, 7 for the other bits, 11 for the sign. A level that its
     * neighbours predict takes up to 8 times 11. */
    int64_t k = (int64_t)payload->k, room = (message->kind >= CFEDAVG_PER_LEVEL ? 3 * k : k * 5 / 4) + 64, n;

    for (uint64_t i = 0; i < payload->k; i++) {
        uint64_t lower;

        numbers[i] = number_at(payload, i, &lower);
    }
    make_rows_of(&rows, message->layout, payload);
    message->values.words = reserve((uint64_t)room, sizeof(uint32_t));
    if (!message->values.words) {
        return CFEDAVG_NO_MEMORY;
    }
    if (message->kind >= CFEDAVG_PER_LEVEL) {
        n = cfedavg_encode_levels(message->values.words, room, numbers, k, indices, rows.shapes, rows.tensors,
                                  least_of(message->kind), payload->top);
    } else {
        n = cfedavg_encode_numbers(message->values.words, room, numbers, k, indices, rows.ends, rows.n,
                                   is_float(payload->kind), SIGN - 1);
    }
    if (n < 0 || n > room) {
        return CFEDAVG_NO_MEMORY;
    }
    message->values.length = trimmed(message->values.words, n);
    return CFEDAVG_OK;
}

/* Code the values; leave them plain if they may be and that is no longer, or if nobody asks to code them. */
static int code_values(Message *message, int code_floats)
{
    const cfedavg_payload *payload = message->payload;
    int plain = may_be_plain(payload->where, payload->kind), error;
    uint16_t *numbers;

    message->coding = plain && (!code_floats || payload->k == 0) ? PLAIN : CODED;
    if (message->coding == PLAIN || payload->k == 0) {
        return CFEDAVG_OK;
    }
    numbers = allocate(payload->k, sizeof *numbers);
    error = numbers ? code_numbers(message, numbers) : CFEDAVG_NO_MEMORY;
    free(numbers);
    if (plain && message->values.length >= 2 * payload->k) {
        message->coding = PLAIN;
        message->values.length = 0;
    }
    return error;
}

/* Write section 3; return how many bytes it has. With `to` = NULL, only count them. */
static size_t write_copied(uint8_t *to, const Message *message)
{
    const cfedavg_payload *payload = message->payload;
    uint64_t scales = count_scales(payload->kind, payload->k, payload->block, payload->top);
    int size = size_of(payload->kind) - (message->coding == CODED ? 2 : 0);

    if (!to) {
        return is_float(payload->kind) ? (size_t)payload->k * (size_t)size : SCALES + 4 * (size_t)scales;
    }
    if (is_float(payload->kind)) {
        for (uint64_t i = 0; i < payload->k; i++) {
            uint64_t lower, upper = number_at(payload, i, &lower);

            put_bytes(to + i * (uint64_t)size, lower | upper << 8 * (size_of(payload->kind) - 2), size);
        }
        return (size_t)payload->k * (size_t)size;
    }
    put_bytes(to, payload->block, 4);
    put_bytes(to + 4, payload->top, 2);
    for (uint64_t i = 0; i < scales; i++) {
        uint32_t bits;

        memcpy(&bits, payload->scales + i, sizeof bits);
        put_bytes(to + SCALES + 4 * i, bits, 4);
    }
    return SCALES + 4 * (size_t)scales;
}

/* Write a section 1 of fixed length, which holds a key or a basis; return its length, 0 for any other. */
static size_t write_fixed(uint8_t *to, const cfedavg_payload *payload)
{
    if (payload->where == CFEDAVG_FACTORED) {
        put_bytes(to, payload->rank, 4);
        return RANK;
    }
    if (payload->where != CFEDAVG_DRAWN && payload->where != CFEDAVG_ROTATED) {
        return 0;
    }
    put_bytes(to, (uint64_t)payload->key, 8);
    if (payload->where == CFEDAVG_DRAWN) {
        put_bytes(to + 8, payload->keep, 8);
        return KEY_AND_KEEP;
    }
    put_bytes(to + 8, payload->rotated, 4);
    return KEY_AND_SIZE;
}

static int write_message(const Message *message, const cfedavg_sender *sender, uint8_t **data, size_t *length)
{
    const cfedavg_payload *payload = message->payload;
    uint8_t basis[KEY_AND_KEEP];
    size_t fixed = write_fixed(basis, payload), places = fixed ? fixed : message->places.length;
    size_t coded = message->values.length, copied = write_copied(NULL, message);
    size_t size = LEAST + places + coded + copied;
    cfedavg_header header = {0, message->where, message->kind, message->coding, message->layout->schema,
                             payload->d, payload->k, *sender, {places, coded, copied}};
    uint8_t *made = malloc(size), *at;

    if (!made) {
        return CFEDAVG_NO_MEMORY;
    }
    at = made + HEADER;
    write_header(made, &header);
    memcpy(at, basis, fixed);
    write_coded(at, &message->places);
    write_coded(at + places, &message->values);
    write_copied(at + places + coded, message);
    put_bytes(made + size - CHECKSUM, crc32_of(0, made, size - CHECKSUM), CHECKSUM);
    *data = made;
    *length = size;
    return CFEDAVG_OK;
}

int cfedavg_encode(const cfedavg_layout *layout, const cfedavg_payload *payload, const cfedavg_sender *sender,
                   int code_floats, uint8_t **message, size_t *length)
{
    Message parts = {layout, payload, payload->where, kind_of(payload), {NULL, 0}, {NULL, 0}, CODED};
    int error = check_payload(payload, layout);

    if (!error) {
        error = code_values(&parts, code_floats);
    }
    if (!error && payload->where == CFEDAVG_LISTED) {
        error = code_places(&parts);
    }
    if (!error) {
        error = write_message(&parts, sender, message, length);
    }
    free(parts.places.words);
    free(parts.values.words);
    return error;
}

void cfedavg_free_bytes(uint8_t *bytes)
{
    free(bytes);
}
