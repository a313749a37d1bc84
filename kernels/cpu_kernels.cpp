// Kernels for CPUs: linear layers over packed weights, attention over a paged KV cache, and what lies between them.
//
// One rule above all: the result of a row depends on that row alone. Each output value is accumulated in one fixed
// order, whatever the number of rows, the split into tiles or the number of threads, and every multiply-add is fused
// explicitly, so that two tile shapes cannot differ in rounding. A sequence therefore gets the same bits alone and in
// a batch, in one chunk or in many.
//
// This file is what Python calls; the parts are in the headers beside it.

#include <sys/mman.h>
#if defined(__AVX2__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_attention.h"
#include "cpu_int8.h"
#include "cpu_kv_cache.h"
#include "cpu_layer.h"
#include "cpu_linear.h"
#include "cpu_quantized_rows.h"
#include "cpu_rows.h"
#include "cpu_sampling.h"
#include "cpu_threads.h"
#include "cpu_vectors.h"

extern "C" {

// Returns 0, or 1 if the file cannot be mapped. It stays mapped for the life of the process.
int pdserve_share_cores(int descriptor, int64_t size_bytes, int num_cores) {
  void* busy = mmap(nullptr, size_bytes, PROT_READ, MAP_SHARED, descriptor, 0);
  if (busy == MAP_FAILED) return 1;
  core_share().follow(static_cast<const uint64_t*>(busy), size_bytes / 8, num_cores);
  return 0;
}

// How many of `num_threads` the next operation would use.
int pdserve_threads_now(int num_threads) { return core_share().part_of(num_threads); }

int pdserve_lanes() { return kLanes; }

// Inputs of 8-bit weights that lie side by side; with four, the weights are stored as w + 128.
int pdserve_inputs() { return kInputs; }

// Whether this processor has the instructions of this build.
int pdserve_runs_here() {
#if defined(__AVX512BF16__)
  unsigned features = 0, b, c, d;  // of bfloat16 not every compiler's __builtin_cpu_supports has heard
  if (!__get_cpuid_count(7, 1, &features, &b, &c, &d) || !(features >> 5 & 1)) return 0;
#endif
#if defined(__AVX512VNNI__)
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__AVX512F__)
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__AVX2__)
  unsigned a, b, features = 0, d;  // of f16c not every compiler's __builtin_cpu_supports has heard
  const bool has_f16c = __get_cpuid(1, &a, &b, &features, &d) && (features & bit_F16C);
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c;
#else
  return 1;
#endif
}

void pdserve_linear(const float* x, int64_t x_stride, const float* weight, const float* bias, float* y,
                    int64_t y_stride, int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int num_threads) {
  const Linear a{x, x_stride, weight, bias, y, y_stride, num_rows, num_outputs, num_inputs};
  const int64_t num_panels = (num_outputs + kLanes - 1) / kLanes;
  // With many rows a task is one tile of panels, whose weights stay in the cache while all rows pass; with few rows
  // the weights are read once, and larger tasks cost less.
  const int64_t per_task = num_rows >= 2 * kMaxRows ? 3 : std::max<int64_t>(8, num_panels / (num_threads * 6) / 8 * 8);
  parallel((num_panels + per_task - 1) / per_task, num_threads, [&](int64_t task) {
    linear_panels(a, task * per_task, std::min(num_panels, (task + 1) * per_task));
  });
}

// The same over 8-bit weights; the rows are quantized on the way.
void pdserve_int8_linear(const float* x, int64_t x_stride, const int8_t* panels, const float* scales,
                         const float* bias, float* y, int64_t y_stride, int64_t num_rows, int64_t num_outputs,
                         int64_t num_inputs, int num_threads) {
  const Int8Weight weight{panels, scales, bias, num_outputs, num_inputs};
  quantized_linear(weight, num_rows, y, y_stride, 0.0f, num_threads,
                   [=](int64_t row, float*) { return x + row * x_stride; });
}

// Layers, one after the other, and a step for each, as kernels/fused_layer.py lays them out.
void pdserve_layers(const void* const* layers, const void* steps, int64_t num_layers) {
  for (int64_t i = 0; i < num_layers; i++)
    run_layer(*static_cast<const Layer*>(layers[i]), static_cast<const Step*>(steps)[i]);
}

void pdserve_attention(const float* query, int64_t query_stride, const RowCache* cache, float* output,
                       const int64_t* spans, int64_t num_spans, int64_t num_heads, int64_t num_kv_heads,
                       int64_t head_dim, float scale, float soft_cap, int64_t window, int num_threads) {
  const Attention a{query, query_stride, *cache, output, num_heads, num_kv_heads, head_dim, scale, soft_cap, window};
  attend(a, read_spans(spans, num_spans), num_threads);
}

void pdserve_rms_norm(const float* x, const float* weight, float* y, int64_t num_rows, int64_t size, float eps,
                      int num_threads) {
  for_rows(num_rows, num_threads,
           [=](int64_t row) { rms_norm_row(x + row * size, weight, y + row * size, size, eps); });
}

// y = silu(gate) * up, where a row of x is [gate, up].
void pdserve_silu_mul(const float* x, float* y, int64_t num_rows, int64_t size, int num_threads) {
  for_rows(num_rows, num_threads, [=](int64_t row) { silu_mul_row(x + row * 2 * size, y + row * size, size); });
}

// Rotates the first `num_rotated` heads of each token in place, then writes the last 2 * num_kv_heads heads, keys and
// values, into their slots.
void pdserve_rope_store(float* heads, int64_t token_stride, const float* cos, const float* sin, int64_t half,
                        const RowCache* cache, const int64_t* slots, int64_t num_tokens, int64_t num_heads,
                        int64_t num_kv_heads, int64_t head_dim, int num_threads) {
  for_rows(num_tokens, num_threads, [=](int64_t t) {
    float* own = heads + t * token_stride;
    rotate_heads(own, num_heads + num_kv_heads, head_dim, cos + t * half, sin + t * half, half);
    store_kv(*cache, own + num_heads * head_dim, num_kv_heads, head_dim, slots[t]);
  });
}

}  // extern "C"
