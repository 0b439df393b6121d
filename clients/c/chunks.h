/* Coordinates of which each chunk sends equally many: see docs/wire.md. */
#ifndef CFEDAVG_CHUNKS_H
#define CFEDAVG_CHUNKS_H

#include <stdint.h>

#define SHORTEST 6 /* a chunk has 2^6 to 2^16 coordinates */
#define LONGEST 16

/* Return how many coordinates are sent if each chunk of 2^s sends n, and a shorter last one n or all. d is at most
 * 2^56, s at least 6 and n below 2^s. */
uint64_t count_in_chunks(int64_t d, int s, int64_t n);

/* Return the least s for which each chunk of 2^s sends equally many of k coordinates, and this number in *n; 0 if
 * there is none. */
int find_chunk(const int64_t *indices, int64_t k, int64_t d, int64_t *n);

#endif
