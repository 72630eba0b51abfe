// Rows of activations times strips of packed weights, for one thread: the contract of `gemm_amx.h` and `gemm_fma.h`.
//
// A strip is sixteen output columns over all of K, cut into blocks of 32 k (one MXFP4 block, one AMX tile). K is padded
// to whole blocks and the columns to whole strips with zeros when weights are packed. One layout serves every
// instruction set:
//
//   bf16   [block][pair p < 16][column n < 16][c < 2]          value (p, n, c) is W[n][32 block + 2 p + c]; 1 KiB a block
//   MXFP4  [block][load g < 4][word 2 n + c < 32], 16-bit words; nibble j of word (g, 2 n + c) is the code of
//          W[n][32 block + 2 (4 g + j) + c]; 256 B a block, and scale bytes [block][column n < 16] beside them
//
// Invariant: the bits of a row of the product depend on that row and the strip alone, never on the other rows, on how
// many there are, or on which strips are computed together.
#pragma once
#include <cstdint>

namespace gemm {

constexpr int kBlock = 32;       // k values
constexpr int kStrip = 16;       // columns
constexpr int kMaxStrips = 2;    // computed together: a gate strip and its up strip, or two neighbours
constexpr int64_t kBf16BlockWords = kBlock * kStrip;
constexpr int64_t kMxfp4BlockBytes = kBlock * kStrip / 2;

struct Bf16Strip {
  const uint16_t* values;
};

struct Mxfp4Strip {
  const uint8_t* codes;
  const uint8_t* scales;
  bool extreme;  // a scale byte lies outside 2..252: products in fp32, where those are exact (255 is NaN)
};

enum class Dtype : int32_t { kFp32 = 0, kBf16 = 1 };

// Activations made ready for the multiplications of one instruction set, in memory that the caller gave.
struct Rows {
  const void* data;
  int64_t count;   // real rows
  int64_t blocks;  // K / 32, rounded up
  Dtype dtype;     // of the activations they were made from
};

// Each of the two headers below defines, in this namespace:
//
//   struct Scope;                     made once a thread around all its multiplications (AMX: tile configuration)
//   int64_t rows_bytes(int64_t count, int64_t blocks, Dtype dtype);      memory of `Rows`, to be 64-byte aligned
//   void prepare(const void* x, int64_t stride, const int32_t* gather, int64_t count, int64_t k, Dtype dtype,
//                void* memory, int64_t first_block, int64_t last_block);
//                                     row i is row `gather[i]` (null: i) of x, `stride` elements apart; only blocks
//                                     [first, last) are written, so that threads can share the work
//   template <class Strip> void multiply(const Strip* strips, int num_strips, const Rows& x, float* out,
//                                        int64_t stride);
//                                     out[m * stride + 16 s + n], fp32, for every real row m, strip s and column n

}  // namespace gemm

#if defined(__AMX_BF16__)
#include "gemm_amx.h"
#else
#include "gemm_fma.h"
#endif
