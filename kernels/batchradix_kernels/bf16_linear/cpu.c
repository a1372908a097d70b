#include "avx512.h"
#include "groups.h"
#include "operations.h"
#include "panels.h"
#include "tiles.h"

/* Two inputs stand side by side in a panel. A row's sums run in the order of the inputs, whatever
 * rows are beside it. */
enum { GROUP = 2, FEW_ROWS = 8 };

struct bf16_linear {
    const uint16_t *x;
    const uint16_t *packed;
    const float *bias; /* of all panels, or NULL */
    void *out;
    int64_t num_rows, in_size, out_size;
    int kind;  /* of `out` */
    int gated; /* left blocks are gates, right blocks what they are multiplied with */
    const struct bx_groups *groups; /* of all blocks, in place of `packed`, or NULL */
    uint16_t *panel;                /* then: this thread's room for one, widened */
};

#if defined(__x86_64__)

/* Sums [rows, BX_PANEL] of one panel, of which the rows before `next` are in the output. */
struct sums {
    float values[BX_PANEL_ROWS * BX_PANEL];
    int64_t row, column;
    int rows, next;
} __attribute__((aligned(64)));

/* Up to `count` more rows to the output. */
BX_TARGET_BF16 BX_INLINE void finish_sums(const struct bf16_linear *c, struct sums *s, int count)
{
    if (s->next == s->rows)
        return;
    int last = s->next + count < s->rows ? s->next + count : s->rows;
    int64_t width = c->gated ? c->out_size / 2 : c->out_size;
    int64_t column = c->gated ? s->column / 2 : s->column;
    int64_t left_columns = width - column;
    __mmask32 mask = left_columns < BX_PANEL ? ((__mmask32)1 << left_columns) - 1 : (__mmask32)-1;
    for (int r = s->next; r < last; r++) {
        float *sums = s->values + r * BX_PANEL;
        int64_t at = (s->row + r) * width + column;
        __m512 left = _mm512_load_ps(sums), right = _mm512_load_ps(sums + BX_BLOCK);
        if (c->bias) {
            left = _mm512_add_ps(left, _mm512_loadu_ps(c->bias + s->column));
            right = _mm512_add_ps(right, _mm512_loadu_ps(c->bias + s->column + BX_BLOCK));
        }
        if (c->gated) {
            __m256bh half = _mm512_cvtneps_pbh(bx_swiglu_16(left, right));
            _mm256_mask_storeu_epi16((uint16_t *)c->out + at, (__mmask16)mask, (__m256i)half);
        } else if (c->kind == BX_FLOAT32) {
            float *out = (float *)c->out + at;
            _mm512_mask_storeu_ps(out, (__mmask16)mask, left);
            _mm512_mask_storeu_ps(out + BX_BLOCK, (__mmask16)(mask >> BX_BLOCK), right);
        } else {
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(right, left);
            _mm512_mask_storeu_epi16((uint16_t *)c->out + at, mask, both);
        }
    }
    s->next = last;
}

/* The panel that begins at `column`. */
BX_TARGET_BF16 BX_INLINE const uint16_t *panel_at(const struct bf16_linear *c, int64_t column)
{
    if (!c->groups)
        return c->packed + column * c->in_size;
    return c->panel;
}

/* Called before a panel is multiplied by rows. */
BX_TARGET_BF16 BX_INLINE void begin_panel(const struct bf16_linear *c, int64_t column)
{
    if (c->groups)
        bx_widen_panel(c->groups + column / BX_BLOCK, c->in_size, c->panel);
}

/* Bytes of the next panel that are worth fetching ahead; those of groups are read in order. */
BX_INLINE int64_t panel_bytes(const struct bf16_linear *c)
{
    return c->groups ? 0 : c->in_size * BX_PANEL * (int64_t)sizeof *c->packed;
}

BX_TARGET_BF16 BX_INLINE void rows_bf16(const struct bf16_linear *c, int64_t column, int64_t row,
                                        const int rows)
{
    const uint16_t *left = panel_at(c, column), *right = left + BX_BLOCK * c->in_size;
    const uint16_t *x = c->x + row * c->in_size;
    __m512 sums[FEW_ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < c->in_size; k += GROUP) {
        __m512bh a = (__m512bh)_mm512_loadu_si512(left + k * BX_BLOCK);
        __m512bh b = (__m512bh)_mm512_loadu_si512(right + k * BX_BLOCK);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * c->in_size + k, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], both, a);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], both, b);
        }
    }
    struct sums total;
    total.row = row;
    total.column = column;
    total.rows = rows;
    total.next = 0;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int side = 0; side < 2; side++)
            _mm512_store_ps(total.values + r * BX_PANEL + side * BX_BLOCK, sums[r][side]);
    finish_sums(c, &total, rows);
}

BX_TARGET_BF16 static void panels_bf16(const void *context, int64_t begin, int64_t end,
                                       int64_t first, int64_t last)
{
    const struct bf16_linear *c = context;
    for (int64_t column = begin * BX_PANEL; column < end * BX_PANEL; column += BX_PANEL) {
        int64_t row = first;
        begin_panel(c, column);
        for (; row + FEW_ROWS <= last; row += FEW_ROWS)
            rows_bf16(c, column, row, FEW_ROWS);
        for (; row + 2 <= last; row += 2)
            rows_bf16(c, column, row, 2);
        if (row < last)
            rows_bf16(c, column, row, 1);
    }
}

#if defined(BX_HAS_AMX)
#define LINEAR struct bf16_linear
#define MULTIPLY _tile_dpbf16ps
#include "panels_amx.h"
#endif

static void task(void *context, int thread, int num_threads)
{
    struct bf16_linear own = *(const struct bf16_linear *)context, *c = &own;
    if (c->groups)
        c->panel += thread * c->in_size * BX_PANEL;
    int64_t row_bytes = c->in_size * (int64_t)sizeof *c->x;
    bx_panels_function multiply = panels_bf16;
#if defined(BX_HAS_AMX)
    if (bx_level() >= BX_AMX && row_bytes % TILE_BYTES == 0)
        multiply = panels_amx;
#endif
    bx_walk_panels(multiply, c, c->num_rows, row_bytes, c->out_size, thread, num_threads);
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
    bx_pack_panels(weight, packed, out_size, in_size * (int64_t)sizeof *weight);
}

void bx_bf16_linear_share(const uint16_t *x, const uint16_t *packed, const float *bias, void *out,
                          int64_t num_rows, int64_t in_size, int64_t out_size, int kind, int gated,
                          int thread, int num_threads)
{
#if defined(__x86_64__)
    struct bf16_linear c = {x, packed, bias, out, num_rows, in_size, out_size, kind, gated, NULL, NULL};
    if (num_rows > 0)
        task(&c, thread, num_threads);
#endif
}

/* `x`: [num_rows, in_size] to `out`: [num_rows, out_size] of `kind`, or half as wide and bfloat16
 * where `gated`. `bias`: [out_size rounded up to panels], or NULL. */
BX_EXPORT void bx_bf16_linear(const uint16_t *x, const uint16_t *packed, const float *bias,
                              void *out, int64_t num_rows, int64_t in_size, int64_t out_size,
                              int kind, int gated, int threads)
{
#if defined(__x86_64__)
    struct bf16_linear c = {x, packed, bias, out, num_rows, in_size, out_size, kind, gated, NULL, NULL};
    bx_parallel_panels(task, &c, out_size * in_size * num_rows, threads);
#endif
}

/* As `bx_bf16_linear`, of a weight whose columns are in groups: `groups` of all blocks of 16, an
 * even number. `panels`: bfloat16[threads][in_size][32], written over. */
BX_EXPORT void bx_grouped_linear(const uint16_t *x, const struct bx_groups *groups,
                                 const float *bias, void *out, int64_t num_rows, int64_t in_size,
                                 int64_t out_size, int kind, int gated, uint16_t *panels,
                                 int threads)
{
#if defined(__x86_64__)
    struct bf16_linear c = {x,        NULL, bias,  out,    num_rows, in_size,
                            out_size, kind, gated, groups, panels};
    bx_parallel_panels(task, &c, out_size * in_size * num_rows, threads);
#endif
}
