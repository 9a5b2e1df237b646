/* Words between processes that share memory: numbered lines, counters, and a bell to sleep by.
 *
 * A line is 64 bytes, so that no two of them share a cache line. Its number is written last (release) and
 * read first (acquire): who sees the number sees the words, and all that the writer wrote before them.
 * Numbers only grow, so nothing is ever reset. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define WORDS 7
#define YIELDS 50 /* about 20 us: less than a sleep and its waking cost */

typedef struct {
    _Atomic uint64_t number;
    int64_t words[WORDS];
} Line;

typedef struct {
    _Atomic uint32_t rung;
    _Atomic uint32_t asleep;
} Bell;

void weft_write(Line *line, uint64_t number, const int64_t *words) {
    memcpy(line->words, words, sizeof line->words);
    atomic_store_explicit(&line->number, number, memory_order_release);
}

/* 1 if the line has this number; its words are copied out. */
int weft_read(Line *line, uint64_t number, int64_t *words) {
    if (atomic_load_explicit(&line->number, memory_order_acquire) != number) return 0;
    memcpy(words, line->words, sizeof line->words);
    return 1;
}

void weft_set(Line *line, uint64_t number) {
    atomic_store_explicit(&line->number, number, memory_order_release);
}

uint64_t weft_get(Line *line) {
    return atomic_load_explicit(&line->number, memory_order_acquire);
}

uint32_t weft_rung(Bell *bell) {
    return atomic_load(&bell->rung);
}

/* The bell is rung before its owner is looked at, and the owner says that it sleeps before the kernel looks
 * at the bell: one of the two sees the other, so no ring is slept through. */
void weft_ring(Bell *bell) {
    atomic_fetch_add(&bell->rung, 1);
    if (atomic_load(&bell->asleep)) syscall(SYS_futex, &bell->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Until the bell has been rung again since `seen`, or the time is over. */
void weft_sleep(Bell *bell, uint32_t seen, int64_t nanoseconds) {
    for (int i = 0; i < YIELDS; i++) {
        if (atomic_load(&bell->rung) != seen) return;
        sched_yield();
    }
    struct timespec span = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    atomic_store(&bell->asleep, 1);
    syscall(SYS_futex, &bell->rung, FUTEX_WAIT, seen, &span, NULL, 0);
    atomic_store(&bell->asleep, 0);
}
