// Sixteen floats at a time, with the same bits on every instruction set.
//
// F16 is one AVX-512 register, two of AVX2, four of NEON, or an array. Every operation is exactly
// rounded (IEEE 754) per lane and every reduction has one written order, so a kernel made of these
// gives the same bits wherever it is compiled. Compile with -ffp-contract=off.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)

#define SIMD_NAME "avx512"
constexpr int VECTOR_REGISTERS = 32;
constexpr int REGISTERS_PER_F16 = 1;

struct F16 {
    __m512 v;
};

inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 where_at_least(F16 x, F16 bound, F16 value) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_NLT_UQ), value.v)};
}
inline F16 power_of_two(F16 biased) {
    __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(biased.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(0x3f800000)))};
}
inline F16 load_part(const float* p, int n) { return {_mm512_maskz_loadu_ps((1u << n) - 1, p)}; }
inline void store_part(float* p, F16 a, int n) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), a.v);
}

#elif defined(__AVX2__) && defined(__FMA__)

#define SIMD_NAME "avx2"
constexpr int VECTOR_REGISTERS = 16;
constexpr int REGISTERS_PER_F16 = 2;

struct F16 {
    __m256 lo, hi;
};

inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 fma(F16 a, F16 b, F16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 where_at_least(F16 x, F16 bound, F16 value) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.lo, bound.lo, _CMP_NLT_UQ), value.lo),
            _mm256_and_ps(_mm256_cmp_ps(x.hi, bound.hi, _CMP_NLT_UQ), value.hi)};
}
inline __m256 power_of_two(__m256 biased) {
    __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(biased), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(0x3f800000)));
}
inline F16 power_of_two(F16 biased) { return {power_of_two(biased.lo), power_of_two(biased.hi)}; }

#elif defined(__ARM_NEON) && defined(__aarch64__)

#define SIMD_NAME "neon"
constexpr int VECTOR_REGISTERS = 32;
constexpr int REGISTERS_PER_F16 = 4;

struct F16 {
    float32x4_t v[4];
};

template <class Op>
inline F16 each(Op op) {
    return {{op(0), op(1), op(2), op(3)}};
}
inline F16 load(const float* p) {
    return each([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, F16 a) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
inline F16 set1(float x) {
    return each([&](int) { return vdupq_n_f32(x); });
}
inline F16 operator+(F16 a, F16 b) {
    return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline F16 operator-(F16 a, F16 b) {
    return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline F16 operator*(F16 a, F16 b) {
    return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline F16 operator/(F16 a, F16 b) {
    return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline F16 fma(F16 a, F16 b, F16 c) {
    return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline F16 max(F16 a, F16 b) {  // b where either is NaN, as on x86
    return each([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline F16 where_at_least(F16 x, F16 bound, F16 value) {
    return each([&](int i) {
        uint32x4_t less = vcltq_f32(x.v[i], bound.v[i]);
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value.v[i]), less));
    });
}
inline F16 power_of_two(F16 biased) {
    return each([&](int i) {
        uint32x4_t bits = vshlq_n_u32(vreinterpretq_u32_f32(biased.v[i]), 23);
        return vreinterpretq_f32_u32(vaddq_u32(bits, vdupq_n_u32(0x3f800000)));
    });
}

#else

#define SIMD_NAME "scalar"
constexpr int VECTOR_REGISTERS = 32;
constexpr int REGISTERS_PER_F16 = 16;

struct F16 {
    float v[16];
};

template <class Op>
inline F16 each(Op op) {
    F16 r;
    for (int i = 0; i < 16; i++) r.v[i] = op(i);
    return r;
}
inline F16 load(const float* p) {
    return each([&](int i) { return p[i]; });
}
inline void store(float* p, F16 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F16 set1(float x) {
    return each([&](int) { return x; });
}
inline F16 operator+(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline F16 operator-(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline F16 operator*(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline F16 operator/(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline F16 fma(F16 a, F16 b, F16 c) {
    return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline F16 max(F16 a, F16 b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 where_at_least(F16 x, F16 bound, F16 value) {
    return each([&](int i) { return x.v[i] < bound.v[i] ? 0.0f : value.v[i]; });
}
inline F16 power_of_two(F16 biased) {
    return each([&](int i) {
        uint32_t bits;
        std::memcpy(&bits, &biased.v[i], 4);
        bits = (bits << 23) + 0x3f800000u;
        float r;
        std::memcpy(&r, &bits, 4);
        return r;
    });
}

#endif

#if !defined(__AVX512F__)

inline F16 load_part(const float* p, int n) {
    float padded[16] = {};
    std::memcpy(padded, p, n * sizeof(float));
    return load(padded);
}
inline void store_part(float* p, F16 a, int n) {
    float all[16];
    store(all, a);
    std::memcpy(p, all, n * sizeof(float));
}

#endif

// max(a, b) gives b where either is NaN; where_at_least(x, bound, value) gives value where x is not
// below bound (NaN included), else 0; power_of_two(1.5 * 2^23 + n) gives 2^n for -126 <= n <= 127.

// Calls body(first, n) for 16 floats at a time, n < 16 for what is left.
template <class Body>
inline void for_each_16(int64_t size, Body body) {
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) body(i, 16);
    if (i < size) body(i, static_cast<int>(size - i));
}

inline F16 load_n(const float* p, int n) { return n == 16 ? load(p) : load_part(p, n); }
inline void store_n(float* p, F16 a, int n) {
    if (n == 16) store(p, a);
    else store_part(p, a, n);
}

// The order of every sum over lanes: the four fours (0 + 2) + (1 + 3), then within the four alike.
inline float sum(F16 a) {
    float x[16], y[4];
    store(x, a);
    for (int i = 0; i < 4; i++) y[i] = (x[i] + x[8 + i]) + (x[4 + i] + x[12 + i]);
    return (y[0] + y[2]) + (y[1] + y[3]);
}

// The sums of sixteen vectors, each with the bits of sum().
#if defined(__AVX512F__)

// The fours of a, b, c, d, each added up, side by side.
inline __m512 fours_of_4(const F16* a) {
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a[0].v, a[1].v, 0x44),
                              _mm512_shuffle_f32x4(a[0].v, a[1].v, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(a[2].v, a[3].v, 0x44),
                              _mm512_shuffle_f32x4(a[2].v, a[3].v, 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

inline F16 sum16(const F16* a) {
    __m512 p = fours_of_4(a), q = fours_of_4(a + 4), r = fours_of_4(a + 8), s = fours_of_4(a + 12);
    __m512 pq = _mm512_add_ps(_mm512_unpacklo_ps(p, q), _mm512_unpackhi_ps(p, q));
    __m512 rs = _mm512_add_ps(_mm512_unpacklo_ps(r, s), _mm512_unpackhi_ps(r, s));
    __m512 even = _mm512_shuffle_ps(pq, rs, 0x44), odd = _mm512_shuffle_ps(pq, rs, 0xee);
    // Lane 4 i + j now belongs to vector 4 j + i.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return {_mm512_permutexvar_ps(order, _mm512_add_ps(even, odd))};
}

#elif defined(__AVX2__) && defined(__FMA__)

inline __m128 sum_of_fours(F16 a) {
    __m256 half = _mm256_add_ps(a.lo, a.hi);
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

inline F16 sum16(const F16* a) {
    float out[16];
    for (int i = 0; i < 16; i += 4) {
        __m128 p = sum_of_fours(a[i]), q = sum_of_fours(a[i + 1]);
        __m128 r = sum_of_fours(a[i + 2]), s = sum_of_fours(a[i + 3]);
        _MM_TRANSPOSE4_PS(p, q, r, s);
        _mm_storeu_ps(out + i, _mm_add_ps(_mm_add_ps(p, r), _mm_add_ps(q, s)));
    }
    return load(out);
}

#else

inline F16 sum16(const F16* a) {
    float out[16];
    for (int i = 0; i < 16; i++) out[i] = sum(a[i]);
    return load(out);
}

#endif

inline float highest(F16 a) {
    float x[16], m = -INFINITY;
    store(x, a);
    for (float value : x) m = value > m ? value : m;
    return m;
}

// e^x to about 1 ulp: 2^n · p(r), r = x - n ln 2 in two parts (Cody and Waite 1980), p the Taylor
// polynomial of degree 7. 0 below -87.33 (the last normal result), clamped above 88.37; NaN stays.
inline F16 exp(F16 x) {
    const F16 least = set1(-87.33f), shift = set1(12582912.0f);
    F16 bounded = max(least, set1(0.0f) - max(set1(-88.37f), set1(0.0f) - x));
    F16 biased = fma(bounded, set1(1.44269504f), shift);
    F16 n = biased - shift;
    F16 r = fma(n, set1(-0.693359375f), bounded);
    r = fma(n, set1(2.12194440e-4f), r);
    F16 p = set1(1.98412698e-4f);
    p = fma(p, r, set1(1.38888889e-3f));
    p = fma(p, r, set1(8.33333333e-3f));
    p = fma(p, r, set1(4.16666667e-2f));
    p = fma(p, r, set1(1.66666667e-1f));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    return where_at_least(x, least, p * power_of_two(biased));
}

}  // namespace
