#include "operations.h"
#include "quantise.h"

struct rms_norm {
    void *x;
    const void *residual, *weight;
    void *out;
    float *scales;
    int64_t num_rows, width;
    float epsilon;
    int kind, weight_kind, out_kind;
};

BX_INLINE void normalise(const struct rms_norm *c, int64_t first, int64_t last, int kind,
                         int weight_kind, int out_kind)
{
    int64_t width = c->width, bytes = kind == BX_FLOAT32 ? 4 : 2;
    const char *residual = c->residual;
    BX_SCRATCH(row, width);
    BX_ROTATION(rotation, width, out_kind == BX_INT8);
    for (int64_t r = first; r < last; r++) {
        int64_t at = r * width;
        char *restrict x = (char *)c->x + at * bytes;
        if (residual) {
            for (int64_t i = 0; i < width; i++) {
                float sum = bx_load(x, i, kind) + bx_load(residual + at * bytes, i, kind);
                bx_store(x, i, kind, sum);
                row[i] = kind == BX_FLOAT32 ? sum : bx_float((uint32_t)bx_bfloat16(sum) << 16);
            }
        } else {
            for (int64_t i = 0; i < width; i++)
                row[i] = bx_load(x, i, kind);
        }
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++)
            squares += row[i] * row[i];
        float factor = 1.0f / sqrtf(squares / (float)width + c->epsilon);
        const void *weight = c->weight;
        if (out_kind != BX_INT8) {
            char *restrict out = (char *)c->out + at * bytes;
            for (int64_t i = 0; i < width; i++)
                bx_store(out, i, kind, row[i] * factor * bx_load(weight, i, weight_kind));
            continue;
        }
        for (int64_t i = 0; i < width; i++)
            row[i] = row[i] * factor * bx_load(weight, i, weight_kind);
        c->scales[r] = bx_quantise_row((int8_t *)c->out + at, row, &rotation, width);
    }
}

BX_INLINE void rms_norm_rows(const struct rms_norm *c, int64_t first, int64_t last)
{
    if (c->kind == BX_FLOAT32 && c->out_kind == BX_FLOAT32)
        normalise(c, first, last, BX_FLOAT32, BX_FLOAT32, BX_FLOAT32);
    else if (c->kind == BX_FLOAT32)
        normalise(c, first, last, BX_FLOAT32, BX_FLOAT32, BX_INT8);
    else if (c->out_kind == BX_BFLOAT16 && c->weight_kind == BX_BFLOAT16)
        normalise(c, first, last, BX_BFLOAT16, BX_BFLOAT16, BX_BFLOAT16);
    else if (c->out_kind == BX_BFLOAT16)
        normalise(c, first, last, BX_BFLOAT16, BX_FLOAT32, BX_BFLOAT16);
    else if (c->weight_kind == BX_BFLOAT16)
        normalise(c, first, last, BX_BFLOAT16, BX_BFLOAT16, BX_INT8);
    else
        normalise(c, first, last, BX_BFLOAT16, BX_FLOAT32, BX_INT8);
}

BX_ROW_KERNEL(rms_norm)

/* `residual` may be NULL, `scales` where `out_kind` is not int8. `weight_kind` is `kind` or float32. */
BX_EXPORT void bx_rms_norm(void *x, const void *residual, const void *weight, void *out,
                           float *scales, int64_t num_rows, int64_t width, float epsilon, int kind,
                           int weight_kind, int out_kind, int threads)
{
    struct rms_norm c = {x,     residual, weight, out,         scales,  num_rows,
                         width, epsilon,  kind,   weight_kind, out_kind};
    rms_norm_run(&c, num_rows * width, threads);
}
