// The products of gemm.h with fp32 multiply-adds, on AVX-512 or on AVX2 with FMA.
//
// Every output is two sums, one of the even k and one of the odd k, added at the end. In every chunk of four blocks each
// sum starts anew and takes the pairs (k, k + 1) of every eight k in the order 0 2 1 3 (it saves AVX2 registers); the
// chunk's sum is then added to the total. Both instruction sets and every number of rows keep this order, so all give
// the same bits (of a NaN, no more than that it is one). Many rows dequantize a chunk of the strip once, into memory that the nearest cache holds, and use it
// from there. A few rows decode it into registers without its scales: from block to block sums are multiplied by the
// quotient of the scales instead, a power of two. No bit changes while nothing overflows and nothing falls below the
// smallest float. With activations of 0 or 2^-84 to 2^64 and scales of 2^-32 to 2^8 that is certain (every sum is a
// multiple of 2^(-84 - 24 - 40) > 2^-149, and at most 2^(64 + 3 + 6 + 40) < 2^127); what else there is takes the way of
// many rows.
//
// The 32 sums of a strip lie in registers called parts. AVX-512: the sixteen columns' even sums, then their odd sums.
// AVX2: (even, odd) of four columns, so that one broadcast pair of activations serves all lanes: columns 0 1 4 5, then
// 2 3 6 7, then the same of the upper eight.
#pragma once
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "gemm.h"
#include "simd.h"

namespace gemm {
namespace fp32 {

#define GEMM_INLINE __attribute__((always_inline))

template <class F, int... I>
GEMM_INLINE inline void times(F f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int kCount, class F>
GEMM_INLINE inline void times(F f) {  // f(0) ... f(kCount - 1), each a constant
  times(f, std::make_integer_sequence<int, kCount>());
}

constexpr int kSlots = kBlock / 2;                                                     // pairs of a block
constexpr int pair_at(int slot) { return (slot & ~3) | (slot & 1) << 1 | (slot & 2) >> 1; }  // 0 2 1 3 of every four
constexpr int kStripSums = 2 * kStrip;
constexpr int kTile = 6;             // most rows of activations that registers hold the sums of
constexpr int kPassTiles = 16;       // tiles that use a decoded chunk
constexpr int kChunk = 4;            // blocks decoded at once: 2 KiB of floats a block and strip
constexpr int64_t kPrefetchBytes = 2048;  // ahead of a few rows, which use each block once

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int kLanes = 16, kParts = 2;
constexpr int kGroup = 4;  // parts whose sums are kept in registers together
constexpr int kMxfp4DirectRows = 6;
template <int kRows>
constexpr int kDirectParts = 2;

inline Vec zeros() { return _mm512_setzero_ps(); }
inline Vec load(const float* p) { return _mm512_load_ps(p); }
inline void store(float* p, Vec a) { _mm512_store_ps(p, a); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

struct Pair {  // activations k and k + 1, to multiply a part with
  __m512 even, odd;
  explicit Pair(const float* x) : even(_mm512_set1_ps(x[0])), odd(_mm512_set1_ps(x[1])) {}
  Vec operator[](int part) const { return part % 2 ? odd : even; }
};

inline void add_parts(const Vec* sums, float* out) { _mm512_storeu_ps(out, _mm512_add_ps(sums[0], sums[1])); }

// Calls visit(slot, part - kFirst, weights) for the parts [kFirst, kFirst + kCount) of a block, slot by slot.
template <int kFirst, int kCount, class Visit>
GEMM_INLINE inline void decode(const Bf16Strip& strip, int64_t block, Visit visit) {
  const uint16_t* values = strip.values + block * kBf16BlockWords;
  const __m512i upper = _mm512_set1_epi32(int(0xFFFF0000));
  times<kSlots>([&](auto slot) GEMM_INLINE {
    const __m512i bits = _mm512_loadu_si512(values + 32 * pair_at(slot));
    visit(slot, std::integral_constant<int, 0>(), _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)));
    visit(slot, std::integral_constant<int, 1>(), _mm512_castsi512_ps(_mm512_and_si512(bits, upper)));
  });
}
template <int kFirst, int kCount, class Visit>
GEMM_INLINE inline void decode(const Mxfp4Strip& strip, int64_t block, Visit visit) {
  const uint8_t* codes = strip.codes + block * kMxfp4BlockBytes;
  const __m512 values = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
  times<4>([&](auto g) GEMM_INLINE {
    const __m512i bits = _mm512_loadu_si512(codes + 64 * g);
    times<4>([&](auto j) GEMM_INLINE {
      const std::integral_constant<int, 4 * g + j> slot;
      times<2>([&](auto c) GEMM_INLINE {
        constexpr int kShift = 16 * c + 4 * pair_at(j);
        visit(slot, c, _mm512_permutexvar_ps(kShift ? _mm512_srli_epi32(bits, kShift) : bits, values));
      });
    });
  });
}

template <int kFirst, int kCount>
GEMM_INLINE inline void scales(const uint8_t* bytes, Vec* out) {  // exact for every byte, 255 is NaN
  const __m512i byte = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes));
  const __m512i bits = _mm512_max_epi32(_mm512_slli_epi32(byte, 23), _mm512_set1_epi32(0x00400000));
  const __mmask16 nan = _mm512_cmpeq_epi32_mask(byte, _mm512_set1_epi32(255));
  out[0] = out[1] = _mm512_castsi512_ps(_mm512_mask_blend_epi32(nan, bits, _mm512_set1_epi32(0x7FC00000)));
}
template <int kFirst, int kCount>
GEMM_INLINE inline void quotients(const uint8_t* above, const uint8_t* below, Vec* out) {  // of two blocks' scales
  const __m128i less = _mm_sub_epi8(_mm_loadu_si128((const __m128i*)above), _mm_loadu_si128((const __m128i*)below));
  const __m512i exponents = _mm512_add_epi32(_mm512_cvtepi8_epi32(less), _mm512_set1_epi32(127));
  out[0] = out[1] = _mm512_castsi512_ps(_mm512_slli_epi32(exponents, 23));
}

#else

using Vec = __m256;
constexpr int kLanes = 8, kParts = 4;
constexpr int kGroup = 2;
constexpr int kMxfp4DirectRows = 5;
template <int kRows>
constexpr int kDirectParts = kRows <= 2 ? 4 : 2;

inline Vec zeros() { return _mm256_setzero_ps(); }
inline Vec load(const float* p) { return _mm256_load_ps(p); }
inline void store(float* p, Vec a) { _mm256_store_ps(p, a); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

struct Pair {
  __m256 both;
  explicit Pair(const float* x) {
    double bits;
    std::memcpy(&bits, x, sizeof bits);
    both = _mm256_castpd_ps(_mm256_set1_pd(bits));
  }
  Vec operator[](int) const { return both; }
};

inline void add_parts(const Vec* sums, float* out) {
  _mm256_storeu_ps(out, _mm256_hadd_ps(sums[0], sums[1]));
  _mm256_storeu_ps(out + 8, _mm256_hadd_ps(sums[2], sums[3]));
}

template <int kFirst, int kCount, class Visit>
GEMM_INLINE inline void decode(const Bf16Strip& strip, int64_t block, Visit visit) {
  const uint16_t* values = strip.values + block * kBf16BlockWords;
  const __m256i zero = _mm256_setzero_si256();
  times<kSlots>([&](auto slot) GEMM_INLINE {
    times<kCount / 2>([&](auto half) GEMM_INLINE {
      const __m256i bits =
          _mm256_loadu_si256((const __m256i*)(values + 32 * pair_at(slot) + 16 * (half + kFirst / 2)));
      const std::integral_constant<int, 2 * half> low;
      const std::integral_constant<int, 2 * half + 1> high;
      visit(slot, low, _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, bits)));
      visit(slot, high, _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, bits)));
    });
  });
}
template <int kFirst, int kCount, class Visit>
GEMM_INLINE inline void decode(const Mxfp4Strip& strip, int64_t block, Visit visit) {
  const uint8_t* codes = strip.codes + block * kMxfp4BlockBytes;
  const __m256i upper_bytes = _mm256_broadcastsi128_si256(  // of the values in bf16
      _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,  //
                    -0x80, -0x41, -0x41, -0x41, -0x40, -0x40, -0x40, -0x40));
  const __m256i lower_bytes = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40, 0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40));
  const __m256i nibble = _mm256_set1_epi8(15), upper = _mm256_set1_epi32(int(0xFFFF0000));
  times<4>([&](auto g) GEMM_INLINE {
    times<2>([&](auto n) GEMM_INLINE {  // a byte's low nibble is of pair 0 or 2, its high nibble of pair 1 or 3
      __m256i words[kCount];
      times<kCount / 2>([&](auto half) GEMM_INLINE {
        __m256i bits = _mm256_loadu_si256((const __m256i*)(codes + 64 * g + 32 * (half + kFirst / 2)));
        if constexpr (n) bits = _mm256_srli_epi16(bits, 4);
        bits = _mm256_and_si256(bits, nibble);
        const __m256i low = _mm256_shuffle_epi8(lower_bytes, bits), high = _mm256_shuffle_epi8(upper_bytes, bits);
        words[2 * half] = _mm256_unpacklo_epi8(low, high);
        words[2 * half + 1] = _mm256_unpackhi_epi8(low, high);
      });
      times<kCount>([&](auto part) GEMM_INLINE {
        const std::integral_constant<int, 4 * g + 2 * n> slot;
        visit(slot, part, _mm256_castsi256_ps(_mm256_slli_epi32(words[part], 16)));
      });
      times<kCount>([&](auto part) GEMM_INLINE {
        const std::integral_constant<int, 4 * g + 2 * n + 1> slot;
        visit(slot, part, _mm256_castsi256_ps(_mm256_and_si256(words[part], upper)));
      });
    });
  });
}

template <int kFirst, int kCount>
GEMM_INLINE inline void scales(const uint8_t* bytes, Vec* out) {
  times<kCount / 2>([&](auto half) GEMM_INLINE {
    const __m256i byte = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(bytes + 8 * (half + kFirst / 2))));
    const __m256i bits = _mm256_max_epi32(_mm256_slli_epi32(byte, 23), _mm256_set1_epi32(0x00400000));
    const __m256i nan = _mm256_srli_epi32(_mm256_cmpeq_epi32(byte, _mm256_set1_epi32(255)), 9);
    const __m256i all = _mm256_or_si256(bits, nan);
    out[2 * half] = _mm256_castsi256_ps(_mm256_unpacklo_epi32(all, all));
    out[2 * half + 1] = _mm256_castsi256_ps(_mm256_unpackhi_epi32(all, all));
  });
}
template <int kFirst, int kCount>
GEMM_INLINE inline void quotients(const uint8_t* above, const uint8_t* below, Vec* out) {  // of two blocks' scales
  times<kCount / 2>([&](auto half) GEMM_INLINE {
    const int at = 8 * (half + kFirst / 2);
    const __m128i less =
        _mm_sub_epi8(_mm_loadl_epi64((const __m128i*)(above + at)), _mm_loadl_epi64((const __m128i*)(below + at)));
    const __m256i exponents = _mm256_add_epi32(_mm256_cvtepi8_epi32(less), _mm256_set1_epi32(127));
    const __m256i all = _mm256_slli_epi32(exponents, 23);
    out[2 * half] = _mm256_castsi256_ps(_mm256_unpacklo_epi32(all, all));
    out[2 * half + 1] = _mm256_castsi256_ps(_mm256_unpackhi_epi32(all, all));
  });
}

#endif

template <class Strip>
constexpr bool kHasScales = std::is_same_v<Strip, Mxfp4Strip>;

inline const char* bytes_of(const Bf16Strip& strip) { return (const char*)strip.values; }
inline const char* bytes_of(const Mxfp4Strip& strip) { return (const char*)strip.codes; }
constexpr int64_t block_bytes(const Bf16Strip&) { return 2 * kBf16BlockWords; }
constexpr int64_t block_bytes(const Mxfp4Strip&) { return kMxfp4BlockBytes; }

template <class Strip>
GEMM_INLINE inline void prefetch(const Strip& strip, int64_t block) {
  const char* ahead = bytes_of(strip) + block * block_bytes(strip) + kPrefetchBytes;
  for (int64_t i = 0; i < block_bytes(strip); i += 64) _mm_prefetch(ahead + i, _MM_HINT_T0);
}

// Most rows that decode for themselves, which is the faster way while that costs less than going through memory.
constexpr int direct_rows(const Bf16Strip&) { return 2; }
constexpr int direct_rows(const Mxfp4Strip&) { return kMxfp4DirectRows; }

constexpr int kLeastScale = 127 - 32, kMostScale = 127 + 8;  // of a few rows

inline bool is_moderate(const float* x, int64_t count) {  // activations of a few rows
  constexpr uint32_t kLeast = (127 - 84) << 23, kMost = (127 + 64) << 23;
  bool all = true;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7FFFFFFF;
    all &= (bits == 0) | (bits - kLeast <= kMost - kLeast);
  }
  return all;
}

// Rows are kept in tiles of at most kTile that share `count` evenly; they lie as they are read, [chunk][tile][block of
// the chunk][row][32], so that the processor fetches ahead what the next tile needs.
struct Tiles {
  int64_t count, num;
  explicit Tiles(int64_t count) : count(count), num((count + kTile - 1) / kTile) {}
  int64_t first(int64_t tile) const { return count * tile / num; }
  int rows(int64_t tile) const { return int(first(tile + 1) - first(tile)); }
  int64_t offset(int64_t tile, int64_t block, int64_t blocks) const {  // of a block of a tile, in floats
    const int64_t chunk = block / kChunk * kChunk, in_chunk = std::min<int64_t>(kChunk, blocks - chunk);
    return (chunk * count + first(tile) * in_chunk + (block - chunk) * rows(tile)) * kBlock;
  }
};

// A few rows: weights are decoded into registers. kParts of the strip are computed in one or two runs over K. False: a
// scale does not allow it.
template <int kRows, int kFirst, int kCount, class Strip>
GEMM_INLINE inline bool direct_run(const Strip& strip, const float* x, int64_t blocks, Vec (*totals)[kParts]) {
  Vec total[kRows][kCount], sum[kRows][kCount], scale[kCount];
  const auto each = [](auto f) GEMM_INLINE {
    times<kRows>([&](auto m) GEMM_INLINE { times<kCount>([&](auto p) GEMM_INLINE { f(m, p); }); });
  };
  __m128i above_least = _mm_setzero_si128();
  each([&](auto m, auto p) GEMM_INLINE { total[m][p] = sum[m][p] = zeros(); });
  for (int64_t block = 0; block < blocks; ++block, x += kRows * kBlock) {
    if constexpr (kFirst == 0) prefetch(strip, block);
    decode<kFirst, kCount>(strip, block, [&](auto slot, auto part, Vec weights) GEMM_INLINE {
      times<kRows>([&](auto m) GEMM_INLINE {
        const Vec activations = Pair(x + kBlock * m + 2 * pair_at(slot))[part];
        sum[m][part] = fma(weights, activations, sum[m][part]);
      });
    });
    const bool ends = (block + 1) % kChunk == 0 || block + 1 == blocks;
    if constexpr (kHasScales<Strip>) {
      const uint8_t* bytes = strip.scales + block * kStrip;
      const __m128i all = _mm_loadu_si128((const __m128i*)bytes);
      above_least = _mm_max_epu8(above_least, _mm_sub_epi8(all, _mm_set1_epi8(kLeastScale)));
      if (ends) {
        scales<kFirst, kCount>(bytes, scale);
      } else {
        quotients<kFirst, kCount>(bytes, bytes + kStrip, scale);
      }
      each([&](auto m, auto p) GEMM_INLINE { sum[m][p] = mul(sum[m][p], scale[p]); });
    }
    if (ends) {
      each([&](auto m, auto p) GEMM_INLINE {
        total[m][p] = add(total[m][p], sum[m][p]);
        sum[m][p] = zeros();
      });
    }
  }
  each([&](auto m, auto p) GEMM_INLINE { totals[m][kFirst + p] = total[m][p]; });
  const __m128i most = _mm_set1_epi8(kMostScale - kLeastScale);
  return _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(above_least, most), most)) == 0xFFFF;
}

template <int kRows, class Strip>
__attribute__((noinline)) bool direct(const Strip& strip, const float* x, int64_t blocks, float* out, int64_t stride) {
  constexpr int kCount = kDirectParts<kRows>;
  Vec totals[kRows][kParts];
  bool done = true;
  times<kParts / kCount>([&](auto run) GEMM_INLINE {
    done = done && direct_run<kRows, run * kCount, kCount>(strip, x, blocks, totals);
  });
  times<kRows>([&](auto m) GEMM_INLINE { add_parts(totals[m], out + m * stride); });
  return done;
}

template <class Strip, int kRows = direct_rows(Strip())>
bool direct_any(int rows, const Strip& strip, const float* x, int64_t blocks, float* out, int64_t stride) {
  if (rows == kRows) return direct<kRows>(strip, x, blocks, out, stride);
  if constexpr (kRows > 1) return direct_any<Strip, kRows - 1>(rows, strip, x, blocks, out, stride);
  return false;
}

// The lines of the chunk after this one, fetched a few at a time while this one is used.
struct Ahead {
  const char* next[kMaxStrips];
  int num_strips, lines, lines_at_once;
  void fetch() {
    for (int i = 0; i < lines_at_once && lines > 0; ++i, --lines) {
      for (int s = 0; s < num_strips; ++s) {
        _mm_prefetch(next[s], _MM_HINT_T0);
        next[s] += 64;
      }
    }
  }
};

// A chunk of dequantized strips: groups of parts that are used together, each [block][slot][part][lane].
struct alignas(64) Panel {
  float weights[kMaxStrips * kChunk * kBlock * kStrip];
};

template <int kCount, class Strip>  // kCount: parts in a group
GEMM_INLINE inline void fill(Panel& panel, int first_part, const Strip& strip, int64_t first_block, int num_blocks) {
  for (int b = 0; b < num_blocks; ++b) {
    Vec scale[kParts];
    if constexpr (kHasScales<Strip>) scales<0, kParts>(strip.scales + (first_block + b) * kStrip, scale);
    decode<0, kParts>(strip, first_block + b, [&](auto slot, auto part, Vec weights) GEMM_INLINE {
      if constexpr (kHasScales<Strip>) weights = mul(weights, scale[part]);
      const int p = first_part + part;
      store(panel.weights + (((p / kCount * kChunk + b) * kSlots + slot) * kCount + p % kCount) * kLanes, weights);
    });
  }
}

template <int kRows, int kCount>
__attribute__((noinline)) void use(const float* weights, const float* x, int num_blocks, float* totals, Ahead& ahead) {
  Vec sum[kRows][kCount];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int p = 0; p < kCount; ++p) sum[m][p] = zeros();
  }
  for (int b = 0; b < num_blocks; ++b, x += kRows * kBlock, weights += kSlots * kCount * kLanes) {
    ahead.fetch();
#pragma GCC unroll 16
    for (int slot = 0; slot < kSlots; ++slot) {
      asm volatile("" ::: "memory");  // else the compiler takes weights ahead, to the stack and back
      Vec w[kCount];
#pragma GCC unroll 4
      for (int p = 0; p < kCount; ++p) w[p] = load(weights + (slot * kCount + p) * kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const Pair activations(x + kBlock * m + 2 * pair_at(slot));
#pragma GCC unroll 4
        for (int p = 0; p < kCount; ++p) sum[m][p] = fma(w[p], activations[p], sum[m][p]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int p = 0; p < kCount; ++p) {
      float* total = totals + (m * kCount + p) * kLanes;
      store(total, add(load(total), sum[m][p]));
    }
  }
}

template <int kCount, int kRows = kTile>
void use_any(int rows, const float* weights, const float* x, int num_blocks, float* totals, Ahead& ahead) {
  if (rows == kRows) return use<kRows, kCount>(weights, x, num_blocks, totals, ahead);
  if constexpr (kRows > 1) use_any<kCount, kRows - 1>(rows, weights, x, num_blocks, totals, ahead);
}

template <int kStrips, class Strip>
void multiply_decoded(const Strip* strips, const Rows& x, float* out, int64_t stride) {
  constexpr int kCount = std::min(kGroup, kStrips * kParts), kGroups = kStrips * kParts / kCount;
  constexpr int kRowSums = kMaxStrips * kStripSums;
  alignas(64) Panel panel;
  alignas(64) float totals[kPassTiles * kTile * kRowSums];  // [group][row of the pass][part of the group][lane]
  const Tiles tiles(x.count);
  for (int64_t first_tile = 0; first_tile < tiles.num; first_tile += kPassTiles) {
    const int64_t last_tile = std::min(first_tile + kPassTiles, tiles.num), first_row = tiles.first(first_tile);
    const int64_t num_rows = tiles.first(last_tile) - first_row;
    std::memset(totals, 0, num_rows * kRowSums * sizeof(float));
    for (int64_t block = 0; block < x.blocks; block += kChunk) {
      const int num_blocks = int(std::min<int64_t>(kChunk, x.blocks - block));
      times<kStrips>([&](auto s) GEMM_INLINE { fill<kCount>(panel, s * kParts, strips[s], block, num_blocks); });
      Ahead ahead{{}, kStrips, 0, 0};
      if (const int64_t rest = std::min<int64_t>(kChunk, x.blocks - block - num_blocks); rest > 0) {
        for (int s = 0; s < kStrips; ++s) {
          ahead.next[s] = bytes_of(strips[s]) + (block + num_blocks) * block_bytes(strips[s]);
        }
        const int64_t times_used = (last_tile - first_tile) * kGroups * num_blocks;
        ahead.lines = int(rest * block_bytes(strips[0]) / 64);
        ahead.lines_at_once = int((ahead.lines + times_used - 1) / times_used);
      }
      for (int group = 0; group < kGroups; ++group) {
        const int parts = group * kCount * kLanes;
        for (int64_t tile = first_tile; tile < last_tile; ++tile) {
          const int rows = tiles.rows(tile);
          const float* in = (const float*)x.data + tiles.offset(tile, block, x.blocks);
          float* sums = totals + num_rows * parts + (tiles.first(tile) - first_row) * kCount * kLanes;
          use_any<kCount>(rows, panel.weights + parts * kChunk * kSlots, in, num_blocks, sums, ahead);
        }
      }
    }
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int s = 0; s < kStrips; ++s) {
        Vec sums[kParts];
        for (int p = 0; p < kParts; ++p) {
          const int part = s * kParts + p;
          sums[p] = load(totals + ((part / kCount * num_rows + row) * kCount + part % kCount) * kLanes);
        }
        add_parts(sums, out + (first_row + row) * stride + s * kStrip);
      }
    }
  }
}

}  // namespace fp32

struct Scope {
  Scope() {}  // not trivial, so that an unused one is no warning
};

// The rows, then a byte for each block: whether a few rows hold an activation there that is not moderate.
inline int64_t rows_bytes(int64_t count, int64_t blocks, Dtype) {
  return count * blocks * kBlock * sizeof(float) + blocks;
}

inline void prepare(const void* x, int64_t stride, const int32_t* gather, int64_t count, int64_t k, Dtype dtype,
                    void* memory, int64_t first_block, int64_t last_block) {
  using simd::F16;
  const int64_t blocks = (k + kBlock - 1) / kBlock;
  const fp32::Tiles tiles(count);
  const auto copy = [&](auto* values, int64_t tile, int64_t m) {
    for (int64_t block = first_block; block < last_block; ++block) {
      float* out = (float*)memory + tiles.offset(tile, block, blocks) + m * kBlock;
      for (int half = 0; half < 2; ++half) {
        const int64_t at = block * kBlock + half * kStrip, rest = std::clamp<int64_t>(k - at, 0, kStrip);
        F16 v;
        if constexpr (std::is_same_v<decltype(values), const float*>) {
          v = rest == kStrip ? simd::load(values + at) : simd::load(values + at, int(rest));
        } else {
          v = rest == kStrip ? simd::load_bf16(values + at) : simd::load_bf16(values + at, int(rest));
        }
        simd::store(out + half * kStrip, v);
      }
    }
  };
  for (int64_t tile = 0; tile < tiles.num; ++tile) {
    const int64_t rows = tiles.rows(tile), first = tiles.first(tile);
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t offset = (gather ? gather[first + m] : first + m) * stride;
      if (dtype == Dtype::kFp32) {
        copy((const float*)x + offset, tile, m);
      } else {
        copy((const uint16_t*)x + offset, tile, m);
      }
    }
  }
  if (count > fp32::kMxfp4DirectRows) return;
  const float* rows = (const float*)memory;
  uint8_t* immoderate = (uint8_t*)(rows + count * blocks * kBlock);
  for (int64_t block = first_block; block < last_block; ++block) {
    immoderate[block] = !fp32::is_moderate(rows + block * count * kBlock, count * kBlock);
  }
}

template <class Strip>
void multiply(const Strip* strips, int num_strips, const Rows& x, float* out, int64_t stride) {
  if (x.count == 0) return;
  const float* rows = (const float*)x.data;
  bool few = x.count <= fp32::direct_rows(strips[0]);
  if constexpr (fp32::kHasScales<Strip>) few = few && !std::memchr(rows + x.count * x.blocks * kBlock, 1, x.blocks);
  if (few) {
    for (int s = 0; s < num_strips; ++s) {
      float* const at = out + s * kStrip;
      if (!fp32::direct_any(int(x.count), strips[s], rows, x.blocks, at, stride)) {
        fp32::multiply_decoded<1>(strips + s, x, at, stride);
      }
    }
  } else if (num_strips == 2) {
    fp32::multiply_decoded<2>(strips, x, out, stride);
  } else {
    fp32::multiply_decoded<1>(strips, x, out, stride);
  }
}

#undef GEMM_INLINE

}  // namespace gemm
