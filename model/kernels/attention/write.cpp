// Stores keys or values in their slots: as they are in fp32, rounded to bf16, or in eight bits with a scale a head.
#include <cmath>
#include <vector>

#include "pages.h"

using namespace simd;
using namespace pages;

namespace {

uint8_t to_fp8(float x) {  // e4m3fn, round to nearest even; beyond the largest: NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits & 0x80000000u;
  bits ^= sign;
  uint32_t result;
  if (bits >= (1087u << 20)) {
    result = 0x7F;
  } else if (bits < (121u << 23)) {  // subnormal there: an addition rounds at its last bit
    constexpr uint32_t kAligned = 141u << 23;
    float magnitude, aligned;
    std::memcpy(&magnitude, &bits, 4);
    std::memcpy(&aligned, &kAligned, 4);
    magnitude += aligned;
    std::memcpy(&bits, &magnitude, 4);
    result = bits - kAligned;
  } else {
    const uint32_t odd = (bits >> 20) & 1;
    result = (bits - (120u << 23) + 0x7FFFF + odd) >> 20;
  }
  return uint8_t(result | sign >> 24);
}

void write_row(const Pages& pages, int64_t slot, int64_t head, const float* x) {
  const int64_t dim = pages.dim, at = slot * pages.row_stride + head * pages.head_stride;
  if (pages.kind == kFp32) {
    std::memcpy(reinterpret_cast<float*>(pages.rows) + at, x, dim * sizeof(float));
    return;
  }
  if (pages.kind == kBf16) {
    Bf16* row = reinterpret_cast<Bf16*>(pages.rows) + at;
    for (int64_t i = 0; i < dim; i += kLanes) {
      const int n = int(std::min<int64_t>(kLanes, dim - i));
      store_bf16(row + i, load(x + i, n), n);
    }
    return;
  }
  float largest = 0.0f;
  for (int64_t i = 0; i < dim; ++i) largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
  for (int64_t i = 0; i < dim; ++i) largest = x[i] == x[i] ? largest : 0.0f;  // a NaN: scale 1, as the definition
  const float scale = largest > 0.0f ? largest / (pages.kind == kInt8 ? 127.0f : 448.0f) : 1.0f;
  pages.scales[slot * pages.scale_row_stride + head * pages.scale_head_stride] = scale;
  for (int64_t i = 0; i < dim; ++i) {
    const float scaled = x[i] / scale;
    pages.rows[at + i] = pages.kind == kInt8 ? char(int(std::nearbyint(scaled))) : char(to_fp8(scaled));
  }
}

}  // namespace

// Stores x [tokens, heads, dim]; 0, or 1 + the first token whose slot does not exist.
extern "C" int64_t write_pages(const Pages* pages, const int64_t* slots, const char* x, int64_t tokens, int64_t heads,
                               int64_t row_stride, int64_t head_stride, int64_t is_bf16) {
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] < 0 || slots[t] >= pages->slots) return t + 1;
  }
#pragma omp parallel for schedule(static) if (tokens * heads * pages->dim > 65536)
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<float> row(pages->dim);
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t at = t * row_stride + head * head_stride;
      for (int64_t i = 0; i < pages->dim; i += kLanes) {
        const int n = int(std::min<int64_t>(kLanes, pages->dim - i));
        store(row.data() + i,
              is_bf16 ? load_bf16(reinterpret_cast<const Bf16*>(x) + at + i, n)
                      : load(reinterpret_cast<const float*>(x) + at + i, n),
              n);
      }
      write_row(*pages, slots[t], head, row.data());
    }
  }
  return 0;
}
