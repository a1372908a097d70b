#include "native.h"

#include <limits.h>
#include <sched.h>
#include <stddef.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
#include <cpuid.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

static int has_amx(void)
{
#if defined(__linux__)
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    int tile = (d >> 24) & 1, int8 = (d >> 25) & 1, bf16 = (d >> 22) & 1;
    if (!(tile && int8 && bf16))
        return 0;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}

static int detect(void)
{
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")))
        return BX_PLAIN;
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vnni")))
        return BX_AVX2;
    if (!__builtin_cpu_supports("avx512bf16"))
        return BX_AVX512;
    return has_amx() ? BX_AMX : BX_AVX512_BF16;
}
#else
static int detect(void) { return BX_PLAIN; }
#endif

static int level = -1;
static int most = BX_AMX;

int bx_level(void)
{
    if (level < 0)
        level = detect();
    return level < most ? level : most;
}

BX_EXPORT int bx_current_level(void) { return bx_level(); }

/* Returns the level that is used from now on. */
BX_EXPORT int bx_limit_level(int limit)
{
    most = limit;
    return bx_level();
}

typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*number_function)(void);

static parallel_function openmp_parallel;
static number_function openmp_thread, openmp_num_threads;

/* The OpenMP runtime that torch has loaded: GOMP_parallel, omp_get_thread_num and
 * omp_get_num_threads of it. */
BX_EXPORT void bx_use_openmp(void *parallel, void *thread, void *num_threads)
{
    openmp_parallel = (parallel_function)parallel;
    openmp_thread = (number_function)thread;
    openmp_num_threads = (number_function)num_threads;
}

/* Threads that run one body together, and what they are at. */
struct team {
    void (*body)(void *);
    void *argument;
    int num_threads, arrived, round, asleep; /* of the barrier */
    bx_task task;                    /* that of the first thread, as all below */
    void *context;
    int num_wanted;
};

static _Thread_local struct team *team; /* that this thread is in */
static _Thread_local int team_thread;

#define BX_SPINS 500 /* some tens of microseconds, before a thread lets others have its core */

#if defined(__linux__)
/* Sleeps while `*word` is `value`. */
static void sleep_while(int *word, int value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_all(int *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
#else
static void sleep_while(int *word, int value)
{
    (void)word, (void)value;
    sched_yield();
}

static void wake_all(int *word) { (void)word; }
#endif

/* Returns when all threads of the team have come here. */
static void meet(struct team *t)
{
    int round = __atomic_load_n(&t->round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&t->arrived, 1, __ATOMIC_ACQ_REL) ==
        __atomic_load_n(&t->num_threads, __ATOMIC_RELAXED)) {
        __atomic_store_n(&t->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&t->round, round + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&t->asleep, __ATOMIC_SEQ_CST) > 0)
            wake_all(&t->round);
        return;
    }
    for (int i = 0; i < BX_SPINS; i++) {
        if (__atomic_load_n(&t->round, __ATOMIC_ACQUIRE) != round)
            return;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    __atomic_add_fetch(&t->asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&t->round, __ATOMIC_SEQ_CST) == round)
        sleep_while(&t->round, round);
    __atomic_sub_fetch(&t->asleep, 1, __ATOMIC_SEQ_CST);
}

static void share_out(struct team *t, bx_task task, void *context, int num_threads)
{
    if (team_thread == 0) {
        t->task = task;
        t->context = context;
        t->num_wanted = num_threads < t->num_threads ? num_threads : t->num_threads;
    }
    meet(t);
    if (team_thread < t->num_wanted)
        t->task(t->context, team_thread, t->num_wanted);
    meet(t);
}

static void join(void *argument)
{
    struct team *t = argument;
    team = t;
    team_thread = openmp_thread();
    /* all write the same, which may be fewer than were asked for */
    __atomic_store_n(&t->num_threads, openmp_num_threads(), __ATOMIC_RELAXED);
    t->body(t->argument);
    team = NULL;
}

void bx_together(void (*body)(void *), void *context, int num_threads)
{
    if (num_threads <= 1 || openmp_parallel == NULL || team != NULL) {
        body(context);
        return;
    }
    struct team t = {.body = body, .argument = context, .num_threads = num_threads};
    openmp_parallel(join, &t, (unsigned)num_threads, 0);
}

struct call {
    bx_task task;
    void *context;
};

static void enter(void *argument)
{
    struct call *call = argument;
    call->task(call->context, openmp_thread(), openmp_num_threads());
}

void bx_parallel(bx_task task, void *context, int num_threads)
{
    if (team != NULL) {
        share_out(team, task, context, num_threads);
        return;
    }
    if (num_threads <= 1 || openmp_parallel == NULL) {
        task(context, 0, 1);
        return;
    }
    struct call call = {task, context};
    openmp_parallel(enter, &call, (unsigned)num_threads, 0);
}
