/* Functions of single values (activations other than ReLU, products of two values), and softmax over channels. */
#ifndef GOSSAMER_POINTWISE
#define GOSSAMER_POINTWISE

#include "vectors.h"

enum { IDENTITY, CLAMP, LEAKY, SIGMOID, TANH, SILU, GELU, GELU_TANH, HARD_SIGMOID, HARD_SWISH, ELU, SOFTPLUS,
       RECIPROCAL, DIFFERS, HIDES };

struct pointwise_op {
    int64_t function, rows, chunks, at, mask, row, flat; /* flat: number of consecutive floats, without chunks */
    int64_t slopes;                                      /* one per row, or 0 */
    int64_t by, by_row, by_at, repeats;                  /* second factor; -1: none. repeats: one pixel for all */
    int64_t parameters;                                  /* address of two floats */
};

INLINE vec clamped(vec v, float low, float high) {
    v = either(v < splat(low), splat(low), v);
    return either(v > splat(high), splat(high), v);
}

/* x * (1 + erf(x / sqrt 2)) / 2, with a rational function for erf up to 3.9, above which it is 1: 4e-7 absolute. */
INLINE vec gaussian_linear(vec x) {
    static const float above[] = {4.530745557e-08f, 1.270394660e-05f, 3.391368664e-04f,
                                  9.363328107e-03f, 6.786156446e-02f, 7.978844643e-01f};
    static const float below[] = {1.194709171e-06f, 7.385866775e-05f, 1.888655592e-03f,
                                  2.868959866e-02f, 2.517177463e-01f, 1.0f};
    vec low = splat(-5.5154330f), high = splat(5.5154330f);
    x = either(x < low, low, x); /* far out the result is 0, which the difference of 1 and erf is not quite */
    vec v = either(x > high, high, x), square = v * v, p = splat(above[0]), q = splat(below[0]);
    for (int i = 1; i < 6; i++) {
        p = p * square + splat(above[i]);
        q = q * square + splat(below[i]);
    }
    return splat(0.5f) * x * (splat(1.0f) + v * p / q);
}

INLINE vec apply(int64_t function, vec v, const float *p, vec slope) {
    vec half = splat(0.5f), one = splat(1.0f);
    switch (function) {
    case CLAMP: return clamped(v, p[0], p[1]);
    case LEAKY: return either(v < (vec){0}, v * slope, v);
    case SIGMOID: return sigmoid(v);
    case TANH: return hyperbolic(v);
    case SILU: return v * sigmoid(v);
    case GELU: return gaussian_linear(v);
    case GELU_TANH: return v * sigmoid(splat(1.59576912160f) * (v + splat(0.044715f) * v * v * v));
    case HARD_SIGMOID: return clamped(v * splat(1.0f / 6) + half, 0.0f, 1.0f);
    case HARD_SWISH: return v * clamped(v * splat(1.0f / 6) + half, 0.0f, 1.0f);
    case ELU: return either(v > (vec){0}, v, splat(p[0]) * (exponential(v) - one));
    case SOFTPLUS: {
        vec z = v * splat(p[0]), away = (vec)((ivec)z | (int32_t)0x80000000); /* -|z|, which cannot overflow */
        return either(z > splat(p[1]), v, (relu(z) + logarithm_of_more(exponential(away))) / splat(p[0]));
    }
    case RECIPROCAL: return one / v;
    case DIFFERS: return either(v == splat(p[0]), (vec){0}, one);
    case HIDES: return either(v == (vec){0}, splat(-INFINITY), (vec){0}); /* keys that have no part in attention */
    default: return v;
    }
}

static void pointwise(const struct pointwise_op *o, int64_t lanes, const float *x, const float *by, float *y) {
    const int32_t *at = (const int32_t *)(uintptr_t)o->at, *mask = (const int32_t *)(uintptr_t)o->mask;
    const int32_t *by_at = (const int32_t *)(uintptr_t)o->by_at;
    const float *slopes = (const float *)(uintptr_t)o->slopes, *p = (const float *)(uintptr_t)o->parameters;
    for (int64_t i = 0; i < o->flat; i += WIDTH) {
        int64_t left = o->flat - i;
        vec v = apply(o->function, take(x + i, left), p, slopes ? take(slopes + i, left) : (vec){0});
        if (by) v *= o->by_row ? take(by + i, left) : splat(*by);
        give(y + i, v, left);
    }
    for (int64_t row = 0; !o->flat && row < o->rows; row++) {
        const float *from = x + row * o->row, *factor = by ? by + row * o->by_row : NULL;
        float *to = y + row * o->row, same[CHUNK];
        vec slope = splat(slopes ? slopes[row] : 0.0f);
        if (factor && o->repeats && lanes < CHUNK) { /* the same few samples again and again in every chunk */
            for (int i = 0; i < CHUNK; i++) same[i] = factor[i % lanes];
            factor = same;
        }
        for (int64_t c = 0; c < o->chunks; c++)
            for (int i = 0; i < PARTS; i++) {
                int64_t place = at[c] + i * WIDTH;
                vec v = apply(o->function, load(from + place), p, slope);
                if (factor) v *= load(factor + (by_at ? by_at[c] : 0) + i * WIDTH);
                if (mask) v = (vec)((ivec)v & *(const ivec *)(mask + c * CHUNK + i * WIDTH));
                store(to + place, v);
            }
    }
}

struct softmax_op {
    int64_t rows, chunks, at, mask, row, flat, logarithm;
};

static void softmax_flat(const struct softmax_op *o, const float *x, float *y) {
    float most = -INFINITY, sum = 0.0f;
    for (int64_t i = 0; i < o->flat; i++) most = x[i] > most ? x[i] : most;
    for (int64_t i = 0; i < o->flat; i++) sum += expf(x[i] - most);
    for (int64_t i = 0; i < o->flat; i++) y[i] = o->logarithm ? x[i] - most - logf(sum) : expf(x[i] - most) / sum;
}

static void softmax(const struct softmax_op *o, const float *x, float *y) {
    const int32_t *at = (const int32_t *)(uintptr_t)o->at, *mask = (const int32_t *)(uintptr_t)o->mask;
    if (o->flat) {
        softmax_flat(o, x, y);
        return;
    }
    for (int64_t c = 0; c < o->chunks; c++)
        for (int i = 0; i < PARTS; i++) {
            const float *from = x + at[c] + i * WIDTH;
            float *to = y + at[c] + i * WIDTH;
            vec most = load(from), sum = {0};
            for (int64_t row = 1; row < o->rows; row++) {
                vec v = load(from + row * o->row);
                most = either(v > most, v, most);
            }
            for (int64_t row = 0; row < o->rows; row++) sum += exponential(load(from + row * o->row) - most);
            float sums[WIDTH];
            store(sums, sum);
            for (int k = 0; k < WIDTH; k++) sums[k] = logf(sums[k]);
            vec shift = most + load(sums);
            for (int64_t row = 0; row < o->rows; row++) {
                vec v = load(from + row * o->row);
                v = o->logarithm ? v - shift : exponential(v - most) / sum;
                if (mask) v = (vec)((ivec)v & *(const ivec *)(mask + c * CHUNK + i * WIDTH));
                store(to + row * o->row, v);
            }
        }
}

#endif
