// Rows of logits [rows][vocab]: log-normalizer, entropy, the draw, and the gradient of scoring.
//
// With z = x / T: a row is read once, in blocks of BLOCK columns; block b gives m_b = max z and
// s_b = sum of exp(z - m_b), sixteen chains each. Blocks are then put together in order, in double:
// M = max m_b, lse = M + log(sum of s_b exp(m_b - M)). A block is one unit of work, so the bits do
// not depend on the number of rows or threads.

#include <algorithm>
#include <vector>

#include "../../../attention/native/simd.h"

namespace {

constexpr int64_t BLOCK = 1024;
constexpr int64_t NOT_FINITE = -1, NOTHING_LEFT = -2;  // as in rollout/sampling_rows.py

struct BlockSums {
    float top, sum, moment;  // moment: sum of exp(z - top) (z - top), where entropy is wanted
};

struct Row {
    double top, total, mean;  // mean: of z, where entropy is wanted
    float lse;
};

inline F16 tempered(const float* x, int n, F16 temperature, bool divide) {
    F16 value = load_n(x, n);
    return divide ? value / temperature : value;
}

// z of one block into `z`, and its maximum.
float temper(const float* x, int64_t size, float temperature, float* z) {
    const F16 t = set1(temperature);
    const bool divide = temperature != 1.0f;
    F16 tops = set1(-INFINITY);
    float top = -INFINITY;
    for_each_16(size, [&](int64_t i, int n) {
        F16 value = tempered(x + i, n, t, divide);
        store_n(z + i, value, n);
        if (n == 16) tops = max(tops, value);
        else
            for (int j = 0; j < n; j++) top = z[i + j] > top ? z[i + j] : top;
    });
    const float rest = highest(tops);
    return rest > top ? rest : top;
}

BlockSums block_sums(const float* x, int64_t size, float temperature, bool entropy) {
    float z[BLOCK];
    const float top = temper(x, size, temperature, z);
    if (top == -INFINITY) {  // nothing there, or NaN that no maximum shows
        const bool nan = std::any_of(z, z + size, [](float value) { return value != value; });
        return {top, nan ? NAN : 0.0f, 0.0f};
    }
    F16 sums = set1(0.0f), moments = set1(0.0f);
    for_each_16(size, [&](int64_t i, int n) {
        F16 shifted = load_n(z + i, n) - set1(top);
        store_n(z + i, exp(shifted), n);
        F16 weight = load_n(z + i, n);  // 0 past the end
        sums = sums + weight;
        if (entropy) moments = fma(weight, max(set1(-1e30f), shifted), moments);
    });
    return {top, sum(sums), entropy ? sum(moments) : 0.0f};
}

Row combined(const BlockSums* blocks, int64_t count) {
    float top = -INFINITY;
    for (int64_t b = 0; b < count; b++) top = blocks[b].top > top ? blocks[b].top : top;
    double total = 0.0, moment = 0.0;
    for (int64_t b = 0; b < count; b++) {
        if (blocks[b].sum == 0.0f) continue;
        const double weight = std::exp(static_cast<double>(blocks[b].top) - top);
        total += blocks[b].sum * weight;
        moment += (blocks[b].moment + static_cast<double>(blocks[b].sum) * blocks[b].top) * weight;
    }
    const double lse = total == 0.0 ? -INFINITY : top + std::log(total);
    return {top, total, moment / total, static_cast<float>(lse)};
}

// First column at which the mass up to and including it exceeds `target`, within one block; the
// last column of any mass where rounding leaves none.
int64_t column_at(const float* x, int64_t size, float temperature, double target) {
    float z[BLOCK];
    const float top = temper(x, size, temperature, z);
    for_each_16(size, [&](int64_t i, int n) { store_n(z + i, exp(load_n(z + i, n) - set1(top)), n); });
    double mass = 0.0;
    int64_t last = 0;
    for (int64_t i = 0; i < size; i++) {
        if (z[i] == 0.0f) continue;
        mass += z[i];
        last = i;
        if (mass > target) break;
    }
    return last;
}

int64_t drawn(const float* x, int64_t vocab, float temperature, const BlockSums* blocks,
              int64_t count, const Row& row, double uniform) {
    const double target = uniform * row.total;
    double before = 0.0;
    int64_t chosen = -1;
    double left = 0.0, weight = 1.0;
    for (int64_t b = 0; b < count; b++) {
        if (blocks[b].sum == 0.0f) continue;
        const double scale = std::exp(static_cast<double>(blocks[b].top) - row.top);
        if (scale == 0.0) continue;
        chosen = b, left = target - before, weight = scale;
        before += blocks[b].sum * scale;
        if (before > target) break;
    }
    const int64_t first = chosen * BLOCK;
    return first + column_at(x + first, std::min(BLOCK, vocab - first), temperature, left / weight);
}

int64_t first_highest(const float* x, int64_t vocab, float temperature, const BlockSums* blocks,
                      int64_t count, double top) {
    for (int64_t b = 0; b < count; b++) {
        if (blocks[b].top != top) continue;
        const int64_t first = b * BLOCK;
        float z[BLOCK];
        const int64_t size = std::min(BLOCK, vocab - first);
        temper(x + first, size, temperature, z);
        for (int64_t i = 0; i < size; i++)
            if (z[i] == blocks[b].top) return first + i;
    }
    return 0;
}

inline int64_t blocks_in(int64_t vocab) { return (vocab + BLOCK - 1) / BLOCK; }

// Block sums of all rows, then `finish(row, its blocks, the row put together)` for each.
template <class Finish>
void for_each_row(const float* logits, int64_t rows, int64_t vocab, const float* temperature,
                  bool entropy, Finish finish) {
    const int64_t count = blocks_in(vocab);
    std::vector<BlockSums> sums(rows * count);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * count; i++) {
            const int64_t row = i / count, first = i % count * BLOCK;
            sums[i] = block_sums(logits + row * vocab + first, std::min(BLOCK, vocab - first),
                                 temperature[row], entropy);
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const BlockSums* blocks = sums.data() + row * count;
            finish(row, blocks, combined(blocks, count));
        }
    }
}

// z[token] - lse.
inline float logprob(const float* x, int64_t token, float temperature, float lse) {
    return (temperature == 1.0f ? x[token] : x[token] / temperature) - lse;
}

}  // namespace

// lse [rows], and the entropy in nats [rows] unless null. Not finite where a logit is NaN or +inf;
// -inf where all are.
extern "C" void log_normalizers(const float* logits, int64_t rows, int64_t vocab,
                                const float* temperature, float* lse, float* entropy) {
    for_each_row(logits, rows, vocab, temperature, entropy != nullptr,
                 [&](int64_t r, const BlockSums*, const Row& row) {
                     lse[r] = row.lse;
                     if (entropy != nullptr)
                         entropy[r] = static_cast<float>(row.top + std::log(row.total) - row.mean);
                 });
}

// One token a row: the inverse of the cumulative distribution at `uniform`, or the first of the
// highest where greedy. NOT_FINITE or NOTHING_LEFT in place of a token.
extern "C" void sample_rows(const float* logits, int64_t rows, int64_t vocab,
                            const float* temperature, const uint8_t* greedy, const double* uniform,
                            int64_t* tokens, float* logprobs, float* lse) {
    const int64_t count = blocks_in(vocab);
    for_each_row(logits, rows, vocab, temperature, false,
                 [&](int64_t r, const BlockSums* blocks, const Row& row) {
                     const float* x = logits + r * vocab;
                     lse[r] = row.lse;
                     logprobs[r] = 0.0f;
                     if (row.lse == -INFINITY) tokens[r] = NOTHING_LEFT;
                     else if (!std::isfinite(row.lse)) tokens[r] = NOT_FINITE;
                     else {
                         tokens[r] = greedy[r] ? first_highest(x, vocab, temperature[r], blocks,
                                                               count, row.top)
                                               : drawn(x, vocab, temperature[r], blocks, count, row,
                                                       uniform[r]);
                         logprobs[r] = logprob(x, tokens[r], temperature[r], row.lse);
                     }
                 });
}

// log-prob [rows] of one token a row, given its log-normalizer.
extern "C" void gather_logprobs(const float* logits, int64_t rows, int64_t vocab,
                                const float* temperature, const int64_t* tokens, const float* lse,
                                float* logprobs) {
    for (int64_t r = 0; r < rows; r++)
        logprobs[r] = logprob(logits + r * vocab, tokens[r], temperature[r], lse[r]);
}

// Logits become d loss / d logits. With p = softmax(z) and H the entropy:
// d logprob / dz = onehot - p;  dH / dz = -p (log p + H);  dx = dz / T.  grad_entropy may be null.
extern "C" void score_gradient(float* logits, int64_t rows, int64_t vocab, const float* temperature,
                               const int64_t* tokens, const float* lse, const float* entropy,
                               const float* grad_logprob, const float* grad_entropy) {
    const int64_t count = blocks_in(vocab);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows * count; i++) {
        const int64_t r = i / count, first = i % count * BLOCK;
        float* x = logits + r * vocab + first;
        const F16 t = set1(temperature[r]), shift = set1(lse[r]), pull = set1(-grad_logprob[r]);
        const F16 own = set1(grad_entropy == nullptr ? 0.0f : entropy[r]);
        const F16 push = set1(grad_entropy == nullptr ? 0.0f : -grad_entropy[r]);
        for_each_16(std::min(BLOCK, vocab - first), [&](int64_t j, int n) {
            F16 log_p = load_n(x + j, n) / t - shift;
            F16 p = exp(log_p), grad = p * pull;
            if (grad_entropy != nullptr)
                grad = fma(p * (max(set1(-1e30f), log_p) + own), push, grad);
            store_n(x + j, grad / t, n);
        });
        const int64_t at = tokens[r] - first;
        if (at >= 0 && at < BLOCK) x[at] += grad_logprob[r] / temperature[r];
    }
}
