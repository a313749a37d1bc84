// What lies between linear layers and attention: each function computes one row, and that from this row alone.

#pragma once

#include <cmath>
#include <cstdint>

#include "cpu_vectors.h"

namespace {

inline float dot(const float* a, const float* b, int64_t size) {
  constexpr int kVectors = kSumLanes / kLanes;
  Vec sums[kVectors] = {};
  int64_t i = 0;
  for (; i + kSumLanes <= size; i += kSumLanes)
    for (int v = 0; v < kVectors; v++) sums[v] = fma(load(a + i + v * kLanes), load(b + i + v * kLanes), sums[v]);
  float total = sum_lanes(sums);
  for (; i < size; i++) total = fma(a[i], b[i], total);
  return total;
}

// y = weight * x / sqrt(mean(x^2) + eps).
inline void rms_norm_row(const float* x, const float* weight, float* y, int64_t size, float eps) {
  const float factor = 1.0f / std::sqrt(dot(x, x, size) / size + eps);
  for (int64_t i = 0; i < size; i++) y[i] = weight[i] * (x[i] * factor);
}

// y = silu(gate) * up, where x is [gate, up].
inline void silu_mul_row(const float* x, float* y, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec gate = load(x + i), magnitude = gate < 0 ? gate : -gate;
    const Vec e = exp_nonpositive(magnitude);  // exp(-|gate|)
    const Vec numerator = gate < 0 ? e : splat(1.0f);
    store(y + i, gate * (numerator / (e + 1.0f)) * load(x + size + i));
  }
  for (; i < size; i++) {
    const float e = exp_nonpositive(-std::fabs(x[i]));
    y[i] = x[i] * ((x[i] < 0 ? e : 1.0f) / (e + 1.0f)) * x[size + i];
  }
}

// Rotates the two halves of the first 2 * half values of each head in place.
inline void rotate_heads(float* heads, int64_t num_heads, int64_t head_dim, const float* cos, const float* sin,
                         int64_t half) {
  for (int64_t h = 0; h < num_heads; h++) {
    float* head = heads + h * head_dim;
    for (int64_t i = 0; i < half; i++) {
      const float first = head[i], second = head[half + i];
      head[i] = first * cos[i] - second * sin[i];
      head[half + i] = second * cos[i] + first * sin[i];
    }
  }
}

}  // namespace
