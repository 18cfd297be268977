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

#include "recording.h"
#include "simd.h"
#include "step.h"

namespace {

constexpr int64_t PARALLEL_FROM = 8;  // sequences whose keys and values one thread stores alone
constexpr int ROWS_PER_TILE = 48;  // query tokens times the heads of one group, about
constexpr int WORTH_SHARING = 32;  // positions in the same slots that make one tile of two sequences
constexpr int ROWS_AT_ONCE = VECTOR_REGISTERS / REGISTERS_PER_F16 >= 32 ? 6 : 1;
constexpr int KEYS_AT_ONCE = VECTOR_REGISTERS / REGISTERS_PER_F16 >= 32 ? 16 : 4;

// Query tokens of one sequence.
struct Span {
    int64_t sequence, first, tokens;  // first: within the sequence's queries
};

// Spans that are worked on together because their sequences hold the same slots at positions
// [0, shared): those keys and values are then read once for all of them.
struct Tile {
    int64_t first_span, spans, tokens, shared;
};

// Scores of one query against sixteen keys that lie side by side; DIM 0 = `dim` at run time.
template <int DIM>
inline F16 score(const float* q, const float* keys, int64_t dim) {
    const int64_t size = DIM ? DIM : dim;
    F16 products[16];
#pragma GCC unroll 4
    for (int from = 0; from < 16; from += KEYS_AT_ONCE) {
        F16 acc[KEYS_AT_ONCE];
        F16 part = load(q);
        for (int i = 0; i < KEYS_AT_ONCE; i++) acc[i] = part * load(keys + (from + i) * size);
#pragma GCC unroll 8
        for (int64_t d = 16; d < size; d += 16) {
            part = load(q + d);
            for (int i = 0; i < KEYS_AT_ONCE; i++)
                acc[i] = fma(part, load(keys + (from + i) * size + d), acc[i]);
        }
        for (int i = 0; i < KEYS_AT_ONCE; i++) products[from + i] = acc[i];
    }
    return sum16(products);
}

// Scores of the rows that see key j or later against keys j .. j + 15.
template <int DIM>
void score_rows(const float* q, const float* keys, int64_t dim, const int64_t* visible, int64_t j,
                int64_t rows, float* scores, int64_t stride) {
    const int64_t size = DIM ? DIM : dim;
    for (int64_t r = 0; r < rows; r++)
        if (j < visible[r]) store(scores + r * stride + j, score<DIM>(q + r * size, keys, size));
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

// Keys [from, to) for several rows: at once where all see them, the rest of each row's by itself.
void accumulate_some(int rows, const float* weights, int64_t weight_stride, const float* values,
                     const int64_t* offsets, int64_t from, int64_t to, const int64_t* visible,
                     float* out, int64_t head_dim) {
    const int64_t common = std::max(from, std::min(to, *std::min_element(visible, visible + rows)));
    auto call = [&](auto function, int row, int64_t first, int64_t last) {
        function(weights + row * weight_stride, weight_stride, values, offsets, first, last,
                 out + row * head_dim, head_dim);
    };
    switch (rows) {
        case 1: call(accumulate_rows<1>, 0, from, common); break;
#if defined(__AVX512F__)
        case 2: call(accumulate_rows<2>, 0, from, common); break;
        case 3: call(accumulate_rows<3>, 0, from, common); break;
        case 4: call(accumulate_rows<4>, 0, from, common); break;
        case 5: call(accumulate_rows<5>, 0, from, common); break;
        case 6: call(accumulate_rows<6>, 0, from, common); break;
#endif
    }
    for (int row = 0; row < rows; row++) {
        const int64_t end = std::min(to, visible[row]);
        if (end > common) call(accumulate_rows<1>, row, common, end);
    }
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
    std::vector<float> queries, scores, keys, out, totals;
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

    void tile(const Tile& tile, const Span* spans, int64_t kv_head, Scratch& scratch) const {
        const int64_t dim = heads.head_dim, group = heads.group(), rows = tile.tokens * group;
        int64_t longest = 0;
        for (int64_t i = 0; i < tile.spans; i++) longest = std::max(longest, length(spans[i]));
        const int64_t stride = (longest + 15) / 16 * 16;
        float* scaled = Scratch::grown(scratch.queries, rows * dim);
        float* scores = Scratch::grown(scratch.scores, rows * stride);
        float* result = Scratch::grown(scratch.out, rows * dim);
        float* gathered = Scratch::grown(scratch.keys, 16 * dim);
        int64_t* offsets = Scratch::grown(scratch.offsets, tile.spans * stride);
        int64_t* visible = Scratch::grown(scratch.visible, 2 * rows);
        int64_t* places = visible + rows;  // where a row lies among all heads of all tokens

        for (int64_t i = 0, r = 0; i < tile.spans; i++) {
            const Span& span = spans[i];
            slot_offsets(span.sequence, length(span), stride, offsets + i * stride);
            for (int64_t t = 0; t < span.tokens; t++)
                for (int64_t h = 0; h < group; h++, r++) {
                    const int64_t token = step.query_start_loc[span.sequence] + span.first + t;
                    const int64_t head = kv_head * group + h;
                    const float* from = q + token * q_stride + head * dim;
                    for (int64_t d = 0; d < dim; d += 16)
                        store(scaled + r * dim + d, load(from + d) * set1(scale));
                    visible[r] = length(span) - span.tokens + t + 1;
                    places[r] = token * heads.query + head;
                }
        }
        const float* head_keys = keys + kv_head * slots.head_stride;
        const int64_t shared = tile.shared / 16 * 16;
        score_range(offsets, 0, shared, head_keys, scaled, 0, rows, visible, scores, stride, gathered);
        for (int64_t i = 0, r = 0; i < tile.spans; r += spans[i++].tokens * group)
            score_range(offsets + i * stride, shared, stride, head_keys, scaled, r,
                        r + spans[i].tokens * group, visible, scores, stride, gathered);

        std::vector<float>& totals = scratch.totals;
        Scratch::grown(totals, rows);
        for (int64_t r = 0; r < rows; r++) {
            float top;
            softmax(scores + r * stride, visible[r], top, totals[r]);
            if (lse != nullptr)
                lse[places[r]] = top + static_cast<float>(std::log(static_cast<double>(totals[r])));
        }
        std::fill(result, result + rows * dim, 0.0f);
        const float* head_values = values + kv_head * slots.head_stride;
        add_values(offsets, 0, tile.shared, head_values, 0, rows, visible, scores, stride, result);
        for (int64_t i = 0, r = 0; i < tile.spans; r += spans[i++].tokens * group)
            add_values(offsets + i * stride, tile.shared, longest, head_values, r,
                       r + spans[i].tokens * group, visible, scores, stride, result);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t d = 0; d < dim; d += 16)
                store(out + places[r] * dim + d, load(result + r * dim + d) / set1(totals[r]));
    }

    // Keys that the last token of a span sees.
    int64_t length(const Span& span) const {
        const int64_t s = span.sequence;
        const int64_t queries = step.query_start_loc[s + 1] - step.query_start_loc[s];
        return step.seq_lens[s] - queries + span.first + span.tokens;
    }

    // Where keys and values of a sequence's positions lie; past `size` the last one is repeated.
    void slot_offsets(int64_t sequence, int64_t size, int64_t padded, int64_t* offsets) const {
        const int64_t* row = step.blocks(sequence);
        for (int64_t block = 0, j = 0; j < size; block++) {
            const int64_t first = row[block] * step.block_size, end = std::min(size, j + step.block_size);
            for (int64_t slot = first; j < end; slot++, j++) offsets[j] = slot * slots.slot_stride;
        }
        for (int64_t j = size; j < padded; j++) offsets[j] = offsets[size - 1];
    }

    // Scores of keys [from, to), both multiples of 16, for rows [first, last) that see any of them.
    void score_range(const int64_t* offsets, int64_t from, int64_t to, const float* head_keys,
                     const float* scaled, int64_t first, int64_t last, const int64_t* visible,
                     float* scores, int64_t stride, float* gathered) const {
        const int64_t dim = heads.head_dim;
        for (int64_t j = from; j < to; j += 16) {
            const float* sixteen = head_keys + offsets[j];
            if (j + 16 < to)  // blocks lie anywhere, so the hardware does not see the next ones coming
                for (int i = 16; i < 32; i++)
                    for (int64_t d = 0; d < dim; d += 16)
                        __builtin_prefetch(head_keys + offsets[j + i] + d);
            bool together = true;
            for (int i = 1; i < 16; i++) together &= offsets[j + i] == offsets[j] + i * dim;
            if (!together) {
                for (int i = 0; i < 16; i++)
                    std::memcpy(gathered + i * dim, head_keys + offsets[j + i], dim * sizeof(float));
                sixteen = gathered;
            }
            auto call = [&](auto function) {
                function(scaled + first * dim, sixteen, dim, visible + first, j, last - first,
                         scores + first * stride, stride);
            };
            if (dim == 64) call(score_rows<64>);
            else if (dim == 128) call(score_rows<128>);
            else call(score_rows<0>);
        }
    }

    // Adds the weighted values of keys [from, to) to rows [first, last), as far as each sees.
    void add_values(const int64_t* offsets, int64_t from, int64_t to, const float* head_values,
                    int64_t first, int64_t last, const int64_t* visible, const float* weights,
                    int64_t stride, float* result) const {
        for (int64_t r = first; r < last;) {
            const int64_t left = last - r, parts = (left + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
            const int some = static_cast<int>((left + parts - 1) / parts);
            accumulate_some(some, weights + r * stride, stride, head_values, offsets, from, to,
                            visible + r, result + r * heads.head_dim, heads.head_dim);
            r += some;
        }
    }
};

// How many leading positions of two sequences lie in the same slots.
int64_t shared_slots(const Step& step, int64_t a, int64_t b) {
    const int64_t *row = step.blocks(a), *other = step.blocks(b);
    const int64_t size = std::min(step.seq_lens[a], step.seq_lens[b]);
    int64_t block = 0;
    while (block * step.block_size < size && row[block] == other[block]) block++;
    return std::min(block * step.block_size, size);
}

// Spans of at most `most` tokens in the order of the step; neighbours that share enough, together.
void tiles_of(const Step& step, int64_t most, std::vector<Span>& spans, std::vector<Tile>& tiles) {
    for (int64_t s = 0; s < step.sequences; s++) {
        const int64_t queries = step.query_start_loc[s + 1] - step.query_start_loc[s];
        for (int64_t first = 0; first < queries; first += most) {
            const Span span{s, first, std::min(queries - first, most)};
            const int64_t at = static_cast<int64_t>(spans.size());
            if (!tiles.empty() && tiles.back().tokens + span.tokens <= most) {
                Tile& last = tiles.back();
                const int64_t before = spans[at - 1].sequence;
                const int64_t shared = std::min(last.shared, shared_slots(step, before, s));
                if (shared >= WORTH_SHARING) {
                    last = {last.first_span, last.spans + 1, last.tokens + span.tokens, shared};
                    spans.push_back(span);
                    continue;
                }
            }
            spans.push_back(span);
            tiles.push_back({at, 1, span.tokens, step.seq_lens[s] - queries + first + span.tokens});
        }
    }
}

}  // namespace

// q [tokens][heads][head_dim] with q_stride floats between tokens. Writes out, and lse if not null.
extern "C" void attend(const Step* step, const Heads* heads, const Slots* slots, const float* q,
                       int64_t q_stride, const float* keys, const float* values, float scale,
                       float* out, float* lse) {
    const Attention attention{*step, *heads, *slots, q,   keys, values,
                              q_stride, scale, out,   lse};
    std::vector<Span> spans;
    std::vector<Tile> tiles;
    tiles_of(*step, std::max<int64_t>(1, ROWS_PER_TILE / heads->group()), spans, tiles);
    const int64_t count = static_cast<int64_t>(tiles.size());
#pragma omp parallel
    {
        static thread_local Scratch scratch;
        // Neighbours in this order often share a prompt, so its keys are still in the cache.
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count * heads->key_value; i++) {
            const Tile& tile = tiles[i % count];
            attention.tile(tile, spans.data() + tile.first_span, i / count, scratch);
        }
    }
}

// Stores the step's own keys and values, k and v [tokens][kv_heads][head_dim], in their slots;
// k_stride and v_stride floats lie between tokens.
extern "C" void store_step(const Step* step, const Heads* heads, const Slots* slots,
                           const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                           float* keys, float* values) {
#pragma omp parallel for schedule(static) if (step->sequences >= PARALLEL_FROM)
    for (int64_t s = 0; s < step->sequences; s++) {
        const int64_t start = step->query_start_loc[s];
        const int64_t queries = step->query_start_loc[s + 1] - start;
        const int64_t cached = step->seq_lens[s] - queries;
        for (int64_t i = 0; i < queries; i++) {
            const int64_t slot = step->slot(step->blocks(s), cached + i);
            for (int64_t h = 0; h < heads->key_value; h++) {
                const int64_t token = start + i, head = h * heads->head_dim;
                const int64_t to = h * slots->head_stride + slot * slots->slot_stride;
                std::memcpy(keys + to, k + token * k_stride + head, heads->head_dim * sizeof(float));
                std::memcpy(values + to, v + token * v_stride + head, heads->head_dim * sizeof(float));
            }
        }
    }
}

RECORDABLE(attend)
RECORDABLE(store_step)
