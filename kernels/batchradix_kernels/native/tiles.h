/* Matrix products of AMX tiles and AVX512-BF16: compilers, targets, how tiles are laid out. */
#ifndef BATCHRADIX_TILES_H
#define BATCHRADIX_TILES_H

#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define BX_TARGET_BF16                                                                            \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,"                        \
                          "prefer-vector-width=512")))

#if __GNUC__ >= 11 || (defined(__clang_major__) && __clang_major__ >= 12)
#define BX_HAS_AMX
#define BX_TARGET_AMX                                                                             \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-int8,"      \
                          "amx-bf16,prefer-vector-width=512")))

/* For `rows` <= 32 rows of activations by 32 columns of a weight. Tiles: 0 to 3 sums (upper and
 * lower rows, left and right columns), 4 and 5 the rows, 6 and 7 the columns. */
BX_TARGET_AMX BX_INLINE void bx_configure_tiles(int rows)
{
    struct {
        uint8_t palette, start;
        uint8_t reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    int upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : 16;
    const int counts[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int tile = 0; tile < 8; tile++) {
        config.bytes[tile] = 64;
        config.rows[tile] = (uint8_t)counts[tile];
    }
    _tile_loadconfig(&config);
}
#endif
#endif

#endif
