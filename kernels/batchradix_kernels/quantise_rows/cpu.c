#include "operations.h"
#include "quantise.h"

struct quantise {
    const void *x;
    int8_t *out;
    float *scales;
    int64_t num_rows, width;
    int kind;
};

BX_INLINE void quantise_any(const struct quantise *c, int64_t first, int64_t last, int kind)
{
    int64_t width = c->width;
    BX_SCRATCH(row, width);
    BX_ROTATION(rotation, width, 1);
    for (int64_t r = first; r < last; r++) {
        for (int64_t i = 0; i < width; i++)
            row[i] = bx_load(c->x, r * width + i, kind);
        c->scales[r] = bx_quantise_row(c->out + r * width, row, &rotation, width);
    }
}

BX_INLINE void quantise_rows(const struct quantise *c, int64_t first, int64_t last)
{
    if (c->kind == BX_FLOAT32)
        quantise_any(c, first, last, BX_FLOAT32);
    else
        quantise_any(c, first, last, BX_BFLOAT16);
}

BX_ROW_KERNEL(quantise)

BX_EXPORT void bx_quantise_rows(const void *x, int8_t *out, float *scales, int64_t num_rows,
                                int64_t width, int kind, int threads)
{
    struct quantise c = {x, out, scales, num_rows, width, kind};
    quantise_run(&c, num_rows * width, threads);
}
