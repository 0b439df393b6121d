/* Sets of cells, and density bands: see docs/wire.md. */
#ifndef CFEDAVG_SETS_H
#define CFEDAVG_SETS_H

#include <stdint.h>

#include "coder.h"

#define BANDS 5
#define BAND_CONTEXTS (BANDS * (BANDS - 1))
#define BY_ROWS 1 /* modes of a tensor: its rows or its columns have bands; 3 for both */
#define BY_COLUMNS 2

/* What a decoder of indices returns, also to Python. */
enum { FINE, BEYOND, OTHER_NUMBER, NO_MEMORY };

/* Rows or columns, sorted by density band. */
typedef struct {
    int64_t n;
    uint8_t *band;  /* of each line */
    uint32_t *rank; /* of each line in its band */
    uint32_t *order; /* the lines, sorted by band */
    int64_t size[BANDS];
    int64_t start[BANDS]; /* where a band begins in `order` */
} Lines;

void put_set(Encoder *encoder, const int64_t *positions, int64_t n, int64_t start, int64_t size);
int take_set(Decoder *decoder, int64_t *positions, int64_t n, int64_t size);

int make_lines(Lines *lines, int64_t n);
void free_lines(Lines *lines);
int assign_bands(Lines *lines, const uint32_t *line, int64_t n);
void use_one_band(Lines *lines);
void sort_lines(Lines *lines);
void put_bands(Encoder *encoder, const Lines *lines);
void take_bands(Decoder *decoder, Lines *lines);

double cost_of_set(int64_t size, int64_t n);
int choose_mode(const Lines *rows, const Lines *columns, const int64_t sent[BANDS * BANDS], int64_t depth);

#endif
