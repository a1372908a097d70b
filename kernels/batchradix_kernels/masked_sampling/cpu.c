#include "rows.h"

struct masked_argmax {
    const void *logits;
    const uint32_t *bitmask;
    const uint8_t *masked;
    int64_t *tokens;
    float *peaks;
    int64_t num_rows, width, logits_stride, bitmask_stride;
    int kind;
};

enum {
    BX_WORD = 32,             /* tokens a word of the mask */
    BX_BLOCK = 16 * BX_WORD, /* tokens whose largest logit is looked for at a time */
};

static const uint32_t bx_bit[BX_WORD] = {
    1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
    1u << 8,  1u << 9,  1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15,
    1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21, 1u << 22, 1u << 23,
    1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31,
};

/* The largest of `num` logits from `first` on; `*broken` is set by NaN and +inf. */
BX_INLINE float largest(const void *row, int64_t first, int64_t num, int kind, uint32_t *broken)
{
    float best = -INFINITY;
    uint32_t bad = 0;
#pragma omp simd reduction(max : best) reduction(| : bad)
    for (int64_t i = 0; i < num; i++) {
        float value = bx_load(row, first + i, kind);
        bad |= value < INFINITY ? 0u : 1u;
        best = value > best ? value : best;
    }
    *broken |= bad;
    return best;
}

/* The largest allowed of `num` logits, whole words; `*broken` is set by those not allowed, too. */
BX_INLINE float largest_allowed(const void *row, const uint32_t *words, int64_t first, int64_t num,
                                int kind, uint32_t *broken)
{
    BX_SCRATCH(values, BX_BLOCK);
    uint32_t bad = 0;
#pragma omp simd reduction(| : bad)
    for (int64_t i = 0; i < num; i++) {
        values[i] = bx_load(row, first + i, kind);
        bad |= values[i] < INFINITY ? 0u : 1u;
    }
    *broken |= bad;
    for (int64_t w = 0; w < num / BX_WORD; w++) {
        uint32_t word = words[first / BX_WORD + w];
        float *restrict part = values + w * BX_WORD;
#pragma omp simd
        for (int64_t i = 0; i < BX_WORD; i++)
            part[i] = word & bx_bit[i] ? part[i] : -INFINITY;
    }
    return largest(values, 0, num, BX_FLOAT32, &bad);
}

BX_INLINE void choose(const struct masked_argmax *c, int64_t first, int64_t last, int kind)
{
    int64_t bytes = kind == BX_FLOAT32 ? 4 : 2;
    for (int64_t r = first; r < last; r++) {
        const char *row = (const char *)c->logits + r * c->logits_stride * bytes;
        int is_masked = c->bitmask && (!c->masked || c->masked[r]);
        const uint32_t *words = is_masked ? c->bitmask + r * c->bitmask_stride : NULL;
        float peak = -INFINITY;
        uint32_t broken = 0;
        int64_t block = 0, whole = c->width / BX_WORD * BX_WORD;
        for (int64_t at = 0; at < whole; at += BX_BLOCK) {
            int64_t num = whole - at < BX_BLOCK ? whole - at : BX_BLOCK;
            float best = words ? largest_allowed(row, words, at, num, kind, &broken)
                               : largest(row, at, num, kind, &broken);
            if (best > peak) {
                peak = best;
                block = at;
            }
        }
        for (int64_t i = whole; i < c->width; i++) {
            float value = bx_load(row, i, kind);
            broken |= value < INFINITY ? 0u : 1u;
            if (value > peak && (!words || words[i / BX_WORD] & bx_bit[i % BX_WORD])) {
                peak = value;
                block = i;
            }
        }
        int64_t token = 0;
        if (!broken && peak > -INFINITY)
            for (token = block; bx_load(row, token, kind) != peak ||
                                (words && !(words[token / BX_WORD] & bx_bit[token % BX_WORD]));)
                token++;
        c->tokens[r] = token;
        c->peaks[r] = broken ? NAN : peak;
    }
}

BX_INLINE void masked_argmax_rows(const struct masked_argmax *c, int64_t first, int64_t last)
{
    if (c->kind == BX_FLOAT32)
        choose(c, first, last, BX_FLOAT32);
    else
        choose(c, first, last, BX_BFLOAT16);
}

BX_ROW_KERNEL(masked_argmax)

/* `bitmask` may be NULL, and `masked` where all rows are; strides are in elements. */
BX_EXPORT void bx_masked_argmax(const void *logits, const void *bitmask, const void *masked,
                                int64_t *tokens, float *peaks, int64_t num_rows, int64_t width,
                                int64_t logits_stride, int64_t bitmask_stride, int kind,
                                int threads)
{
    struct masked_argmax c = {logits,   bitmask, masked,        tokens,         peaks,
                              num_rows, width,   logits_stride, bitmask_stride, kind};
    masked_argmax_run(&c, num_rows * width, threads);
}
