// Pages of keys or values as C++ sees them, their four kinds of elements widened to fp32, and the transposition that
// turns sixteen keys into sixteen lanes. `attention/reference.py` defines what a page holds.
#pragma once
#include <algorithm>

#include "simd.h"

namespace simd {

#if defined(__AVX512F__)

[[gnu::always_inline]] inline void transpose(F16 (&rows)[16]) {
  __m512 t[16], u[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
      u[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      u[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  // Quarter q of u[4 a + c] is column 4 q + c of the rows 4 a .. 4 a + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 even_low = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xDD);
    const __m512 even_high = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xDD);
    rows[c].v = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    rows[4 + c].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    rows[8 + c].v = _mm512_shuffle_f32x4(even_low, even_high, 0xDD);
    rows[12 + c].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0xDD);
  }
}

// Of lanes that hold two neighbouring bf16: the first, and the second.
inline F16 even_bf16(F16 a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 16))}; }
inline F16 odd_bf16(F16 a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(int(0xFFFF0000u))))};
}
inline F16 load_int8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
inline float first_lane(F16 a) { return _mm512_cvtss_f32(a.v); }
inline F16 from_half(__m256i bits) { return {_mm512_cvtph_ps(bits)}; }

#else

[[gnu::always_inline]] inline void transpose8(__m256* rows) {
  __m256 t[8], u[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xEE);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    rows[c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
    rows[4 + c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
  }
}

[[gnu::always_inline]] inline void transpose(F16 (&rows)[16]) {
  __m256 quarters[4][8];
  for (int i = 0; i < 8; ++i) {
    quarters[0][i] = rows[i].lo;
    quarters[1][i] = rows[8 + i].lo;
    quarters[2][i] = rows[i].hi;
    quarters[3][i] = rows[8 + i].hi;
  }
  for (auto& quarter : quarters) transpose8(quarter);
  for (int i = 0; i < 8; ++i) {
    rows[i] = {quarters[0][i], quarters[1][i]};
    rows[8 + i] = {quarters[2][i], quarters[3][i]};
  }
}

inline __m256 even_bf16(__m256 a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 16)); }
inline __m256 odd_bf16(__m256 a) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(int(0xFFFF0000u))));
}
inline F16 even_bf16(F16 a) { return {even_bf16(a.lo), even_bf16(a.hi)}; }
inline F16 odd_bf16(F16 a) { return {odd_bf16(a.lo), odd_bf16(a.hi)}; }
inline F16 load_int8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
inline float first_lane(F16 a) { return _mm256_cvtss_f32(a.lo); }
inline F16 from_half(__m256i bits) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
}

#endif

// e4m3fn: as fp16 the same bits are 2^-8 of the value, subnormals included; only its NaN is a number there.
inline F16 load_fp8(const uint8_t* p) {
  const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i magnitude = _mm256_and_si256(bytes, _mm256_set1_epi16(0x7F));
  const __m256i sign = _mm256_slli_epi16(_mm256_sub_epi16(bytes, magnitude), 8);
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F));
  const __m256i half = _mm256_or_si256(_mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7)), nan);
  return mul(from_half(half), set1(256.0f));
}

}  // namespace simd

namespace pages {

using simd::F16;
using simd::kLanes;

enum Kind : int64_t { kFp32, kBf16, kInt8, kFp8 };

using Bf16 = uint16_t;
struct Fp8 {
  uint8_t bits;
};

struct Pages {
  char* rows;
  float* scales;
  int64_t row_stride, head_stride;  // in elements
  int64_t scale_row_stride, scale_head_stride;
  int64_t dim, kind, slots;
};

inline int64_t size_of(int64_t kind) { return kind == kFp32 ? 4 : kind == kBf16 ? 2 : 1; }
inline int64_t padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

inline F16 widen(const float* p) { return simd::load(p); }
inline F16 widen(const Bf16* p) { return simd::load_bf16(p); }
inline F16 widen(const int8_t* p) { return simd::load_int8(p); }
inline F16 widen(const Fp8* p) { return simd::load_fp8(&p->bits); }

template <class T>
F16 widen(const T* p, int n) {  // zeros from lane n on
  if (n >= kLanes) return widen(p);
  T all[kLanes] = {};
  std::memcpy(all, p, n * sizeof(T));
  return widen(all);
}

}  // namespace pages
