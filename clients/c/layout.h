#ifndef CFEDAVG_LAYOUT_H
#define CFEDAVG_LAYOUT_H

#include "cfedavg.h"

/* The tensors of a model as matrices; those without elements are left out. */
struct cfedavg_layout {
    uint64_t schema;
    int64_t d;
    int64_t tensors;
    int64_t *shapes; /* for each tensor: its rows, its columns, and how many coordinates a row and a column share */
    int64_t rows;    /* of all tensors */
    int64_t *row_ends; /* for each row: the coordinate at which it ends */
};

#endif
