/* CRC-32 as in zlib, and SHA-256 as in FIPS 180-4. */
#include <string.h>

#include "bytes.h"

/* The CRC-32 of each value of 4 bits: a table of 16 words is small enough to be written here. */
static const uint32_t NIBBLES[16] = {
    0x00000000, 0x1DB71064, 0x3B6E20C8, 0x26D930AC, 0x76DC4190, 0x6B6B51F4, 0x4DB26158, 0x5005713C,
    0xEDB88320, 0xF00F9344, 0xD6D6A3E8, 0xCB61B38C, 0x9B64C2B0, 0x86D3D2D4, 0xA00AE278, 0xBDBDF21C,
};

static const uint32_t ROUNDS[64] = {
    0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5,
    0xD807AA98, 0x12835B01, 0x243185BE, 0x550C7DC3, 0x72BE5D74, 0x80DEB1FE, 0x9BDC06A7, 0xC19BF174,
    0xE49B69C1, 0xEFBE4786, 0x0FC19DC6, 0x240CA1CC, 0x2DE92C6F, 0x4A7484AA, 0x5CB0A9DC, 0x76F988DA,
    0x983E5152, 0xA831C66D, 0xB00327C8, 0xBF597FC7, 0xC6E00BF3, 0xD5A79147, 0x06CA6351, 0x14292967,
    0x27B70A85, 0x2E1B2138, 0x4D2C6DFC, 0x53380D13, 0x650A7354, 0x766A0ABB, 0x81C2C92E, 0x92722C85,
    0xA2BFE8A1, 0xA81A664B, 0xC24B8B70, 0xC76C51A3, 0xD192E819, 0xD6990624, 0xF40E3585, 0x106AA070,
    0x19A4C116, 0x1E376C08, 0x2748774C, 0x34B0BCB5, 0x391C0CB3, 0x4ED8AA4A, 0x5B9CCA4F, 0x682E6FF3,
    0x748F82EE, 0x78A5636F, 0x84C87814, 0x8CC70208, 0x90BEFFFA, 0xA4506CEB, 0xBEF9A3F7, 0xC67178F2,
};

#define EIGHT 8
#define LONG 4096 /* bytes that are worth the tables */

/* tables[k][i] is the CRC-32 of the byte i and k zero bytes after it. */
static void make_tables(uint32_t tables[EIGHT][256])
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t half = i >> 4 ^ NIBBLES[i & 15];

        tables[0][i] = half >> 4 ^ NIBBLES[half & 15];
    }
    for (int k = 1; k < EIGHT; k++) {
        for (int i = 0; i < 256; i++) {
            tables[k][i] = tables[k - 1][i] >> 8 ^ tables[0][tables[k - 1][i] & 255];
        }
    }
}

/* Add n bytes to a checksum, eight at a time; n is a multiple of eight. */
static uint32_t add_by_eights(uint32_t crc, const uint8_t *data, size_t n)
{
    uint32_t tables[EIGHT][256];

    make_tables(tables);
    for (const uint8_t *end = data + n; data < end; data += EIGHT) {
        uint32_t first = crc ^ (uint32_t)get_bytes(data, 4), second = (uint32_t)get_bytes(data + 4, 4);

        crc = tables[7][first & 255] ^ tables[6][first >> 8 & 255] ^ tables[5][first >> 16 & 255] ^
              tables[4][first >> 24] ^ tables[3][second & 255] ^ tables[2][second >> 8 & 255] ^
              tables[1][second >> 16 & 255] ^ tables[0][second >> 24];
    }
    return crc;
}

uint32_t crc32_of(uint32_t before, const uint8_t *data, size_t length)
{
    uint32_t crc = ~before;
    size_t by_eights = length < LONG ? 0 : length / EIGHT * EIGHT;

    if (by_eights) {
        crc = add_by_eights(crc, data, by_eights);
    }
    for (size_t i = by_eights; i < length; i++) {
        crc ^= data[i];
        crc = crc >> 4 ^ NIBBLES[crc & 15];
        crc = crc >> 4 ^ NIBBLES[crc & 15];
    }
    return ~crc;
}

void start_sha256(Sha256 *hash)
{
    static const uint32_t START[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                      0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

    memcpy(hash->state, START, sizeof START);
    hash->length = 0;
}

static uint32_t rotate(uint32_t word, int bits)
{
    return word >> bits | word << (32 - bits);
}

static void expand(uint32_t words[64], const uint8_t block[64])
{
    for (int i = 0; i < 16; i++) {
        words[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
                   (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
    }
    for (int i = 16; i < 64; i++) {
        uint32_t a = words[i - 15], b = words[i - 2];

        words[i] = words[i - 16] + words[i - 7] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) +
                   (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
}

static void add_block(uint32_t state[8], const uint8_t block[64])
{
    uint32_t words[64], s[8];

    expand(words, block);
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t e = s[4], a = s[0];
        uint32_t one = s[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & s[5]) ^ (~e & s[6])) +
                       ROUNDS[i] + words[i];
        uint32_t two = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));

        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += one;
        s[0] = one + two;
    }
    for (int i = 0; i < 8; i++) {
        state[i] += s[i];
    }
}

void add_to_sha256(Sha256 *hash, const void *data, size_t length)
{
    const uint8_t *bytes = data;

    while (length > 0) {
        size_t at = (size_t)(hash->length % 64), part = 64 - at < length ? 64 - at : length;

        memcpy(hash->block + at, bytes, part);
        hash->length += part;
        bytes += part;
        length -= part;
        if (at + part == 64) {
            add_block(hash->state, hash->block);
        }
    }
}

void finish_sha256(Sha256 *hash, uint8_t digest[32])
{
    static const uint8_t PADDING[64] = {0x80};
    uint64_t bits = 8 * hash->length;
    uint8_t end[8];

    add_to_sha256(hash, PADDING, (size_t)(1 + (119 - hash->length % 64) % 64));
    for (int i = 0; i < 8; i++) {
        end[i] = (uint8_t)(bits >> (56 - 8 * i));
    }
    add_to_sha256(hash, end, sizeof end);
    for (int i = 0; i < 32; i++) {
        digest[i] = (uint8_t)(hash->state[i / 4] >> (24 - 8 * (i % 4)));
    }
}
