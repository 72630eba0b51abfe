// The contract of `gemm.h` on AMX tiles: TDPBF16PS, sixteen rows by sixteen columns by 32 k.
//
// Activations in fp32 are cut into three bf16 parts by truncation (8 + 8 + 8 significant bits, so x = high + middle +
// low exactly), and a real row becomes three rows of the tiles, each with a sum of its own; the sums are added at the
// end as (low + middle) + high. Weights are values of bf16, so every product is exact in fp32. An infinity or a NaN is
// all in its high part.
//
// TDPBF16PS takes subnormal operands for zero and flushes subnormal results. So activations below 2^-126 count as
// zero, and an fp32 activation below 2^-103 loses bits of its lower parts. Weights of MXFP4 strips whose blocks are too
// small or too large for that (`extreme`) are multiplied in fp32 instead. Weights in bf16 must be finite where
// activations are fp32: infinity times an empty lower part is NaN.
//
// A strip of MXFP4 is decoded a chunk of blocks at a time into tiles in the first-level cache. All rows of a panel use
// a decoded chunk; while the last of them do, the next chunk is decoded into the places of tiles that are done with.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "gemm.h"
#include "simd.h"

namespace gemm {
namespace amx {

constexpr int kTileRows = 16;
constexpr int64_t kTileWords = kTileRows * kBlock;  // bf16 values; 1 KiB
constexpr int64_t kRowBytes = kBlock * 2;           // of a tile
constexpr int kPanelTiles = 12;                     // rows of one pass; a multiple of three, so that no row is cut
constexpr int kSumColumns = kMaxStrips * kStrip;
constexpr int kResident = 3;                        // tiles of rows whose sums stay in tile registers over all of K
constexpr int kSmallChunk = 2, kLargeChunk = 8;     // blocks, with resident sums and without; powers of two
constexpr int64_t kAheadBlocks = 16;                // fetched ahead

// The compiler's own tile loads and stores do not tell it that they read and write memory.
template <int kTile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
inline void load_tile(const void* p, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride_bytes), "i"(kTile) : "memory");
}
template <int kTile>
inline void store_tile(void* p, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride_bytes), "i"(kTile) : "memory");
}
template <int kSum, int kA, int kB>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}

inline thread_local int configured_rows = 0;

// Rows of the tiles that hold activations and sums when there is a single tile of rows; else all have sixteen.
inline void configure(int rows) {
  if (rows == configured_rows) return;
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_a_row[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes_a_row[tile] = kRowBytes;
    config.rows[tile] = kTileRows;
  }
  for (int tile : {0, 1, 4}) config.rows[tile] = uint8_t(rows);
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  configured_rows = rows;
}

inline int64_t parts(Dtype dtype) { return dtype == Dtype::kFp32 ? 3 : 1; }

// Prepared rows lie as [tile][block][row of the tile][32]. A tile has sixteen rows, but only the real ones when it
// holds them all: a few rows then stay in the first-level cache.
struct Tiles {
  int64_t num, rows, blocks;

  Tiles(int64_t count, int64_t blocks, Dtype dtype)
      : num((count * parts(dtype) + kTileRows - 1) / kTileRows),
        rows(num == 1 ? count * parts(dtype) : kTileRows),
        blocks(blocks) {}
  int64_t block_words() const { return rows * kBlock; }
  int64_t words() const { return blocks * block_words(); }  // of a tile
  int64_t at(int64_t row, int64_t block) const {
    return row / kTileRows * words() + (block * rows + row % kTileRows) * kBlock;
  }
};

struct Parts {
  __m512i high, middle, low;  // bf16 in the upper half of each 32-bit lane
};

inline Parts split(__m512 x) {
  const __m512i top = _mm512_set1_epi32(int(0xFFFF0000u));
  const __m512i bits = _mm512_castps_si512(x), high = _mm512_and_si512(bits, top);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
  const __mmask16 finite = _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(0x7F800000));
  const __mmask16 nan = _mm512_cmpgt_epu32_mask(magnitude, _mm512_set1_epi32(0x7F800000));
  const __m512 rest = _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(high));
  const __m512i middle = _mm512_and_si512(_mm512_castps_si512(rest), top);
  const __m512i low = _mm512_castps_si512(_mm512_sub_ps(rest, _mm512_castsi512_ps(middle)));
  return {_mm512_mask_or_epi32(high, nan, high, _mm512_set1_epi32(0x00400000)), middle, low};  // NaN stays NaN
}

inline __m512i join(__m512i first, __m512i second) {  // the upper halves of 32 lanes, in order
  alignas(64) static constexpr uint16_t kOdd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                    33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(first, _mm512_load_si512(kOdd), second);
}

inline void prepare_fp32(const float* x, int count, uint16_t* high, uint16_t* middle, uint16_t* low) {
  const Parts a = split(_mm512_maskz_loadu_ps(simd::first(count), x));
  const Parts b = split(_mm512_maskz_loadu_ps(simd::first(std::max(0, count - 16)), x + 16));
  _mm512_store_si512(high, join(a.high, b.high));
  _mm512_store_si512(middle, join(a.middle, b.middle));
  _mm512_store_si512(low, join(a.low, b.low));
}

// Sixteen columns of 32 k from codes to a tile of weights. A code becomes its value times 2^125 in bf16; taking
// 252 - scale from the exponent with saturation keeps zeros zero. Exact for scale bytes 2..252, and for any with zeros.
inline void decode(const uint8_t* codes, const uint8_t* scales, uint16_t* tile) {
  alignas(64) static constexpr uint16_t kValues[32] = {
      0x0000, 0x7D80, 0x7E00, 0x7E40, 0x7E80, 0x7EC0, 0x7F00, 0x7F40, 0x0000, 0xFD80, 0xFE00,
      0xFE40, 0xFE80, 0xFEC0, 0xFF00, 0xFF40,  // again: the fifth bit of an index is the next code's
      0x0000, 0x7D80, 0x7E00, 0x7E40, 0x7E80, 0x7EC0, 0x7F00, 0x7F40, 0x0000, 0xFD80, 0xFE00,
      0xFE40, 0xFE80, 0xFEC0, 0xFF00, 0xFF40};
  alignas(64) static constexpr uint8_t kTwice[64] = {  // a column's byte into the upper halves of its two words
      128, 0,  128, 0,  128, 1,  128, 1,  128, 2,  128, 2,  128, 3,  128, 3,  128, 4,  128, 4,  128, 5,
      128, 5,  128, 6,  128, 6,  128, 7,  128, 7,  128, 8,  128, 8,  128, 9,  128, 9,  128, 10, 128, 10,
      128, 11, 128, 11, 128, 12, 128, 12, 128, 13, 128, 13, 128, 14, 128, 14, 128, 15, 128, 15};
  const __m512i values = _mm512_load_si512(kValues);
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)scales));
  const __m512i exponents = _mm512_srli_epi16(_mm512_shuffle_epi8(bytes, _mm512_load_si512(kTwice)), 1);
  const __m512i less = _mm512_sub_epi16(_mm512_set1_epi16(252 << 7), exponents);
#pragma GCC unroll 4
  for (int load = 0; load < 4; ++load) {
    const __m512i words = _mm512_loadu_si512(codes + 64 * load);
    uint16_t* out = tile + 4 * kBlock * load;
    const auto put = [&](int pair, __m512i index) {
      const __m512i value = _mm512_subs_epu16(_mm512_permutexvar_epi16(index, values), less);
      _mm512_store_si512(out + kBlock * pair, value);
    };
    put(0, words);
    put(1, _mm512_srli_epi16(words, 4));
    put(2, _mm512_srli_epi16(words, 8));
    put(3, _mm512_srli_epi16(words, 12));
  }
}

inline void fetch(const void* p, int lines) {
  for (int line = 0; line < lines; ++line) _mm_prefetch((const char*)p + 64 * line, _MM_HINT_T0);
}

// The tiles of weights of one or two strips: of a chunk of blocks, and of the next.
template <class Strip>
class Weights;

template <>
class Weights<Bf16Strip> {
 public:
  Weights(const Bf16Strip* strips, int, int64_t, int, int) : strips_(strips) {}
  const uint16_t* tile(int strip, int64_t block) const { return strips_[strip].values + block * kBf16BlockWords; }
  void make(int strip, int64_t block) const { fetch(tile(strip, block + kAheadBlocks), 16); }

 private:
  const Bf16Strip* strips_;
};

template <>
class Weights<Mxfp4Strip> {
 public:
  Weights(const Mxfp4Strip* strips, int num_strips, int64_t blocks, int chunk, int places)
      : strips_(strips), mask_(places - 1) {
    for (int64_t block = 0; block < std::min<int64_t>(chunk, blocks); ++block) {
      for (int strip = 0; strip < num_strips; ++strip) make(strip, block);
    }
  }
  const uint16_t* tile(int strip, int64_t block) const { return tiles_[block & mask_][strip]; }
  void make(int strip, int64_t block) {  // in the place of an earlier block
    const uint8_t* codes = strips_[strip].codes + block * kMxfp4BlockBytes;
    const uint8_t* scales = strips_[strip].scales + block * kStrip;
    fetch(codes + kAheadBlocks * kMxfp4BlockBytes, 4);
    fetch(scales + kAheadBlocks * kStrip, 1);
    decode(codes, scales, tiles_[block & mask_][strip]);
  }

 private:
  const Mxfp4Strip* strips_;
  int64_t mask_;
  alignas(64) uint16_t tiles_[kLargeChunk][kMaxStrips][kTileWords];
};

// One block of `kTiles` tiles of rows and `kStrips` strips. Sums: tiles 0.. in the order (row tile, strip).
// `ahead(strip)` makes a later tile of weights, in the place of this block's unless `kEarly` with three tiles of rows.
template <int kStrips, int kTiles, bool kEarly, class Ahead>
inline void step(const uint16_t* a, int64_t tile_words, const uint16_t* b0, const uint16_t* b1, const Ahead& ahead) {
  constexpr int64_t kStride = kRowBytes;
  if constexpr (kTiles == 3 && kStrips == 2) {  // six sums leave one tile for each side
    load_tile<6>(a, kStride);
    load_tile<7>(b0, kStride);
    multiply_tiles<0, 6, 7>();
    if constexpr (kEarly) ahead(0);
    load_tile<7>(b1, kStride);
    multiply_tiles<1, 6, 7>();
    load_tile<6>(a + tile_words, kStride);
    multiply_tiles<3, 6, 7>();
    if constexpr (kEarly) ahead(1);
    load_tile<7>(b0, kStride);
    multiply_tiles<2, 6, 7>();
    if constexpr (!kEarly) ahead(0);
    load_tile<6>(a + 2 * tile_words, kStride);
    multiply_tiles<4, 6, 7>();
    load_tile<7>(b1, kStride);
    multiply_tiles<5, 6, 7>();
    if constexpr (!kEarly) ahead(1);
  } else {
    load_tile<4>(a, kStride);
    load_tile<6>(b0, kStride);
    multiply_tiles<0, 4, 6>();
    ahead(0);
    if constexpr (kStrips == 2) {
      load_tile<7>(b1, kStride);
      multiply_tiles<1, 4, 7>();
      ahead(1);
    }
    if constexpr (kTiles >= 2) {
      load_tile<5>(a + tile_words, kStride);
      multiply_tiles<kStrips, 5, 6>();
      if constexpr (kStrips == 2) multiply_tiles<3, 5, 7>();
    }
    if constexpr (kTiles == 3) {
      load_tile<4>(a + 2 * tile_words, kStride);
      multiply_tiles<2, 4, 6>();
    }
  }
}

enum class Sums { kZero, kLoad, kStore };

template <int kStrips, int kTiles>
inline void sums(Sums what, float* memory) {
  const auto one = [&]<int kSum>(std::integral_constant<int, kSum>) {
    if constexpr (kSum < kStrips * kTiles) {
      float* at = memory + (kSum / kStrips) * kTileRows * kSumColumns + (kSum % kStrips) * kStrip;
      if (what == Sums::kZero) zero_tile<kSum>();
      if (what == Sums::kLoad) load_tile<kSum>(at, kSumColumns * 4);
      if (what == Sums::kStore) store_tile<kSum>(at, kSumColumns * 4);
    }
  };
  one(std::integral_constant<int, 0>());
  one(std::integral_constant<int, 1>());
  one(std::integral_constant<int, 2>());
  one(std::integral_constant<int, 3>());
  one(std::integral_constant<int, 4>());
  one(std::integral_constant<int, 5>());
}

struct Chunk {
  int64_t first, last, size, end;  // blocks [first, last) of `end`
};

// With `kStay` the sums stay in their tiles from chunk to chunk.
template <class Strip, int kStrips, int kTiles, bool kStay>
void multiply_chunk(Weights<Strip>& weights, const uint16_t* a, const Tiles& rows, const Chunk& chunk, bool last_rows,
                    float* memory) {
  if (chunk.first == 0) sums<kStrips, kTiles>(Sums::kZero, memory);
  if (chunk.first != 0 && !kStay) sums<kStrips, kTiles>(Sums::kLoad, memory);
  const int64_t end = last_rows ? chunk.end : 0;
  for (int64_t block = chunk.first; block < chunk.last; ++block) {
    const int64_t next = block + chunk.size;
    const auto ahead = [&](int strip) {
      if (next < end) weights.make(strip, next);
    };
    const uint16_t* b1 = kStrips == 2 ? weights.tile(1, block) : nullptr;
    step<kStrips, kTiles, kStay>(a + block * rows.block_words(), rows.words(), weights.tile(0, block), b1, ahead);
  }
  if (chunk.last == chunk.end || !kStay) sums<kStrips, kTiles>(Sums::kStore, memory);
}

// `tiles` tiles of rows, at most `kPanelTiles`, into `memory` [16 tiles][kSumColumns].
template <class Strip, int kStrips, bool kStay>
void multiply_panel(const Strip* strips, const uint16_t* a, const Tiles& rows, int tiles, float* memory) {
  constexpr int64_t kSize = kStay ? kSmallChunk : kLargeChunk;
  const int64_t blocks = rows.blocks;
  const bool reload = kStay && tiles == 3;  // `step` still needs a tile of weights after it made the later one
  Weights<Strip> weights(strips, kStrips, blocks, int(kSize), int(reload ? 2 * kSize : kSize));
  for (int64_t first = 0; first < blocks; first += kSize) {
    const Chunk chunk{first, std::min(first + kSize, blocks), kSize, blocks};
    for (int tile = 0; tile < tiles;) {
      const int left = tiles - tile, count = left == 1 || left == 3 ? left : 2;
      const uint16_t* from = a + tile * rows.words();
      float* at = memory + tile * kTileRows * kSumColumns;
      const bool last = count == left;
      if (count == 1) multiply_chunk<Strip, kStrips, 1, kStay>(weights, from, rows, chunk, last, at);
      if (count == 2) multiply_chunk<Strip, kStrips, 2, kStay>(weights, from, rows, chunk, last, at);
      if (count == 3) multiply_chunk<Strip, kStrips, 3, kStay>(weights, from, rows, chunk, last, at);
      tile += count;
    }
  }
}

// A strip of MXFP4 with weights that tiles cannot hold: decoded to fp32 and multiplied there, k after k.
inline void multiply_extreme(const Mxfp4Strip& strip, const Rows& x, float* out, int64_t stride) {
  constexpr float kValues[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  const int64_t num_parts = parts(x.dtype);
  const Tiles rows(x.count, x.blocks, x.dtype);
  for (int64_t row = 0; row < x.count; ++row) simd::store(out + row * stride, simd::zero());
  for (int64_t block = 0; block < x.blocks; ++block) {
    const uint16_t* words = (const uint16_t*)(strip.codes + block * kMxfp4BlockBytes);
    float weights[kBlock][kStrip];
    for (int column = 0; column < kStrip; ++column) {
      const uint32_t byte = strip.scales[block * kStrip + column];
      const uint32_t bits = byte == 0 ? 0x00400000u : byte == 255 ? 0x7FC00000u : byte << 23;
      float scale;
      std::memcpy(&scale, &bits, 4);
      for (int k = 0; k < kBlock; ++k) {
        const int pair = k / 2, word = words[(pair / 4) * 2 * kStrip + 2 * column + k % 2];
        weights[k][column] = kValues[(word >> (4 * (pair % 4))) & 15] * scale;
      }
    }
    for (int64_t row = 0; row < x.count; ++row) {
      simd::F16 sum = simd::load(out + row * stride);
      for (int k = 0; k < kBlock; ++k) {
        float value = 0;
        for (int64_t part = num_parts - 1; part >= 0; --part) {  // low, middle, high: exact
          const uint32_t bits = uint32_t(((const uint16_t*)x.data)[rows.at(row * num_parts + part, block) + k]) << 16;
          float piece;
          std::memcpy(&piece, &bits, 4);
          value += piece;
        }
        sum = simd::fma(simd::load(weights[k]), simd::set1(value), sum);
      }
      simd::store(out + row * stride, sum);
    }
  }
}

template <class Strip, int kStrips>
void multiply_strips(const Strip* strips, const Rows& x, float* out, int64_t stride) {
  const int64_t num_parts = parts(x.dtype);
  const Tiles rows(x.count, x.blocks, x.dtype);
  configure(int(rows.rows));
  alignas(64) float memory[kPanelTiles * kTileRows * kSumColumns];
  const int64_t panel_rows = kPanelTiles * kTileRows / num_parts;
  for (int64_t first = 0; first < x.count; first += panel_rows) {
    const int64_t count = std::min(panel_rows, x.count - first);
    const int tiles = int((count * num_parts + kTileRows - 1) / kTileRows);
    const uint16_t* a = (const uint16_t*)x.data + rows.at(first * num_parts, 0);
    if (tiles <= kResident) {
      multiply_panel<Strip, kStrips, true>(strips, a, rows, tiles, memory);
    } else {
      multiply_panel<Strip, kStrips, false>(strips, a, rows, tiles, memory);
    }
    for (int64_t row = 0; row < count; ++row) {
      for (int strip = 0; strip < kStrips; ++strip) {
        const float* sum = memory + row * num_parts * kSumColumns + strip * kStrip;
        simd::F16 value = simd::load(sum);
        if (num_parts == 3) {
          value = simd::add(simd::add(simd::load(sum + 2 * kSumColumns), simd::load(sum + kSumColumns)), value);
        }
        simd::store(out + (first + row) * stride + strip * kStrip, value);
      }
    }
  }
}

}  // namespace amx

struct Scope {
  Scope() { amx::configured_rows = 0; }  // whoever used the tiles of this thread before
  ~Scope() {
    if (amx::configured_rows) asm volatile("tilerelease");
    amx::configured_rows = 0;
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
};

inline int64_t rows_bytes(int64_t count, int64_t blocks, Dtype dtype) {
  const amx::Tiles tiles(count, blocks, dtype);
  return tiles.num * tiles.words() * 2;
}

inline void prepare(const void* x, int64_t stride, const int32_t* gather, int64_t count, int64_t k, Dtype dtype,
                    void* memory, int64_t first_block, int64_t last_block) {
  const int64_t num_parts = amx::parts(dtype);
  const amx::Tiles tiles(count, (k + kBlock - 1) / kBlock, dtype);
  uint16_t* const to = (uint16_t*)memory;
  for (int64_t row = 0; row < count; ++row) {
    const int64_t from = (gather ? int64_t(gather[row]) : row) * stride, place = row * num_parts;
    for (int64_t block = first_block; block < last_block; ++block) {
      const int64_t at = from + block * kBlock;
      const int filled = int(std::min<int64_t>(kBlock, k - block * kBlock));
      if (dtype == Dtype::kFp32) {
        amx::prepare_fp32((const float*)x + at, filled, to + tiles.at(place, block), to + tiles.at(place + 1, block),
                          to + tiles.at(place + 2, block));
      } else {
        const __mmask32 mask = filled >= kBlock ? ~__mmask32(0) : (__mmask32(1) << filled) - 1;
        _mm512_store_si512(to + tiles.at(place, block), _mm512_maskz_loadu_epi16(mask, (const uint16_t*)x + at));
      }
    }
  }
  for (int64_t row = count * num_parts; row < tiles.num * tiles.rows; ++row) {
    for (int64_t block = first_block; block < last_block; ++block) {
      _mm512_store_si512(to + tiles.at(row, block), _mm512_setzero_si512());
    }
  }
}

template <class Strip>
void multiply(const Strip* strips, int num_strips, const Rows& x, float* out, int64_t stride) {
  if (x.count == 0) return;
  if constexpr (std::is_same_v<Strip, Mxfp4Strip>) {
    const bool both = num_strips == 2;
    if (strips[0].extreme || (both && strips[1].extreme)) {
      for (int strip = 0; strip < num_strips; ++strip) {
        float* at = out + strip * kStrip;
        if (strips[strip].extreme) {
          amx::multiply_extreme(strips[strip], x, at, stride);
        } else {
          amx::multiply_strips<Strip, 1>(strips + strip, x, at, stride);
        }
      }
      return;
    }
  }
  if (num_strips == 2) {
    amx::multiply_strips<Strip, 2>(strips, x, out, stride);
  } else {
    amx::multiply_strips<Strip, 1>(strips, x, out, stride);
  }
}

}  // namespace gemm
