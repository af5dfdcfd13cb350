/* Vectors of the instruction set this file is compiled for, and the functions of them that the cells of recurrent
 * layers need. */
#ifndef GOSSAMER_VECTORS
#define GOSSAMER_VECTORS

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
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
#define DENSE_CHUNKS 6
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
#ifndef DENSE_CHUNKS
#define DENSE_CHUNKS 1
#endif
#define CHUNK 16
#define ROWS 4
#define PARTS (CHUNK / WIDTH)
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
INLINE vec splat(float f) { return f - (vec){0}; }
INLINE vec either(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

INLINE float total(vec v) {
#if defined(__aarch64__)
    return vaddvq_f32((float32x4_t)v);
#else
    float sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += v[i];
    return sum;
#endif
}

/* NaN stays NaN, as in torch. */
INLINE vec relu(vec v) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps(_mm512_setzero_ps(), (__m512)v);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps(_mm256_setzero_ps(), (__m256)v);
#elif defined(__aarch64__)
    return (vec)vmaxq_f32((float32x4_t)v, vdupq_n_f32(0));
#else
    return (vec)(~(v < (vec){0}) & (ivec)v);
#endif
}

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

/* log(1 + x) for x from 0 to 1: 2 artanh(x / (2 + x)), of which the series is 2e-8 relative. */
INLINE vec logarithm_of_more(vec x) {
    vec s = x / (splat(2.0f) + x), q = s * s;
    vec y = splat(2.0f / 13);
    y = y * q + splat(2.0f / 11);
    y = y * q + splat(2.0f / 9);
    y = y * q + splat(2.0f / 7);
    y = y * q + splat(2.0f / 5);
    y = y * q + splat(2.0f / 3);
    y = y * q + splat(2.0f);
    return y * s;
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

/* The sums of a layer without gates, input and state together. */
static void plain_cell(const float *sums, int positive, float *hidden, int64_t n) {
    for (int64_t i = 0; i < n; i += WIDTH) {
        vec v = take(sums + i, n - i);
        give(hidden + i, positive ? relu(v) : hyperbolic(v), n - i);
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

#endif
