// Routing, a token by one thread: `reference.py`. Every choice is one expert more, in range and not chosen before,
// whatever the logits are, NaN included.
#include <algorithm>
#include <limits>

#include "simd.h"

using namespace simd;

namespace {

constexpr int kMaxExperts = 1024, kMaxChoices = 64, kChunk = 16;
constexpr int64_t kTaken = std::numeric_limits<int64_t>::min();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// In the order of the floats, and of equal ones the smaller index first; no two keys are equal.
inline int64_t key(float value, int index) {
  int32_t bits;
  value += 0.0f;  // no negative zero
  std::memcpy(&bits, &value, 4);
  const int64_t ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF);
  return int64_t(uint64_t(ordered) << 32) | uint32_t(~index);
}

// The largest of up to 1024 keys, one after the other.
class Ranking {
 public:
  explicit Ranking(int size) : chunks_((size + kChunk - 1) / kChunk) {
    std::fill(keys_ + size, keys_ + chunks_ * kChunk, kTaken);
  }
  void set(int index, float value) { keys_[index] = key(value, index); }
  void start() {
    for (int chunk = 0; chunk < chunks_; ++chunk) find_top(chunk);
  }
  int next() {  // after `start`, at most `size` times
    int64_t best = tops_[0];
    for (int chunk = 1; chunk < chunks_; ++chunk) best = std::max(best, tops_[chunk]);
    const int index = int(~uint32_t(best));
    keys_[index] = kTaken;
    find_top(index / kChunk);
    return index;
  }

 private:
  void find_top(int chunk) {
    int64_t top = kTaken;
    for (int i = 0; i < kChunk; ++i) top = std::max(top, keys_[chunk * kChunk + i]);
    tops_[chunk] = top;
  }
  int64_t keys_[kMaxExperts], tops_[kMaxExperts / kChunk];
  int chunks_;
};

struct Router {
  const float* selection_bias;  // may be null
  int experts, choices, groups, open_groups;
  bool sigmoid, normalize;
  float scaling;
};

struct Softmax {
  F16 largest;
  float sum;
};

Softmax sum_exponentials(const float* logits, int size) {
  F16 top = set1(-kInfinity), sum = zero();
  for (int i = 0; i < size; i += kLanes) top = max(top, keep_first(load(logits + i, size - i), size - i, -kInfinity));
  const F16 largest = set1(simd::largest(top));
  for (int i = 0; i < size; i += kLanes) {
    sum = add(sum, keep_first(exp(sub(load(logits + i, size - i), largest)), size - i, 0.0f));
  }
  return {largest, simd::sum(sum)};
}

void score(const float* logits, const Router& router, float* scores) {
  const int size = router.experts;
  const Softmax softmax = router.sigmoid ? Softmax{} : sum_exponentials(logits, size);
  for (int i = 0; i < size; i += kLanes) {
    const F16 x = load(logits + i, size - i);
    F16 y = router.sigmoid ? sigmoid(x) : div(exp(sub(x, softmax.largest)), set1(softmax.sum));
    if (router.selection_bias) y = add(y, load(router.selection_bias + i, size - i));
    store(scores + i, y, size - i);
  }
}

void close_groups(const Router& router, float* scores) {
  const int size = router.experts / router.groups;
  Ranking ranking(router.groups);
  for (int group = 0; group < router.groups; ++group) {
    float first = -kInfinity, second = -kInfinity;
    for (int i = 0; i < size; ++i) {
      const float value = scores[group * size + i];
      second = std::max(second, std::min(first, value));
      first = std::max(first, value);
    }
    ranking.set(group, first + second);
  }
  ranking.start();
  bool open[kMaxExperts] = {};
  for (int i = 0; i < router.open_groups; ++i) open[ranking.next()] = true;
  for (int group = 0; group < router.groups; ++group) {
    if (!open[group]) std::fill(scores + group * size, scores + (group + 1) * size, -kInfinity);
  }
}

void choose(const float* logits, const Router& router, int64_t* chosen) {
  float scores[kMaxExperts];
  const float* values = logits;
  if (router.selection_bias || router.groups > 1) {
    score(logits, router, scores);
    if (router.groups > 1) close_groups(router, scores);
    values = scores;
  }
  Ranking ranking(router.experts);
  for (int i = 0; i < router.experts; ++i) ranking.set(i, values[i]);
  ranking.start();
  for (int i = 0; i < router.choices; ++i) chosen[i] = ranking.next();
}

void weigh(const float* logits, const Router& router, const int64_t* chosen, float* weights) {
  alignas(64) float values[kMaxChoices];
  const int size = router.choices;
  float largest = -kInfinity;
  for (int i = 0; i < size; ++i) {
    values[i] = logits[chosen[i]];
    largest = std::max(largest, values[i]);
  }
  const bool over_all = !router.sigmoid && !router.normalize;
  const Softmax softmax = over_all ? sum_exponentials(logits, router.experts) : Softmax{set1(largest), 0.0f};
  for (int i = 0; i < size; i += kLanes) {
    const F16 x = load(values + i, size - i);
    store(values + i, router.sigmoid ? sigmoid(x) : exp(sub(x, softmax.largest)), size - i);
  }
  float sum = softmax.sum;
  if (router.normalize) {
    for (int i = 0; i < size; ++i) sum += values[i];  // in the order of ranks
    if (router.sigmoid) sum += 1e-20f;
  }
  for (int i = 0; i < size; ++i) {
    weights[i] = (router.normalize || over_all ? values[i] / sum : values[i]) * router.scaling;
  }
}

}  // namespace

// `replay`: the choice is read, not made. `selection_bias` may be null.
extern "C" void route(const float* logits, const float* selection_bias, int64_t* chosen, float* weights, int64_t tokens,
                      int64_t experts, int64_t choices, int64_t groups, int64_t open_groups, bool sigmoid,
                      bool normalize, bool replay, float scaling) {
  const Router router{selection_bias, int(experts), int(choices), int(groups), int(open_groups), sigmoid, normalize,
                      scaling};
#pragma omp parallel for schedule(static) if (tokens * experts > 16384)
  for (int64_t token = 0; token < tokens; ++token) {
    if (!replay) choose(logits + token * experts, router, chosen + token * choices);
    weigh(logits + token * experts, router, chosen + token * choices, weights + token * choices);
  }
}
