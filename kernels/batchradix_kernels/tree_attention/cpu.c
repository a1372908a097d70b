/* Cascade attention on the CPU: one call a layer writes keys and values and attends.
 *
 * Threads own query rows (a query token and one query head of a key head's group), so nothing is
 * merged between them: the softmax of a row goes on from piece to piece, in order of position. */
#include "cpu.h"
#include "cpu_pieces.h"

static struct kernel choose_kernel(int dtype)
{
    int level = bx_level(), narrow_pool = dtype == BFLOAT16;
#if defined(__x86_64__)
#ifdef HAS_BF16_KERNELS
    if (narrow_pool && level >= BX_AMX)
        return (struct kernel){bx_attend_amx, bx_narrow_avx512, 1, WINDOW, bx_amx_end};
    if (narrow_pool && level >= BX_AVX512_BF16)
        return (struct kernel){bx_attend_avx512_bf16, bx_narrow_avx512, 1, BLOCK, NULL};
#endif
    if (level >= BX_AVX512)
        return (struct kernel){narrow_pool ? bx_attend_widened_avx512 : bx_attend_f32_avx512,
                               bx_narrow_avx512, 0, BLOCK, NULL};
    if (level >= BX_AVX2)
        return (struct kernel){narrow_pool ? bx_attend_widened_avx2 : bx_attend_f32_avx2, bx_narrow_avx2,
                               0, BLOCK, NULL};
#endif
    (void)level;
    return (struct kernel){narrow_pool ? bx_attend_widened_plain : bx_attend_f32_plain, bx_narrow_plain,
                           0, BLOCK, NULL};
}

static int padded(int head_dim) { return (head_dim + BLOCK - 1) / BLOCK * BLOCK; }

static int64_t lay_out(struct scratch *scratch, char *base, int64_t rows, int64_t dim)
{
    int64_t used = 0;
    rows = (rows + 2 * TILE - 1) / TILE * TILE; /* a tile more than there are */
#define TAKE(type, count) (type)(base + (used += (count) * 4) - (count) * 4)
    scratch->q = TAKE(void *, rows * dim);
    scratch->out = TAKE(float *, rows * dim);
    scratch->sum = TAKE(float *, rows * LANES);
    scratch->peak = TAKE(float *, rows);
    scratch->limits = TAKE(int *, rows);
    scratch->lows = TAKE(int *, rows);
    scratch->spare = TAKE(void *, 2 * BLOCK * dim);
    scratch->window = TAKE(void *, 2 * WINDOW * dim);
#undef TAKE
    return used;
}

/* Bytes of scratch that a thread needs; a multiple of 64. */
BX_EXPORT int64_t bx_tree_attention_scratch(int32_t head_dim, int32_t max_rows)
{
    struct scratch scratch;
    return lay_out(&scratch, NULL, max_rows, padded(head_dim));
}

static void read_f32(const struct heads *from, int64_t token, int64_t head, int dim, float *to)
{
    int64_t at = token * from->token_stride + head * from->head_stride;
    if (from->dtype == FLOAT32) {
        memcpy(to, (const float *)from->data + at, sizeof(float) * dim);
    } else {
        const uint16_t *row = (const uint16_t *)from->data + at;
        for (int e = 0; e < dim; e++)
            to[e] = widen(row[e]);
    }
}

static void read_bf16(const struct kernel *kernel, const struct heads *from, int64_t token,
                      int64_t head, int dim, uint16_t *to)
{
    int64_t at = token * from->token_stride + head * from->head_stride;
    if (from->dtype == BFLOAT16) {
        memcpy(to, (const uint16_t *)from->data + at, sizeof(uint16_t) * dim);
    } else {
        kernel->narrow((const float *)from->data + at, 1, to, dim);
    }
}

/* ---- keys and values into the pool ---- */

static void write_token_f32(const struct plan *plan, const struct layer *layer, int64_t token)
{
    float row[MAX_DIM] = {0};
    int head_dim = plan->head_dim, dim = padded(head_dim);
    int64_t slot = plan->slots[token];
    for (int head = 0; head < plan->num_kv_heads; head++) {
        float *keys = (float *)layer->keys + head * plan->num_slots * dim;
        float *values = (float *)layer->values + head * plan->num_slots * dim;
        read_f32(&layer->k, token, head, head_dim, row);
        for (int e = 0; e < dim; e++)
            keys[slot / 16 * 16 * dim + e * 16 + slot % 16] = row[e];
        read_f32(&layer->v, token, head, head_dim, row);
        memcpy(values + slot * dim, row, sizeof(float) * dim);
    }
}

static void write_token_bf16(const struct plan *plan, const struct layer *layer,
                             const struct kernel *kernel, int64_t token)
{
    uint16_t row[MAX_DIM] = {0};
    int head_dim = plan->head_dim, dim = padded(head_dim);
    int64_t slot = plan->slots[token];
    for (int head = 0; head < plan->num_kv_heads; head++) {
        uint16_t *keys = (uint16_t *)layer->keys + head * plan->num_slots * dim;
        uint16_t *values = (uint16_t *)layer->values + head * plan->num_slots * dim;
        read_bf16(kernel, &layer->k, token, head, head_dim, row);
        keys += slot / 16 * 16 * dim + slot % 16 * 2;
        for (int e = 0; e < dim; e += 2)
            memcpy(keys + e * 16, row + e, 4);
        read_bf16(kernel, &layer->v, token, head, head_dim, row);
        values += slot / 2 * 2 * dim + slot % 2;
        for (int e = 0; e < dim; e++)
            values[2 * e] = row[e];
    }
}

static void write_tokens(void *context, int thread, int num_threads)
{
    const struct call *call = context;
    int64_t count = call->plan->num_tokens;
    int64_t end = count * (thread + 1) / num_threads;
    for (int64_t token = count * thread / num_threads; token < end; token++) {
        if (call->plan->dtype == FLOAT32)
            write_token_f32(call->plan, call->layer, token);
        else
            write_token_bf16(call->plan, call->layer, &call->kernel, token);
    }
}

/* ---- items ---- */

static void begin_rows(const struct call *call, const struct item *item, const struct rows *rows)
{
    const struct plan *plan = call->plan;
    int group = plan->num_heads / plan->num_kv_heads, head_dim = plan->head_dim, dim = rows->dim;
    for (int r = 0; r < rows->count; r++) {
        int64_t token = item->query_start + r / group, head = item->head * group + r % group;
        if (call->kernel.takes_bfloat16) {
            uint16_t *q = (uint16_t *)rows->q + r * dim;
            read_bf16(&call->kernel, &call->layer->q, token, head, head_dim, q);
            memset(q + head_dim, 0, sizeof(uint16_t) * (dim - head_dim));
        } else {
            float *q = (float *)rows->q + r * dim;
            read_f32(&call->layer->q, token, head, head_dim, q);
            memset(q + head_dim, 0, sizeof(float) * (dim - head_dim));
            if (plan->dtype == BFLOAT16 && call->layer->q.dtype == FLOAT32)
                for (int e = 0; e < head_dim; e++)
                    q[e] = widen(narrow(q[e]));
        }
        rows->peak[r] = -INFINITY;
    }
    memset(rows->sum, 0, sizeof(float) * rows->count * LANES);
    memset(rows->out, 0, sizeof(float) * rows->count * dim);
}

/* In pairs, which do not wait for each other. */
static float sum_of(const float *lanes)
{
    float sums[LANES];
    memcpy(sums, lanes, sizeof sums);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            sums[i] += sums[i + half];
    return sums[0];
}

static void finish_rows(const struct call *call, const struct item *item, const struct rows *rows)
{
    const struct plan *plan = call->plan;
    int group = plan->num_heads / plan->num_kv_heads, head_dim = plan->head_dim;
    for (int r = 0; r < rows->count; r++) {
        int64_t token = item->query_start + r / group, head = item->head * group + r % group;
        int64_t place = token * plan->num_heads + head;
        const float *from = rows->out + r * rows->dim, *lanes = rows->sum + r * LANES;
        float sum = sum_of(lanes), peak = rows->peak[r] * plan->scale, all = sum;
        if (call->layer->sinks)
            all += expf(call->layer->sinks[head] - peak);
        float factor = 1 / all; /* a row that saw nothing becomes NaN */
        if (plan->dtype == FLOAT32) {
            float *to = (float *)call->layer->out + place * head_dim;
            for (int e = 0; e < head_dim; e++)
                to[e] = from[e] * factor;
        } else {
            uint16_t *to = (uint16_t *)call->layer->out + place * head_dim;
            call->kernel.narrow(from, factor, to, head_dim);
        }
        if (call->layer->lse)
            call->layer->lse[place] = peak + logf(sum);
    }
}

static void attend_item(const struct call *call, const struct item *item, char *base)
{
    const struct plan *plan = call->plan;
    int group = plan->num_heads / plan->num_kv_heads;
    struct scratch scratch;
    struct rows rows = {
        .count = (item->query_end - item->query_start) * group,
        .dim = padded(plan->head_dim),
        .scale = plan->scale * LOG2_E,
        .cap = plan->softcap / plan->scale,
    };
    lay_out(&scratch, base, plan->max_rows, rows.dim);
    rows.q = scratch.q;
    rows.peak = scratch.peak;
    rows.sum = scratch.sum;
    rows.out = scratch.out;
    rows.spare = scratch.spare;
    begin_rows(call, item, &rows);
    for (int i = item->piece_start; i < item->piece_end; i++) {
        if (i + 1 < item->piece_end)
            prefetch_piece(call, item, rows.dim, &plan->pieces[plan->item_pieces[i + 1]]);
        const struct piece *piece = &plan->pieces[plan->item_pieces[i]];
        if (piece->part_start < piece->part_end)
            attend_windows(call, item, &rows, piece, &scratch);
        else
            attend_piece(call, item, &rows, piece, &scratch);
    }
    finish_rows(call, item, &rows);
}

static void attend_items(void *context, int thread, int num_threads)
{
    struct call *call = context;
    const struct plan *plan = call->plan;
    int64_t size = bx_tree_attention_scratch(plan->head_dim, plan->max_rows);
    (void)num_threads;
    for (;;) {
        int i = __atomic_fetch_add(&call->next_item, 1, __ATOMIC_RELAXED);
        if (i >= plan->num_items)
            break;
        attend_item(call, &plan->items[i], plan->scratch + thread * size);
    }
    if (call->kernel.end)
        call->kernel.end();
}

static void write_and_attend(void *context)
{
    struct call *call = context;
    bx_parallel(write_tokens, call, call->plan->num_threads);
    bx_parallel(attend_items, call, call->plan->num_threads);
}

/* Writes the step's keys and values, then attends; see the structures for what goes in. */
BX_EXPORT void bx_tree_attention(const struct plan *plan, const struct layer *layer)
{
    struct call call = {plan, layer, choose_kernel(plan->dtype), 0};
    bx_together(write_and_attend, &call, plan->num_threads);
}
