/* Kernels that multiply bfloat16 in hardware: by pairs (AVX512-BF16) and by tiles (AMX).
 *
 * Weights are rounded to bfloat16 for their product with the values; scores, softmax and sums
 * stay float32. */
#include "cpu.h"

#ifdef HAS_BF16_KERNELS
#include <immintrin.h>

#define AVX512 "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512"
#define TARGET __attribute__((target(AVX512)))
#define AMX_TARGET __attribute__((target("amx-tile,amx-bf16," AVX512)))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define ROWS 6

/* 2 ** x for x <= 0, relative error 3e-06, which is far below bfloat16's 4e-3; one at zero,
 * zero far below it, NaN for NaN. */
INLINE __m512 fast_exp2(__m512 x)
{
    __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* x - floor(x) */
    __m512 y = _mm512_set1_ps(0.013426684774458408f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.052242472767829895f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.241280198097229f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.6930448412895203f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, x); /* y * 2 ** floor(x) */
}

/* Slots [low, high) of 16, as bits. */
INLINE __mmask16 slots_between(int low, int high)
{
    low = low < 0 ? 0 : low;
    high = high > 16 ? 16 : high;
    return high > low ? (__mmask16)((1u << high) - (1u << low)) : 0;
}

/* Turns the scores of one row into bfloat16 weights, and the row's state to their scale. */
INLINE void weigh(const float *scores, uint16_t *weights, int low, int high, float scale,
                  float *peak, float *sum, float *out, int dim)
{
    __m512 s0 = _mm512_load_ps(scores), s1 = _mm512_load_ps(scores + 16);
    __mmask16 seen0 = 0xffff, seen1 = 0xffff;
    __m512 most;
    if (low > 0 || high < BLOCK) {
        seen0 = slots_between(low, high);
        seen1 = slots_between(low - 16, high - 16);
        __m512 none = _mm512_set1_ps(-INFINITY);
        most = _mm512_max_ps(_mm512_mask_mov_ps(none, seen0, s0),
                             _mm512_mask_mov_ps(none, seen1, s1));
    } else {
        most = _mm512_max_ps(s0, s1);
    }
    if (_mm512_cmp_ps_mask(most, _mm512_set1_ps(*peak), _CMP_GT_OQ)) {
        float largest = _mm512_reduce_max_ps(most);
        largest = largest > *peak ? largest : *peak; /* a NaN may have hidden the others */
        __m512 fade = fast_exp2(_mm512_set1_ps((*peak - largest) * scale));
        _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), fade));
        for (int e = 0; e < dim; e += 16)
            _mm512_storeu_ps(out + e, _mm512_mul_ps(_mm512_loadu_ps(out + e), fade));
        *peak = largest;
    }
    __m512 shift = _mm512_set1_ps(*peak), factor = _mm512_set1_ps(scale);
    __m512 w0 = fast_exp2(_mm512_mul_ps(_mm512_sub_ps(s0, shift), factor));
    __m512 w1 = fast_exp2(_mm512_mul_ps(_mm512_sub_ps(s1, shift), factor));
    w0 = _mm512_maskz_mov_ps(seen0, w0);
    w1 = _mm512_maskz_mov_ps(seen1, w1);
    _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), _mm512_add_ps(w0, w1)));
    _mm512_store_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(w1, w0));
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
    float *out = rows->out + first * dim;
    multiply_keys(count, block, (const uint16_t *)rows->q + first * dim, dim, scores);
    for (int r = 0; r < count; r++) {
        int high = rows->limits ? rows->limits[first + r] : block->high;
        weigh(scores[r], weights[r], block->low, high, rows->scale, rows->peak + first + r,
              rows->sum + (first + r) * LANES, out + r * dim, dim);
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

/* All tiles are 16 rows of 64 bytes. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config = {
    .palette = 1,
    .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {16, 16, 16, 16, 16, 16, 16, 16},
};

/* Some compilers do not know that loading a tile reads memory. */
#define STORED_BEFORE_LOADED() __asm__ volatile("" ::: "memory")

AMX_TARGET void bx_amx_begin(void) { _tile_loadconfig(&tile_config); }

AMX_TARGET void bx_amx_end(void) { _tile_release(); }

#define AMX_INLINE static inline __attribute__((always_inline)) AMX_TARGET

/* Up to two tiles of rows over one block, which share the loads of keys and values. */
#define UNIT (2 * TILE)

/* Scores of 16 or 32 rows, [rows][BLOCK]; reads that many rows of q whatever is in them. */
AMX_INLINE void multiply_keys_by_tiles(const int two, const void *keys, const uint16_t *q, int dim,
                                       float (*scores)[BLOCK])
{
    const uint16_t *keys0 = keys, *keys1 = keys0 + 16 * dim;
    STORED_BEFORE_LOADED();
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int e = 0; e < dim; e += 32) {
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
    }
    _tile_stored(0, scores[0], BLOCK * 4);
    _tile_stored(1, scores[0] + 16, BLOCK * 4);
    if (two) {
        _tile_stored(2, scores[TILE], BLOCK * 4);
        _tile_stored(3, scores[TILE] + 16, BLOCK * 4);
    }
}

/* Adds weights times values to `out0` and, of the second tile, to `out1`. */
AMX_INLINE void multiply_values_by_tiles(const int two, const uint16_t *values,
                                         uint16_t (*weights)[BLOCK], float *out0, float *out1,
                                         int dim)
{
    STORED_BEFORE_LOADED();
    _tile_loadd(4, weights[0], BLOCK * 2);
    if (two)
        _tile_loadd(5, weights[TILE], BLOCK * 2);
    for (int e = 0; e < dim; e += 32) {
        _tile_loadd(6, values + 2 * e, dim * 4);
        _tile_loadd(0, out0 + e, dim * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values + 2 * e + 32, dim * 4);
        _tile_loadd(1, out0 + e + 16, dim * 4);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(2, out1 + e, dim * 4);
            _tile_dpbf16ps(2, 5, 6);
            _tile_loadd(3, out1 + e + 16, dim * 4);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, out0 + e, dim * 4);
        _tile_stored(1, out0 + e + 16, dim * 4);
        if (two) {
            _tile_stored(2, out1 + e, dim * 4);
            _tile_stored(3, out1 + e + 16, dim * 4);
        }
    }
}

/* The values of a block with zeros for the slots outside of it. */
static TARGET const uint16_t *clean_values(const struct blocks *block, uint16_t *to, int dim)
{
    for (int pair = 0; pair < BLOCK / 2; pair++) {
        uint32_t kept = (2 * pair >= block->low && 2 * pair < block->high ? 0xffffu : 0) |
                        (2 * pair + 1 >= block->low && 2 * pair + 1 < block->high ? ~0xffffu : 0);
        half_pair((const uint16_t *)block->values + pair * 2 * dim, kept, to + pair * 2 * dim, dim);
    }
    return to;
}

/* One unit of rows over one block: its place in the walk over all blocks and units. */
struct place {
    int index, first, count;
};

static inline struct place next_place(struct place at, const struct rows *rows)
{
    at.first += UNIT;
    if (at.first >= rows->count) {
        at.first = 0;
        at.index++;
    }
    at.count = rows->count - at.first < UNIT ? rows->count - at.first : UNIT;
    return at;
}

static AMX_TARGET void score_unit(struct place at, const struct blocks *blocks,
                                  const struct rows *rows, float (*scores)[BLOCK])
{
    struct blocks block = one_of(blocks, at.index, BLOCK * rows->dim * 2);
    const uint16_t *q = (const uint16_t *)rows->q + at.first * rows->dim;
    if (at.count > TILE)
        multiply_keys_by_tiles(1, block.keys, q, rows->dim, scores);
    else
        multiply_keys_by_tiles(0, block.keys, q, rows->dim, scores);
}

static AMX_TARGET void finish_unit(struct place at, const struct blocks *block,
                                   const struct rows *rows, float (*scores)[BLOCK],
                                   const uint16_t *values)
{
    uint16_t weights[UNIT][BLOCK] __attribute__((aligned(64)));
    float few[TILE * MAX_DIM] __attribute__((aligned(64)));
    int dim = rows->dim, last = (at.count - 1) / TILE * TILE, rest = at.count - last;
    float *out = rows->out + at.first * dim;
    for (int r = 0; r < at.count; r++) {
        int row = at.first + r, high = rows->limits ? rows->limits[row] : block->high;
        weigh(scores[r], weights[r], block->low, high, rows->scale, rows->peak + row,
              rows->sum + row * LANES, out + r * dim, dim);
    }
    /* the rows behind a tile that is not full belong to others */
    float *tail = rest == TILE ? out + last * dim : few;
    if (rest < TILE)
        memcpy(few, out + last * dim, sizeof(float) * rest * dim);
    if (last)
        multiply_values_by_tiles(1, values, weights, out, tail, dim);
    else
        multiply_values_by_tiles(0, values, weights, tail, NULL, dim);
    if (rest < TILE)
        memcpy(out + last * dim, few, sizeof(float) * rest * dim);
}

/* Asks for keys and values `ahead` bytes behind those of the block. */
static inline void prefetch_block(const struct blocks *block, int ahead, int bytes)
{
    for (int i = ahead; i < ahead + bytes; i += 64) {
        __builtin_prefetch((const char *)block->keys + i);
        __builtin_prefetch((const char *)block->values + i);
    }
}

/* While a unit's scores become weights, the tiles already multiply those of the next. */
AMX_TARGET void bx_attend_amx(const struct blocks *blocks, const struct rows *rows)
{
    float scores[2][UNIT][BLOCK] __attribute__((aligned(64)));
    int dim = rows->dim, turn = 0, index = -1;
    const uint16_t *values = NULL;
    struct blocks block = {0};
    struct place at = next_place((struct place){-1, rows->count, 0}, rows);
    score_unit(at, blocks, rows, scores[turn]);
    while (at.index * BLOCK < blocks->high) {
        struct place next = next_place(at, rows);
        if (next.index * BLOCK < blocks->high)
            score_unit(next, blocks, rows, scores[!turn]);
        if (at.index != index) {
            index = at.index;
            block = one_of(blocks, index, BLOCK * dim * 2);
            if ((index + 2) * BLOCK < blocks->high)
                prefetch_block(&block, 2 * BLOCK * dim * 2, BLOCK * dim * 2);
            values = block.values;
            if (block.low > 0 || block.high < BLOCK)
                values = clean_values(&block, rows->spare, dim);
        }
        finish_unit(at, &block, rows, scores[turn], values);
        at = next;
        turn = !turn;
    }
}
#endif
