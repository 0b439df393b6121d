/* Values in another basis: see docs/wire.md and src/cfedavg/core/bases.py. */
#ifndef CFEDAVG_BASES_H
#define CFEDAVG_BASES_H

#include "cfedavg.h"

/* The rows of which each has contexts for the signs of its values, in the two forms that the coders need. */
typedef struct {
    const int64_t *shapes;
    int64_t tensors;
    const int64_t *ends;
    int64_t n;
    int64_t one[4]; /* the shape and the end of the only row of values in another basis */
} ValueRows;

/* Fill in the rows of a payload's values. `rows` points into itself. */
void make_rows_of(ValueRows *rows, const cfedavg_layout *layout, const cfedavg_payload *payload);

/* Check that the basis of a payload has a place in a message, and k coordinates. */
int check_basis(const cfedavg_layout *layout, const cfedavg_payload *payload);

#endif
