/* Sparse products in int8: values and weights are multiples of a scale, from -127 to 127, and sums are exact.
 *
 * Four consecutive channels of a value lie in one 32-bit word, and so do four weights of a row: one instruction
 * multiplies them and adds the four products (VNNI on x86, the dot product of NEON). A row stores the words in which it
 * has a weight, so zeros that come in blocks of 1x4 are skipped entirely. Words lie like floats: [four channels]
 * [pixel][lane], and what follows is products.h and one_vector.h in words.
 */
#ifndef GOSSAMER_INT8
#define GOSSAMER_INT8

#include "one_vector.h"
#include "products.h"
#include "vectors.h"

typedef int8_t bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));

/* VNNI multiplies unsigned by signed bytes: values are stored with 128 added, and sums start with what that adds. */
#if defined(__AVX512VNNI__)
#define OFFSET_OF_VALUES 128
#else
#define OFFSET_OF_VALUES 0
#endif

INLINE ivec load_words(const int32_t *p) { return *(const ivec *)p; }
INLINE ivec splat_word(int32_t w) { return w - (ivec){0}; }

/* sum + the four products of each word. */
INLINE ivec dot(ivec sum, ivec x, ivec w) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
#elif defined(DOTPROD)
    /* Not by vdotq_s32, as compilers disagree on the flag that allows it. */
    __asm__(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(x), "w"(w));
    return sum;
#else
    for (int k = 0; k < 4; k++) sum += ((x << (24 - 8 * k)) >> 24) * ((w << (24 - 8 * k)) >> 24);
    return sum;
#endif
}

INLINE vec from_to(vec v, float low, float high) {
#if defined(__AVX512F__)
    return (vec)_mm512_min_ps(_mm512_max_ps((__m512)v, (__m512)splat(low)), (__m512)splat(high));
#elif defined(__AVX2__)
    return (vec)_mm256_min_ps(_mm256_max_ps((__m256)v, (__m256)splat(low)), (__m256)splat(high));
#elif defined(__aarch64__)
    return (vec)vminq_f32(vmaxq_f32((float32x4_t)v, (float32x4_t)splat(low)), (float32x4_t)splat(high));
#else
    return either(v > splat(high), splat(high), either(v < splat(low), splat(low), v));
#endif
}

/* The nearest integer that fits a byte in the low byte of each lane; what is above it is not zero. */
INLINE ivec nearest(vec v, vec inverse) {
    return (ivec)(from_to(v * inverse, -128.0f, 127.0f) + splat(12582912.0f)); /* 1.5 * 2^23: adding it rounds */
}

/* Four floats of each lane, as codes in one word. */
INLINE ivec word_of(vec a, vec b, vec c, vec d, vec inverse) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512 high = (__m512)splat(127.0f);
#define CODE(v) _mm512_cvtps_epi32(_mm512_min_ps((__m512)(v * inverse), high)) /* packing limits it from below */
    __m512i ab = _mm512_packs_epi32(CODE(a), CODE(b)), cd = _mm512_packs_epi32(CODE(c), CODE(d));
#undef CODE
    return (ivec)_mm512_shuffle_epi8(_mm512_packs_epi16(ab, cd), order);
#else
    const ivec low = splat_word(255);
    return (nearest(a, inverse) & low) | (nearest(b, inverse) & low) << 8 | (nearest(c, inverse) & low) << 16 |
           nearest(d, inverse) << 24;
#endif
}

/* `count` floats of each plane to words. `phases` planes follow each other for every channel. */
static void quantise_planes(const float *x, int64_t x_plane, int32_t *q, int64_t q_plane, int64_t channels,
                            int64_t phases, int64_t count, float inverse) {
    const vec scale = splat(inverse);
    const ivec flip = splat_word((int32_t)(OFFSET_OF_VALUES * 0x01010101u));
    for (int64_t channel = 0; channel < channels; channel += 4)
        for (int64_t phase = 0; phase < phases; phase++, q += q_plane) {
            const float *from[4]; /* of channels that do not exist, any will do: their weights are 0 */
            for (int k = 0; k < 4; k++) from[k] = x + (least(channel + k, channels - 1) * phases + phase) * x_plane;
            for (int64_t i = 0; i < count; i += WIDTH) {
                ivec word = word_of(load(from[0] + i), load(from[1] + i), load(from[2] + i), load(from[3] + i), scale);
                *(ivec *)(q + i) = word ^ flip;
            }
        }
}

/* One vector, its floats `step` apart. */
static void quantise_vector(const float *x, int8_t *q, int64_t count, int64_t step, float inverse) {
    const vec scale = splat(inverse);
    const ivec flip = splat_word(OFFSET_OF_VALUES);
    int64_t i = 0;
    if (step == 1)
        for (; i + WIDTH <= count; i += WIDTH)
            *(bytes *)(q + i) = __builtin_convertvector(nearest(load(x + i), scale) ^ flip, bytes);
    for (; i < count; i++) q[i] = (int8_t)(nearest(splat(x[i * step]), scale)[0] ^ OFFSET_OF_VALUES);
}

/* Rows of words and where their values lie. */
struct sparse8 {
    int64_t rows;
    const int64_t *starts;
    const int32_t *weights, *totals; /* of the weights of a row */
    const float *scales, *bias;      /* of a sum; what is added after that */
    const uint16_t *near;            /* in chunks, or NULL */
    const int32_t *far;
    const float *inverse; /* of the scale of the values */
};

struct product8 {
    const struct sparse8 *weight;
    const int32_t *x;
    float *y;
    const float *add; /* or NULL */
    int64_t y_row, add_row;
    const int32_t *x_at, *y_at, *add_at;
    const int32_t *mask;
    int64_t relu;
};

INLINE void block8(const int chunks, const int ways, const int near, const struct product8 *p, int64_t first) {
    const int32_t *x[MAX_CHUNKS];
    const float *add[MAX_CHUNKS];
    float *y[MAX_CHUNKS];
    const struct sparse8 w = *p->weight;
    const int64_t y_row = p->y_row, add_row = p->add_row;
    const int32_t *mask = p->mask ? p->mask + first * CHUNK : NULL;
    const int adds = p->add != NULL, positive = p->relu != 0;
    for (int c = 0; c < chunks; c++) {
        x[c] = p->x + p->x_at[first + c];
        y[c] = p->y + p->y_at[first + c];
        add[c] = adds ? p->add + p->add_at[first + c] : NULL;
    }
    int64_t e = 0;
    for (int64_t row = 0; row < w.rows; row++) {
        const int64_t end = w.starts[row + 1];
        ivec sum[MAX_CHUNKS * PARTS], more[3 * MAX_CHUNKS * PARTS];
        for (int i = 0; i < chunks * PARTS; i++) sum[i] = splat_word(-OFFSET_OF_VALUES * w.totals[row]);
        for (int i = 0; i < (ways - 1) * chunks * PARTS; i++) more[i] = (ivec){0};
        for (; e + ways <= end; e += ways)
            for (int k = 0; k < ways; k++) {
                ivec weight = splat_word(w.weights[e + k]);
                ptrdiff_t offset = near ? (ptrdiff_t)w.near[e + k] * CHUNK : (ptrdiff_t)w.far[e + k];
                for (int c = 0; c < chunks; c++)
                    for (int i = 0; i < PARTS; i++) {
                        ivec *to = k == 0 ? &sum[c * PARTS + i] : &more[((k - 1) * chunks + c) * PARTS + i];
                        *to = dot(*to, load_words(x[c] + offset + i * WIDTH), weight);
                    }
            }
        for (int k = 1; k < ways; k++)
            for (int i = 0; i < chunks * PARTS; i++) sum[i] += more[(k - 1) * chunks * PARTS + i];
        for (; e < end; e++) {
            ivec weight = splat_word(w.weights[e]);
            ptrdiff_t offset = near ? (ptrdiff_t)w.near[e] * CHUNK : (ptrdiff_t)w.far[e];
            for (int c = 0; c < chunks; c++)
                for (int i = 0; i < PARTS; i++)
                    sum[c * PARTS + i] = dot(sum[c * PARTS + i], load_words(x[c] + offset + i * WIDTH), weight);
        }
        const vec scale = splat(w.scales[row]), bias = splat(w.bias[row]);
        for (int c = 0; c < chunks; c++)
            for (int i = 0; i < PARTS; i++) {
                vec v = __builtin_convertvector(sum[c * PARTS + i], vec) * scale + bias;
                if (adds) v += load(add[c] + row * add_row + i * WIDTH);
                if (positive) v = relu(v);
                if (mask) v = (vec)((ivec)v & *(const ivec *)(mask + c * CHUNK + i * WIDTH));
                store(y[c] + row * y_row + i * WIDTH, v);
            }
    }
}

#define BLOCK8(n)                                                                                                \
    static __attribute__((noinline)) void far8_##n(const struct product8 *p, int64_t f) { block8(n, WAYS(n), 0, p, f); } \
    static __attribute__((noinline)) void near8_##n(const struct product8 *p, int64_t f) { block8(n, WAYS(n), 1, p, f); }
typedef void (*block8_function)(const struct product8 *, int64_t);
BLOCK8(1)
BLOCK8(2)
#if MAX_CHUNKS == 2
static const block8_function far8_blocks[] = {far8_1, far8_2};
static const block8_function near8_blocks[] = {near8_1, near8_2};
#else
BLOCK8(3)
BLOCK8(4)
#if MAX_CHUNKS == 4
static const block8_function far8_blocks[] = {far8_1, far8_2, far8_3, far8_4};
static const block8_function near8_blocks[] = {near8_1, near8_2, near8_3, near8_4};
#else
BLOCK8(5)
BLOCK8(6)
BLOCK8(7)
BLOCK8(8)
static const block8_function far8_blocks[] = {far8_1, far8_2, far8_3, far8_4, far8_5, far8_6, far8_7, far8_8};
static const block8_function near8_blocks[] = {near8_1, near8_2, near8_3, near8_4, near8_5, near8_6, near8_7, near8_8};
#endif
#endif

static void multiply8(const struct product8 *p, int64_t chunks) {
    const block8_function *blocks = p->weight->near ? near8_blocks : far8_blocks;
    for (int64_t first = 0; first < chunks;) {
        int64_t left = chunks - first;
        int64_t n = left <= MAX_CHUNKS ? left : left < 2 * MAX_CHUNKS ? (left + 1) / 2 : MAX_CHUNKS;
        blocks[n - 1](p, first);
        first += n;
    }
}

/* One vector: sixteen rows walk over the words together, as in `windowed`. */
struct windowed8 {
    int64_t slices;
    const int64_t *starts; /* first step of each slice */
    const int32_t *at;     /* first word of each step's window */
    const uint8_t *picks;  /* [step][16]: place in the window */
    const int32_t *weights; /* [step][16], 0 where a row takes nothing */
    const int32_t *order, *totals;
    const float *scales, *bias, *inverse;
};

INLINE void step8(const struct windowed8 *w, const int32_t *x, int64_t step, ivec *sum) {
    const int32_t *from = x + w->at[step], *weights = w->weights + step * CHUNK;
    const uint8_t *picks = w->picks + step * CHUNK;
#if defined(__AVX512F__)
    __m512i pick = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)picks));
    __m512i word = _mm512_permutex2var_epi32(_mm512_loadu_si512(from), pick, _mm512_loadu_si512(from + 16));
    *sum = dot(*sum, (ivec)word, load_words(weights));
#else
    int32_t words[CHUNK];
    for (int i = 0; i < CHUNK; i++) words[i] = from[picks[i]];
    for (int i = 0; i < PARTS; i++) sum[i] = dot(sum[i], load_words(words + i * WIDTH), load_words(weights + i * WIDTH));
#endif
}

static void multiply_windows8(const struct windowed8 *w, const int32_t *x, const struct target *t) {
    for (int64_t slice = 0; slice < w->slices; slice++) {
        int64_t step = w->starts[slice], end = w->starts[slice + 1];
        ivec sum[4][PARTS] = {{{0}}};
        for (; step + 4 <= end; step += 4)
            for (int k = 0; k < 4; k++) step8(w, x, step + k, sum[k]);
        for (; step < end; step++) step8(w, x, step, sum[0]);
        int32_t all[CHUNK];
        for (int i = 0; i < PARTS; i++) {
            ivec v = (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]);
            memcpy(all + i * WIDTH, &v, sizeof v);
        }
        for (int i = 0; i < CHUNK; i++) {
            int32_t row = w->order[slice * CHUNK + i];
            if (row < 0) break;
            finish(t, w->bias, row, (float)(all[i] - OFFSET_OF_VALUES * w->totals[row]) * w->scales[row]);
        }
    }
}

#endif
