// y = x W^T + bias with W packed as strips of bf16 (gemm.h): each output by one thread, rows independent of each other.
//
// Rows are taken in chunks, so that a chunk made ready stays in the cache while the strips pass by. One group: all
// threads make the chunk ready and then share the strips. Several groups: each thread has whole groups.
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "gemm.h"
#include "simd.h"

using namespace gemm;

namespace {

constexpr int64_t kChunkRows = 256;
constexpr int64_t kSerialWork = 1 << 18;  // multiply-adds that are not worth a second thread
constexpr int kPairColumns = kMaxStrips * kStrip;

struct Scratch {  // grows, and is kept by its thread
  void* memory = nullptr;
  int64_t size = 0;
  ~Scratch() { std::free(memory); }
  void* take(int64_t bytes) {
    if (bytes > size) {
      std::free(memory);
      size = (bytes + 4095) / 4096 * 4096;
      memory = std::aligned_alloc(4096, size);
    }
    return memory;
  }
};
thread_local Scratch scratch;

struct Product {
  const char* x;
  int64_t row_stride, group_stride;  // of x, elements
  const uint16_t* tiles;
  const float* bias;  // or null
  char* y;            // [rows, groups, out]
  int64_t rows, in, out, groups;
  Dtype x_dtype, y_dtype;

  int64_t blocks() const { return (in + kBlock - 1) / kBlock; }
  int64_t strips() const { return (out + kStrip - 1) / kStrip; }
  int64_t pairs() const { return (strips() + kMaxStrips - 1) / kMaxStrips; }
  static int64_t bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

  void make_ready(int64_t group, int64_t first, int64_t count, void* memory, int64_t first_block,
                  int64_t last_block) const {
    const int64_t offset = first * row_stride + group * group_stride;
    prepare(x + offset * bytes(x_dtype), row_stride, nullptr, count, in, x_dtype, memory, first_block, last_block);
  }

  void multiply_pair(int64_t group, int64_t pair, int64_t first, const Rows& ready) const {
    Bf16Strip of[kMaxStrips];
    const int64_t strip = pair * kMaxStrips, num = std::min<int64_t>(kMaxStrips, strips() - strip);
    for (int64_t s = 0; s < num; ++s) {
      of[s].values = tiles + (group * strips() + strip + s) * blocks() * kBf16BlockWords;
    }
    const int64_t column = strip * kStrip, width = std::min<int64_t>(num * kStrip, out - column);
    const int64_t stride = groups * out, at = first * stride + group * out + column;
    const float* add = bias ? bias + group * out + column : nullptr;
    if (y_dtype == Dtype::kFp32 && width == num * kStrip) {
      float* to = (float*)y + at;
      multiply(of, int(num), ready, to, stride);
      if (add) finish(to, stride, ready.count, width, add, to, stride);
    } else {
      alignas(64) float sums[kChunkRows * kPairColumns];
      multiply(of, int(num), ready, sums, kPairColumns);
      if (y_dtype == Dtype::kFp32) {
        finish(sums, kPairColumns, ready.count, width, add, (float*)y + at, stride);
      } else {
        finish(sums, kPairColumns, ready.count, width, add, (uint16_t*)y + at, stride);
      }
    }
  }

 private:
  template <class T>
  static void finish(const float* sums, int64_t sum_stride, int64_t count, int64_t width, const float* add, T* to,
                     int64_t stride) {
    for (int64_t row = 0; row < count; ++row, sums += sum_stride, to += stride) {
      for (int64_t column = 0; column < width; column += kStrip) {
        const int n = int(std::min<int64_t>(kStrip, width - column));
        simd::F16 v = n == kStrip ? simd::load(sums + column) : simd::load(sums + column, n);
        if (add) v = simd::add(v, n == kStrip ? simd::load(add + column) : simd::load(add + column, n));
        if constexpr (sizeof(T) == sizeof(float)) {
          n == kStrip ? simd::store(to + column, v) : simd::store(to + column, v, n);
        } else {
          n == kStrip ? simd::store_bf16(to + column, v) : simd::store_bf16(to + column, v, n);
        }
      }
    }
  }
};

void share_strips(const Product& p) {
  const int64_t blocks = p.blocks(), pairs = p.pairs();
  void* memory = scratch.take(rows_bytes(std::min(p.rows, kChunkRows), blocks, p.x_dtype));
#pragma omp parallel if (p.rows * p.in * p.out > kSerialWork)
  {
    const Scope scope;
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t first = 0; first < p.rows; first += kChunkRows) {
      const int64_t count = std::min(kChunkRows, p.rows - first);
      p.make_ready(0, first, count, memory, blocks * thread / threads, blocks * (thread + 1) / threads);
#pragma omp barrier
      const Rows ready{memory, count, blocks, p.x_dtype};
      for (int64_t pair = pairs * thread / threads; pair < pairs * (thread + 1) / threads; ++pair) {
        p.multiply_pair(0, pair, first, ready);
      }
      if (first + count < p.rows) {
#pragma omp barrier
      }
    }
  }
}

void share_groups(const Product& p) {
  const int64_t blocks = p.blocks();
#pragma omp parallel if (p.rows * p.in * p.out * p.groups > kSerialWork)
  {
    const Scope scope;
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    void* memory = scratch.take(rows_bytes(std::min(p.rows, kChunkRows), blocks, p.x_dtype));
    for (int64_t group = p.groups * thread / threads; group < p.groups * (thread + 1) / threads; ++group) {
      for (int64_t first = 0; first < p.rows; first += kChunkRows) {
        const int64_t count = std::min(kChunkRows, p.rows - first);
        p.make_ready(group, first, count, memory, 0, blocks);
        const Rows ready{memory, count, blocks, p.x_dtype};
        for (int64_t pair = 0; pair < p.pairs(); ++pair) p.multiply_pair(group, pair, first, ready);
      }
    }
  }
}

}  // namespace

// x: fp32 or bf16, `row_stride` and `group_stride` elements apart. bias: [groups, out] or null.
extern "C" void linear(const void* x, int64_t row_stride, int64_t group_stride, int32_t x_is_bf16, int64_t rows,
                       const uint16_t* tiles, const float* bias, void* y, int32_t y_is_bf16, int64_t in, int64_t out,
                       int64_t groups) {
  const Product p{(const char*)x, row_stride, group_stride,       tiles, bias, (char*)y, rows, in, out, groups,
                  Dtype(x_is_bf16), Dtype(y_is_bf16)};
  groups == 1 ? share_strips(p) : share_groups(p);
}
