/* Weights of 4 and 8 bits whose inputs share scales in groups, widened to bfloat16 panel by panel.
 *
 * As in llama.cpp's k-quants a group's scale may be a small factor times a scale of several groups:
 *   weight = scale * factor * (code - offset) - minimum * minimum_factor */
#ifndef BATCHRADIX_GROUPS_H
#define BATCHRADIX_GROUPS_H

#include "avx512.h"
#include "panels.h"
#include "tiles.h"

/* How far before they are widened codes are fetched. */
#define AHEAD_BYTES 2048

/* 16 columns. `in_size` is a multiple of `super`, that of `group`, and that of 8. Codes stand as they
 * are widened, in sixteens: the inputs 2p and 2p + 1 by turns of columns 0 to 7, or of 8 to 15. */
struct bx_groups {
    const void *codes;        /* 8 bits, signed: int8[in_size / 2][2 sixteens][16]; 4 bits:
                                 uint32[in_size / 8][16] of 8 sixteens, lowest bits first; or NULL:
                                 zeros */
    const uint16_t *scales;   /* float16[in_size / super][16] */
    const uint16_t *minima;   /* the same, or NULL: none */
    const int8_t *factors;    /* [in_size / group][16], or NULL: ones */
    const int8_t *minimum_factors;
    int32_t bits, offset, group, super;
};

#if defined(__x86_64__)
/* Of one group: what codes are multiplied by, or the minimum. */
BX_TARGET_BF16 BX_INLINE __m512 bx_group_scale(const uint16_t *scales, const int8_t *factors,
                                               int64_t super, int64_t group)
{
    __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + super * BX_BLOCK)));
    if (!factors)
        return scale;
    __m128i bytes = _mm_loadu_si128((const __m128i *)(factors + group * BX_BLOCK));
    return _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
}

/* To each column twice, of the first eight or of the others. */
BX_TARGET_BF16 BX_INLINE __m512 bx_twice(__m512 of_columns, int upper)
{
    const __m512i columns = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return _mm512_permutexvar_ps(_mm512_add_epi32(columns, _mm512_set1_epi32(8 * upper)), of_columns);
}

/* `out`: bfloat16[in_size / 2][16][2], as a block of `bx_pack_panels`. */
BX_TARGET_BF16 BX_INLINE void bx_widen_groups(const struct bx_groups *g, int64_t in_size,
                                              uint16_t *out, const int bits)
{
    const __m512 numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const char *codes = g->codes;
    for (int64_t k = 0; k < in_size; k += g->group) {
        int64_t group = k / g->group, super = k / g->super;
        __m512 scale = bx_group_scale(g->scales, g->factors, super, group);
        __m512 minus = _mm512_mul_ps(scale, _mm512_set1_ps((float)-g->offset));
        if (g->minima)
            minus = _mm512_sub_ps(minus, bx_group_scale(g->minima, g->minimum_factors, super, group));
        __m512 scales[2] = {bx_twice(scale, 0), bx_twice(scale, 1)};
        __m512 minima[2] = {bx_twice(minus, 0), bx_twice(minus, 1)};
        for (int i = 0; i < g->group; i += 8) {
            __m512i eights = _mm512_setzero_si512();
            if (bits == 4) {
                eights = _mm512_loadu_si512(codes);
                _mm_prefetch(codes + AHEAD_BYTES, _MM_HINT_T0);
                codes += 64;
            }
#pragma GCC unroll 4
            for (int pair = 0; pair < 4; pair++, out += 32) {
                __m512 sides[2];
#pragma GCC unroll 2
                for (int side = 0; side < 2; side++) {
                    if (bits == 4) { /* a permutation looks at the lowest four bits alone */
                        sides[side] = _mm512_permutexvar_ps(eights, numbers);
                        eights = _mm512_srli_epi32(eights, 4);
                    } else {
                        __m128i bytes = _mm_loadu_si128((const __m128i *)codes);
                        sides[side] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
                        if (side == 0 && pair % 2 == 0)
                            _mm_prefetch(codes + AHEAD_BYTES, _MM_HINT_T0);
                        codes += 16;
                    }
                    sides[side] = _mm512_fmadd_ps(sides[side], scales[side], minima[side]);
                }
                _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(sides[1], sides[0]));
            }
        }
    }
}

/* `panel`: two blocks of 16 columns, bfloat16[2][in_size / 2][16][2]. */
BX_TARGET_BF16 BX_INLINE void bx_widen_panel(const struct bx_groups *blocks, int64_t in_size,
                                             uint16_t *panel)
{
    for (int side = 0; side < 2; side++, panel += in_size * BX_BLOCK) {
        const struct bx_groups *g = blocks + side;
        if (!g->codes)
            memset(panel, 0, (size_t)in_size * BX_BLOCK * sizeof *panel);
        else if (g->bits == 4)
            bx_widen_groups(g, in_size, panel, 4);
        else
            bx_widen_groups(g, in_size, panel, 8);
    }
}
#endif

#endif
