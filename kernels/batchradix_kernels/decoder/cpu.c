/* All layers of a decoder in one call: threads are woken once a step, and nothing but the
 * operations themselves is done between them. */
#include "operations.h"
#include "rows.h"

#include "../tree_attention/plan.h"

#include <stddef.h>

/* [T, in_size] to [T, out_size]; `scales` are those of an int8 weight, else NULL; `groups` those of a
 * weight in place of `packed`, else NULL. */
struct linear {
    const void *packed;
    const struct bx_groups *groups;
    const float *scales;
    const void *bias;
    int64_t in_size, out_size;
};

struct decoder_layer {
    const void *input_norm, *mlp_norm;
    const void *q_norm, *k_norm; /* of the heads, or NULL */
    struct linear qkv, o, gate_up, down;
    const float *sinks; /* of the heads, or NULL */
};

struct decoder {
    const struct decoder_layer *layers;
    int64_t num_layers;
    int64_t num_heads, num_kv_heads, head_dim;
    float epsilon;
    int32_t kind; /* of activations and norms */
};

/* A step; T is the number of its tokens. */
struct decoder_step {
    const struct plan *const *plans; /* of each layer, alike but for the pieces */
    char *pool;          /* [layers][keys, values] */
    int64_t side_bytes;  /* of the keys of one layer */
    const float *cosines, *sines;
    void *x;    /* [T, D], changed in place */
    void *left; /* [T, D], what is still to be added to it */
    void *qkv, *attended, *gate_up;
    void *rows; /* what goes into a linear layer: of `kind`, or int8 and `scales` */
    float *scales;
    void *panels; /* what `bx_grouped_linear` takes, for the largest weight */
};

struct decode {
    const struct decoder *decoder;
    const struct decoder_step *step;
};

/* From `rows`, in 8 bits where the weight is. */
static void multiply(const struct decode *d, const struct linear *linear, const void *rows,
                     void *out, int gated)
{
    const struct plan *plan = d->step->plans[0];
    if (linear->scales)
        bx_int8_linear(rows, d->step->scales, linear->packed, linear->scales, linear->bias, out,
                       plan->num_tokens, linear->in_size, linear->out_size, d->decoder->kind,
                       plan->num_threads);
    else if (linear->groups)
        bx_grouped_linear(rows, linear->groups, linear->bias, out, plan->num_tokens,
                          linear->in_size, linear->out_size, d->decoder->kind, gated,
                          d->step->panels, plan->num_threads);
    else
        bx_bf16_linear(rows, linear->packed, linear->bias, out, plan->num_tokens, linear->in_size,
                       linear->out_size, d->decoder->kind, gated, plan->num_threads);
}

/* Adds what is left, then `rows` for `linear`. */
static void normalise(const struct decode *d, const void *weight, const void *left,
                      const struct linear *linear)
{
    const struct decoder_step *step = d->step;
    int kind = d->decoder->kind;
    bx_rms_norm(step->x, left, weight, step->rows, step->scales, step->plans[0]->num_tokens,
                linear->in_size, d->decoder->epsilon, kind, kind,
                linear->scales ? BX_INT8 : kind, step->plans[0]->num_threads);
}

static void attend(const struct decode *d, const struct decoder_layer *layer, int64_t index)
{
    const struct decoder_step *step = d->step;
    const struct decoder *decoder = d->decoder;
    const struct plan *plan = step->plans[index];
    int64_t q = decoder->num_heads, k = decoder->num_kv_heads, dim = decoder->head_dim;
    int64_t row = (q + 2 * k) * dim, bytes = decoder->kind == BX_FLOAT32 ? 4 : 2;
    bx_rope(step->qkv, step->cosines, step->sines, layer->q_norm, layer->k_norm, plan->num_tokens,
            q + 2 * k, q, k, dim, decoder->epsilon, decoder->kind, decoder->kind,
            plan->num_threads);
    struct heads heads = {step->qkv, row, dim, decoder->kind};
    struct layer attention = {
        .keys = step->pool + 2 * index * step->side_bytes,
        .values = step->pool + (2 * index + 1) * step->side_bytes,
        .q = heads,
        .k = heads,
        .v = heads,
        .out = step->attended,
        .sinks = layer->sinks,
    };
    attention.k.data = (const char *)step->qkv + q * dim * bytes;
    attention.v.data = (const char *)step->qkv + (q + k) * dim * bytes;
    bx_tree_attention(plan, &attention);
}

static void decode(void *context)
{
    const struct decode *d = context;
    const struct decoder_step *step = d->step;
    const struct plan *plan = step->plans[0];
    int kind = d->decoder->kind;
    for (int64_t i = 0; i < d->decoder->num_layers; i++) {
        const struct decoder_layer *layer = &d->decoder->layers[i];
        const void *rows = step->attended;
        normalise(d, layer->input_norm, i ? step->left : NULL, &layer->qkv);
        multiply(d, &layer->qkv, step->rows, step->qkv, 0);
        attend(d, layer, i);
        if (layer->o.scales) {
            rows = step->rows;
            bx_quantise_rows(step->attended, step->rows, step->scales, plan->num_tokens,
                             layer->o.in_size, kind, plan->num_threads);
        }
        multiply(d, &layer->o, rows, step->left, 0);
        normalise(d, layer->mlp_norm, step->left, &layer->gate_up);
        multiply(d, &layer->gate_up, step->rows, step->gate_up, 1);
        rows = step->gate_up;
        if (layer->gate_up.scales) { /* its own gates */
            rows = step->rows;
            bx_swiglu(step->gate_up, step->rows, step->scales, plan->num_tokens,
                      layer->down.in_size, kind, layer->down.scales ? BX_INT8 : kind, 0,
                      0.0f, 0.0f, plan->num_threads);
        } else if (layer->down.scales) {
            rows = step->rows;
            bx_quantise_rows(step->gate_up, step->rows, step->scales, plan->num_tokens,
                             layer->down.in_size, kind, plan->num_threads);
        }
        multiply(d, &layer->down, rows, step->left, 0);
    }
}

/* Leaves in `left` what the last layer adds. */
BX_EXPORT void bx_decode(const struct decoder *decoder, const struct decoder_step *step)
{
    struct decode d = {decoder, step};
    bx_together(decode, &d, step->plans[0]->num_threads);
}
