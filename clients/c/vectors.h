/* Vector instructions of the processor at hand. */
#ifndef CFEDAVG_VECTORS_H
#define CFEDAVG_VECTORS_H

#include <stdint.h> /* with glibc, it says so */

/* Compile a function for processors with wider vectors too; the library takes the best when it is loaded. This
 * needs glibc. Give it to functions only whose results are the same everywhere. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute) && !defined(__clang__)
#if __has_attribute(target_clones)
#define WIDE_VECTORS __attribute__((target_clones("default", "avx2")))
#endif
#endif
#ifndef WIDE_VECTORS
#define WIDE_VECTORS
#endif

#endif
