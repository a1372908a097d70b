/* Weights of linear layers as the products with 8 and 16 bits read them, in bytes.
 *
 * Columns stand in panels of 32: two blocks of 16 columns. A block is, for every four bytes of
 * inputs, its 16 columns with four bytes each: 64 bytes, a register of dot products, and 16 of
 * these a tile of AMX. */
#ifndef BATCHRADIX_PANELS_H
#define BATCHRADIX_PANELS_H

#include "rows.h"

enum { BX_BLOCK = 16, BX_PANEL = 32, BX_WORD = 4, BX_PANEL_ROWS = 32 /* done at a time */ };

/* Bytes of activations that are gone over again for every panel, so that they stay in cache. */
#define BX_CHUNK_BYTES (1 << 20)

/* How far apart blocks are; `row_bytes` are those of the inputs of one column. */
BX_INLINE int64_t bx_block_bytes(int64_t row_bytes)
{
    return (row_bytes + BX_WORD - 1) / BX_WORD * BX_WORD * BX_BLOCK;
}

/* `weight`: [out_size][row_bytes]; `packed`: zeros, out_size rounded up to panels. */
BX_INLINE void bx_pack_panels(const void *weight, void *packed, int64_t out_size,
                              int64_t row_bytes)
{
    for (int64_t n = 0; n < out_size; n++) {
        const char *row = (const char *)weight + n * row_bytes;
        char *block = (char *)packed + n / BX_BLOCK * bx_block_bytes(row_bytes);
        for (int64_t k = 0; k < row_bytes; k += BX_WORD) {
            int64_t rest = row_bytes - k;
            memcpy(block + k * BX_BLOCK + n % BX_BLOCK * BX_WORD, row + k,
                   (size_t)(rest < BX_WORD ? rest : BX_WORD));
        }
    }
}

/* Panels [begin, end) for rows [first, last). */
typedef void (*bx_panels_function)(const void *context, int64_t begin, int64_t end, int64_t first,
                                   int64_t last);

/* This thread's panels for all rows, as many rows at a time as stay in cache. */
BX_INLINE void bx_walk_panels(bx_panels_function multiply, const void *context, int64_t num_rows,
                              int64_t row_bytes, int64_t out_size, int thread, int num_threads)
{
    int64_t panels = (out_size + BX_PANEL - 1) / BX_PANEL;
    int64_t begin = panels * thread / num_threads, end = panels * (thread + 1) / num_threads;
    int64_t chunks = (num_rows * row_bytes + BX_CHUNK_BYTES - 1) / BX_CHUNK_BYTES;
    int64_t chunk = (num_rows + chunks - 1) / chunks; /* about the same for each */
    chunk = (chunk + BX_PANEL_ROWS - 1) / BX_PANEL_ROWS * BX_PANEL_ROWS;
    for (int64_t first = 0; first < num_rows; first += chunk) {
        int64_t last = first + chunk < num_rows ? first + chunk : num_rows;
        multiply(context, begin, end, first, last);
    }
}

/* Products that are worth a second thread: waking one costs more than fewer save. */
BX_INLINE void bx_parallel_panels(bx_task task, void *context, int64_t num_products, int threads)
{
    if (num_products > 0)
        bx_parallel(task, context, num_products >= 1 << 18 ? threads : 1);
}

#endif
