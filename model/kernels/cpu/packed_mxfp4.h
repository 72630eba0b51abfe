// MXFP4 matrices cut into the strips of `gemm.h`, from the checkpoint's layout and back.
//
// Rows of the checkpoint's matrix are columns of the product. A last strip that is not whole is filled with zeros. Both
// directions keep every byte.
#pragma once
#include <immintrin.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>

#include "gemm.h"

struct PackedMxfp4 {
  uint8_t* codes;    // [matrix][strip][block][256]
  uint8_t* scales;   // [matrix][strip][block][16]
  uint8_t* extreme;  // [matrix][strip]
  int64_t num_matrices, columns, strips, blocks;

  gemm::Mxfp4Strip strip(int64_t matrix, int64_t index) const {
    const int64_t at = matrix * strips + index;
    return {codes + at * blocks * gemm::kMxfp4BlockBytes, scales + at * blocks * gemm::kStrip, extreme[at] != 0};
  }
};

// Zeros stay zeros whatever their scale (the quantizer gives blocks of zeros byte 0), unless that is NaN.
inline bool is_extreme(uint64_t low, uint64_t high, uint8_t scale) {
  constexpr uint64_t kMagnitudes = 0x7777777777777777ull;
  return scale == 255 || ((scale < 2 || scale > 252) && ((low | high) & kMagnitudes) != 0);
}

// Memory about to be written for the first time in pages of 2 MiB, where it spans some: a product reads it once from
// end to end, and small pages cost it address translations. The system may refuse.
inline void ask_for_large_pages(void* memory, int64_t bytes) {
  constexpr uintptr_t kLargePage = 2 << 20;
  const uintptr_t first = ((uintptr_t)memory + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t last = ((uintptr_t)memory + uintptr_t(bytes)) / kLargePage * kLargePage;
  if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
}

inline void pack(const uint8_t* blocks, const uint8_t* scales, PackedMxfp4& to) {
  constexpr uint64_t kEven = 0x0F0F0F0F0F0F0F0Full;
  ask_for_large_pages(to.codes, to.num_matrices * to.strips * to.blocks * gemm::kMxfp4BlockBytes);
#pragma omp parallel for schedule(static)
  for (int64_t at = 0; at < to.num_matrices * to.strips; ++at) {
    const int64_t matrix = at / to.strips, first = at % to.strips * gemm::kStrip;
    bool extreme = false;
    for (int64_t block = 0; block < to.blocks; ++block) {
      const int64_t index = at * to.blocks + block;
      for (int64_t n = 0; n < gemm::kStrip; ++n) {
        uint64_t low = 0, high = 0;
        uint8_t scale = 0;
        if (first + n < to.columns) {
          const int64_t from = (matrix * to.columns + first + n) * to.blocks + block;
          std::memcpy(&low, blocks + from * 16, 8);
          std::memcpy(&high, blocks + from * 16 + 8, 8);
          scale = scales[from];
          extreme |= is_extreme(low, high, scale);
        }
        to.scales[index * gemm::kStrip + n] = scale;
        const uint64_t even[2] = {_pext_u64(low, kEven), _pext_u64(high, kEven)};
        const uint64_t odd[2] = {_pext_u64(low, ~kEven), _pext_u64(high, ~kEven)};
        for (int load = 0; load < 4; ++load) {
          const int shift = 16 * (load % 2);
          const uint32_t words = uint32_t(even[load / 2] >> shift & 0xFFFF) |
                                 uint32_t(odd[load / 2] >> shift & 0xFFFF) << 16;
          std::memcpy(to.codes + index * gemm::kMxfp4BlockBytes + 64 * load + 4 * n, &words, 4);
        }
      }
    }
    to.extreme[at] = extreme;
  }
}

inline void unpack(const PackedMxfp4& from, uint8_t* blocks, uint8_t* scales) {
  constexpr uint64_t kEven = 0x0F0F0F0F0F0F0F0Full;
#pragma omp parallel for schedule(static)
  for (int64_t at = 0; at < from.num_matrices * from.strips; ++at) {
    const int64_t matrix = at / from.strips, first = at % from.strips * gemm::kStrip;
    for (int64_t block = 0; block < from.blocks; ++block) {
      const int64_t index = at * from.blocks + block;
      for (int64_t n = 0; n < gemm::kStrip && first + n < from.columns; ++n) {
        const int64_t to = (matrix * from.columns + first + n) * from.blocks + block;
        scales[to] = from.scales[index * gemm::kStrip + n];
        for (int load = 0; load < 4; ++load) {
          uint32_t words;
          std::memcpy(&words, from.codes + index * gemm::kMxfp4BlockBytes + 64 * load + 4 * n, 4);
          const uint32_t bytes = uint32_t(_pdep_u64(words & 0xFFFF, kEven) | _pdep_u64(words >> 16, ~kEven));
          std::memcpy(blocks + to * 16 + 4 * load, &bytes, 4);
        }
      }
    }
  }
}
