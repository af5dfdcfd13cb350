/* Sparse networks on a CPU: every kernel, and the loop that runs a whole network in one call.
 *
 * Layout. A batch is cut into groups of `lanes` samples (1, 2, 4, 8 or a multiple of 16). A value of a group is stored as
 * [channel][pixel][lane]: planes of pixels, each pixel with its samples side by side. Planes carry zero borders, so a
 * convolution is y[channel][p] = sum over its non-zero weights of w * x[offset + p], one constant offset a weight; a
 * linear layer is the case of one pixel, a layer over a sequence the case of one pixel a time step.
 *
 * Inner loop. Output is made in chunks of 16 floats whose places in the planes are listed by the planner (so strides,
 * borders and odd sizes are its business): a block of chunks stays in registers while all rows of the weight pass by.
 *
 * This file is compiled once for each instruction set (VARIANT names the symbols, the compiler's flags choose the
 * vectors) and knows nothing of Python or torch.
 */
#include "attention.h"
#include "int8.h"
#include "normalising.h"
#include "one_vector.h"
#include "pointwise.h"
#include "pooling.h"
#include "products.h"
#include "transposing.h"
#include "vectors.h"

#include <time.h>

enum {
    LOAD, STORE, PRODUCT, PRODUCT_ONE, AFFINE, POOL, PHASES, COPY, EMBED, LSTM, GRU, PRODUCT_DENSE, POINTWISE, SOFTMAX,
    RNN_TANH, RNN_RELU, SPREAD, SHIFTS, PRODUCT_FOUR, NORMALISE, ATTENTION, CONSTANT, MOVE, TOKENS,
    COLUMN, RECALL, PRODUCT_INT8, PRODUCT_INT8_ONE
};

struct op {
    int64_t code, x, y, add; /* places in the arena, add = -1: none */
    int64_t a[24];
};

struct call {
    float *arena;
    const void *const *inputs;
    float *const *outputs;
    int64_t lanes, first, count; /* samples of this group */
};

#define POINTER(type, value) ((const type *)(uintptr_t)(value))

/* Samples to lanes and back: n consecutive floats of a sample are `step` floats apart in the group, n1 * n2 such runs. */
struct runs {
    int64_t slot, sample, n, step, n1, outer1, inner1, n2, outer2, inner2;
};

/* Long runs go in tiles: neighbouring runs (time steps) lie in the same cache lines of the group. */
#define TILE 512

static void run_load(const struct call *call, const struct op *op) {
    const struct runs *r = (const struct runs *)op->a;
    const float *in = (const float *)call->inputs[r->slot] + call->first * r->sample;
    for (int64_t k = 0; k < r->n; k += TILE)
        for (int64_t i = 0; i < r->n1; i++)
            for (int64_t j = 0; j < r->n2; j++) {
                const float *from = in + i * r->outer1 + j * r->outer2 + k;
                float *to = call->arena + op->y + i * r->inner1 + j * r->inner2 + k * r->step;
                int64_t n = least(TILE, r->n - k);
                if (call->lanes == 1 && r->step == 1)
                    memcpy(to, from, n * sizeof(float));
                else
                    transpose_in(to, r->step, from, r->sample, n, call->count);
            }
}

static void run_store(const struct call *call, const struct op *op) {
    const struct runs *r = (const struct runs *)op->a;
    float *out = call->outputs[r->slot] + call->first * r->sample;
    for (int64_t k = 0; k < r->n; k += TILE)
        for (int64_t i = 0; i < r->n1; i++)
            for (int64_t j = 0; j < r->n2; j++) {
                const float *from = call->arena + op->x + i * r->inner1 + j * r->inner2 + k * r->step;
                float *to = out + i * r->outer1 + j * r->outer2 + k;
                int64_t n = least(TILE, r->n - k);
                if (call->lanes == 1 && r->step == 1)
                    memcpy(to, from, n * sizeof(float));
                else /* the same the other way round: here the lanes are the run, and its floats the samples */
                    for (int64_t s = 0; s < call->count; s += CHUNK)
                        transpose_in(to + s * r->sample, r->sample, from + s, r->step, least(CHUNK, call->count - s), n);
            }
}

struct product_op {
    int64_t weight, chunks, x_at, y_at, mask, y_row, relu;
    int64_t way, from; /* of a product with one vector */
};

static void run_product(const struct call *call, const struct op *op) {
    const struct product_op *o = (const struct product_op *)op->a;
    const int32_t *y_at = POINTER(int32_t, o->y_at);
    struct product p = {POINTER(struct sparse, o->weight), call->arena + op->x, call->arena + op->y,
                        op->add < 0 ? NULL : call->arena + op->add, o->y_row, o->y_row, POINTER(int32_t, o->x_at),
                        y_at, y_at, POINTER(int32_t, o->mask), o->relu};
    if (op->code == PRODUCT_FOUR)
        multiply_four(&p);
    else
        multiply(&p, 0, o->chunks);
}

/* Copies of planes for the shifts of a window, each with the zeros around a plane where that shift meets them: what a
 * product then loads begins with a cache line, and planes need no border and hence no room between their rows. */
struct shifts_op {
    int64_t channels, channel_at, y_row, chunks, from, to, mask_at, masks; /* chunks of the copies of one channel */
};

static void run_shifts(const struct call *call, const struct op *op) {
    const struct shifts_op *o = (const struct shifts_op *)op->a;
    const int32_t *from = POINTER(int32_t, o->from), *to = POINTER(int32_t, o->to);
    const int32_t *mask_at = POINTER(int32_t, o->mask_at), *masks = POINTER(int32_t, o->masks);
    for (int64_t channel = 0; channel < o->channels; channel++) {
        const float *x = call->arena + op->x + POINTER(int32_t, o->channel_at)[channel];
        float *y = call->arena + op->y + channel * o->y_row;
        for (int64_t k = 0; k < o->chunks; k++)
            for (int i = 0; i < CHUNK; i += WIDTH)
                store(y + to[k] + i, (vec)(*(const ivec *)(x + from[k] + i) & *(const ivec *)(masks + mask_at[k] + i)));
    }
}

static void run_product_dense(const struct call *call, const struct op *op) {
    const struct product_op *o = (const struct product_op *)op->a;
    struct dense_product p = {POINTER(struct dense, o->weight), call->arena + op->x, call->arena + op->y,
                              op->add < 0 ? NULL : call->arena + op->add, o->y_row, POINTER(int32_t, o->x_at),
                              POINTER(int32_t, o->y_at), POINTER(int32_t, o->mask), o->relu};
    multiply_dense(&p, o->chunks);
}

static void run_product_one(const struct call *call, const struct op *op) {
    const struct product_op *o = (const struct product_op *)op->a;
    struct target target = {call->arena + op->y, op->add < 0 ? NULL : call->arena + op->add, o->y_row, o->y_row, o->relu};
    multiply_one(o->way, POINTER(void, o->weight), call->arena + op->x + o->from, &target);
}

/* A product in int8 of the planes of x, or of one vector: x is quantised into scratch first. */
struct product8_op {
    int64_t weight, chunks, x_at, y_at, mask, y_row, relu;
    int64_t channels, phases, plane, scratch;
};

static void run_product8(const struct call *call, const struct op *op) {
    const struct product8_op *o = (const struct product8_op *)op->a;
    const struct sparse8 *weight = POINTER(struct sparse8, o->weight);
    const int32_t *y_at = POINTER(int32_t, o->y_at);
    int32_t *words = (int32_t *)(call->arena + o->scratch);
    quantise_planes(call->arena + op->x, o->plane, words, o->plane, o->channels, o->phases, o->plane, *weight->inverse);
    struct product8 p = {weight, words, call->arena + op->y, op->add < 0 ? NULL : call->arena + op->add, o->y_row, o->y_row,
                         POINTER(int32_t, o->x_at), y_at, y_at, POINTER(int32_t, o->mask), o->relu};
    multiply8(&p, o->chunks);
}

static void run_product8_one(const struct call *call, const struct op *op) {
    const struct product8_op *o = (const struct product8_op *)op->a;
    const struct windowed8 *weight = POINTER(struct windowed8, o->weight);
    int32_t *words = (int32_t *)(call->arena + o->scratch);
    struct target target = {call->arena + op->y, op->add < 0 ? NULL : call->arena + op->add, o->y_row, o->y_row, o->relu};
    quantise_vector(call->arena + op->x, (int8_t *)words, o->channels, o->plane, *weight->inverse);
    multiply_windows8(weight, words, &target);
}

struct affine_op {
    int64_t rows, chunks, at, mask, row, relu, scale, shift;
};

static void run_affine(const struct call *call, const struct op *op) {
    const struct affine_op *o = (const struct affine_op *)op->a;
    const int32_t *at = POINTER(int32_t, o->at), *mask = POINTER(int32_t, o->mask);
    const float *scale = POINTER(float, o->scale), *shift = POINTER(float, o->shift);
    for (int64_t row = 0; row < o->rows; row++) {
        const float *x = call->arena + op->x + row * o->row;
        const float *add = op->add < 0 ? NULL : call->arena + op->add + row * o->row;
        float *y = call->arena + op->y + row * o->row;
        vec s = splat(scale ? scale[row] : 1.0f), t = splat(shift ? shift[row] : 0.0f);
        for (int64_t c = 0; c < o->chunks; c++)
            for (int i = 0; i < PARTS; i++) {
                int64_t place = at[c] + i * WIDTH;
                vec v = load(x + place) * s + t;
                if (add) v += load(add + place);
                if (o->relu) v = relu(v);
                if (mask) v = (vec)((ivec)v & *(const ivec *)(mask + c * CHUNK + i * WIDTH));
                store(y + place, v);
            }
    }
}

static void run_normalise(const struct call *call, const struct op *op) {
    const float *add = op->add < 0 ? NULL : call->arena + op->add;
    normalise((const struct normalise_op *)op->a, call->lanes, call->arena + op->x, add, call->arena + op->y);
}

static void run_attention(const struct call *call, const struct op *op) {
    const struct attention_op *o = (const struct attention_op *)op->a;
    attend(o, call->lanes, call->arena, call->arena + op->x, call->arena + op->add, call->arena + op->y);
}

/* Planes of the model, each pixel for all lanes. */
struct constant_op {
    int64_t channels, height, width, row, pitch, planes;
};

static void run_constant(const struct call *call, const struct op *op) {
    const struct constant_op *o = (const struct constant_op *)op->a;
    const float *from = POINTER(float, o->planes);
    for (int64_t channel = 0; channel < o->channels; channel++)
        for (int64_t row = 0; row < o->height; row++, from += o->width) {
            float *to = call->arena + op->y + channel * o->row + row * o->pitch * call->lanes;
            if (call->lanes == 1)
                memcpy(to, from, o->width * sizeof(float));
            else
                for (int64_t i = 0; i < o->width; i++)
                    for (int64_t l = 0; l < call->lanes; l++) to[i * call->lanes + l] = from[i];
        }
}

/* All pixels of a value into one row of another. */
struct move_op {
    int64_t channels, height, width, x_row, x_pitch, y_row;
};

static void run_move(const struct call *call, const struct op *op) {
    const struct move_op *o = (const struct move_op *)op->a;
    const int64_t n = o->width * call->lanes;
    for (int64_t channel = 0; channel < o->channels; channel++)
        for (int64_t row = 0; row < o->height; row++)
            memcpy(call->arena + op->y + channel * o->y_row + row * n,
                   call->arena + op->x + channel * o->x_row + row * o->x_pitch * call->lanes, n * sizeof(float));
}

/* One pixel of planes, [pixel][channel], at the position of a sample. */
static int64_t run_column(const struct call *call, const struct op *op) {
    /* a: slot of the positions, pixels, channels, planes */
    const int64_t *a = op->a, position = ((const int64_t *)call->inputs[a[0]])[call->first];
    if (position < 0 || position >= a[1]) return 1;
    memcpy(call->arena + op->y, POINTER(float, a[3]) + position * a[2], a[2] * sizeof(float));
    return 0;
}

static int64_t run_recall(const struct call *call, const struct op *op) {
    const struct recall_op *o = (const struct recall_op *)op->a;
    const int64_t position = ((const int64_t *)call->inputs[o->positions])[call->first];
    if (position < 0 || position >= o->length) return 1;
    float *memory = (float *)(uintptr_t)call->inputs[o->memory] + call->first * o->sample + o->first;
    recall(o, position, memory, call->arena, call->arena + op->x, call->arena + op->add, call->arena + op->y);
    return 0;
}

/* Tokens as numbers. */
static void run_tokens(const struct call *call, const struct op *op) {
    /* a: slot, steps, stride of a sample, stride of a step */
    const int64_t *a = op->a, *tokens = (const int64_t *)call->inputs[a[0]] + call->first * a[2];
    for (int64_t step = 0; step < a[1]; step++)
        for (int64_t lane = 0; lane < call->count; lane++)
            call->arena[op->y + step * call->lanes + lane] = (float)tokens[lane * a[2] + step * a[3]];
}

static void run_pool(const struct call *call, const struct op *op) {
    const struct pool_op *o = (const struct pool_op *)op->a;
    for (int64_t channel = 0; channel < o->channels; channel++)
        pool_plane(o, call->lanes, call->arena + op->x + channel * o->x_row, call->arena + op->y + channel * o->y_row);
}

static void run_spread(const struct call *call, const struct op *op) {
    spread((const struct spread_op *)op->a, call->lanes, call->arena + op->x, call->arena + op->y);
}

static void run_pointwise(const struct call *call, const struct op *op) {
    const struct pointwise_op *o = (const struct pointwise_op *)op->a;
    const float *by = o->by < 0 ? NULL : call->arena + o->by;
    pointwise(o, call->lanes, call->arena + op->x, by, call->arena + op->y);
}

struct phases_op { /* strided convolution of one sample: one plane for each phase of the stride */
    int64_t channels, x_row, x_pitch, x_height, x_width, y_row, y_pitch, stride_y, stride_x, y_height, y_width;
};

INLINE void pick(float *to, const float *from, int64_t n, int64_t stride, const int lanes) {
    for (int64_t k = 0; k < n; k++)
        for (int l = 0; l < lanes; l++) to[k * lanes + l] = from[k * stride * lanes + l];
}

static void run_phases(const struct call *call, const struct op *op) {
    const struct phases_op *o = (const struct phases_op *)op->a;
    float *y = call->arena + op->y;
    int64_t lanes = call->lanes;
    for (int64_t channel = 0; channel < o->channels; channel++) {
        const float *x = call->arena + op->x + channel * o->x_row;
        for (int64_t i = 0; i < o->stride_y; i++)
            for (int64_t j = 0; j < o->stride_x; j++, y += o->y_row)
                for (int64_t row = 0; row < o->y_height && row * o->stride_y + i < o->x_height; row++) {
                    const float *from = x + ((row * o->stride_y + i) * o->x_pitch + j) * lanes;
                    float *to = y + row * o->y_pitch * lanes;
                    int64_t n = least(o->y_width, (o->x_width - j + o->stride_x - 1) / o->stride_x);
                    switch (lanes) {
                    case 1:
                        if (o->stride_x == 2)
                            pick(to, from, n, 2, 1);
                        else
                            pick(to, from, n, o->stride_x, 1);
                        break;
                    case 2: pick(to, from, n, o->stride_x, 2); break;
                    case 4: pick(to, from, n, o->stride_x, 4); break;
                    default: pick(to, from, n, o->stride_x, 8);
                    }
                }
    }
}

/* Rows of a table become columns: some of them, and some of their features, at a time. */
#define COLUMNS 16
#define AT_ONCE 64

static int64_t run_embed(const struct call *call, const struct op *op) {
    /* a: slot, steps, stride of a sample, stride of a step, tokens, features, table, row of the value */
    const int64_t *a = op->a, *tokens = (const int64_t *)call->inputs[a[0]] + call->first * a[2];
    const int64_t features = a[5], row = a[7], columns = a[1] * call->lanes;
    float *y = call->arena + op->y, some[COLUMNS * AT_ONCE];
    for (int64_t first = 0; first < columns; first += COLUMNS) {
        const float *from[COLUMNS];
        int64_t count = 0, place[COLUMNS];
        for (int64_t column = first; column < least(columns, first + COLUMNS); column++) {
            int64_t step = column / call->lanes, lane = column % call->lanes;
            if (lane >= call->count) continue;
            int64_t token = tokens[lane * a[2] + step * a[3]];
            if (token < 0 || token >= a[4]) return 1;
            from[count] = POINTER(float, a[6]) + token * features;
            place[count++] = column;
        }
        for (int64_t begin = 0; begin < features; begin += AT_ONCE) {
            const int64_t n = least(AT_ONCE, features - begin);
            if (count == COLUMNS) { /* all side by side */
                for (int64_t c = 0; c < count; c++) memcpy(some + c * AT_ONCE, from[c] + begin, n * sizeof(float));
                transpose_in(y + first + begin * row, row, some, AT_ONCE, n, count);
                continue;
            }
            for (int64_t c = 0; c < count; c++)
                for (int64_t i = begin; i < begin + n; i++) y[place[c] + i * row] = from[c][i];
        }
    }
    return 0;
}

struct recurrent_op {
    int64_t steps, units, gates, input, hidden, hidden_one, x_row, y_row, chunk_steps, reverse;
    int64_t x_gates, h_gates, h, c; /* scratch in the arena */
    int64_t x_at;                   /* chunk places 0, 16, 32, ... */
    int64_t h_from, c_from, h_to, c_to; /* state before and after, in the arena; -1: zeros, nowhere */
    int64_t state_row;                  /* floats between its units */
    int64_t way, hidden_from;           /* of the hidden weight, for one sample; INT8: of all weights, always */
    int64_t words, features;            /* scratch for int8 */
};

/* The floats of each unit to another place, where units are another number of floats apart; from NULL: zeros. */
static void copy_state(float *to, int64_t to_row, const float *from, int64_t from_row, int64_t units, int64_t lanes) {
    for (int64_t u = 0; u < units; u++)
        if (from)
            memcpy(to + u * to_row, from + u * from_row, lanes * sizeof(float));
        else
            memset(to + u * to_row, 0, lanes * sizeof(float));
}

static void hidden_in_int8(const struct recurrent_op *o, int64_t lanes, const float *h, float *gates, const float *add,
                           int64_t add_row, int32_t *words) {
    if (lanes == 1) {
        const struct windowed8 *weight = POINTER(struct windowed8, o->hidden_one);
        struct target target = {gates, add, 1, 1, 0};
        quantise_vector(h, (int8_t *)words, o->units, 1, *weight->inverse);
        multiply_windows8(weight, words, &target);
    } else {
        const struct sparse8 *weight = POINTER(struct sparse8, o->hidden);
        const int32_t *at = POINTER(int32_t, o->x_at);
        struct product8 hidden = {weight, words, gates, add, lanes, add_row, at, at, at, NULL, 0};
        quantise_planes(h, lanes, words, lanes, o->units, 1, lanes, *weight->inverse);
        multiply8(&hidden, lanes / CHUNK);
    }
}

static void run_recurrent(const struct call *call, const struct op *op) {
    const struct recurrent_op *o = (const struct recurrent_op *)op->a;
    int64_t lanes = call->lanes, n = o->units * lanes, gates = o->gates, rows = gates * o->units;
    float *x_gates = call->arena + o->x_gates, *h_gates = call->arena + o->h_gates;
    float *h = call->arena + o->h, *c = call->arena + o->c;
    int64_t x_row = (o->chunk_steps * lanes + CHUNK - 1) / CHUNK * CHUNK;
    const int32_t *at = POINTER(int32_t, o->x_at);
    int32_t *words = (int32_t *)(call->arena + o->words);
    copy_state(h, lanes, o->h_from < 0 ? NULL : call->arena + o->h_from, o->state_row, o->units, lanes);
    copy_state(c, lanes, o->c_from < 0 ? NULL : call->arena + o->c_from, o->state_row, o->units, lanes);
    for (int64_t done = 0; done < o->steps; done += o->chunk_steps) {
        int64_t some = least(o->chunk_steps, o->steps - done);
        int64_t start = o->reverse ? o->steps - done - some : done;
        int64_t chunks = (some * lanes + CHUNK - 1) / CHUNK;
        const float *x = call->arena + op->x + start * lanes;
        if (o->way == INT8) {
            const struct sparse8 *weight = POINTER(struct sparse8, o->input);
            quantise_planes(x, o->x_row, words, x_row, o->features, 1, chunks * CHUNK, *weight->inverse);
            struct product8 input = {weight, words, x_gates, NULL, x_row, 0, at, at, at, NULL, 0};
            multiply8(&input, chunks);
        } else {
            struct product input = {POINTER(struct sparse, o->input), x, x_gates, NULL, x_row, 0, at, at, NULL, NULL, 0};
            multiply(&input, 0, chunks);
        }
        float *by_step = x_gates + rows * x_row;
        if (lanes == 1) transpose_in(by_step, rows, x_gates, x_row, some, rows); /* or each gate is a cache miss */
        for (int64_t i = 0; i < some; i++) {
            int64_t step = o->reverse ? some - 1 - i : i;
            const float *now = lanes == 1 ? by_step + step * rows : x_gates + step * lanes;
            const float *add = op->code == GRU ? NULL : now;
            if (o->way == INT8) {
                hidden_in_int8(o, lanes, h, h_gates, add, x_row, words);
            } else if (lanes == 1) {
                struct target target = {h_gates, add, 1, 1, 0};
                multiply_one(o->way, POINTER(void, o->hidden_one), h + o->hidden_from, &target);
            } else {
                struct product hidden = {POINTER(struct sparse, o->hidden), h, h_gates, add, lanes, x_row, at, at, at,
                                         NULL, 0};
                multiply(&hidden, 0, lanes / CHUNK);
            }
            if (op->code == LSTM) {
                lstm_cell(h_gates, c, h, n);
            } else if (op->code != GRU) {
                plain_cell(h_gates, op->code == RNN_RELU, h, n);
            } else {
                float *packed = h_gates + rows * lanes; /* this step's input part, made contiguous */
                for (int64_t r = 0; lanes > 1 && r < rows; r++)
                    memcpy(packed + r * lanes, now + r * x_row, lanes * sizeof(float));
                gru_cell(lanes > 1 ? packed : now, h_gates, h, n);
            }
            float *y = call->arena + op->y + (start + step) * lanes;
            for (int64_t u = 0; u < o->units; u++) memcpy(y + u * o->y_row, h + u * lanes, lanes * sizeof(float));
        }
    }
    if (o->h_to >= 0) copy_state(call->arena + o->h_to, o->state_row, h, lanes, o->units, lanes);
    if (o->c_to >= 0) copy_state(call->arena + o->c_to, o->state_row, c, lanes, o->units, lanes);
}

/* What Python fills in for a call; the addresses of inputs, then of outputs, follow. */
struct request {
    int64_t ops, n_ops, arena, batch, lanes, first_group, last_group, n_inputs;
    int64_t times; /* where to add the seconds of each operation, or 0 */
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int64_t run_op(const struct call *call, const struct op *op) {
    switch (op->code) {
    case LOAD: run_load(call, op); break;
    case STORE: run_store(call, op); break;
    case PRODUCT:
    case PRODUCT_FOUR: run_product(call, op); break;
    case SHIFTS: run_shifts(call, op); break;
    case PRODUCT_ONE: run_product_one(call, op); break;
    case PRODUCT_DENSE: run_product_dense(call, op); break;
    case PRODUCT_INT8: run_product8(call, op); break;
    case PRODUCT_INT8_ONE: run_product8_one(call, op); break;
    case AFFINE: run_affine(call, op); break;
    case NORMALISE: run_normalise(call, op); break;
    case POOL: run_pool(call, op); break;
    case PHASES: run_phases(call, op); break;
    case COPY: memcpy(call->arena + op->y, call->arena + op->x, op->a[0] * sizeof(float)); break;
    case EMBED: return run_embed(call, op);
    case POINTWISE: run_pointwise(call, op); break;
    case SOFTMAX: softmax((const struct softmax_op *)op->a, call->arena + op->x, call->arena + op->y); break;
    case SPREAD: run_spread(call, op); break;
    case ATTENTION: run_attention(call, op); break;
    case CONSTANT: run_constant(call, op); break;
    case MOVE: run_move(call, op); break;
    case TOKENS: run_tokens(call, op); break;
    case COLUMN: return run_column(call, op);
    case RECALL: return run_recall(call, op);
    case LSTM:
    case GRU:
    case RNN_TANH:
    case RNN_RELU: run_recurrent(call, op); break;
    default: return 2;
    }
    return 0;
}

/* Returns 0, 1 for a token outside its table, 2 for an unknown operation. */
__attribute__((visibility("default"))) int64_t PUBLIC(gossamer_run)(const struct request *r) {
    const struct op *ops = POINTER(struct op, r->ops);
    float *arena = (float *)(uintptr_t)r->arena;
    double *times = (double *)(uintptr_t)r->times;
    const void *const *inputs = (const void *const *)(r + 1);
    float *const *outputs = (float *const *)(inputs + r->n_inputs);
    for (int64_t group = r->first_group; group < r->last_group; group++) {
        int64_t first = group * r->lanes;
        struct call call = {arena, inputs, outputs, r->lanes, first, least(r->lanes, r->batch - first)};
        for (int64_t i = 0; i < r->n_ops; i++) {
            double start = times ? now() : 0;
            int64_t failed = run_op(&call, ops + i);
            if (failed) return failed;
            if (times) times[i] += now() - start;
        }
    }
    return 0;
}

#if defined(FEATURES)
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
/* What this processor and its system can run: 1 AVX2 with FMA, 2 AVX-512, 4 also its dot products of bytes, 8 those of
 * NEON. */
__attribute__((visibility("default"))) int64_t gossamer_features(void) {
    int64_t found = 0;
#if defined(__x86_64__)
    unsigned a, b, c, d, state, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    int fma = (c & bit_FMA) != 0;
    __asm__("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (fma && (b & bit_AVX2) && (state & 0x06) == 0x06) found |= 1;
    if (fma && (b & bit_AVX512F) && (b & bit_AVX512VL) && (state & 0xe6) == 0xe6) found |= 2;
    if ((found & 2) && (b & bit_AVX512BW) && (c & bit_AVX512VNNI)) found |= 4;
#elif defined(__aarch64__) && defined(__linux__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found |= 8;
#elif defined(__aarch64__) && defined(__APPLE__)
    found |= 8; /* in every processor of a Mac */
#endif
    return found;
}
#endif
