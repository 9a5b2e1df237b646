/* Forward: flash attention over the active blocks of each row, with its log-sum-exp. */
#include "lanes.h"

Size NAMED(forward_size, ISA)(const Args *a) {
    /* q and out as panels, maxima and sums, scores, and room to widen q, k, v. */
    long floats = 2 * QUERIES * a->dim + 2 * QUERIES + KEYS * PANEL + (QUERIES + 2 * KEYS) * a->dim;
    return (Size){a->batch * a->heads * tasks_per_head(a), floats + 2 * PANEL * a->dim + 4 * PANEL};
}

/* Softmax of one panel over the keys in `scores`, which become weights; sums and output are rescaled. */
INLINE void soften(float *scores, long n, float *max, float *sum, float *out, long dim) {
    vec old0 = load(max), old1 = load(max + W), new0 = old0, new1 = old1;
    for (long t = 0; t < n; t++) {
        new0 = larger(load(scores + t * PANEL), new0);
        new1 = larger(load(scores + t * PANEL + W), new1);
    }
    vec sum0 = {0}, sum1 = {0};
    for (long from = 0; from < n; from += 32) { /* sums of sums, for their rounding error */
        long to = from + 32 < n ? from + 32 : n;
        vec part0 = {0}, part1 = {0};
        for (long t = from; t < to; t++) {
            vec p0 = power2(load(scores + t * PANEL) - new0), p1 = power2(load(scores + t * PANEL + W) - new1);
            part0 += p0, part1 += p1;
            store(scores + t * PANEL, p0), store(scores + t * PANEL + W, p1);
        }
        sum0 += part0, sum1 += part1;
    }
    vec keep0 = power2(old0 - new0), keep1 = power2(old1 - new1);
    store(sum, load(sum) * keep0 + sum0), store(sum + W, load(sum + W) * keep1 + sum1);
    store(max, new0), store(max + W, new1);
    for (long d = 0; d < dim; d++) {
        store(out + d * PANEL, load(out + d * PANEL) * keep0);
        store(out + d * PANEL + W, load(out + d * PANEL + W) * keep1);
    }
}

void NAMED(forward, ISA)(const Args *a, int64_t task, float *scratch) {
    long dim = a->dim, per_head = tasks_per_head(a);
    long head = task / per_head % a->heads, batch = task / per_head / a->heads;
    Run rows = rows_of_task(a, task % per_head);
    if (!rows.count) return;
    long panels = (rows.count + PANEL - 1) / PANEL, size = panels * dim * PANEL;
    float *qt = scratch, *ot = qt + size, *max = ot + size, *sum = max + panels * PANEL;
    float *scores = sum + panels * PANEL, *room = scores + KEYS * PANEL;
    float *k_room = room + QUERIES * dim, *v_room = k_room + KEYS * dim;
    turn(rows_of(&a->q, batch, head, rows.start, rows.count, dim, a->bf16, room), rows.count, dim,
         a->scale * LOG2E, qt);
    float *out = row_at(&a->out, batch, head, rows.start), *lse = row_at(&a->lse, batch, head, rows.start);
    memset(ot, 0, sizeof(float) * size);
    for (long r = 0; r < panels * PANEL; r++) max[r] = -INFINITY, sum[r] = 0;
    if (a->accumulate) { /* earlier keys stand for one key of weight e^lse and value out */
        turn((Rows){out, a->out.row}, rows.count, dim, 1.0f, ot);
        for (long r = 0; r < rows.count; r++)
            max[r] = lse[r * a->lse.row] * LOG2E, sum[r] = lse[r * a->lse.row] == -INFINITY ? 0 : 1;
    }
    Run runs[KEYS], next[KEYS];
    Walk walk = walk_of(a, head, rows.start);
    for (long found; (found = next_runs(a, &walk, runs));) {
        Rows k[KEYS], v[KEYS];
        Walk ahead = walk;
        long soon = next_runs(a, &ahead, next);
        long n = 0;
        for (long i = 0; i < found; n += runs[i++].count) {
            k[i] = rows_of(&a->k, batch, head, runs[i].start, runs[i].count, dim, a->bf16, k_room + n * dim);
            v[i] = rows_of(&a->v, batch, head, runs[i].start, runs[i].count, dim, a->bf16, v_room + n * dim);
        }
        for (long p = 0; p < panels; p++) {
            float *at = scores, *op = ot + p * dim * PANEL;
            memset(scores, 0, sizeof(float) * n * PANEL);
            for (long i = 0; i < found; at += runs[i++].count * PANEL) {
                if (!p && !a->bf16) fetch_keys(a, &a->v, batch, head, runs[i], 0, 1);
                multiply(k[i].data, k[i].row, 1, qt + p * dim * PANEL, PANEL, dim, at, PANEL, runs[i].count,
                         SCORE_TERMS);
            }
            for (long i = 0; i < soon; i++) fetch_keys(a, &a->k, batch, head, next[i], p, panels);
            soften(scores, n, max + p * PANEL, sum + p * PANEL, op, dim);
            at = scores;
            for (long i = 0; i < found; at += runs[i++].count * PANEL)
                multiply_turned(v[i].data, v[i].row, at, PANEL, runs[i].count, op, PANEL, dim, SUM_TERMS);
        }
    }
    for (long r = 0; r < rows.count; r++) {
        float total = sum[r];
        lse[r * a->lse.row] = total == 0 ? -INFINITY : max[r] * LN2 + logf(total);
        sum[r] = total == 0 ? 0 : 1 / total; /* NaN stays NaN */
    }
    turn_back(ot, sum, rows.count, dim, out, a->out.row);
}
