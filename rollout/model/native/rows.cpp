// Row operations around the matrix products: RMSNorm, rotary embedding, gated activation; forward and
// backward. A row's bits depend on that row alone.

#include <algorithm>
#include <vector>

#include "../../../attention/native/recording.h"
#include "../../../attention/native/simd.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 13;  // floats: below, a second thread is not worth its waking
constexpr int64_t ROWS_PER_PARTIAL = 64;    // rows whose weight gradients are summed first

// 1 / sqrt(mean(x^2) + eps)
inline float inverse_rms(const float* x, int64_t size, float eps) {
    F16 squares = set1(0.0f);
    for_each_16(size, [&](int64_t i, int n) {
        F16 part = load_n(x + i, n);
        squares = fma(part, part, squares);
    });
    return 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
}

inline void normalize(const float* x, const float* weight, int64_t size, float eps, float* out) {
    F16 scale = set1(inverse_rms(x, size, eps));
    for_each_16(size, [&](int64_t i, int n) {
        store_n(out + i, load_n(x + i, n) * scale * load_n(weight + i, n), n);
    });
}

// y = w * x * s, s = (mean(x^2) + eps)^-1/2:
// dx = s * (w dy) - x * s^3 / size * sum(w dy x);   dw += dy * x * s.
inline void normalize_backward(const float* x, const float* weight, int64_t size, float eps,
                               const float* grad, float* grad_x, float* grad_weight) {
    float scale = inverse_rms(x, size, eps);
    F16 dots = set1(0.0f), scales = set1(scale);
    for_each_16(size, [&](int64_t i, int n) {
        F16 part = load_n(x + i, n), g = load_n(grad + i, n);
        dots = fma(load_n(weight + i, n) * g, part, dots);
        if (grad_weight != nullptr)
            store_n(grad_weight + i, fma(g * part, scales, load_n(grad_weight + i, n)), n);
    });
    F16 pull = set1(-(scale * scale * scale) * sum(dots) / static_cast<float>(size));
    for_each_16(size, [&](int64_t i, int n) {
        F16 own = load_n(weight + i, n) * load_n(grad + i, n) * scales;
        store_n(grad_x + i, fma(load_n(x + i, n), pull, own), n);
    });
}

// Rotates (left, right) halves by the angle of (cos, sin); sign -1 turns back.
inline void rotate_head(const float* x, const float* cos, const float* sin, int64_t dim, float sign,
                        float* out) {
    const int64_t half = dim / 2;
    for_each_16(half, [&](int64_t i, int n) {
        F16 left = load_n(x + i, n), right = load_n(x + half + i, n);
        F16 c = load_n(cos + i, n), s = load_n(sin + i, n) * set1(sign);
        store_n(out + i, left * c - right * s, n);
        store_n(out + half + i, right * c + left * s, n);
    });
}

// Adds up the partial weight gradients in order; sums[partials][size] -> out[size].
void add_partials(const std::vector<float>& sums, int64_t partials, int64_t size, float* out) {
    std::fill(out, out + size, 0.0f);
    for (int64_t p = 0; p < partials; p++)
        for (int64_t i = 0; i < size; i++) out[i] += sums[p * size + i];
}

}  // namespace

// total = x + delta (delta null: total not written), out = RMSNorm(total) * weight; rows [rows][size].
extern "C" void add_rms_norm(const float* x, const float* delta, const float* weight, int64_t rows,
                             int64_t size, float eps, float* total, float* out) {
#pragma omp parallel for schedule(static) if (rows * size >= PARALLEL_FROM)
    for (int64_t r = 0; r < rows; r++) {
        const float* row = x + r * size;
        if (delta != nullptr) {
            for_each_16(size, [&](int64_t i, int n) {
                store_n(total + r * size + i, load_n(row + i, n) + load_n(delta + r * size + i, n), n);
            });
            row = total + r * size;
        }
        normalize(row, weight, size, eps, out + r * size);
    }
}

// grad_x = (through the norm) + grad_total where that is not null; grad_weight null: not wanted.
extern "C" void rms_norm_backward(const float* x, const float* weight, int64_t rows, int64_t size,
                                  float eps, const float* grad, const float* grad_total,
                                  float* grad_x, float* grad_weight) {
    const int64_t partials = (rows + ROWS_PER_PARTIAL - 1) / ROWS_PER_PARTIAL;
    std::vector<float> sums(grad_weight == nullptr ? 0 : partials * size, 0.0f);
#pragma omp parallel for schedule(static) if (rows * size >= PARALLEL_FROM)
    for (int64_t p = 0; p < partials; p++)
        for (int64_t r = p * ROWS_PER_PARTIAL; r < std::min(rows, (p + 1) * ROWS_PER_PARTIAL); r++) {
            const int64_t at = r * size;
            normalize_backward(x + at, weight, size, eps, grad + at, grad_x + at,
                               sums.empty() ? nullptr : sums.data() + p * size);
            if (grad_total != nullptr)
                for_each_16(size, [&](int64_t i, int n) {
                    store_n(grad_x + at + i, load_n(grad_x + at + i, n) + load_n(grad_total + at + i, n), n);
                });
        }
    if (grad_weight != nullptr) add_partials(sums, partials, size, grad_weight);
}

// Queries and keys of qkv [tokens][heads + 2 kv_heads][dim], normed per head where weights are not
// null, rotated to their positions; cos and sin [positions][dim], both halves alike.
extern "C" void rotate(const float* qkv, int64_t tokens, int64_t heads, int64_t kv_heads,
                       int64_t dim, const int64_t* positions, const float* cos, const float* sin,
                       const float* q_weight, const float* k_weight, float eps, float* q, float* k) {
    const int64_t stride = (heads + 2 * kv_heads) * dim;
#pragma omp parallel if (tokens * stride >= PARALLEL_FROM)
    {
        std::vector<float> normed(dim);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) {
            const float *c = cos + positions[t] * dim, *s = sin + positions[t] * dim;
            for (int64_t h = 0; h < heads + kv_heads; h++) {
                const float* head = qkv + t * stride + h * dim;
                const float* weight = h < heads ? q_weight : k_weight;
                if (weight != nullptr) {
                    normalize(head, weight, dim, eps, normed.data());
                    head = normed.data();
                }
                float* to = h < heads ? q + (t * heads + h) * dim
                                      : k + (t * kv_heads + h - heads) * dim;
                rotate_head(head, c, s, dim, 1.0f, to);
            }
        }
    }
}

// Gradient of qkv from those of rotated queries, rotated keys and values, each dense; gradients of
// the norms' weights [dim] unless null.
extern "C" void rotate_backward(const float* qkv, int64_t tokens, int64_t heads, int64_t kv_heads,
                                int64_t dim, const int64_t* positions, const float* cos,
                                const float* sin, const float* q_weight, const float* k_weight,
                                float eps, const float* grad_q, const float* grad_k,
                                const float* grad_v, float* grad_qkv, float* grad_q_weight,
                                float* grad_k_weight) {
    const int64_t stride = (heads + 2 * kv_heads) * dim;
    const int64_t partials = (tokens + ROWS_PER_PARTIAL - 1) / ROWS_PER_PARTIAL;
    std::vector<float> q_sums(q_weight == nullptr ? 0 : partials * dim, 0.0f);
    std::vector<float> k_sums(k_weight == nullptr ? 0 : partials * dim, 0.0f);
#pragma omp parallel if (tokens * stride >= PARALLEL_FROM)
    {
        std::vector<float> turned(dim);
#pragma omp for schedule(static)
        for (int64_t p = 0; p < partials; p++)
            for (int64_t t = p * ROWS_PER_PARTIAL; t < std::min(tokens, (p + 1) * ROWS_PER_PARTIAL); t++) {
                const float *c = cos + positions[t] * dim, *s = sin + positions[t] * dim;
                for (int64_t h = 0; h < heads + kv_heads; h++) {
                    const bool query = h < heads;
                    const int64_t at = t * stride + h * dim;
                    const float* grad = query ? grad_q + (t * heads + h) * dim
                                              : grad_k + (t * kv_heads + h - heads) * dim;
                    const float* weight = query ? q_weight : k_weight;
                    if (weight == nullptr) {
                        rotate_head(grad, c, s, dim, -1.0f, grad_qkv + at);
                        continue;
                    }
                    rotate_head(grad, c, s, dim, -1.0f, turned.data());
                    normalize_backward(qkv + at, weight, dim, eps, turned.data(), grad_qkv + at,
                                       (query ? q_sums : k_sums).data() + p * dim);
                }
                std::copy_n(grad_v + t * kv_heads * dim, kv_heads * dim,
                            grad_qkv + t * stride + (heads + kv_heads) * dim);
            }
    }
    if (grad_q_weight != nullptr) add_partials(q_sums, partials, dim, grad_q_weight);
    if (grad_k_weight != nullptr) add_partials(k_sums, partials, dim, grad_k_weight);
}

// out = silu(gate) * up; gate_up [rows][2 size], gate first.
extern "C" void silu_mul(const float* gate_up, int64_t rows, int64_t size, float* out) {
#pragma omp parallel for schedule(static) if (rows * size >= PARALLEL_FROM)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = gate_up + r * 2 * size, *up = gate + size;
        for_each_16(size, [&](int64_t i, int n) {
            F16 g = load_n(gate + i, n);
            F16 silu = g / (set1(1.0f) + exp(set1(0.0f) - g));
            store_n(out + r * size + i, silu * load_n(up + i, n), n);
        });
    }
}

// With s = sigmoid(g): d silu / dg = s (1 + g (1 - s)).
extern "C" void silu_mul_backward(const float* gate_up, int64_t rows, int64_t size,
                                  const float* grad, float* grad_gate_up) {
#pragma omp parallel for schedule(static) if (rows * size >= PARALLEL_FROM)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = gate_up + r * 2 * size, *up = gate + size;
        float *to_gate = grad_gate_up + r * 2 * size, *to_up = to_gate + size;
        const F16 one = set1(1.0f);
        for_each_16(size, [&](int64_t i, int n) {
            F16 g = load_n(gate + i, n), out = load_n(grad + r * size + i, n);
            F16 s = one / (one + exp(set1(0.0f) - g));
            store_n(to_up + i, out * g * s, n);
            store_n(to_gate + i, out * load_n(up + i, n) * s * fma(g, one - s, one), n);
        });
    }
}

RECORDABLE(add_rms_norm)
RECORDABLE(rotate)
RECORDABLE(silu_mul)
