// Attention over paged keys and values: one pass over the keys in blocks of 64, with the softmax renormalised as it goes
// (Milakov and Gimelshein 2018; Dao 2023). README.md here states which sums are made in which order, and why a query's
// bits depend on nothing but itself and the keys it sees.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "pages.h"

using namespace simd;
using namespace pages;

namespace {

constexpr int64_t kBlock = 64;      // keys of a block: positions 64 b .. 64 b + 63
constexpr int64_t kGroup = 6;       // query rows whose sums stay in registers together
constexpr int64_t kTaskRows = 128;  // query rows that share one decoding of a block
constexpr float kHidden = -std::numeric_limits<float>::infinity();

struct Call {
  Pages keys, values;
  const char* q;
  char* out;
  int64_t q_row_stride, q_head_stride, is_bf16, tokens, heads, kv_heads;
  const float* sinks;
  const int32_t *pages, *starts, *counts;
  int64_t pages_stride, sequences, page_size, window;
  float scale;
};

// One block of one head: where its stored rows lie. Keys outside [from, to) point to a row of zeros.
struct Block {
  const char *keys[kBlock], *values[kBlock];
  int64_t slots[kBlock];
  int64_t from, to;
};

// Sixteen keys become sixteen lanes: out[i][0..15], i < dim, rows 64 floats apart.
template <class T>
void transpose_keys(const char* const* rows, int64_t dim, float* out, const float* scales) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int n = int(std::min<int64_t>(kLanes, dim - i));
    F16 tile[kLanes];
    for (int k = 0; k < kLanes; ++k) tile[k] = widen(reinterpret_cast<const T*>(rows[k]) + i, n);
    transpose(tile);
    for (int k = 0; k < n; ++k) store(out + (i + k) * kBlock, scales ? mul(tile[k], load(scales)) : tile[k]);
  }
}

// bf16 in pairs of neighbours: half the shuffles.
template <>
void transpose_keys<Bf16>(const char* const* rows, int64_t dim, float* out, const float*) {
  for (int64_t i = 0; i < dim; i += 2 * kLanes) {
    const int n = int(std::min<int64_t>(2 * kLanes, dim - i));
    F16 tile[kLanes];
    for (int k = 0; k < kLanes; ++k) {
      const Bf16* p = reinterpret_cast<const Bf16*>(rows[k]) + i;
      Bf16 all[2 * kLanes] = {};
      if (n < 2 * kLanes) p = static_cast<const Bf16*>(std::memcpy(all, p, n * sizeof(Bf16)));
      tile[k] = load(reinterpret_cast<const float*>(p));
    }
    transpose(tile);
    for (int k = 0; k < n; ++k) store(out + (i + k) * kBlock, k % 2 ? odd_bf16(tile[k / 2]) : even_bf16(tile[k / 2]));
  }
}

template <class T>
void decode_keys(const Pages& pages, const Block& block, int64_t head, float* out) {
  for (int64_t k = block.from / kLanes * kLanes; k < block.to; k += kLanes) {
    float scales[kLanes] = {};
    if (pages.scales) {
      for (int64_t i = std::max(k, block.from); i < std::min(k + kLanes, block.to); ++i) {
        scales[i - k] = pages.scales[block.slots[i] * pages.scale_row_stride + head * pages.scale_head_stride];
      }
    }
    transpose_keys<T>(block.keys + k, pages.dim, out + k, pages.scales ? scales : nullptr);
  }
}

template <class T>
void decode_values(const Pages& pages, const Block& block, int64_t head, float* out) {
  const int64_t dim = pages.dim, width = padded(dim);
  for (int64_t k = block.from; k < block.to; ++k) {
    const T* row = reinterpret_cast<const T*>(block.values[k]);
    const float scale =
        pages.scales ? pages.scales[block.slots[k] * pages.scale_row_stride + head * pages.scale_head_stride] : 1.0f;
    for (int64_t i = 0; i < dim; i += kLanes) {
      const F16 x = widen(row + i, int(std::min<int64_t>(kLanes, dim - i)));
      store(out + k * width + i, pages.scales ? mul(x, set1(scale)) : x);
    }
  }
}

void decode(const Call& call, const Block& block, int64_t head, float* keys, float* values) {
  switch (call.keys.kind) {
    case kFp32: decode_keys<float>(call.keys, block, head, keys); break;
    case kBf16: decode_keys<Bf16>(call.keys, block, head, keys); break;
    case kInt8: decode_keys<int8_t>(call.keys, block, head, keys); break;
    default: decode_keys<Fp8>(call.keys, block, head, keys);
  }
  switch (call.values.kind) {
    case kFp32: decode_values<float>(call.values, block, head, values); break;
    case kBf16: decode_values<Bf16>(call.values, block, head, values); break;
    case kInt8: decode_values<int8_t>(call.values, block, head, values); break;
    default: decode_values<Fp8>(call.values, block, head, values);
  }
}

// --------------------------------------------------------------------------------------------------------------- sums

// out[r][c] (+)= sum over t of a[r][t] b[t][c]: one chain of fma for each element, in the order of t, whatever R and C.
template <int R, int C, bool kFresh>
inline void chain_tile(const float* a, int64_t lda, const float* b, int64_t ldb, float* out, int64_t ldo, int64_t from,
                       int64_t to) {
  F16 sums[R][C];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums[r][c] = kFresh ? zero() : load(out + r * ldo + c * kLanes);
  }
  for (int64_t t = from; t < to; ++t) {
    F16 columns[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) columns[c] = load(b + t * ldb + c * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const F16 x = set1(a[r * lda + t]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] = fma(x, columns[c], sums[r][c]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(out + r * ldo + c * kLanes, sums[r][c]);
  }
}

template <int R, bool kFresh>
void chain_rows(const float* a, int64_t lda, const float* b, int64_t ldb, float* out, int64_t ldo, int64_t width,
                int64_t from, int64_t to) {
#if defined(__AVX512F__)
  constexpr int kWide = 4;  // of 32 registers 24 hold sums
#else
  constexpr int kWide = R == 1 ? 4 : R == 2 ? 2 : 1;  // of 16 registers up to 12 hold sums
#endif
  int64_t c = 0;
  for (; c + kWide * kLanes <= width; c += kWide * kLanes) {
    chain_tile<R, kWide, kFresh>(a, lda, b + c, ldb, out + c, ldo, from, to);
  }
  for (; c < width; c += kLanes) chain_tile<R, 1, kFresh>(a, lda, b + c, ldb, out + c, ldo, from, to);
}

template <bool kFresh>
void chain(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, float* out, int64_t ldo,
           int64_t width, int64_t from, int64_t to) {
  switch (rows) {
    case 1: return chain_rows<1, kFresh>(a, lda, b, ldb, out, ldo, width, from, to);
    case 2: return chain_rows<2, kFresh>(a, lda, b, ldb, out, ldo, width, from, to);
    case 3: return chain_rows<3, kFresh>(a, lda, b, ldb, out, ldo, width, from, to);
    case 4: return chain_rows<4, kFresh>(a, lda, b, ldb, out, ldo, width, from, to);
    case 5: return chain_rows<5, kFresh>(a, lda, b, ldb, out, ldo, width, from, to);
    default: return chain_rows<6, kFresh>(a, lda, b, ldb, out, ldo, width, from, to);
  }
}

// ------------------------------------------------------------------------------------------------------------ softmax

// A row's softmax so far: the largest logit, and sixteen partial sums of exp(logit - largest).
struct Softmax {
  F16 sums;
  float largest;
};

// Scores of a block to weights, in place, for keys [from, to); returns what the sums before it are multiplied by.
float weigh(float* scores, int64_t from, int64_t to, float scale, Softmax& softmax) {
  F16 s[4];
  for (int i = 0; i < 4; ++i) s[i] = mul(load(scores + i * kLanes), set1(scale));
  if (from > 0 || to < kBlock) {
    for (int i = 0; i < 4; ++i) store(scores + i * kLanes, s[i]);
    std::fill(scores, scores + from, kHidden);
    std::fill(scores + to, scores + kBlock, kHidden);
    for (int i = 0; i < 4; ++i) s[i] = load(scores + i * kLanes);
  }
  const float before = softmax.largest;
  const float largest = std::max(before, simd::largest(max(max(s[0], s[1]), max(s[2], s[3]))));
  const float pivot = largest == kHidden ? 0.0f : largest;  // logits of -inf alone: weights 0, not NaN
  for (int i = 0; i < 4; ++i) {
    s[i] = exp(sub(s[i], set1(pivot)));
    store(scores + i * kLanes, s[i]);
  }
  const F16 factor = exp(set1(before - pivot));
  softmax.largest = largest;
  softmax.sums = fma(softmax.sums, factor, add(add(s[0], s[1]), add(s[2], s[3])));
  return first_lane(factor);
}

// -------------------------------------------------------------------------------------------------------------- tasks

// Query rows [first_row, last_row) of one key-value head of one sequence; row = query * (H / G) + head within the group.
struct Task {
  int64_t sequence, first_token, head, first_row, last_row, cost;
};

// Memory of one thread, kept between calls.
struct Scratch {
  float* memory = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(memory); }
  float* reserve(size_t floats) {
    if (floats > size) {
      std::free(memory);
      memory = static_cast<float*>(std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64));
      if (!memory) std::abort();
      size = floats;
    }
    return memory;
  }
};

struct Range {
  int64_t from, to;
};

// The positions that a query at `position` sees.
Range visible(const Call& call, int64_t position) {
  return {call.window > 0 ? std::max<int64_t>(0, position - call.window + 1) : 0, position + 1};
}

void locate(const Call& call, const Task& task, int64_t base, Range seen, const char* zeros, Block& block) {
  block.from = std::max<int64_t>(0, seen.from - base);
  block.to = std::min(kBlock, seen.to - base);
  const int32_t* pages = call.pages + task.sequence * call.pages_stride;
  const int64_t key_size = size_of(call.keys.kind), value_size = size_of(call.values.kind);
  const char* keys = call.keys.rows + task.head * call.keys.head_stride * key_size;
  const char* values = call.values.rows + task.head * call.values.head_stride * value_size;
  int64_t page = (base + block.from) / call.page_size, within = (base + block.from) % call.page_size;
  for (int64_t k = 0; k < kBlock; ++k) {
    if (k < block.from || k >= block.to) {
      block.keys[k] = zeros;
      continue;
    }
    const int64_t slot = pages[page] * call.page_size + within;
    block.slots[k] = slot;
    block.keys[k] = keys + slot * call.keys.row_stride * key_size;
    block.values[k] = values + slot * call.values.row_stride * value_size;
    if (++within == call.page_size) ++page, within = 0;
  }
}

void fetch(const Call& call, const Block& block) {
  const int64_t key_bytes = call.keys.dim * size_of(call.keys.kind);
  const int64_t value_bytes = call.values.dim * size_of(call.values.kind);
  for (int64_t k = block.from; k < block.to; ++k) {
    for (int64_t i = 0; i < key_bytes; i += 64) _mm_prefetch(block.keys[k] + i, _MM_HINT_T1);
    for (int64_t i = 0; i < value_bytes; i += 64) _mm_prefetch(block.values[k] + i, _MM_HINT_T1);
  }
}

// The rows [first, first + rows) of a task and one block. Every row adds its keys in their order; those that all rows
// of the group see are added together, those before and after them by each row alone.
void attend(const Call& call, int64_t rows, const float* q, const float* keys, const float* values, float* out,
            Softmax* softmax, const Range* seen, int64_t base, int64_t stored) {
  const int64_t width = padded(call.values.dim), dim = call.keys.dim;
  alignas(64) float weights[kGroup * kBlock];
  Range range[kGroup], all{0, kBlock};
  for (int64_t r = 0; r < rows; ++r) {
    range[r] = {std::max<int64_t>(0, seen[r].from - base), std::min(kBlock, seen[r].to - base)};
    all = {std::max(all.from, range[r].from), std::min(all.to, range[r].to)};
  }
  if (range[0].from >= range[0].to && range[rows - 1].from >= range[rows - 1].to) return;
  chain<true>(rows, q, dim, keys, kBlock, weights, kBlock, padded(stored), 0, dim);
  for (int64_t r = 0; r < rows; ++r) {
    if (range[r].from >= range[r].to) continue;
    const float factor = weigh(weights + r * kBlock, range[r].from, range[r].to, call.scale, softmax[r]);
    if (factor != 1.0f) {
      float* row = out + r * width;
      for (int64_t i = 0; i < width; i += kLanes) store(row + i, mul(load(row + i), set1(factor)));
    }
  }
  const auto add_values = [&](int64_t row, int64_t num_rows, int64_t from, int64_t to) {
    if (from >= to) return;
    chain<false>(num_rows, weights + row * kBlock, kBlock, values, width, out + row * width, width, width, from, to);
  };
  if (all.from >= all.to) {
    for (int64_t r = 0; r < rows; ++r) add_values(r, 1, range[r].from, range[r].to);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) add_values(r, 1, range[r].from, all.from);
  add_values(0, rows, all.from, all.to);
  for (int64_t r = 0; r < rows; ++r) add_values(r, 1, all.to, range[r].to);
}

void run(const Call& call, const Task& task) {
  static thread_local Scratch scratch;
  static thread_local std::vector<Softmax> softmax;
  static thread_local std::vector<Range> seen;
  const int64_t rows = task.last_row - task.first_row, shared_by = call.heads / call.kv_heads;
  const int64_t dim = call.keys.dim, value_dim = call.values.dim, width = padded(value_dim);
  const int64_t zero_floats = padded(dim) + 2 * kLanes, q_floats = padded(rows * dim);
  float* memory = scratch.reserve(zero_floats + (padded(dim) + width) * kBlock + q_floats + rows * width);
  float* zeros = memory;
  float* keys = zeros + zero_floats;
  float* values = keys + padded(dim) * kBlock;
  float* q = values + width * kBlock;
  float* out = q + q_floats;
  std::fill(zeros, keys, 0.0f);
  std::fill(out, out + rows * width, 0.0f);
  softmax.resize(rows);
  seen.resize(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t query = (task.first_row + r) / shared_by;
    const int64_t head = task.head * shared_by + (task.first_row + r) % shared_by;
    const int64_t offset = (task.first_token + query) * call.q_row_stride + head * call.q_head_stride;
    for (int64_t i = 0; i < dim; i += kLanes) {
      const int n = int(std::min<int64_t>(kLanes, dim - i));
      const F16 x = call.is_bf16 ? load_bf16(reinterpret_cast<const Bf16*>(call.q) + offset + i, n)
                                 : load(reinterpret_cast<const float*>(call.q) + offset + i, n);
      store(q + r * dim + i, x, n);
    }
    seen[r] = visible(call, call.starts[task.sequence] + query);
    // The sink is the first logit: its weight is 1 until a larger one comes, and it adds no value.
    softmax[r].largest = call.sinks ? call.sinks[head] : kHidden;
    softmax[r].sums = keep_first(set1(call.sinks ? 1.0f : 0.0f), 1, 0.0f);
  }

  const Range all{seen[0].from, seen[rows - 1].to};
  const int64_t groups = (rows + kGroup - 1) / kGroup;
  Block blocks[2];
  int64_t base = all.from / kBlock * kBlock;
  locate(call, task, base, all, reinterpret_cast<const char*>(zeros), blocks[0]);
  for (int parity = 0; base < all.to; base += kBlock, parity ^= 1) {
    const Block& block = blocks[parity];
    if (base + kBlock < all.to) {
      locate(call, task, base + kBlock, all, reinterpret_cast<const char*>(zeros), blocks[parity ^ 1]);
      fetch(call, blocks[parity ^ 1]);
    }
    decode(call, block, task.head, keys, values);
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t first = rows * i / groups, last = rows * (i + 1) / groups;
      attend(call, last - first, q + first * dim, keys, values, out + first * width, &softmax[first], &seen[first],
             base, block.to);
    }
  }

  for (int64_t r = 0; r < rows; ++r) {
    const int64_t query = (task.first_row + r) / shared_by;
    const int64_t head = task.head * shared_by + (task.first_row + r) % shared_by;
    const int64_t offset = ((task.first_token + query) * call.heads + head) * value_dim;
    const F16 total = set1(sum(softmax[r].sums));
    for (int64_t i = 0; i < value_dim; i += kLanes) {
      const int n = int(std::min<int64_t>(kLanes, value_dim - i));
      const F16 y = div(load(out + r * width + i), total);
      if (call.is_bf16) {
        store_bf16(reinterpret_cast<Bf16*>(call.out) + offset + i, y, n);
      } else {
        store(reinterpret_cast<float*>(call.out) + offset + i, y, n);
      }
    }
  }
}

// Whether every page that a query of the sequence sees lies within the slots.
bool pages_exist(const Call& call, int64_t sequence) {
  const int64_t start = call.starts[sequence], length = start + call.counts[sequence];
  const int64_t slots = std::min(call.keys.slots, call.values.slots);
  const int32_t* pages = call.pages + sequence * call.pages_stride;
  if ((length + call.page_size - 1) / call.page_size > call.pages_stride) return false;
  for (int64_t p = visible(call, start).from / call.page_size; p * call.page_size < length; ++p) {
    const int64_t used = std::min(call.page_size, length - p * call.page_size);
    if (pages[p] < 0 || pages[p] * call.page_size + used > slots) return false;
  }
  return true;
}

}  // namespace

// 0, or 1 + the first sequence whose table is wrong, or -1 when the counts do not add up to the tokens.
extern "C" int64_t paged_attention(const Call* call, int64_t threads) {
  const int64_t shared_by = call->heads / call->kv_heads;
  int64_t tokens = 0, most_rows = 0;
  for (int64_t n = 0; n < call->sequences; ++n) {
    if (call->starts[n] < 0 || call->counts[n] < 0 || (call->counts[n] && !pages_exist(*call, n))) return n + 1;
    tokens += call->counts[n];
    most_rows += call->counts[n] * shared_by * call->kv_heads;
  }
  if (tokens != call->tokens) return -1;

  // A task decodes its keys for itself, so tasks are as large as keeps every thread busy, and no smaller than a group.
  int64_t task_rows = kTaskRows;
  while (task_rows > 2 * kGroup && most_rows / task_rows < threads) task_rows /= 2;
  std::vector<Task> tasks;
  for (int64_t n = 0, first_token = 0; n < call->sequences; first_token += call->counts[n++]) {
    const int64_t rows = call->counts[n] * shared_by;
    const int64_t chunks = (rows + task_rows - 1) / task_rows;
    for (int64_t head = 0; head < call->kv_heads; ++head) {
      for (int64_t i = 0; i < chunks; ++i) {
        const int64_t first = rows * i / chunks, last = rows * (i + 1) / chunks;
        const Range from = visible(*call, call->starts[n] + first / shared_by);
        const Range to = visible(*call, call->starts[n] + (last - 1) / shared_by);
        tasks.push_back({n, first_token, head, first, last, (to.to - from.from) * (last - first + kLanes)});
      }
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (size_t i = 0; i < tasks.size(); ++i) run(*call, tasks[i]);
  return 0;
}
