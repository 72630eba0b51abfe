// The MXFP4 products of gemm.h on plain arrays, and what bounds any product on a machine: the rate at which memory is
// read, and that of fp32 multiply-adds.
#include <immintrin.h>
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

// The sum of the 64-bit words of `size` bytes, a multiple of 16 KiB.
extern "C" int64_t read_bytes(const char* data, int64_t size) {
  constexpr int64_t kPiece = 16384;
  int64_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
  for (int64_t piece = 0; piece < size; piece += kPiece) {
    __m256i sum[4] = {};
    for (int64_t i = piece; i < piece + kPiece; i += 128) {
      for (int j = 0; j < 4; ++j) {
        sum[j] = _mm256_add_epi64(sum[j], _mm256_loadu_si256((const __m256i*)(data + i + 32 * j)));
      }
    }
    for (int j = 0; j < 4; ++j) total += _mm256_extract_epi64(sum[j], 0) + _mm256_extract_epi64(sum[j], 3);
  }
  return total;
}

// `rounds` times 12 independent vectors of fp32 multiply-adds on every thread; returns how many floats that is in all.
extern "C" int64_t multiply_adds(int64_t rounds) {
#if defined(__AVX512F__)
  using Vec = __m512;
#else
  using Vec = __m256;
#endif
  constexpr int kVectors = 12, kLanes = sizeof(Vec) / sizeof(float);
  int64_t total = 0;
#pragma omp parallel reduction(+ : total)
  {
    Vec sum[kVectors];
    for (int v = 0; v < kVectors; ++v) sum[v] = Vec{} + float(v);
    const Vec a = Vec{} + 0.999f, b = Vec{} + 1e-4f;
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
      for (int v = 0; v < kVectors; ++v) {
#if defined(__AVX512F__)
        sum[v] = _mm512_fmadd_ps(sum[v], a, b);
#else
        sum[v] = _mm256_fmadd_ps(sum[v], a, b);
#endif
      }
      asm volatile("" ::"x"(sum[0]));
    }
    Vec all = {};
    for (const Vec& s : sum) all += s;
    asm volatile("" ::"x"(all));
    total += rounds * kVectors * kLanes;
  }
  return total;
}
