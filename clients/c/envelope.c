/* The envelope of messages: see docs/envelope.md; and broadcasts: see docs/protocol.md. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "allocate.h"
#include "bytes.h"
#include "cfedavg.h"

#define LENGTHS 8 /* of a client's message: those of its payload and its facts */
#define MOST_FACTS 65536
#define BODY 12 /* bytes of the checksum and the length in front of a body */
#define BROADCAST 34 /* bytes of a broadcast's header */
#define CHECKSUM 4
#define MOST_EARLIER 65536

/* A piece of bytes to be joined. */
typedef struct {
    const void *bytes;
    size_t length;
} Piece;

/* Join pieces behind `before` bytes that the caller fills. */
static int join(size_t before, const Piece *pieces, int n, uint8_t **data, size_t *length)
{
    size_t size = before;
    uint8_t *made, *at;

    for (int i = 0; i < n; i++) {
        if (pieces[i].length > SIZE_MAX / 2 - size) {
            return CFEDAVG_NO_MEMORY;
        }
        size += pieces[i].length;
    }
    made = allocate(size, 1);
    if (!made) {
        return CFEDAVG_NO_MEMORY;
    }
    at = made + before;
    for (int i = 0; i < n; i++) {
        if (pieces[i].length) { /* the pointer of an empty piece may be NULL */
            memcpy(at, pieces[i].bytes, pieces[i].length);
        }
        at += pieces[i].length;
    }
    *data = made;
    *length = size;
    return CFEDAVG_OK;
}

int cfedavg_pack_update(const cfedavg_update *update, uint8_t **message, size_t *length)
{
    const Piece pieces[] = {{update->payload, update->payload_length},
                            {update->facts, update->facts_length},
                            {update->uncompressed, update->uncompressed_length}};
    int error;

    if (update->payload_length > UINT32_MAX || update->facts_length > MOST_FACTS) {
        return CFEDAVG_BAD_ARGUMENT;
    }
    error = join(LENGTHS, pieces, 3, message, length);
    if (!error) {
        put_bytes(*message, update->payload_length, 4);
        put_bytes(*message + 4, update->facts_length, 4);
    }
    return error;
}

int cfedavg_unpack_update(const uint8_t *data, size_t length, uint64_t most, uint64_t uncompressed,
                          cfedavg_update *update)
{
    uint64_t payload, facts;

    if (length < LENGTHS) {
        return CFEDAVG_UPDATE_CUT_SHORT;
    }
    payload = get_bytes(data, 4);
    facts = get_bytes(data + 4, 4);
    if (payload > most) {
        return CFEDAVG_PAYLOAD_TOO_LONG;
    }
    if (facts > MOST_FACTS || uncompressed > length || length - uncompressed != LENGTHS + payload + facts) {
        return CFEDAVG_WRONG_LENGTHS;
    }
    update->payload = data + LENGTHS;
    update->payload_length = (size_t)payload;
    update->facts = (const char *)data + LENGTHS + payload;
    update->facts_length = (size_t)facts;
    update->uncompressed = data + LENGTHS + payload + facts;
    update->uncompressed_length = (size_t)uncompressed;
    return CFEDAVG_OK;
}

uint32_t cfedavg_check_reply(uint32_t generation, uint32_t number, uint64_t incarnation, const uint8_t *message,
                             size_t length)
{
    char text[64];
    int n = snprintf(text, sizeof text, "[%" PRIu32 ", %" PRIu32 ", %" PRIu64 "]", generation, number, incarnation);

    return crc32_of(crc32_of(0, (const uint8_t *)text, (size_t)n), message, length);
}

int cfedavg_pack_body(const cfedavg_body *body, uint8_t **data, size_t *length)
{
    const Piece pieces[] = {{body->broadcast, body->broadcast_length},
                            {body->uncompressed, body->uncompressed_length}};
    int error = join(BODY, pieces, 2, data, length);

    if (!error) {
        put_bytes(*data + CHECKSUM, body->broadcast_length, 8);
        put_bytes(*data, crc32_of(0, *data + CHECKSUM, *length - CHECKSUM), CHECKSUM);
    }
    return error;
}

int cfedavg_unpack_body(const uint8_t *data, size_t length, cfedavg_body *body)
{
    uint64_t broadcast;

    if (length < BODY || get_bytes(data, CHECKSUM) != crc32_of(0, data + CHECKSUM, length - CHECKSUM)) {
        return CFEDAVG_WRONG_BODY;
    }
    broadcast = get_bytes(data + CHECKSUM, 8);
    if (broadcast > length - BODY) {
        return CFEDAVG_WRONG_BODY;
    }
    body->broadcast = data + BODY;
    body->broadcast_length = (size_t)broadcast;
    body->uncompressed = data + BODY + broadcast;
    body->uncompressed_length = length - BODY - (size_t)broadcast;
    return CFEDAVG_OK;
}

/* Read the header of a broadcast and check its numbers. */
static int read_broadcast(const uint8_t *data, cfedavg_broadcast *found)
{
    uint32_t most;

    found->kind = data[5];
    found->generation = (uint32_t)get_bytes(data + 6, 4);
    found->round = (uint32_t)get_bytes(data + 10, 4);
    found->hash = get_bytes(data + 14, 8);
    found->digest = get_bytes(data + 22, 8);
    found->earlier = (uint32_t)get_bytes(data + 30, 4);
    most = found->round < MOST_EARLIER ? found->round : MOST_EARLIER;
    if (data[4] != 1 || found->kind > CFEDAVG_WHOLE || found->generation == 0 || found->earlier > most ||
        (found->kind == CFEDAVG_CHAIN && found->digest) || (found->kind == CFEDAVG_WHOLE && found->earlier)) {
        return CFEDAVG_WRONG_BROADCAST;
    }
    return CFEDAVG_OK;
}

/* Check that the versions in the list lead to the broadcast's version, and that its messages have their lengths. */
static int check_distance(const cfedavg_broadcast *found)
{
    uint64_t left = found->length;

    if (found->kind == CFEDAVG_CHANGES && found->earlier == 0) {
        return CFEDAVG_BROADCAST_DISTANCE;
    }
    if (found->kind != CFEDAVG_CHAIN) {
        return CFEDAVG_OK;
    }
    if (found->earlier == 0 && cfedavg_listed(found, 0) != found->hash) {
        return CFEDAVG_BROADCAST_DISTANCE; /* no message leads to another hash */
    }
    for (uint32_t i = 1; i <= found->earlier; i++) {
        if (cfedavg_listed(found, i) > left) {
            return CFEDAVG_BROADCAST_DISTANCE;
        }
        left -= cfedavg_listed(found, i);
    }
    return left ? CFEDAVG_BROADCAST_DISTANCE : CFEDAVG_OK;
}

int cfedavg_unpack_broadcast(const uint8_t *data, size_t length, cfedavg_broadcast *broadcast)
{
    cfedavg_broadcast found;
    size_t end = length - CHECKSUM, listed;
    int error;

    if (length < BROADCAST + CHECKSUM || memcmp(data, "CFBC", 4) != 0) {
        return CFEDAVG_NO_BROADCAST;
    }
    error = read_broadcast(data, &found);
    if (error) {
        return error;
    }
    if (get_bytes(data + end, CHECKSUM) != crc32_of(0, data, end)) {
        return CFEDAVG_BROADCAST_CHECKSUM;
    }
    listed = 8 * ((size_t)found.earlier + (found.kind == CFEDAVG_CHAIN));
    if (listed > end - BROADCAST) {
        return CFEDAVG_BROADCAST_CUT_SHORT;
    }
    found.list = data + BROADCAST;
    found.messages = found.list + listed;
    found.length = end - BROADCAST - listed;
    error = check_distance(&found);
    if (!error) {
        *broadcast = found;
    }
    return error;
}

uint64_t cfedavg_listed(const cfedavg_broadcast *broadcast, uint32_t i)
{
    return get_bytes(broadcast->list + 8 * (size_t)i, 8);
}

/* Hash two pieces; return the first 64 bits, the first byte being the highest. */
static uint64_t digest_of(const void *first, size_t first_length, const void *second, size_t second_length)
{
    Sha256 hash;
    uint8_t digest[32];
    uint64_t number = 0;

    start_sha256(&hash);
    add_to_sha256(&hash, first, first_length);
    add_to_sha256(&hash, second, second_length);
    finish_sha256(&hash, digest);
    for (int i = 0; i < 8; i++) {
        number = number << 8 | digest[i];
    }
    return number;
}

uint64_t cfedavg_digest(const void *data, size_t length)
{
    return digest_of(data, length, NULL, 0);
}

uint64_t cfedavg_first_version(uint32_t generation, uint32_t round, uint64_t digest)
{
    uint8_t bytes[16];

    put_bytes(bytes, generation, 4);
    put_bytes(bytes + 4, round, 4);
    put_bytes(bytes + 8, digest, 8);
    return digest_of(bytes, sizeof bytes, NULL, 0);
}

uint64_t cfedavg_next_version(uint64_t hash, const uint8_t *message, size_t length)
{
    uint8_t bytes[8];

    put_bytes(bytes, hash, sizeof bytes);
    return digest_of(bytes, sizeof bytes, message, length);
}
