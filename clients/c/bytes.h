/* Bytes of messages: numbers in them, and hashes of them. */
#ifndef CFEDAVG_BYTES_H
#define CFEDAVG_BYTES_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint32_t state[8];
    uint8_t block[64];
    uint64_t length; /* of all bytes so far */
} Sha256;

void start_sha256(Sha256 *hash);
void add_to_sha256(Sha256 *hash, const void *data, size_t length);
void finish_sha256(Sha256 *hash, uint8_t digest[32]);

/* Return the CRC-32 of some bytes after those whose CRC-32 is `before` (0 for none). */
uint32_t crc32_of(uint32_t before, const uint8_t *data, size_t length);

/* Write or read the lower n bytes of a number, little endian. */
static inline void put_bytes(uint8_t *to, uint64_t number, int n)
{
    for (int i = 0; i < n; i++) {
        to[i] = (uint8_t)(number >> 8 * i);
    }
}

static inline uint64_t get_bytes(const uint8_t *from, int n)
{
    uint64_t number = 0;

    for (int i = 0; i < n; i++) {
        number |= (uint64_t)from[i] << 8 * i;
    }
    return number;
}

#endif
