/* What the kernel of every instruction set is given. Strides are in elements; the head dim is contiguous. */
#ifndef WEFT_ATTEND_H
#define WEFT_ATTEND_H
#include <stdint.h>

typedef struct {
    const void *data;
    int64_t batch, head, row;
} Tensor;

typedef struct {
    Tensor q, k, v;       /* float32, or bfloat16 where `bf16` is set */
    Tensor out, lse;      /* float32; written forward, read backward */
    Tensor grad;          /* of out, float32 */
    Tensor dq, dk, dv;    /* float32 */
    int64_t batch, heads, q_len, kv_len, dim;
    int64_t block_q, block_k;
    const int32_t *starts; /* row (head, q block) reads kv[starts[row] .. starts[row + 1]]; null is dense */
    const int32_t *kv;
    float scale;
    int32_t bf16;       /* q, k, v are bfloat16 */
    int32_t accumulate; /* out and lse already hold attention to other keys: merge into it */
} Args;

typedef struct {
    int64_t tasks;   /* independent pieces of work */
    int64_t scratch; /* floats each thread needs */
} Size;

#define DECLARE(ISA)                                               \
    Size forward_size_##ISA(const Args *);                         \
    void forward_##ISA(const Args *, int64_t task, float *scratch); \
    Size backward_size_##ISA(const Args *);                        \
    void backward_##ISA(const Args *, int64_t task, float *scratch);
DECLARE(base)
DECLARE(avx2)
DECLARE(avx512)
#endif
