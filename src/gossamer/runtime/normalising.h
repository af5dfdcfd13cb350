/* Normalisation of groups of channels to mean 0 and variance 1: over all pixels together, or pixel by pixel. */
#ifndef GOSSAMER_NORMALISING
#define GOSSAMER_NORMALISING

#include "vectors.h"

struct normalise_op { /* y = relu(normalised x * scale + shift + add) */
    int64_t rows, chunks, at, mask, row, flat;
    int64_t groups, sets; /* chunks `sets` apart are normalised together */
    int64_t together;     /* and so are the pixels inside of a chunk */
    int64_t count;        /* values that one mean is taken of */
    int64_t epsilon;      /* address of one float */
    int64_t scale, shift; /* one a row, or 0 */
    int64_t relu;
};

/* The sum of some rows' values at the chunks of a set, or of their squared distances from `mean`. Of many small sums, so
 * that none of them grows much larger than what is added to it. */
INLINE void sum_rows(const int squares, const struct normalise_op *o, const float *x, int64_t rows, int64_t set,
                     const vec *mean, vec *sums) {
    const int32_t *at = (const int32_t *)(uintptr_t)o->at, *mask = (const int32_t *)(uintptr_t)o->mask;
    for (int64_t row = 0; row < rows; row++, x += o->row)
        for (int64_t c = set; c < o->chunks;) {
            vec part[4][PARTS] = {0};
            int64_t end = least(o->chunks, c + 64 * o->sets);
            for (; c < end; c += 4 * o->sets)
                for (int k = 0; k < 4 && c + k * o->sets < end; k++)
                    for (int i = 0; i < PARTS; i++) {
                        vec v = load(x + at[c + k * o->sets] + i * WIDTH);
                        if (squares) v = (v - mean[i]) * (v - mean[i]);
                        if (mask) v = (vec)((ivec)v & *(const ivec *)(mask + (c + k * o->sets) * CHUNK + i * WIDTH));
                        part[k][i] += v;
                    }
            for (int i = 0; i < PARTS; i++) sums[i] += (part[0][i] + part[1][i]) + (part[2][i] + part[3][i]);
        }
}

/* From sums to means: of each place in a chunk, or of all pixels in it. */
INLINE void to_means(const struct normalise_op *o, int64_t lanes, vec *sums) {
    if (o->together && lanes < CHUNK) {
        float all[CHUNK];
        memcpy(all, sums, sizeof all);
        for (int64_t i = lanes; i < CHUNK; i++) all[i % lanes] += all[i];
        for (int64_t i = lanes; i < CHUNK; i++) all[i] = all[i % lanes];
        memcpy(sums, all, sizeof all);
    }
    for (int i = 0; i < PARTS; i++) sums[i] /= splat((float)o->count);
}

/* 1 / standard deviation */
INLINE void to_factors(const struct normalise_op *o, vec *variance, int n) {
    float epsilon = *(const float *)(uintptr_t)o->epsilon, all[CHUNK];
    memcpy(all, variance, n * sizeof(vec));
    for (int i = 0; i < n * WIDTH; i++) all[i] = 1.0f / sqrtf(all[i] + epsilon);
    memcpy(variance, all, n * sizeof(vec));
}

/* Channels side by side, one sample. */
static void normalise_flat(const struct normalise_op *o, const float *x, const float *add, float *y) {
    const float *scale = (const float *)(uintptr_t)o->scale, *shift = (const float *)(uintptr_t)o->shift;
    for (int64_t begin = 0; begin < o->flat; begin += o->count) {
        vec mean = {0}, factor = {0};
        for (int64_t i = 0; i < o->count; i += WIDTH) mean += take(x + begin + i, o->count - i);
        mean = splat(total(mean) / (float)o->count);
        for (int64_t i = 0; i < o->count; i += WIDTH) {
            float inside[WIDTH] = {0};
            give(inside, take(x + begin + i, o->count - i) - mean, o->count - i);
            factor += load(inside) * load(inside);
        }
        factor = splat(total(factor) / (float)o->count);
        to_factors(o, &factor, 1);
        for (int64_t i = begin, left = o->count; left > 0; i += WIDTH, left -= WIDTH) {
            vec v = (take(x + i, left) - mean) * factor;
            if (scale) v *= take(scale + i, left);
            if (shift) v += take(shift + i, left);
            if (add) v += take(add + i, left);
            give(y + i, o->relu ? relu(v) : v, left);
        }
    }
}

static void normalise(const struct normalise_op *o, int64_t lanes, const float *x, const float *add, float *y) {
    const int32_t *at = (const int32_t *)(uintptr_t)o->at, *mask = (const int32_t *)(uintptr_t)o->mask;
    const float *scale = (const float *)(uintptr_t)o->scale, *shift = (const float *)(uintptr_t)o->shift;
    int64_t rows = o->rows / o->groups;
    if (o->flat) {
        normalise_flat(o, x, add, y);
        return;
    }
    for (int64_t first = 0; first < o->rows; first += rows)
        for (int64_t set = 0; set < o->sets; set++) {
            vec mean[PARTS] = {0}, factor[PARTS] = {0};
            sum_rows(0, o, x + first * o->row, rows, set, NULL, mean);
            to_means(o, lanes, mean);
            sum_rows(1, o, x + first * o->row, rows, set, mean, factor);
            to_means(o, lanes, factor);
            to_factors(o, factor, PARTS);
            for (int64_t row = first; row < first + rows; row++) {
                vec s = splat(scale ? scale[row] : 1.0f), t = splat(shift ? shift[row] : 0.0f);
                for (int64_t c = set; c < o->chunks; c += o->sets)
                    for (int i = 0; i < PARTS; i++) {
                        int64_t place = row * o->row + at[c] + i * WIDTH;
                        vec v = (load(x + place) - mean[i]) * (factor[i] * s) + t;
                        if (add) v += load(add + place);
                        if (o->relu) v = relu(v);
                        if (mask) v = (vec)((ivec)v & *(const ivec *)(mask + c * CHUNK + i * WIDTH));
                        store(y + place, v);
                    }
            }
        }
}

#endif
