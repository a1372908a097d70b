/* The experts of a layer: rows grouped by expert go through each one's two products, then every
 * token gets the weighted sum of its own. Threads share the columns of each expert, so they wait
 * for each other a few times a layer, however many experts there are. */
#include "avx512.h"
#include "operations.h"
#include "rows.h"
#include "tiles.h"

#include <stddef.h>

struct experts {
    const uint16_t *x;              /* [T, D] */
    const int64_t *tokens;          /* [n]: whose row stands at each place, grouped by expert */
    const int64_t *offsets;         /* [N + 1]: where the rows of each expert begin */
    const uint16_t *const *gate_up; /* [N]: packed */
    const uint16_t *const *down;
    const int64_t *places; /* [T, k] */
    const float *weights;  /* [T, k] */
    uint16_t *rows;        /* [n, D] */
    uint16_t *gated;       /* [n, F] */
    float *outputs;        /* [n, D] */
    uint16_t *out;         /* [T, D] */
    int64_t num_tokens, num_chosen, num_experts, width, expert_width, num_threads;
};

static void gather(void *context, int thread, int num_threads)
{
    const struct experts *e = context;
    int64_t n = e->num_tokens * e->num_chosen;
    size_t bytes = (size_t)e->width * sizeof *e->rows;
    for (int64_t i = n * thread / num_threads; i < n * (thread + 1) / num_threads; i++)
        memcpy(e->rows + i * e->width, e->x + e->tokens[i] * e->width, bytes);
}

static void multiply_up(void *context, int thread, int num_threads)
{
    const struct experts *e = context;
    for (int64_t i = 0; i < e->num_experts; i++) {
        int64_t first = e->offsets[i], count = e->offsets[i + 1] - first;
        bx_bf16_linear_share(e->rows + first * e->width, e->gate_up[i], NULL,
                             e->gated + first * e->expert_width, count, e->width,
                             2 * e->expert_width, BX_BFLOAT16, 1, thread, num_threads);
    }
}

static void multiply_down(void *context, int thread, int num_threads)
{
    const struct experts *e = context;
    for (int64_t i = 0; i < e->num_experts; i++) {
        int64_t first = e->offsets[i], count = e->offsets[i + 1] - first;
        bx_bf16_linear_share(e->gated + first * e->expert_width, e->down[i], NULL,
                             e->outputs + first * e->width, count, e->expert_width, e->width,
                             BX_FLOAT32, 0, thread, num_threads);
    }
}

#if defined(__x86_64__)
BX_TARGET_BF16 static void add_up(void *context, int thread, int num_threads)
{
    const struct experts *e = context;
    int64_t first = e->num_tokens * thread / num_threads;
    int64_t last = e->num_tokens * (thread + 1) / num_threads;
    for (int64_t t = first; t < last; t++)
        for (int64_t d = 0; d < e->width; d += 16) {
            __mmask16 mask = e->width - d < 16 ? (__mmask16)((1u << (e->width - d)) - 1) : 0xffff;
            __m512 sum = _mm512_setzero_ps();
            for (int64_t j = t * e->num_chosen; j < (t + 1) * e->num_chosen; j++) {
                const float *output = e->outputs + e->places[j] * e->width + d;
                __m512 part = _mm512_maskz_loadu_ps(mask, output);
                sum = _mm512_fmadd_ps(_mm512_set1_ps(e->weights[j]), part, sum);
            }
            __m256bh rounded = _mm512_cvtneps_pbh(sum);
            _mm256_mask_storeu_epi16(e->out + t * e->width + d, mask, (__m256i)rounded);
        }
}
#endif

static void run(void *context)
{
    struct experts *e = context;
    int threads = (int)e->num_threads;
    bx_parallel(gather, e, threads);
    bx_parallel(multiply_up, e, threads);
    bx_parallel(multiply_down, e, threads);
#if defined(__x86_64__)
    bx_parallel(add_up, e, threads);
#endif
}

/* bfloat16 but where `struct experts` says otherwise, on a machine that `bx_bf16_serves` both
 * widths; nothing overlaps. */
BX_EXPORT void bx_bf16_experts(struct experts *experts)
{
    if (experts->num_tokens > 0)
        bx_together(run, experts, (int)experts->num_threads);
}
