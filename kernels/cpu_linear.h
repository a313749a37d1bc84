// y = x W^T + b with W packed as [ceil(out / lanes)][in][lanes]: the lanes run over outputs, so that each output is
// one chain of multiply-adds over the inputs in order.

#pragma once

#include <algorithm>

#include "cpu_vectors.h"

namespace {

struct Linear {
  const float* x;  // [num_rows, in], rows `x_stride` apart
  int64_t x_stride;
  const float* weight;
  const float* bias;  // [out] or null
  float* y;           // [num_rows, out], rows `y_stride` apart
  int64_t y_stride, num_rows, num_outputs, num_inputs;
};

template <int kRows, int kPanels>
inline void linear_tile(const Linear& a, int64_t row, int64_t panel) {
  const float* x = a.x + row * a.x_stride;
  const float* weight = a.weight + panel * a.num_inputs * kLanes;
  const int64_t panel_size = a.num_inputs * kLanes;
  Vec sums[kRows][kPanels];
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kPanels; j++) sums[i][j] = Vec{};
  for (int64_t k = 0; k < a.num_inputs; k++) {
    Vec weights[kPanels];
    for (int j = 0; j < kPanels; j++) weights[j] = load(weight + j * panel_size + k * kLanes);
    for (int i = 0; i < kRows; i++) {
      const Vec input = splat(x[i * a.x_stride + k]);
      for (int j = 0; j < kPanels; j++) sums[i][j] = fma(input, weights[j], sums[i][j]);
    }
  }
  for (int j = 0; j < kPanels; j++) {
    const int64_t column = (panel + j) * kLanes;
    const int64_t width = std::min<int64_t>(kLanes, a.num_outputs - column);
    float bias[kLanes] = {};
    if (a.bias) std::memcpy(bias, a.bias + column, width * sizeof(float));
    for (int i = 0; i < kRows; i++) {
      const Vec sum = sums[i][j] + load(bias);
      std::memcpy(a.y + (row + i) * a.y_stride + column, &sum, width * sizeof(float));
    }
  }
}

template <int kRows>
void linear_band(const Linear& a, int64_t row, int64_t begin, int64_t end) {
  constexpr int kPanels = std::min(8, kAccumulators / kRows);
  for (; begin + kPanels <= end; begin += kPanels) linear_tile<kRows, kPanels>(a, row, begin);
  for (; begin < end; begin++) linear_tile<kRows, 1>(a, row, begin);
}

constexpr int kMaxRows = kAccumulators / 3;

void linear_panels(const Linear& a, int64_t begin, int64_t end) {
  int64_t row = 0;
  for (; row + kMaxRows <= a.num_rows; row += kMaxRows) linear_band<kMaxRows>(a, row, begin, end);
  switch (a.num_rows - row) {
    case 1: return linear_band<1>(a, row, begin, end);
    case 2: return linear_band<2>(a, row, begin, end);
    case 3: return linear_band<3>(a, row, begin, end);
#if defined(__AVX512F__)
    case 4: return linear_band<4>(a, row, begin, end);
    case 5: return linear_band<5>(a, row, begin, end);
    case 6: return linear_band<6>(a, row, begin, end);
    case 7: return linear_band<7>(a, row, begin, end);
#endif
    default: return;
  }
}

}  // namespace
