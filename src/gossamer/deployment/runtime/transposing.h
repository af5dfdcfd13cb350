/* Samples to lanes and back, four by four. */
#ifndef GOSSAMER_TRANSPOSING
#define GOSSAMER_TRANSPOSING

#include "vectors.h"

/* to[lane + i * step] = from[lane * sample + i] for `count` lanes and n floats of each. */
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

#endif
