// A whole decoder layer over 8-bit weights in one call: norm, attention, norm, gated feed-forward, each added to the
// hidden states. The same functions as for single operations, in the same order: the same bits.

#pragma once

#include <vector>

#include "cpu_attention.h"
#include "cpu_int8.h"
#include "cpu_rows.h"
#include "cpu_threads.h"

namespace {

// What Python fills in; kernels/fused_layer.py has the same fields in the same order.
struct Layer {
  const float *input_norm, *mlp_norm;
  Int8Weight qkv, output, up, down;
  int64_t num_heads, num_kv_heads, head_dim, window;
  float eps, scale, soft_cap, residual;
};

struct Step {
  float* hidden;  // [num_tokens, hidden_size], changed in place
  const float *cos, *sin;  // [num_tokens, half], null where the layer is not rotated
  const int64_t *slots, *spans;
  RowCache cache;  // of this layer
  int64_t num_tokens, num_spans, half, num_threads;
};

constexpr int64_t kRowsPerTask = 16;

template <typename Body>
void for_rows(int64_t num_rows, int num_threads, const Body& body) {
  parallel((num_rows + kRowsPerTask - 1) / kRowsPerTask, num_threads, [&](int64_t task) {
    const int64_t end = std::min(num_rows, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; row++) body(row);
  });
}

std::vector<Span> read_spans(const int64_t* spans, int64_t num_spans) {
  std::vector<Span> all(num_spans);  // [num_spans, 4] query_start, query_len, context_len, address of the block table
  for (int64_t s = 0; s < num_spans; s++) {
    const int64_t* f = spans + 4 * s;
    all[s] = Span{f[0], f[1], f[2], reinterpret_cast<const int64_t*>(f[3])};
  }
  return all;
}

struct LayerRun {
  const Layer& layer;
  const Step& step;
  float *heads, *attended;  // [num_tokens, num_heads + 2 * num_kv_heads, head_dim], [num_tokens, num_heads, head_dim]

  int64_t num_all() const { return layer.num_heads + 2 * layer.num_kv_heads; }

  // Queries, keys and values of rows [begin, end): rotated, keys and values in their slots.
  void start(int64_t begin, int64_t end, int num_threads) const {
    const int64_t size = layer.qkv.num_inputs, row_size = num_all() * layer.head_dim;
    quantized_linear(layer.qkv, end - begin, heads + begin * row_size, row_size, 0.0f, num_threads,
                     [&](int64_t row, float* x) {
                       rms_norm_row(step.hidden + (begin + row) * size, layer.input_norm, x, size, layer.eps);
                       return x;
                     });
    for_rows(end - begin, num_threads, [&](int64_t i) {
      const int64_t row = begin + i;
      float* own = heads + row * row_size;
      const float *cos = step.cos + row * step.half, *sin = step.sin + row * step.half;
      rotate_heads(own, layer.num_heads + layer.num_kv_heads, layer.head_dim, cos, sin, step.half);
      store_kv(step.cache, own + layer.num_heads * layer.head_dim, layer.num_kv_heads, layer.head_dim,
               step.slots[row]);
    });
  }

  // What follows attention, for rows [begin, end).
  void finish(int64_t begin, int64_t end, int num_threads) const {
    thread_local Floats scratch;
    const int64_t num_rows = end - begin, size = layer.qkv.num_inputs, inner = layer.down.num_inputs;
    float *hidden = step.hidden + begin * size, *gate_up = scratch.grown(num_rows * 2 * inner);
    const float* inputs = attended + begin * layer.output.num_inputs;
    quantized_linear(layer.output, num_rows, hidden, size, layer.residual, num_threads,
                     [&](int64_t row, float*) { return inputs + row * layer.output.num_inputs; });
    quantized_linear(layer.up, num_rows, gate_up, 2 * inner, 0.0f, num_threads, [&](int64_t row, float* x) {
      rms_norm_row(hidden + row * size, layer.mlp_norm, x, size, layer.eps);
      return x;
    });
    quantized_linear(layer.down, num_rows, hidden, size, layer.residual, num_threads, [&](int64_t row, float* x) {
      silu_mul_row(gate_up + row * 2 * inner, x, inner);
      return x;
    });
  }
};

// Rows of a block: with what is computed between them they stay in the second-level cache.
constexpr int64_t kBlockRows = 4 * kTileRows;

// With many rows each thread takes blocks of rows through everything that lies between two attentions; with few, the
// threads share the outputs of each matrix, so that the weights are read once.
template <typename Body>
void for_blocks(int64_t num_rows, int64_t num_threads, const Body& body) {
  if (num_threads == 1 && num_rows <= kBlockRows) return body(0, num_rows, 1);
  if (num_rows < 2 * kTileRows * num_threads) return body(0, num_rows, num_threads);
  const int64_t wanted = (num_rows + kBlockRows - 1) / kBlockRows;
  const int64_t num_even = (wanted + num_threads - 1) / num_threads * num_threads;
  const int64_t size = ((num_rows + num_even - 1) / num_even + kTileRows - 1) / kTileRows * kTileRows;
  parallel((num_rows + size - 1) / size, num_threads,
           [&](int64_t block) { body(block * size, std::min(num_rows, (block + 1) * size), 1); });
}

void run_layer(const Layer& layer, const Step& step) {
  thread_local Floats wide, narrow;
  const int64_t num_rows = step.num_tokens, num_threads = step.num_threads;
  const int64_t row_size = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim;
  const LayerRun run{layer, step, wide.grown(num_rows * row_size),
                     narrow.grown(num_rows * layer.num_heads * layer.head_dim)};
  const auto start = [&](int64_t begin, int64_t end, int threads) { run.start(begin, end, threads); };
  const auto finish = [&](int64_t begin, int64_t end, int threads) { run.finish(begin, end, threads); };
  for_blocks(num_rows, num_threads, start);
  const Attention attention{run.heads,          row_size,       step.cache,  run.attended,   layer.num_heads,
                            layer.num_kv_heads, layer.head_dim, layer.scale, layer.soft_cap, layer.window};
  attend(attention, read_spans(step.spans, step.num_spans), num_threads);
  for_blocks(num_rows, num_threads, finish);
}

}  // namespace
