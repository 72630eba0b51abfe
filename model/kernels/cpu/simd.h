// Sixteen floats at a time: one AVX-512 register, or two of AVX2. The same operations on the same lanes in the same
// order, so a kernel written with these gives the same bits on both.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace simd {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct F16 {
  __m512 v;
};

inline __mmask16 first(int n) { return n >= 16 ? __mmask16(0xFFFF) : __mmask16((1u << n) - 1u); }

inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }  // zeros from lane n on
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline void store(float* p, F16 a, int n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
inline F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }    // a b + c
inline F16 fnma(F16 a, F16 b, F16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a b
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }  // b when either is NaN
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 keep_first(F16 a, int n, float other) {  // lanes from n on become `other`
  return {_mm512_mask_blend_ps(first(n), _mm512_set1_ps(other), a.v)};
}
inline __m256 low(F16 a) { return _mm512_castps512_ps256(a.v); }
inline __m256 high(F16 a) { return _mm512_extractf32x8_ps(a.v, 1); }
inline F16 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline F16 load_bf16(const uint16_t* p, int n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p)), 16))};
}
inline __m256i bf16_bits(F16 a) {  // round to nearest even; NaN becomes 0x7FC0
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7FC0)));
}
inline void store_bf16(uint16_t* p, F16 a) { _mm256_storeu_si256((__m256i*)p, bf16_bits(a)); }
inline void store_bf16(uint16_t* p, F16 a, int n) { _mm256_mask_storeu_epi16(p, first(n), bf16_bits(a)); }
inline F16 power_of_two(F16 a, F16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }  // a 2^n, n whole
inline F16 round_even(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

#else

struct F16 {
  __m256 lo, hi;
};

inline __m256i first8(int n) {
  alignas(32) static const int32_t kMask[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  n = n < 0 ? 0 : n > 8 ? 8 : n;
  return _mm256_loadu_si256((const __m256i*)(kMask + 8 - n));
}

inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F16 load(const float* p, int n) {
  return {_mm256_maskload_ps(p, first8(n)), _mm256_maskload_ps(p + 8, first8(n - 8))};
}
inline void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(float* p, F16 a, int n) {
  _mm256_maskstore_ps(p, first8(n), a.lo);
  _mm256_maskstore_ps(p + 8, first8(n - 8), a.hi);
}
inline F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F16 fnma(F16 a, F16 b, F16 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F16 keep_first(F16 a, int n, float other) {
  const __m256 o = _mm256_set1_ps(other);
  return {_mm256_blendv_ps(o, a.lo, _mm256_castsi256_ps(first8(n))),
          _mm256_blendv_ps(o, a.hi, _mm256_castsi256_ps(first8(n - 8)))};
}
inline __m256 low(F16 a) { return a.lo; }
inline __m256 high(F16 a) { return a.hi; }
inline __m256 widen_bf16(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline F16 load_bf16(const uint16_t* p) {
  return {widen_bf16(_mm_loadu_si128((const __m128i*)p)), widen_bf16(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline F16 load_bf16(const uint16_t* p, int n) {
  uint16_t padded[16] = {};
  std::memcpy(padded, p, 2 * (n < 16 ? n : 16));
  return load_bf16(padded);
}
inline __m256i bf16_bits8(__m256 a) {  // in 32-bit lanes
  const __m256i u = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
}
inline __m256i bf16_bits(F16 a) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(bf16_bits8(a.lo), bf16_bits8(a.hi)), 0xD8);
}
inline void store_bf16(uint16_t* p, F16 a) { _mm256_storeu_si256((__m256i*)p, bf16_bits(a)); }
inline void store_bf16(uint16_t* p, F16 a, int n) {
  uint16_t all[16];
  store_bf16(all, a);
  std::memcpy(p, all, 2 * (n < 16 ? n : 16));
}
inline __m256 power_of_two8(__m256 a, __m256 n) {  // in two steps, so that only the last one can round or overflow
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  const __m256i bias = _mm256_set1_epi32(127), rest = _mm256_sub_epi32(whole, half);
  const __m256 by = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(a, by), _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
inline F16 power_of_two(F16 a, F16 n) { return {power_of_two8(a.lo, n.lo), power_of_two8(a.hi, n.hi)}; }  // |n| <= 252
inline F16 round_even(F16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kNearest), _mm256_round_ps(a.hi, kNearest)};
}

#endif

inline F16 zero() { return set1(0.0f); }

// The sum of the lanes, always in the same tree.
inline float sum(F16 a) {
  const __m256 eight = _mm256_add_ps(low(a), high(a));
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}

inline float largest(F16 a) {
  const __m256 eight = _mm256_max_ps(low(a), high(a));
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

// e^x to about one unit in the last place: x = n ln 2 + r, a polynomial in r (Cephes' coefficients), times 2^n.
// Minus infinity gives 0, large values infinity, NaN stays NaN.
inline F16 exp(F16 x) {
  x = max(set1(-104.0f), min(set1(89.0f), x));
  const F16 n = round_even(mul(x, set1(1.44269504088896341f)));
  F16 r = fnma(n, set1(0.693359375f), x);
  r = fnma(n, set1(-2.12194440e-4f), r);
  F16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  return power_of_two(p, n);
}

inline F16 sigmoid(F16 x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

}  // namespace simd
