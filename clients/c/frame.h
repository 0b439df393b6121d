/* The frame of a message: header, lengths of the sections, checksum. */
#ifndef CFEDAVG_FRAME_H
#define CFEDAVG_FRAME_H

#include "bytes.h"
#include "cfedavg.h"

#define HEADER 76
#define CHECKSUM 4
#define LEAST (HEADER + CHECKSUM) /* bytes of a message whose sections are empty */
#define KEY_AND_KEEP 16
#define KEY_AND_SIZE 12 /* of a rotation */
#define RANK 4
#define SCALES 6 /* bytes of `block` and `top`, which precede the scales */
#define VALUES_PER_BYTE 11354
#define MOST_KEEP ((uint64_t)1 << 53)
#define MOST_FEW 15 /* the largest `top` of levels that are sent as kind FEW */
#define SIGN 0x8000 /* in a coded number; the magnitude is below */

enum { PLAIN, CODED };

static inline int is_basis(int where)
{
    return where == CFEDAVG_ROTATED || where == CFEDAVG_FACTORED;
}

static inline int is_float(int kind)
{
    return kind <= CFEDAVG_BF16;
}

/* Return the bytes of a value. */
static inline int size_of(int kind)
{
    static const int SIZES[] = {4, 8, 2, 1, 2, 1, 1};

    return SIZES[kind];
}

/* Return the upper 16 bits of the largest finite float, or the largest level. */
static inline int64_t largest_of(int kind)
{
    static const int64_t LARGEST[] = {0x7F7F, 0x7FEF, 0x7F7F, 127, 32767, 127, 127};

    return LARGEST[kind];
}

/* Return the least magnitude of levels of the kinds from PER_LEVEL on. */
static inline int least_of(int kind)
{
    return kind == CFEDAVG_PER_LEVEL;
}

/* Return whether values may stay uncoded. */
static inline int may_be_plain(int where, int kind)
{
    return where == CFEDAVG_ALL && (kind == CFEDAVG_FP32 || kind == CFEDAVG_FP64);
}

/* Return how many scales k levels have. k is at most 2^57. */
static inline uint64_t count_scales(int kind, uint64_t k, uint64_t block, uint64_t top)
{
    uint64_t blocks = block ? k / block + (k % block != 0) : k != 0, most = UINT64_MAX / 8;

    if (kind != CFEDAVG_PER_LEVEL) {
        return blocks;
    }
    return top && blocks > most / top ? most : blocks * top; /* `most` fits no message */
}

static inline int top_fits(int kind, uint64_t top)
{
    return top <= (uint64_t)largest_of(kind) && (kind < CFEDAVG_PER_LEVEL || top > 0);
}

/* Return whether the bits of an fp32 number are those of a finite number. */
static inline int is_finite_fp32(uint64_t bits)
{
    return (bits & 0x7F800000U) != 0x7F800000U;
}

static inline int is_finite_fp64(uint64_t bits)
{
    return (bits & 0x7FF0000000000000U) != 0x7FF0000000000000U;
}

void write_header(uint8_t *to, const cfedavg_header *header);

/* Check the parts of a message in the order of docs/wire.md, up to the checksum. */
int check_frame(const cfedavg_header *header, const uint8_t *data, size_t length, uint64_t schema, uint64_t d,
                const cfedavg_limits *limits);

#endif
