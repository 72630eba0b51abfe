// Sampling from logits, a row by one thread; `reference.py` is the definition. Nothing is sorted: a row that is cut is
// narrowed to candidates by a bound on the weights, and quickselect finds the last of them that stays.
#include <algorithm>
#include <functional>
#include <vector>

#include "softmax.h"

using softmax::F16;
using softmax::kLanes;
using softmax::Scaled;

namespace {

constexpr int64_t kChunk = 1024;  // tokens whose weights are summed together when the whole row is sampled from
constexpr int64_t kGroup = 64;    // tokens whose largest weight is kept when a row is cut

struct Token {
  float weight;
  int32_t id;
};

bool likelier(const Token& a, const Token& b) { return a.weight != b.weight ? a.weight > b.weight : a.id < b.id; }
bool smaller_id(const Token& a, const Token& b) { return a.id < b.id; }

int64_t mass(const Token* begin, const Token* end) {
  int64_t sum = 0;
  for (; begin != end; ++begin) sum += softmax::count(begin->weight);
  return sum;
}

// The length of the shortest prefix in order of `before` whose mass is at least `enough` (the mass of all is). Moves
// the prefix to the front, its last token to its end.
template <class Before>
int64_t shortest_prefix(std::vector<Token>& tokens, int64_t enough, Before before) {
  Token* all = tokens.data();
  int64_t begin = 0, end = int64_t(tokens.size());
  while (end - begin > 1) {
    const int64_t middle = (begin + end) / 2;
    std::nth_element(all + begin, all + middle, all + end, before);
    const int64_t first_half = mass(all + begin, all + middle);
    if (first_half >= enough) {
      end = middle;
    } else {
      enough -= first_half;
      begin = middle;
    }
  }
  return begin + 1;
}

int64_t target(double uniform, int64_t sum) {
  return std::clamp<int64_t>(int64_t(uniform * double(sum)), 0, sum - 1);
}

struct Choice {
  int64_t id;
  int64_t sum;  // of the weights sampled from
};

// Memory of a thread, kept from row to row.
struct Scratch {
  std::vector<int64_t> chunks;
  std::vector<float> weights, groups, ranked;
  std::vector<Token> tokens;
};

Choice choose_from_all(const Scaled& scaled, double uniform, Scratch& scratch) {
  const int64_t size = scaled.row.size;
  int64_t sum = 0;
  scratch.chunks.clear();
  for (int64_t begin = 0; begin < size; begin += kChunk) {
    softmax::Sum chunk;
    scaled.each(begin, std::min(begin + kChunk, size),
                [&](int64_t, int, F16 distances) { chunk.add(softmax::weight(distances)); });
    scratch.chunks.push_back(chunk.total());
    sum += scratch.chunks.back();
  }
  int64_t left = target(uniform, sum), begin = 0;
  for (const int64_t* chunk = scratch.chunks.data(); left >= *chunk; ++chunk, begin += kChunk) left -= *chunk;
  alignas(64) float weights[kChunk];
  scaled.each(begin, std::min(begin + kChunk, size),
              [&](int64_t at, int, F16 distances) { simd::store(weights + at - begin, softmax::weight(distances)); });
  int64_t id = begin;
  for (; left >= softmax::count(weights[id - begin]); ++id) left -= softmax::count(weights[id - begin]);
  return {id, sum};
}

// Fills `weights` (padded to whole groups), and `groups` with the largest of each group; the sum of all.
int64_t weigh(const Scaled& scaled, Scratch& scratch) {
  const int64_t size = scaled.row.size, num_groups = (size + kGroup - 1) / kGroup;
  scratch.weights.resize(num_groups * kGroup);
  scratch.groups.resize(num_groups);
  softmax::Sum sum;
  for (int64_t group = 0; group < num_groups; ++group) {
    F16 top = simd::zero();
    scaled.each(group * kGroup, std::min((group + 1) * kGroup, size), [&](int64_t at, int n, F16 distances) {
      const F16 weights = simd::keep_first(softmax::weight(distances), n, 0.0f);
      sum.add(weights);
      top = simd::max(top, weights);
      simd::store(scratch.weights.data() + at, weights);
    });
    scratch.groups[group] = simd::largest(top);
  }
  return sum.total();
}

// The tokens whose weight is at least `least`.
void collect(int64_t size, float least, Scratch& scratch) {
  scratch.tokens.clear();
  for (int64_t group = 0; group < int64_t(scratch.groups.size()); ++group) {
    if (scratch.groups[group] < least) continue;
    const int64_t end = std::min((group + 1) * kGroup, size);
    for (int64_t id = group * kGroup; id < end; ++id) {
      if (scratch.weights[id] >= least) scratch.tokens.push_back({scratch.weights[id], int32_t(id)});
    }
  }
}

Choice choose_from_kept(const Scaled& scaled, double uniform, int64_t top_k, double top_p, float min_p,
                        Scratch& scratch) {
  const int64_t size = scaled.row.size;
  std::vector<Token>& tokens = scratch.tokens;
  const int64_t all = weigh(scaled, scratch);
  const bool cut_k = top_k > 0 && top_k < size, cut_p = top_p < 1.0;
  const auto enough = [&](int64_t sum) {
    return std::clamp<int64_t>(int64_t(std::ceil(top_p * double(sum))), 1, sum);
  };
  if (cut_k) {
    float least = 0.0f;  // the k-th largest weight is at least the k-th largest of the groups' largest
    if (top_k <= int64_t(scratch.groups.size())) {
      scratch.ranked = scratch.groups;
      std::nth_element(scratch.ranked.begin(), scratch.ranked.begin() + top_k - 1, scratch.ranked.end(),
                       std::greater<float>());
      least = scratch.ranked[top_k - 1];
    }
    collect(size, least, scratch);
    std::nth_element(tokens.begin(), tokens.begin() + top_k - 1, tokens.end(), likelier);
    tokens.resize(top_k);
  } else if (cut_p) {
    // All tokens of at most this many units together have at most what top-p can do without.
    const int64_t spare = (all - enough(all)) / size;
    collect(size, 0.999f * float(spare) / softmax::kOne, scratch);
  } else {
    collect(size, min_p, scratch);
  }
  if (cut_p) {
    const int64_t sum = cut_k ? mass(tokens.data(), tokens.data() + tokens.size()) : all;
    tokens.resize(shortest_prefix(tokens, enough(sum), likelier));
  }
  std::erase_if(tokens, [&](const Token& token) { return token.weight < min_p; });
  const int64_t sum = mass(tokens.data(), tokens.data() + tokens.size());
  const int64_t length = shortest_prefix(tokens, target(uniform, sum) + 1, smaller_id);
  return {tokens[length - 1].id, sum};
}

int64_t first_largest(const softmax::Row& row) {
  return std::find(row.logits, row.logits + row.size, row.largest) - row.logits;
}

}  // namespace

// `top_k` (0: all), `top_p` (1: all) and `min_p` (0: all) may be null.
extern "C" void sample(const float* logits, const float* temperatures, const double* uniforms, const int64_t* top_k,
                       const double* top_p, const float* min_p, int64_t* ids, float* logprobs, float* model_logprobs,
                       int64_t rows, int64_t vocabulary) {
#pragma omp parallel if (rows > 1)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < rows; ++r) {
      const bool greedy = temperatures[r] == 0.0f;
      const softmax::Row row = softmax::read_row(logits + r * vocabulary, vocabulary);
      const Scaled model(row, 1.0f), scaled(row, greedy ? 1.0f : temperatures[r]);
      ids[r] = 0;
      logprobs[r] = model_logprobs[r] = std::numeric_limits<float>::quiet_NaN();
      if (!scaled.finite()) continue;
      const int64_t k = top_k ? top_k[r] : 0;
      const double p = top_p ? top_p[r] : 1.0;
      const float least = min_p ? std::min(min_p[r], 1.0f) : 0.0f;
      const bool is_model = scaled.temperature == 1.0f;
      const bool whole = (k <= 0 || k >= vocabulary) && p >= 1.0 && least <= 0.0f;
      Choice choice;
      if (greedy) {
        choice = {first_largest(row), model.sum()};
      } else if (whole) {
        choice = choose_from_all(scaled, uniforms[r], scratch);
      } else {
        choice = choose_from_kept(scaled, uniforms[r], k, p, least, scratch);
      }
      ids[r] = choice.id;
      logprobs[r] = softmax::logprob(scaled.distance(choice.id), choice.sum);
      const int64_t model_sum = is_model && (greedy || whole) ? choice.sum : model.sum();
      model_logprobs[r] = softmax::logprob(model.distance(choice.id), model_sum);
    }
  }
}
