/* The float32 kernel on each instruction set. */
#include "cpu.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors pass between inlined functions only */
#endif

#define NAME(x) x##_plain
#define TARGET
#define WIDTH 4
#define ROWS 4
#include "cpu_f32.h"
#undef NAME
#undef TARGET
#undef WIDTH
#undef ROWS

#if defined(__x86_64__)
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 8
#define ROWS 6
#include "cpu_f32.h"
#undef NAME
#undef TARGET
#undef WIDTH

#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))
#define WIDTH 16
#include "cpu_f32.h"
#endif
