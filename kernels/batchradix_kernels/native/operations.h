/* The exported operations that others are made of; each is described where it is defined. */
#ifndef BATCHRADIX_OPERATIONS_H
#define BATCHRADIX_OPERATIONS_H

#include "native.h"

BX_EXPORT void bx_rms_norm(void *x, const void *residual, const void *weight, void *out,
                           float *scales, int64_t num_rows, int64_t width, float epsilon, int kind,
                           int weight_kind, int out_kind, int threads);
BX_EXPORT void bx_rope(void *heads, const float *cosines, const float *sines, const void *q_weight,
                       const void *k_weight, int64_t num_rows, int64_t num_heads, int64_t num_q,
                       int64_t num_k, int64_t head_dim, float epsilon, int kind, int weight_kind,
                       int threads);
BX_EXPORT void bx_swiglu(const void *gate_up, void *out, float *scales, int64_t num_rows,
                         int64_t width, int kind, int out_kind, int gating, float alpha,
                         float limit, int threads);
BX_EXPORT void bx_quantise_rows(const void *x, int8_t *out, float *scales, int64_t num_rows,
                                int64_t width, int kind, int threads);
BX_EXPORT void bx_int8_linear(const int8_t *x, const float *x_scales, const int8_t *packed,
                              const float *w_scales, const void *bias, void *out,
                              int64_t num_rows, int64_t in_size, int64_t out_size, int kind,
                              int threads);
BX_EXPORT void bx_bf16_linear(const uint16_t *x, const uint16_t *packed, const float *bias,
                              void *out, int64_t num_rows, int64_t in_size, int64_t out_size,
                              int kind, int gated, int threads);
struct bx_groups;
BX_EXPORT void bx_grouped_linear(const uint16_t *x, const struct bx_groups *groups,
                                 const float *bias, void *out, int64_t num_rows, int64_t in_size,
                                 int64_t out_size, int kind, int gated, uint16_t *panels,
                                 int threads);

/* The columns of `bx_bf16_linear` that are one thread's; all threads of a task call it. */
void bx_bf16_linear_share(const uint16_t *x, const uint16_t *packed, const float *bias, void *out,
                          int64_t num_rows, int64_t in_size, int64_t out_size, int kind, int gated,
                          int thread, int num_threads);

#endif
