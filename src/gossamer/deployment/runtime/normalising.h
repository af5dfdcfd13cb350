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
    int64_t scale, shift; /* one per row, or 0 */
    int64_t relu;
    int64_t centred; /* or no mean is subtracted: flat, or all channels of each pixel */
};

/* Sums of values and of their squares, each counted from something near the mean: a large mean then takes no digits from
 * the variance, and what the mean itself was rounded by is found. */
struct sums {
    vec values[PARTS], squares[PARTS];
};

#define TURNS (WIDTH / 4) /* partial sums that consecutive chunks add to, so that additions do not wait for each other */
#define SOME 64           /* chunks of which sums are made: none grows much larger than what is added to it */

INLINE void add_chunk(const int squares, const float *x, const int32_t *mask, const vec *from, struct sums *s) {
    for (int i = 0; i < PARTS; i++) {
        vec v = load(x + i * WIDTH) - from[i];
        if (mask) v = (vec)((ivec)v & *(const ivec *)(mask + i * WIDTH));
        s->values[i] += v;
        if (squares) s->squares[i] += v * v;
    }
}

/* Some rows at the chunks of a set. */
INLINE struct sums sum_rows(const int squares, const struct normalise_op *o, const float *x, int64_t rows, int64_t set,
                            const vec *from) {
    const int32_t *at = (const int32_t *)(uintptr_t)o->at, *mask = (const int32_t *)(uintptr_t)o->mask;
    const int64_t step = o->sets;
    struct sums all = {0};
    for (int64_t row = 0; row < rows; row++, x += o->row)
        for (int64_t c = set; c < o->chunks;) {
            struct sums part[TURNS] = {0};
            int64_t end = least(o->chunks, c + SOME * step);
            for (; c + (TURNS - 1) * step < end; c += TURNS * step)
                for (int k = 0; k < TURNS; k++) {
                    int64_t one = c + k * step;
                    add_chunk(squares, x + at[one], mask ? mask + one * CHUNK : NULL, from, part + k);
                }
            for (; c < end; c += step) add_chunk(squares, x + at[c], mask ? mask + c * CHUNK : NULL, from, part);
            for (int k = 0; k < TURNS; k++)
                for (int i = 0; i < PARTS; i++) {
                    all.values[i] += part[k].values[i];
                    all.squares[i] += part[k].squares[i];
                }
        }
    return all;
}

/* From sums to means: of each place in a chunk, or of all its pixels. */
INLINE void to_means(const struct normalise_op *o, int64_t lanes, vec *sums) {
    if (o->together && lanes < CHUNK) {
        float all[CHUNK];
        memcpy(all, sums, sizeof all);
        for (int64_t n = CHUNK / 2; n >= lanes; n /= 2)
            for (int64_t i = 0; i < n; i++) all[i] += all[i + n];
        for (int64_t n = lanes; n < CHUNK; n *= 2) memcpy(all + n, all, n * sizeof(float));
        memcpy(sums, all, sizeof all);
    }
    for (int i = 0; i < PARTS; i++) sums[i] /= splat((float)o->count);
}

/* 1 / standard deviation, of mean and mean square */
INLINE vec factor_of(const struct normalise_op *o, vec mean, vec square) {
    float all[WIDTH];
    store(all, square - mean * mean + splat(*(const float *)(uintptr_t)o->epsilon));
    for (int i = 0; i < WIDTH; i++) all[i] = 1.0f / sqrtf(all[i]);
    return load(all);
}

/* Channels side by side, one sample. */
static void normalise_flat(const struct normalise_op *o, const float *x, const float *add, float *y) {
    const float *scale = (const float *)(uintptr_t)o->scale, *shift = (const float *)(uintptr_t)o->shift;
    const int64_t n = o->count;
    for (int64_t begin = 0; begin < o->flat; begin += n) {
        vec near = {0}, value = {0}, square = {0};
        for (int64_t i = 0; o->centred && i < n; i += WIDTH) near += take(x + begin + i, n - i);
        near = splat(total(near) / (float)n);
        for (int64_t i = 0; i < n; i += WIDTH) {
            float inside[WIDTH] = {0};
            give(inside, take(x + begin + i, n - i) - near, n - i);
            value += load(inside);
            square += load(inside) * load(inside);
        }
        vec mean = splat(o->centred ? total(value) / (float)n : 0.0f);
        vec factor = factor_of(o, mean, splat(total(square) / (float)n));
        for (int64_t i = begin, left = n; left > 0; i += WIDTH, left -= WIDTH) {
            vec v = (take(x + i, left) - near - mean) * factor;
            if (scale) v *= take(scale + i, left);
            if (shift) v += take(shift + i, left);
            if (add) v += take(add + i, left);
            give(y + i, o->relu ? relu(v) : v, left);
        }
    }
}

/* Pixel by pixel, all channels together: some neighbouring chunks at a time, whose sums stay in registers. */
#define BESIDE (8 / PARTS ? 8 / PARTS : 1)

INLINE void normalise_pixels(const int chunks, const struct normalise_op *o, const float *x, const float *add, float *y,
                             int64_t first) {
    const int32_t *at = (const int32_t *)(uintptr_t)o->at, *mask = (const int32_t *)(uintptr_t)o->mask;
    const float *scale = (const float *)(uintptr_t)o->scale, *shift = (const float *)(uintptr_t)o->shift;
    const int64_t rows = o->rows, row_size = o->row, positive = o->relu;
    const vec count = splat((float)o->count);
    vec near[BESIDE * PARTS], mean[BESIDE * PARTS], square[BESIDE * PARTS];
    int64_t place[BESIDE];
    for (int c = 0; c < chunks; c++) place[c] = at[first + c];
    for (int i = 0; i < chunks * PARTS; i++) near[i] = mean[i] = square[i] = (vec){0};
    for (int64_t begin = 0; o->centred && begin < rows; begin += SOME) { /* sums of sums: none grows much larger than what is added */
        vec some[BESIDE * PARTS];
        for (int i = 0; i < chunks * PARTS; i++) some[i] = (vec){0};
        for (int64_t row = begin; row < least(rows, begin + SOME); row++)
            for (int i = 0; i < chunks * PARTS; i++)
                some[i] += load(x + row * row_size + place[i / PARTS] + i % PARTS * WIDTH);
        for (int i = 0; i < chunks * PARTS; i++) near[i] += some[i];
    }
    for (int i = 0; i < chunks * PARTS; i++) near[i] /= count;
    for (int64_t begin = 0; begin < rows; begin += SOME) {
        vec some[BESIDE * PARTS], squares[BESIDE * PARTS];
        for (int i = 0; i < chunks * PARTS; i++) some[i] = squares[i] = (vec){0};
        for (int64_t row = begin; row < least(rows, begin + SOME); row++)
            for (int i = 0; i < chunks * PARTS; i++) {
                vec v = load(x + row * row_size + place[i / PARTS] + i % PARTS * WIDTH) - near[i];
                some[i] += v;
                squares[i] += v * v;
            }
        for (int i = 0; i < chunks * PARTS; i++) {
            mean[i] += some[i];
            square[i] += squares[i];
        }
    }
    for (int i = 0; i < chunks * PARTS; i++) {
        mean[i] = mean[i] / splat(o->centred ? (float)o->count : INFINITY);
        square[i] = factor_of(o, mean[i], square[i] / count);
    }
    for (int64_t row = 0; row < rows; row++) {
        vec by = splat(scale ? scale[row] : 1.0f), more = splat(shift ? shift[row] : 0.0f);
        for (int c = 0; c < chunks; c++)
            for (int i = 0; i < PARTS; i++) {
                int64_t here = row * row_size + place[c] + i * WIDTH;
                vec v = load(x + here) - near[c * PARTS + i] - mean[c * PARTS + i]; /* in two steps, as their sum rounds */
                v = v * (square[c * PARTS + i] * by) + more;
                if (add) v += load(add + here);
                if (positive) v = relu(v);
                if (mask) v = (vec)((ivec)v & *(const ivec *)(mask + (first + c) * CHUNK + i * WIDTH));
                store(y + here, v);
            }
    }
}

static void normalise(const struct normalise_op *o, int64_t lanes, const float *x, const float *add, float *y) {
    const int32_t *at = (const int32_t *)(uintptr_t)o->at, *mask = (const int32_t *)(uintptr_t)o->mask;
    const float *scale = (const float *)(uintptr_t)o->scale, *shift = (const float *)(uintptr_t)o->shift;
    const int64_t rows = o->rows / o->groups, chunks = o->chunks, sets = o->sets, positive = o->relu;
    if (o->flat) {
        normalise_flat(o, x, add, y);
        return;
    }
    if (!o->together && o->groups == 1) {
        int64_t first = 0;
        for (; first + BESIDE <= chunks; first += BESIDE) normalise_pixels(BESIDE, o, x, add, y, first);
        for (; BESIDE > 4 && first + 4 <= chunks; first += 4) normalise_pixels(4, o, x, add, y, first);
        for (; first < chunks; first++) normalise_pixels(1, o, x, add, y, first);
        return;
    }
    for (int64_t first = 0; first < o->rows; first += rows)
        for (int64_t set = 0; set < sets; set++) {
            const vec zeros[PARTS] = {0};
            struct sums near = sum_rows(0, o, x + first * o->row, rows, set, zeros);
            to_means(o, lanes, near.values);
            struct sums mean = sum_rows(1, o, x + first * o->row, rows, set, near.values);
            to_means(o, lanes, mean.values);
            to_means(o, lanes, mean.squares);
            vec factor[PARTS];
            for (int i = 0; i < PARTS; i++) factor[i] = factor_of(o, mean.values[i], mean.squares[i]);
            for (int64_t row = first; row < first + rows; row++) {
                vec by[PARTS], more[PARTS];
                for (int i = 0; i < PARTS; i++) {
                    by[i] = factor[i] * splat(scale ? scale[row] : 1.0f);
                    more[i] = splat(shift ? shift[row] : 0.0f) - mean.values[i] * by[i];
                }
                for (int64_t c = set; c < chunks; c += sets)
                    for (int i = 0; i < PARTS; i++) {
                        int64_t place = row * o->row + at[c] + i * WIDTH;
                        vec v = (load(x + place) - near.values[i]) * by[i] + more[i];
                        if (add) v += load(add + place);
                        if (positive) v = relu(v);
                        if (mask) v = (vec)((ivec)v & *(const ivec *)(mask + c * CHUNK + i * WIDTH));
                        store(y + place, v);
                    }
            }
        }
}

#endif
