/* How the rows of an item go through one piece: which of its blocks, and which rows of them. */
#ifndef BATCHRADIX_TREE_ATTENTION_PIECES_H
#define BATCHRADIX_TREE_ATTENTION_PIECES_H

#include "cpu.h"
#include "plan.h"

enum dtype { FLOAT32 = 0, BFLOAT16 = 1 };

struct kernel {
    attend_function attend;
    void (*narrow)(const float *from, float factor, uint16_t *to, int count);
    int takes_bfloat16; /* its queries */
    int limited_slots;  /* that it takes at most with limits */
    void (*end)(void); /* on each thread, or NULL */
};

/* What a thread needs for an item of `rows` rows. */
struct scratch {
    void *q, *spare, *window;
    float *out, *sum, *peak;
    int *limits, *lows;
};

struct call {
    const struct plan *plan;
    const struct layer *layer;
    struct kernel kernel;
    int next_item; /* shared: the next to take */
};

static int values_are_finite(const struct blocks *block, int dtype, int dim)
{
    uint32_t broken = 0;
    if (dtype == FLOAT32) {
        const word *bits = (const word *)block->values;
        for (int i = block->low * dim; i < block->high * dim; i++)
            broken |= (bits[i] & 0x7f800000) == 0x7f800000;
        return !broken;
    }
    const uint16_t *bits = block->values;
    for (int slot = block->low; slot < block->high; slot++)
        for (int e = 0; e < dim; e++)
            broken |= (bits[slot / 2 * 2 * dim + 2 * e + slot % 2] & 0x7f80) == 0x7f80;
    return !broken;
}

static struct rows part_of(const struct rows *rows, int first, int count, int q_bytes)
{
    struct rows part = *rows;
    part.count = count;
    part.q = (const char *)rows->q + (int64_t)first * rows->dim * q_bytes;
    part.peak += first;
    part.sum += first * LANES;
    part.out += first * rows->dim;
    return part;
}

/* Rows that each see slots of a block, or of a window, of their own: [lows[r], limits[r]), from
 * the block's low on where there are no lows. */
static void attend_each(const struct call *call, struct blocks block, struct rows *rows,
                        const int *lows, const int *limits, int q_bytes)
{
    if (values_are_finite(&block, call->plan->dtype, rows->dim)) {
        rows->limits = limits;
        rows->lows = lows;
        call->kernel.attend(&block, rows);
        return;
    }
    for (int r = 0; r < rows->count; r++) { /* a weight of zero would not hide what is broken */
        struct rows one = part_of(rows, r, 1, q_bytes);
        block.low = lows ? lows[r] : block.low;
        block.high = limits[r];
        call->kernel.attend(&block, &one);
    }
}

/* The queries [first, end) of the item whose rows are `rows`, over as many slots of a causal piece
 * as the kernel takes with limits; query t sees the slots of these below t + seen. */
static void attend_limited(const struct call *call, const struct item *item,
                                const struct rows *rows, const struct blocks *block, int64_t seen,
                                int *limits, int first, int end)
{
    int group = call->plan->num_heads / call->plan->num_kv_heads;
    int q_bytes = call->kernel.takes_bfloat16 ? 2 : 4;
    if (first + seen <= block->low)
        first = (int)(block->low + 1 - seen);
    int all = block->high - seen < end ? (int)(block->high - seen) : end; /* see all of it */
    if (first < all) {
        int count = (all - first) * group;
        for (int r = 0; r < count; r++)
            limits[r] = (int)(first + r / group + seen);
        struct rows some = part_of(rows, (first - item->query_start) * group, count, q_bytes);
        attend_each(call, *block, &some, NULL, limits, q_bytes);
        first = all;
    }
    if (first < end) {
        int count = (end - first) * group;
        struct rows some = part_of(rows, (first - item->query_start) * group, count, q_bytes);
        call->kernel.attend(block, &some);
    }
}

/* The blocks from slot `first` on, at most `count` slots of them; `first` is a multiple of BLOCK. */
static struct blocks blocks_from(const struct call *call, const struct blocks *blocks, int first,
                                 int count, int dim)
{
    int64_t bytes = (int64_t)first * dim * (call->plan->dtype == FLOAT32 ? 4 : 2);
    int low = blocks->low - first, high = blocks->high - first;
    return (struct blocks){
        .keys = (const char *)blocks->keys + bytes,
        .values = (const char *)blocks->values + bytes,
        .low = low > 0 ? low : 0,
        .high = high < count ? high : count,
    };
}

/* The same over any number of blocks of a causal piece. */
static void attend_causal_blocks(const struct call *call, const struct item *item,
                                 const struct rows *rows, const struct blocks *blocks,
                                 int64_t seen, int *limits, int first, int end)
{
    int step = call->kernel.limited_slots;
    for (int slot = 0; slot < blocks->high; slot += step) {
        struct blocks some = blocks_from(call, blocks, slot, step, rows->dim);
        attend_limited(call, item, rows, &some, seen - slot, limits, first, end);
    }
}

/* What queries see of blocks: query t those from first_seen[t] - start on, and where causal those
 * below t + seen. */
struct view {
    const int32_t *first_seen; /* NULL: all */
    int64_t start;             /* the position of slot 0 */
    int64_t seen;
    int causal;
};

static int low_of(const struct view *view, const struct blocks *block, int query)
{
    int64_t low = view->first_seen ? view->first_seen[query] - view->start : 0;
    return low < block->low ? block->low : low < block->high ? (int)low : block->high;
}

static int high_of(const struct view *view, const struct blocks *block, int query)
{
    int64_t high = view->causal ? query + view->seen : block->high;
    return high > block->high ? block->high : high > block->low ? (int)high : block->low;
}

/* Queries [first, end) over a block, or as much as the kernel takes with limits, where windows
 * begin: those side by side that see something of it together, and where they all see the same,
 * as one that has no limits. */
static void attend_edge(const struct call *call, const struct item *item, const struct rows *rows,
                        const struct blocks *block, const struct view *view,
                        struct scratch *scratch, int first, int end)
{
    int group = call->plan->num_heads / call->plan->num_kv_heads;
    int q_bytes = call->kernel.takes_bfloat16 ? 2 : 4, next;
    for (; first < end; first = next) {
        int low = low_of(view, block, first), high = high_of(view, block, first);
        struct blocks some = *block;
        int alike = 1, is_seen = low < high;
        some.low = low;
        some.high = high;
        for (next = first; next < end; next++) {
            int own_low = low_of(view, block, next), own_high = high_of(view, block, next);
            if ((own_low < own_high) != is_seen)
                break;
            int is_alike = own_low == low && own_high == high;
            if (alike && !is_alike && low == block->low && high == block->high)
                break; /* those before see all of it */
            if (!is_alike && own_low == block->low && own_high == block->high)
                break; /* those behind may */
            alike = alike && is_alike;
            some.low = own_low < some.low ? own_low : some.low;
            some.high = own_high > some.high ? own_high : some.high;
            for (int r = (next - first) * group; r < (next - first + 1) * group; r++) {
                scratch->lows[r] = own_low;
                scratch->limits[r] = own_high;
            }
        }
        if (!is_seen)
            continue;
        struct rows part = part_of(rows, (first - item->query_start) * group,
                                   (next - first) * group, q_bytes);
        if (alike)
            call->kernel.attend(&some, &part);
        else
            attend_each(call, some, &part, scratch->lows, scratch->limits, q_bytes);
    }
}

/* Queries [first, end) over any number of blocks. */
static void attend_blocks(const struct call *call, const struct item *item,
                          const struct rows *rows, const struct blocks *blocks,
                          const struct view *view, struct scratch *scratch, int first, int end)
{
    int step = call->kernel.limited_slots, edge = 0;
    struct blocks rest = *blocks;
    if (view->first_seen) { /* blocks before `edge` are not seen by all, or not all of them */
        int least = blocks->high, most = blocks->low;
        for (int query = first; query < end; query++) {
            int low = low_of(view, blocks, query);
            least = low < least ? low : least;
            most = low > most ? low : most;
        }
        edge = most > blocks->low ? (most + step - 1) / step * step : 0;
        for (int slot = least / step * step; slot < edge && slot < blocks->high; slot += step) {
            struct blocks block = blocks_from(call, blocks, slot, step, rows->dim);
            struct view here = {view->first_seen, view->start + slot, view->seen - slot,
                                view->causal};
            attend_edge(call, item, rows, &block, &here, scratch, first, end);
        }
        if (edge >= blocks->high)
            return;
        rest = blocks_from(call, blocks, edge, blocks->high, rows->dim);
    }
    if (view->causal) {
        attend_causal_blocks(call, item, rows, &rest, view->seen - edge, scratch->limits, first,
                             end);
    } else {
        int group = call->plan->num_heads / call->plan->num_kv_heads;
        struct rows some = part_of(rows, (first - item->query_start) * group,
                                   (end - first) * group, call->kernel.takes_bfloat16 ? 2 : 4);
        call->kernel.attend(&rest, &some);
    }
}

/* Asks for the first block of a piece, while another is attended. */
static void prefetch_piece(const struct call *call, const struct item *item, int dim,
                           const struct piece *piece)
{
    const struct plan *plan = call->plan;
    int64_t element = plan->dtype == FLOAT32 ? 4 : 2, bytes = BLOCK * dim * element;
    int slot_start = piece->slot_start;
    if (piece->part_start < piece->part_end) {
        slot_start = plan->parts[piece->part_start].slot_start;
    } else if (plan->first_seen) {
        int first = piece->query_start > item->query_start ? piece->query_start : item->query_start;
        int hidden = plan->first_seen[first] - piece->position;
        hidden = hidden < piece->num_slots ? hidden : piece->num_slots - 1;
        slot_start += hidden > 0 ? hidden : 0;
    }
    int64_t offset = item->head * plan->num_slots * dim * element + slot_start / BLOCK * bytes;
    for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch((const char *)call->layer->keys + offset + i);
        __builtin_prefetch((const char *)call->layer->values + offset + i);
    }
}

/* The slots that the queries before `end` see of a piece. */
static int seen_slots(const struct piece *piece, int end)
{
    int64_t most = (int64_t)piece->limit + end - 1 - piece->query_start;
    return piece->causal && most < piece->num_slots ? (int)most : piece->num_slots;
}

static void attend_piece(const struct call *call, const struct item *item, const struct rows *rows,
                         const struct piece *piece, struct scratch *scratch)
{
    const struct plan *plan = call->plan;
    int element = plan->dtype == FLOAT32 ? 4 : 2;
    int first = piece->query_start > item->query_start ? piece->query_start : item->query_start;
    int end = piece->query_end < item->query_end ? piece->query_end : item->query_end;
    int num_slots = seen_slots(piece, end);
    int64_t start = piece->slot_start / BLOCK * BLOCK;
    int64_t offset = (item->head * plan->num_slots + start) * rows->dim * element;
    struct blocks blocks = {
        .keys = (const char *)call->layer->keys + offset,
        .values = (const char *)call->layer->values + offset,
        .low = (int)(piece->slot_start - start),
        .high = (int)(piece->slot_start - start + num_slots),
    };
    struct view view = {
        .first_seen = plan->first_seen,
        .start = piece->position - blocks.low,
        .seen = blocks.low + piece->limit - piece->query_start,
        .causal = piece->causal,
    };
    attend_blocks(call, item, rows, &blocks, &view, scratch, first, end);
}

/* Copies keys and values of `count` slots to places of a block of their own. */
static void copy_slots(const struct blocks *from, int64_t slot, void *to_keys, void *to_values,
                       int place, int count, int dtype, int dim)
{
    int words = dtype == FLOAT32 ? dim : dim / 2; /* of a key */
    for (int done = 0, run; done < count; done += run) {
        int64_t source = slot + done;
        int target = place + done, room = 16 - (int)(source % 16);
        run = 16 - target % 16 < room ? 16 - target % 16 : room;
        run = count - done < run ? count - done : run;
        const word *keys = (const word *)from->keys + source / 16 * words * 16 + source % 16;
        word *to = (word *)to_keys + target / 16 * words * 16 + target % 16;
        for (int e = 0; e < words; e++)
            memcpy(to + e * 16, keys + e * 16, sizeof(word) * run);
    }
    if (dtype == FLOAT32) {
        memcpy((word *)to_values + place * dim, (const word *)from->values + slot * dim,
               sizeof(word) * count * dim);
        return;
    }
    for (int i = 0; i < count; i++) {
        int64_t source = slot + i, target = place + i;
        const uint16_t *values = (const uint16_t *)from->values + source / 2 * 2 * dim + source % 2;
        uint16_t *to = (uint16_t *)to_values + target / 2 * 2 * dim + target % 2;
        for (int e = 0; e < dim; e++)
            to[2 * e] = values[2 * e];
    }
}

/* The next up to `WINDOW` slots of a piece's parts: in the pool where they are blocks of it, else put
 * together in scratch. `part` and `used` say how far the parts are read. */
static struct blocks next_window(const struct call *call, const struct item *item,
                                 struct scratch *scratch, const struct part **part, int *used,
                                 int count, int dim)
{
    const struct plan *plan = call->plan;
    int element = plan->dtype == FLOAT32 ? 4 : 2;
    int64_t slot = (*part)->slot_start + *used, bytes = (int64_t)dim * element;
    int64_t head = item->head * plan->num_slots;
    if (slot % BLOCK == 0 && *used + count <= (*part)->num_slots) {
        *used += count;
        return (struct blocks){.keys = (const char *)call->layer->keys + (head + slot) * bytes,
                               .values = (const char *)call->layer->values + (head + slot) * bytes,
                               .high = count};
    }
    char *values = (char *)scratch->window + WINDOW * bytes;
    struct blocks all = {.keys = (const char *)call->layer->keys + head * bytes,
                         .values = (const char *)call->layer->values + head * bytes};
    for (int place = 0; place < count;) {
        if (*used == (*part)->num_slots) {
            ++*part;
            *used = 0;
        }
        int taken = (*part)->num_slots - *used;
        taken = count - place < taken ? count - place : taken;
        copy_slots(&all, (*part)->slot_start + *used, scratch->window, values, place, taken,
                   plan->dtype, dim);
        place += taken;
        *used += taken;
    }
    return (struct blocks){.keys = scratch->window, .values = values, .high = count};
}

/* The slots of a piece before all that the queries [first, end) see. */
static int hidden_slots(const struct plan *plan, const struct piece *piece, int first, int end)
{
    if (!plan->first_seen)
        return 0;
    int least = plan->first_seen[first];
    for (int query = first + 1; query < end; query++)
        least = plan->first_seen[query] < least ? plan->first_seen[query] : least;
    return least - piece->position;
}

/* The same for a piece with parts, in blocks of its own. */
static void attend_windows(const struct call *call, const struct item *item,
                           const struct rows *rows, const struct piece *piece,
                           struct scratch *scratch)
{
    const struct part *part = call->plan->parts + piece->part_start;
    int used = 0;
    int first = piece->query_start > item->query_start ? piece->query_start : item->query_start;
    int end = piece->query_end < item->query_end ? piece->query_end : item->query_end;
    int num_slots = seen_slots(piece, end), hidden = hidden_slots(call->plan, piece, first, end);
    int is_run = part->slot_start % BLOCK == 0 && num_slots <= part->num_slots && !piece->causal;
    for (int start = 0; start < num_slots;) {
        int count = is_run || num_slots - start < WINDOW ? num_slots - start : WINDOW;
        if (start + count <= hidden) { /* more than one window are all in one part */
            used += count;
            start += count;
            continue;
        }
        struct blocks blocks = next_window(call, item, scratch, &part, &used, count, rows->dim);
        struct view view = {
            .first_seen = call->plan->first_seen,
            .start = piece->position + start,
            .seen = (int64_t)piece->limit - piece->query_start - start,
            .causal = piece->causal,
        };
        attend_blocks(call, item, rows, &blocks, &view, scratch, first, end);
        start += count;
    }
}

#endif
