/* A weight times one vector, four ways; which is fastest depends on the processor, the caches and the zeros. */
#ifndef GOSSAMER_ONE_VECTOR
#define GOSSAMER_ONE_VECTOR

#include "vectors.h"

enum { GATHER, LOADS, WINDOWS, WHOLE, INT8 };

/* Where the sums go: y[row] = relu(sum + bias[row] + add[row]). */
struct target {
    float *y;
    const float *add; /* or NULL */
    int64_t y_row, add_row, relu;
};

INLINE void finish(const struct target *t, const float *bias, int64_t row, float sum) {
    float s = sum + bias[row] + (t->add ? t->add[row * t->add_row] : 0);
    t->y[row * t->y_row] = t->relu && s < 0 ? 0 : s;
}

INLINE void finish_slice(const struct target *t, const float *bias, const int32_t *order, const float *sum) {
    for (int i = 0; i < CHUNK; i++) {
        if (order[i] < 0) break;
        finish(t, bias, order[i], sum[i]);
    }
}

/* Gather: 16 rows of similar length at a time, lane by lane (sliced ELLPACK). */
struct sliced {
    int64_t slices;
    const int64_t *starts; /* first step of each slice */
    const uint16_t *near;  /* [step][16], or NULL */
    const int32_t *far;
    const float *weights; /* [step][16] */
    const int32_t *order; /* row of each lane, -1 where there is none */
    const float *bias;    /* by row */
};

#if defined(__AVX2__)
#if defined(__AVX512F__)
INLINE __m512 gather(const struct sliced *w, const int near, const float *x, int64_t step) {
    __m512i at = near ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(w->near + step * CHUNK)))
                      : _mm512_loadu_si512(w->far + step * CHUNK);
    return _mm512_mul_ps(_mm512_loadu_ps(w->weights + step * CHUNK), _mm512_i32gather_ps(at, x, 4));
}
#else
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
#else
    __m256 a = _mm256_setzero_ps(), b = a;
    for (; begin < end; begin++) {
        a = _mm256_add_ps(a, gather(w, near, x, begin * CHUNK));
        b = _mm256_add_ps(b, gather(w, near, x, begin * CHUNK + 8));
    }
    _mm256_storeu_ps(sum, a);
    _mm256_storeu_ps(sum + 8, b);
#endif
}

static void multiply_gather(const struct sliced *w, const float *x, const struct target *t) {
    for (int64_t slice = 0; slice < w->slices; slice++) {
        float sum[CHUNK];
        if (w->near)
            sum_slice(w, 1, x, w->starts[slice], w->starts[slice + 1], sum);
        else
            sum_slice(w, 0, x, w->starts[slice], w->starts[slice + 1], sum);
        finish_slice(t, w->bias, w->order + slice * CHUNK, sum);
    }
}
#endif

/* Loads: the same, for processors whose gather is slower than as many plain loads. */
INLINE void load_slice(const struct sliced *w, const int near, const float *x, int64_t begin, int64_t end, float *sum) {
#define AT(k) x[near ? (int32_t)w->near[k] : w->far[k]]
    quad total[4] = {{0}};
    for (int64_t k = begin * CHUNK; k < end * CHUNK; k += CHUNK)
        for (int i = 0; i < 4; i++) {
            int64_t at = k + 4 * i;
            total[i] += *(const quad *)(w->weights + at) * (quad){AT(at), AT(at + 1), AT(at + 2), AT(at + 3)};
        }
    memcpy(sum, total, sizeof total);
#undef AT
}

static void multiply_loads(const struct sliced *w, const float *x, const struct target *t) {
    for (int64_t slice = 0; slice < w->slices; slice++) {
        float sum[CHUNK];
        if (w->near)
            load_slice(w, 1, x, w->starts[slice], w->starts[slice + 1], sum);
        else
            load_slice(w, 0, x, w->starts[slice], w->starts[slice + 1], sum);
        finish_slice(t, w->bias, w->order + slice * CHUNK, sum);
    }
}

/* Windows: sixteen rows walk over x together, 32 values of which are in two registers; in a step each row that has a
 * weight inside the window takes one. No gather, but places without a weight (0 there) cost as much as those with. */
struct windowed {
    int64_t slices;
    const int64_t *starts; /* first step of each slice */
    const int32_t *at;     /* first value of each step's window */
    const uint8_t *picks;  /* [step][16]: place in the window */
    const float *weights;  /* [step][16] */
    const int32_t *order;
    const float *bias;
};

#if defined(__AVX512F__)
INLINE __m512 step_of(const struct windowed *w, const float *x, int64_t step, __m512 sum) {
    const float *from = x + w->at[step];
    __m512i pick = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w->picks + step * CHUNK)));
    __m512 weight = _mm512_loadu_ps(w->weights + step * CHUNK);
    __asm__("" : "+v"(weight)); /* stays in its register: gcc would load it twice, and loads are what this waits for */
    __m512 value = _mm512_permutex2var_ps(_mm512_loadu_ps(from), pick, _mm512_loadu_ps(from + 16));
    /* What a row does not take must not reach it, were it infinite. */
    __mmask16 taken = _mm512_test_epi32_mask(_mm512_castps_si512(weight), _mm512_castps_si512(weight));
    return _mm512_mask3_fmadd_ps(weight, value, sum, taken);
}
#endif

static void multiply_windows(const struct windowed *w, const float *x, const struct target *t) {
    for (int64_t slice = 0; slice < w->slices; slice++) {
        int64_t step = w->starts[slice], end = w->starts[slice + 1];
        float sum[CHUNK] = {0};
#if defined(__AVX512F__)
        __m512 a = _mm512_setzero_ps(), b = a, c = a, d = a;
        for (; step + 4 <= end; step += 4) {
            a = step_of(w, x, step, a);
            b = step_of(w, x, step + 1, b);
            c = step_of(w, x, step + 2, c);
            d = step_of(w, x, step + 3, d);
        }
        for (; step < end; step++) a = step_of(w, x, step, a);
        _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
#else
        for (; step < end; step++)
            for (int i = 0; i < CHUNK; i++) {
                float weight = w->weights[step * CHUNK + i];
                if (weight != 0) sum[i] += weight * x[w->at[step] + w->picks[step * CHUNK + i]];
            }
#endif
        finish_slice(t, w->bias, w->order + slice * CHUNK, sum);
    }
}

/* Whole: a dense matrix, zeros and all, for layers that have few of them. */
struct whole {
    int64_t rows, columns;
    const float *weights, *bias;
};

static void multiply_whole(const struct whole *w, const float *x, const struct target *t) {
    for (int64_t row = 0; row < w->rows; row += ROWS) {
        const float *from[ROWS];
        vec sum[ROWS * PARTS];
        for (int r = 0; r < ROWS; r++) from[r] = w->weights + least(row + r, w->rows - 1) * w->columns;
        for (int i = 0; i < ROWS * PARTS; i++) sum[i] = splat(0);
        int64_t k = 0;
        for (; k + CHUNK <= w->columns; k += CHUNK)
            for (int i = 0; i < PARTS; i++) {
                vec value = load(x + k + i * WIDTH);
                for (int r = 0; r < ROWS; r++) sum[r * PARTS + i] += load(from[r] + k + i * WIDTH) * value;
            }
        for (int r = 0; r < ROWS && row + r < w->rows; r++) {
            vec all = sum[r * PARTS];
            for (int i = 1; i < PARTS; i++) all += sum[r * PARTS + i];
            float rest = 0;
            for (int64_t j = k; j < w->columns; j++) rest += from[r][j] * x[j];
            finish(t, w->bias, row + r, total(all) + rest);
        }
    }
}

static void multiply_one(int64_t way, const void *weight, const float *x, const struct target *t) {
    switch (way) {
#if defined(__AVX2__)
    case GATHER: multiply_gather((const struct sliced *)weight, x, t); break;
#else
    case GATHER:
#endif
    case LOADS: multiply_loads((const struct sliced *)weight, x, t); break;
    case WINDOWS: multiply_windows((const struct windowed *)weight, x, t); break;
    default: multiply_whole((const struct whole *)weight, x, t);
    }
}

#endif
