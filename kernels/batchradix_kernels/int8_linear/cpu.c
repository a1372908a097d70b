#include "avx512.h"
#include "operations.h"
#include "tiles.h"

/* Columns of the weight stand in panels of 32: two blocks of 16 columns. A block is, for every
 * four inputs, its 16 columns with four bytes each: 64 bytes, a register of dot products, and 16
 * of these a tile of AMX. Sums of products are exact, so that all instruction sets agree. */
enum { BLOCK = 16, PANEL = 32, GROUP = 4, TILE = 64, MOST_ROWS = 32 };

/* Bytes of activations that are gone over again for every panel, so that they stay in cache. */
#define CHUNK_BYTES (1 << 20)

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

/* How far apart blocks are in `packed`. */
BX_INLINE int64_t block_bytes(const struct int8_linear *c)
{
    return (c->in_size + GROUP - 1) / GROUP * GROUP * BLOCK;
}

/* Sums [rows, PANEL] of one panel, for rows from `row` on, to the output. */
BX_INLINE void finish(const struct int8_linear *c, const int32_t *sums, int64_t row, int rows,
                      int64_t column)
{
    int64_t width = c->out_size - column < PANEL ? c->out_size - column : PANEL;
    for (int r = 0; r < rows; r++)
        for (int64_t j = 0; j < width; j++) {
            float value = (float)sums[r * PANEL + j] * c->x_scales[row + r];
            value *= c->w_scales[column + j];
            if (c->bias)
                value += bx_load(c->bias, column + j, c->kind);
            bx_store(c->out, (row + r) * c->out_size + column + j, c->kind, value);
        }
}

/* One panel, from its first column on, for rows [first, last). */
static void panel_plain(const struct int8_linear *c, int64_t column, int64_t first, int64_t last)
{
    const int8_t *panel = c->packed + column / BLOCK * block_bytes(c);
    for (int64_t row = first; row < last; row++) {
        const int8_t *x = c->x + row * c->in_size;
        int32_t sums[PANEL] = {0};
        for (int64_t k = 0; k < c->in_size; k++)
            for (int j = 0; j < PANEL; j++)
                sums[j] += x[k] * panel[j / BLOCK * block_bytes(c) +
                                        (k / GROUP * BLOCK + j % BLOCK) * GROUP + k % GROUP];
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
                _mm_loadu_si128((const __m128i *)(block + k * BLOCK + j * 16)));
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
                total[r * PANEL + 4 * j + i] = halves[2 * i] + halves[2 * i + 1];
        }
}

BX_TARGET_AVX2 static void panel_avx2(const struct int8_linear *c, int64_t column, int64_t first,
                                      int64_t last)
{
    const int8_t *left = c->packed + column / BLOCK * block_bytes(c);
    const int8_t *right = left + block_bytes(c);
    int32_t sums[2 * PANEL];
    for (int64_t row = first; row < last; row += 2) {
        int rows = row + 2 <= last ? 2 : 1;
        if (rows == 2) {
            block_avx2(c, left, sums, row, 2);
            block_avx2(c, right, sums + BLOCK, row, 2);
        } else {
            block_avx2(c, left, sums, row, 1);
            block_avx2(c, right, sums + BLOCK, row, 1);
        }
        finish(c, sums, row, rows, column);
    }
}

/* As `finish`, with what is the same for all rows in registers; a row's part of the panel is
 * written at once, since in bfloat16 it is a line of the cache. */
BX_TARGET_AVX512 BX_INLINE void finish_avx512(const struct int8_linear *c, const int32_t *sums,
                                              int64_t row, int rows, int64_t column)
{
    if (c->out_size - column < PANEL) {
        finish(c, sums, row, rows, column);
        return;
    }
    float bias[PANEL];
    for (int j = 0; j < PANEL; j++) /* adding -0 changes nothing, not even a zero's sign */
        bias[j] = c->bias ? bx_load(c->bias, column + j, c->kind) : -0.0f;
    __m512 plus[2], scales[2], values[2];
    for (int side = 0; side < 2; side++) {
        plus[side] = _mm512_loadu_ps(bias + side * BLOCK);
        scales[side] = _mm512_loadu_ps(c->w_scales + column + side * BLOCK);
    }
    for (int r = 0; r < rows; r++) {
        int64_t at = (row + r) * c->out_size + column;
        __m512 scale = _mm512_set1_ps(c->x_scales[row + r]);
        for (int side = 0; side < 2; side++) {
            __m512i sum = _mm512_loadu_si512(sums + r * PANEL + side * BLOCK);
            values[side] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
            values[side] = _mm512_add_ps(_mm512_mul_ps(values[side], scales[side]), plus[side]);
        }
        if (c->kind == BX_FLOAT32) {
            _mm512_storeu_ps((float *)c->out + at, values[0]);
            _mm512_storeu_ps((float *)c->out + at + BLOCK, values[1]);
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
    const int8_t *left = c->packed + column / BLOCK * block_bytes(c);
    const int8_t *right = left + block_bytes(c);
    const int8_t *x = c->x + row * c->in_size;
    const __m512i top = _mm512_set1_epi8(-128);
    __m512i sums[8][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        int32_t minus = -128 * sum_of(x + r * c->in_size, c->in_size);
        sums[r][0] = sums[r][1] = _mm512_set1_epi32(minus);
    }
    for (int64_t k = 0; k < c->in_size; k += GROUP) {
        __m512i a = _mm512_xor_si512(top, _mm512_loadu_si512(left + k * BLOCK));
        __m512i b = _mm512_xor_si512(top, _mm512_loadu_si512(right + k * BLOCK));
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, x + r * c->in_size + k, sizeof four);
            sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], a, _mm512_set1_epi32(four));
            sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], b, _mm512_set1_epi32(four));
        }
    }
    int32_t total[8 * PANEL] __attribute__((aligned(64)));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int side = 0; side < 2; side++)
            _mm512_store_si512(total + r * PANEL + side * BLOCK, sums[r][side]);
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
/* Sums [rows, PANEL] of a panel, of which the rows before `next` are in the output. */
struct sums {
    int32_t values[MOST_ROWS * PANEL];
    int64_t row, column;
    int rows, next;
} __attribute__((aligned(64)));

/* Up to `count` more rows to the output. */
BX_TARGET_AMX BX_INLINE void finish_some(const struct int8_linear *c, struct sums *s, int count)
{
    int rows = s->rows - s->next < count ? s->rows - s->next : count;
    if (rows > 0)
        finish_avx512(c, s->values + s->next * PANEL, s->row + s->next, rows, s->column);
    s->next += rows;
}

/* Multiplies up to 32 rows by a panel while the `before` sums go to the output and, for every 64
 * inputs, `lines` lines from `ahead` on into the second-level cache. */
BX_TARGET_AMX BX_INLINE void rows_amx(const struct int8_linear *c, struct sums *s,
                                      struct sums *before, const char *ahead, int lines,
                                      const int two)
{
    const int8_t *left = c->packed + s->column / BLOCK * block_bytes(c);
    const int8_t *right = left + block_bytes(c);
    const int8_t *x = c->x + s->row * c->in_size;
    int a_time = (int)((MOST_ROWS * TILE + c->in_size - 1) / c->in_size);
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    _tile_loadd(4, x, c->in_size);
    _tile_loadd(6, left, 64);
    _tile_loadd(7, right, 64);
    if (two)
        _tile_loadd(5, x + 16 * c->in_size, c->in_size);
    for (int64_t k = 0; k < c->in_size; k += TILE) {
        /* A tile is loaded anew right after its last product; the last ones for nothing. */
        int64_t next = k + TILE < c->in_size ? k + TILE : k;
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_loadd(4, x + next, c->in_size);
        if (two)
            _tile_dpbssd(2, 5, 6);
        _tile_loadd(6, left + next * BLOCK, 64);
        if (two) {
            _tile_dpbssd(3, 5, 7);
            _tile_loadd(5, x + 16 * c->in_size + next, c->in_size);
        }
        _tile_loadd(7, right + next * BLOCK, 64);
        for (int line = 0; line < lines; line++, ahead += 64)
            __builtin_prefetch(ahead, 0, 2);
        finish_some(c, before, a_time);
    }
    const int stride = PANEL * sizeof s->values[0];
    _tile_stored(0, s->values, stride);
    _tile_stored(1, s->values + BLOCK, stride);
    if (two) {
        _tile_stored(2, s->values + 16 * PANEL, stride);
        _tile_stored(3, s->values + 16 * PANEL + BLOCK, stride);
    }
}

BX_TARGET_AMX static void panels_amx(const struct int8_linear *c, int64_t begin, int64_t end,
                                     int64_t first, int64_t last)
{
    struct sums sums[2];
    int turn = 0, configured = 0;
    sums[0].rows = sums[1].rows = sums[0].next = sums[1].next = 0;
    /* A panel has half a line an input; the next one comes while this one is multiplied. */
    int lines = (int)((TILE / 2 * MOST_ROWS + last - first - 1) / (last - first));
    lines = lines < TILE / 2 ? lines : TILE / 2;
    for (int64_t column = begin * PANEL; column < end * PANEL; column += PANEL)
        for (int64_t row = first; row < last; row += MOST_ROWS) {
            struct sums *s = &sums[turn], *before = &sums[!turn];
            s->row = row;
            s->column = column;
            s->rows = last - row < MOST_ROWS ? (int)(last - row) : MOST_ROWS;
            s->next = 0;
            if (s->rows != configured)
                bx_configure_tiles(configured = s->rows);
            const char *ahead = (const char *)c->packed + (column + PANEL) / BLOCK * block_bytes(c);
            ahead += (row - first) / MOST_ROWS * (c->in_size / TILE) * lines * 64;
            if (s->rows > 16)
                rows_amx(c, s, before, ahead, lines, 1);
            else
                rows_amx(c, s, before, ahead, lines, 0);
            turn = !turn;
        }
    finish_some(c, &sums[!turn], MOST_ROWS);
    _tile_release();
}
#endif

/* Panels [begin, end) for rows [first, last). */
typedef void (*panels_function)(const struct int8_linear *, int64_t begin, int64_t end,
                                int64_t first, int64_t last);

#define PANELS(name)                                                                              \
    static void panels_##name(const struct int8_linear *c, int64_t begin, int64_t end,            \
                              int64_t first, int64_t last)                                        \
    {                                                                                             \
        for (int64_t i = begin; i < end; i++)                                                     \
            panel_##name(c, i * PANEL, first, last);                                              \
    }
PANELS(vnni)
PANELS(avx2)
#endif
PANELS(plain)

static panels_function choose(int64_t in_size)
{
#if defined(__x86_64__)
    int level = bx_level();
#if defined(BX_HAS_AMX)
    if (level >= BX_AMX && in_size % TILE == 0)
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
    panels_function multiply = choose(c->in_size);
    int64_t panels = (c->out_size + PANEL - 1) / PANEL;
    int64_t begin = panels * thread / num_threads, end = panels * (thread + 1) / num_threads;
    int64_t chunks = (c->num_rows * c->in_size + CHUNK_BYTES - 1) / CHUNK_BYTES;
    int64_t chunk = (c->num_rows + chunks - 1) / chunks; /* about the same for each */
    chunk = (chunk + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS;
    for (int64_t first = 0; first < c->num_rows; first += chunk) {
        int64_t last = first + chunk < c->num_rows ? first + chunk : c->num_rows;
        multiply(c, begin, end, first, last);
    }
}

/* Bytes that `bx_int8_pack` fills. */
BX_EXPORT int64_t bx_int8_packed_bytes(int64_t out_size, int64_t in_size)
{
    struct int8_linear c = {.in_size = in_size};
    return (out_size + PANEL - 1) / PANEL * (PANEL / BLOCK) * block_bytes(&c);
}

/* `weight`: [out_size, in_size]; `packed` is zero. */
BX_EXPORT void bx_int8_pack(const int8_t *weight, int8_t *packed, int64_t out_size,
                            int64_t in_size)
{
    struct int8_linear c = {.in_size = in_size};
    for (int64_t n = 0; n < out_size; n++) {
        int8_t *block = packed + n / BLOCK * block_bytes(&c);
        for (int64_t k = 0; k < in_size; k++)
            block[(k / GROUP * BLOCK + n % BLOCK) * GROUP + k % GROUP] = weight[n * in_size + k];
    }
}

/* `x`: int8[num_rows, in_size] to `out`: [num_rows, out_size]; `bias` may be NULL, of `kind`. */
BX_EXPORT void bx_int8_linear(const int8_t *x, const float *x_scales, const int8_t *packed,
                              const float *w_scales, const void *bias, void *out,
                              int64_t num_rows, int64_t in_size, int64_t out_size, int kind,
                              int threads)
{
    struct int8_linear c = {x,   x_scales, packed,  w_scales, bias,
                            out, num_rows, in_size, out_size, kind};
    /* Below this, waking a second thread costs more than it saves. */
    int worth = out_size * in_size * num_rows >= 1 << 18;
    if (num_rows > 0)
        bx_parallel(task, &c, worth ? threads : 1);
}
