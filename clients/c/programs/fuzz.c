/* Decode golden messages and mutants of them: fuzz FOLDER MUTANTS [SEED].
 *
 * Every golden message must come back from `cfedavg_encode` with the same bytes, but for levels of few magnitudes
 * that an earlier encoder has coded as INT8. A mutant must be refused, or be a
 * payload that can be encoded and decoded again. The sanitizers, with which this program is built, see the rest.
 */
#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../bytes.h"
#include "../cfedavg.h"

#define MOST_FILES 200
#define MOST_BYTES 65536
#define ROOM 4096 /* bytes that a mutant may have more than its golden message */

typedef struct {
    uint8_t *bytes;
    size_t length;
    const cfedavg_layout *layout;
} Golden;

typedef struct {
    Golden golden[MOST_FILES];
    int n;
    cfedavg_layout *layouts[3];
    uint64_t state; /* of the random numbers */
    uint64_t counts[CFEDAVG_ERRORS];
} Fuzzer;

static void fail(const char *what, const char *which)
{
    fprintf(stderr, "%s: %s\n", which, what);
    exit(1);
}

static uint64_t below(Fuzzer *fuzzer, uint64_t n)
{
    return cfedavg_bits53((int64_t)fuzzer->state++, 0) % n;
}

/* The models of tests/golden_cases.py. */
static void make_layouts(Fuzzer *fuzzer)
{
    static const uint64_t conv[] = {8, 4, 3, 3}, eight[] = {8}, fc[] = {40, 50}, forty[] = {40}, flat[] = {500},
                          one[] = {1};
    static const cfedavg_tensor net[] = {{"conv", "float32", conv, 4},
                                         {"conv.bias", "float32", eight, 1},
                                         {"fc", "float32", fc, 2},
                                         {"fc.bias", "float32", forty, 1},
                                         {"scale", "float32", NULL, 0}};
    static const cfedavg_tensor of_500 = {"", "float32", flat, 1}, of_1 = {"", "float32", one, 1};

    if (cfedavg_make_layout(net, 5, &fuzzer->layouts[0]) || cfedavg_make_layout(&of_500, 1, &fuzzer->layouts[1]) ||
        cfedavg_make_layout(&of_1, 1, &fuzzer->layouts[2])) {
        fail("no layout", "net, flat or one");
    }
}

static const cfedavg_layout *layout_of(const Fuzzer *fuzzer, const char *name)
{
    return fuzzer->layouts[strstr(name, "-net-") ? 0 : strstr(name, "-flat-") ? 1 : 2];
}

static int is_golden(const struct dirent *file)
{
    size_t length = strlen(file->d_name);

    return length > 4 && strcmp(file->d_name + length - 4, ".cfa") == 0;
}

static void read_golden(Fuzzer *fuzzer, const char *folder)
{
    struct dirent **files;
    int n = scandir(folder, &files, is_golden, alphasort);

    for (int i = 0; i < n; i++) {
        char path[4096];
        Golden *golden = &fuzzer->golden[fuzzer->n];
        FILE *file;

        snprintf(path, sizeof path, "%s/%s", folder, files[i]->d_name);
        file = fopen(path, "rb");
        golden->bytes = malloc(MOST_BYTES);
        if (fuzzer->n == MOST_FILES || !file || !golden->bytes) {
            fail("cannot be read", path);
        }
        golden->length = fread(golden->bytes, 1, MOST_BYTES, file);
        golden->layout = layout_of(fuzzer, files[i]->d_name);
        fclose(file);
        free(files[i]);
        fuzzer->n++;
    }
    free(n > 0 ? files : NULL);
}

/* Encode what `data` holds; compare with `expected`, or if that is NULL, decode once more. */
static void encode_again(const cfedavg_payload *payload, const cfedavg_header *header, const Golden *golden,
                         int must_be_equal)
{
    uint8_t *again = NULL;
    size_t length;
    cfedavg_payload other;
    int error = cfedavg_encode(golden->layout, payload, &header->sender, header->version == 2, &again, &length);

    if (error) {
        fail(cfedavg_explain(error), "encode what was decoded");
    }
    if (must_be_equal && (length != golden->length || memcmp(again, golden->bytes, length) != 0)) {
        fail("encode gives other bytes", "golden message");
    }
    error = cfedavg_decode(again, length, golden->layout, NULL, &other, NULL);
    if (error) {
        fail(cfedavg_explain(error), "decode what was encoded");
    }
    if (other.k != payload->k || other.kind != payload->kind || other.where != payload->where) {
        fail("is another payload", "decode what was encoded");
    }
    cfedavg_free_payload(&other);
    cfedavg_free_bytes(again);
    if (payload->where == CFEDAVG_ROTATED || payload->where == CFEDAVG_FACTORED) {
        error = cfedavg_expand(golden->layout, payload, &other);
        if (error || other.k != payload->d) {
            fail(cfedavg_explain(error), "expand what was decoded");
        }
        cfedavg_free_payload(&other);
    }
}

/* Return how many golden messages are encoded as they are. */
static int check_golden(Fuzzer *fuzzer)
{
    int same = 0;

    for (int i = 0; i < fuzzer->n; i++) {
        const Golden *golden = &fuzzer->golden[i];
        cfedavg_payload payload;
        cfedavg_header header;
        int error = cfedavg_decode(golden->bytes, golden->length, golden->layout, NULL, &payload, &header);
        int is_earlier;

        if (error) {
            fail(cfedavg_explain(error), "golden message");
        }
        is_earlier = header.kind == CFEDAVG_INT8 && payload.top >= 2 && payload.top <= 15;
        encode_again(&payload, &header, golden, !is_earlier);
        cfedavg_free_payload(&payload);
        same += !is_earlier;
    }
    return same;
}

/* Change one place of the message: a bit, a byte, a field of the header, a cut, or a piece from elsewhere. */
static size_t change(Fuzzer *fuzzer, uint8_t *data, size_t length)
{
    static const uint64_t NUMBERS[] = {0, 1, 2, 15, 16, 255, 500, 65535, UINT32_MAX, UINT64_MAX, (uint64_t)1 << 53};
    const Golden *other = &fuzzer->golden[below(fuzzer, (uint64_t)fuzzer->n)];
    size_t first = length > 80 && below(fuzzer, 8) ? 76 : 0; /* mostly in the sections */
    size_t at = first + (size_t)below(fuzzer, length - first), to, n;

    switch (below(fuzzer, 12)) {
    case 0:
    case 6:
    case 7:
    case 8:
        data[at] ^= (uint8_t)(1U << below(fuzzer, 8));
        return length;
    case 1:
    case 9:
    case 10:
        data[at] = (uint8_t)below(fuzzer, 256);
        return length;
    case 2: /* one of the numbers in the header */
        put_bytes(data + 8 + (at % 8) * 8, NUMBERS[below(fuzzer, 11)], 8);
        return length;
    case 3: /* cut bytes out of the sections */
        to = 76 + (length > 80 ? at % (length - 80) : 0);
        n = (size_t)below(fuzzer, length - to + 1) % 9;
        memmove(data + to, data + to + n, length - to - n);
        return length - n;
    case 4: /* a piece of another message */
        n = (size_t)below(fuzzer, 64);
        n = n > length - at ? length - at : n;
        memcpy(data + at, other->bytes, n > other->length ? other->length : n);
        return length;
    default: /* more bytes */
        n = (size_t)below(fuzzer, 9);
        memmove(data + at + n, data + at, length - at);
        return length + n;
    }
}

/* Make the lengths of the sections fit and the checksum right, so that the mutant gets past the first checks. */
static void repair(Fuzzer *fuzzer, uint8_t *data, size_t length)
{
    uint64_t places = get_bytes(data + 52, 8), coded = get_bytes(data + 60, 8);

    if (below(fuzzer, 4) && places <= length - 80 && coded <= length - 80 - places) {
        put_bytes(data + 68, length - 80 - places - coded, 8);
    }
    if (below(fuzzer, 10)) {
        put_bytes(data + length - 4, crc32_of(0, data, length - 4), 4);
    }
}

/* Copy bytes into memory of exactly their length, so that the sanitizer sees a byte read too many. */
static uint8_t *copy_of(const uint8_t *data, size_t length)
{
    uint8_t *copy = malloc(length ? length : 1);

    if (!copy) {
        fail("no memory", "mutant");
    }
    memcpy(copy, data, length);
    return copy;
}

static void decode_mutant(Fuzzer *fuzzer, const uint8_t *mutant, size_t length, const Golden *golden)
{
    uint8_t *data = copy_of(mutant, length);
    cfedavg_payload payload;
    cfedavg_header header;
    int error;

    error = cfedavg_decode(data, length, golden->layout, NULL, &payload, &header);
    fuzzer->counts[error]++;
    if (!error) {
        encode_again(&payload, &header, golden, 0);
        cfedavg_free_payload(&payload);
    }
    free(data);
}

/* The bytes of a message are also given to the readers of the envelope. */
static void unpack_mutant(const uint8_t *data, size_t length)
{
    uint8_t *copy = copy_of(data, length);
    cfedavg_update update;
    cfedavg_body body;
    cfedavg_broadcast broadcast;

    if (length > 38) {
        memcpy(copy, "CFBC\1", 5);
        copy[5] = (uint8_t)(data[5] % 3);
        put_bytes(copy + 10, 65536, 4);
        put_bytes(copy + 22, 0, 8);
        put_bytes(copy + 30, data[6] % 8, 4);
        put_bytes(copy + length - 4, crc32_of(0, copy, length - 4), 4);
    }
    (void)cfedavg_unpack_broadcast(copy, length, &broadcast);
    (void)cfedavg_unpack_update(copy, length, 600, length % 8, &update);
    if (length > 12) {
        put_bytes(copy + 4, data[5] * 64, 8);
        put_bytes(copy, crc32_of(0, copy + 4, length - 4), 4);
    }
    (void)cfedavg_unpack_body(copy, length, &body);
    free(copy);
}

static void fuzz(Fuzzer *fuzzer, uint64_t mutants)
{
    static uint8_t data[MOST_BYTES + ROOM];

    for (uint64_t i = 0; i < mutants; i++) {
        const Golden *golden = &fuzzer->golden[below(fuzzer, (uint64_t)fuzzer->n)];
        size_t length = golden->length;

        memcpy(data, golden->bytes, length);
        for (uint64_t changes = 1 + below(fuzzer, 4); changes > 0 && length >= 80; changes--) {
            length = change(fuzzer, data, length);
        }
        if (length >= 80) {
            repair(fuzzer, data, length);
        }
        decode_mutant(fuzzer, data, length, golden);
        unpack_mutant(data, length);
    }
}

int main(int n, char **arguments)
{
    static Fuzzer fuzzer;
    int same;

    if (n < 3) {
        fail("usage: fuzz FOLDER MUTANTS [SEED]", arguments[0]);
    }
    fuzzer.state = n > 3 ? strtoull(arguments[3], NULL, 10) << 40 : 0;
    make_layouts(&fuzzer);
    read_golden(&fuzzer, arguments[1]);
    if (fuzzer.n == 0) {
        fail("no golden messages", arguments[1]);
    }
    same = check_golden(&fuzzer);
    printf("%d golden messages have the same bytes, %d are of an earlier encoder\n", same, fuzzer.n - same);
    fuzz(&fuzzer, strtoull(arguments[2], NULL, 10));
    for (int error = 0; error < CFEDAVG_ERRORS; error++) {
        if (fuzzer.counts[error]) {
            printf("%9" PRIu64 "  %s\n", fuzzer.counts[error], error ? cfedavg_explain(error) : "accepted");
        }
    }
    for (int i = 0; i < 3; i++) {
        cfedavg_free_layout(fuzzer.layouts[i]);
    }
    for (int i = 0; i < fuzzer.n; i++) {
        free(fuzzer.golden[i].bytes);
    }
    return 0;
}
