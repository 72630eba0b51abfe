// The expert MLPs of one MoE layer, and a product with one packed matrix, with MXFP4 weights.
//
// Rows (token, rank) are sorted by expert; an expert's rows are cut into panels that stay in the second-level cache as
// operands. Work is (panel, range of column strips); every output has one owner, and a row's bits depend on that row
// and the weights alone (`gemm.h`), so neither the threads nor the other tokens change them. All offsets are 64 bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "gemm.h"
#include "packed_mxfp4.h"
#include "simd.h"

using gemm::Dtype;
using gemm::kStrip;
using simd::F16;

namespace {

constexpr int64_t kMaxColumns = gemm::kMaxStrips * kStrip;
constexpr int64_t kRoundBytes = 32 << 20;     // prepared rows in memory at once
constexpr int64_t kFewBytes = 128 << 10;      // of prepared rows that one thread makes before the others start
constexpr int64_t kKeptBytes = 128 << 20;     // scratch that stays between calls
constexpr int64_t kTaskCost = 160 << 10;      // of one task, in bytes of weights read once
constexpr int64_t kParallelCost = 256 << 10;  // of a layer from which threads pay

int64_t panel_rows(Dtype dtype) { return dtype == Dtype::kFp32 ? 64 : 192; }
int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Memory of the calling thread, grown as calls need it; what exceeds `kKeptBytes` goes back after the call.
class Scratch {
 public:
  char* get(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset((char*)std::aligned_alloc(64, size_t(up(bytes, 1 << 20))));
      if (!memory_) throw std::bad_alloc();
      size_ = up(bytes, 1 << 20);
    }
    return memory_.get();
  }
  void trim() {
    if (size_ <= kKeptBytes) return;
    memory_.reset();
    size_ = 0;
  }

 private:
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

thread_local Scratch scratch;

// Rows of one expert that are multiplied together: [first, first + count) of the sorted rows.
struct Panel {
  int64_t expert, first, count;
  int64_t memory;  // offset of its prepared rows
};

struct Task {
  int64_t panel, first_pair, last_pair;
};

// Which strips one call of `multiply` takes: a gate strip with its up strip, or two neighbours.
struct Pairs {
  int64_t count;     // of pairs
  int64_t step;      // strips from a pair to the next
  int64_t distance;  // strips between the two of a pair
  int64_t strips;    // of the matrix
};

std::vector<Panel> cut(const std::vector<int64_t>& first_of_expert, Dtype dtype) {
  std::vector<Panel> panels;
  for (size_t expert = 0; expert + 1 < first_of_expert.size(); ++expert) {
    const int64_t begin = first_of_expert[expert], rows = first_of_expert[expert + 1] - begin;
    const int64_t num = (rows + panel_rows(dtype) - 1) / panel_rows(dtype);
    for (int64_t i = 0; i < num; ++i) {
      const int64_t from = begin + rows * i / num, to = begin + rows * (i + 1) / num;
      panels.push_back({int64_t(expert), from, to - from, 0});
    }
  }
  return panels;
}

int64_t pair_cost(const Panel& panel, int64_t blocks, Dtype dtype) {  // in bytes of weights read once
  const int64_t tiles = (panel.count * (dtype == Dtype::kFp32 ? 3 : 1) + 15) / 16;
  return blocks * kMaxColumns * 17 * (3 + tiles) / 4;
}

std::vector<Task> share(const Panel* panels, int64_t first, int64_t last, const Pairs& pairs, int64_t blocks,
                        Dtype dtype) {
  std::vector<Task> tasks;
  for (int64_t panel = first; panel < last; ++panel) {
    const int64_t at_once = std::max<int64_t>(1, kTaskCost / pair_cost(panels[panel], blocks, dtype));
    const int64_t num = (pairs.count + at_once - 1) / at_once;
    for (int64_t i = 0; i < num; ++i) tasks.push_back({panel, pairs.count * i / num, pairs.count * (i + 1) / num});
  }
  return tasks;
}

void multiply_pair(const PackedMxfp4& matrix, int64_t expert, const Pairs& pairs, int64_t pair, const gemm::Rows& rows,
                   float* out) {
  const int64_t first = pair * pairs.step;
  const int num = first + pairs.distance < pairs.strips ? 2 : 1;
  const gemm::Mxfp4Strip strips[2] = {matrix.strip(expert, first),
                                      num == 2 ? matrix.strip(expert, first + pairs.distance) : gemm::Mxfp4Strip{}};
  gemm::multiply(strips, num, rows, out, kMaxColumns);
}

F16 plus_bias(F16 value, const float* bias) { return bias ? simd::add(value, simd::load(bias)) : value; }

F16 unit(F16 gate, F16 up, bool clamped, float limit, float alpha) {
  if (!clamped) return simd::mul(simd::mul(gate, simd::sigmoid(gate)), up);
  const F16 most = simd::set1(limit), least = simd::set1(-limit);
  gate = simd::min(most, gate);  // NaN stays
  up = simd::max(least, simd::min(most, up));
  const F16 open = simd::mul(gate, simd::sigmoid(simd::mul(simd::set1(alpha), gate)));
  return simd::mul(open, simd::add(up, simd::set1(1.0f)));
}

struct Layer {
  PackedMxfp4 gate_up, down;
  const float *gate_up_bias, *down_bias;  // [E, 2F], [E, D]; null: none
  const void* x;                          // [T, D]
  const int64_t* chosen;                  // [T, K]
  const float* weights;                   // [T, K]
  float* out;                             // [T, D]
  float* hidden;                          // [T K sorted rows, 2F] before the unit; null: not wanted
  float* rows;                            // [T K sorted rows, D] before weighting; null: not wanted
  int64_t num_tokens, num_ranks;
  int32_t dtype, clamped;
  float limit, alpha;
};

// Sorted position of each (token, rank), first position of each expert; false when an index names no expert.
bool sort_by_expert(const Layer& layer, std::vector<int64_t>& first_of_expert, std::vector<int64_t>& position,
                    std::vector<int32_t>& token) {
  const int64_t num = layer.num_tokens * layer.num_ranks, experts = layer.gate_up.num_matrices;
  first_of_expert.assign(experts + 1, 0);
  for (int64_t i = 0; i < num; ++i) {
    if (uint64_t(layer.chosen[i]) >= uint64_t(experts)) return false;
    ++first_of_expert[layer.chosen[i] + 1];
  }
  for (int64_t expert = 0; expert < experts; ++expert) first_of_expert[expert + 1] += first_of_expert[expert];
  std::vector<int64_t> next(first_of_expert.begin(), first_of_expert.end() - 1);
  position.resize(num);
  token.resize(num);
  for (int64_t i = 0; i < num; ++i) {
    position[i] = next[layer.chosen[i]]++;
    token[position[i]] = int32_t(i / layer.num_ranks);
  }
  return true;
}

// Sets where the prepared rows of panels from `first` on lie; returns the end of those that fit in one round.
int64_t place(std::vector<Panel>& panels, int64_t first, int64_t blocks, Dtype dtype, int64_t& bytes) {
  bytes = 0;
  int64_t panel = first;
  for (; panel < int64_t(panels.size()); ++panel) {
    const int64_t size = up(gemm::rows_bytes(panels[panel].count, blocks, dtype), 64);
    if (panel > first && bytes + size > kRoundBytes) break;
    panels[panel].memory = bytes;
    bytes += size;
  }
  return panel;
}

void gate_up_tasks(const Layer& layer, const Panel* panels, const Task& task, const Pairs& pairs, const char* prepared,
                   char* act, int64_t first_row) {
  const Panel& panel = panels[task.panel];
  const Dtype dtype = Dtype(layer.dtype);
  const int64_t hidden = layer.gate_up.columns / 2;
  const gemm::Rows rows{prepared + panel.memory, panel.count, layer.gate_up.blocks, dtype};
  alignas(64) float products[192 * kMaxColumns];
  for (int64_t pair = task.first_pair; pair < task.last_pair; ++pair) {
    multiply_pair(layer.gate_up, panel.expert, pairs, pair, rows, products);
    const int64_t column = pair * kStrip;
    const float* gate_bias = layer.gate_up_bias ? layer.gate_up_bias + panel.expert * 2 * hidden + column : nullptr;
    const float* up_bias = gate_bias ? gate_bias + hidden : nullptr;
    for (int64_t row = 0; row < panel.count; ++row) {
      const F16 gate = plus_bias(simd::load(products + row * kMaxColumns), gate_bias);
      const F16 up = plus_bias(simd::load(products + row * kMaxColumns + kStrip), up_bias);
      if (layer.hidden) {
        float* keep = layer.hidden + (panel.first + row) * 2 * hidden + column;
        simd::store(keep, gate);
        simd::store(keep + hidden, up);
      }
      const F16 value = unit(gate, up, layer.clamped, layer.limit, layer.alpha);
      const int64_t at = (panel.first - first_row + row) * hidden + column;
      if (dtype == Dtype::kFp32) {
        simd::store((float*)act + at, value);
      } else {
        simd::store_bf16((uint16_t*)act + at, value);
      }
    }
  }
}

// Products plus bias into fp32 rows; the last strip of a matrix may have fewer columns.
void plain_tasks(const PackedMxfp4& matrix, const float* bias, Dtype dtype, const Panel* panels, const Task& task,
                 const Pairs& pairs, const char* prepared, float* out) {
  const Panel& panel = panels[task.panel];
  const gemm::Rows rows{prepared + panel.memory, panel.count, matrix.blocks, dtype};
  alignas(64) float products[192 * kMaxColumns];
  for (int64_t pair = task.first_pair; pair < task.last_pair; ++pair) {
    multiply_pair(matrix, panel.expert, pairs, pair, rows, products);
    for (int64_t column = pair * kMaxColumns, s = 0; s < gemm::kMaxStrips; ++s, column += kStrip) {
      const int num = int(std::min<int64_t>(kStrip, matrix.columns - column));
      if (num <= 0) break;
      const F16 add = bias ? simd::load(bias + panel.expert * matrix.columns + column, num) : simd::zero();
      for (int64_t row = 0; row < panel.count; ++row) {
        const F16 value = simd::load(products + row * kMaxColumns + s * kStrip);
        float* to = out + (panel.first + row) * matrix.columns + column;
        simd::store(to, bias ? simd::add(value, add) : value, num);
      }
    }
  }
}

void combine(const Layer& layer, const float* rows, const int64_t* position, int64_t token) {
  const int64_t dim = layer.down.columns, ranks = layer.num_ranks;
  float* out = layer.out + token * dim;
  for (int64_t i = 0; i < dim; i += kStrip) {  // dim is a multiple of 32
    F16 sum = simd::zero();
    for (int64_t rank = token * ranks; rank < (token + 1) * ranks; ++rank) {
      sum = simd::fma(simd::set1(layer.weights[rank]), simd::load(rows + position[rank] * dim + i), sum);
    }
    simd::store(out + i, sum);
  }
}

int64_t element_bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

void run_layer(const Layer& layer, std::vector<Panel>& panels, const std::vector<int64_t>& position,
               const std::vector<int32_t>& token) {
  const Dtype dtype = Dtype(layer.dtype);
  const int64_t num_rows = int64_t(position.size()), dim = layer.down.columns, hidden = layer.gate_up.columns / 2;
  const int64_t x_blocks = layer.gate_up.blocks, act_blocks = layer.down.blocks;
  const Pairs gate_pairs{hidden / kStrip, 1, hidden / kStrip, layer.gate_up.strips};
  const Pairs down_pairs{(layer.down.strips + 1) / 2, 2, 1, layer.down.strips};

  int64_t round_bytes = 0, round_rows = 0, bytes, cost = 0;
  for (int64_t first = 0, last; first < int64_t(panels.size()); first = last) {
    last = place(panels, first, std::max(x_blocks, act_blocks), dtype, bytes);
    round_bytes = std::max(round_bytes, bytes);
    round_rows = std::max(round_rows, panels[last - 1].first + panels[last - 1].count - panels[first].first);
  }
  for (const Panel& panel : panels) {
    cost += pair_cost(panel, x_blocks, dtype) * gate_pairs.count;
    cost += pair_cost(panel, act_blocks, dtype) * down_pairs.count;
  }
  const int64_t act_bytes = up(round_rows * hidden * element_bytes(dtype), 64);
  const int64_t rows_bytes = layer.rows ? 0 : num_rows * dim * 4;
  char* prepared = scratch.get(round_bytes + act_bytes + rows_bytes);
  char* act = prepared + round_bytes;
  float* rows = layer.rows ? layer.rows : (float*)(act + act_bytes);

  std::vector<Task> tasks[2];
  int64_t first = 0, last = 0;
  const auto prepare_x = [&](const Panel& panel) {
    gemm::prepare(layer.x, dim, token.data() + panel.first, panel.count, dim, dtype, prepared + panel.memory, 0,
                  x_blocks);
  };
#pragma omp parallel if (cost > kParallelCost)
  {
    const gemm::Scope scope;
    while (true) {
#pragma omp barrier
#pragma omp single
      {
        first = last;
        if (first < int64_t(panels.size())) {
          last = place(panels, first, std::max(x_blocks, act_blocks), dtype, bytes);
          tasks[0] = share(panels.data(), first, last, gate_pairs, x_blocks, dtype);
          tasks[1] = share(panels.data(), first, last, down_pairs, act_blocks, dtype);
          for (int64_t i = first; i < last && bytes <= kFewBytes; ++i) prepare_x(panels[i]);
        }
      }
      if (first == int64_t(panels.size())) break;
      const int64_t first_row = panels[first].first;
      if (bytes > kFewBytes) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = first; i < last; ++i) prepare_x(panels[i]);
      }
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < tasks[0].size(); ++i) {
        gate_up_tasks(layer, panels.data(), tasks[0][i], gate_pairs, prepared, act, first_row);
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = first; i < last; ++i) {
        const Panel& panel = panels[i];
        const char* from = act + (panel.first - first_row) * hidden * element_bytes(dtype);
        gemm::prepare(from, hidden, nullptr, panel.count, hidden, dtype, prepared + panel.memory, 0, act_blocks);
      }
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < tasks[1].size(); ++i) {
        plain_tasks(layer.down, layer.down_bias, dtype, panels.data(), tasks[1][i], down_pairs, prepared, rows);
      }
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < layer.num_tokens; ++i) combine(layer, rows, position.data(), i);
  }
  scratch.trim();
}

}  // namespace

extern "C" {

// Matrices in the checkpoint's layout (blocks [E, N, K/32, 16], scales [E, N, K/32]) into strips.
void pack_mxfp4(const uint8_t* blocks, const uint8_t* scales, PackedMxfp4* matrix) { pack(blocks, scales, *matrix); }

// And back.
void unpack_mxfp4(const PackedMxfp4* matrix, uint8_t* blocks, uint8_t* scales) { unpack(*matrix, blocks, scales); }

// 0: done, 1: a chosen index names no expert (nothing is written), 2: no memory.
int grouped_experts(const Layer* layer) try {
  std::vector<int64_t> first_of_expert, position;
  std::vector<int32_t> token;
  if (!sort_by_expert(*layer, first_of_expert, position, token)) return 1;
  std::vector<Panel> panels = cut(first_of_expert, Dtype(layer->dtype));
  run_layer(*layer, panels, position, token);
  return 0;
} catch (const std::bad_alloc&) {
  return 2;
}

// The last step of a layer on rows that were computed elsewhere: each token's rows, times their weights, in rank order.
void combine_rows(const float* rows, const int64_t* position, const float* weights, float* out, int64_t num_tokens,
                  int64_t num_ranks, int64_t dim) {
  Layer layer{};
  layer.weights = weights;
  layer.out = out;
  layer.num_ranks = num_ranks;
  layer.down.columns = dim;
#pragma omp parallel for schedule(static) if (num_tokens * num_ranks * dim * 4 > kParallelCost)
  for (int64_t i = 0; i < num_tokens; ++i) combine(layer, rows, position, i);
}

// out[M, N] = x[M, K] times the transposed matrix; 0: done, 2: no memory.
int mxfp4_linear(const void* x, const PackedMxfp4* matrix, float* out, int64_t count, int32_t dtype_) try {
  const Dtype dtype = Dtype(dtype_);
  const Pairs pairs{(matrix->strips + 1) / 2, 2, 1, matrix->strips};
  const int64_t k = matrix->blocks * gemm::kBlock;
  std::vector<Panel> panels = cut({0, count}, dtype);
  int64_t bytes;
  for (int64_t first = 0, last; first < int64_t(panels.size()); first = last) {
    last = place(panels, first, matrix->blocks, dtype, bytes);
    char* prepared = scratch.get(bytes);
    const auto prepare = [&](int64_t i, int64_t first_block, int64_t last_block) {
      const char* from = (const char*)x + panels[i].first * k * element_bytes(dtype);
      gemm::prepare(from, k, nullptr, panels[i].count, k, dtype, prepared + panels[i].memory, first_block, last_block);
    };
    const std::vector<Task> tasks = share(panels.data(), first, last, pairs, matrix->blocks, dtype);
    const bool few = bytes <= kFewBytes;
    if (few) {
      for (int64_t i = first; i < last; ++i) prepare(i, 0, matrix->blocks);
    }
#pragma omp parallel if (tasks.size() > 1)
    {
      const gemm::Scope scope;
      if (!few) {
#pragma omp for schedule(static) collapse(2)
        for (int64_t i = first; i < last; ++i) {
          for (int64_t block = 0; block < matrix->blocks; ++block) prepare(i, block, block + 1);
        }
      }
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < tasks.size(); ++i) {
        plain_tasks(*matrix, nullptr, dtype, panels.data(), tasks[i], pairs, prepared, out);
      }
    }
  }
  scratch.trim();
  return 0;
} catch (const std::bad_alloc&) {
  return 2;
}

}  // extern "C"
