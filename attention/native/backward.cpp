// Gradients of causal attention over slots. With P = exp(S - lse), D = rowsum(dO * O):
//
//   dV = P^T dO      dP = dO V^T      dS = P * (dP - D)      dQ = scale dS K      dK = scale dS^T Q
//
// (Dao et al. 2022, FlashAttention, algorithm 4). One unit of work is a key/value head of all
// sequences that share slots, so no two threads add to the same gradient and sums keep their order.

#include <algorithm>
#include <vector>

#include "simd.h"
#include "step.h"

namespace {

constexpr int KEYS = 64;
constexpr int ROWS = VECTOR_REGISTERS / REGISTERS_PER_F16 >= 32 ? 4 : 1;

// products[r][0 .. KEYS) = sum over d of rows[r][d] * columns[d][0 .. KEYS)
template <int R>
inline void products(const float* rows, int64_t dim, const float* columns, float* out) {
    constexpr int V = KEYS / 16;
    F16 acc[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = set1(0.0f);
    for (int64_t d = 0; d < dim; d++) {
        F16 part[V];
        for (int v = 0; v < V; v++) part[v] = load(columns + d * KEYS + 16 * v);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            F16 x = set1(rows[r * dim + d]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[r][v] = fma(x, part[v], acc[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(out + r * KEYS + 16 * v, acc[r][v]);
}

// out[r][0 .. 16 V) += sum over j of factors[r][j] * vectors[j]
template <int R, int V>
inline void gather_rows(const float* factors, const float* const* vectors, int count, int64_t d,
                        float* out, int64_t dim) {
    F16 acc[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(out + r * dim + d + 16 * v);
    for (int j = 0; j < count; j++) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            F16 part = load(vectors[j] + d + 16 * v);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) acc[r][v] = fma(set1(factors[r * KEYS + j]), part, acc[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(out + r * dim + d + 16 * v, acc[r][v]);
}

// out[j][0 .. 16 V) += sum over r of factors[r][j] * rows[r]
template <int R, int V>
inline void scatter_rows(const float* factors, const float* rows, int count, int64_t d, float* out,
                         int64_t dim) {
    F16 row[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) row[r][v] = load(rows + r * dim + d + 16 * v);
    for (int j = 0; j < count; j++) {
        float* to = out + j * dim + d;
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            F16 acc = load(to + 16 * v);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) acc = fma(set1(factors[r * KEYS + j]), row[r][v], acc);
            store(to + 16 * v, acc);
        }
    }
}

struct Scratch {
    std::vector<float> memory;

    float* floats(int64_t size) {
        if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
        return memory.data();
    }
};

struct Backward {
    Step step;
    Heads heads;
    Slots slots;
    const float *q, *keys, *values, *out, *lse, *grad_out;
    int64_t q_stride;
    float scale;
    float *grad_q, *grad_keys, *grad_values;

    template <int R>
    void rows(const float* scaled, const float* grads, const float* lses, const float* sums,
              const int64_t* visible, int64_t first, int count, const float* keys_t,
              const float* values_t, const float* const* key_rows, float* gq, float* gk,
              float* gv) const {
        const int64_t dim = heads.head_dim;
        float p[R * KEYS], ds[R * KEYS];
        products<R>(scaled, dim, keys_t, p);
        products<R>(grads, dim, values_t, ds);
        for (int r = 0; r < R; r++) {
            F16 shift = set1(lses[r]), mean = set1(sums[r]);
            for (int j = 0; j < KEYS; j += 16) {
                F16 weight = exp(load(p + r * KEYS + j) - shift);
                store(p + r * KEYS + j, weight);
                store(ds + r * KEYS + j, weight * (load(ds + r * KEYS + j) - mean));
            }
            for (int64_t j = std::max<int64_t>(0, visible[r] - first); j < count; j++)
                p[r * KEYS + j] = ds[r * KEYS + j] = 0.0f;
        }
        int64_t d = 0;
        for (; d + 64 <= dim; d += 64) {
            scatter_rows<R, 4>(p, grads, count, d, gv, dim);
            scatter_rows<R, 4>(ds, scaled, count, d, gk, dim);
            gather_rows<R, 4>(ds, key_rows, count, d, gq, dim);
        }
        for (; d < dim; d += 16) {
            scatter_rows<R, 1>(p, grads, count, d, gv, dim);
            scatter_rows<R, 1>(ds, scaled, count, d, gk, dim);
            gather_rows<R, 1>(ds, key_rows, count, d, gq, dim);
        }
    }

    void sequence(int64_t s, int64_t kv_head, Scratch& scratch, std::vector<int64_t>& places) const {
        const int64_t dim = heads.head_dim, group = heads.group();
        const int64_t start = step.query_start_loc[s];
        const int64_t queries = step.query_start_loc[s + 1] - start;
        const int64_t length = step.seq_lens[s], cached = length - queries;
        const int64_t count = queries * group;
        float* scaled = scratch.floats(count * (3 * dim + 2) + 4 * KEYS * dim);
        float* grads = scaled + count * dim;
        float* gq = grads + count * dim;
        float* lses = gq + count * dim;
        float* sums = lses + count;
        float* keys_t = sums + count;
        float* values_t = keys_t + KEYS * dim;
        float* gk = values_t + KEYS * dim;
        float* gv = gk + KEYS * dim;
        places.resize(count);
        int64_t* visible = places.data();
        for (int64_t r = 0; r < count; r++) {
            const int64_t token = start + r / group, head = kv_head * group + r % group;
            const float* from = q + token * q_stride + head * dim;
            const int64_t at = (token * heads.query + head) * dim;
            F16 dot = set1(0.0f);
            for (int64_t d = 0; d < dim; d += 16) {
                F16 grad = load(grad_out + at + d);
                store(scaled + r * dim + d, load(from + d) * set1(scale));
                store(grads + r * dim + d, grad);
                store(gq + r * dim + d, set1(0.0f));
                dot = fma(grad, load(out + at + d), dot);
            }
            sums[r] = sum(dot);
            lses[r] = lse[token * heads.query + head];
            visible[r] = cached + r / group + 1;
        }
        const int64_t* row = step.blocks(s);
        for (int64_t first = 0; first < length; first += KEYS) {
            const int found = static_cast<int>(std::min<int64_t>(KEYS, length - first));
            const float* key_rows[KEYS];
            int64_t offsets[KEYS];
            std::fill(keys_t, gv + KEYS * dim, 0.0f);  // all four: they lie side by side
            for (int j = 0; j < found; j++) {
                offsets[j] = kv_head * slots.head_stride + step.slot(row, first + j) * slots.slot_stride;
                key_rows[j] = keys + offsets[j];
                for (int64_t d = 0; d < dim; d++) {
                    keys_t[d * KEYS + j] = keys[offsets[j] + d];
                    values_t[d * KEYS + j] = values[offsets[j] + d];
                }
            }
            int64_t r = std::max<int64_t>(0, first - cached) * group;  // earlier ones see none
            for (; r + ROWS <= count; r += ROWS)
                rows<ROWS>(scaled + r * dim, grads + r * dim, lses + r, sums + r, visible + r, first,
                           found, keys_t, values_t, key_rows, gq + r * dim, gk, gv);
            for (; r < count; r++)
                rows<1>(scaled + r * dim, grads + r * dim, lses + r, sums + r, visible + r, first,
                        found, keys_t, values_t, key_rows, gq + r * dim, gk, gv);
            for (int j = 0; j < found; j++)
                for (int64_t d = 0; d < dim; d += 16) {
                    float *k = grad_keys + offsets[j] + d, *v = grad_values + offsets[j] + d;
                    store(k, load(k) + load(gk + j * dim + d));
                    store(v, load(v) + load(gv + j * dim + d));
                }
        }
        for (int64_t r = 0; r < count; r++) {
            const int64_t token = start + r / group, head = kv_head * group + r % group;
            for (int64_t d = 0; d < dim; d += 16)
                store(grad_q + (token * heads.query + head) * dim + d,
                      load(gq + r * dim + d) * set1(scale));
        }
    }
};

}  // namespace

// Component c is the sequences order[starts[c] .. starts[c + 1]), which share slots with no other.
// out, grad_out, grad_q [tokens][heads][head_dim]; grad_keys and grad_values are added to and lie
// as keys and values do.
extern "C" void attend_backward(const Step* step, const Heads* heads, const Slots* slots,
                                int64_t components, const int64_t* starts, const int64_t* order,
                                const float* q, int64_t q_stride, const float* keys,
                                const float* values, float scale, const float* out,
                                const float* lse, const float* grad_out, float* grad_q,
                                float* grad_keys, float* grad_values) {
    const Backward backward{*step, *heads,   *slots, q,      keys,      values,     out,
                            lse,   grad_out, q_stride, scale, grad_q, grad_keys, grad_values};
#pragma omp parallel
    {
        static thread_local Scratch scratch;
        static thread_local std::vector<int64_t> places;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < components * heads->key_value; i++)
            for (int64_t s = starts[i / heads->key_value]; s < starts[i / heads->key_value + 1]; s++)
                backward.sequence(order[s], i % heads->key_value, scratch, places);
    }
}
