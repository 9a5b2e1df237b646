/* What forward.c and backward.c share: vectors, products of small matrices, and the walk over active blocks.

   Lanes run over queries: S^T = K Q^T and O^T += V^T P^T. Keys and values are then read one number at a
   time, as they lie in memory, so nothing of them is ever packed or copied, whatever the strides and however
   few blocks are active; softmax needs no horizontal sums; and every product is the same small kernel,
       C[m][2 vectors] += sum_k A(m, k) * B[k][2 vectors].
   Each file is compiled once for each instruction set (W lanes, names suffixed by ISA); dispatch.c chooses. */
#ifndef WEFT_LANES_H
#define WEFT_LANES_H
#include "attend.h"

#include <math.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4), may_alias));
#define PANEL (2 * W) /* queries, or head dims, that one product works on */
#define KEYS 256      /* keys of one round of softmax: their scores stay in the first-level cache */
#define RUN 64        /* keys of one step backward: with their gradients and the rows, in the second-level cache */
#define QUERIES 128   /* rows that share each key and value block while it is in the second-level cache */
#define SCORE_TERMS 32 /* an error of a score is an error of its exponential, so its sums are short */
#define SUM_TERMS 64
#define LOG2E 1.44269504088896340736f
#define LN2 0.69314718055994530942f
#define SHARED static __attribute__((unused)) /* not every file needs it */
#define INLINE static inline __attribute__((always_inline))

INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec x) { *(vec *)p = x; }

INLINE vec larger(vec a, vec b) { /* b where either is not a number */
#if W == 16 && defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif W == 8 && defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    ivec more = a > b;
    return (vec)(((ivec)a & more) | ((ivec)b & ~more));
#endif
}

/* 2^x for x <= 0, to 2e-9 before rounding. x is the second operand of `larger`, so that NaN goes through. */
INLINE vec power2(vec x) {
    x = larger(splat(-126.0f), x);
    vec shifted = x + splat(12582912.0f); /* 1.5 * 2^23: the low bits now hold x rounded to an integer */
    vec f = x - (shifted - splat(12582912.0f));
    vec p = splat(1.5345820e-04f);
    p = p * f + splat(1.3399937e-03f);
    p = p * f + splat(9.6184890e-03f);
    p = p * f + splat(5.5503288e-02f);
    p = p * f + splat(2.4022647e-01f);
    p = p * f + splat(6.9314721e-01f);
    p = p * f + splat(1.0f);
    return p * (vec)(((ivec)shifted << 23) + 0x3f800000);
}

/* C += A B for ROWS rows of C, in sums of at most `most` terms that start from 0 and meet C at their end:
   adding small terms one by one to a large total would double the rounding error. */
#define PRODUCT(ROWS)                                                                                      \
    INLINE void product##ROWS(const float *a, long am, long ak, const float *b, long bk, long n, float *c, \
                              long cm, long most) {                                                        \
        for (; n > 0; n -= most) {                                                                         \
            vec lo[ROWS], hi[ROWS];                                                                        \
            for (int i = 0; i < ROWS; i++) lo[i] = hi[i] = (vec){0};                                       \
            for (long left = n < most ? n : most; left > 0; left--, a += ak, b += bk) {                    \
                vec b0 = load(b), b1 = load(b + W);                                                        \
                _Pragma("GCC unroll 8") for (int i = 0; i < ROWS; i++) {                                   \
                    vec x = splat(a[i * am]);                                                              \
                    lo[i] += x * b0, hi[i] += x * b1;                                                      \
                }                                                                                          \
            }                                                                                              \
            for (int i = 0; i < ROWS; i++) {                                                               \
                store(c + i * cm, load(c + i * cm) + lo[i]);                                               \
                store(c + i * cm + W, load(c + i * cm + W) + hi[i]);                                       \
            }                                                                                              \
        }                                                                                                  \
    }
PRODUCT(6) /* 12 sums, 2 operands and 1 broadcast fill the 16 registers of AVX2 */
PRODUCT(4)
PRODUCT(2)
PRODUCT(1)

/* C[m][PANEL] += sum over n of A[m * am + k * ak] * B[k * bk][PANEL]. A is read row by row, once. */
static void multiply(const float *a, long am, long ak, const float *b, long bk, long n, float *c, long cm,
                     long m, long most) {
    for (; m >= 6; m -= 6, a += 6 * am, c += 6 * cm) product6(a, am, ak, b, bk, n, c, cm, most);
    for (; m >= 4; m -= 4, a += 4 * am, c += 4 * cm) product4(a, am, ak, b, bk, n, c, cm, most);
    for (; m >= 2; m -= 2, a += 2 * am, c += 2 * cm) product2(a, am, ak, b, bk, n, c, cm, most);
    for (; m >= 1; m -= 1, a += am, c += cm) product1(a, am, ak, b, bk, n, c, cm, most);
}

/* The same for A that lies in memory by columns: `most` of them at a time, as their cache lines are shared
   by the neighbouring rows of A. */
SHARED void multiply_turned(const float *a, long ak, const float *b, long bk, long n, float *c, long cm, long m,
                            long most) {
    for (; n > 0; n -= most, a += most * ak, b += most * bk)
        multiply(a, 1, ak, b, bk, n < most ? n : most, c, cm, m, most);
}

/* Rows as float32: in place, or widened into `room` (rows of `dim`) where they are bfloat16. */
typedef struct {
    const float *data;
    long row;
} Rows;

SHARED Rows rows_of(const Tensor *t, long batch, long head, long at, long n, long dim, int bf16,
                    float *room) {
    long first = batch * t->batch + head * t->head + at * t->row;
    if (!bf16) return (Rows){(const float *)t->data + first, t->row};
    const uint16_t *from = (const uint16_t *)t->data + first;
    for (long r = 0; r < n; r++)
        for (long d = 0; d < dim; d++) {
            uint32_t bits = (uint32_t)from[r * t->row + d] << 16;
            memcpy(&room[r * dim + d], &bits, sizeof bits);
        }
    return (Rows){room, dim};
}

INLINE float *row_at(const Tensor *t, long batch, long head, long at) {
    return (float *)t->data + batch * t->batch + head * t->head + at * t->row;
}

/* Rows become columns, in the registers: lanes i and i + step of neighbouring vectors change places. */
INLINE void flip(vec *t) {
#pragma GCC unroll 4
    for (int step = 1; step < W; step *= 2) {
        ivec low = {0}, high = {0};
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) {
            low[j] = j & step ? W + j - step : j;
            high[j] = j & step ? W + j : j + step;
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; i++)
            if (!(i & step)) {
                vec a = t[i], b = t[i + step];
                t[i] = __builtin_shuffle(a, b, low), t[i + step] = __builtin_shuffle(a, b, high);
            }
    }
}

/* Rows times `factor` as panels [dim][PANEL]; lanes beyond the last row are 0. */
SHARED void turn(Rows from, long n, long dim, float factor, float *panels) {
    for (long at = 0; at < (n + PANEL - 1) / PANEL * PANEL; at += W) {
        long rows = n - at < W ? n - at : W, whole = rows == W ? dim / W * W : 0;
        float *half = panels + at / PANEL * PANEL * dim + at % PANEL;
        const float *row = from.data + at * from.row;
        for (long d = 0; d < whole; d += W) {
            vec t[W];
            for (int i = 0; i < W; i++) t[i] = load(row + i * from.row + d) * splat(factor);
            flip(t);
            for (int i = 0; i < W; i++) store(half + (d + i) * PANEL, t[i]);
        }
        for (long d = whole; d < dim; d++)
            for (long r = 0; r < W; r++) half[d * PANEL + r] = r < rows ? row[r * from.row + d] * factor : 0;
    }
}

/* The way back: rows of `out`, each times its share. */
SHARED void turn_back(const float *panels, const float *share, long n, long dim, float *out, long row) {
    for (long at = 0; at < n; at += W) {
        long rows = n - at < W ? n - at : W, whole = rows == W ? dim / W * W : 0;
        const float *half = panels + at / PANEL * PANEL * dim + at % PANEL;
        for (long d = 0; d < whole; d += W) {
            vec t[W];
            for (int i = 0; i < W; i++) t[i] = load(half + (d + i) * PANEL) * load(share + at);
            flip(t);
            for (int i = 0; i < W; i++) store(out + (at + i) * row + d, t[i]);
        }
        for (long d = whole; d < dim; d++)
            for (long r = 0; r < rows; r++) out[(at + r) * row + d] = half[d * PANEL + r] * share[at + r];
    }
}

/* A walk over the keys that one row of blocks reads, in runs that sum to at most KEYS. */
typedef struct {
    const int32_t *list; /* null is every block */
    long blocks, at, inside;
} Walk;

typedef struct {
    long start, count;
} Run;

static Walk walk_of(const Args *a, long head, long first_row) {
    long q_blocks = (a->q_len + a->block_q - 1) / a->block_q;
    if (!a->starts) return (Walk){0, (a->kv_len + a->block_k - 1) / a->block_k, 0, 0};
    const int32_t *start = a->starts + head * q_blocks + first_row / a->block_q;
    return (Walk){a->kv + start[0], start[1] - start[0], 0, 0};
}

/* The next keys that lie in one piece (neighbouring blocks do), at most `most`; none when the walk is over. */
static Run next_run(const Args *a, Walk *w, long most) {
    Run run = {0, 0};
    while (run.count < most && w->at < w->blocks) {
        long block = (w->list ? w->list[w->at] : w->at) * a->block_k;
        long end = block + a->block_k < a->kv_len ? block + a->block_k : a->kv_len;
        long start = block + w->inside, room = most - run.count;
        if (!run.count) run.start = start;
        if (run.start + run.count != start) break;
        long count = end - start < room ? end - start : room;
        run.count += count, w->inside += count;
        if (start + count == end) w->at++, w->inside = 0;
    }
    return run;
}

/* Fills `runs` with at most KEYS keys and returns how many runs that are; 0 when the walk is over. */
SHARED long next_runs(const Args *a, Walk *w, Run *runs) {
    long found = 0;
    for (long room = KEYS; room > 0 && (runs[found] = next_run(a, w, room)).count;) room -= runs[found++].count;
    return found;
}

/* Ask for rows of `width` bytes ahead of their use: from one active block to the next there is a jump that
   the processor cannot guess. One of `parts` equal shares, to spread the requests over the work that hides them. */
INLINE void fetch(const void *first, long stride, long width, long rows, long part, long parts) {
    long from = rows * part / parts, to = rows * (part + 1) / parts;
    const char *row = (const char *)first + from * stride;
    for (; from < to; from++, row += stride)
        for (long at = 0; at < width; at += 64) __builtin_prefetch(row + at, 0, 2);
}

/* The same for keys or values. Inlined for more than speed: gcc takes a function that only prefetches for one
   without effect, and drops the calls. */
INLINE void fetch_keys(const Args *a, const Tensor *t, long batch, long head, Run run, long part, long parts) {
    long bytes = a->bf16 ? 2 : 4, first = batch * t->batch + head * t->head + run.start * t->row;
    fetch((const char *)t->data + first * bytes, t->row * bytes, a->dim * bytes, run.count, part, parts);
}

/* Rows that one task takes: whole blocks of queries are cut at QUERIES. A dense mask is cut anywhere. */
INLINE long rows_per_task(const Args *a) {
    return !a->starts || a->block_q > QUERIES ? QUERIES : a->block_q;
}

INLINE long tasks_per_head(const Args *a) {
    long rows = rows_per_task(a);
    if (!a->starts) return (a->q_len + rows - 1) / rows;
    long q_blocks = (a->q_len + a->block_q - 1) / a->block_q;
    return q_blocks * ((a->block_q + rows - 1) / rows);
}

/* The rows of a task of one head; there may be none, where a ragged last block is cut. */
INLINE Run rows_of_task(const Args *a, long task) {
    long rows = rows_per_task(a), start = task * rows, end = a->q_len;
    if (a->starts) {
        long per_block = (a->block_q + rows - 1) / rows, block = task / per_block * a->block_q;
        start = block + task % per_block * rows;
        end = block + a->block_q < a->q_len ? block + a->block_q : a->q_len;
    }
    long count = end - start < rows ? end - start : rows;
    return (Run){start, count > 0 ? count : 0};
}

#define NAMED_(name, isa) name##_##isa
#define NAMED(name, isa) NAMED_(name, isa)
#endif
