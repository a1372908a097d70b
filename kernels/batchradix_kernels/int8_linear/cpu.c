#include "avx512.h"
#include "operations.h"
#include "panels.h"
#include "tiles.h"

/* Four inputs stand side by side in a panel. Sums of products are exact, so that all instruction
 * sets agree. */
enum { GROUP = 4 };

struct int8_linear {
    const int8_t *x;
    const float *x_scales;
    const int8_t *packed;
    const float *w_scales;
    const void *bias;
    void *out;
    int64_t num_rows, in_size, out_size;
    int kind;
};

/* Sums [rows, BX_PANEL] of one panel, for rows from `row` on, to the output. */
BX_INLINE void finish(const struct int8_linear *c, const int32_t *sums, int64_t row, int rows,
                      int64_t column)
{
    int64_t width = c->out_size - column < BX_PANEL ? c->out_size - column : BX_PANEL;
    for (int r = 0; r < rows; r++)
        for (int64_t j = 0; j < width; j++) {
            float value = (float)sums[r * BX_PANEL + j] * c->x_scales[row + r];
            value *= c->w_scales[column + j];
            if (c->bias)
                value += bx_load(c->bias, column + j, c->kind);
            bx_store(c->out, (row + r) * c->out_size + column + j, c->kind, value);
        }
}

/* One panel, from its first column on, for rows [first, last). */
static void panel_plain(const struct int8_linear *c, int64_t column, int64_t first, int64_t last)
{
    const int8_t *panel = c->packed + column / BX_BLOCK * bx_block_bytes(c->in_size);
    for (int64_t row = first; row < last; row++) {
        const int8_t *x = c->x + row * c->in_size;
        int32_t sums[BX_PANEL] = {0};
        for (int64_t k = 0; k < c->in_size; k++)
            for (int j = 0; j < BX_PANEL; j++)
                sums[j] += x[k] * panel[j / BX_BLOCK * bx_block_bytes(c->in_size) +
                                        (k / GROUP * BX_BLOCK + j % BX_BLOCK) * GROUP + k % GROUP];
        finish(c, sums, row, 1, column);
    }
}

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET_VNNI                                                                               \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")))

/* Products of 16 bits, whose pairs fit 32: with 8 bits they would saturate. */
BX_TARGET_AVX2 BX_INLINE void block_avx2(const struct int8_linear *c, const int8_t *block,
                                         int32_t *total, int64_t row, const int rows)
{
    __m256i sums[2][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 4; j++)
            sums[r][j] = _mm256_setzero_si256();
    for (int64_t k = 0; k < c->in_size; k += GROUP) {
        __m256i weights[4];
        for (int j = 0; j < 4; j++)
            weights[j] = _mm256_cvtepi8_epi16(
                _mm_loadu_si128((const __m128i *)(block + k * BX_BLOCK + j * 16)));
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, c->x + (row + r) * c->in_size + k, sizeof four);
            __m256i x = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four)));
            for (int j = 0; j < 4; j++)
                sums[r][j] = _mm256_add_epi32(sums[r][j], _mm256_madd_epi16(x, weights[j]));
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 4; j++) {
            int32_t halves[8];
            _mm256_storeu_si256((__m256i *)halves, sums[r][j]);
            for (int i = 0; i < 4; i++)
                total[r * BX_PANEL + 4 * j + i] = halves[2 * i] + halves[2 * i + 1];
        }
}

BX_TARGET_AVX2 static void panel_avx2(const struct int8_linear *c, int64_t column, int64_t first,
                                      int64_t last)
{
    const int8_t *left = c->packed + column / BX_BLOCK * bx_block_bytes(c->in_size);
    const int8_t *right = left + bx_block_bytes(c->in_size);
    int32_t sums[2 * BX_PANEL];
    for (int64_t row = first; row < last; row += 2) {
        int rows = row + 2 <= last ? 2 : 1;
        if (rows == 2) {
            block_avx2(c, left, sums, row, 2);
            block_avx2(c, right, sums + BX_BLOCK, row, 2);
        } else {
            block_avx2(c, left, sums, row, 1);
            block_avx2(c, right, sums + BX_BLOCK, row, 1);
        }
        finish(c, sums, row, rows, column);
    }
}

/* As `finish`, with what is the same for all rows in registers; a row's part of the panel is
 * written at once, since in bfloat16 it is a line of the cache. */
BX_TARGET_AVX512 BX_INLINE void finish_avx512(const struct int8_linear *c, const int32_t *sums,
                                              int64_t row, int rows, int64_t column)
{
    if (c->out_size - column < BX_PANEL) {
        finish(c, sums, row, rows, column);
        return;
    }
    float bias[BX_PANEL];
    for (int j = 0; j < BX_PANEL; j++) /* adding -0 changes nothing, not even a zero's sign */
        bias[j] = c->bias ? bx_load(c->bias, column + j, c->kind) : -0.0f;
    __m512 plus[2], scales[2], values[2];
    for (int side = 0; side < 2; side++) {
        plus[side] = _mm512_loadu_ps(bias + side * BX_BLOCK);
        scales[side] = _mm512_loadu_ps(c->w_scales + column + side * BX_BLOCK);
    }
    for (int r = 0; r < rows; r++) {
        int64_t at = (row + r) * c->out_size + column;
        __m512 scale = _mm512_set1_ps(c->x_scales[row + r]);
        for (int side = 0; side < 2; side++) {
            __m512i sum = _mm512_loadu_si512(sums + r * BX_PANEL + side * BX_BLOCK);
            values[side] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
            values[side] = _mm512_add_ps(_mm512_mul_ps(values[side], scales[side]), plus[side]);
        }
        if (c->kind == BX_FLOAT32) {
            _mm512_storeu_ps((float *)c->out + at, values[0]);
            _mm512_storeu_ps((float *)c->out + at + BX_BLOCK, values[1]);
        } else {
            __m256i low = _mm512_cvtepi32_epi16(bx_bfloat16_16(values[0]));
            __m256i high = _mm512_cvtepi32_epi16(bx_bfloat16_16(values[1]));
            _mm512_storeu_si512((uint16_t *)c->out + at,
                                _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
        }
    }
}

TARGET_VNNI BX_INLINE int32_t sum_of(const int8_t *x, int64_t size)
{
    __m512i sums = _mm512_setzero_si512();
    int64_t k = 0;
    for (; k + 64 <= size; k += 64)
        sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), _mm512_loadu_si512(x + k));
    int32_t sum = _mm512_reduce_add_epi32(sums);
    for (; k < size; k++)
        sum += x[k];
    return sum;
}

/* The instruction multiplies unsigned by signed bytes: 128 is added to the weights, and taken
 * off again as 128 times the sum of the row. */
TARGET_VNNI BX_INLINE void rows_vnni(const struct int8_linear *c, int64_t column, int64_t row,
                                     const int rows)
{
    const int8_t *left = c->packed + column / BX_BLOCK * bx_block_bytes(c->in_size);
    const int8_t *right = left + bx_block_bytes(c->in_size);
    const int8_t *x = c->x + row * c->in_size;
    const __m512i top = _mm512_set1_epi8(-128);
    __m512i sums[8][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        int32_t minus = -128 * sum_of(x + r * c->in_size, c->in_size);
        sums[r][0] = sums[r][1] = _mm512_set1_epi32(minus);
    }
    for (int64_t k = 0; k < c->in_size; k += GROUP) {
        __m512i a = _mm512_xor_si512(top, _mm512_loadu_si512(left + k * BX_BLOCK));
        __m512i b = _mm512_xor_si512(top, _mm512_loadu_si512(right + k * BX_BLOCK));
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, x + r * c->in_size + k, sizeof four);
            sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], a, _mm512_set1_epi32(four));
            sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], b, _mm512_set1_epi32(four));
        }
    }
    int32_t total[8 * BX_PANEL] __attribute__((aligned(64)));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int side = 0; side < 2; side++)
            _mm512_store_si512(total + r * BX_PANEL + side * BX_BLOCK, sums[r][side]);
    finish_avx512(c, total, row, rows, column);
}

TARGET_VNNI static void panel_vnni(const struct int8_linear *c, int64_t column, int64_t first,
                                   int64_t last)
{
    int64_t row = first;
    for (; row + 8 <= last; row += 8)
        rows_vnni(c, column, row, 8);
    for (; row + 2 <= last; row += 2)
        rows_vnni(c, column, row, 2);
    if (row < last)
        rows_vnni(c, column, row, 1);
}

#if defined(BX_HAS_AMX)
/* Sums [rows, BX_PANEL] of a panel, of which the rows before `next` are in the output. */
struct sums {
    int32_t values[BX_PANEL_ROWS * BX_PANEL];
    int64_t row, column;
    int rows, next;
} __attribute__((aligned(64)));

/* Up to `count` more rows to the output. */
BX_TARGET_AMX BX_INLINE void finish_sums(const struct int8_linear *c, struct sums *s, int count)
{
    int rows = s->rows - s->next < count ? s->rows - s->next : count;
    if (rows > 0)
        finish_avx512(c, s->values + s->next * BX_PANEL, s->row + s->next, rows, s->column);
    s->next += rows;
}

BX_INLINE const int8_t *panel_at(const struct int8_linear *c, int64_t column)
{
    return c->packed + column * c->in_size;
}

BX_INLINE void begin_panel(const struct int8_linear *c, int64_t column)
{
    (void)c, (void)column;
}

BX_INLINE int64_t panel_bytes(const struct int8_linear *c)
{
    return c->in_size * BX_PANEL;
}

#define LINEAR struct int8_linear
#define MULTIPLY _tile_dpbssd
#include "panels_amx.h"
#endif

#define PANELS(name)                                                                              \
    static void panels_##name(const void *context, int64_t begin, int64_t end, int64_t first,     \
                              int64_t last)                                                       \
    {                                                                                             \
        for (int64_t i = begin; i < end; i++)                                                     \
            panel_##name(context, i * BX_PANEL, first, last);                                        \
    }
PANELS(vnni)
PANELS(avx2)
#endif
PANELS(plain)

static bx_panels_function choose(int64_t in_size)
{
#if defined(__x86_64__)
    int level = bx_level();
#if defined(BX_HAS_AMX)
    if (level >= BX_AMX && in_size % TILE_BYTES == 0)
        return panels_amx;
#endif
    if (level >= BX_AVX512 && in_size % GROUP == 0)
        return panels_vnni;
    if (level >= BX_AVX2 && in_size % GROUP == 0)
        return panels_avx2;
#endif
    return panels_plain;
}

static void task(void *context, int thread, int num_threads)
{
    const struct int8_linear *c = context;
    bx_walk_panels(choose(c->in_size), c, c->num_rows, c->in_size, c->out_size, thread,
                   num_threads);
}

/* Bytes that `bx_int8_pack` fills. */
BX_EXPORT int64_t bx_int8_packed_bytes(int64_t out_size, int64_t in_size)
{
    return (out_size + BX_PANEL - 1) / BX_PANEL * (BX_PANEL / BX_BLOCK) * bx_block_bytes(in_size);
}

/* `weight`: [out_size, in_size]; `packed` is zero. */
BX_EXPORT void bx_int8_pack(const int8_t *weight, int8_t *packed, int64_t out_size,
                            int64_t in_size)
{
    bx_pack_panels(weight, packed, out_size, in_size);
}

/* `x`: int8[num_rows, in_size] to `out`: [num_rows, out_size]; `bias` may be NULL, of `kind`. */
BX_EXPORT void bx_int8_linear(const int8_t *x, const float *x_scales, const int8_t *packed,
                              const float *w_scales, const void *bias, void *out,
                              int64_t num_rows, int64_t in_size, int64_t out_size, int kind,
                              int threads)
{
    struct int8_linear c = {x,   x_scales, packed,  w_scales, bias,
                            out, num_rows, in_size, out_size, kind};
    bx_parallel_panels(task, &c, out_size * in_size * num_rows, threads);
}
