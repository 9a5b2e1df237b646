/* Backward. One task is one head, so that the sums over queries (dk, dv) need no atomics and have one order.
   Scores and their gradients are kept as [key][QUERIES] for one block of rows. */
#include "lanes.h"

Size NAMED(backward_size, ISA)(const Args *a) {
    long wide = (a->dim + PANEL - 1) / PANEL * PANEL;
    long rows = QUERIES + PANEL;
    long floats = 3 * rows * a->dim + 2 * rows * wide + 2 * rows + 2 * KEYS * rows + 2 * KEYS * a->dim;
    return (Size){a->batch * a->heads, floats + 2 * a->kv_len * wide + rows * a->dim};
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
    long rows = QUERIES + PANEL, wide = (a->dim + PANEL - 1) / PANEL * PANEL;
    Room r = {.wide = wide};
    float **parts[] = {&r.qt, &r.gt, &r.dqt, &r.q_room, &r.q, &r.grad, &r.lse, &r.delta,
                       &r.p,  &r.dp, &r.k_room, &r.v_room, &r.dk, &r.dv};
    long sizes[] = {rows * a->dim, rows * a->dim, rows * a->dim, rows * a->dim, rows * wide, rows * wide, rows, rows,
                    KEYS * rows, KEYS * rows, KEYS * a->dim, KEYS * a->dim, a->kv_len * wide, a->kv_len * wide};
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
    for (long i = 0; i < QUERIES + PANEL; i++) r->lse[i] = INFINITY, r->delta[i] = 0;
    for (long i = 0; i < rows.count; i++) {
        float delta = 0;
        for (long d = 0; d < a->dim; d++) delta += grad.data[i * grad.row + d] * out[i * a->out.row + d];
        r->lse[i] = lse[i * a->lse.row] * LOG2E, r->delta[i] = delta;
    }
    memset(r->dqt, 0, sizeof(float) * (QUERIES + PANEL) * a->dim);
}

/* All keys of one run against the loaded rows: adds to dq (turned), dk and dv. */
static void run_backward(const Args *a, long batch, long head, Run run, long queries, const Room *r) {
    long dim = a->dim, n = run.count, ld = QUERIES;
    Rows k = rows_of(&a->k, batch, head, run.start, n, dim, a->bf16, r->k_room);
    Rows v = rows_of(&a->v, batch, head, run.start, n, dim, a->bf16, r->v_room);
    memset(r->p, 0, sizeof(float) * n * ld), memset(r->dp, 0, sizeof(float) * n * ld);
    for (long at = 0; at < queries; at += PANEL) {
        multiply(k.data, k.row, 1, r->qt + at * dim, PANEL, dim, r->p + at, ld, n, SCORE_TERMS);
        multiply(v.data, v.row, 1, r->gt + at * dim, PANEL, dim, r->dp + at, ld, n, SCORE_TERMS);
        slope(r->p + at, r->dp + at, n, ld, r->lse + at, r->delta + at);
        multiply(k.data, 1, k.row, r->dp + at, ld, n, r->dqt + at * dim, PANEL, dim, SUM_TERMS);
    }
    for (long d = 0; d < r->wide; d += PANEL) {
        multiply(r->p, ld, 1, r->grad + d, r->wide, queries, r->dv + run.start * r->wide + d, r->wide, n,
                 SUM_TERMS);
        multiply(r->dp, ld, 1, r->q + d, r->wide, queries, r->dk + run.start * r->wide + d, r->wide, n,
                 SUM_TERMS);
    }
}

void NAMED(backward, ISA)(const Args *a, int64_t task, float *scratch) {
    long dim = a->dim, head = task % a->heads, batch = task / a->heads, per_head = tasks_per_head(a);
    Room r = room_of(a, scratch);
    memset(r.dk, 0, sizeof(float) * a->kv_len * r.wide), memset(r.dv, 0, sizeof(float) * a->kv_len * r.wide);
    Run runs[KEYS];
    for (long i = 0; i < per_head; i++) {
        Run rows = rows_of_task(a, i);
        if (!rows.count) continue;
        load_rows(a, batch, head, rows, &r);
        Walk walk = walk_of(a, head, rows.start);
        for (long found; (found = next_runs(a, &walk, runs));)
            for (long j = 0; j < found; j++) run_backward(a, batch, head, runs[j], rows.count, &r);
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
