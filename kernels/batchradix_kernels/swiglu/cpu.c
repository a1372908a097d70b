#include "avx512.h"
#include "operations.h"
#include "quantise.h"

enum gating { BX_SILU, BX_GELU_TANH, BX_CLAMPED };

struct swiglu {
    const void *gate_up;
    void *out;
    float *scales;
    int64_t num_rows, width;
    int kind, out_kind, gating;
    float alpha, limit;
};

/* x * sigmoid(power) * up. The approximation of gelu by tanh is a sigmoid of twice its argument. */
BX_INLINE float gated(float x, float up, int gating, float alpha, float limit)
{
    float power = x;
    if (gating == BX_GELU_TANH)
        power = x * (1.5957691216f + 0.0713548163f * (x * x));
    if (gating == BX_CLAMPED) {
        x = x > limit ? limit : x;
        up = up > limit ? limit : up;
        up = (up < -limit ? -limit : up) + 1.0f;
        power = alpha * x;
    }
    return x / (1.0f + bx_exponential(-power)) * up;
}

BX_INLINE void gate(const struct swiglu *c, int64_t first, int64_t last, int kind, int out_kind,
                    int gating)
{
    float alpha = c->alpha, limit = c->limit;
    int64_t width = c->width, bytes = kind == BX_FLOAT32 ? 4 : 2;
    BX_SCRATCH(row, width);
    BX_ROTATION(rotation, width, out_kind == BX_INT8);
    for (int64_t r = first; r < last; r++) {
        const char *gates = (const char *)c->gate_up + r * 2 * width * bytes;
        const char *ups = gates + width * bytes;
        char *restrict out = (char *)c->out + r * width * (out_kind == BX_INT8 ? 1 : bytes);
        for (int64_t i = 0; i < width; i++) {
            float value =
                gated(bx_load(gates, i, kind), bx_load(ups, i, kind), gating, alpha, limit);
            if (out_kind == BX_INT8)
                row[i] = value;
            else
                bx_store(out, i, kind, value);
        }
        if (out_kind == BX_INT8)
            c->scales[r] = bx_quantise_row((int8_t *)out, row, &rotation, width);
    }
}

BX_INLINE void gate_kinds(const struct swiglu *c, int64_t first, int64_t last, int gating)
{
    if (c->kind == BX_FLOAT32 && c->out_kind == BX_FLOAT32)
        gate(c, first, last, BX_FLOAT32, BX_FLOAT32, gating);
    else if (c->kind == BX_FLOAT32)
        gate(c, first, last, BX_FLOAT32, BX_INT8, gating);
    else if (c->out_kind == BX_BFLOAT16)
        gate(c, first, last, BX_BFLOAT16, BX_BFLOAT16, gating);
    else
        gate(c, first, last, BX_BFLOAT16, BX_INT8, gating);
}

BX_INLINE void swiglu_rows(const struct swiglu *c, int64_t first, int64_t last)
{
    if (c->gating == BX_SILU)
        gate_kinds(c, first, last, BX_SILU);
    else if (c->gating == BX_GELU_TANH)
        gate_kinds(c, first, last, BX_GELU_TANH);
    else
        gate_kinds(c, first, last, BX_CLAMPED);
}

#if defined(__x86_64__)
BX_AVX512_INLINE void gate_avx512(const struct swiglu *c, int64_t first, int64_t last, int kind,
                                  int out_kind)
{
    int64_t width = c->width, bytes = kind == BX_FLOAT32 ? 4 : 2;
    BX_SCRATCH(row, width);
    BX_ROTATION(rotation, width, out_kind == BX_INT8);
    for (int64_t r = first; r < last; r++) {
        const char *gates = (const char *)c->gate_up + r * 2 * width * bytes;
        void *to = out_kind == BX_INT8 ? (void *)row : (char *)c->out + r * width * bytes;
        for (int64_t i = 0; i < width; i += 16) {
            __m512 value = bx_load_16(gates, i, width - i, kind);
            value = bx_swiglu_16(value, bx_load_16(gates, width + i, width - i, kind));
            bx_store_16(to, i, width - i, out_kind == BX_INT8 ? BX_FLOAT32 : kind, value);
        }
        if (out_kind == BX_INT8)
            c->scales[r] = bx_quantise_row((int8_t *)c->out + r * width, row, &rotation, width);
    }
}

/* What is rounded to 8 or 16 bits needs no exact exponential. */
BX_AVX512_INLINE void swiglu_rows_avx512(const struct swiglu *c, int64_t first, int64_t last)
{
    if (c->gating != BX_SILU || (c->kind == BX_FLOAT32 && c->out_kind == BX_FLOAT32))
        swiglu_rows(c, first, last);
    else if (c->kind == BX_FLOAT32)
        gate_avx512(c, first, last, BX_FLOAT32, BX_INT8);
    else if (c->out_kind == BX_BFLOAT16)
        gate_avx512(c, first, last, BX_BFLOAT16, BX_BFLOAT16);
    else
        gate_avx512(c, first, last, BX_BFLOAT16, BX_INT8);
}
#else
#define swiglu_rows_avx512 swiglu_rows
#endif

BX_ROW_KERNEL_WITH(swiglu, swiglu_rows_avx512)

/* `gate_up`: [num_rows, 2 * width] to `out`: [num_rows, width]; `scales` for int8 alone, `alpha`
 * and `limit` for clamped gates. */
BX_EXPORT void bx_swiglu(const void *gate_up, void *out, float *scales, int64_t num_rows,
                         int64_t width, int kind, int out_kind, int gating, float alpha,
                         float limit, int threads)
{
    struct swiglu c = {gate_up, out,      scales, num_rows, width,
                       kind,    out_kind, gating, alpha,    limit};
    swiglu_run(&c, 4 * num_rows * width, threads);
}
