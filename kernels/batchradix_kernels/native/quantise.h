/* Rows as int8 with a scale each, rotated before, so that no element is far larger than the rest.
 *
 * A product of two rows stays as it is where both are rotated by one orthogonal matrix: weights
 * are rotated once, activations as they are written. Rounding then costs a fixed small part of a
 * row's length, whatever its largest element was. */
#ifndef BATCHRADIX_QUANTISE_H
#define BATCHRADIX_QUANTISE_H

#include "rows.h"

/* What a row's rotation needs beside it, each [width], aligned. */
struct bx_rotation {
    float *spare;
    uint32_t *signs; /* a sign bit an element, as good as random: without, a row of equal elements
                      * would become one large element */
};

BX_INLINE void bx_choose_signs(uint32_t *signs, int64_t width)
{
    for (uint32_t i = 0; i < (uint32_t)width; i++) {
        uint32_t hash = i * 0x9e3779b1;
        hash = (hash ^ hash >> 15) * 0x85ebca77;
        signs[i] = hash & 0x80000000;
    }
}

/* Multiplies elements that are half the width apart by a Hadamard matrix and leaves them side by
 * side. */
BX_INLINE void bx_mix_two(const float *restrict from, float *restrict to, int64_t width)
{
    const float *next = from + width / 2;
#pragma omp simd
    for (int64_t i = 0; i < width / 2; i++) {
        to[2 * i] = from[i] + next[i];
        to[2 * i + 1] = from[i] - next[i];
    }
}

/* `bx_mix_two` twice in one pass. */
BX_INLINE void bx_mix_four(const float *restrict from, float *restrict to, int64_t width)
{
    const float *next = from + width / 4, *third = next + width / 4, *last = third + width / 4;
#pragma omp simd
    for (int64_t i = 0; i < width / 4; i++) {
        float a = from[i] + third[i], b = next[i] + last[i];
        float c = from[i] - third[i], d = next[i] - last[i];
        to[4 * i] = a + b;
        to[4 * i + 1] = a - b;
        to[4 * i + 2] = c + d;
        to[4 * i + 3] = c - d;
    }
}

/* Rotates `row` and returns where the result is, longer than it should be by the square root of
 * `*block`, the largest power of two that divides `width`. After the signs comes a Hadamard matrix
 * of that size over elements width / block apart, then a reflection that mixes the runs of `block`
 * elements which this made. */
BX_INLINE float *bx_rotate_row(float *row, const struct bx_rotation *with, int64_t width,
                               int64_t *block)
{
    float *to = with->spare;
    int64_t size = 1;
    for (int64_t i = 0; i < width; i++)
        row[i] = bx_float(bx_bits(row[i]) ^ with->signs[i]);
    for (int radix = 4; radix > 1; radix /= 2)
        for (; width % (radix * size) == 0; size *= radix) {
            if (radix == 4)
                bx_mix_four(row, to, width);
            else
                bx_mix_two(row, to, width);
            float *from = row;
            row = to;
            to = from;
        }
    *block = size;
    if (size == width)
        return row;
    float *restrict sums = to;
    float *restrict out = row;
    memcpy(sums, out, (size_t)size * sizeof *sums);
    for (int64_t at = size; at < width; at += size)
        for (int64_t i = 0; i < size; i++)
            sums[i] += out[at + i];
    float share = 2.0f / (float)(width / size);
    for (int64_t at = 0; at < width; at += size)
        for (int64_t i = 0; i < size; i++)
            out[at + i] -= share * sums[i];
    return row;
}

/* Writes one row, rotated, as int8 and returns what its elements are to be multiplied by: the
 * largest magnitude becomes 127. A row with NaN or infinity is 0 times NaN. `row` is
 * overwritten. */
BX_INLINE float bx_quantise_row(int8_t *restrict out, float *row, const struct bx_rotation *with,
                                int64_t width)
{
    int64_t block;
    const float *restrict rotated = bx_rotate_row(row, with, width, &block);
    uint32_t largest = 0; /* magnitudes are ordered as their bits are, NaN above all */
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < width; i++) {
        uint32_t magnitude = bx_bits(rotated[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    float peak = bx_float(largest);
    int is_finite = largest < 0x7f800000;
    if (!is_finite || peak < 1e-30f) {
        memset(out, 0, (size_t)width);
        return is_finite ? 0.0f : NAN;
    }
    float factor = 127.0f / peak;
    for (int64_t i = 0; i < width; i++)
        out[i] = (int8_t)(bx_bits(rotated[i] * factor + BX_ROUND) & 0xff);
    return peak / (127.0f * sqrtf((float)block));
}

/* Declares `name` for rows of `width`, of use where `wanted`. */
#define BX_ROTATION(name, width, wanted)                                                          \
    BX_SCRATCH(name##_spare, width);                                                              \
    uint32_t name##_signs[width] __attribute__((aligned(64)));                                    \
    if (wanted)                                                                                   \
        bx_choose_signs(name##_signs, width);                                                     \
    const struct bx_rotation name = {name##_spare, name##_signs}

#endif
