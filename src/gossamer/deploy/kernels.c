/* Sparse networks on a CPU: every kernel, and the loop that runs a whole network in one call.
 *
 * Layout. A batch is cut into groups of `lanes` samples (1, 2, 4, 8 or a multiple of 16). A value of a group is stored as
 * [channel][pixel][lane]: planes of pixels, each pixel with its samples side by side. Planes carry zero borders, so a
 * convolution is y[channel][p] = sum over its non-zero weights of w * x[offset + p], one constant offset a weight; a
 * linear layer is the case of one pixel, a layer over a sequence the case of one pixel a time step.
 *
 * Inner loop. Output is made in chunks of 16 floats whose places in the planes are listed by the planner (so strides,
 * borders and odd sizes are its business): a block of chunks stays in registers while all rows of the weight pass by.
 *
 * This file is compiled once for each instruction set (VARIANT names the symbols, the compiler's flags choose the
 * vectors) and knows nothing of Python or torch.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef VARIANT
#define VARIANT portable
#endif
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define PUBLIC(name) JOIN(name, VARIANT)

#if defined(__AVX512F__)
#define WIDTH 16
#define MAX_CHUNKS 8
#elif defined(__AVX2__)
#define WIDTH 8
#define MAX_CHUNKS 4
#elif defined(__aarch64__)
#define WIDTH 4
#define MAX_CHUNKS 4
#else
#define WIDTH 4
#define MAX_CHUNKS 2
#endif
#define CHUNK 16
#define PARTS (CHUNK / WIDTH)
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
INLINE vec splat(float f) { return f - (vec){0}; }
INLINE vec either(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

/* NaN stays NaN, as in torch. */
INLINE vec relu(vec v) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps(_mm512_setzero_ps(), (__m512)v);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps(_mm256_setzero_ps(), (__m256)v);
#else
    return (vec)(~(v < (vec){0}) & (ivec)v);
#endif
}

/* ------------------------------------------------------------------------------------------- the sparse product */

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

/* -------------------------------------------------------------------------------- element-wise and recurrent parts */

INLINE vec exponential(vec x) {
    /* 2^n * e^r with |r| <= ln 2 / 2 and the Taylor polynomial of degree 7: 2e-8 relative. */
    x = either(x > splat(88.0f), splat(88.0f), either(x < splat(-87.0f), splat(-87.0f), x));
    vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec n = x * splat(1.44269504089f) + magic;
    ivec power = (ivec)n << 23;
    n -= magic;
    vec r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
    vec y = splat(1.0f / 5040);
    y = y * r + splat(1.0f / 720);
    y = y * r + splat(1.0f / 120);
    y = y * r + splat(1.0f / 24);
    y = y * r + splat(1.0f / 6);
    y = y * r + splat(0.5f);
    y = y * r + splat(1.0f);
    y = y * r + splat(1.0f);
    return (vec)((ivec)y + power);
}

INLINE vec sigmoid(vec x) { return splat(1.0f) / (splat(1.0f) + exponential(-x)); }

INLINE vec hyperbolic(vec x) {
    /* Near zero 1 - 2/(1+e^2x) cancels; an odd polynomial takes over there. */
    vec s = x * x;
    vec small = x + x * s * (splat(-1.0f / 3) + s * (splat(2.0f / 15) + s * (splat(-17.0f / 315) + s * splat(62.0f / 2835))));
    vec large = splat(1.0f) - splat(2.0f) / (splat(1.0f) + exponential(x + x));
    return either((s < splat(0.04f)), small, large);
}

/* The last, partial vector goes through a buffer, so nothing is touched past the end. */
INLINE vec take(const float *p, int64_t n) {
    if (n >= WIDTH) return load(p);
    float tail[WIDTH] = {0};
    memcpy(tail, p, n * sizeof(float));
    return load(tail);
}

INLINE void give(float *p, vec v, int64_t n) {
    if (n >= WIDTH) {
        store(p, v);
    } else {
        float tail[WIDTH];
        store(tail, v);
        memcpy(p, tail, n * sizeof(float));
    }
}

static void lstm_cell(const float *gates, float *cell, float *hidden, int64_t n) {
    for (int64_t i = 0; i < n; i += WIDTH) {
        int64_t left = n - i;
        vec in = sigmoid(take(gates + i, left)), forget = sigmoid(take(gates + n + i, left));
        vec update = hyperbolic(take(gates + 2 * n + i, left)), out = sigmoid(take(gates + 3 * n + i, left));
        vec c = forget * take(cell + i, left) + in * update;
        give(cell + i, c, left);
        give(hidden + i, out * hyperbolic(c), left);
    }
}

/* `from_x` holds r, z, n of the input and `from_h` of the hidden state: the reset gate acts on the latter's n alone. */
static void gru_cell(const float *from_x, const float *from_h, float *hidden, int64_t n) {
    for (int64_t i = 0; i < n; i += WIDTH) {
        int64_t left = n - i;
        vec reset = sigmoid(take(from_x + i, left) + take(from_h + i, left));
        vec keep = sigmoid(take(from_x + n + i, left) + take(from_h + n + i, left));
        vec fresh = hyperbolic(take(from_x + 2 * n + i, left) + reset * take(from_h + 2 * n + i, left));
        give(hidden + i, fresh + keep * (take(hidden + i, left) - fresh), left);
    }
}

/* ------------------------------------------------------------------------------------------- operations of a plan */

enum { LOAD, STORE, PRODUCT, PRODUCT_ONE, AFFINE, POOL, PHASES, COPY, EMBED, LSTM, GRU };

struct op {
    int64_t code, x, y, add; /* places in the arena, add = -1: none */
    int64_t a[24];
};

struct call {
    float *arena;
    const void *const *inputs;
    float *const *outputs;
    int64_t lanes, first, count; /* samples of this group */
};

#define POINTER(type, value) ((const type *)(uintptr_t)(value))

/* Samples to lanes and back: n consecutive floats of a sample are `step` floats apart in the group, n1 * n2 such runs. */
struct runs {
    int64_t slot, sample, n, step, n1, outer1, inner1, n2, outer2, inner2;
};

static void transpose_in(float *to, int64_t step, const float *from, int64_t sample, int64_t n, int64_t count) {
    int64_t lane = 0;
    for (; lane + 4 <= count; lane += 4) {
        int64_t i = 0;
        for (; i + 4 <= n; i += 4) {
            const float *f = from + lane * sample + i;
            quad a = *(const quad *)f, b = *(const quad *)(f + sample);
            quad c = *(const quad *)(f + 2 * sample), d = *(const quad *)(f + 3 * sample);
            quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
            quad AB = __builtin_shufflevector(a, b, 2, 6, 3, 7), CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            float *t = to + lane + i * step;
            *(quad *)t = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
            *(quad *)(t + step) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
            *(quad *)(t + 2 * step) = __builtin_shufflevector(AB, CD, 0, 1, 4, 5);
            *(quad *)(t + 3 * step) = __builtin_shufflevector(AB, CD, 2, 3, 6, 7);
        }
        for (; i < n; i++)
            for (int64_t l = lane; l < lane + 4; l++) to[l + i * step] = from[l * sample + i];
    }
    for (; lane < count; lane++)
        for (int64_t i = 0; i < n; i++) to[lane + i * step] = from[lane * sample + i];
}

static void run_load(const struct call *call, const struct op *op) {
    const struct runs *r = (const struct runs *)op->a;
    const float *in = (const float *)call->inputs[r->slot] + call->first * r->sample;
    for (int64_t i = 0; i < r->n1; i++)
        for (int64_t j = 0; j < r->n2; j++) {
            const float *from = in + i * r->outer1 + j * r->outer2;
            float *to = call->arena + op->y + i * r->inner1 + j * r->inner2;
            if (call->lanes == 1 && r->step == 1)
                memcpy(to, from, r->n * sizeof(float));
            else
                transpose_in(to, r->step, from, r->sample, r->n, call->count);
        }
}

static void run_store(const struct call *call, const struct op *op) {
    const struct runs *r = (const struct runs *)op->a;
    float *out = call->outputs[r->slot] + call->first * r->sample;
    for (int64_t i = 0; i < r->n1; i++)
        for (int64_t j = 0; j < r->n2; j++) {
            const float *from = call->arena + op->x + i * r->inner1 + j * r->inner2;
            float *to = out + i * r->outer1 + j * r->outer2;
            for (int64_t lane = 0; lane < call->count; lane++)
                for (int64_t k = 0; k < r->n; k++) to[lane * r->sample + k] = from[lane + k * r->step];
        }
}

struct product_op {
    int64_t weight, chunks, x_at, y_at, mask, y_row, relu;
};

static void run_product(const struct call *call, const struct op *op) {
    const struct product_op *o = (const struct product_op *)op->a;
    const int32_t *y_at = POINTER(int32_t, o->y_at);
    struct product p = {POINTER(struct sparse, o->weight), call->arena + op->x, call->arena + op->y,
                        op->add < 0 ? NULL : call->arena + op->add, o->y_row, o->y_row, POINTER(int32_t, o->x_at),
                        y_at, y_at, POINTER(int32_t, o->mask), o->relu};
    multiply(&p, 0, o->chunks);
}

static void run_product_one(const struct call *call, const struct op *op) {
    const struct product_op *o = (const struct product_op *)op->a;
    multiply_one(POINTER(struct sliced, o->weight), call->arena + op->x, call->arena + op->y, o->y_row,
                 op->add < 0 ? NULL : call->arena + op->add, o->y_row, o->relu);
}

struct affine_op {
    int64_t rows, chunks, at, mask, row, relu, scale, shift;
};

static void run_affine(const struct call *call, const struct op *op) {
    const struct affine_op *o = (const struct affine_op *)op->a;
    const int32_t *at = POINTER(int32_t, o->at), *mask = POINTER(int32_t, o->mask);
    const float *scale = POINTER(float, o->scale), *shift = POINTER(float, o->shift);
    for (int64_t row = 0; row < o->rows; row++) {
        const float *x = call->arena + op->x + row * o->row;
        const float *add = op->add < 0 ? NULL : call->arena + op->add + row * o->row;
        float *y = call->arena + op->y + row * o->row;
        vec s = splat(scale ? scale[row] : 1.0f), t = splat(shift ? shift[row] : 0.0f);
        for (int64_t c = 0; c < o->chunks; c++)
            for (int i = 0; i < PARTS; i++) {
                int64_t place = at[c] + i * WIDTH;
                vec v = load(x + place) * s + t;
                if (add) v += load(add + place);
                if (o->relu) v = relu(v);
                if (mask) v = (vec)((ivec)v & *(const ivec *)(mask + c * CHUNK + i * WIDTH));
                store(y + place, v);
            }
    }
}

struct pool_op {
    int64_t average, channels, x_row, y_row, x_pitch, y_pitch, height, width, out_height, out_width;
    int64_t kernel_y, kernel_x, stride_y, stride_x, pad_y, pad_x, step_y, step_x, count_padding, divisor;
};

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* One output pixel, `lanes` samples (a constant below 16); x is the window's first pixel inside the plane. */
INLINE void pool_few(const int lanes, const struct pool_op *o, const float *x, int64_t rows, int64_t columns, float inverse,
                     float *y) {
    float sum[CHUNK], most[CHUNK];
    for (int l = 0; l < lanes; l++) sum[l] = 0, most[l] = -INFINITY;
    for (int64_t i = 0; i < rows; i += o->step_y)
        for (int64_t j = 0; j < columns; j += o->step_x)
            for (int l = 0; l < lanes; l++) {
                float v = x[(i * o->x_pitch + j) * lanes + l];
                sum[l] += v;
                most[l] = v <= most[l] ? most[l] : v;
            }
    for (int l = 0; l < lanes; l++) y[l] = o->average ? sum[l] * inverse : most[l];
}

INLINE void pool_many(int64_t lanes, const struct pool_op *o, const float *x, int64_t rows, int64_t columns, float inverse,
                      float *y) {
    for (int64_t lane = 0; lane < lanes; lane += WIDTH) {
        vec sum = splat(0), most = splat(-INFINITY);
        for (int64_t i = 0; i < rows; i += o->step_y)
            for (int64_t j = 0; j < columns; j += o->step_x) {
                vec v = load(x + (i * o->x_pitch + j) * lanes + lane);
                sum += v;
                most = either(v <= most, most, v);
            }
        if (o->average) most = sum * splat(inverse);
        store(y + lane, most);
    }
}

static void run_pool(const struct call *call, const struct op *op) {
    const struct pool_op *o = (const struct pool_op *)op->a;
    int64_t lanes = call->lanes;
    for (int64_t channel = 0; channel < o->channels; channel++) {
        const float *x = call->arena + op->x + channel * o->x_row;
        float *y = call->arena + op->y + channel * o->y_row;
        for (int64_t row = 0; row < o->out_height; row++)
            for (int64_t column = 0; column < o->out_width; column++) {
                int64_t top = row * o->stride_y - o->pad_y, left = column * o->stride_x - o->pad_x;
                int64_t bottom = top + o->kernel_y * o->step_y, right = left + o->kernel_x * o->step_x;
                int64_t area = (least(bottom, o->height + o->pad_y) - top) * (least(right, o->width + o->pad_x) - left);
                while (top < 0) top += o->step_y;
                while (left < 0) left += o->step_x;
                int64_t rows = least(bottom, o->height) - top, columns = least(right, o->width) - left;
                if (!o->count_padding) area = rows * columns;
                float inverse = 1.0f / (float)(o->divisor ? o->divisor : area);
                const float *from = x + (top * o->x_pitch + left) * lanes;
                float *to = y + (row * o->y_pitch + column) * lanes;
                switch (lanes) {
                case 1: pool_few(1, o, from, rows, columns, inverse, to); break;
                case 2: pool_few(2, o, from, rows, columns, inverse, to); break;
                case 4: pool_few(4, o, from, rows, columns, inverse, to); break;
                case 8: pool_few(8, o, from, rows, columns, inverse, to); break;
                default: pool_many(lanes, o, from, rows, columns, inverse, to);
                }
            }
    }
}

struct phases_op { /* strided convolution of one sample: one plane for each phase of the stride */
    int64_t channels, x_row, x_pitch, x_height, x_width, y_row, y_pitch, stride_y, stride_x, y_height, y_width;
};

INLINE void pick(float *to, const float *from, int64_t n, int64_t stride, const int lanes) {
    for (int64_t k = 0; k < n; k++)
        for (int l = 0; l < lanes; l++) to[k * lanes + l] = from[k * stride * lanes + l];
}

static void run_phases(const struct call *call, const struct op *op) {
    const struct phases_op *o = (const struct phases_op *)op->a;
    float *y = call->arena + op->y;
    int64_t lanes = call->lanes;
    for (int64_t channel = 0; channel < o->channels; channel++) {
        const float *x = call->arena + op->x + channel * o->x_row;
        for (int64_t i = 0; i < o->stride_y; i++)
            for (int64_t j = 0; j < o->stride_x; j++, y += o->y_row)
                for (int64_t row = 0; row < o->y_height && row * o->stride_y + i < o->x_height; row++) {
                    const float *from = x + ((row * o->stride_y + i) * o->x_pitch + j) * lanes;
                    float *to = y + row * o->y_pitch * lanes;
                    int64_t n = least(o->y_width, (o->x_width - j + o->stride_x - 1) / o->stride_x);
                    switch (lanes) {
                    case 1:
                        if (o->stride_x == 2)
                            pick(to, from, n, 2, 1);
                        else
                            pick(to, from, n, o->stride_x, 1);
                        break;
                    case 2: pick(to, from, n, o->stride_x, 2); break;
                    case 4: pick(to, from, n, o->stride_x, 4); break;
                    default: pick(to, from, n, o->stride_x, 8);
                    }
                }
    }
}

static int64_t run_embed(const struct call *call, const struct op *op) {
    /* a: slot, steps, stride of a sample, stride of a step, tokens, features, table, row of the value */
    const int64_t *a = op->a, *tokens = (const int64_t *)call->inputs[a[0]] + call->first * a[2];
    for (int64_t step = 0; step < a[1]; step++)
        for (int64_t lane = 0; lane < call->count; lane++) {
            int64_t token = tokens[lane * a[2] + step * a[3]];
            if (token < 0 || token >= a[4]) return 1;
            const float *from = POINTER(float, a[6]) + token * a[5];
            float *to = call->arena + op->y + step * call->lanes + lane;
            for (int64_t i = 0; i < a[5]; i++) to[i * a[7]] = from[i];
        }
    return 0;
}

struct recurrent_op {
    int64_t steps, units, gates, input, hidden, hidden_one, x_row, y_row, chunk_steps, reverse;
    int64_t x_gates, h_gates, h, c; /* scratch in the arena */
    int64_t x_at;                   /* chunk places 0, 16, 32, ... */
};

static void run_recurrent(const struct call *call, const struct op *op) {
    const struct recurrent_op *o = (const struct recurrent_op *)op->a;
    int64_t lanes = call->lanes, n = o->units * lanes, gates = o->gates, rows = gates * o->units;
    float *x_gates = call->arena + o->x_gates, *h_gates = call->arena + o->h_gates;
    float *h = call->arena + o->h, *c = call->arena + o->c;
    int64_t x_row = (o->chunk_steps * lanes + CHUNK - 1) / CHUNK * CHUNK;
    const int32_t *at = POINTER(int32_t, o->x_at);
    memset(h, 0, n * sizeof(float));
    memset(c, 0, n * sizeof(float));
    for (int64_t done = 0; done < o->steps; done += o->chunk_steps) {
        int64_t some = least(o->chunk_steps, o->steps - done);
        int64_t start = o->reverse ? o->steps - done - some : done;
        struct product input = {POINTER(struct sparse, o->input), call->arena + op->x + start * lanes, x_gates, NULL,
                                x_row, 0, at, at, NULL, NULL, 0};
        multiply(&input, 0, (some * lanes + CHUNK - 1) / CHUNK);
        for (int64_t i = 0; i < some; i++) {
            int64_t step = o->reverse ? some - 1 - i : i;
            const float *now = x_gates + step * lanes;
            const float *add = op->code == LSTM ? now : NULL;
            if (lanes == 1) {
                multiply_one(POINTER(struct sliced, o->hidden_one), h, h_gates, 1, add, x_row, 0);
            } else {
                struct product hidden = {POINTER(struct sparse, o->hidden), h, h_gates, add, lanes, x_row, at, at, at,
                                         NULL, 0};
                multiply(&hidden, 0, lanes / CHUNK);
            }
            if (op->code == LSTM) {
                lstm_cell(h_gates, c, h, n);
            } else {
                float *packed = h_gates + rows * lanes; /* this step's input part, made contiguous */
                for (int64_t r = 0; r < rows; r++) memcpy(packed + r * lanes, now + r * x_row, lanes * sizeof(float));
                gru_cell(packed, h_gates, h, n);
            }
            float *y = call->arena + op->y + (start + step) * lanes;
            for (int64_t u = 0; u < o->units; u++) memcpy(y + u * o->y_row, h + u * lanes, lanes * sizeof(float));
        }
    }
}

/* What Python fills in for a call; the addresses of inputs, then of outputs, follow. */
struct request {
    int64_t ops, n_ops, arena, batch, lanes, first_group, last_group, n_inputs;
};

/* Returns 0, 1 for a token outside its table, 2 for an unknown operation. */
__attribute__((visibility("default"))) int64_t PUBLIC(gossamer_run)(const struct request *r) {
    const struct op *ops = POINTER(struct op, r->ops);
    float *arena = (float *)(uintptr_t)r->arena;
    const void *const *inputs = (const void *const *)(r + 1);
    float *const *outputs = (float *const *)(inputs + r->n_inputs);
    for (int64_t group = r->first_group; group < r->last_group; group++) {
        int64_t first = group * r->lanes;
        struct call call = {arena, inputs, outputs, r->lanes, first, least(r->lanes, r->batch - first)};
        for (const struct op *op = ops; op < ops + r->n_ops; op++) {
            switch (op->code) {
            case LOAD: run_load(&call, op); break;
            case STORE: run_store(&call, op); break;
            case PRODUCT: run_product(&call, op); break;
            case PRODUCT_ONE: run_product_one(&call, op); break;
            case AFFINE: run_affine(&call, op); break;
            case POOL: run_pool(&call, op); break;
            case PHASES: run_phases(&call, op); break;
            case COPY: memcpy(arena + op->y, arena + op->x, op->a[0] * sizeof(float)); break;
            case EMBED:
                if (run_embed(&call, op)) return 1;
                break;
            case LSTM:
            case GRU: run_recurrent(&call, op); break;
            default: return 2;
            }
        }
    }
    return 0;
}

#if defined(FEATURES)
#if defined(__x86_64__)
#include <cpuid.h>
#endif
/* What this processor and its system can run: 1 AVX2 with FMA, 2 AVX-512. */
__attribute__((visibility("default"))) int64_t gossamer_features(void) {
    int64_t found = 0;
#if defined(__x86_64__)
    unsigned a, b, c, d, state, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    int fma = (c & bit_FMA) != 0;
    __asm__("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (fma && (b & bit_AVX2) && (state & 0x06) == 0x06) found |= 1;
    if (fma && (b & bit_AVX512F) && (b & bit_AVX512VL) && (state & 0xe6) == 0xe6) found |= 2;
#endif
    return found;
}
#endif
