/* Samples to lanes and back, four by four. */
#ifndef GOSSAMER_TRANSPOSING
#define GOSSAMER_TRANSPOSING

#include "vectors.h"

INLINE void transpose_square(float *t, int64_t step, const float *f, int64_t sample) {
    quad a = *(const quad *)f, b = *(const quad *)(f + sample);
    quad c = *(const quad *)(f + 2 * sample), d = *(const quad *)(f + 3 * sample);
    quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    quad AB = __builtin_shufflevector(a, b, 2, 6, 3, 7), CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    *(quad *)t = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
    *(quad *)(t + step) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    *(quad *)(t + 2 * step) = __builtin_shufflevector(AB, CD, 0, 1, 4, 5);
    *(quad *)(t + 3 * step) = __builtin_shufflevector(AB, CD, 2, 3, 6, 7);
}

#if defined(__AVX512F__)
/* 16 x 16: bit after bit, the number of a row and the place in it change places. */
INLINE void transpose_chunk(float *t, int64_t step, const float *f, int64_t sample) {
    __m512 v[CHUNK];
    const __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 16
    for (int i = 0; i < CHUNK; i++) v[i] = _mm512_loadu_ps(f + i * sample);
#pragma GCC unroll 4
    for (int bit = 1; bit < CHUNK; bit *= 2) {
        const __mmask16 set = _mm512_test_epi32_mask(place, _mm512_set1_epi32(bit));
        const __m512i by = _mm512_set1_epi32(bit);
        const __m512i low = _mm512_mask_add_epi32(place, set, place, _mm512_set1_epi32(CHUNK - bit));
        const __m512i high = _mm512_mask_add_epi32(_mm512_add_epi32(place, by), set, place, _mm512_set1_epi32(CHUNK));
#pragma GCC unroll 16
        for (int i = 0; i < CHUNK; i++)
            if (!(i & bit)) {
                __m512 a = v[i], b = v[i + bit];
                v[i] = _mm512_permutex2var_ps(a, low, b);
                v[i + bit] = _mm512_permutex2var_ps(a, high, b);
            }
    }
#pragma GCC unroll 16
    for (int i = 0; i < CHUNK; i++) _mm512_storeu_ps(t + i * step, v[i]);
}
#endif

/* to[lane + i * step] = from[lane * sample + i] for `count` lanes and n floats of each. Sixteen lanes at a time: they are
 * a cache line of the result, which is then written whole. */
static void transpose_in(float *to, int64_t step, const float *from, int64_t sample, int64_t n, int64_t count) {
    for (int64_t first = 0; first < count; first += CHUNK) {
        int64_t end = least(first + CHUNK, count), i = 0;
#if defined(__AVX512F__)
        if (end - first == CHUNK)
            for (; i + CHUNK <= n; i += CHUNK) transpose_chunk(to + first + i * step, step, from + first * sample + i, sample);
#endif
        for (; i + 4 <= n; i += 4) {
            int64_t lane = first;
            for (; lane + 4 <= end; lane += 4) transpose_square(to + lane + i * step, step, from + lane * sample + i, sample);
            for (; lane < end; lane++)
                for (int64_t k = i; k < i + 4; k++) to[lane + k * step] = from[lane * sample + k];
        }
        for (; i < n; i++)
            for (int64_t lane = first; lane < end; lane++) to[lane + i * step] = from[lane * sample + i];
    }
}

#endif
