#include "frame.h"

#include <string.h>

static const uint8_t MAGIC[4] = {'C', 'F', 'A', 'V'};

static int version_of(int where, int kind, int coding)
{
    if (where >= CFEDAVG_ROTATED || kind >= CFEDAVG_PER_LEVEL) {
        return 3;
    }
    return coding == CODED && may_be_plain(where, kind) ? 2 : 1;
}

void write_header(uint8_t *to, const cfedavg_header *header)
{
    const uint64_t numbers[] = {header->schema, header->d, header->k, header->sender.client,
                                header->sender.sequence};

    memcpy(to, MAGIC, sizeof MAGIC);
    to[4] = (uint8_t)version_of(header->where, header->kind, header->coding);
    to[5] = (uint8_t)header->where;
    to[6] = (uint8_t)header->kind;
    to[7] = (uint8_t)header->coding;
    for (int i = 0; i < 5; i++) {
        put_bytes(to + 8 + 8 * i, numbers[i], 8);
    }
    put_bytes(to + 48, header->sender.round, 4);
    for (int i = 0; i < 3; i++) {
        put_bytes(to + 52 + 8 * i, header->lengths[i], 8);
    }
}

int cfedavg_read_header(const uint8_t *data, size_t length, cfedavg_header *header)
{
    cfedavg_header found;

    if (length < HEADER || memcmp(data, MAGIC, sizeof MAGIC) != 0) {
        return CFEDAVG_NO_MESSAGE;
    }
    found.version = data[4];
    found.where = data[5];
    found.kind = data[6];
    found.coding = data[7];
    found.schema = get_bytes(data + 8, 8);
    found.d = get_bytes(data + 16, 8);
    found.k = get_bytes(data + 24, 8);
    found.sender.client = get_bytes(data + 32, 8);
    found.sender.sequence = get_bytes(data + 40, 8);
    found.sender.round = (uint32_t)get_bytes(data + 48, 4);
    for (int i = 0; i < 3; i++) {
        found.lengths[i] = get_bytes(data + 52 + 8 * i, 8);
    }
    if (found.version < 1 || found.version > 3) {
        return CFEDAVG_UNKNOWN_VERSION;
    }
    if (found.where > (found.version == 3 ? CFEDAVG_CHUNKED : CFEDAVG_LISTED)) {
        return CFEDAVG_UNKNOWN_WHERE;
    }
    if (found.kind > (found.version == 3 ? CFEDAVG_FEW : CFEDAVG_INT16)) {
        return CFEDAVG_UNKNOWN_KIND;
    }
    if (found.coding > CODED) {
        return CFEDAVG_UNKNOWN_CODING;
    }
    if (found.version != version_of(found.where, found.kind, found.coding)) {
        return found.version == 1   ? CFEDAVG_NEEDS_VERSION_2
               : found.version == 2 ? CFEDAVG_NEEDS_VERSION_1
                                    : CFEDAVG_NEEDS_NO_VERSION_3;
    }
    *header = found;
    return CFEDAVG_OK;
}

/* Check 3 and 4: model, number of values, coding. */
static int check_model(const cfedavg_header *header, uint64_t schema, uint64_t d, uint64_t most)
{
    if (header->schema != schema || header->d != d) {
        return CFEDAVG_OTHER_MODEL;
    }
    if (header->k > (header->where == CFEDAVG_ROTATED ? 2 * d : d) || (most && header->k > most)) {
        return CFEDAVG_TOO_MANY_VALUES;
    }
    if (header->where == CFEDAVG_ALL && header->k != d) {
        return CFEDAVG_NOT_ALL_VALUES;
    }
    return header->coding == PLAIN && !may_be_plain(header->where, header->kind) ? CFEDAVG_MUST_BE_CODED
                                                                                 : CFEDAVG_OK;
}

/* Return whether the sections are shorter than the message (-1), longer (1), or fit (0). The sum may overflow. */
static int compare_lengths(const cfedavg_header *header, size_t length)
{
    uint64_t left = length < LEAST ? 0 : length - LEAST;

    for (int i = 0; i < 3; i++) {
        if (header->lengths[i] > left) {
            return 1;
        }
        left -= header->lengths[i];
    }
    return length < LEAST ? 1 : left ? -1 : 0;
}

/* Return the bytes that section 3 must have. */
static uint64_t copied_length(const cfedavg_header *header, const uint8_t *copied)
{
    int size;

    if (is_float(header->kind)) {
        size = size_of(header->kind) - (header->coding == CODED ? 2 : 0);
        return header->k * (uint64_t)size;
    }
    if (header->lengths[2] < SCALES) {
        return SCALES;
    }
    return SCALES + 4 * count_scales(header->kind, header->k, get_bytes(copied, 4), get_bytes(copied + 4, 2));
}

/* Check 5: the length of each section fits the number of values. */
static int check_lengths(const cfedavg_header *header, const uint8_t *data)
{
    static const uint64_t LENGTHS[] = {0, KEY_AND_KEEP, 0, KEY_AND_SIZE, RANK, 0};
    uint64_t places = header->lengths[0], coded = header->lengths[1];
    uint64_t values = header->coding == CODED ? header->k : 0;
    int is_coded = header->where == CFEDAVG_LISTED || header->where == CFEDAVG_CHUNKED;

    if (!is_coded && places != LENGTHS[header->where]) {
        return CFEDAVG_COORDINATES_LENGTH;
    }
    if (header->lengths[2] != copied_length(header, data + HEADER + places + coded)) {
        return CFEDAVG_COPIED_LENGTH;
    }
    if ((coded && !values) || values / VALUES_PER_BYTE > coded + 8 ||
        (values / VALUES_PER_BYTE == coded + 8 && values % VALUES_PER_BYTE)) {
        return CFEDAVG_CODED_LENGTH;
    }
    return CFEDAVG_OK;
}

int check_frame(const cfedavg_header *header, const uint8_t *data, size_t length, uint64_t schema, uint64_t d,
                const cfedavg_limits *limits)
{
    int error, compared;

    if (limits->knows_sender && header->sender.client != limits->client) {
        return CFEDAVG_OTHER_CLIENT;
    }
    if (limits->knows_sender && header->sender.sequence != limits->sequence) {
        return CFEDAVG_OTHER_SEQUENCE;
    }
    error = check_model(header, schema, d, limits->max_values);
    if (error) {
        return error;
    }
    compared = compare_lengths(header, length);
    if (compared) {
        return compared > 0 ? CFEDAVG_CUT_SHORT : CFEDAVG_EXTRA_BYTES;
    }
    error = check_lengths(header, data);
    if (error) {
        return error;
    }
    if (crc32_of(0, data, length - CHECKSUM) != get_bytes(data + length - CHECKSUM, CHECKSUM)) {
        return CFEDAVG_WRONG_CHECKSUM;
    }
    return CFEDAVG_OK;
}
