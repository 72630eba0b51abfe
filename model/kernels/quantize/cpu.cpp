// fp32 to MXFP4 and back; the bytes of `model.mxfp4`. A block is read once, by one thread.
#include <algorithm>

#include "packed_mxfp4.h"
#include "simd.h"

namespace {

constexpr int64_t kBlock = 32, kBlockBytes = 16, kStrip = 16, kTileBytes = kStrip * kBlockBytes;
constexpr uint32_t kMagnitude = 0x7FFFFFFF, kExponent = 0x7F800000, kOne = 0x3F800000, kLargestScale = 252;
constexpr int64_t kSegment = 128;       // blocks of a row that are quantized before the next row: 16 KiB of floats
constexpr int64_t kAhead = 2048;        // bytes; a few blocks of arithmetic hide the latency of memory
constexpr int64_t kThreadsFrom = 2048;  // blocks

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float power_of_two(uint32_t scale) {  // 2^(scale - 127), 255 is NaN
  return as_float(scale == 0 ? 0x00400000 : scale == 255 ? 0x7FC00000 : scale << 23);
}

inline float inverse_scale(uint32_t scale) { return as_float((254 - scale) << 23); }  // 0..252: always normal

inline uint32_t scale_byte(uint32_t largest, uint32_t carry, const uint8_t* previous) {
  if (previous && *previous <= kLargestScale) {
    const float scaled = as_float(largest) * inverse_scale(*previous);
    if (scaled >= 3.25f && scaled < 7.5f) return *previous;
  }
  const int32_t scale = int32_t((largest + carry) >> 23) - 2;
  return uint32_t(std::clamp<int32_t>(scale, 0, kLargestScale));
}

// In the binade 2^j of a scaled magnitude (j = 0 below 2, 1 below 4, 2 below 8) codes are 2^j / 2 apart. Adding the
// anchor 2^(22 + j), whose last bit is worth that, rounds to nearest even in units of it; the code is that count
// plus 2 j.
constexpr int kAnchor = 22 << 23, kAnchorCount = 2 * 149;

#if defined(__AVX512F__)

inline __m512i magnitude_codes(__m512i bits, __m512 inverse) {
  const __m512i scaled = _mm512_and_si512(_mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(bits), inverse)),
                                          _mm512_set1_epi32(kMagnitude));
  const __m512i binade =
      _mm512_and_si512(_mm512_max_epi32(scaled, _mm512_set1_epi32(kOne)), _mm512_set1_epi32(kExponent));
  const __m512i anchor = _mm512_add_epi32(binade, _mm512_set1_epi32(kAnchor));
  const __m512i sum =
      _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(scaled), _mm512_castsi512_ps(anchor)));
  const __m512i twice = _mm512_sub_epi32(_mm512_srli_epi32(anchor, 22), _mm512_set1_epi32(kAnchorCount));
  return _mm512_min_epi32(_mm512_add_epi32(_mm512_sub_epi32(sum, anchor), twice), _mm512_set1_epi32(7));
}

// Quantizes a block; the bits of its largest magnitude.
inline uint32_t quantize_block(const float* w, uint32_t carry, const uint8_t* previous, uint8_t* block,
                               uint8_t* scale_out) {
  const __m512i a = _mm512_loadu_si512(w), b = _mm512_loadu_si512(w + 16);
  const __m512i either = _mm512_max_epi32(_mm512_and_si512(a, _mm512_set1_epi32(kMagnitude)),
                                          _mm512_and_si512(b, _mm512_set1_epi32(kMagnitude)));
  const uint32_t largest = uint32_t(_mm512_reduce_max_epi32(either));
  const uint32_t scale = scale_byte(largest, carry, previous);
  const __m512 inverse = _mm512_set1_ps(inverse_scale(scale));
  __m256i codes = _mm256_set_m128i(_mm512_cvtepi32_epi8(magnitude_codes(b, inverse)),
                                   _mm512_cvtepi32_epi8(magnitude_codes(a, inverse)));
  const __mmask32 negative = uint32_t(_mm512_movepi32_mask(a)) | uint32_t(_mm512_movepi32_mask(b)) << 16;
  const __mmask32 signs = negative & _mm256_test_epi8_mask(codes, codes);  // no negative zero is written
  codes = _mm256_or_si256(codes, _mm256_maskz_mov_epi8(signs, _mm256_set1_epi8(8)));
  const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));
  _mm_storeu_si128((__m128i*)block, _mm256_cvtepi16_epi8(pairs));
  *scale_out = uint8_t(scale);
  return largest;
}

#else

inline __m256i magnitude_codes(__m256i bits, __m256 inverse) {
  const __m256i scaled = _mm256_and_si256(_mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(bits), inverse)),
                                          _mm256_set1_epi32(kMagnitude));
  const __m256i binade =
      _mm256_and_si256(_mm256_max_epi32(scaled, _mm256_set1_epi32(kOne)), _mm256_set1_epi32(kExponent));
  const __m256i anchor = _mm256_add_epi32(binade, _mm256_set1_epi32(kAnchor));
  const __m256i sum =
      _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(scaled), _mm256_castsi256_ps(anchor)));
  const __m256i twice = _mm256_sub_epi32(_mm256_srli_epi32(anchor, 22), _mm256_set1_epi32(kAnchorCount));
  return _mm256_add_epi32(_mm256_sub_epi32(sum, anchor), twice);
}

// Quantizes a block; the bits of its largest magnitude.
inline uint32_t quantize_block(const float* w, uint32_t carry, const uint8_t* previous, uint8_t* block,
                               uint8_t* scale_out) {
  __m256i bits[4], either = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    bits[i] = _mm256_loadu_si256((const __m256i*)(w + 8 * i));
    either = _mm256_max_epi32(either, _mm256_and_si256(bits[i], _mm256_set1_epi32(kMagnitude)));
  }
  __m128i top = _mm_max_epi32(_mm256_castsi256_si128(either), _mm256_extracti128_si256(either, 1));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4E));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0xB1));
  const uint32_t largest = uint32_t(_mm_cvtsi128_si32(top));
  const uint32_t scale = scale_byte(largest, carry, previous);
  const __m256 inverse = _mm256_set1_ps(inverse_scale(scale));
  __m256i code[4];
  for (int i = 0; i < 4; ++i) code[i] = magnitude_codes(bits[i], inverse);
  // The two packings keep signs, and put codes and signs into the same order of bytes.
  __m256i codes = _mm256_packs_epi16(_mm256_packs_epi32(code[0], code[1]), _mm256_packs_epi32(code[2], code[3]));
  codes = _mm256_min_epi8(codes, _mm256_set1_epi8(7));
  const __m256i signs = _mm256_packs_epi16(_mm256_packs_epi32(bits[0], bits[1]), _mm256_packs_epi32(bits[2], bits[3]));
  const __m256i negative = _mm256_and_si256(_mm256_cmpgt_epi8(_mm256_setzero_si256(), signs),
                                            _mm256_cmpgt_epi8(codes, _mm256_setzero_si256()));  // never -0
  codes = _mm256_or_si256(codes, _mm256_and_si256(negative, _mm256_set1_epi8(8)));
  const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));  // 16-bit lanes below 256
  const __m256i bytes = _mm256_packus_epi16(pairs, pairs);  // each half: two bytes of each eighth of the block
  const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  const __m128i both = _mm_unpacklo_epi64(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storeu_si128((__m128i*)block, _mm_shuffle_epi8(both, order));
  *scale_out = uint8_t(scale);
  return largest;
}

#endif

inline uint32_t quantize_blocks(const float* w, uint32_t carry, const uint8_t* previous, uint8_t* blocks,
                                uint8_t* scales, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const char* ahead = (const char*)(w + kBlock * i) + kAhead;
    _mm_prefetch(ahead, _MM_HINT_T0);
    _mm_prefetch(ahead + 64, _MM_HINT_T0);
    largest = std::max(largest, quantize_block(w + kBlock * i, carry, previous ? previous + i : nullptr,
                                               blocks + kBlockBytes * i, scales + i));
  }
  return largest;
}

// Eight rows' bytes of one block (`stride` bytes apart) into their words of a tile: a transposition of 32-bit groups,
// then even nibbles into the first 16 bits of each group and odd ones into the second.
inline void tile_rows(const uint8_t* blocks, int64_t stride, uint8_t* tile) {
  __m256i row[4];
  for (int i = 0; i < 4; ++i) {
    row[i] = _mm256_set_m128i(_mm_loadu_si128((const __m128i*)(blocks + (i + 4) * stride)),
                              _mm_loadu_si128((const __m128i*)(blocks + i * stride)));
  }
  const __m256i low01 = _mm256_unpacklo_epi32(row[0], row[1]), high01 = _mm256_unpackhi_epi32(row[0], row[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(row[2], row[3]), high23 = _mm256_unpackhi_epi32(row[2], row[3]);
  const __m256i group[4] = {_mm256_unpacklo_epi64(low01, low23), _mm256_unpackhi_epi64(low01, low23),
                            _mm256_unpacklo_epi64(high01, high23), _mm256_unpackhi_epi64(high01, high23)};
  const __m256i nibble = _mm256_set1_epi8(15), join = _mm256_set1_epi16(0x1001);
  for (int g = 0; g < 4; ++g) {
    const __m256i even = _mm256_maddubs_epi16(_mm256_and_si256(group[g], nibble), join);
    const __m256i odd = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(group[g], 4), nibble), join);
    const __m256i bytes = _mm256_packus_epi16(even, odd);
    _mm256_storeu_si256((__m256i*)(tile + 64 * g), _mm256_unpacklo_epi16(bytes, _mm256_srli_si256(bytes, 8)));
  }
}

// Whether a scale of a tile calls for products in fp32 (`Mxfp4Strip::extreme`).
bool any_extreme(const uint8_t* blocks, int64_t stride, const uint8_t* scales, int64_t rows) {
  const __m128i above = _mm_subs_epu8(_mm_sub_epi8(_mm_loadu_si128((const __m128i*)scales), _mm_set1_epi8(2)),
                                      _mm_set1_epi8(char(250)));  // 0 for bytes 2..252
  if (_mm_testz_si128(above, above)) return false;
  bool extreme = false;
  for (int64_t row = 0; row < rows; ++row) {
    uint64_t half[2];
    std::memcpy(half, blocks + row * stride, sizeof half);
    extreme |= is_extreme(half[0], half[1], scales[row]);
  }
  return extreme;
}

// Blocks [first, last) of a strip's `rows` <= 16 rows, `row_blocks` blocks apart; whether one is extreme.
bool tile_strip(const uint8_t* blocks, const uint8_t* scales, uint8_t* tile_codes, uint8_t* tile_scales, int64_t rows,
                int64_t row_blocks, int64_t first, int64_t last) {
  alignas(32) uint8_t padded[kTileBytes] = {};
  bool extreme = false;
  for (int64_t block = first; block < last; ++block) {
    const uint8_t* source = blocks + kBlockBytes * block;
    int64_t stride = kBlockBytes * row_blocks;
    if (rows < kStrip) {
      for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(padded + kBlockBytes * row, source + row * stride, kBlockBytes);
      }
      source = padded;
      stride = kBlockBytes;
    }
    tile_rows(source, stride, tile_codes + kTileBytes * block);
    tile_rows(source + 8 * stride, stride, tile_codes + kTileBytes * block + 32);
    uint8_t* beside = tile_scales + kStrip * block;
    for (int64_t row = 0; row < kStrip; ++row) beside[row] = row < rows ? scales[row * row_blocks + block] : 0;
    extreme |= any_extreme(source, stride, beside, rows);
  }
  return extreme;
}

}  // namespace

// Quantizes `count` blocks. `previous` may be null. Returns the bits of the largest magnitude.
extern "C" uint32_t quantize(const float* w, const uint8_t* previous, uint8_t* blocks, uint8_t* scales, int64_t count,
                             uint32_t carry) {
  uint32_t largest = 0;
#pragma omp parallel for schedule(static) reduction(max : largest) if (count > kThreadsFrom)
  for (int64_t start = 0; start < count; start += kSegment) {
    const int64_t here = std::min(kSegment, count - start);
    largest = std::max(largest, quantize_blocks(w + kBlock * start, carry, previous ? previous + start : nullptr,
                                                blocks + kBlockBytes * start, scales + start, here));
  }
  return largest;
}

// The tiles of `matrices` matrices of `rows` rows, as `PackedMxfp4` holds them, from their bytes; with `w`, those are
// written first.
extern "C" uint32_t quantize_tiles(const float* w, const uint8_t* previous, uint8_t* blocks, uint8_t* scales,
                                   uint8_t* tile_codes, uint8_t* tile_scales, uint8_t* extreme, int64_t matrices,
                                   int64_t rows, int64_t row_blocks, uint32_t carry) {
  const int64_t strips = (rows + kStrip - 1) / kStrip;
  uint32_t largest = 0;
#pragma omp parallel for schedule(static) reduction(max : largest) if (matrices * rows * row_blocks > kThreadsFrom)
  for (int64_t strip = 0; strip < matrices * strips; ++strip) {
    const int64_t first_row = strip % strips * kStrip, here = std::min(kStrip, rows - first_row);
    const int64_t offset = (strip / strips * rows + first_row) * row_blocks;  // in blocks
    bool any = false;
    for (int64_t start = 0; start < row_blocks; start += kSegment) {
      const int64_t count = std::min(kSegment, row_blocks - start);
      for (int64_t row = 0; w && row < here; ++row) {
        const int64_t at = offset + row * row_blocks + start;
        largest = std::max(largest, quantize_blocks(w + kBlock * at, carry, previous ? previous + at : nullptr,
                                                    blocks + kBlockBytes * at, scales + at, count));
      }
      any |= tile_strip(blocks + kBlockBytes * offset, scales + offset, tile_codes + kTileBytes * strip * row_blocks,
                        tile_scales + kStrip * strip * row_blocks, here, row_blocks, start, start + count);
    }
    extreme[strip] = any;
  }
  return largest;
}

namespace {

#if defined(__AVX512F__)

inline simd::F16 decode(const uint8_t* bytes) {  // eight bytes, sixteen values
  const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  const __m128i eight = _mm_loadl_epi64((const __m128i*)bytes);
  const __m512i twice = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(eight, eight));
  const __m512i code = _mm512_srlv_epi32(twice, _mm512_set1_epi64(int64_t(4) << 32));
  return {_mm512_permutexvar_ps(code, values)};  // reads four bits
}

#else

inline __m256 decode8(__m128i twice) {
  const __m256 values = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
  const __m256i code = _mm256_srlv_epi32(_mm256_cvtepu8_epi32(twice), _mm256_set1_epi64x(int64_t(4) << 32));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(code, 28), _mm256_set1_epi32(INT32_MIN));
  return _mm256_or_ps(_mm256_permutevar8x32_ps(values, code), _mm256_castsi256_ps(sign));  // reads three bits
}

inline simd::F16 decode(const uint8_t* bytes) {
  const __m128i eight = _mm_loadl_epi64((const __m128i*)bytes);
  const __m128i twice = _mm_unpacklo_epi8(eight, eight);
  return {decode8(twice), decode8(_mm_srli_si128(twice, 8))};
}

#endif

inline void store_values(float* out, simd::F16 values) { simd::store(out, values); }
inline void store_values(uint16_t* out, simd::F16 values) { simd::store_bf16(out, values); }  // exact

template <class T>
void dequantize(const uint8_t* blocks, const uint8_t* scales, T* out, int64_t count) {
#pragma omp parallel for schedule(static) if (count > kThreadsFrom)
  for (int64_t i = 0; i < count; ++i) {
    const simd::F16 scale = simd::set1(power_of_two(scales[i]));
    for (int half = 0; half < 2; ++half) {
      const simd::F16 values = decode(blocks + kBlockBytes * i + 8 * half);
      store_values(out + kBlock * i + 16 * half, simd::mul(values, scale));
    }
  }
}

}  // namespace

extern "C" void dequantize_fp32(const uint8_t* blocks, const uint8_t* scales, float* out, int64_t count) {
  dequantize(blocks, scales, out, count);
}

extern "C" void dequantize_bf16(const uint8_t* blocks, const uint8_t* scales, uint16_t* out, int64_t count) {
  dequantize(blocks, scales, out, count);
}
