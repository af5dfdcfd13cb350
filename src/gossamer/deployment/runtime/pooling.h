/* Maximum and average over windows; and the other way, one pixel spread out to several. */
#ifndef GOSSAMER_POOLING
#define GOSSAMER_POOLING

#include "vectors.h"

struct pool_op {
    int64_t average, channels, x_row, y_row, x_pitch, y_pitch, height, width, out_height, out_width;
    int64_t kernel_y, kernel_x, stride_y, stride_x, pad_y, pad_x, step_y, step_x, count_padding, divisor;
};

/* The maximum as torch has it: NaN wins and stays. */
INLINE float larger(float a, float b) { return ((b > a) | (b != b)) ? b : a; }

INLINE vec larger_of(vec a, vec b) { return either((b > a) | (b != b), b, a); }

/* One output pixel, `lanes` samples (a constant below 16); x is the window's first pixel inside the plane. */
INLINE void pool_few(const int lanes, const struct pool_op *o, const float *x, int64_t rows, int64_t columns, float inverse,
                     float *y) {
    float out[CHUNK];
    for (int l = 0; l < lanes; l++) out[l] = o->average ? 0 : -INFINITY;
    for (int64_t i = 0; i < rows; i += o->step_y)
        for (int64_t j = 0; j < columns; j += o->step_x) {
            const float *from = x + (i * o->x_pitch + j) * lanes;
            if (o->average)
                for (int l = 0; l < lanes; l++) out[l] += from[l];
            else
                for (int l = 0; l < lanes; l++) out[l] = larger(out[l], from[l]);
        }
    for (int l = 0; l < lanes; l++) y[l] = o->average ? out[l] * inverse : out[l];
}

INLINE void pool_many(int64_t lanes, const struct pool_op *o, const float *x, int64_t rows, int64_t columns, float inverse,
                      float *y) {
    for (int64_t lane = 0; lane < lanes; lane += WIDTH) {
        vec sum = splat(0), most = splat(-INFINITY);
        for (int64_t i = 0; i < rows; i += o->step_y)
            for (int64_t j = 0; j < columns; j += o->step_x) {
                vec v = load(x + (i * o->x_pitch + j) * lanes + lane);
                sum += v;
                most = larger_of(most, v);
            }
        if (o->average) most = sum * splat(inverse);
        store(y + lane, most);
    }
}

typedef int32_t four __attribute__((vector_size(16), aligned(4), may_alias));

INLINE vec together(int64_t average, vec a, vec b) {
    if (average) return a + b;
    return larger_of(a, b);
}

INLINE quad together_quad(int64_t average, quad a, quad b) {
    if (average) return a + b;
    four where = (b > a) | (b != b);
    return (quad)((where & (four)b) | (~where & (four)a));
}

#if WIDTH == 16
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#elif WIDTH == 8
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#else
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7)
#endif

/* The common case for one sample, two by two: rows first, then neighbours; in vectors, then in fours, then singly. */
INLINE void pool_pairs(const int64_t average, const struct pool_op *o, const float *x, float *y) {
    const float share = average ? 0.25f : 1.0f;
    for (int64_t row = 0; row < o->out_height; row++) {
        const float *a = x + 2 * row * o->x_pitch, *b = a + o->x_pitch;
        float *to = y + row * o->y_pitch;
        int64_t i = 0;
        for (; i + WIDTH <= o->out_width; i += WIDTH) {
            vec left = together(average, load(a + 2 * i), load(b + 2 * i));
            vec right = together(average, load(a + 2 * i + WIDTH), load(b + 2 * i + WIDTH));
            vec out = together(average, EVEN(left, right), ODD(left, right));
            store(to + i, out * splat(share));
        }
        for (; i + 4 <= o->out_width; i += 4) {
            quad left = together_quad(average, *(const quad *)(a + 2 * i), *(const quad *)(b + 2 * i));
            quad right = together_quad(average, *(const quad *)(a + 2 * i + 4), *(const quad *)(b + 2 * i + 4));
            quad even = __builtin_shufflevector(left, right, 0, 2, 4, 6);
            quad out = together_quad(average, even, __builtin_shufflevector(left, right, 1, 3, 5, 7));
            *(quad *)(to + i) = out * share;
        }
        for (; i < o->out_width; i++) {
            const float *p = a + 2 * i, *q = b + 2 * i;
            if (average)
                to[i] = share * ((p[0] + q[0]) + (p[1] + q[1]));
            else
                to[i] = larger(larger(p[0], q[0]), larger(p[1], q[1]));
        }
    }
}

static int pools_pairs(const struct pool_op *o) {
    int even = 2 * o->out_height <= o->height && 2 * o->out_width <= o->width;
    int two = o->kernel_y == 2 && o->kernel_x == 2 && o->stride_y == 2 && o->stride_x == 2;
    return even && two && !o->pad_y && !o->pad_x && o->step_y == 1 && o->step_x == 1 && !o->divisor;
}

/* The sum of a window of one sample, in fours: a sum of single numbers waits for each addition. */
static float sum_window(const float *x, int64_t pitch, int64_t rows, int64_t columns) {
    quad sums = {0};
    float rest = 0;
    for (int64_t i = 0; i < rows; i++, x += pitch) {
        int64_t j = 0;
        for (; j + 4 <= columns; j += 4) sums += *(const quad *)(x + j);
        for (; j < columns; j++) rest += x[j];
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]) + rest;
}

static void pool_plane(const struct pool_op *o, int64_t lanes, const float *x, float *y) {
    if (lanes == 1 && pools_pairs(o)) {
        if (o->average)
            pool_pairs(1, o, x, y);
        else
            pool_pairs(0, o, x, y);
        return;
    }
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
            if (lanes == 1 && o->average && o->step_y == 1 && o->step_x == 1) {
                *to = inverse * sum_window(from, o->x_pitch, rows, columns);
                continue;
            }
            switch (lanes) {
            case 1: pool_few(1, o, from, rows, columns, inverse, to); break;
            case 2: pool_few(2, o, from, rows, columns, inverse, to); break;
            case 4: pool_few(4, o, from, rows, columns, inverse, to); break;
            case 8: pool_few(8, o, from, rows, columns, inverse, to); break;
            default: pool_many(lanes, o, from, rows, columns, inverse, to);
            }
        }
}

struct spread_op { /* copies: a pixel is repeated; else each comes from the plane of its phase */
    int64_t channels, x_row, y_row, x_pitch, y_pitch, height, width, factor_y, factor_x, copies;
};

INLINE void place_apart(const int lanes, float *to, const float *from, int64_t n, int64_t factor) {
    for (int64_t k = 0; k < n; k++)
        for (int l = 0; l < lanes; l++) to[k * factor * lanes + l] = from[k * lanes + l];
}

static void spread(const struct spread_op *o, int64_t lanes, const float *x, float *y) {
    for (int64_t channel = 0; channel < o->channels; channel++, y += o->y_row)
        for (int64_t row = 0; row < o->height; row++)
            for (int64_t phase = 0; phase < o->factor_x; phase++) {
                int64_t plane = o->copies ? channel
                                          : (channel * o->factor_y + row % o->factor_y) * o->factor_x + phase;
                const float *from = x + plane * o->x_row + row / o->factor_y * o->x_pitch * lanes;
                float *to = y + (row * o->y_pitch + phase) * lanes;
                int64_t n = (o->width - phase + o->factor_x - 1) / o->factor_x;
                switch (lanes) {
                case 1: place_apart(1, to, from, n, o->factor_x); break;
                case 2: place_apart(2, to, from, n, o->factor_x); break;
                case 4: place_apart(4, to, from, n, o->factor_x); break;
                case 8: place_apart(8, to, from, n, o->factor_x); break;
                default:
                    for (int64_t k = 0; k < n; k++)
                        memcpy(to + k * o->factor_x * lanes, from + k * lanes, lanes * sizeof(float));
                }
            }
}

#endif
