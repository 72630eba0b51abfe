// y = x W^T with W as MXFP4 tiles: the contract of gemm.h on plain arrays, for its tests and benches.
#include <omp.h>

#include <algorithm>
#include <cstdlib>

#include "gemm.h"

// x: fp32 or bf16 [rows, k], `stride` elements apart. codes [strips, blocks, 256], scales [strips, blocks, 16],
// extreme [strips]. y: fp32 [rows, 16 strips].
extern "C" void mxfp4_product(const void* x, int64_t stride, int32_t x_is_bf16, int64_t rows, int64_t k,
                              const uint8_t* codes, const uint8_t* scales, const uint8_t* extreme, int64_t strips,
                              float* y) {
  using namespace gemm;
  constexpr int64_t kChunkRows = 256;
  const int64_t blocks = (k + kBlock - 1) / kBlock, pairs = (strips + kMaxStrips - 1) / kMaxStrips;
  const int64_t size = x_is_bf16 ? 2 : 4;
  const Dtype dtype = Dtype(x_is_bf16);
  const int64_t bytes = rows_bytes(std::min(rows, kChunkRows), blocks, dtype);
  void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
#pragma omp parallel
  {
    const Scope scope;
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t first = 0; first < rows; first += kChunkRows) {
      const int64_t count = std::min(kChunkRows, rows - first);
      prepare((const char*)x + first * stride * size, stride, nullptr, count, k, dtype, memory,
              blocks * thread / threads, blocks * (thread + 1) / threads);
#pragma omp barrier
      const Rows ready{memory, count, blocks, dtype};
      for (int64_t pair = pairs * thread / threads; pair < pairs * (thread + 1) / threads; ++pair) {
        const int64_t strip = pair * kMaxStrips;
        const int num = int(std::min<int64_t>(kMaxStrips, strips - strip));
        Mxfp4Strip of[kMaxStrips];
        for (int s = 0; s < num; ++s) {
          const int64_t at = (strip + s) * blocks;
          of[s] = {codes + at * kMxfp4BlockBytes, scales + at * kStrip, extreme[strip + s] != 0};
        }
        multiply(of, num, ready, y + (first * strips + strip) * kStrip, strips * kStrip);
      }
#pragma omp barrier
    }
  }
  std::free(memory);
}
