// out[m][n] = sum over k of x[m][k] * w[n][k] (+ bias[n]), weights read where they lie.
//
// Lanes run over rows of x, so an output is one chain of FMAs along k: in blocks of BLOCK_K, whose
// sums are added in order. Nothing else enters its bits: not the number of rows, not the place of
// a row, not the tile that computed it, not the thread, not the width of the machine's vectors.
// (Partial sums per block also keep the error of long chains down.)
//
//     x  [rows][K]  ── transposed per block of rows ──> packed [K][16 lanes · V]
//     w  [N][K]     read as scalars, each broadcast to all lanes

#include <algorithm>
#include <vector>

#include "../../../attention/native/recording.h"
#include "../../../attention/native/simd.h"

namespace {

// A panel of 64 rows by BLOCK_K stays in the first-level cache, so that the few outstanding misses a
// core can have are left to the weights, which come from far away and are read once.
constexpr int BLOCK_K = 128;
constexpr int PACKED_K = 32;     // columns of x that are packed at a time
constexpr int BLOCK_ROWS = 256;  // rows packed at a time
constexpr int MAX_BLOCK_N = 96;  // outputs of one unit of work; every tile width divides it

// Tiles are V vectors of rows by W outputs: as many accumulators as the registers hold.
constexpr int ACCUMULATORS = VECTOR_REGISTERS == 32 && REGISTERS_PER_F16 == 1 ? 24 : 6;
constexpr int MAX_VECTORS = ACCUMULATORS == 24 ? 4 : 1;

// sums[n][m] of one block of k, set or added to. `next` is where the weights of the next tile begin.
template <int V, int W>
inline void tile(const float* packed, const float* w, const float* next, int64_t stride_w,
                 int depth, float* sums, bool add) {
    F16 acc[W][V];
    for (int n = 0; n < W; n++)
        for (int v = 0; v < V; v++) acc[n][v] = set1(0.0f);
    auto step = [&](int k) __attribute__((always_inline)) {
        F16 x[V];
        for (int v = 0; v < V; v++) x[v] = load(packed + (k * V + v) * 16);
#pragma GCC unroll 32
        for (int n = 0; n < W; n++) {
            F16 weight = set1(w[n * stride_w + k]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[n][v] = fma(x[v], weight, acc[n][v]);
        }
    };
    int k = 0;
    for (; k + 16 <= depth; k += 16) {
#pragma GCC unroll 32
        for (int n = 0; n < W; n++) __builtin_prefetch(next + n * stride_w + k);
        for (int i = 0; i < 16; i++) step(k + i);
    }
    for (; k < depth; k++) step(k);
    for (int n = 0; n < W; n++)
        for (int v = 0; v < V; v++) {
            float* p = sums + (n * V + v) * 16;
            store(p, add ? load(p) + acc[n][v] : acc[n][v]);
        }
}

// sums of `width` outputs for the rows of one panel; `after` is what is read when these are done.
template <int V>
void tiles(const float* packed, const float* w, const float* after, int64_t stride_w, int depth,
           int width, float* sums, bool add) {
    constexpr int W = ACCUMULATORS / V;
    int n = 0;
    for (; n + W <= width; n += W) {
        const float* next = n + 2 * W <= width ? w + (n + W) * stride_w : after;
        tile<V, W>(packed, w + n * stride_w, next, stride_w, depth, sums + n * V * 16, add);
    }
    for (; n + 4 <= width; n += 4)
        tile<V, 4>(packed, w + n * stride_w, after, stride_w, depth, sums + n * V * 16, add);
    for (; n < width; n++)
        tile<V, 1>(packed, w + n * stride_w, after, stride_w, depth, sums + n * V * 16, add);
}

// 16 x 16 floats from rows to columns; rows or columns past the given counts are read as zero and
// not written.
void transpose_16(const float* from, int64_t stride_from, int rows, int columns, float* to,
                  int64_t stride_to) {
    if (rows == 16 && columns == 16) {
#if defined(__AVX512F__)
        // Whole cache lines in and out: what lies with the other core is asked for once.
        __m512 a[16], b[16];
        for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(from + i * stride_from);
        for (int i = 0; i < 16; i += 4) {  // 4 x 4 within each quarter
            __m512d p = _mm512_castps_pd(_mm512_unpacklo_ps(a[i], a[i + 1]));
            __m512d q = _mm512_castps_pd(_mm512_unpackhi_ps(a[i], a[i + 1]));
            __m512d r = _mm512_castps_pd(_mm512_unpacklo_ps(a[i + 2], a[i + 3]));
            __m512d s = _mm512_castps_pd(_mm512_unpackhi_ps(a[i + 2], a[i + 3]));
            b[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(p, r));
            b[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(p, r));
            b[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(q, s));
            b[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(q, s));
        }
        for (int i = 0; i < 4; i++) {  // 4 x 4 of quarters
            __m512 p = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
            __m512 q = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
            __m512 r = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
            __m512 s = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
            _mm512_storeu_ps(to + i * stride_to, _mm512_shuffle_f32x4(p, r, 0x88));
            _mm512_storeu_ps(to + (i + 4) * stride_to, _mm512_shuffle_f32x4(q, s, 0x88));
            _mm512_storeu_ps(to + (i + 8) * stride_to, _mm512_shuffle_f32x4(p, r, 0xdd));
            _mm512_storeu_ps(to + (i + 12) * stride_to, _mm512_shuffle_f32x4(q, s, 0xdd));
        }
        return;
#elif defined(__AVX2__)
        for (int j = 0; j < 16; j += 4)
            for (int i = 0; i < 16; i += 4) {
                const float* p = from + i * stride_from + j;
                __m128 a = _mm_loadu_ps(p), b = _mm_loadu_ps(p + stride_from);
                __m128 c = _mm_loadu_ps(p + 2 * stride_from), d = _mm_loadu_ps(p + 3 * stride_from);
                _MM_TRANSPOSE4_PS(a, b, c, d);
                float* q = to + j * stride_to + i;
                _mm_storeu_ps(q, a);
                _mm_storeu_ps(q + stride_to, b);
                _mm_storeu_ps(q + 2 * stride_to, c);
                _mm_storeu_ps(q + 3 * stride_to, d);
            }
        return;
#endif
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) to[j * stride_to + i] = from[i * stride_from + j];
}

// A panel is up to V * 16 rows, packed [K][V][16]; lanes past the last row hold zeros.
struct Panel {
    int64_t first_row;  // within the block of rows
    int rows, vectors;
};

int panels_of(int64_t rows, Panel* panels) {
    int count = 0;
    for (int64_t first = 0; first < rows;) {
        int vectors = static_cast<int>(std::min<int64_t>((rows - first + 15) / 16, MAX_VECTORS));
        int taken = static_cast<int>(std::min<int64_t>(rows - first, vectors * 16));
        panels[count++] = {first, taken, vectors};
        first += taken;
    }
    return count;
}

void pack(const float* x, int64_t stride_x, int64_t k0, int depth, const Panel& panel,
          float* packed) {
    for (int v = 0; v < panel.vectors; v++) {
        int rows = std::min(panel.rows - v * 16, 16);
        const float* from = x + (panel.first_row + v * 16) * stride_x + k0;
        float* to = packed + v * 16;
        int64_t stride = panel.vectors * 16;
        if (rows < 16)
            for (int k = 0; k < depth; k++) store(to + k * stride, set1(0.0f));
        for (int k = 0; k < depth; k += 16)
            transpose_16(from + k, stride_x, rows, std::min(depth - k, 16), to + k * stride, stride);
    }
}

void unpack(const float* sums, const Panel& panel, int width, const float* bias, float* out,
            int64_t stride_out) {
    for (int v = 0; v < panel.vectors; v++) {
        int rows = std::min(panel.rows - v * 16, 16);
        float* to = out + (panel.first_row + v * 16) * stride_out;
        for (int n = 0; n < width; n += 16)
            transpose_16(sums + (n * panel.vectors + v) * 16, panel.vectors * 16,
                         std::min(width - n, 16), rows, to + n, stride_out);
    }
    if (bias != nullptr)
        for (int m = 0; m < panel.rows; m++) {
            float* row = out + (panel.first_row + m) * stride_out;
            for (int n = 0; n < width; n++) row[n] += bias[n];
        }
}

void panel_sums(const float* packed, const Panel& panel, const float* w, const float* after,
                int64_t stride_w, int depth, int width, float* sums, bool add) {
    switch (panel.vectors) {
        case 1: return tiles<1>(packed, w, after, stride_w, depth, width, sums, add);
#if defined(__AVX512F__)
        case 2: return tiles<2>(packed, w, after, stride_w, depth, width, sums, add);
        case 3: return tiles<3>(packed, w, after, stride_w, depth, width, sums, add);
        case 4: return tiles<4>(packed, w, after, stride_w, depth, width, sums, add);
#endif
    }
}

float* grown(std::vector<float>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    return memory.data();
}

}  // namespace

extern "C" void linear(const float* x, int64_t rows, int64_t depth, const float* w, int64_t width,
                       const float* bias, float* out) {
    static thread_local std::vector<float> packed_memory;
    const int64_t unit = width >= 16 * MAX_BLOCK_N ? MAX_BLOCK_N : width >= 384 ? 48 : 24;
    const int64_t blocks_n = (width + unit - 1) / unit;
    const int64_t padded = (std::min<int64_t>(rows, BLOCK_ROWS) + 15) / 16 * 16;
    float* packed = grown(packed_memory, padded * depth + 16);
    packed += (16 - (reinterpret_cast<uintptr_t>(packed) / 4) % 16) % 16;
#pragma omp parallel
    {
        static thread_local std::vector<float> sums_memory;
        float* sums = grown(sums_memory, BLOCK_ROWS * MAX_BLOCK_N);
        for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
            const float* block = x + first * depth;
            Panel panels[BLOCK_ROWS / 16];
            int count = panels_of(std::min<int64_t>(rows - first, BLOCK_ROWS), panels);
#pragma omp for collapse(2) schedule(static)
            for (int p = 0; p < count; p++)
                for (int64_t k0 = 0; k0 < depth; k0 += PACKED_K) {
                    int64_t size = panels[p].vectors * 16;
                    int part = static_cast<int>(std::min<int64_t>(depth - k0, PACKED_K));
                    pack(block, depth, k0, part, panels[p],
                         packed + panels[p].first_row * depth + k0 * size);
                }
#pragma omp for schedule(dynamic)
            for (int64_t b = 0; b < blocks_n; b++) {
                const int64_t n0 = b * unit;
                const int part_n = static_cast<int>(std::min(width - n0, unit));
                for (int64_t k0 = 0; k0 < depth; k0 += BLOCK_K) {
                    const int part = static_cast<int>(std::min<int64_t>(depth - k0, BLOCK_K));
                    const float* here = w + n0 * depth + k0;
                    const float* then = k0 + BLOCK_K < depth ? here + BLOCK_K
                                        : b + 1 < blocks_n   ? w + (n0 + unit) * depth
                                                             : here;
                    for (int p = 0; p < count; p++) {
                        const float* panel = packed + panels[p].first_row * depth + k0 * panels[p].vectors * 16;
                        panel_sums(panel, panels[p], here, p + 1 < count ? here : then, depth, part,
                                   part_n, sums + panels[p].first_row * unit, k0 > 0);
                    }
                }
                for (int p = 0; p < count; p++)
                    unpack(sums + panels[p].first_row * unit, panels[p], part_n,
                           bias == nullptr ? nullptr : bias + n0, out + first * width + n0, width);
            }
        }
    }
}

RECORDABLE(linear)
