// RMSNorm of fp32 rows: each row by one thread, its squares summed in sixteen lanes and then in a fixed tree.
#include <cmath>

#include "simd.h"

using namespace simd;

extern "C" void rms_norm(const float* x, const float* weight, float* y, int64_t rows, int64_t dim, float eps) {
#pragma omp parallel for schedule(static) if (rows * dim > 16384)
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * dim;
    float* out = y + row * dim;
    F16 squares = zero();
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) squares = fma(load(in + i), load(in + i), squares);
    const int rest = int(dim - i);
    if (rest) squares = fma(load(in + i, rest), load(in + i, rest), squares);
    const F16 inverse = set1(1.0f / std::sqrt(sum(squares) / float(dim) + eps));
    for (i = 0; i + kLanes <= dim; i += kLanes) store(out + i, mul(mul(load(in + i), inverse), load(weight + i)));
    if (rest) store(out + i, mul(mul(load(in + i, rest), inverse), load(weight + i, rest)), rest);
  }
}
