// Causal attention over slots: prefill chunks, decodes and mixed steps alike.
//
//   scores   s[j] = (scale q) · k[j]      sixteen chains of FMAs, lane l over d = l mod 16
//   weights  w[j] = exp(s[j] - max s)     their sum: sixteen chains, lane l over j = l mod 16
//   output   o[d] = (sum over j of w[j] v[j][d]) / (sum of w)    one chain of FMAs along j
//
// Each is in the order of positions, over the visible ones alone: nothing that another token of the
// tile, the block size, the chunk or the thread brings along enters a result, and what lies in
// slots past a sequence's end is never read.

#include <algorithm>
#include <vector>

#include "simd.h"
#include "step.h"

namespace {

constexpr int ROWS_PER_TILE = 48;  // query tokens times the heads of one group, about
constexpr int ROWS_AT_ONCE = VECTOR_REGISTERS / REGISTERS_PER_F16 >= 32 ? 6 : 1;
constexpr int KEYS_AT_ONCE = VECTOR_REGISTERS / REGISTERS_PER_F16 >= 32 ? 16 : 4;

struct Tile {
    int64_t sequence, first, tokens;  // first query token within the sequence's queries
};

// Scores of one query against sixteen keys.
inline F16 score(const float* q, const float* const* keys, int64_t head_dim) {
    F16 products[16];
    for (int from = 0; from < 16; from += KEYS_AT_ONCE) {
        F16 acc[KEYS_AT_ONCE];
        for (int i = 0; i < KEYS_AT_ONCE; i++) acc[i] = set1(0.0f);
        for (int64_t d = 0; d < head_dim; d += 16) {
            F16 part = load(q + d);
            for (int i = 0; i < KEYS_AT_ONCE; i++) acc[i] = fma(part, load(keys[from + i] + d), acc[i]);
        }
        for (int i = 0; i < KEYS_AT_ONCE; i++) products[from + i] = acc[i];
    }
    return sum16(products);
}

// out[r][0 .. 16 V) += weights[r][j] * v[j], j in [from, to), for R rows.
template <int R, int V>
inline void accumulate(const float* weights, int64_t weight_stride, const float* values,
                       const int64_t* offsets, int64_t from, int64_t to, float* out,
                       int64_t out_stride) {
    F16 acc[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(out + r * out_stride + 16 * v);
    for (int64_t j = from; j < to; j++) {
        const float* value = values + offsets[j];
        F16 part[V];
        for (int v = 0; v < V; v++) part[v] = load(value + 16 * v);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            F16 weight = set1(weights[r * weight_stride + j]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[r][v] = fma(weight, part[v], acc[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(out + r * out_stride + 16 * v, acc[r][v]);
}

template <int R>
void accumulate_rows(const float* weights, int64_t weight_stride, const float* values,
                     const int64_t* offsets, int64_t from, int64_t to, float* out,
                     int64_t head_dim) {
    int64_t d = 0;
    for (; d + 64 <= head_dim; d += 64)
        accumulate<R, 4>(weights, weight_stride, values + d, offsets, from, to, out + d, head_dim);
    for (; d < head_dim; d += 16)
        accumulate<R, 1>(weights, weight_stride, values + d, offsets, from, to, out + d, head_dim);
}

// As many rows at once as share a range of keys; the rest of each row's keys, row by row.
void accumulate_some(int rows, const float* weights, int64_t weight_stride, const float* values,
                     const int64_t* offsets, const int64_t* visible, float* out,
                     int64_t head_dim) {
    int64_t common = *std::min_element(visible, visible + rows);
    auto call = [&](auto function, int row, int64_t from, int64_t to) {
        function(weights + row * weight_stride, weight_stride, values, offsets, from, to,
                 out + row * head_dim, head_dim);
    };
    switch (rows) {
        case 1: call(accumulate_rows<1>, 0, 0, common); break;
#if defined(__AVX512F__)
        case 2: call(accumulate_rows<2>, 0, 0, common); break;
        case 3: call(accumulate_rows<3>, 0, 0, common); break;
        case 4: call(accumulate_rows<4>, 0, 0, common); break;
        case 5: call(accumulate_rows<5>, 0, 0, common); break;
        case 6: call(accumulate_rows<6>, 0, 0, common); break;
#endif
    }
    for (int row = 0; row < rows; row++)
        if (visible[row] > common) call(accumulate_rows<1>, row, common, visible[row]);
}

// Scores become weights, in place; their maximum and sum.
inline void softmax(float* scores, int64_t size, float& top, float& total) {
    F16 tops = set1(-INFINITY);
    int64_t j = 0;
    for (; j + 16 <= size; j += 16) tops = max(tops, load(scores + j));
    top = highest(tops);
    for (; j < size; j++) top = scores[j] > top ? scores[j] : top;
    F16 sums = set1(0.0f), shift = set1(top);
    for_each_16(size, [&](int64_t at, int n) {
        store_n(scores + at, exp(load_n(scores + at, n) - shift), n);
        sums = sums + load_n(scores + at, n);
    });
    total = sum(sums);
}

struct Scratch {
    std::vector<float> queries, scores, out;
    std::vector<int64_t> offsets, visible;

    template <class T>
    static T* grown(std::vector<T>& memory, int64_t size) {
        if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
        return memory.data();
    }
};

struct Attention {
    Step step;
    Heads heads;
    Slots slots;
    const float *q, *keys, *values;
    int64_t q_stride;
    float scale;
    float *out, *lse;  // [tokens][heads][head_dim], [tokens][heads] or null

    void tile(const Tile& tile, int64_t kv_head, Scratch& scratch) const {
        const int64_t dim = heads.head_dim, group = heads.group(), rows = tile.tokens * group;
        const int64_t start = step.query_start_loc[tile.sequence];
        const int64_t queries = step.query_start_loc[tile.sequence + 1] - start;
        const int64_t cached = step.seq_lens[tile.sequence] - queries;
        const int64_t length = cached + tile.first + tile.tokens;  // keys the last row sees
        const int64_t stride = (length + 15) / 16 * 16;
        float* scaled = Scratch::grown(scratch.queries, rows * dim);
        float* scores = Scratch::grown(scratch.scores, rows * stride);
        float* result = Scratch::grown(scratch.out, rows * dim);
        int64_t* offsets = Scratch::grown(scratch.offsets, stride);
        int64_t* visible = Scratch::grown(scratch.visible, rows);

        const int64_t* row = step.blocks(tile.sequence);
        for (int64_t j = 0; j < length; j++) offsets[j] = step.slot(row, j) * slots.slot_stride;
        for (int64_t j = length; j < stride; j++) offsets[j] = offsets[length - 1];
        for (int64_t r = 0; r < rows; r++) {
            const int64_t token = start + tile.first + r / group;
            const float* from = q + token * q_stride + (kv_head * group + r % group) * dim;
            for (int64_t d = 0; d < dim; d += 16)
                store(scaled + r * dim + d, load(from + d) * set1(scale));
            visible[r] = cached + tile.first + r / group + 1;
        }
        const float* head_keys = keys + kv_head * slots.head_stride;
        for (int64_t j = 0; j < stride; j += 16) {
            const float* sixteen[16];
            for (int i = 0; i < 16; i++) sixteen[i] = head_keys + offsets[j + i];
            for (int64_t r = 0; r < rows; r++)
                if (j < visible[r]) store(scores + r * stride + j, score(scaled + r * dim, sixteen, dim));
        }
        std::fill(result, result + rows * dim, 0.0f);
        const float* head_values = values + kv_head * slots.head_stride;
        for (int64_t r = 0; r < rows;) {
            const int64_t left = rows - r, parts = (left + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
            const int some = static_cast<int>((left + parts - 1) / parts);
            float total[ROWS_AT_ONCE], top;
            for (int i = 0; i < some; i++) {
                softmax(scores + (r + i) * stride, visible[r + i], top, total[i]);
                if (lse != nullptr) {
                    const int64_t token = start + tile.first + (r + i) / group;
                    lse[token * heads.query + kv_head * group + (r + i) % group] =
                        top + static_cast<float>(std::log(static_cast<double>(total[i])));
                }
            }
            accumulate_some(some, scores + r * stride, stride, head_values, offsets, visible + r,
                            result + r * dim, dim);
            for (int i = 0; i < some; i++) {
                const int64_t token = start + tile.first + (r + i) / group;
                float* to = out + (token * heads.query + kv_head * group + (r + i) % group) * dim;
                for (int64_t d = 0; d < dim; d += 16)
                    store(to + d, load(result + (r + i) * dim + d) / set1(total[i]));
            }
            r += some;
        }
    }
};

}  // namespace

// q [tokens][heads][head_dim] with q_stride floats between tokens. Writes out, and lse if not null.
extern "C" void attend(const Step* step, const Heads* heads, const Slots* slots, const float* q,
                       int64_t q_stride, const float* keys, const float* values, float scale,
                       float* out, float* lse) {
    const Attention attention{*step, *heads, *slots, q,   keys, values,
                              q_stride, scale, out,   lse};
    const int64_t per_tile = std::max<int64_t>(1, ROWS_PER_TILE / heads->group());
    std::vector<Tile> tiles;
    for (int64_t s = 0; s < step->sequences; s++) {
        const int64_t queries = step->query_start_loc[s + 1] - step->query_start_loc[s];
        for (int64_t first = 0; first < queries; first += per_tile)
            tiles.push_back({s, first, std::min(queries - first, per_tile)});
    }
    const int64_t count = static_cast<int64_t>(tiles.size());
#pragma omp parallel
    {
        static thread_local Scratch scratch;
        // Neighbours in this order often share a prompt, so its keys are still in the cache.
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count * heads->key_value; i++)
            attention.tile(tiles[i % count], i / count, scratch);
    }
}

// Stores the step's own keys and values, k and v [tokens][kv_heads][head_dim], in their slots.
extern "C" void store_step(const Step* step, const Heads* heads, const Slots* slots,
                           const float* k, const float* v, int64_t kv_stride, float* keys,
                           float* values) {
    for (int64_t s = 0; s < step->sequences; s++) {
        const int64_t start = step->query_start_loc[s];
        const int64_t queries = step->query_start_loc[s + 1] - start;
        const int64_t cached = step->seq_lens[s] - queries;
        for (int64_t i = 0; i < queries; i++) {
            const int64_t slot = step->slot(step->blocks(s), cached + i);
            for (int64_t h = 0; h < heads->key_value; h++) {
                const int64_t from = (start + i) * kv_stride + h * heads->head_dim;
                const int64_t to = h * slots->head_stride + slot * slots->slot_stride;
                std::memcpy(keys + to, k + from, heads->head_dim * sizeof(float));
                std::memcpy(values + to, v + from, heads->head_dim * sizeof(float));
            }
        }
    }
}
