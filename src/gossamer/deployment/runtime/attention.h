/* Attention: for each head, softmax(scale * keys . queries + masks) and the mean of the values with these weights.
 *
 * Queries lie side by side in vectors, as pixels do in planes; keys, and then channels of the values, are rows. Scores
 * are [key][query], so maxima and sums of the softmax are those of whole vectors, and nothing is transposed. Samples of
 * a group lie between the pixels: they are taken apart first, four at a time. */
#ifndef GOSSAMER_ATTENTION
#define GOSSAMER_ATTENTION

#include "transposing.h"
#include "vectors.h"

#if defined(__AVX512F__) || defined(__aarch64__)
#define QUERIES 4 /* vectors of queries at a time */
#else
#define QUERIES 2
#endif
#define KEYS 4  /* keys at a time */
#define APART 4 /* samples taken apart at a time */

struct attention_op {
    int64_t heads, queries, keys, depth, width;      /* depth of queries and keys, width of values and results */
    int64_t q_at, k_at, v_at;                        /* first float of each head, of int64 */
    int64_t q_row, k_row, v_row, y_row;              /* floats between the channels of a head */
    int64_t scale;                                   /* address of one float */
    int64_t mask, mask_head, mask_row;               /* to add: [head][key][query], or 0; floats between heads, keys */
    int64_t hidden;                                  /* to add: a number per key, in the arena; -1: none */
    int64_t causal;                                  /* a query sees keys up to its own number */
    int64_t values, scratch;                         /* in the arena */
    int64_t y_head;                                  /* floats between the results of heads */
};

/* One head of one sample, everything contiguous along queries or keys. */
struct head {
    const float *q, *k, *v, *mask, *hidden;
    float *y, *scores;
    int64_t q_row, k_row, v_row, y_row;
};

/* sum[r][i] = sum over n of a[r][n * a_step] * b[n * b_row + i], for KEYS rows and some vectors. */
INLINE void tile(const int vectors, const float *const *a, int64_t a_step, const float *b, int64_t b_row, int64_t count,
                 vec *sum) {
    for (int i = 0; i < KEYS * vectors; i++) sum[i] = (vec){0};
    for (int64_t n = 0; n < count; n++, b += b_row) {
        vec x[QUERIES];
        for (int i = 0; i < vectors; i++) x[i] = load(b + i * WIDTH);
        for (int r = 0; r < KEYS; r++) {
            vec weight = splat(a[r][n * a_step]);
            for (int i = 0; i < vectors; i++) sum[r * vectors + i] += weight * x[i];
        }
    }
}

/* Some queries, from the first on: their scores, weights and results. The scores are rows of `vectors` vectors. */
INLINE void attend_block(const int vectors, const struct attention_op *o, const struct head *h, int64_t first) {
    const int64_t left = o->queries - first, n = vectors * WIDTH;
    const int64_t keys = o->causal ? least(o->keys, first + n) : o->keys;
    const vec scale = splat(*(const float *)(uintptr_t)o->scale);
    vec most[QUERIES], total[QUERIES], sum[KEYS * QUERIES];
    for (int i = 0; i < vectors; i++) most[i] = splat(-3.4028235e38f); /* finite, so that a difference never is NaN */
    for (int64_t key = 0; key < keys; key += KEYS) {
        const float *rows[KEYS];
        for (int r = 0; r < KEYS; r++) rows[r] = h->k + least(key + r, o->keys - 1);
        tile(vectors, rows, h->k_row, h->q + first, h->q_row, o->depth, sum);
        for (int r = 0; r < KEYS && key + r < keys; r++)
            for (int i = 0; i < vectors; i++) {
                vec score = sum[r * vectors + i] * scale;
                if (h->mask) score += load(h->mask + (key + r) * o->mask_row + first + i * WIDTH);
                if (h->hidden) score += splat(h->hidden[key + r]);
                if (o->causal && key + r > first + i * WIDTH) {
                    float seen[WIDTH];
                    for (int l = 0; l < WIDTH; l++) seen[l] = key + r > first + i * WIDTH + l ? -INFINITY : 0.0f;
                    score += load(seen);
                }
                most[i] = either(score > most[i], score, most[i]);
                store(h->scores + (key + r) * n + i * WIDTH, score);
            }
    }
    for (int i = 0; i < vectors; i++) total[i] = (vec){0};
    for (int64_t key = 0; key < keys; key++)
        for (int i = 0; i < vectors; i++) {
            float *place = h->scores + key * n + i * WIDTH;
            vec score = load(place);
            vec weight = either(score == splat(-INFINITY), (vec){0}, exponential(score - most[i]));
            total[i] += weight;
            store(place, weight);
        }
    for (int i = 0; i < vectors; i++) /* all keys hidden: zeros, as in torch */
        total[i] = either(total[i] == (vec){0}, (vec){0}, splat(1.0f) / total[i]);
    for (int64_t channel = 0; channel < o->width; channel += KEYS) {
        const float *rows[KEYS];
        for (int r = 0; r < KEYS; r++) rows[r] = h->v + least(channel + r, o->width - 1) * h->v_row;
        tile(vectors, rows, 1, h->scores, n, keys, sum);
        for (int r = 0; r < KEYS && channel + r < o->width; r++)
            for (int i = 0; i < vectors && left > i * WIDTH; i++)
                give(h->y + (channel + r) * h->y_row + first + i * WIDTH, sum[r * vectors + i] * total[i],
                     left - i * WIDTH);
    }
}

static void attend_head(const struct attention_op *o, const struct head *h) {
    for (int64_t first = 0; first < o->queries;) {
        int64_t vectors = (o->queries - first + WIDTH - 1) / WIDTH;
        if (vectors >= QUERIES) {
            attend_block(QUERIES, o, h, first);
            first += QUERIES * WIDTH;
        } else if (vectors >= 2) {
            attend_block(2, o, h, first);
            first += 2 * WIDTH;
        } else {
            attend_block(1, o, h, first);
            first += WIDTH;
        }
    }
}

/* The rows of a head for several samples, each on its own: [sample][channel][pixel], `room` pixels a row. */
static void take_apart(float *to, int64_t room, const float *from, int64_t row, int64_t channels, int64_t pixels,
                       int64_t lanes, int64_t samples) {
    for (int64_t channel = 0; channel < channels; channel++)
        transpose_in(to + channel * room, channels * room, from + channel * row, lanes, samples, pixels);
}

static void attend(const struct attention_op *o, int64_t lanes, float *arena, const float *q, const float *k, float *y) {
    const int64_t *q_at = (const int64_t *)(uintptr_t)o->q_at, *k_at = (const int64_t *)(uintptr_t)o->k_at;
    const int64_t *v_at = (const int64_t *)(uintptr_t)o->v_at;
    const float *mask = (const float *)(uintptr_t)o->mask, *v = arena + o->values;
    const float *hidden = o->hidden < 0 ? NULL : arena + o->hidden;
    float *scratch = arena + o->scratch;
    const int64_t room = (o->queries + CHUNK - 1) / CHUNK * CHUNK, more = (o->keys + CHUNK - 1) / CHUNK * CHUNK;
    float *scores = scratch, *free_from = scratch + more * QUERIES * WIDTH;
    for (int64_t head = 0; head < o->heads; head++) {
        struct head h = {q + q_at[head], k + k_at[head], v + v_at[head], mask ? mask + head * o->mask_head : NULL,
                         hidden, y + head * o->y_head, scores, o->q_row, o->k_row, o->v_row, o->y_row};
        if (lanes == 1) {
            attend_head(o, &h);
            continue;
        }
        for (int64_t lane = 0; lane < lanes; lane += APART) {
            const int64_t samples = least(APART, lanes - lane);
            float *own_q = free_from, *own_k = own_q + APART * o->depth * room, *own_v = own_k + APART * o->depth * more;
            float *own_y = own_v + APART * o->width * more, *own_hidden = own_y + APART * o->width * room;
            take_apart(own_q, room, h.q + lane, o->q_row, o->depth, o->queries, lanes, samples);
            take_apart(own_k, more, h.k + lane, o->k_row, o->depth, o->keys, lanes, samples);
            take_apart(own_v, more, h.v + lane, o->v_row, o->width, o->keys, lanes, samples);
            if (hidden) take_apart(own_hidden, more, hidden + lane, 0, 1, o->keys, lanes, samples);
            for (int64_t sample = 0; sample < samples; sample++) {
                struct head own = {own_q + sample * o->depth * room, own_k + sample * o->depth * more,
                                   own_v + sample * o->width * more, h.mask,
                                   hidden ? own_hidden + sample * more : NULL, own_y + sample * o->width * room, scores,
                                   room, more, more, room};
                attend_head(o, &own);
            }
            for (int64_t channel = 0; channel < o->width; channel++)
                transpose_in(h.y + channel * o->y_row + lane, lanes, own_y + channel * room, o->width * room, o->queries,
                             samples);
        }
    }
}

/* Attention of one token of one sample. The memory of a head has its keys as [channel][token], so that scores are
 * vectors, and its values as [token][channel], so that results are; rows are filled up to whole chunks. */
struct recall_op {
    int64_t heads, shared, depth, width, length;     /* of keys and values there are `shared` heads */
    int64_t q_at, k_at, v_at;                        /* first float of each head, of int64 */
    int64_t q_step, k_step, v_step;                  /* floats between the channels of a head */
    int64_t scale;                                   /* address of one float */
    int64_t which;                                   /* the head of keys and values of each head, of int64 */
    int64_t positions, memory, sample, first;        /* inputs; floats of a sample, and those before */
    int64_t values, scratch;                         /* in the arena */
};

INLINE int64_t whole_chunks(int64_t n) { return (n + CHUNK - 1) / CHUNK * CHUNK; }

/* scores[token] = scale * q . keys, for some vectors of tokens */
INLINE void score_tokens(const int vectors, float *scores, const float *q, int64_t q_step, const float *keys, int64_t row,
                         int64_t depth, vec scale) {
    vec sum[QUERIES];
    for (int i = 0; i < vectors; i++) sum[i] = (vec){0};
    for (int64_t c = 0; c < depth; c++) {
        vec weight = splat(q[c * q_step]);
        for (int i = 0; i < vectors; i++) sum[i] += weight * load(keys + c * row + i * WIDTH);
    }
    for (int i = 0; i < vectors; i++) store(scores + i * WIDTH, sum[i] * scale);
}

static void recall(const struct recall_op *o, int64_t position, float *memory, float *arena, const float *q,
                   const float *k, float *y) {
    const int64_t *q_at = (const int64_t *)(uintptr_t)o->q_at, *k_at = (const int64_t *)(uintptr_t)o->k_at;
    const int64_t *v_at = (const int64_t *)(uintptr_t)o->v_at, *which = (const int64_t *)(uintptr_t)o->which;
    const int64_t row = whole_chunks(o->length), value_row = whole_chunks(o->width), tokens = position + 1;
    const int64_t key_room = o->depth * row, room = key_room + o->length * value_row;
    const vec scale = splat(*(const float *)(uintptr_t)o->scale);
    const float *v = arena + o->values;
    float *scores = arena + o->scratch;
    for (int64_t head = 0; head < o->shared; head++) {
        float *keys = memory + head * room, *values = keys + key_room + position * value_row;
        for (int64_t c = 0; c < o->depth; c++) keys[c * row + position] = k[k_at[head] + c * o->k_step];
        for (int64_t c = 0; c < o->width; c++) values[c] = v[v_at[head] + c * o->v_step];
    }
    for (int64_t head = 0; head < o->heads; head++) {
        const float *keys = memory + which[head] * room, *values = keys + key_room, *own = q + q_at[head];
        int64_t token = 0;
        for (; token + QUERIES * WIDTH <= row && token < tokens; token += QUERIES * WIDTH)
            score_tokens(QUERIES, scores + token, own, o->q_step, keys + token, row, o->depth, scale);
        for (; token < tokens; token += WIDTH)
            score_tokens(1, scores + token, own, o->q_step, keys + token, row, o->depth, scale);
        float most = scores[0], sum = 0;
        for (int64_t i = 1; i < tokens; i++) most = scores[i] > most ? scores[i] : most;
        for (int64_t i = 0; i < tokens; i += WIDTH)
            give(scores + i, exponential(take(scores + i, tokens - i) - splat(most)), tokens - i);
        for (int64_t i = 0; i < tokens; i++) sum += scores[i];
        const vec factor = splat(1.0f / sum);
        for (int64_t c = 0; c < o->width; c += WIDTH) {
            vec parts[4] = {{0}, {0}, {0}, {0}}; /* so that additions do not wait for each other */
            int64_t i = 0;
            for (; i + 4 <= tokens; i += 4)
                for (int n = 0; n < 4; n++) parts[n] += splat(scores[i + n]) * load(values + (i + n) * value_row + c);
            for (; i < tokens; i++) parts[0] += splat(scores[i]) * load(values + i * value_row + c);
            give(y + head * o->width + c, ((parts[0] + parts[1]) + (parts[2] + parts[3])) * factor, o->width - c);
        }
    }
}

#endif
