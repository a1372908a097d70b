#include "avx512.h"
#include "operations.h"
#include "tiles.h"

/* Columns of the weight stand in panels of 32: two blocks of 16 columns. A block is, for every
 * two inputs, its 16 columns with two numbers each: 64 bytes, a register of dot products, and 16
 * of these a tile of AMX. A row's sums run in the order of the inputs, whatever rows are beside
 * it. */
enum { BLOCK = 16, PANEL = 32, GROUP = 2, TILE = 32, MOST_ROWS = 32, FEW_ROWS = 8 };

/* Bytes of activations that are gone over again for every panel, so that they stay in cache. */
#define CHUNK_BYTES (1 << 20)

struct bf16_linear {
    const uint16_t *x;
    const uint16_t *packed;
    const float *bias; /* of all panels, or NULL */
    void *out;
    int64_t num_rows, in_size, out_size;
    int kind;  /* of `out` */
    int gated; /* left blocks are gates, right blocks what they are multiplied with */
};

#if defined(__x86_64__)

/* Sums [rows, PANEL] of one panel, of which the rows before `next` are in the output. */
struct sums {
    float values[MOST_ROWS * PANEL];
    int64_t row, column;
    int rows, next;
} __attribute__((aligned(64)));

/* Up to `count` more rows to the output. */
BX_TARGET_BF16 BX_INLINE void finish(const struct bf16_linear *c, struct sums *s, int count)
{
    if (s->next == s->rows)
        return;
    int last = s->next + count < s->rows ? s->next + count : s->rows;
    int64_t width = c->gated ? c->out_size / 2 : c->out_size;
    int64_t column = c->gated ? s->column / 2 : s->column;
    int64_t left_columns = width - column;
    __mmask32 mask = left_columns < PANEL ? ((__mmask32)1 << left_columns) - 1 : (__mmask32)-1;
    for (int r = s->next; r < last; r++) {
        float *sums = s->values + r * PANEL;
        int64_t at = (s->row + r) * width + column;
        __m512 left = _mm512_load_ps(sums), right = _mm512_load_ps(sums + BLOCK);
        if (c->bias) {
            left = _mm512_add_ps(left, _mm512_loadu_ps(c->bias + s->column));
            right = _mm512_add_ps(right, _mm512_loadu_ps(c->bias + s->column + BLOCK));
        }
        if (c->gated) {
            __m256bh half = _mm512_cvtneps_pbh(bx_swiglu_16(left, right));
            _mm256_mask_storeu_epi16((uint16_t *)c->out + at, (__mmask16)mask, (__m256i)half);
        } else if (c->kind == BX_FLOAT32) {
            float *out = (float *)c->out + at;
            _mm512_mask_storeu_ps(out, (__mmask16)mask, left);
            _mm512_mask_storeu_ps(out + BLOCK, (__mmask16)(mask >> BLOCK), right);
        } else {
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(right, left);
            _mm512_mask_storeu_epi16((uint16_t *)c->out + at, mask, both);
        }
    }
    s->next = last;
}

BX_INLINE const uint16_t *block_at(const struct bf16_linear *c, int64_t column)
{
    return c->packed + column * c->in_size;
}

/* Panels [begin, end) for rows [first, last). */
typedef void (*panels_function)(const struct bf16_linear *, int64_t begin, int64_t end,
                                int64_t first, int64_t last);

BX_TARGET_BF16 BX_INLINE void rows_bf16(const struct bf16_linear *c, int64_t column, int64_t row,
                                        const int rows)
{
    const uint16_t *left = block_at(c, column), *right = block_at(c, column + BLOCK);
    const uint16_t *x = c->x + row * c->in_size;
    __m512 sums[FEW_ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < c->in_size; k += GROUP) {
        __m512bh a = (__m512bh)_mm512_loadu_si512(left + k * BLOCK);
        __m512bh b = (__m512bh)_mm512_loadu_si512(right + k * BLOCK);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * c->in_size + k, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], both, a);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], both, b);
        }
    }
    struct sums total = {.row = row, .column = column, .rows = rows};
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int side = 0; side < 2; side++)
            _mm512_store_ps(total.values + r * PANEL + side * BLOCK, sums[r][side]);
    finish(c, &total, rows);
}

BX_TARGET_BF16 static void panels_bf16(const struct bf16_linear *c, int64_t begin, int64_t end,
                                       int64_t first, int64_t last)
{
    for (int64_t column = begin * PANEL; column < end * PANEL; column += PANEL) {
        int64_t row = first;
        for (; row + FEW_ROWS <= last; row += FEW_ROWS)
            rows_bf16(c, column, row, FEW_ROWS);
        for (; row + 2 <= last; row += 2)
            rows_bf16(c, column, row, 2);
        if (row < last)
            rows_bf16(c, column, row, 1);
    }
}

#if defined(BX_HAS_AMX)
/* Multiplies up to 32 rows by a panel while the `before` sums go to the output and, for every 32
 * inputs, `lines` lines from `ahead` on into the second-level cache. */
BX_TARGET_AMX BX_INLINE void rows_amx(const struct bf16_linear *c, struct sums *s,
                                      struct sums *before, const char *ahead, int lines,
                                      const int two)
{
    const uint16_t *left = block_at(c, s->column), *right = block_at(c, s->column + BLOCK);
    const uint16_t *x = c->x + s->row * c->in_size;
    const int64_t x_bytes = c->in_size * (int64_t)sizeof *c->x;
    int a_time = (int)((MOST_ROWS * TILE + c->in_size - 1) / c->in_size);
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    _tile_loadd(4, x, x_bytes);
    _tile_loadd(6, left, 64);
    _tile_loadd(7, right, 64);
    if (two)
        _tile_loadd(5, x + 16 * c->in_size, x_bytes);
    for (int64_t k = 0; k < c->in_size; k += TILE) {
        /* A tile is loaded anew right after its last product; the last ones for nothing. */
        int64_t next = k + TILE < c->in_size ? k + TILE : k;
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(4, x + next, x_bytes);
        if (two)
            _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(6, left + next * BLOCK, 64);
        if (two) {
            _tile_dpbf16ps(3, 5, 7);
            _tile_loadd(5, x + 16 * c->in_size + next, x_bytes);
        }
        _tile_loadd(7, right + next * BLOCK, 64);
        for (int line = 0; line < lines; line++, ahead += 64)
            __builtin_prefetch(ahead, 0, 2);
        finish(c, before, a_time);
    }
    const int stride = PANEL * sizeof(float);
    _tile_stored(0, s->values, stride);
    _tile_stored(1, s->values + BLOCK, stride);
    if (two) {
        _tile_stored(2, s->values + 16 * PANEL, stride);
        _tile_stored(3, s->values + 16 * PANEL + BLOCK, stride);
    }
}

BX_TARGET_AMX static void panels_amx(const struct bf16_linear *c, int64_t begin, int64_t end,
                                     int64_t first, int64_t last)
{
    struct sums sums[2];
    int turn = 0, configured = 0;
    sums[0].rows = sums[1].rows = sums[0].next = sums[1].next = 0;
    /* A panel has a line an input; the next one comes while this one is multiplied. */
    int lines = (int)((TILE * MOST_ROWS + last - first - 1) / (last - first));
    lines = lines < TILE ? lines : TILE;
    for (int64_t column = begin * PANEL; column < end * PANEL; column += PANEL)
        for (int64_t row = first; row < last; row += MOST_ROWS) {
            struct sums *s = &sums[turn], *before = &sums[!turn];
            s->row = row;
            s->column = column;
            s->rows = last - row < MOST_ROWS ? (int)(last - row) : MOST_ROWS;
            s->next = 0;
            if (s->rows != configured)
                bx_configure_tiles(configured = s->rows);
            const char *ahead = (const char *)block_at(c, column + PANEL);
            ahead += (row - first) / MOST_ROWS * (c->in_size / TILE) * lines * 64;
            if (s->rows > 16)
                rows_amx(c, s, before, ahead, lines, 1);
            else
                rows_amx(c, s, before, ahead, lines, 0);
            turn = !turn;
        }
    finish(c, &sums[!turn], MOST_ROWS);
    _tile_release();
}
#endif

static void task(void *context, int thread, int num_threads)
{
    const struct bf16_linear *c = context;
    panels_function panels = panels_bf16;
#if defined(BX_HAS_AMX)
    if (bx_level() >= BX_AMX && c->in_size % TILE == 0)
        panels = panels_amx;
#endif
    int64_t count = (c->out_size + PANEL - 1) / PANEL;
    int64_t begin = count * thread / num_threads, end = count * (thread + 1) / num_threads;
    int64_t row_bytes = c->in_size * (int64_t)sizeof *c->x;
    int64_t chunks = (c->num_rows * row_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    int64_t chunk = (c->num_rows + chunks - 1) / chunks; /* about the same for each */
    chunk = (chunk + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS;
    for (int64_t first = 0; first < c->num_rows; first += chunk) {
        int64_t last = first + chunk < c->num_rows ? first + chunk : c->num_rows;
        panels(c, begin, end, first, last);
    }
}
#endif

/* Whether `bx_bf16_linear` can be called for this many inputs on this machine. */
BX_EXPORT int bx_bf16_serves(int64_t in_size)
{
#if defined(__x86_64__)
    return bx_level() >= BX_AVX512_BF16 && in_size % GROUP == 0;
#else
    (void)in_size;
    return 0;
#endif
}

/* `weight`: [out_size, in_size]; `packed`: zeros, out_size rounded up to panels. */
BX_EXPORT void bx_bf16_pack(const uint16_t *weight, uint16_t *packed, int64_t out_size,
                            int64_t in_size)
{
    for (int64_t n = 0; n < out_size; n++) {
        uint16_t *block = packed + n / BLOCK * BLOCK * in_size;
        for (int64_t k = 0; k < in_size; k++)
            block[(k / GROUP * BLOCK + n % BLOCK) * GROUP + k % GROUP] = weight[n * in_size + k];
    }
}

/* `x`: [num_rows, in_size] to `out`: [num_rows, out_size] of `kind`, or half as wide and bfloat16
 * where `gated`. `bias`: [out_size rounded up to panels], or NULL. */
BX_EXPORT void bx_bf16_linear(const uint16_t *x, const uint16_t *packed, const float *bias,
                              void *out, int64_t num_rows, int64_t in_size, int64_t out_size,
                              int kind, int gated, int threads)
{
#if defined(__x86_64__)
    struct bf16_linear c = {x, packed, bias, out, num_rows, in_size, out_size, kind, gated};
    /* Below this, waking a second thread costs more than it saves. */
    int worth = out_size * in_size * num_rows >= 1 << 18;
    if (num_rows > 0)
        bx_parallel(task, &c, worth ? threads : 1);
#endif
}
