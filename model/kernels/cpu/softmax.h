// The exponentials of a row of logits and their sums, with the same bits whatever the instruction set, the order and
// the batch: a weight e^(z - max z) is made of single products and sums (no fma, so that torch's operations give it,
// too), and weights are added as integers of 2^-44, which no order of addition changes.
#pragma once
#include <cmath>
#include <limits>

#include "simd.h"

namespace softmax {

using simd::F16;
using simd::kLanes;

constexpr float kOne = 17592186044416.0f;  // 2^44: a weight of 1. 2^18 of them fit an int64
constexpr float kLowest = -87.0f;          // weights stay normal numbers; from -31 on they count as 0

inline F16 weight(F16 distance) {  // distance <= 0
  using namespace simd;
  const F16 x = max(set1(kLowest), distance);
  const F16 n = round_even(mul(x, set1(1.44269504088896341f)));
  const F16 r = sub(sub(x, mul(n, set1(0.693359375f))), mul(n, set1(-2.12194440e-4f)));
  F16 p = set1(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = add(mul(p, r), set1(c));
  }
  p = add(add(mul(p, mul(r, r)), r), set1(1.0f));
  return power_of_two(p, n);
}

inline int64_t count(float weight) { return _mm_cvtss_si64(_mm_set_ss(weight * kOne)); }  // nearest, ties to even

// The sum of `count` over all lanes that were added.
class Sum {
 public:
#if defined(__AVX512F__)
  void add(F16 weights) {
    const F16 scaled = simd::mul(weights, simd::set1(kOne));
    low_ = _mm512_add_epi64(low_, _mm512_cvtps_epi64(simd::low(scaled)));
    high_ = _mm512_add_epi64(high_, _mm512_cvtps_epi64(simd::high(scaled)));
  }
  int64_t total() const { return _mm512_reduce_add_epi64(_mm512_add_epi64(low_, high_)); }

 private:
  __m512i low_ = _mm512_setzero_si512(), high_ = _mm512_setzero_si512();
#else
  void add(F16 weights) {
    const F16 scaled = simd::mul(weights, simd::set1(kOne));
    add4(low_, _mm256_castps256_ps128(scaled.lo));
    add4(high_, _mm256_extractf128_ps(scaled.lo, 1));
    add4(low_, _mm256_castps256_ps128(scaled.hi));
    add4(high_, _mm256_extractf128_ps(scaled.hi, 1));
  }
  int64_t total() const {
    alignas(32) int64_t lane[4];
    _mm256_store_si256((__m256i*)lane, _mm256_add_epi64(low_, high_));
    return lane[0] + lane[1] + lane[2] + lane[3];
  }

 private:
  static void add4(__m256i& sum, __m128 scaled) {  // the last bit of a double near 1.5 * 2^52 is worth 1
    const __m256d anchor = _mm256_set1_pd(6755399441055744.0);
    const __m256i bits = _mm256_castpd_si256(_mm256_add_pd(_mm256_cvtps_pd(scaled), anchor));
    sum = _mm256_add_epi64(sum, _mm256_sub_epi64(bits, _mm256_castpd_si256(anchor)));
  }
  __m256i low_ = _mm256_setzero_si256(), high_ = _mm256_setzero_si256();
#endif
};

// What a row's weights are made from.
struct Row {
  const float* logits;
  int64_t size;
  float largest;  // logit
  bool finite;    // all of it
};

inline Row read_row(const float* logits, int64_t size) {
  using namespace simd;
  F16 top = set1(-std::numeric_limits<float>::infinity()), strange = zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const F16 x = load(logits + i);
    top = max(top, x);
    strange = add(strange, mul(x, zero()));  // zeros, unless a value is infinite or NaN
  }
  if (i < size) {
    const F16 x = load(logits + i, int(size - i));
    top = max(top, keep_first(x, int(size - i), -std::numeric_limits<float>::infinity()));
    strange = add(strange, mul(x, zero()));
  }
  return {logits, size, largest(top), sum(strange) == 0.0f};
}

// A row divided by a temperature.
struct Scaled {
  Row row;
  float temperature, top;

  Scaled(const Row& row, float temperature) : row(row), temperature(temperature), top(row.largest / temperature) {}

  bool finite() const { return row.finite && std::isfinite(top); }
  F16 distance(F16 logits) const {
    const F16 z = temperature == 1.0f ? logits : simd::div(logits, simd::set1(temperature));
    return simd::sub(z, simd::set1(top));
  }
  float distance(int64_t id) const { return row.logits[id] / temperature - top; }

  // `visit(first, n, distances)` for each sixteen logits; lanes from n on are minus infinity.
  template <class Visit>
  void each(int64_t begin, int64_t end, Visit visit) const {
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) visit(i, kLanes, distance(simd::load(row.logits + i)));
    if (i == end) return;
    const int rest = int(end - i);
    const F16 distances = distance(simd::load(row.logits + i, rest));
    visit(i, rest, simd::keep_first(distances, rest, -std::numeric_limits<float>::infinity()));
  }

  int64_t sum() const {
    Sum total;
    each(0, row.size, [&](int64_t, int, F16 distances) { total.add(weight(distances)); });
    return total.total();
  }
};

inline double logarithm(int64_t sum) { return std::log(std::ldexp(double(sum), -44)); }

inline float logprob(float distance, int64_t sum) { return float(double(distance) - logarithm(sum)); }

}  // namespace softmax
