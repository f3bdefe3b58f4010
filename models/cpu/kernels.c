/* What small models compute, in float32 on a CPU: products with few rows, attention of one query per sequence to the
 * pages of a cache, attention in trees, and elementwise layers, the last two with their gradients, and tokens that are
 * drawn. No result depends on other rows, and none but the gradient of a norm's weight on the number of threads.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* exp(x) for x <= 0, to about 1e-7 of it, and 0 below -87; a NaN stays one. Cephes' polynomial, without a branch, so
 * that a compiler makes vectors of it. */
static inline float exp_of_negative(float x)
{
    int32_t kept = -!(x < -87.0f); /* all bits or none */
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504088896341f + 12582912.0f; /* rounds to an integer in the lowest bits */
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    float n = shifted - 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t power = (int32_t)(((uint32_t)bits - 0x4B400000u + 127u) << 23) & kept;
    float scale;
    memcpy(&scale, &power, 4);
    return p * scale;
}

/* Asks for `count` floats that are read soon; NULL for none. A page is in one piece, but the next may be anywhere, where
 * no processor looks ahead by itself. */
static inline void prefetch(const float *memory, int64_t count)
{
    for (int64_t i = 0; memory != NULL && i < count; i += 16)
        __builtin_prefetch(memory + i, 0, 2);
}

/* scores[t] = q . keys[t], four keys at a time; as many of the `next` ones are fetched meanwhile. */
static inline void products(float *restrict scores, const float *restrict q, const float *restrict keys, int64_t stride,
                            int64_t features, int64_t count, const float *next)
{
    int64_t t = 0;
    for (; t + 4 <= count; t += 4) {
        prefetch(next == NULL ? NULL : next + t * stride, 4 * stride);
        const float *a = keys + t * stride, *b = a + stride, *c = b + stride, *d = c + stride;
        float sa = 0, sb = 0, sc = 0, sd = 0;
#pragma omp simd reduction(+ : sa, sb, sc, sd)
        for (int64_t i = 0; i < features; i++) {
            sa += q[i] * a[i];
            sb += q[i] * b[i];
            sc += q[i] * c[i];
            sd += q[i] * d[i];
        }
        scores[t] = sa, scores[t + 1] = sb, scores[t + 2] = sc, scores[t + 3] = sd;
    }
    for (; t < count; t++) {
        const float *a = keys + t * stride;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < features; i++)
            sum += q[i] * a[i];
        scores[t] = sum;
    }
}

/* out += sum of weights[t] * values[t], four values at a time; as many of the `next` ones are fetched meanwhile. */
static inline void add_values(float *restrict out, const float *restrict weights, const float *restrict values,
                              int64_t stride, int64_t features, int64_t count, const float *next)
{
    int64_t t = 0;
    for (; t + 4 <= count; t += 4) {
        prefetch(next == NULL ? NULL : next + t * stride, 4 * stride);
        const float *a = values + t * stride, *b = a + stride, *c = b + stride, *d = c + stride;
        float wa = weights[t], wb = weights[t + 1], wc = weights[t + 2], wd = weights[t + 3];
#pragma omp simd
        for (int64_t i = 0; i < features; i++)
            out[i] += wa * a[i] + wb * b[i] + (wc * c[i] + wd * d[i]);
    }
    for (; t < count; t++) {
        const float *a = values + t * stride;
        float wa = weights[t];
#pragma omp simd
        for (int64_t i = 0; i < features; i++)
            out[i] += wa * a[i];
    }
}

/* Attention of one query per sequence to the pages of a cache. A task is one sequence and one head of the cache: its
 * queries read each key and each value once, and keep the rescaled sums of FlashDecoding (Dao et al. 2023) as they go
 * from page to page. Returns 0, or 1 where memory is out.
 *
 * out [rows, heads, value_features], q [rows, heads, key_features], keys and values [n_pages, kv_heads, page_size,
 * stride], pages int64 [rows, width], lengths int64 [rows], at least 1; sinks [heads] or NULL; window and soft_cap 0
 * for none.
 */
int decode_attention(float *out, const float *q, const float *keys, const float *values, const int64_t *pages,
                     const int64_t *lengths, const float *sinks, int64_t rows, int64_t heads, int64_t kv_heads,
                     int64_t key_features, int64_t value_features, int64_t key_stride, int64_t value_stride,
                     int64_t page_size, int64_t width, int64_t window, float scale, float soft_cap, int threads)
{
    int64_t group = heads / kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *memory = malloc(sizeof(float) * (size_t)(group * (key_features + value_features + 2) + page_size));
        if (memory == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        float *queries = memory, *sums = queries + group * key_features, *maxima = sums + group * value_features;
        float *totals = maxima + group, *scores = totals + group;
        /* Rows that share pages are next to each other, and a page of one head stays in a cache between them. */
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < (failed ? 0 : rows * kv_heads); task++) {
            int64_t head = task / rows, row = task % rows, length = lengths[row];
            int64_t first = window > 0 && length > window ? length - window : 0;
            int64_t later = task + threads < rows * kv_heads ? task + threads : task;
            const float *query = q + (row * heads + head * group) * key_features;
            for (int64_t i = 0; i < group * key_features; i++)
                queries[i] = query[i] * scale;
            memset(sums, 0, sizeof(float) * (size_t)(group * value_features));
            for (int64_t g = 0; g < group; g++) {
                maxima[g] = sinks == NULL ? -1e30f : sinks[head * group + g];
                totals[g] = sinks == NULL ? 0.0f : isnan(maxima[g]) ? maxima[g] : 1.0f;
            }
            for (int64_t start = first, count; start < length; start += count) {
                int64_t place = start % page_size;
                count = page_size - place < length - start ? page_size - place : length - start;
                int64_t token = (pages[row * width + start / page_size] * kv_heads + head) * page_size + place;
                int64_t next = start + count < length
                                   ? (pages[row * width + start / page_size + 1] * kv_heads + head) * page_size
                                   : (pages[later % rows * width] * kv_heads + later / rows) * page_size;
                for (int64_t g = 0; g < group; g++) {
                    products(scores, queries + g * key_features, keys + token * key_stride, key_stride, key_features,
                             count, g == 0 ? keys + next * key_stride : NULL);
                    if (soft_cap > 0)
                        for (int64_t t = 0; t < count; t++)
                            scores[t] = soft_cap * tanhf(scores[t] / soft_cap);
                    float maximum = maxima[g], total = 0;
#pragma omp simd reduction(max : maximum)
                    for (int64_t t = 0; t < count; t++)
                        maximum = scores[t] > maximum ? scores[t] : maximum;
#pragma omp simd reduction(+ : total)
                    for (int64_t t = 0; t < count; t++) {
                        scores[t] = exp_of_negative(scores[t] - maximum);
                        total += scores[t];
                    }
                    float *sum = sums + g * value_features;
                    if (maximum > maxima[g]) {
                        float factor = exp_of_negative(maxima[g] - maximum);
                        totals[g] *= factor;
                        for (int64_t i = 0; i < value_features; i++)
                            sum[i] *= factor;
                        maxima[g] = maximum;
                    }
                    totals[g] += total;
                    add_values(sum, scores, values + token * value_stride, value_stride, value_features, count,
                               g == 0 ? values + next * value_stride : NULL);
                }
            }
            float *result = out + (row * heads + head * group) * value_features;
            for (int64_t g = 0; g < group; g++)
                for (int64_t i = 0; i < value_features; i++)
                    result[g * value_features + i] = sums[g * value_features + i] / totals[g];
        }
        free(memory);
    }
    return failed;
}

/* The last tokens of a token's path that it sees: their number, and where they begin in `paths`. */
static inline int64_t seen_of(const int64_t *starts, int64_t token, int64_t window, int64_t *first)
{
    int64_t count = starts[token + 1] - starts[token], hidden = window > 0 && count > window ? count - window : 0;
    *first = starts[token] + hidden;
    return count - hidden;
}

/* Attention of each token to itself and the tokens before it on its path in a tree. A task is one tree and one head of
 * the keys. Returns 0, or 1 where memory is out.
 *
 * out [tokens, heads, value_features] and lse [tokens, heads], the log-sum-exp of the scaled scores; q [tokens, heads,
 * key_features], keys and values [tokens, kv_heads, ...], contiguous; paths, the tokens of each path one after another,
 * the token itself last, from starts[token] to starts[token + 1]; trees, the first token of each, and their number of
 * tokens at the end; longest, the tokens of the longest path; window 0 for none. */
int tree_attention(float *out, float *lse, const float *q, const float *keys, const float *values, const int64_t *paths,
                   const int64_t *starts, const int64_t *trees, int64_t n_trees, int64_t longest, int64_t heads,
                   int64_t kv_heads, int64_t key_features, int64_t value_features, int64_t window, float scale,
                   int threads)
{
    int64_t group = heads / kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *scores = malloc(sizeof(float) * (size_t)longest);
        if (scores == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < (failed ? 0 : n_trees * kv_heads); task++) {
            int64_t tree = task / kv_heads, kv_head = task % kv_heads;
            for (int64_t token = trees[tree]; token < trees[tree + 1]; token++) {
                int64_t first, count = seen_of(starts, token, window, &first);
                for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
                    const float *query = q + (token * heads + head) * key_features;
                    float maximum = -INFINITY, total = 0;
                    for (int64_t t = 0; t < count; t++) {
                        const float *key = keys + (paths[first + t] * kv_heads + kv_head) * key_features;
                        float sum = 0;
#pragma omp simd reduction(+ : sum)
                        for (int64_t i = 0; i < key_features; i++)
                            sum += query[i] * key[i];
                        scores[t] = sum * scale;
                        maximum = scores[t] > maximum ? scores[t] : maximum;
                    }
#pragma omp simd reduction(+ : total)
                    for (int64_t t = 0; t < count; t++) {
                        scores[t] = exp_of_negative(scores[t] - maximum);
                        total += scores[t];
                    }
                    float *result = out + (token * heads + head) * value_features;
                    memset(result, 0, sizeof(float) * (size_t)value_features);
                    for (int64_t t = 0; t < count; t++) {
                        const float *value = values + (paths[first + t] * kv_heads + kv_head) * value_features;
                        float weight = scores[t] / total;
#pragma omp simd
                        for (int64_t i = 0; i < value_features; i++)
                            result[i] += weight * value[i];
                    }
                    lse[token * heads + head] = maximum + logf(total);
                }
            }
        }
        free(scores);
    }
    return failed;
}

/* The gradients of tree_attention(), contiguous; those of keys and values are added to what is there. `grad` is that of
 * `out`, contiguous. */
void tree_attention_backward(float *restrict q_grad, float *restrict key_grad, float *restrict value_grad,
                             const float *grad, const float *out, const float *lse, const float *q, const float *keys,
                             const float *values, const int64_t *paths, const int64_t *starts, const int64_t *trees,
                             int64_t n_trees, int64_t heads, int64_t kv_heads, int64_t key_features,
                             int64_t value_features, int64_t window, float scale, int threads)
{
    int64_t group = heads / kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < n_trees * kv_heads; task++) {
        int64_t tree = task / kv_heads, kv_head = task % kv_heads;
        for (int64_t token = trees[tree]; token < trees[tree + 1]; token++) {
            int64_t first, count = seen_of(starts, token, window, &first);
            for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
                int64_t row = token * heads + head;
                const float *query = q + row * key_features, *d = grad + row * value_features;
                const float *result = out + row * value_features;
                float *query_grad = q_grad + row * key_features, mean = 0;
                memset(query_grad, 0, sizeof(float) * (size_t)key_features);
#pragma omp simd reduction(+ : mean)
                for (int64_t i = 0; i < value_features; i++)
                    mean += d[i] * result[i];
                for (int64_t t = 0; t < count; t++) {
                    int64_t other = paths[first + t] * kv_heads + kv_head;
                    const float *key = keys + other * key_features, *value = values + other * value_features;
                    float *to_key = key_grad + other * key_features, *to_value = value_grad + other * value_features;
                    float score = 0, slope = 0;
#pragma omp simd reduction(+ : score)
                    for (int64_t i = 0; i < key_features; i++)
                        score += query[i] * key[i];
                    float above = score * scale - lse[row]; /* 0 at most, but for rounding */
                    float weight = exp_of_negative(above > 0 ? 0 : above); /* a NaN stays one */
#pragma omp simd reduction(+ : slope)
                    for (int64_t i = 0; i < value_features; i++) {
                        slope += d[i] * value[i];
                        to_value[i] += weight * d[i];
                    }
                    slope = weight * (slope - mean) * scale;
#pragma omp simd
                    for (int64_t i = 0; i < key_features; i++) {
                        query_grad[i] += slope * key[i];
                        to_key[i] += slope * query[i];
                    }
                }
            }
        }
    }
}

/* out = (offset + weight) * x / sqrt(mean(x^2) + eps). */
static inline void normalize(float *restrict out, const float *restrict x, const float *restrict weight,
                             int64_t features, float eps, float offset)
{
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < features; i++)
        squares += x[i] * x[i];
    float factor = 1.0f / sqrtf(squares / (float)features + eps);
#pragma omp simd
    for (int64_t i = 0; i < features; i++)
        out[i] = x[i] * factor * (offset + weight[i]);
}

/* normalize() of each x[r, h]; out [rows, heads, features] is contiguous, x has strides. */
void rms_norm(float *out, const float *x, const float *weight, int64_t rows, int64_t heads, int64_t features,
              int64_t row_stride, int64_t head_stride, float eps, float offset, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t vector = 0; vector < rows * heads; vector++)
        normalize(out + vector * features, x + vector / heads * row_stride + vector % heads * head_stride, weight,
                  features, eps, offset);
}

/* The gradients of rms_norm(): that of x, contiguous, and that of weight unless it is NULL, for `grad` of the result. The
 * rows' parts of the latter are added up in float64. Returns 0, or 1 where memory is out. */
int rms_norm_backward(float *x_grad, float *weight_grad, const float *grad, const float *x, const float *weight,
                      int64_t rows, int64_t heads, int64_t features, int64_t row_stride, int64_t head_stride,
                      int64_t grad_row_stride, int64_t grad_head_stride, float eps, float offset, int threads)
{
    double *sums = weight_grad == NULL ? NULL : calloc((size_t)(threads * features), sizeof(double));
    int failed = weight_grad != NULL && sums == NULL;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        double *thread_sums = sums == NULL ? NULL : sums + omp_get_thread_num() * features;
#pragma omp for schedule(static)
        for (int64_t vector = 0; vector < (failed ? 0 : rows * heads); vector++) {
            const float *v = x + vector / heads * row_stride + vector % heads * head_stride;
            const float *g = grad + vector / heads * grad_row_stride + vector % heads * grad_head_stride;
            float *result = x_grad + vector * features, squares = 0, slope = 0;
#pragma omp simd reduction(+ : squares, slope)
            for (int64_t i = 0; i < features; i++) {
                squares += v[i] * v[i];
                slope += v[i] * g[i] * (offset + weight[i]);
            }
            float factor = 1.0f / sqrtf(squares / (float)features + eps);
            slope *= factor * factor * factor / (float)features;
#pragma omp simd
            for (int64_t i = 0; i < features; i++)
                result[i] = g[i] * (offset + weight[i]) * factor - v[i] * slope;
            if (thread_sums != NULL)
#pragma omp simd
                for (int64_t i = 0; i < features; i++)
                    thread_sums[i] += (double)(v[i] * g[i] * factor);
        }
    }
    for (int64_t i = 0; sums != NULL && i < features; i++) {
        double total = 0;
        for (int thread = 0; thread < threads; thread++)
            total += sums[thread * features + i];
        weight_grad[i] = (float)total;
    }
    free(sums);
    return failed;
}

/* Turns pairs (i * step, i * step + second) of x, which may be out. */
static inline void turn(float *out, const float *x, const float *cos, const float *sin, int64_t pairs, int64_t step,
                        int64_t second)
{
#pragma omp simd
    for (int64_t i = 0; i < pairs; i++) {
        float a = x[i * step], b = x[i * step + second];
        out[i * step] = a * cos[i] - b * sin[i];
        out[i * step + second] = b * cos[i] + a * sin[i];
    }
}

/* The first 2 * pairs features of x[r, h] turned by the angles of row r, and the others as they are, after normalize()
 * unless weight is NULL: pairs (i, i + pairs), or (2i, 2i + 1) if interleaved. out [rows, heads, features] is
 * contiguous, x has strides, and cos and sin are [rows, pairs]. */
void rotate(float *out, const float *x, const float *weight, const float *cos, const float *sin, int64_t rows,
            int64_t heads, int64_t features, int64_t row_stride, int64_t head_stride, int64_t pairs, int interleaved,
            float eps, float offset, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t vector = 0; vector < rows * heads; vector++) {
        const float *in = x + vector / heads * row_stride + vector % heads * head_stride;
        const float *c = cos + vector / heads * pairs, *s = sin + vector / heads * pairs;
        float *result = out + vector * features;
        if (weight != NULL) {
            normalize(result, in, weight, features, eps, offset);
            in = result;
        } else {
            memcpy(result + 2 * pairs, in + 2 * pairs, sizeof(float) * (size_t)(features - 2 * pairs));
        }
        if (interleaved)
            turn(result, in, c, s, pairs, 2, 1);
        else
            turn(result, in, c, s, pairs, 1, pairs);
    }
}

/* out[r] = silu(gate[r]) * up[r]; out [rows, features] is contiguous, and gate and up have strides. */
void swiglu(float *restrict out, const float *restrict gate, const float *restrict up, int64_t rows, int64_t features,
            int64_t gate_stride, int64_t up_stride, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *g = gate + row * gate_stride, *u = up + row * up_stride;
        float *result = out + row * features;
#pragma omp simd
        for (int64_t i = 0; i < features; i++) {
            float power = exp_of_negative(-fabsf(g[i]));
            result[i] = g[i] * (g[i] < 0 ? power : 1.0f) / (1.0f + power) * u[i];
        }
    }
}

/* The gradients of swiglu(), contiguous, for `grad` of its result. */
void swiglu_backward(float *restrict gate_grad, float *restrict up_grad, const float *restrict grad,
                     const float *restrict gate, const float *restrict up, int64_t rows, int64_t features,
                     int64_t grad_stride, int64_t gate_stride, int64_t up_stride, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *d = grad + row * grad_stride, *g = gate + row * gate_stride, *u = up + row * up_stride;
        float *gate_result = gate_grad + row * features, *up_result = up_grad + row * features;
#pragma omp simd
        for (int64_t i = 0; i < features; i++) {
            float power = exp_of_negative(-fabsf(g[i]));
            float sigmoid = (g[i] < 0 ? power : 1.0f) / (1.0f + power);
            float other = (g[i] < 0 ? 1.0f : power) / (1.0f + power); /* 1 - sigmoid, with all its bits */
            up_result[i] = d[i] * g[i] * sigmoid;
            gate_result[i] = d[i] * u[i] * sigmoid * (1.0f + g[i] * other);
        }
    }
}

/* memory[places[r * heads + h]] = x[r, h], in a memory [size, features]; x [rows, heads, features] has strides. Returns
 * 1, with nothing stored, where a place is none. */
int store_rows(float *restrict memory, const float *restrict x, const int64_t *places, int64_t rows, int64_t heads,
               int64_t features, int64_t row_stride, int64_t head_stride, int64_t size)
{
    for (int64_t i = 0; i < rows * heads; i++)
        if (places[i] < 0 || places[i] >= size)
            return 1;
    for (int64_t i = 0; i < rows * heads; i++)
        memcpy(memory + places[i] * features, x + i / heads * row_stride + i % heads * head_stride,
               sizeof(float) * (size_t)features);
    return 0;
}

/* The sum of exp(x / heat - maximum), in float32 within 128 numbers and in float64 beyond. */
static inline double sum_of_powers(const float *x, int64_t count, float heat, float maximum)
{
    double total = 0;
    for (int64_t start = 0; start < count; start += 128) {
        int64_t end = start + 128 < count ? start + 128 : count;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = start; i < end; i++)
            sum += exp_of_negative(x[i] / heat - maximum);
        total += sum;
    }
    return total;
}

/* Tokens drawn from the softmax of logits / temperature [rows, vocab], whose rows are row_stride apart: the one whose
 * part of the cumulative distribution has uniform[r] in [0, 1), or where greedy[r] the most likely, the first of
 * several. And their logprobs, NaN where a logit is NaN or infinity, or none is above minus infinity. */
#define BLOCKS 256
void draw(int64_t *tokens, float *logprobs, const float *logits, const double *temperature, const uint8_t *greedy,
          const double *uniform, int64_t rows, int64_t vocab, int64_t row_stride, int threads)
{
    int64_t size = (vocab + BLOCKS - 1) / BLOCKS; /* of the blocks that are searched for the one to read again */
    size = size > 128 ? size : 128;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *x = logits + row * row_stride;
        float heat = (float)temperature[row], maximum = -INFINITY;
#pragma omp simd reduction(max : maximum)
        for (int64_t i = 0; i < vocab; i++)
            maximum = x[i] > maximum ? x[i] : maximum;
        maximum /= heat;
        double sums[BLOCKS], total = 0;
        for (int64_t first = 0; first < vocab; first += size) {
            int64_t count = first + size < vocab ? size : vocab - first;
            total += sums[first / size] = sum_of_powers(x + first, count, heat, maximum);
        }
        int64_t token = 0;
        if (greedy[row]) {
            while (token < vocab - 1 && x[token] / heat != maximum)
                token++;
        } else {
            double target = uniform[row] * total, before = 0;
            int64_t first = 0;
            for (; first + size < vocab && !(before + sums[first / size] > target); first += size)
                before += sums[first / size];
            /* The block's numbers one by one round differently than its sum: the last that is possible, at least. */
            for (int64_t i = first; i < vocab && i < first + size && !(before > target); i++) {
                float power = exp_of_negative(x[i] / heat - maximum);
                token = power > 0 ? i : token;
                before += power;
            }
        }
        tokens[row] = token;
        logprobs[row] = (float)(x[token] / heat - maximum - log(total));
    }
}

/* Products keep a tile of TILE rows and PANEL columns of the result in registers, and read weights as panels [depth,
 * PANEL]: 28 registers of 32 with AVX-512, 12 of 16 otherwise. */
#ifdef __AVX512F__
#define LANES 16
#define TILE 14
#else
#define LANES 8
#define TILE 6
#endif
#define PANEL (2 * LANES)
/* Rows and features that are computed before the next panel, so that they stay in a cache; and how many rows of a panel
 * are asked for ahead. */
#define BLOCK (8 * TILE)
#define DEPTH 512
#define COPY_STRIDE (DEPTH + 16)
#define AHEAD 64
typedef float vector __attribute__((vector_size(4 * LANES), aligned(4)));

int64_t panel_width(void)
{
    return PANEL;
}

/* out[r, c] = start[c] + x[r] . weight[c] for `rows` rows, a constant, and `columns` columns of a panel; start is a row,
 * zeros if it is NULL, or out itself. Parts of DEPTH features are summed by themselves, which loses fewer bits. */
static inline __attribute__((always_inline)) void product_tile(float *out, const float *x, const float *panel,
                                                               const float *start, int64_t depth, int64_t x_stride,
                                                               int64_t out_stride, int64_t columns, int rows, int first)
{
    vector sums[TILE][2];
    for (int r = 0; r < rows; r++)
        sums[r][0] = sums[r][1] = (vector){0};
    for (int64_t k = 0; k < depth; k++) {
        const float *weights = panel + k * PANEL;
        vector a = *(const vector *)weights, b = *(const vector *)(weights + LANES);
        if (first)
            for (int i = 0; i < PANEL; i += 16)
                __builtin_prefetch(weights + AHEAD * PANEL + i, 0, 3);
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++) {
            sums[r][0] += x[r * x_stride + k] * a;
            sums[r][1] += x[r * x_stride + k] * b;
        }
    }
    for (int r = 0; r < rows; r++) {
        vector before[2] = {{0}, {0}};
        if (start != NULL)
            memcpy(before, start == out ? out + r * out_stride : start, sizeof(float) * (size_t)columns);
        before[0] += sums[r][0];
        before[1] += sums[r][1];
        memcpy(out + r * out_stride, before, sizeof(float) * (size_t)columns);
    }
}

/* product_tile() of any number of rows up to BLOCK. */
static void product_rows(float *out, const float *x, const float *panel, const float *start, int64_t depth,
                         int64_t x_stride, int64_t out_stride, int64_t columns, int64_t rows)
{
    int64_t tiles = (rows + TILE - 1) / TILE, height = (rows + tiles - 1) / tiles;
    for (int64_t row = 0; row < rows; row += height) {
        float *result = out + row * out_stride;
        const float *before = start == out ? result : start;
        switch (rows - row < height ? rows - row : height) {
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        product_tile(result, x + row * x_stride, panel, before, depth, x_stride, out_stride, columns, n, row == 0);   \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE > 6
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#endif
        }
    }
}

/* out [rows, columns] = bias + x weight^T, for x [rows, features] with a stride; panels [columns / PANEL, features,
 * PANEL] are the weight [columns, features] with zeros for columns that it lacks; bias may be NULL. */
void product(float *out, const float *x, const float *panels, const float *bias, int64_t rows, int64_t features,
             int64_t columns, int64_t x_stride, int threads)
{
    int64_t count = (columns + PANEL - 1) / PANEL;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        /* Rows a multiple of 4 KiB apart are in each other's way in a processor's first cache; copies are not. */
        float *copies = x_stride % 1024 == 0 ? malloc(sizeof(float) * BLOCK * COPY_STRIDE) : NULL;
        for (int64_t row = 0; row < rows; row += BLOCK)
            for (int64_t k = 0; k < features; k += DEPTH) {
                int64_t height = rows - row < BLOCK ? rows - row : BLOCK;
                int64_t depth = features - k < DEPTH ? features - k : DEPTH;
                const float *block = x + row * x_stride + k;
                for (int64_t r = 0; copies != NULL && r < height; r++)
                    memcpy(copies + r * COPY_STRIDE, block + r * x_stride, sizeof(float) * (size_t)depth);
                /* A thread has the same panels every time, so that out holds its sums. */
#pragma omp for schedule(static) nowait
                for (int64_t p = 0; p < count; p++) {
                    float *result = out + row * columns + p * PANEL;
                    const float *start = k > 0 ? result : bias == NULL ? NULL : bias + p * PANEL;
                    product_rows(result, copies == NULL ? block : copies, panels + (p * features + k) * PANEL, start,
                                 depth, copies == NULL ? x_stride : COPY_STRIDE, columns,
                                 columns - p * PANEL < PANEL ? columns - p * PANEL : PANEL, height);
                }
            }
        free(copies);
    }
}
