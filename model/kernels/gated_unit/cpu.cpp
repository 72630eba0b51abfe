// silu(g) u of rows [g | u]. Torch's own silu takes another exp for the last values of a tensor than for the others,
// so its bits depend on how many rows there are.
#include "simd.h"

using namespace simd;

namespace {

template <class T, class Load, class Store>
void gate_rows(const T* h, T* y, int64_t rows, int64_t width, Load load_lanes, Store store_lanes) {
#pragma omp parallel for schedule(static) if (rows * width > 8192)
  for (int64_t row = 0; row < rows; ++row) {
    const T *gate = h + 2 * row * width, *up = gate + width;
    for (int64_t i = 0; i < width; i += kLanes) {
      const int n = int(width - i < kLanes ? width - i : kLanes);
      const F16 g = load_lanes(gate + i, n);
      store_lanes(y + row * width + i, mul(mul(g, sigmoid(g)), load_lanes(up + i, n)), n);
    }
  }
}

}  // namespace

extern "C" void gated_unit(const void* h, void* y, int64_t rows, int64_t width, int32_t bf16) {
  if (bf16) {
    gate_rows((const uint16_t*)h, (uint16_t*)y, rows, width, [](const uint16_t* p, int n) { return load_bf16(p, n); },
              [](uint16_t* p, F16 a, int n) { store_bf16(p, a, n); });
  } else {
    gate_rows((const float*)h, (float*)y, rows, width, [](const float* p, int n) { return load(p, n); },
              [](float* p, F16 a, int n) { store(p, a, n); });
  }
}
