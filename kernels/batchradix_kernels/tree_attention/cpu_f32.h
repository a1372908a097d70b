/* The float32 kernel, written once over vectors of WIDTH floats; included once for each
 * instruction set with NAME(x), TARGET, WIDTH and ROWS, the rows that fit the registers. */

typedef float NAME(vec) __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t NAME(ivec) __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t NAME(uvec) __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
#define VEC NAME(vec)
#define IVEC NAME(ivec)
#define UVEC NAME(uvec)
#define INLINE static inline __attribute__((always_inline)) TARGET
#define PARTS (BLOCK / WIDTH)

INLINE VEC NAME(load)(const float *p) { return *(const VEC *)p; }
INLINE void NAME(store)(float *p, VEC v) { *(VEC *)p = v; }
INLINE VEC NAME(select)(IVEC mask, VEC yes, VEC no)
{
    return (VEC)(((IVEC)yes & mask) | ((IVEC)no & ~mask));
}

/* 2 ** x for x <= 0, relative error 2e-7; zero below -126, one at zero, NaN for NaN. */
INLINE VEC NAME(exp2)(VEC x)
{
    x = NAME(select)(x < -127.0f, (VEC){0} - 127.0f, x);
    VEC shifted = x + 12582912.0f; /* its low bits are x rounded to an integer */
    VEC f = x - (shifted - 12582912.0f);
    VEC y = f * 0.00015353361959569156f + 0.0013398875016719103f;
    y = y * f + 0.00961843691766262f;
    y = y * f + 0.055503323674201965f;
    y = y * f + 0.24022647738456726f;
    y = y * f + 0.6931471824645996f;
    y = y * f + 1.0f;
    return y * (VEC)(((NAME(uvec))shifted << 23) + 0x3f800000);
}

/* cap * tanh(x / cap) */
INLINE VEC NAME(cap)(VEC x, float cap)
{
    VEC size = (VEC)((IVEC)x & 0x7fffffff), t = NAME(exp2)(size * (-2 * LOG2_E / cap));
    VEC y = (1.0f - t) / (1.0f + t) * cap;
    return (VEC)((IVEC)y | ((IVEC)x & (IVEC)((UVEC){0} + 0x80000000u)));
}

INLINE float NAME(largest)(VEC v)
{
    float lanes[WIDTH];
    NAME(store)(lanes, v);
    for (int width = WIDTH / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

INLINE void NAME(multiply_keys)(const int count, const struct blocks *block, const float *q, int dim,
                                float (*scores)[BLOCK])
{
    for (int slot = 0; slot < BLOCK; slot += 2 * WIDTH) {
        if (slot + 2 * WIDTH <= block->low || slot >= block->high)
            continue; /* all of it is hidden */
        const float *keys = block->keys;
        const float *keys0 = keys + slot / 16 * 16 * dim + slot % 16;
        const float *keys1 = keys + (slot + WIDTH) / 16 * 16 * dim + (slot + WIDTH) % 16;
        VEC sums[ROWS][2];
        for (int r = 0; r < count; r++)
            sums[r][0] = sums[r][1] = (VEC){0};
        for (int e = 0; e < dim; e++) {
            VEC key0 = NAME(load)(keys0 + e * 16), key1 = NAME(load)(keys1 + e * 16);
            for (int r = 0; r < count; r++) {
                sums[r][0] += key0 * q[r * dim + e];
                sums[r][1] += key1 * q[r * dim + e];
            }
        }
        for (int r = 0; r < count; r++) {
            NAME(store)(scores[r] + slot, sums[r][0]);
            NAME(store)(scores[r] + slot + WIDTH, sums[r][1]);
        }
    }
}

/* Turns the scores of one row into weights, and the row's state to their scale. */
INLINE void NAME(weigh)(float *scores, int low, int high, float scale, float *peak, float *sum,
                        float *out, int dim)
{
    VEC s[PARTS];
    IVEC seen[PARTS];
    int partial = low > 0 || high < BLOCK;
    for (int i = 0; i < PARTS; i++) {
        s[i] = NAME(load)(scores + i * WIDTH);
        if (partial) {
            IVEC slot;
            for (int j = 0; j < WIDTH; j++)
                slot[j] = i * WIDTH + j;
            seen[i] = (slot >= low) & (slot < high);
            s[i] = NAME(select)(seen[i], s[i], (VEC){0} - INFINITY);
        }
    }
    VEC most = s[0];
    for (int i = 1; i < PARTS; i++)
        most = NAME(select)(most > s[i], most, s[i]);
    float largest = NAME(largest)(most);
    if (largest > *peak) {
        VEC fade = NAME(exp2)((VEC){0} + (*peak - largest) * scale);
        NAME(store)(sum, NAME(load)(sum) * fade);
        for (int e = 0; e < dim; e += WIDTH)
            NAME(store)(out + e, NAME(load)(out + e) * fade);
        *peak = largest;
    }
    VEC total = NAME(load)(sum);
    for (int i = 0; i < PARTS; i++) {
        VEC weight = NAME(exp2)((s[i] - *peak) * scale);
        if (partial)
            weight = (VEC)((IVEC)weight & seen[i]);
        total += weight;
        NAME(store)(scores + i * WIDTH, weight);
    }
    NAME(store)(sum, total);
}

INLINE void NAME(multiply_values)(const int count, const struct blocks *block,
                                  float (*weights)[BLOCK], float *out, int dim)
{
    for (int e = 0; e < dim; e += 2 * WIDTH) {
        const float *values = (const float *)block->values + e;
        VEC sums[ROWS][2];
        for (int r = 0; r < count; r++) {
            sums[r][0] = NAME(load)(out + r * dim + e);
            sums[r][1] = NAME(load)(out + r * dim + e + WIDTH);
        }
        for (int slot = block->low; slot < block->high; slot++) {
            VEC value0 = NAME(load)(values + slot * dim);
            VEC value1 = NAME(load)(values + slot * dim + WIDTH);
            for (int r = 0; r < count; r++) {
                sums[r][0] += value0 * weights[r][slot];
                sums[r][1] += value1 * weights[r][slot];
            }
        }
        for (int r = 0; r < count; r++) {
            NAME(store)(out + r * dim + e, sums[r][0]);
            NAME(store)(out + r * dim + e + WIDTH, sums[r][1]);
        }
    }
}

INLINE void NAME(attend)(const int count, const struct blocks *block, const struct rows *rows,
                         int first)
{
    float scores[ROWS][BLOCK] __attribute__((aligned(64))) = {{0}};
    int dim = rows->dim;
    float *out = rows->out + first * dim;
    NAME(multiply_keys)(count, block, (const float *)rows->q + first * dim, dim, scores);
    for (int r = 0; r < count && rows->cap != 0; r++)
        for (int i = 0; i < BLOCK; i += WIDTH)
            NAME(store)(scores[r] + i, NAME(cap)(NAME(load)(scores[r] + i), rows->cap));
    for (int r = 0; r < count; r++) {
        int low = rows->lows ? rows->lows[first + r] : block->low;
        int high = rows->limits ? rows->limits[first + r] : block->high;
        NAME(weigh)(scores[r], low, high, rows->scale, rows->peak + first + r,
                    rows->sum + (first + r) * LANES, out + r * dim, dim);
    }
    NAME(multiply_values)(count, block, scores, out, dim);
}

INLINE void NAME(attend_rows)(const struct blocks *block, const struct rows *rows)
{
    int row = 0;
    for (; row + ROWS <= rows->count; row += ROWS)
        NAME(attend)(ROWS, block, rows, row);
    switch (rows->count - row) {
#if ROWS > 4
    case 5: NAME(attend)(5, block, rows, row); break;
    case 4: NAME(attend)(4, block, rows, row); break;
#endif
    case 3: NAME(attend)(3, block, rows, row); break;
    case 2: NAME(attend)(2, block, rows, row); break;
    case 1: NAME(attend)(1, block, rows, row); break;
    }
}

TARGET void NAME(bx_attend_f32)(const struct blocks *blocks, const struct rows *rows)
{
    for (int i = 0; i * BLOCK < blocks->high; i++) {
        struct blocks block = one_of(blocks, i, BLOCK * rows->dim * 4);
        NAME(attend_rows)(&block, rows);
    }
}

/* Widens the keys of a block and the values that count. */
INLINE void NAME(widen)(const struct blocks *block, float *keys, float *values, int dim)
{
    for (int half = 0; half < 2; half++) {
        const word *pairs = (const word *)block->keys + half * dim / 2 * 16;
        word *to = (word *)keys + half * dim * 16;
        for (int e = 0; e < dim; e += 2)
            for (int slot = 0; slot < 16; slot++) {
                word pair = pairs[e / 2 * 16 + slot];
                to[e * 16 + slot] = pair << 16;
                to[e * 16 + 16 + slot] = pair & 0xffff0000;
            }
    }
    for (int pair = block->low / 2; 2 * pair < block->high; pair++) {
        const word *from = (const word *)block->values + pair * dim;
        word *to = (word *)values + 2 * pair * dim;
        for (int e = 0; e < dim; e++) {
            to[e] = from[e] << 16;
            to[dim + e] = from[e] & 0xffff0000;
        }
    }
}

TARGET void NAME(bx_attend_widened)(const struct blocks *blocks, const struct rows *rows)
{
    float *keys = rows->spare, *values = keys + BLOCK * rows->dim;
    for (int i = 0; i * BLOCK < blocks->high; i++) {
        struct blocks block = one_of(blocks, i, BLOCK * rows->dim * 2);
        NAME(widen)(&block, keys, values, rows->dim);
        block.keys = keys;
        block.values = values;
        NAME(attend_rows)(&block, rows);
    }
}

TARGET void NAME(bx_narrow)(const float *from, float factor, uint16_t *to, int count)
{
    for (int i = 0; i < count; i++)
        to[i] = narrow(from[i] * factor);
}

#undef VEC
#undef IVEC
#undef UVEC
#undef INLINE
#undef PARTS
