/* Kernels that multiply bfloat16 in hardware: by pairs (AVX512-BF16) and by tiles (AMX).
 *
 * Weights are rounded to bfloat16 for their product with the values; scores, softmax and sums
 * stay float32. */
#include "cpu.h"

#ifdef HAS_BF16_KERNELS
#include "avx512.h"
#include "tiles.h"

#define AVX512 "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512"
#define TARGET __attribute__((target(AVX512)))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define ROWS 6
#define SLACK 6.0f
#define MOST_BLOCKS 2 /* of a window, whose weights are found together */

/* Slots [low, high) of 16, as bits. */
INLINE __mmask16 slots_between(int low, int high)
{
    low = low < 0 ? 0 : low;
    high = high > 16 ? 16 : high;
    return high > low ? (__mmask16)((1u << high) - (1u << low)) : 0;
}

/* One row's state: the largest score so far, the sum of weights and the weighted sum of values. */
struct state {
    float *peak, *sum, *out;
};

/* Puts a row's state to the scale of a larger score, at least `most`. */
static TARGET void raise(struct state row, __m512 most, float scale, int dim)
{
    float largest = _mm512_reduce_max_ps(most);
    largest = largest > *row.peak ? largest : *row.peak; /* a NaN may have hidden the others */
    __m512 fade = bx_exp2_16(_mm512_set1_ps((*row.peak - largest) * scale));
    _mm512_storeu_ps(row.sum, _mm512_mul_ps(_mm512_loadu_ps(row.sum), fade));
    for (int e = 0; e < dim; e += 16)
        _mm512_storeu_ps(row.out + e, _mm512_mul_ps(_mm512_loadu_ps(row.out + e), fade));
    *row.peak = largest;
}

/* 2 ** x, relative error 2e-7 */
INLINE __m512 precise_exp2(__m512 x)
{
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole), y = _mm512_set1_ps(0.00015353361959569156f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.0013398875016719103f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.00961843691766262f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.055503323674201965f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.24022647738456726f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.6931471824645996f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

/* Makes scores cap * tanh(score / cap); `count` is a multiple of 16. */
static TARGET __attribute__((noinline)) void cap_scores(float *scores, int count, float cap)
{
    const __m512 one = _mm512_set1_ps(1);
    for (int i = 0; i < count; i += 16) {
        __m512 x = _mm512_load_ps(scores + i);
        __m512 size = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2 * LOG2_E / cap));
        __m512 t = precise_exp2(_mm512_max_ps(_mm512_set1_ps(-126), size)); /* NaN stays */
        __m512 y = _mm512_div_ps(_mm512_sub_ps(one, t), _mm512_add_ps(one, t));
        __m512i sign = _mm512_and_si512((__m512i)x, _mm512_set1_epi32((int)0x80000000u));
        y = (__m512)_mm512_or_si512((__m512i)_mm512_mul_ps(y, _mm512_set1_ps(cap)), sign);
        _mm512_store_ps(scores + i, y);
    }
}

/* Turns the scores of one row over `count` blocks into bfloat16 weights, of which those of slots
 * [low, high) count where it `is_partly` seen. Weights may be as large as 2 ** SLACK before all
 * is put to another scale; `slack` is that as a score. */
INLINE void weigh(const int count, const int is_partly, const float *scores, uint16_t *weights,
                  int low, int high, float scale, float slack, struct state row, int dim)
{
    const __m512 factor = _mm512_set1_ps(scale);
    __m512 s[2 * MOST_BLOCKS], most = _mm512_set1_ps(-INFINITY);
    for (int i = 0; i < 2 * count; i++) {
        s[i] = _mm512_load_ps(scores + 16 * i);
        if (is_partly)
            most = _mm512_mask_max_ps(most, slots_between(low - 16 * i, high - 16 * i), most, s[i]);
        else
            most = _mm512_max_ps(most, s[i]);
    }
    if (_mm512_cmp_ps_mask(most, _mm512_set1_ps(*row.peak + slack), _CMP_GT_OQ))
        raise(row, most, scale, dim);
    __m512 shift = _mm512_set1_ps(*row.peak * scale), total = _mm512_loadu_ps(row.sum);
    for (int i = 0; i < 2 * count; i += 2) {
        __m512 w0 = bx_exp2_16(_mm512_fmsub_ps(s[i], factor, shift));
        __m512 w1 = bx_exp2_16(_mm512_fmsub_ps(s[i + 1], factor, shift));
        if (is_partly) {
            w0 = _mm512_maskz_mov_ps(slots_between(low - 16 * i, high - 16 * i), w0);
            w1 = _mm512_maskz_mov_ps(slots_between(low - 16 * i - 16, high - 16 * i - 16), w1);
        }
        total = _mm512_add_ps(total, _mm512_add_ps(w0, w1));
        _mm512_store_si512(weights + 16 * i, (__m512i)_mm512_cvtne2ps_pbh(w1, w0));
    }
    _mm512_storeu_ps(row.sum, total);
}

/* ---- by pairs ---- */

INLINE __m512 multiply_pairs(__m512 sum, __m512i pairs, const uint16_t *pair)
{
    return _mm512_dpbf16_ps(sum, (__m512bh)pairs,
                            (__m512bh)_mm512_set1_epi32((int)*(const word *)pair));
}

INLINE void multiply_keys(const int count, const struct blocks *block, const uint16_t *q, int dim,
                          float (*scores)[BLOCK])
{
    const uint16_t *keys0 = block->keys, *keys1 = keys0 + 16 * dim;
    __m512 sums[ROWS][2];
    for (int r = 0; r < count; r++)
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int e = 0; e < dim; e += 2) {
        __m512i key0 = _mm512_loadu_si512(keys0 + e * 16);
        __m512i key1 = _mm512_loadu_si512(keys1 + e * 16);
        for (int r = 0; r < count; r++) {
            sums[r][0] = multiply_pairs(sums[r][0], key0, q + r * dim + e);
            sums[r][1] = multiply_pairs(sums[r][1], key1, q + r * dim + e);
        }
    }
    for (int r = 0; r < count; r++) {
        _mm512_store_ps(scores[r], sums[r][0]);
        _mm512_store_ps(scores[r] + 16, sums[r][1]);
    }
}

/* `pairs`: the values of each pair of slots; pairs [first, last) count. `width`: 2 or 4 vectors. */
INLINE void multiply_values(const int count, const int width, const uint16_t *const *pairs,
                            int first, int last, uint16_t (*weights)[BLOCK], float *out, int dim,
                            int column)
{
    __m512 sums[ROWS][4];
    for (int r = 0; r < count; r++)
        for (int i = 0; i < width; i++)
            sums[r][i] = _mm512_loadu_ps(out + r * dim + column + i * 16);
    for (int pair = first; pair < last; pair++) {
        __m512i values[4];
        for (int i = 0; i < width; i++)
            values[i] = _mm512_loadu_si512(pairs[pair] + 2 * (column + i * 16));
        for (int r = 0; r < count; r++)
            for (int i = 0; i < width; i++)
                sums[r][i] = multiply_pairs(sums[r][i], values[i], weights[r] + 2 * pair);
    }
    for (int r = 0; r < count; r++)
        for (int i = 0; i < width; i++)
            _mm512_storeu_ps(out + r * dim + column + i * 16, sums[r][i]);
}

INLINE void attend(const int count, const struct blocks *block, const struct rows *rows, int first,
                   const uint16_t *const *pairs)
{
    float scores[ROWS][BLOCK] __attribute__((aligned(64)));
    uint16_t weights[ROWS][BLOCK] __attribute__((aligned(64)));
    int dim = rows->dim, column = 0;
    float *out = rows->out + first * dim, slack = SLACK / rows->scale;
    multiply_keys(count, block, (const uint16_t *)rows->q + first * dim, dim, scores);
    if (rows->cap != 0)
        cap_scores(scores[0], count * BLOCK, rows->cap);
    for (int r = 0; r < count; r++) {
        int low = rows->lows ? rows->lows[first + r] : block->low;
        int high = rows->limits ? rows->limits[first + r] : block->high;
        struct state row = {rows->peak + first + r, rows->sum + (first + r) * LANES, out + r * dim};
        weigh(1, low > 0 || high < BLOCK, scores[r], weights[r], low, high, rows->scale, slack, row,
              dim);
    }
    int begin = block->low / 2, end = (block->high + 1) / 2;
    for (; column + 64 <= dim; column += 64)
        multiply_values(count, 4, pairs, begin, end, weights, out, dim, column);
    if (column < dim)
        multiply_values(count, 2, pairs, begin, end, weights, out, dim, column);
}

/* A pair of slots with the values of the one that counts, zeros for the other. */
static TARGET const uint16_t *half_pair(const uint16_t *pair, uint32_t kept, uint16_t *to, int dim)
{
    for (int e = 0; e < dim; e += 16)
        _mm512_storeu_si512(to + 2 * e, _mm512_and_si512(_mm512_loadu_si512(pair + 2 * e),
                                                         _mm512_set1_epi32((int)kept)));
    return to;
}

static TARGET void attend_pairs(const struct blocks *block, const struct rows *rows)
{
    const uint16_t *pairs[BLOCK / 2];
    uint16_t *spare = rows->spare;
    int dim = rows->dim, row = 0, low = block->low, high = block->high;
    for (int i = 0; i < BLOCK / 2; i++)
        pairs[i] = (const uint16_t *)block->values + i * 2 * dim;
    if (low % 2)
        pairs[low / 2] = half_pair(pairs[low / 2], 0xffff0000, spare, dim);
    if (high % 2)
        pairs[high / 2] = half_pair(pairs[high / 2], 0x0000ffff, spare + 2 * dim, dim);
    for (; row + ROWS <= rows->count; row += ROWS)
        attend(ROWS, block, rows, row, pairs);
    switch (rows->count - row) {
    case 5: attend(5, block, rows, row, pairs); break;
    case 4: attend(4, block, rows, row, pairs); break;
    case 3: attend(3, block, rows, row, pairs); break;
    case 2: attend(2, block, rows, row, pairs); break;
    case 1: attend(1, block, rows, row, pairs); break;
    }
}

TARGET void bx_attend_avx512_bf16(const struct blocks *blocks, const struct rows *rows)
{
    for (int i = 0; i * BLOCK < blocks->high; i++) {
        struct blocks block = one_of(blocks, i, BLOCK * rows->dim * 2);
        attend_pairs(&block, rows);
    }
}

/* ---- by tiles ---- */

/* Some compilers do not know that loading a tile reads memory. */
#define STORED_BEFORE_LOADED() __asm__ volatile("" ::: "memory")

BX_TARGET_AMX void bx_amx_end(void) { _tile_release(); }

#define AMX_INLINE static inline __attribute__((always_inline)) BX_TARGET_AMX

#define FEW 4 /* rows that become weights between two steps of the tiles */

/* Up to two tiles of rows, which share the loads of keys and values, over one window. */
#define UNIT (2 * TILE)

struct unit {
    int window, first, count; /* the rows [first, first + count) */
    int low, high, num_blocks; /* slots of the window that some of the rows see */
};

struct window {
    const uint16_t *keys;
    const uint16_t *values[MOST_BLOCKS];
};

static inline struct unit make_unit(int window, int first, const struct blocks *blocks,
                                    const struct rows *rows)
{
    int rest = rows->count - first, low = blocks->low - window * WINDOW;
    struct unit unit = {window, first, rest < UNIT ? rest : UNIT, low > 0 ? low : 0, 0, 0};
    int high = rows->limits ? rows->limits[first + unit.count - 1] : blocks->high;
    high -= window * WINDOW;
    unit.high = high < WINDOW ? high : WINDOW;
    unit.num_blocks = (unit.high + BLOCK - 1) / BLOCK;
    return unit;
}

/* The next rows of the window, or the first of the next; its `high` is not positive at the end. */
static inline struct unit next_unit(const struct unit *at, const struct blocks *blocks,
                                    const struct rows *rows)
{
    if (at->first + UNIT < rows->count)
        return make_unit(at->window, at->first + UNIT, blocks, rows);
    return make_unit(at->window + 1, 0, blocks, rows);
}

/* Step `step` of the scores [rows][WINDOW] of a unit: 32 elements of the keys of a block. */
AMX_INLINE void score_step(const struct unit *at, const uint16_t *keys, const uint16_t *q, int dim,
                           int step, float (*scores)[WINDOW])
{
    int steps = dim / 32, block = step / steps, e = step % steps * 32;
    const uint16_t *keys0 = keys + (int64_t)block * BLOCK * dim, *keys1 = keys0 + 16 * dim;
    float *to = scores[0] + block * BLOCK;
    int two = at->count > TILE;
    if (e == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    _tile_loadd(4, q + e, dim * 2);
    _tile_loadd(6, keys0 + e * 16, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, keys1 + e * 16, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
        _tile_loadd(5, q + TILE * dim + e, dim * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    if (e + 32 == dim) {
        _tile_stored(0, to, WINDOW * 4);
        _tile_stored(1, to + 16, WINDOW * 4);
        if (two) {
            _tile_stored(2, to + TILE * WINDOW, WINDOW * 4);
            _tile_stored(3, to + TILE * WINDOW + 16, WINDOW * 4);
        }
    }
}

/* Adds weights times values to the rows' `out`. */
AMX_INLINE void add_values(const struct unit *at, const struct window *window,
                           uint16_t (*weights)[WINDOW], float *out, int dim)
{
    int two = at->count > TILE;
    STORED_BEFORE_LOADED();
    for (int e = 0; e < dim; e += 32) {
        float *lower = out + TILE * dim + e;
        _tile_loadd(0, out + e, dim * 4);
        _tile_loadd(1, out + e + 16, dim * 4);
        if (two) {
            _tile_loadd(2, lower, dim * 4);
            _tile_loadd(3, lower + 16, dim * 4);
        }
        for (int block = 0; block < at->num_blocks; block++) {
            const uint16_t *values = window->values[block] + 2 * e;
            _tile_loadd(4, weights[0] + block * BLOCK, WINDOW * 2);
            _tile_loadd(6, values, dim * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, values + 32, dim * 4);
            _tile_dpbf16ps(1, 4, 7);
            if (two) {
                _tile_loadd(5, weights[TILE] + block * BLOCK, WINDOW * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, out + e, dim * 4);
        _tile_stored(1, out + e + 16, dim * 4);
        if (two) {
            _tile_stored(2, lower, dim * 4);
            _tile_stored(3, lower + 16, dim * 4);
        }
    }
}

/* The values of a block with zeros for the slots outside of [low, high). */
static TARGET const uint16_t *clean_values(const uint16_t *values, int low, int high, uint16_t *to,
                                           int dim)
{
    for (int pair = 0; pair < BLOCK / 2; pair++) {
        uint32_t kept = (2 * pair >= low && 2 * pair < high ? 0xffffu : 0) |
                        (2 * pair + 1 >= low && 2 * pair + 1 < high ? ~0xffffu : 0);
        half_pair(values + pair * 2 * dim, kept, to + pair * 2 * dim, dim);
    }
    return to;
}

/* Keys and values of a window, those of its first and last block cleaned into `spare`. */
static TARGET struct window open_window(int index, const struct blocks *blocks,
                                        const struct rows *rows)
{
    int dim = rows->dim, low = blocks->low - index * WINDOW, high = blocks->high - index * WINDOW;
    int64_t at = (int64_t)index * WINDOW * dim;
    struct window window = {.keys = (const uint16_t *)blocks->keys + at};
    uint16_t *spare = rows->spare;
    for (int i = 0; i < MOST_BLOCKS && i * BLOCK < high; i++) {
        const uint16_t *values = (const uint16_t *)blocks->values + at + i * BLOCK * dim;
        if (low > i * BLOCK || high < (i + 1) * BLOCK) {
            values = clean_values(values, low - i * BLOCK, high - i * BLOCK, spare, dim);
            spare += BLOCK * dim;
        }
        window.values[i] = values;
    }
    return window;
}

/* Asks for the keys and values of the window after this one. */
static inline void prefetch_window(int index, const struct blocks *blocks, int dim)
{
    int rest = blocks->high - (index + 1) * WINDOW;
    int64_t at = (int64_t)(index + 1) * WINDOW * dim * 2;
    int64_t bytes = (int64_t)(rest < WINDOW ? rest : WINDOW) * dim * 2;
    for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch((const char *)blocks->keys + at + i);
        __builtin_prefetch((const char *)blocks->values + at + i);
    }
}

/* The rows [begin, end) of a unit. */
INLINE void weigh_some(const int count, const int is_partly, const struct unit *at,
                       const struct rows *rows, int begin, int end, float (*scores)[WINDOW],
                       uint16_t (*weights)[WINDOW])
{
    const float scale = rows->scale, slack = SLACK / scale;
    const int dim = rows->dim, first = at->first;
    for (int r = begin; r < end; r++) {
        struct state row = {rows->peak + first + r, rows->sum + (first + r) * LANES,
                            rows->out + (first + r) * dim};
        int low = rows->lows ? rows->lows[first + r] - at->window * WINDOW : at->low;
        int high = rows->limits ? rows->limits[first + r] - at->window * WINDOW : at->high;
        weigh(count, is_partly, scores[r], weights[r], low, high, scale, slack, row, dim);
    }
}

static TARGET void weigh_rows(const struct unit *at, const struct rows *rows, int begin, int end,
                              float (*scores)[WINDOW], uint16_t (*weights)[WINDOW])
{
    int is_partly = rows->limits || at->low > 0 || at->high < at->num_blocks * BLOCK;
    for (int r = begin; r < end && rows->cap != 0; r++)
        cap_scores(scores[r], at->num_blocks * BLOCK, rows->cap);
    if (at->num_blocks == 1)
        weigh_some(1, 1, at, rows, begin, end, scores, weights);
    else if (is_partly)
        weigh_some(2, 1, at, rows, begin, end, scores, weights);
    else
        weigh_some(2, 0, at, rows, begin, end, scores, weights);
}

/* While scores become weights, row by row, the tiles multiply those of the next unit. */
BX_TARGET_AMX void bx_attend_amx(const struct blocks *blocks, const struct rows *rows)
{
    float scores[2][UNIT][WINDOW] __attribute__((aligned(64)));
    uint16_t weights[UNIT][WINDOW] __attribute__((aligned(64)));
    int dim = rows->dim, turn = 0, scored = 0, configured = 0;
    const uint16_t *q = rows->q;
    struct window window = open_window(0, blocks, rows);
    struct unit at = make_unit(0, 0, blocks, rows);
    while (at.high > 0) {
        int steps = at.num_blocks * dim / 32, step = 0;
        if (at.count != configured)
            bx_configure_tiles(configured = at.count);
        STORED_BEFORE_LOADED();
        for (; scored < steps; scored++)
            score_step(&at, window.keys, q + at.first * dim, dim, scored, scores[turn]);
        struct unit next = next_unit(&at, blocks, rows);
        const uint16_t *next_keys = window.keys + (next.window - at.window) * WINDOW * dim;
        if (at.first == 0)
            prefetch_window(at.window, blocks, dim);
        int next_steps = next.high > 0 && next.count == at.count ? next.num_blocks * dim / 32 : 0;
        for (int r = 0; r < at.count; r += FEW) {
            int end = r + FEW < at.count ? r + FEW : at.count;
            weigh_rows(&at, rows, r, end, scores[turn], weights);
            for (; step * at.count < next_steps * end; step++)
                score_step(&next, next_keys, q + next.first * dim, dim, step, scores[!turn]);
        }
        add_values(&at, &window, weights, rows->out + at.first * dim, dim);
        if (next.window != at.window && next.high > 0)
            window = open_window(next.window, blocks, rows);
        at = next;
        scored = next_steps;
        turn = !turn;
    }
}
#endif
