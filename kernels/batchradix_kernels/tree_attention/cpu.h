/* Cascade attention on the CPU: what its files share.
 *
 * A pool holds, for each layer and key head, keys and values of `num_slots` slots (a multiple of
 * BLOCK). Head dimensions are padded with zeros to `dim`, a multiple of BLOCK.
 *   float32: keys [slots / 16][dim][16], values [slots][dim]
 *   bfloat16: keys [slots / 16][dim / 2][16][2], values [slots / 2][dim][2]
 * which is what a multiplication by broadcast queries, by pairs (vdpbf16ps) and by tiles (AMX)
 * reads in order.
 */
#ifndef BATCHRADIX_TREE_ATTENTION_H
#define BATCHRADIX_TREE_ATTENTION_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "native.h"

#define BLOCK 32 /* slots that are attended to at a time, aligned in the pool */
#define WINDOW 64 /* slots whose weights some kernels find together; positions, where cut by them */
#define LANES 16 /* partial sums a row keeps */
#define TILE 16  /* rows that AMX multiplies at a time; scratch has room for as many to spare */
#define MAX_DIM 640
#define LOG2_E 1.4426950408889634f

typedef uint32_t word __attribute__((may_alias)); /* a pair of bfloat16, or the bits of a float */

/* What rows see of consecutive aligned blocks: slots [low, high), counted from the first slot of
 * the first block, which `keys` and `values` point to. The others may hold anything, NaN
 * included. */
struct blocks {
    const void *keys, *values;
    int low, high;
};

/* One of them alone; `bytes` is the size of its keys. */
static inline struct blocks one_of(const struct blocks *blocks, int index, int bytes)
{
    int low = blocks->low - index * BLOCK, high = blocks->high - index * BLOCK;
    return (struct blocks){
        (const char *)blocks->keys + (int64_t)index * bytes,
        (const char *)blocks->values + (int64_t)index * bytes,
        low > 0 ? low : 0,
        high < BLOCK ? high : BLOCK,
    };
}

/* Consecutive rows and the state of their online softmax: the largest score so far, `sum` of
 * weights relative to it and `out`, the weighted sum of values. `limits`, where not NULL, is the
 * high of each row, in (low, high], none below that of the row before, and `lows`, where not NULL,
 * the low of each, in [low, high); there is one block then, or for kernels that take one a window,
 * and its values are finite. `cap`, where not zero, makes a score cap * tanh(score / cap). */
struct rows {
    int count, dim;
    float scale;      /* of the scores, for powers of two */
    float cap;        /* of the scores before that */
    const void *q;    /* [count][dim], float32 or bfloat16 as the kernel wants */
    float *peak;      /* [count] */
    float *sum;       /* [count][LANES] */
    float *out;       /* [count][dim] */
    const int *limits, *lows;
    void *spare;      /* 2 * BLOCK * dim floats of the thread's own */
};

/* Continues the softmax of the rows over the blocks, in order. A row's arithmetic depends on
 * nothing but the row and the blocks. */
typedef void (*attend_function)(const struct blocks *blocks, const struct rows *rows);

/* Kernels of float32 pools, and of bfloat16 pools that are widened block by block; and a row times
 * a factor in bfloat16. */
#define DECLARE(name)                                                       \
    void bx_narrow_##name(const float *from, float factor, uint16_t *to, int count); \
    void bx_attend_f32_##name(const struct blocks *, const struct rows *);   \
    void bx_attend_widened_##name(const struct blocks *, const struct rows *);
DECLARE(plain)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define HAS_BF16_KERNELS 1
void bx_attend_avx512_bf16(const struct blocks *, const struct rows *);
void bx_attend_amx(const struct blocks *, const struct rows *);
void bx_amx_end(void); /* on each thread after bx_attend_amx */
#endif
#endif
#undef DECLARE

static inline float widen(uint16_t value)
{
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

/* To bfloat16, to the nearest, ties to even; NaN stays NaN. */
static inline uint16_t narrow(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? (uint16_t)(bits >> 16 | 0x40) : (uint16_t)rounded;
}

#endif
