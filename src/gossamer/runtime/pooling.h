/* Maximum and average over windows. */
#ifndef GOSSAMER_POOLING
#define GOSSAMER_POOLING

#include "vectors.h"

struct pool_op {
    int64_t average, channels, x_row, y_row, x_pitch, y_pitch, height, width, out_height, out_width;
    int64_t kernel_y, kernel_x, stride_y, stride_x, pad_y, pad_x, step_y, step_x, count_padding, divisor;
};

/* The maximum as torch has it: NaN wins and stays. */
INLINE float larger(float a, float b) { return (b > a) | (b != b) ? b : a; }

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
                most = either((v > most) | (v != v), v, most);
            }
        if (o->average) most = sum * splat(inverse);
        store(y + lane, most);
    }
}

/* The common case for one sample, two by two: simple enough for the compiler to make vectors of it. */
static void pool_pairs(const struct pool_op *o, const float *x, float *y) {
    for (int64_t row = 0; row < o->out_height; row++) {
        const float *a = x + 2 * row * o->x_pitch, *b = a + o->x_pitch;
        float *to = y + row * o->y_pitch;
        if (o->average)
            for (int64_t i = 0; i < o->out_width; i++)
                to[i] = 0.25f * (a[2 * i] + a[2 * i + 1] + b[2 * i] + b[2 * i + 1]);
        else
            for (int64_t i = 0; i < o->out_width; i++)
                to[i] = larger(larger(a[2 * i], a[2 * i + 1]), larger(b[2 * i], b[2 * i + 1]));
    }
}

static int pools_pairs(const struct pool_op *o) {
    int even = 2 * o->out_height <= o->height && 2 * o->out_width <= o->width;
    int two = o->kernel_y == 2 && o->kernel_x == 2 && o->stride_y == 2 && o->stride_x == 2;
    return even && two && !o->pad_y && !o->pad_x && o->step_y == 1 && o->step_x == 1 && !o->divisor;
}

static void pool_plane(const struct pool_op *o, int64_t lanes, const float *x, float *y) {
    if (lanes == 1 && pools_pairs(o)) {
        pool_pairs(o, x, y);
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
            switch (lanes) {
            case 1: pool_few(1, o, from, rows, columns, inverse, to); break;
            case 2: pool_few(2, o, from, rows, columns, inverse, to); break;
            case 4: pool_few(4, o, from, rows, columns, inverse, to); break;
            case 8: pool_few(8, o, from, rows, columns, inverse, to); break;
            default: pool_many(lanes, o, from, rows, columns, inverse, to);
            }
        }
}

#endif
