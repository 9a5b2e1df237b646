/* Backward. One task is one head, so that the sums over queries (dk, dv) need no atomics and have one order.
   Scores and their gradients are kept as [key][PITCH] for one block of rows. */
#include "lanes.h"

/* Floats from one row of head dims, and of queries, to the next: an odd number of panels. Were it a power of 2,
   all rows of a panel would share a few sets of the first-level cache and drive each other out of it. */
INLINE long odd_panels(long n) { return (((n + PANEL - 1) / PANEL) | 1) * PANEL; }
#define PITCH odd_panels(QUERIES)

Size NAMED(backward_size, ISA)(const Args *a) {
    long wide = odd_panels(a->dim);
    long floats = 4 * PITCH * a->dim + 2 * PITCH * wide + 2 * PITCH + 2 * RUN * PITCH + 2 * RUN * a->dim;
    return (Size){a->batch * a->heads, floats + 2 * a->kv_len * wide};
}

/* Natural rows, padded with 0 to a multiple of PANEL columns, times `factor`. */
static void widen_rows(Rows from, long n, long dim, long wide, float factor, float *to) {
    memset(to, 0, sizeof(float) * n * wide);
    for (long r = 0; r < n; r++)
        for (long d = 0; d < dim; d++) to[r * wide + d] = from.data[r * from.row + d] * factor;
}

/* P = 2^(S - lse) and dS = P * (dP - delta), lane by lane. */
INLINE void slope(float *p, float *dp, long n, long ld, const float *lse, const float *delta) {
    vec l0 = load(lse), l1 = load(lse + W), d0 = load(delta), d1 = load(delta + W);
    for (long t = 0; t < n; t++, p += ld, dp += ld) {
        vec p0 = power2(load(p) - l0), p1 = power2(load(p + W) - l1);
        store(p, p0), store(p + W, p1);
        store(dp, p0 * (load(dp) - d0)), store(dp + W, p1 * (load(dp + W) - d1));
    }
}

typedef struct {
    float *qt, *gt, *dqt, *q, *grad, *lse, *delta, *p, *dp, *k_room, *v_room, *q_room, *dk, *dv;
    long wide;
} Room;

static Room room_of(const Args *a, float *at) {
    long wide = odd_panels(a->dim);
    Room r = {.wide = wide};
    float **parts[] = {&r.qt, &r.gt, &r.dqt, &r.q_room, &r.q, &r.grad, &r.lse, &r.delta,
                       &r.p,  &r.dp, &r.k_room, &r.v_room, &r.dk, &r.dv};
    long turned = PITCH * a->dim, natural = PITCH * wide, keys = a->kv_len * wide;
    long sizes[] = {turned,     turned,     turned,       turned,       natural, natural, PITCH, PITCH,
                    RUN * PITCH, RUN * PITCH, RUN * a->dim, RUN * a->dim, keys,    keys};
    for (int i = 0; i < 14; at += sizes[i++]) *parts[i] = at;
    return r;
}

/* Load one block of rows: turned, natural, with their lse and delta = sum(grad * out). */
static void load_rows(const Args *a, long batch, long head, Run rows, const Room *r) {
    Rows q = rows_of(&a->q, batch, head, rows.start, rows.count, a->dim, a->bf16, r->q_room);
    Rows grad = {row_at(&a->grad, batch, head, rows.start), a->grad.row};
    const float *out = row_at(&a->out, batch, head, rows.start), *lse = row_at(&a->lse, batch, head, rows.start);
    turn(q, rows.count, a->dim, a->scale * LOG2E, r->qt);
    turn(grad, rows.count, a->dim, 1.0f, r->gt);
    widen_rows(q, rows.count, a->dim, r->wide, a->scale, r->q);
    widen_rows(grad, rows.count, a->dim, r->wide, 1.0f, r->grad);
    for (long i = 0; i < PITCH; i++) r->lse[i] = INFINITY, r->delta[i] = 0;
    for (long i = 0; i < rows.count; i++) {
        float delta = 0;
        for (long d = 0; d < a->dim; d++) delta += grad.data[i * grad.row + d] * out[i * a->out.row + d];
        r->lse[i] = lse[i * a->lse.row] * LOG2E, r->delta[i] = delta;
    }
    memset(r->dqt, 0, sizeof(float) * PITCH * a->dim);
}

/* All keys of one run against the loaded rows: adds to dq (turned), dk and dv. Meanwhile asks for what comes
   next: the gradients that this run adds to, and then the keys and values of the next run. */
static void run_backward(const Args *a, long batch, long head, Run run, Run next, long queries, const Room *r) {
    long dim = a->dim, n = run.count, wide = r->wide, size = sizeof(float);
    long panels = (queries + PANEL - 1) / PANEL, dim_panels = (dim + PANEL - 1) / PANEL;
    float *dk = r->dk + run.start * wide, *dv = r->dv + run.start * wide;
    Rows k = rows_of(&a->k, batch, head, run.start, n, dim, a->bf16, r->k_room);
    Rows v = rows_of(&a->v, batch, head, run.start, n, dim, a->bf16, r->v_room);
    memset(r->p, 0, sizeof(float) * n * PITCH), memset(r->dp, 0, sizeof(float) * n * PITCH);
    for (long i = 0; i < panels; i++) {
        float *p = r->p + i * PANEL, *dp = r->dp + i * PANEL;
        multiply(k.data, k.row, 1, r->qt + i * PANEL * dim, PANEL, dim, p, PITCH, n, SCORE_TERMS);
        multiply(v.data, v.row, 1, r->gt + i * PANEL * dim, PANEL, dim, dp, PITCH, n, SCORE_TERMS);
        fetch(dk, wide * size, dim * size, n, i, panels);
        fetch(dv, wide * size, dim * size, n, i, panels);
        slope(p, dp, n, PITCH, r->lse + i * PANEL, r->delta + i * PANEL);
        multiply_turned(k.data, k.row, dp, PITCH, n, r->dqt + i * PANEL * dim, PANEL, dim, SUM_TERMS);
    }
    for (long i = 0; i < dim_panels; i++) {
        fetch_keys(a, &a->k, batch, head, next, i, dim_panels);
        fetch_keys(a, &a->v, batch, head, next, i, dim_panels);
        multiply(r->p, PITCH, 1, r->grad + i * PANEL, wide, queries, dv + i * PANEL, wide, n, SUM_TERMS);
        multiply(r->dp, PITCH, 1, r->q + i * PANEL, wide, queries, dk + i * PANEL, wide, n, SUM_TERMS);
    }
}

void NAMED(backward, ISA)(const Args *a, int64_t task, float *scratch) {
    long dim = a->dim, head = task % a->heads, batch = task / a->heads, per_head = tasks_per_head(a);
    Room r = room_of(a, scratch);
    memset(r.dk, 0, sizeof(float) * a->kv_len * r.wide), memset(r.dv, 0, sizeof(float) * a->kv_len * r.wide);
    for (long i = 0; i < per_head; i++) {
        Run rows = rows_of_task(a, i);
        if (!rows.count) continue;
        load_rows(a, batch, head, rows, &r);
        Walk walk = walk_of(a, head, rows.start);
        for (Run run = next_run(a, &walk, RUN), next; run.count; run = next) {
            next = next_run(a, &walk, RUN);
            run_backward(a, batch, head, run, next, rows.count, &r);
        }
        float *dq = row_at(&a->dq, batch, head, rows.start);
        for (long j = 0; j < rows.count; j++) {
            float *from = r.dqt + j / PANEL * dim * PANEL + j % PANEL;
            for (long d = 0; d < dim; d++) dq[j * a->dq.row + d] = from[d * PANEL] * a->scale;
        }
    }
    float *dk = row_at(&a->dk, batch, head, 0), *dv = row_at(&a->dv, batch, head, 0);
    for (long t = 0; t < a->kv_len; t++) {
        memcpy(dk + t * a->dk.row, r.dk + t * r.wide, sizeof(float) * dim);
        memcpy(dv + t * a->dv.row, r.dv + t * r.wide, sizeof(float) * dim);
    }
}
