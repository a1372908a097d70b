/* What every C kernel of this library shares: exported symbols, threads, instruction sets. */
#ifndef BATCHRADIX_NATIVE_H
#define BATCHRADIX_NATIVE_H

#include <stdint.h>

#define BX_EXPORT __attribute__((visibility("default")))

/* Instruction sets, each including those before it. */
enum bx_level {
    BX_PLAIN = 0,
    BX_AVX2 = 1,        /* with FMA */
    BX_AVX512 = 2,      /* F, BW, VL, DQ, VNNI */
    BX_AVX512_BF16 = 3,
    BX_AMX = 4,         /* tile, bf16 and int8; the kernel has granted the tiles */
};

/* The best level of this CPU, or the one it was limited to. */
int bx_level(void);

/* Calls task(context, thread, num_threads) once on each of at most num_threads threads and
 * returns when all are done. The threads are those of torch's OpenMP runtime, so that no second
 * pool competes with it for the cores; without such a runtime there is one thread. */
typedef void (*bx_task)(void *context, int thread, int num_threads);
void bx_parallel(bx_task task, void *context, int num_threads);

/* Calls body(context) on each of num_threads threads, which stay together: a bx_parallel inside of
 * it is reached by all of them, in the same order, and shares its task out among them. So many
 * operations in a row wake threads once. */
void bx_together(void (*body)(void *context), void *context, int num_threads);

#endif
