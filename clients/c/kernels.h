/* The loops over arrays that the Python package calls too, through src/cfedavg/core/native.py.
 *
 * Each does what the Python function of the same name does, in src/cfedavg. Indices are int64, increasing.
 * A function that needs scratch memory returns NO_ROOM if there is none.
 */
#ifndef CFEDAVG_KERNELS_H
#define CFEDAVG_KERNELS_H

#include <stdint.h>

#include "cfedavg.h"

#define KERNELS 4 /* rises when a function that Python calls, here or in cfedavg.h, or a struct changes */
#define NO_ROOM (-1)
#define MOST_CELLS ((int64_t)1 << 56) /* of a vector; sums of positions stay in 64 bits */

/* A number format of `add_values`. */
enum { NUMBERS_FLOAT, NUMBERS_INT8, NUMBERS_INT16 };

CFEDAVG_API int cfedavg_kernels(void);

/* Fill `words` (there is space for `room`); return how many words the section has, which may exceed `room`. */
CFEDAVG_API int64_t cfedavg_encode_indices(uint32_t *words, int64_t room, const int64_t *indices, int64_t n,
                                           int64_t d, const int64_t *shapes, int64_t tensors);
/* Return FINE or a fault of sets.h; *read is the number of words that were read. */
CFEDAVG_API int cfedavg_decode_indices(const uint32_t *words, int64_t length, int64_t *indices, int64_t n,
                                       int64_t d, const int64_t *shapes, int64_t tensors, int64_t *read);
/* The same for coordinates of which each chunk of 2^s sends `of_chunk`. */
CFEDAVG_API int64_t cfedavg_encode_chunks(uint32_t *words, int64_t room, const int64_t *indices, int64_t n, int64_t d,
                                          const int64_t *shapes, int64_t tensors, int64_t s, int64_t of_chunk);
CFEDAVG_API int cfedavg_decode_chunks(const uint32_t *words, int64_t length, int64_t *indices, int64_t n, int64_t d,
                                      const int64_t *shapes, int64_t tensors, int64_t *read);
CFEDAVG_API int cfedavg_are_increasing(const int64_t *indices, int64_t n, int64_t d);
CFEDAVG_API void cfedavg_list_ones(const uint64_t *bits, int64_t n, int64_t *found, int64_t room);

/* Both return the number of words, or 0 if a magnitude exceeds `largest`. `indices` is NULL if all coordinates
 * are sent. */
CFEDAVG_API int64_t cfedavg_encode_numbers(uint32_t *words, int64_t room, const uint16_t *numbers, int64_t n,
                                           const int64_t *indices, const int64_t *row_ends, int64_t rows,
                                           int zero_has_sign, int64_t largest);
CFEDAVG_API int64_t cfedavg_decode_numbers(const uint32_t *words, int64_t length, uint16_t *numbers, int64_t n,
                                           const int64_t *indices, const int64_t *row_ends, int64_t rows,
                                           int zero_has_sign, int64_t largest);

/* The same for magnitudes from `least`, 0 or 1, to `top`, which is at most 127. */
CFEDAVG_API int64_t cfedavg_encode_levels(uint32_t *words, int64_t room, const uint16_t *numbers, int64_t n,
                                          const int64_t *indices, const int64_t *shapes, int64_t tensors,
                                          int64_t least, int64_t top);
CFEDAVG_API int64_t cfedavg_decode_levels(const uint32_t *words, int64_t length, uint16_t *numbers, int64_t n,
                                          const int64_t *indices, const int64_t *shapes, int64_t tensors,
                                          int64_t least, int64_t top);

/* `size` is that of a value in bytes: 4 or 8. */
CFEDAVG_API int64_t cfedavg_find_bound(const void *bits, int size, int64_t d, int64_t k, int64_t stride,
                                       int64_t slack, int width);
CFEDAVG_API int64_t cfedavg_collect(const void *values, int size, int64_t d, double bound, int64_t *found);
CFEDAVG_API int64_t cfedavg_pick(const void *bits, int size, const int64_t *found, int64_t n, int width,
                                 int64_t *indices, int64_t k);
CFEDAVG_API double cfedavg_squares(const void *values, int size, int64_t n);

/* Draw coordinates; return how many there are, of which the first `room` are written. */
CFEDAVG_API int64_t cfedavg_draw_into(int64_t key, int64_t keep, int64_t d, int64_t *indices, int64_t room);

/* Add numbers[i] * scales[i / block] to w[at[i]] for i from `first` on, while at[i] < stop; return the first i
 * that was not added. */
CFEDAVG_API int64_t cfedavg_add(float *w, const int64_t *at, int64_t n, const void *numbers, int format,
                                const float *scales, int64_t block, int64_t first, int64_t stop);
CFEDAVG_API int64_t cfedavg_add_to_bf16(uint16_t *w, const int64_t *at, int64_t n, const void *numbers,
                                        int format, const float *scales, int64_t block, int64_t first,
                                        int64_t stop);

#endif
