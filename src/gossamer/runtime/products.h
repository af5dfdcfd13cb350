/* The sparse product, for many values a weight and for one. */
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

INLINE void block(const int chunks, const int ways, const int near, const struct product *p, int64_t first) {
    const float *x[MAX_CHUNKS];
    for (int c = 0; c < chunks; c++) x[c] = p->x + p->x_at[first + c];
    const float *weights = p->weight->weights;
    const int64_t shift = p->weight->shift;
    int64_t e = 0;
#define OFFSET(k) ((ptrdiff_t)(near ? (int32_t)p->weight->near[k] : p->weight->far[k]) << (near ? shift : 0))
    for (int64_t row = 0; row < p->weight->rows; row++) {
        const int64_t end = p->weight->starts[row + 1];
        vec sum[MAX_CHUNKS * PARTS];
        vec bias = splat(p->weight->bias[row]);
        if (p->add) {
            const float *add = p->add + row * p->add_row;
            for (int c = 0; c < chunks; c++)
                for (int i = 0; i < PARTS; i++)
                    sum[c * PARTS + i] = bias + load(add + p->add_at[first + c] + i * WIDTH);
        } else {
            for (int i = 0; i < chunks * PARTS; i++) sum[i] = bias;
        }
        if (ways > 1) { /* few accumulators: more sums in flight, or each addition waits for the one before */
            vec more[3 * MAX_CHUNKS * PARTS];
            for (int i = 0; i < (ways - 1) * chunks * PARTS; i++) more[i] = (vec){0};
            for (; e + ways <= end; e += ways)
                for (int k = 0; k < ways; k++) {
                    vec w = splat(weights[e + k]);
                    ptrdiff_t offset = OFFSET(e + k);
                    for (int c = 0; c < chunks; c++)
                        for (int i = 0; i < PARTS; i++) {
                            vec term = w * load(x[c] + offset + i * WIDTH);
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
            vec w = splat(weights[e]);
            ptrdiff_t offset = OFFSET(e);
            for (int c = 0; c < chunks; c++)
                for (int i = 0; i < PARTS; i++) sum[c * PARTS + i] += w * load(x[c] + offset + i * WIDTH);
        }
        if (p->relu)
            for (int i = 0; i < chunks * PARTS; i++) sum[i] = relu(sum[i]);
        if (p->mask) {
            const int32_t *mask = p->mask + first * CHUNK;
            for (int i = 0; i < chunks * PARTS; i++) sum[i] = (vec)((ivec)sum[i] & *(const ivec *)(mask + i * WIDTH));
        }
        float *y = p->y + row * p->y_row;
        for (int c = 0; c < chunks; c++)
            for (int i = 0; i < PARTS; i++) store(y + p->y_at[first + c] + i * WIDTH, sum[c * PARTS + i]);
    }
}

#define WAYS(n) ((n) * PARTS <= 2 ? 4 : (n) * PARTS <= 4 ? 2 : 1)

/* One copy a block size and offset width, so that the accumulators are registers. */
#define BLOCK(n)                                                                                                     \
    static __attribute__((noinline)) void near_##n(const struct product *p, int64_t f) { block(n, WAYS(n), 1, p, f); } \
    static __attribute__((noinline)) void far_##n(const struct product *p, int64_t f) { block(n, WAYS(n), 0, p, f); }
typedef void (*block_function)(const struct product *, int64_t);
BLOCK(1)
BLOCK(2)
#if MAX_CHUNKS == 2
static const block_function blocks[2][2] = {{far_1, far_2}, {near_1, near_2}};
#else
BLOCK(3)
BLOCK(4)
#if MAX_CHUNKS == 4
static const block_function blocks[2][4] = {{far_1, far_2, far_3, far_4}, {near_1, near_2, near_3, near_4}};
#else
BLOCK(5)
BLOCK(6)
BLOCK(7)
BLOCK(8)
static const block_function blocks[2][8] = {{far_1, far_2, far_3, far_4, far_5, far_6, far_7, far_8},
                                            {near_1, near_2, near_3, near_4, near_5, near_6, near_7, near_8}};
#endif
#endif

static void multiply(const struct product *p, int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end;) {
        int64_t left = end - first;
        /* 9 chunks as 5 + 4, not 8 + 1: every pass over the weights should feed several registers. */
        int64_t n = left <= MAX_CHUNKS ? left : left < 2 * MAX_CHUNKS ? (left + 1) / 2 : MAX_CHUNKS;
        blocks[p->weight->near != NULL][n - 1](p, first);
        first += n;
    }
}

/* One sample and one pixel: 16 rows of similar length at a time, lane by lane (sliced ELLPACK). */
struct sliced {
    int64_t slices;
    const int64_t *starts; /* first step of each slice */
    const uint16_t *near;  /* [step][16], or NULL */
    const int32_t *far;
    const float *weights; /* [step][16] */
    const int32_t *order; /* row of each lane, -1 where there is none */
    const float *bias;    /* by row */
};

#if defined(__AVX512F__)
INLINE __m512 gather(const struct sliced *w, const int near, const float *x, int64_t step) {
    __m512i at = near ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(w->near + step * CHUNK)))
                      : _mm512_loadu_si512(w->far + step * CHUNK);
    return _mm512_mul_ps(_mm512_loadu_ps(w->weights + step * CHUNK), _mm512_i32gather_ps(at, x, 4));
}
#elif defined(__AVX2__)
INLINE __m256 gather(const struct sliced *w, const int near, const float *x, int64_t place) {
    __m256i at = near ? _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(w->near + place)))
                      : _mm256_loadu_si256((const __m256i *)(w->far + place));
    return _mm256_mul_ps(_mm256_loadu_ps(w->weights + place), _mm256_i32gather_ps(x, at, 4));
}
#endif

INLINE void sum_slice(const struct sliced *w, const int near, const float *x, int64_t begin, int64_t end, float *sum) {
#if defined(__AVX512F__)
    __m512 a = _mm512_setzero_ps(), b = a;
    for (; begin + 2 <= end; begin += 2) {
        a = _mm512_add_ps(a, gather(w, near, x, begin));
        b = _mm512_add_ps(b, gather(w, near, x, begin + 1));
    }
    if (begin < end) a = _mm512_add_ps(a, gather(w, near, x, begin));
    _mm512_storeu_ps(sum, _mm512_add_ps(a, b));
#elif defined(__AVX2__)
    __m256 a = _mm256_setzero_ps(), b = a;
    for (; begin < end; begin++) {
        a = _mm256_add_ps(a, gather(w, near, x, begin * CHUNK));
        b = _mm256_add_ps(b, gather(w, near, x, begin * CHUNK + 8));
    }
    _mm256_storeu_ps(sum, a);
    _mm256_storeu_ps(sum + 8, b);
#else
    for (int i = 0; i < CHUNK; i++) sum[i] = 0;
    for (int64_t k = begin * CHUNK; k < end * CHUNK; k += CHUNK)
        for (int i = 0; i < CHUNK; i++) sum[i] += w->weights[k + i] * x[near ? w->near[k + i] : w->far[k + i]];
#endif
}

static void multiply_one(const struct sliced *w, const float *x, float *y, int64_t y_row, const float *add,
                         int64_t add_row, int64_t use_relu) {
    for (int64_t slice = 0; slice < w->slices; slice++) {
        float sum[CHUNK];
        if (w->near)
            sum_slice(w, 1, x, w->starts[slice], w->starts[slice + 1], sum);
        else
            sum_slice(w, 0, x, w->starts[slice], w->starts[slice + 1], sum);
        for (int i = 0; i < CHUNK; i++) {
            int64_t row = w->order[slice * CHUNK + i];
            if (row < 0) break;
            float s = sum[i] + w->bias[row] + (add ? add[row * add_row] : 0);
            y[row * y_row] = use_relu && s < 0 ? 0 : s;
        }
    }
}

#endif
