/* What a call of the tree attention is given: a plan of the step and one layer's tensors. */
#ifndef BATCHRADIX_TREE_ATTENTION_PLAN_H
#define BATCHRADIX_TREE_ATTENTION_PLAN_H

#include "native.h"

/* Queries [query_start, query_end) attend to slots from slot_start on; query_start + i to the
 * first limit + i of them where causal, else to num_slots. Where it has parts, the slots are
 * those of the parts one after the other, and its blocks are counted from its own first slot
 * instead of being those of the pool. Its first slot has a position. */
struct piece {
    int32_t slot_start, num_slots, query_start, query_end, causal, limit, part_start, part_end;
    int32_t position;
};

struct part {
    int32_t slot_start, num_slots;
};

/* Queries of one key head that one thread attends, and their pieces: a part of `item_pieces`. */
struct item {
    int32_t head, query_start, query_end, piece_start, piece_end;
};

/* What stays the same over the layers of a step. */
struct plan {
    int32_t dtype; /* of pool and output */
    int32_t num_tokens, num_heads, num_kv_heads, head_dim;
    int32_t num_items, num_threads, max_rows; /* the most rows of an item */
    float scale;
    float softcap;        /* of scores after the scale; 0: none */
    int64_t num_slots;    /* a multiple of BLOCK */
    const int64_t *slots; /* [num_tokens], where new keys and values go */
    const struct piece *pieces;
    const struct part *parts;
    const struct item *items;
    const int32_t *item_pieces;
    const int32_t *first_seen; /* [num_tokens] positions, perhaps negative; NULL: all are seen */
    char *scratch; /* num_threads times bx_tree_attention_scratch bytes, aligned to 64 */
};

/* A tensor [tokens, heads, head_dim], the last axis dense; strides in elements. */
struct heads {
    const void *data;
    int64_t token_stride, head_stride;
    int32_t dtype;
};

struct layer {
    void *keys, *values; /* of all key heads, in the pool */
    struct heads q, k, v;
    void *out;  /* [num_tokens, num_heads, head_dim] */
    float *lse; /* [num_tokens, num_heads] natural logarithms, or NULL */
    const float *sinks; /* [num_heads] scores that take weight and give no value, or NULL */
};

/* Writes the step's keys and values to the pool, then attends. */
BX_EXPORT void bx_tree_attention(const struct plan *plan, const struct layer *layer);

#endif
