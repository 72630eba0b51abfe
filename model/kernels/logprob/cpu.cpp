// Logprobs of given tokens and entropies, a row by one thread; the backward pass of the logprobs.
#include <algorithm>

#include "softmax.h"

using softmax::F16;
using softmax::Row;
using softmax::Scaled;

namespace {

constexpr int64_t kThreadsFrom = 16384;  // logits
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double entropy(const Scaled& scaled, int64_t sum) {
  softmax::Sum terms;  // w (-d), at most 1 / e each
  scaled.each(0, scaled.row.size, [&](int64_t, int, F16 distances) {
    const F16 minus = simd::sub(simd::zero(), simd::max(simd::set1(softmax::kLowest), distances));
    terms.add(simd::mul(softmax::weight(distances), minus));
  });
  return softmax::logarithm(sum) + double(terms.total()) / double(sum);
}

}  // namespace

// `entropies` may be null.
extern "C" void logprobs(const float* logits, const int64_t* ids, const float* temperatures, float* out,
                         double* entropies, int64_t rows, int64_t vocabulary) {
#pragma omp parallel for schedule(static) if (rows * vocabulary > kThreadsFrom)
  for (int64_t r = 0; r < rows; ++r) {
    const Scaled scaled(softmax::read_row(logits + r * vocabulary, vocabulary), temperatures[r]);
    const bool finite = scaled.finite();
    const int64_t sum = finite ? scaled.sum() : 1;
    out[r] = finite ? softmax::logprob(scaled.distance(ids[r]), sum) : kNan;
    if (entropies) entropies[r] = finite ? entropy(scaled, sum) : kNan;
  }
}

// grad_logits = (onehot(id) - softmax) * grad / temperature
extern "C" void logprobs_backward(const float* logits, const int64_t* ids, const float* temperatures, const float* grad,
                                  float* grad_logits, int64_t rows, int64_t vocabulary) {
#pragma omp parallel for schedule(static) if (rows * vocabulary > kThreadsFrom)
  for (int64_t r = 0; r < rows; ++r) {
    float* out = grad_logits + r * vocabulary;
    const Scaled scaled(softmax::read_row(logits + r * vocabulary, vocabulary), temperatures[r]);
    if (!scaled.finite()) {
      std::fill(out, out + vocabulary, kNan);
      continue;
    }
    const float outer = grad[r] / temperatures[r];
    const F16 factor = simd::set1(float(-double(outer) / std::ldexp(double(scaled.sum()), -44)));
    scaled.each(0, vocabulary, [&](int64_t at, int n, F16 distances) {
      simd::store(out + at, simd::mul(softmax::weight(distances), factor), n);
    });
    out[ids[r]] += outer;
  }
}
