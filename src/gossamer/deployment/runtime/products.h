/* The product for many values a weight: sparse, and dense for layers with few zeros. */
#ifndef GOSSAMER_PRODUCTS
#define GOSSAMER_PRODUCTS

#include "vectors.h"

/* Rows of weights and where their inputs lie. The stream of weights is what large layers wait for, so offsets are 16
 * bits where they fit (after a common shift). */
struct sparse {
    int64_t rows;
    const int64_t *starts;
    const float *weights, *bias;
    const uint16_t *near; /* or NULL */
    const int32_t *far;
    int64_t shift;
    const int32_t *order; /* rows of the result, by number of weights: loops of the same length are predicted */
};

struct product {
    const struct sparse *weight;
    const float *x;
    float *y;
    const float *add; /* residual or NULL */
    int64_t y_row, add_row;
    const int32_t *x_at, *y_at, *add_at; /* place of each chunk inside a row */
    const int32_t *mask;                 /* 16 a chunk, all bits or none; or NULL */
    int64_t relu;
};

/* Offsets are far, near, or near in units that the compiler knows (a shift by a variable takes three instructions). */
enum { FAR, FLOATS, CHUNKS = CHUNK, SHIFTED };
#define OFFSET(k)                                                                                          \
    (unit == FAR ? (ptrdiff_t)w.far[k] : unit == SHIFTED ? (ptrdiff_t)w.near[k] << shift : (ptrdiff_t)w.near[k] * unit)

INLINE int units_of(const struct sparse *w) { return !w->near ? FAR : w->shift == 4 ? CHUNKS : SHIFTED; }

INLINE void block(const int chunks, const int ways, const int unit, const struct product *p, int64_t first) {
    /* All in locals: what is behind a pointer would be read again after every store. */
    const float *x[MAX_CHUNKS], *add[MAX_CHUNKS];
    float *y[MAX_CHUNKS];
    const struct sparse w = *p->weight;
    const int64_t shift = w.shift, y_row = p->y_row, add_row = p->add_row;
    const int32_t *mask = p->mask ? p->mask + first * CHUNK : NULL;
    const int adds = p->add != NULL, positive = p->relu != 0;
    for (int c = 0; c < chunks; c++) {
        x[c] = p->x + p->x_at[first + c];
        y[c] = p->y + p->y_at[first + c];
        add[c] = adds ? p->add + p->add_at[first + c] : NULL;
    }
    int64_t e = 0;
    for (int64_t next = 0; next < w.rows; next++) {
        const int64_t end = w.starts[next + 1], row = w.order[next];
        vec sum[MAX_CHUNKS * PARTS];
        vec bias = splat(w.bias[next]);
        if (adds) {
            for (int c = 0; c < chunks; c++)
                for (int i = 0; i < PARTS; i++) sum[c * PARTS + i] = bias + load(add[c] + row * add_row + i * WIDTH);
        } else {
            for (int i = 0; i < chunks * PARTS; i++) sum[i] = bias;
        }
        if (ways > 1) { /* few accumulators: more sums in flight, or each addition waits for the one before */
            vec more[3 * MAX_CHUNKS * PARTS];
            for (int i = 0; i < (ways - 1) * chunks * PARTS; i++) more[i] = (vec){0};
            for (; e + ways <= end; e += ways)
                for (int k = 0; k < ways; k++) {
                    vec weight = splat(w.weights[e + k]);
                    ptrdiff_t offset = OFFSET(e + k);
                    for (int c = 0; c < chunks; c++)
                        for (int i = 0; i < PARTS; i++) {
                            vec term = weight * load(x[c] + offset + i * WIDTH);
                            if (k == 0)
                                sum[c * PARTS + i] += term;
                            else
                                more[((k - 1) * chunks + c) * PARTS + i] += term;
                        }
                }
            for (int k = 1; k < ways; k++)
                for (int i = 0; i < chunks * PARTS; i++) sum[i] += more[(k - 1) * chunks * PARTS + i];
        }
        for (; e < end; e++) {
            vec weight = splat(w.weights[e]);
            ptrdiff_t offset = OFFSET(e);
            for (int c = 0; c < chunks; c++)
                for (int i = 0; i < PARTS; i++) sum[c * PARTS + i] += weight * load(x[c] + offset + i * WIDTH);
        }
        if (positive)
            for (int i = 0; i < chunks * PARTS; i++) sum[i] = relu(sum[i]);
        if (mask)
            for (int i = 0; i < chunks * PARTS; i++) sum[i] = (vec)((ivec)sum[i] & *(const ivec *)(mask + i * WIDTH));
        for (int c = 0; c < chunks; c++)
            for (int i = 0; i < PARTS; i++) store(y[c] + row * y_row + i * WIDTH, sum[c * PARTS + i]);
    }
}

#define WAYS(n) ((n) * PARTS <= 2 ? 4 : (n) * PARTS <= 4 ? 2 : 1)

/* One copy a block size and width of offsets, so that the accumulators are registers. */
#define BLOCK(n)                                                                                                   \
    static __attribute__((noinline)) void far_##n(const struct product *p, int64_t f) { block(n, WAYS(n), FAR, p, f); } \
    static __attribute__((noinline)) void near_##n(const struct product *p, int64_t f) { block(n, WAYS(n), SHIFTED, p, f); } \
    static __attribute__((noinline)) void whole_##n(const struct product *p, int64_t f) { block(n, WAYS(n), CHUNKS, p, f); }
typedef void (*block_function)(const struct product *, int64_t);
BLOCK(1)
BLOCK(2)
#if MAX_CHUNKS == 2
static const block_function far_blocks[] = {far_1, far_2};
static const block_function near_blocks[] = {near_1, near_2};
static const block_function whole_blocks[] = {whole_1, whole_2};
#else
BLOCK(3)
BLOCK(4)
#if MAX_CHUNKS == 4
static const block_function far_blocks[] = {far_1, far_2, far_3, far_4};
static const block_function near_blocks[] = {near_1, near_2, near_3, near_4};
static const block_function whole_blocks[] = {whole_1, whole_2, whole_3, whole_4};
#else
BLOCK(5)
BLOCK(6)
BLOCK(7)
BLOCK(8)
static const block_function far_blocks[] = {far_1, far_2, far_3, far_4, far_5, far_6, far_7, far_8};
static const block_function near_blocks[] = {near_1, near_2, near_3, near_4, near_5, near_6, near_7, near_8};
static const block_function whole_blocks[] = {whole_1, whole_2, whole_3, whole_4, whole_5, whole_6, whole_7, whole_8};
#endif
#endif

static void multiply(const struct product *p, int64_t begin, int64_t end) {
    int unit = units_of(p->weight);
    const block_function *blocks = unit == FAR ? far_blocks : unit == SHIFTED ? near_blocks : whole_blocks;
    for (int64_t first = begin; first < end;) {
        int64_t left = end - first;
        /* 9 chunks as 5 + 4, not 8 + 1: every pass over the weights should feed several registers. */
        int64_t n = left <= MAX_CHUNKS ? left : left < 2 * MAX_CHUNKS ? (left + 1) / 2 : MAX_CHUNKS;
        blocks[n - 1](p, first);
        first += n;
    }
}

/* Four values a row, a plane of 2 x 2: vectors of four for every instruction set, and as many sums in flight. */
INLINE void rows_of_four(const int unit, const struct product *p) {
    const float *x = p->x + p->x_at[0], *add = p->add ? p->add + p->add_at[0] : NULL;
    float *y = p->y + p->y_at[0];
    const struct sparse w = *p->weight;
    const int64_t shift = w.shift, y_row = p->y_row, add_row = p->add_row;
    const int positive = p->relu != 0;
    int64_t e = 0;
    for (int64_t next = 0; next < w.rows; next++) {
        const int64_t end = w.starts[next + 1], row = w.order[next];
        quad sum[4] = {w.bias[next] - (quad){0}};
        if (add) sum[0] += *(const quad *)(add + row * add_row);
        for (; e + 4 <= end; e += 4)
            for (int k = 0; k < 4; k++) sum[k] += w.weights[e + k] * *(const quad *)(x + OFFSET(e + k));
        for (; e < end; e++) sum[0] += w.weights[e] * *(const quad *)(x + OFFSET(e));
        quad all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        if (positive)
            for (int i = 0; i < 4; i++) all[i] = all[i] < 0 ? 0 : all[i];
        *(quad *)(y + row * y_row) = all;
    }
}

static __attribute__((noinline)) void multiply_four(const struct product *p) {
    if (p->weight->near)
        rows_of_four(FLOATS, p);
    else
        rows_of_four(FAR, p);
}

/* A layer with few zeros, as if it had none: ROWS rows share every load of x. Weights lie as [block of rows][tap][row],
 * the rows of the last block filled up with zeros that are computed and not stored. */
struct dense {
    int64_t rows, taps;
    const int32_t *offsets;
    const float *weights, *bias; /* bias filled up, too */
};

struct dense_product {
    const struct dense *weight;
    const float *x;
    float *y;
    const float *add; /* residual or NULL */
    int64_t y_row;
    const int32_t *x_at, *y_at;
    const int32_t *mask;
    int64_t relu;
};

INLINE void dense_block(const int chunks, const struct dense_product *p, int64_t first) {
    const struct dense *w = p->weight;
    for (int64_t row = 0; row < w->rows; row += ROWS) {
        const float *weights = w->weights + row * w->taps;
        vec sum[ROWS * DENSE_CHUNKS * PARTS];
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < chunks * PARTS; i++) sum[r * chunks * PARTS + i] = splat(w->bias[row + r]);
        for (int64_t tap = 0; tap < w->taps; tap++, weights += ROWS) {
            const float *from = p->x + w->offsets[tap];
            vec x[DENSE_CHUNKS * PARTS];
            for (int c = 0; c < chunks; c++)
                for (int i = 0; i < PARTS; i++) x[c * PARTS + i] = load(from + p->x_at[first + c] + i * WIDTH);
            for (int r = 0; r < ROWS; r++) {
                vec weight = splat(weights[r]);
                for (int i = 0; i < chunks * PARTS; i++) sum[r * chunks * PARTS + i] += weight * x[i];
            }
        }
        for (int r = 0; r < ROWS && row + r < w->rows; r++)
            for (int c = 0; c < chunks; c++)
                for (int i = 0; i < PARTS; i++) {
                    int64_t place = (row + r) * p->y_row + p->y_at[first + c] + i * WIDTH;
                    vec v = sum[(r * chunks + c) * PARTS + i];
                    if (p->add) v += load(p->add + place);
                    if (p->relu) v = relu(v);
                    if (p->mask) v = (vec)((ivec)v & *(const ivec *)(p->mask + (first + c) * CHUNK + i * WIDTH));
                    store(p->y + place, v);
                }
    }
}

#define DENSE_BLOCK(n) \
    static __attribute__((noinline)) void dense_##n(const struct dense_product *p, int64_t f) { dense_block(n, p, f); }
typedef void (*dense_function)(const struct dense_product *, int64_t);
DENSE_BLOCK(1)
#if DENSE_CHUNKS == 1
static const dense_function dense_blocks[1] = {dense_1};
#else
DENSE_BLOCK(2)
DENSE_BLOCK(3)
DENSE_BLOCK(4)
DENSE_BLOCK(5)
DENSE_BLOCK(6)
static const dense_function dense_blocks[6] = {dense_1, dense_2, dense_3, dense_4, dense_5, dense_6};
#endif

static void multiply_dense(const struct dense_product *p, int64_t chunks) {
    for (int64_t first = 0; first < chunks;) {
        int64_t left = chunks - first;
        int64_t n = left <= DENSE_CHUNKS ? left : left < 2 * DENSE_CHUNKS ? (left + 1) / 2 : DENSE_CHUNKS;
        dense_blocks[n - 1](p, first);
        first += n;
    }
}

#endif
