/* Attention of one query per sequence to the pages of a cache, in float32 on a CPU.
 *
 * A task is one sequence and one head of the cache: its queries read each key and each value once, and keep the
 * rescaled sums of FlashDecoding (Dao et al. 2023) as they go from page to page. A task does nothing that depends on
 * other sequences or on the number of threads.
 */
#include <math.h>
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

/* scores[t] = q . keys[t], four keys at a time. */
static inline void products(float *restrict scores, const float *restrict q, const float *restrict keys, int64_t stride,
                            int64_t features, int64_t count)
{
    int64_t t = 0;
    for (; t + 4 <= count; t += 4) {
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

/* out += sum of weights[t] * values[t], four values at a time. */
static inline void add_values(float *restrict out, const float *restrict weights, const float *restrict values,
                              int64_t stride, int64_t features, int64_t count)
{
    int64_t t = 0;
    for (; t + 4 <= count; t += 4) {
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

/* Returns 0, or 1 where memory is out.
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
            const float *own = q + (row * heads + head * group) * key_features;
            for (int64_t i = 0; i < group * key_features; i++)
                queries[i] = own[i] * scale;
            memset(sums, 0, sizeof(float) * (size_t)(group * value_features));
            for (int64_t g = 0; g < group; g++) {
                maxima[g] = sinks == NULL ? -1e30f : sinks[head * group + g];
                totals[g] = sinks == NULL ? 0.0f : isnan(maxima[g]) ? maxima[g] : 1.0f;
            }
            for (int64_t start = first, count; start < length; start += count) {
                int64_t place = start % page_size;
                count = page_size - place < length - start ? page_size - place : length - start;
                int64_t token = (pages[row * width + start / page_size] * kv_heads + head) * page_size + place;
                for (int64_t g = 0; g < group; g++) {
                    products(scores, queries + g * key_features, keys + token * key_stride, key_stride, key_features,
                             count);
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
                    add_values(sum, scores, values + token * value_stride, value_stride, value_features, count);
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
