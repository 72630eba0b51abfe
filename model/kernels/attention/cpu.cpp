// Attention over paged keys and values: one pass over the keys in blocks of 64, the softmax renormalised as it goes
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

// Where the keys and values of one block's positions [from, to) lie: slots, and bytes from the first one's of a head.
struct Block {
  int64_t slots[kBlock], keys[kBlock], values[kBlock];
  int64_t from, to;
};

const char* head_of(const Pages& pages, int64_t head) {
  return pages.rows + head * pages.head_stride * size_of(pages.kind);
}

float scale_of(const Pages& pages, int64_t slot, int64_t head) {
  return pages.scales[slot * pages.scale_row_stride + head * pages.scale_head_stride];
}

// Sixteen keys become sixteen lanes: out[i][0..15] for n values i of each, rows 64 floats apart. (Inlined, so that n is
// mostly a constant.)
template <class T>
[[gnu::always_inline]] inline void transpose_keys(const char* const* rows, int64_t i, int n, float* out,
                                                  const float* scales) {
  F16 tile[kLanes];
#pragma GCC unroll 16
  for (int k = 0; k < kLanes; ++k) tile[k] = widen(reinterpret_cast<const T*>(rows[k]) + i, n);
  transpose(tile);
  const F16 by = scales ? load(scales) : zero();
#pragma GCC unroll 16
  for (int k = 0; k < kLanes; ++k) {
    if (k < n) store(out + (i + k) * kBlock, scales ? mul(tile[k], by) : tile[k]);
  }
}

// bf16 in pairs of neighbours: half the shuffles.
template <>
[[gnu::always_inline]] inline void transpose_keys<Bf16>(const char* const* rows, int64_t i, int n, float* out,
                                                        const float*) {
  F16 tile[kLanes];
#pragma GCC unroll 16
  for (int k = 0; k < kLanes; ++k) {
    const Bf16* p = reinterpret_cast<const Bf16*>(rows[k]) + i;
    Bf16 all[2 * kLanes];
    if (n < 2 * kLanes) p = static_cast<const Bf16*>(std::memcpy(all, p, n * sizeof(Bf16)));
    tile[k] = load(reinterpret_cast<const float*>(p));
  }
  transpose(tile);
#pragma GCC unroll 16
  for (int k = 0; k < kLanes; ++k) {
    if (2 * k < n) store(out + (i + 2 * k) * kBlock, even_bf16(tile[k]));
    if (2 * k + 1 < n) store(out + (i + 2 * k + 1) * kBlock, odd_bf16(tile[k]));
  }
}

template <class T>
void decode_keys(const Pages& pages, const Block& block, int64_t head, const char* zeros, float* out) {
  const char* first = head_of(pages, head);
  for (int64_t k = block.from / kLanes * kLanes; k < block.to; k += kLanes) {
    const char* rows[kLanes];
    float scales[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      const bool inside = k + i >= block.from && k + i < block.to;
      rows[i] = inside ? first + block.keys[k + i] : zeros;
      scales[i] = inside && pages.scales ? scale_of(pages, block.slots[k + i], head) : 0.0f;
    }
    const float* by = pages.scales ? scales : nullptr;
    constexpr int kStep = sizeof(T) == sizeof(Bf16) ? 2 * kLanes : kLanes;
    int64_t i = 0;
    for (; i + kStep <= pages.dim; i += kStep) transpose_keys<T>(rows, i, kStep, out + k, by);
    if (i < pages.dim) transpose_keys<T>(rows, i, int(pages.dim - i), out + k, by);
  }
}

template <class T>
void decode_values(const Pages& pages, const Block& block, int64_t head, float* out) {
  const int64_t dim = pages.dim, width = padded(dim);
  const char* first = head_of(pages, head);
  for (int64_t k = block.from; k < block.to; ++k, out += width) {
    const T* row = reinterpret_cast<const T*>(first + block.values[k]);
    const F16 scale = set1(pages.scales ? scale_of(pages, block.slots[k], head) : 1.0f);
    for (int64_t i = 0; i < dim; i += kLanes) {
      const F16 x = widen(row + i, int(std::min<int64_t>(kLanes, dim - i)));
      store(out + i, sizeof(T) == 1 ? mul(x, scale) : x);
    }
  }
}

void decode(const Call& call, const Block& block, int64_t head, const char* zeros, float* keys, float* values) {
  switch (call.keys.kind) {
    case kFp32: decode_keys<float>(call.keys, block, head, zeros, keys); break;
    case kBf16: decode_keys<Bf16>(call.keys, block, head, zeros, keys); break;
    case kInt8: decode_keys<int8_t>(call.keys, block, head, zeros, keys); break;
    default: decode_keys<Fp8>(call.keys, block, head, zeros, keys);
  }
  switch (call.values.kind) {
    case kFp32: decode_values<float>(call.values, block, head, values + block.from * padded(call.values.dim)); break;
    case kBf16: decode_values<Bf16>(call.values, block, head, values + block.from * padded(call.values.dim)); break;
    case kInt8: decode_values<int8_t>(call.values, block, head, values + block.from * padded(call.values.dim)); break;
    default: decode_values<Fp8>(call.values, block, head, values + block.from * padded(call.values.dim));
  }
}

// --------------------------------------------------------------------------------------------------------------- sums

// What the next decoding will read, asked for while sums are made: `step` bytes of 64 rows in each 64 rounds of a sum.
struct Ahead {
  const char* first;
  const int64_t* rows;
  int64_t step;
};

// out[r][c] += sum over t of a[r][t] b[t][c]: one chain of fma for each element, in the order of t, whatever R and C.
template <int R, int C>
inline void chain_tile(const float* a, int64_t lda, const float* b, int64_t ldb, float* out, int64_t ldo, int64_t from,
                       int64_t to, const Ahead* ahead, int64_t skip) {
  F16 sums[R][C];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums[r][c] = load(out + r * ldo + c * kLanes);
  }
  for (int64_t t = from; t < to; ++t) {
    if (ahead) {
      const char* row = ahead->first + ahead->rows[t % kBlock] + (skip + t / kBlock) * ahead->step;
      for (int64_t i = 0; i < ahead->step; i += 64) _mm_prefetch(row + i, _MM_HINT_T1);
    }
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

template <int R>
void chain_rows(const float* a, int64_t lda, const float* b, int64_t ldb, float* out, int64_t ldo, int64_t width,
                int64_t from, int64_t to, const Ahead* ahead) {
#if defined(__AVX512F__)
  constexpr int kWide = 4;  // of 32 registers 24 hold sums
#else
  constexpr int kWide = R == 1 ? 4 : R == 2 ? 2 : 1;  // of 16 registers up to 12 hold sums
#endif
  int64_t c = 0;
  for (; c + kWide * kLanes <= width; c += kWide * kLanes) {
    chain_tile<R, kWide>(a, lda, b + c, ldb, out + c, ldo, from, to, c % kBlock ? nullptr : ahead, c / kBlock);
  }
  for (; c < width; c += kLanes) {
    chain_tile<R, 1>(a, lda, b + c, ldb, out + c, ldo, from, to, c % kBlock ? nullptr : ahead, c / kBlock);
  }
}

void chain(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, float* out, int64_t ldo,
           int64_t width, int64_t from, int64_t to, const Ahead* ahead) {
  switch (rows) {
    case 1: return chain_rows<1>(a, lda, b, ldb, out, ldo, width, from, to, ahead);
    case 2: return chain_rows<2>(a, lda, b, ldb, out, ldo, width, from, to, ahead);
    case 3: return chain_rows<3>(a, lda, b, ldb, out, ldo, width, from, to, ahead);
    case 4: return chain_rows<4>(a, lda, b, ldb, out, ldo, width, from, to, ahead);
    case 5: return chain_rows<5>(a, lda, b, ldb, out, ldo, width, from, to, ahead);
    default: return chain_rows<6>(a, lda, b, ldb, out, ldo, width, from, to, ahead);
  }
}

// ------------------------------------------------------------------------------------------------------------ softmax

// A row's softmax so far: the largest logit, and sixteen partial sums of exp(logit - largest).
struct Softmax {
  F16 sums;
  float largest;
};

// Scales the scores of a block, hides those outside [from, to), and returns the largest.
float scale_scores(float* scores, int64_t from, int64_t to, float scale) {
  F16 s[4];
  for (int i = 0; i < 4; ++i) {
    s[i] = mul(load(scores + i * kLanes), set1(scale));
    store(scores + i * kLanes, s[i]);
  }
  if (from > 0 || to < kBlock) {
    std::fill(scores, scores + from, kHidden);
    std::fill(scores + to, scores + kBlock, kHidden);
    for (int i = 0; i < 4; ++i) s[i] = load(scores + i * kLanes);
  }
  return largest(max(max(s[0], s[1]), max(s[2], s[3])));
}

// Scaled scores to weights, in place.
void weigh(float* scores, float pivot, float factor, F16& sums) {
  F16 s[4];
  for (int i = 0; i < 4; ++i) {
    s[i] = exp(sub(load(scores + i * kLanes), set1(pivot)));
    store(scores + i * kLanes, s[i]);
  }
  sums = fma(sums, set1(factor), add(add(s[0], s[1]), add(s[2], s[3])));
}

// -------------------------------------------------------------------------------------------------------------- tasks

// Query rows [first_row, last_row) of each of the key-value heads [first_head, last_head) of one sequence;
// row = query * (H / G) + head within the group.
struct Task {
  int64_t sequence, first_token, first_head, last_head, first_row, last_row, cost;
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

Block locate(const Call& call, const Task& task, int64_t base, Range seen) {
  Block block;
  block.from = std::max<int64_t>(0, seen.from - base);
  block.to = std::min(kBlock, seen.to - base);
  const int32_t* pages = call.pages + task.sequence * call.pages_stride;
  int64_t page = (base + block.from) / call.page_size, within = (base + block.from) % call.page_size;
  for (int64_t k = block.from; k < block.to; ++k) {
    block.slots[k] = pages[page] * call.page_size + within;
    block.keys[k] = block.slots[k] * call.keys.row_stride * size_of(call.keys.kind);
    block.values[k] = block.slots[k] * call.values.row_stride * size_of(call.values.kind);
    if (++within == call.page_size) ++page, within = 0;
  }
  // Asking for a row more often is free; `Ahead` wants all 64.
  std::fill(block.keys, block.keys + block.from, block.keys[block.from]);
  std::fill(block.keys + block.to, block.keys + kBlock, block.keys[block.from]);
  std::fill(block.values, block.values + block.from, block.values[block.from]);
  std::fill(block.values + block.to, block.values + kBlock, block.values[block.from]);
  return block;
}

Ahead ahead_of(const Pages& pages, const int64_t* rows, int64_t head) {
  return {head_of(pages, head), rows, std::min(kBlock, pages.dim) * size_of(pages.kind)};
}

// Some rows of a task and one block. Every row adds its keys in their order; those that all rows of the group see are
// added together, those before and after them by each row alone.
void attend(const Call& call, int64_t rows, const float* q, const float* keys, const float* values, float* out,
            Softmax* softmax, const Range* seen, int64_t base, int64_t stored, const Ahead* ahead) {
  const int64_t width = padded(call.values.dim), dim = call.keys.dim;
  Range range[kGroup], all{0, kBlock};
  for (int64_t r = 0; r < rows; ++r) {
    range[r] = {std::max<int64_t>(0, seen[r].from - base), std::min(kBlock, seen[r].to - base)};
    range[r].to = std::max(range[r].from, range[r].to);  // empty, perhaps
    all = {std::max(all.from, range[r].from), std::min(all.to, range[r].to)};
  }
  alignas(64) float weights[kGroup * kBlock] = {}, pivots[kLanes] = {}, factors[kLanes] = {};
  chain(rows, q, dim, keys, kBlock, weights, kBlock, padded(stored), 0, dim, ahead);
  for (int64_t r = 0; r < rows; ++r) {
    if (range[r].from == range[r].to) continue;
    const float before = softmax[r].largest;
    const float here = scale_scores(weights + r * kBlock, range[r].from, range[r].to, call.scale);
    softmax[r].largest = std::max(before, here);
    pivots[r] = softmax[r].largest == kHidden ? 0.0f : softmax[r].largest;  // -inf alone: weights 0, not NaN
    factors[r] = before - pivots[r];
  }
  store(factors, exp(load(factors)));
  for (int64_t r = 0; r < rows; ++r) {
    if (range[r].from == range[r].to) continue;
    weigh(weights + r * kBlock, pivots[r], factors[r], softmax[r].sums);
    float* row = out + r * width;
    for (int64_t i = 0; i < width; i += kLanes) store(row + i, mul(load(row + i), set1(factors[r])));
  }
  const auto add_values = [&](int64_t row, int64_t num_rows, int64_t from, int64_t to, const Ahead* fetched) {
    if (from >= to) return;
    chain(num_rows, weights + row * kBlock, kBlock, values, width, out + row * width, width, width, from, to, fetched);
  };
  if (all.from >= all.to) {
    for (int64_t r = 0; r < rows; ++r) add_values(r, 1, range[r].from, range[r].to, nullptr);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) add_values(r, 1, range[r].from, all.from, nullptr);
  add_values(0, rows, all.from, all.to, ahead ? ahead + 1 : nullptr);
  for (int64_t r = 0; r < rows; ++r) add_values(r, 1, all.to, range[r].to, nullptr);
}

void run(const Call& call, const Task& task) {
  static thread_local Scratch scratch;
  static thread_local std::vector<Softmax> softmax;
  static thread_local std::vector<Range> seen;
  const int64_t shared_by = call.heads / call.kv_heads, heads = task.last_head - task.first_head;
  const int64_t rows = task.last_row - task.first_row, all_rows = heads * rows;
  const int64_t dim = call.keys.dim, value_dim = call.values.dim, width = padded(value_dim);
  const int64_t zero_floats = padded(dim) + 2 * kLanes, q_floats = padded(all_rows * dim);
  float* zeros = scratch.reserve(zero_floats + (padded(dim) + width) * kBlock + q_floats + all_rows * width);
  float* keys = zeros + zero_floats;
  float* values = keys + padded(dim) * kBlock;
  float* q = values + width * kBlock;
  float* out = q + q_floats;
  std::fill(zeros, keys, 0.0f);
  std::fill(out, out + all_rows * width, 0.0f);
  softmax.resize(all_rows);
  seen.resize(rows);
  // Row r of head g of the task: its query, and its head among all.
  const auto query_of = [&](int64_t r) { return (task.first_row + r) / shared_by; };
  const auto query_head = [&](int64_t g, int64_t r) {
    return (task.first_head + g) * shared_by + (task.first_row + r) % shared_by;
  };
  for (int64_t r = 0; r < rows; ++r) seen[r] = visible(call, call.starts[task.sequence] + query_of(r));
  for (int64_t g = 0; g < heads; ++g) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = g * rows + r, head = query_head(g, r);
      const int64_t offset = (task.first_token + query_of(r)) * call.q_row_stride + head * call.q_head_stride;
      for (int64_t i = 0; i < dim; i += kLanes) {
        const int n = int(std::min<int64_t>(kLanes, dim - i));
        const F16 x = call.is_bf16 ? load_bf16(reinterpret_cast<const Bf16*>(call.q) + offset + i, n)
                                   : load(reinterpret_cast<const float*>(call.q) + offset + i, n);
        store(q + row * dim + i, x, n);
      }
      // The sink is the first logit: its weight is 1 until a larger one comes, and it adds no value.
      softmax[row].largest = call.sinks ? call.sinks[head] : kHidden;
      softmax[row].sums = keep_first(set1(call.sinks ? 1.0f : 0.0f), 1, 0.0f);
    }
  }

  const Range all{seen[0].from, seen[rows - 1].to};
  const int64_t groups = (rows + kGroup - 1) / kGroup;
  int64_t base = all.from / kBlock * kBlock;
  Block block = locate(call, task, base, all), next{};
  for (; base < all.to; base += kBlock, block = next) {
    if (base + kBlock < all.to) next = locate(call, task, base + kBlock, all);
    for (int64_t g = 0; g < heads; ++g) {
      Ahead ahead[2];  // keys, values
      const bool more_heads = g + 1 < heads, more = more_heads || base + kBlock < all.to;
      if (more) {
        const int64_t head = more_heads ? task.first_head + g + 1 : task.first_head;
        const Block& then = more_heads ? block : next;
        ahead[0] = ahead_of(call.keys, then.keys, head);
        ahead[1] = ahead_of(call.values, then.values, head);
      }
      decode(call, block, task.first_head + g, reinterpret_cast<const char*>(zeros), keys, values);
      for (int64_t i = 0; i < groups; ++i) {
        const int64_t first = rows * i / groups, last = rows * (i + 1) / groups, row = g * rows + first;
        attend(call, last - first, q + row * dim, keys, values, out + row * width, &softmax[row], &seen[first], base,
               block.to, more && i == 0 ? ahead : nullptr);
      }
    }
  }

  for (int64_t g = 0; g < heads; ++g) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = g * rows + r;
      const int64_t offset = ((task.first_token + query_of(r)) * call.heads + query_head(g, r)) * value_dim;
      const F16 total = set1(sum(softmax[row].sums));
      for (int64_t i = 0; i < value_dim; i += kLanes) {
        const int n = int(std::min<int64_t>(kLanes, value_dim - i));
        const F16 y = div(load(out + row * width + i), total);
        if (call.is_bf16) {
          store_bf16(reinterpret_cast<Bf16*>(call.out) + offset + i, y, n);
        } else {
          store(reinterpret_cast<float*>(call.out) + offset + i, y, n);
        }
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
  int64_t tokens = 0;
  for (int64_t n = 0; n < call->sequences; ++n) {
    if (call->starts[n] < 0 || call->counts[n] < 0 || (call->counts[n] && !pages_exist(*call, n))) return n + 1;
    tokens += call->counts[n];
  }
  if (tokens != call->tokens) return -1;

  // A task decodes its keys for itself: as many rows as a block's decoding is worth, fewer to keep every thread busy.
  int64_t task_rows = kTaskRows;
  while (task_rows > 2 * kGroup && tokens * call->heads / task_rows < 4 * threads) task_rows /= 2;
  std::vector<Task> tasks;
  for (int64_t n = 0, first_token = 0; n < call->sequences; first_token += call->counts[n++]) {
    if (!call->counts[n]) continue;
    const int64_t rows = call->counts[n] * shared_by, chunks = (rows + task_rows - 1) / task_rows;
    const int64_t heads = std::min(call->kv_heads, std::max<int64_t>(1, task_rows / rows));
    for (int64_t head = 0; head < call->kv_heads; head += heads) {
      const int64_t last_head = std::min(call->kv_heads, head + heads);
      for (int64_t i = 0; i < chunks; ++i) {
        const int64_t first = rows * i / chunks, last = rows * (i + 1) / chunks;
        const Range from = visible(*call, call->starts[n] + first / shared_by);
        const Range to = visible(*call, call->starts[n] + (last - 1) / shared_by);
        const int64_t cost = (to.to - from.from) * (last_head - head) * (last - first + kLanes);
        tasks.push_back({n, first_token, head, last_head, first, last, cost});
      }
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (size_t i = 0; i < tasks.size(); ++i) run(*call, tasks[i]);
  return 0;
}
