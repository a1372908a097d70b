/* Operations on the rows of a matrix: number formats, instruction sets, threads.
 *
 * A kernel is written once, as plain loops that the compiler vectorises, and compiled for every
 * instruction set. Values are float32 inside and rounded once on the way out. A row's result
 * depends on the row alone: sums run over aligned scratch, never over where the row happens to
 * lie, and threads share out whole rows. */
#ifndef BATCHRADIX_ROWS_H
#define BATCHRADIX_ROWS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "native.h"

#define BX_INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#define BX_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define BX_TARGET_AVX512                                                                          \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))
#else
#define BX_TARGET_AVX2
#define BX_TARGET_AVX512
#endif

/* How the elements of a matrix are stored. */
enum bx_kind {
    BX_FLOAT32 = 0,
    BX_BFLOAT16 = 1,
    BX_INT8 = 2, /* times one float32 a row */
};

#define BX_ROUND 12582912.0f /* 1.5 * 2**23: adding it leaves the nearest integer in the low bits */

BX_INLINE uint32_t bx_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

BX_INLINE float bx_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

BX_INLINE float bx_load(const void *matrix, int64_t i, int kind)
{
    if (kind == BX_FLOAT32)
        return ((const float *)matrix)[i];
    return bx_float((uint32_t)((const uint16_t *)matrix)[i] << 16);
}

/* To the nearest, ties to even; NaN stays NaN. */
BX_INLINE uint16_t bx_bfloat16(float value)
{
    uint32_t bits = bx_bits(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(value == value ? rounded : 0x7fc0);
}

BX_INLINE void bx_store(void *matrix, int64_t i, int kind, float value)
{
    if (kind == BX_FLOAT32)
        ((float *)matrix)[i] = value;
    else
        ((uint16_t *)matrix)[i] = bx_bfloat16(value);
}

/* To about 2 units in the last place; infinite from 88 on. NaN gives NaN. */
BX_INLINE float bx_exponential(float power)
{
    float x = power < -87.0f ? -87.0f : power;
    x = x > 88.0f ? 88.0f : x;
    float shifted = x * 1.44269504f + BX_ROUND;
    float n = shifted - BX_ROUND;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    p = bx_float(bx_bits(p) + ((bx_bits(shifted) - bx_bits(BX_ROUND)) << 23));
    return power > 88.0f ? INFINITY : p;
}

/* Float32 scratch on the stack for one row. */
#define BX_SCRATCH(name, width) float name[width] __attribute__((aligned(64)))

/* Elements worth a second thread: waking one costs some microseconds. */
#define BX_ELEMENTS_A_THREAD 16384

BX_INLINE int bx_threads(int64_t elements, int most)
{
    int64_t worth = elements / BX_ELEMENTS_A_THREAD;
    return worth < 1 ? 1 : worth < most ? (int)worth : most;
}

/* From `name_rows(const struct name *, int64_t first, int64_t last)`, an inline function, makes
 * `name_run(struct name *, int64_t elements, int most_threads)`, which does rows [0, num_rows)
 * with the best instruction set. `struct name` has `int64_t num_rows`. */
#define BX_ROW_KERNEL(name) BX_ROW_KERNEL_WITH(name, name##_rows)

/* The same with `rows_avx512`, like `name_rows`, for AVX512. */
#define BX_ROW_KERNEL_WITH(name, rows_avx512)                                                     \
    BX_TARGET_AVX512 static void name##_avx512(const struct name *c, int64_t first, int64_t last) \
    {                                                                                             \
        rows_avx512(c, first, last);                                                              \
    }                                                                                             \
    BX_TARGET_AVX2 static void name##_avx2(const struct name *c, int64_t first, int64_t last)     \
    {                                                                                             \
        name##_rows(c, first, last);                                                              \
    }                                                                                             \
    static void name##_plain(const struct name *c, int64_t first, int64_t last)                   \
    {                                                                                             \
        name##_rows(c, first, last);                                                              \
    }                                                                                             \
    static void name##_task(void *context, int thread, int num_threads)                           \
    {                                                                                             \
        const struct name *c = context;                                                           \
        int64_t first = c->num_rows * thread / num_threads;                                       \
        int64_t last = c->num_rows * (thread + 1) / num_threads;                                  \
        int level = bx_level();                                                                   \
        (level >= BX_AVX512 ? name##_avx512 : level >= BX_AVX2 ? name##_avx2 : name##_plain)(     \
            c, first, last);                                                                      \
    }                                                                                             \
    static void name##_run(struct name *c, int64_t elements, int most_threads)                    \
    {                                                                                             \
        bx_parallel(name##_task, c, bx_threads(elements, most_threads));                          \
    }

#endif
