/* Choose the instruction set of this machine and share the tasks among threads. */
#define _GNU_SOURCE /* madvise, RTLD_DEFAULT */
#include "attend.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
    const char *name;
    Size (*forward_size)(const Args *);
    void (*forward)(const Args *, int64_t, float *);
    Size (*backward_size)(const Args *);
    void (*backward)(const Args *, int64_t, float *);
} Kernels;

#define KERNELS(ISA) {#ISA, forward_size_##ISA, forward_##ISA, backward_size_##ISA, backward_##ISA}
static const Kernels all[] = {
#if defined(__x86_64__)
    KERNELS(avx512),
    KERNELS(avx2),
#endif
    KERNELS(base),
};

static int runs_here(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return !strcmp(name, "base");
}

/* The n-th instruction set this machine can run, the fastest first; null beyond the last. */
const char *weft_isa(int n) {
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        if (runs_here(all[i].name) && n-- == 0) return all[i].name;
    return 0;
}

typedef struct {
    const Args *args;
    void (*run)(const Args *, int64_t, float *);
    int64_t tasks, scratch;
    atomic_long next;
    atomic_int failed;
} Job;

/* Whole large pages where there is much: the gradients of a head are walked from block to block, and with small
   pages each jump would miss in the cache of page tables. */
static float *room_for(int64_t floats) {
    size_t large = 1 << 21, bytes = floats * sizeof(float), unit = bytes < 2 * large ? 64 : large;
    bytes = (bytes + unit - 1) / unit * unit;
    void *room = aligned_alloc(unit, bytes);
#ifdef MADV_HUGEPAGE
    if (room && unit == large) madvise(room, bytes, MADV_HUGEPAGE);
#endif
    return room;
}

static void work(void *given) {
    Job *job = given;
    float *scratch = room_for(job->scratch);
    if (!scratch) {
        atomic_store(&job->failed, 1);
        return;
    }
    for (int64_t task; (task = atomic_fetch_add(&job->next, 1)) < job->tasks;) job->run(job->args, task, scratch);
    free(scratch);
}

static void *work_thread(void *given) {
    work(given);
    return 0;
}

static pid_t loader;
__attribute__((constructor)) static void loaded(void) { loader = getpid(); }

/* On torch's own threads: after each of its calls they spin for milliseconds, waiting for the next, and threads
   of ours would have to share the cores with them. In a forked process that pool is dead, so threads are started
   there, as where torch has no OpenMP. */
static void run_on(int threads, Job *job) {
    void (*torch_pool)(void (*)(void *), void *, unsigned, unsigned) = 0;
    if (getpid() == loader) *(void **)&torch_pool = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    if (torch_pool && threads > 1) {
        torch_pool(work, job, (unsigned)threads, 0);
        return;
    }
    pthread_t others[256];
    int started = 0;
    while (started + 1 < threads && started < 256 && !pthread_create(others + started, 0, work_thread, job))
        started++;
    work(job);
    for (int i = 0; i < started; i++) pthread_join(others[i], 0);
}

/* 0 if all went well, 1 without memory, 2 if the instruction set is not there. */
int weft_attend(const Args *args, int backward, const char *isa, int threads) {
    const Kernels *found = 0;
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(all[i].name, isa) && runs_here(isa)) found = &all[i];
    if (!found) return 2;
    Size size = backward ? found->backward_size(args) : found->forward_size(args);
    Job job = {args, backward ? found->backward : found->forward, size.tasks, size.scratch, 0, 0};
    if (threads > size.tasks) threads = (int)size.tasks;
    run_on(threads, &job);
    return atomic_load(&job.failed);
}
