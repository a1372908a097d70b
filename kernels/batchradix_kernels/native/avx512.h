/* Sixteen numbers at a time, where the compiler does not find the fast way by itself. */
#ifndef BATCHRADIX_AVX512_H
#define BATCHRADIX_AVX512_H

#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define BX_AVX512_INLINE BX_TARGET_AVX512 BX_INLINE

/* 2 ** x, relative error 3e-06, which is far below bfloat16's 4e-3; one at zero, zero far below it,
 * NaN for NaN. */
BX_AVX512_INLINE __m512 bx_exp2_16(__m512 x)
{
    __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* x - floor(x) */
    __m512 y = _mm512_set1_ps(0.013426684774458408f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.052242472767829895f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.241280198097229f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.6930448412895203f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, x); /* y * 2 ** floor(x) */
}

/* SwiGLU (Shazeer 2020): x / (1 + e ** -x) times `up`, relative error 4e-06. */
BX_AVX512_INLINE __m512 bx_swiglu_16(__m512 x, __m512 up)
{
    __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f));
    power = _mm512_min_ps(_mm512_set1_ps(120.0f), power); /* its reciprocal is still a number */
    __m512 sum = _mm512_add_ps(bx_exp2_16(power), _mm512_set1_ps(1.0f));
    __m512 inverse = _mm512_rcp14_ps(sum);
    inverse = _mm512_mul_ps(inverse, _mm512_fnmadd_ps(sum, inverse, _mm512_set1_ps(2.0f)));
    return _mm512_mul_ps(_mm512_mul_ps(x, inverse), up);
}

/* To bfloat16 in the lower halves, to the nearest, ties to even; NaN stays NaN. */
BX_AVX512_INLINE __m512i bx_bfloat16_16(__m512 values)
{
    __m512i bits = _mm512_castps_si512(values);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd);
    __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, up), 16);
    return _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0));
}

/* The first `count`, at most 16, from element `i` on; zeros behind them. */
BX_AVX512_INLINE __m512 bx_load_16(const void *matrix, int64_t i, int64_t count, int kind)
{
    __mmask16 mask = count < 16 ? (__mmask16)((1u << count) - 1) : 0xffff;
    if (kind == BX_FLOAT32)
        return _mm512_maskz_loadu_ps(mask, (const float *)matrix + i);
    __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)matrix + i);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

BX_AVX512_INLINE void bx_store_16(void *matrix, int64_t i, int64_t count, int kind, __m512 values)
{
    __mmask16 mask = count < 16 ? (__mmask16)((1u << count) - 1) : 0xffff;
    if (kind == BX_FLOAT32)
        _mm512_mask_storeu_ps((float *)matrix + i, mask, values);
    else
        _mm512_mask_cvtepi32_storeu_epi16((uint16_t *)matrix + i, mask, bx_bfloat16_16(values));
}
#endif

#endif
