#ifndef CFEDAVG_ALLOCATE_H
#define CFEDAVG_ALLOCATE_H

#include <stdint.h>
#include <stdlib.h>

/* Allocate zeros for n items, and for one more: an empty array is no failure. Return NULL if there is no memory,
 * also where size_t has 32 bits and cannot hold the length. */
static inline void *allocate(uint64_t n, size_t size)
{
    return n < (uint64_t)PTRDIFF_MAX / size ? calloc((size_t)n + 1, size) : NULL;
}

/* Allocate memory for n items that the caller fills. Return NULL if there is none. */
static inline void *reserve(uint64_t n, size_t size)
{
    return n < (uint64_t)PTRDIFF_MAX / size ? malloc(((size_t)n + 1) * size) : NULL;
}

#endif
