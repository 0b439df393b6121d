/* Positions of 1 bits in a number. */
#ifndef CFEDAVG_BITS_H
#define CFEDAVG_BITS_H

#include <stdint.h>

/* Return how many bits a number has; 0 has none. */
static inline int bit_length(uint64_t number)
{
#if defined(__GNUC__)
    return number ? 64 - __builtin_clzll(number) : 0;
#else
    int bits = 0;

    while (bits < 64 && number >> bits) {
        bits++;
    }
    return bits;
#endif
}

/* Return the position of the lowest 1 bit of a number above 0. */
static inline int lowest_one(uint64_t number)
{
    return bit_length(number & (~number + 1)) - 1;
}

#endif
