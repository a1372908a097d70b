#include "operations.h"
#include "rows.h"

struct rope {
    void *heads;
    const float *cosines, *sines;
    const void *q_weight, *k_weight;
    int64_t num_rows, num_heads, num_q, num_qk, head_dim;
    float epsilon;
    int kind, weight_kind;
};

/* The two halves of a head, in place. */
BX_INLINE void rotate(void *restrict low, void *restrict high, const float *restrict cosines,
                      const float *restrict sines, int64_t half, int kind)
{
    for (int64_t i = 0; i < half; i++) {
        float a = bx_load(low, i, kind), b = bx_load(high, i, kind);
        bx_store(low, i, kind, a * cosines[i] - b * sines[i]);
        bx_store(high, i, kind, b * cosines[i] + a * sines[i]);
    }
}

BX_INLINE void rotate_heads(const struct rope *c, int64_t first, int64_t last, int kind,
                            int weight_kind)
{
    int64_t width = c->head_dim, half = width / 2, bytes = kind == BX_FLOAT32 ? 4 : 2;
    BX_SCRATCH(row, width);
    for (int64_t r = first; r < last; r++) {
        const float *cosines = c->cosines + r * half, *sines = c->sines + r * half;
        for (int64_t h = 0; h < c->num_qk; h++) {
            char *head = (char *)c->heads + (r * c->num_heads + h) * width * bytes;
            if (!c->q_weight) {
                rotate(head, head + half * bytes, cosines, sines, half, kind);
                continue;
            }
            const void *weight = h < c->num_q ? c->q_weight : c->k_weight;
            for (int64_t i = 0; i < width; i++)
                row[i] = bx_load(head, i, kind);
            float squares = 0;
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < width; i++)
                squares += row[i] * row[i];
            float factor = 1.0f / sqrtf(squares / (float)width + c->epsilon);
            for (int64_t i = 0; i < width; i++)
                row[i] = row[i] * factor * bx_load(weight, i, weight_kind);
            rotate(row, row + half, cosines, sines, half, BX_FLOAT32);
            for (int64_t i = 0; i < width; i++)
                bx_store(head, i, kind, row[i]);
        }
    }
}

BX_INLINE void rope_rows(const struct rope *c, int64_t first, int64_t last)
{
    if (c->kind == BX_FLOAT32)
        rotate_heads(c, first, last, BX_FLOAT32, BX_FLOAT32);
    else if (c->weight_kind == BX_BFLOAT16)
        rotate_heads(c, first, last, BX_BFLOAT16, BX_BFLOAT16);
    else
        rotate_heads(c, first, last, BX_BFLOAT16, BX_FLOAT32);
}

BX_ROW_KERNEL(rope)

/* `heads`: [num_rows, num_heads, head_dim]; of these the first `num_q` and the `num_k` after them
 * are rotated, normalised before where weights are given (both or neither), of `kind` or float32. */
BX_EXPORT void bx_rope(void *heads, const float *cosines, const float *sines, const void *q_weight,
                       const void *k_weight, int64_t num_rows, int64_t num_heads, int64_t num_q,
                       int64_t num_k, int64_t head_dim, float epsilon, int kind, int weight_kind,
                       int threads)
{
    struct rope c = {heads, cosines,       sines,    q_weight, k_weight, num_rows,   num_heads,
                     num_q, num_q + num_k, head_dim, epsilon,  kind,     weight_kind};
    rope_run(&c, num_rows * (num_q + num_k) * head_dim, threads);
}
