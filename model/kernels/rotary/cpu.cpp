// RMSNorm of heads and rotation of their adjacent pairs, a token at a time: squares summed in sixteen lanes and then in
// a fixed tree, each pair turned by two products and a sum a value.
#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

using namespace simd;

namespace {

#if defined(__AVX512F__)
F16 swap_pairs(F16 a) { return {_mm512_permute_ps(a.v, 0xB1)}; }
#else
F16 swap_pairs(F16 a) { return {_mm256_permute_ps(a.lo, 0xB1), _mm256_permute_ps(a.hi, 0xB1)}; }
#endif

template <bool kBf16>
F16 load_as(const char* p, int64_t i, int n) {
  if constexpr (kBf16) {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(p) + i;
    return n >= kLanes ? load_bf16(x) : load_bf16(x, n);
  } else {
    return load(reinterpret_cast<const float*>(p) + i, std::min(n, kLanes));
  }
}

void store_as(char* p, int64_t i, F16 y, int n, bool is_bf16) {
  n = std::min(n, kLanes);
  if (is_bf16) {
    store_bf16(reinterpret_cast<uint16_t*>(p) + i, y, n);
  } else {
    store(reinterpret_cast<float*>(p) + i, y, n);
  }
}

template <bool kBf16>
F16 squares_of(const char* x, int64_t at, int64_t dim, F16 squares) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    const F16 a = load_as<kBf16>(x, at + i, int(dim - i));
    squares = fma(a, a, squares);
  }
  return squares;
}

struct Call {
  const char* x;
  const float *by, *weight;  // by: cosine and sine of each pair; weight may be null
  char* y;
  int64_t tokens, heads, dim, pairs, row_stride, head_stride, together, in_bf16, out_bf16;
  float eps;
};

template <bool kBf16>
void run(const Call& call) {
  const int64_t dim = call.dim, rotated = 2 * call.pairs;
#pragma omp parallel if (call.tokens * call.heads * dim > 16384)
  {
    // (a + bi)(c + di): a value times its cosine, plus its neighbour times the sine, negative for the real part.
    std::vector<float> cosine(dim + kLanes, 1.0f), sine(dim + kLanes, 0.0f);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < call.tokens; ++t) {
      for (int64_t i = 0; i < rotated; i += 2) {
        const float* by = call.by + t * rotated + i;
        cosine[i] = cosine[i + 1] = by[0];
        sine[i] = -by[1];
        sine[i + 1] = by[1];
      }
      F16 inverse = zero();
      if (call.weight && call.together) {
        F16 squares = zero();
        for (int64_t head = 0; head < call.heads; ++head) {
          squares = squares_of<kBf16>(call.x, t * call.row_stride + head * call.head_stride, dim, squares);
        }
        inverse = set1(1.0f / std::sqrt(sum(squares) / float(call.heads * dim) + call.eps));
      }
      for (int64_t head = 0; head < call.heads; ++head) {
        const int64_t at = t * call.row_stride + head * call.head_stride;
        const float* weight = call.weight && call.together ? call.weight + head * dim : call.weight;
        if (weight && !call.together) {
          inverse = set1(1.0f / std::sqrt(sum(squares_of<kBf16>(call.x, at, dim, zero())) / float(dim) + call.eps));
        }
        for (int64_t i = 0; i < dim; i += kLanes) {
          const int n = int(dim - i);
          F16 a = load_as<kBf16>(call.x, at + i, n);
          if (weight) a = mul(mul(a, inverse), load(weight + i, std::min(n, kLanes)));
          if (i < rotated) {
            const F16 turned = add(mul(a, load(&cosine[i])), mul(swap_pairs(a), load(&sine[i])));
            a = turned;
          }
          store_as(call.y, (t * call.heads + head) * dim + i, a, n, call.out_bf16);
        }
      }
    }
  }
}

}  // namespace

extern "C" void rotary(const Call* call) {
  if (call->in_bf16) {
    run<true>(*call);
  } else {
    run<false>(*call);
  }
}
