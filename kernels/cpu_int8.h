// y = x W^T + b with 8-bit weights, exact: each row of x becomes integers with one scale, products are summed in 32-bit
// integers, and only the sum is scaled. Integers have no rounding, so no order of summation, tile or number of rows
// can change a result.
//
// The rows' integers are in cpu_quantized_rows.h. W is packed as [ceil(out / lanes)][steps][lanes][kInputs]: a 32-bit
// lane holds kInputs inputs of one output, which one instruction multiplies and adds.
//   VNNI: four inputs as w + 128 (vpdpbusd wants one side without sign; 128 times the sum of a row's integers is
//   subtracted at the end). Inputs of more than 8 bits are 256 high + low; the high parts are multiplied first, only
//   where one of the tile's rows has any, and the sums shifted.
//   Others: two inputs, widened to 16 bits beside the 16 bits of x (vpmaddwd), since products of 8 x 8 bits saturate.

#pragma once

#include <algorithm>

#include "cpu_quantized_rows.h"
#include "cpu_threads.h"
#include "cpu_vectors.h"

namespace {

typedef int16_t ShortVec __attribute__((vector_size(kLanes * 4)));

struct Int8Weight {
  const int8_t* panels;
  const float* scales;  // [out rounded up to lanes]
  const float* bias;    // [out] or null
  int64_t num_outputs, num_inputs;

  int64_t num_steps() const { return (num_inputs + kInputs - 1) / kInputs; }
  int64_t num_panels() const { return (num_outputs + kLanes - 1) / kLanes; }
};

struct Int8Linear {
  const QuantizedRows& x;
  Int8Weight weight;
  float* y;  // [num_rows, out], rows `y_stride` apart
  int64_t y_stride, num_rows;
  float adds;  // 0: y is overwritten; otherwise the result times this is added to it
};

#if defined(__AVX512VNNI__)

template <int kRows, int kPanels>
inline void multiply_step(const int8_t* weight, int64_t panel_size, const int8_t* x, int64_t x_stride, int64_t step,
                          const int8_t* ahead, IntVec (&sums)[kRows][kPanels]) {
  __m512i weights[kPanels];
  for (int j = 0; j < kPanels; j++) __builtin_prefetch(ahead + j * panel_size + step * kLanes * kInputs, 0, 2);
  for (int j = 0; j < kPanels; j++) weights[j] = _mm512_loadu_si512(weight + j * panel_size + step * kLanes * kInputs);
  for (int i = 0; i < kRows; i++) {
    int32_t inputs;
    std::memcpy(&inputs, x + i * x_stride + step * kInputs, sizeof inputs);
    const __m512i input = _mm512_set1_epi32(inputs);
    for (int j = 0; j < kPanels; j++)
      sums[i][j] = (IntVec)_mm512_dpbusd_epi32((__m512i)sums[i][j], weights[j], input);
  }
}

template <int kRows, int kPanels>
inline void multiply(const Int8Linear& a, int64_t row, int64_t panel, bool is_first,
                     IntVec (&sums)[kRows][kPanels]) {
  const int64_t num_steps = a.weight.num_steps(), panel_size = num_steps * kLanes * kInputs;
  const int8_t* weight = a.weight.panels + panel * panel_size;
  const int8_t* ahead = is_first ? weight + kPanels * panel_size : weight;
  const QuantizedRows& x = a.x;
  const int8_t *high = x.high(row), *low = x.low(row);
  const uint16_t* steps = x.high_steps(row / kTileRows);
  const int64_t num_high = x.num_high_steps(row / kTileRows), stride = x.stride();
  for (int64_t k = 0; k < num_high; k++) multiply_step(weight, panel_size, high, stride, steps[k], weight, sums);
  if (num_high > 0)
    for (int i = 0; i < kRows; i++)
      for (int j = 0; j < kPanels; j++) sums[i][j] <<= 8;
  for (int64_t k = 0; k < num_steps; k++) multiply_step(weight, panel_size, low, stride, k, ahead, sums);
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kPanels; j++) sums[i][j] -= x.offset(row + i) - IntVec{};
}

#else

// Two 8-bit inputs of each of kLanes outputs, widened to 16 bits.
inline ShortVec load_weights(const int8_t* p) {
#if defined(__AVX512BW__)
  return (ShortVec)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (ShortVec)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes * 2)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, ShortVec);
#endif
}

// sum + the two products of each lane.
inline IntVec multiply_pairs(IntVec sum, ShortVec a, ShortVec b) {
#if defined(__AVX512BW__)
  return sum + (IntVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (IntVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return sum + (IntVec)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  for (int i = 0; i < kLanes; i++) sum[i] += int32_t(a[2 * i]) * b[2 * i] + int32_t(a[2 * i + 1]) * b[2 * i + 1];
  return sum;
#endif
}

inline ShortVec splat_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return (ShortVec)(pair - IntVec{});
}

template <int kRows, int kPanels>
inline void multiply(const Int8Linear& a, int64_t row, int64_t panel, bool is_first,
                     IntVec (&sums)[kRows][kPanels]) {
  const int64_t num_steps = a.weight.num_steps(), panel_size = num_steps * kLanes * kInputs, stride = a.x.stride();
  const int8_t* weight = a.weight.panels + panel * panel_size;
  const int8_t* ahead = is_first ? weight + kPanels * panel_size : weight;
  const int16_t* x = a.x.values(row);
  for (int64_t k = 0; k < num_steps; k++) {
    ShortVec weights[kPanels];
    for (int j = 0; j < kPanels; j++) __builtin_prefetch(ahead + j * panel_size + k * kLanes * kInputs, 0, 2);
    for (int j = 0; j < kPanels; j++) weights[j] = load_weights(weight + j * panel_size + k * kLanes * kInputs);
    for (int i = 0; i < kRows; i++) {
      const ShortVec input = splat_pair(x + i * stride + k * kInputs);
      for (int j = 0; j < kPanels; j++) sums[i][j] = multiply_pairs(sums[i][j], input, weights[j]);
    }
  }
}

#endif

// The first tile of rows that passes some panels fetches the next ones, into the second-level cache: weights come from
// memory while it computes. The lines of the results may be another core's, and are asked for early.
template <int kRows, int kPanels>
inline void int8_tile(const Int8Linear& a, int64_t row, int64_t panel, bool is_first) {
  IntVec sums[kRows][kPanels];
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kPanels; j++) sums[i][j] = IntVec{};
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kPanels; j++) __builtin_prefetch(a.y + (row + i) * a.y_stride + (panel + j) * kLanes, 1);
  multiply(a, row, panel, is_first, sums);
  for (int j = 0; j < kPanels; j++) {
    const int64_t column = (panel + j) * kLanes, size = std::min<int64_t>(kLanes, a.weight.num_outputs - column);
    const Vec scales = load(a.weight.scales + column);
    const Vec bias = a.weight.bias ? load_some(a.weight.bias + column, size) : Vec{};
    for (int i = 0; i < kRows; i++) {
      float* y = a.y + (row + i) * a.y_stride + column;
      const Vec scaled = __builtin_convertvector(sums[i][j], Vec) * splat(a.x.scale(row + i));
      Vec result = scaled * scales + bias;
      if (a.adds != 0) result = load_some(y, size) + result * splat(a.adds);
      store_some(y, result, size);
    }
  }
}

template <int kRows>
void int8_band(const Int8Linear& a, int64_t begin, int64_t end) {
  constexpr int kPanels = std::min(8, kAccumulators / kRows);
  for (; begin + kPanels <= end; begin += kPanels) int8_tile<kRows, kPanels>(a, 0, begin, kRows > 2 && begin + kPanels < end);
  for (; begin < end; begin++) int8_tile<kRows, 1>(a, 0, begin, false);
}

template <int kPanels>
void int8_rows(const Int8Linear& a, int64_t row, int64_t last, int64_t panel, bool is_followed) {
  for (const int64_t first = row; row + kTileRows <= last; row += kTileRows)
    int8_tile<kTileRows, kPanels>(a, row, panel, is_followed && row == first);
  switch (last - row) {
    case 1: return int8_tile<1, kPanels>(a, row, panel, false);
    case 2: return int8_tile<2, kPanels>(a, row, panel, false);
    case 3: return int8_tile<3, kPanels>(a, row, panel, false);
    case 4: return int8_tile<4, kPanels>(a, row, panel, false);
    case 5: return int8_tile<5, kPanels>(a, row, panel, false);
#if defined(__AVX512F__)
    case 6: return int8_tile<6, kPanels>(a, row, panel, false);
    case 7: return int8_tile<7, kPanels>(a, row, panel, false);
#endif
    default: return;
  }
}

constexpr int kPanelsOfTile = kAccumulators / kTileRows;

inline void int8_panels(const Int8Linear& a, int64_t row, int64_t last, int64_t begin, int64_t end) {
  if (last >= kTileRows) {
    for (; begin + kPanelsOfTile <= end; begin += kPanelsOfTile)
      int8_rows<kPanelsOfTile>(a, row, last, begin, begin + kPanelsOfTile < end);
    for (; begin < end; begin++) int8_rows<1>(a, row, last, begin, false);
    return;
  }
  switch (last) {  // less than a tile, which begins at row 0
    case 1: return int8_band<1>(a, begin, end);
    case 2: return int8_band<2>(a, begin, end);
    case 3: return int8_band<3>(a, begin, end);
    case 4: return int8_band<4>(a, begin, end);
    case 5: return int8_band<5>(a, begin, end);
#if defined(__AVX512F__)
    case 6: return int8_band<6>(a, begin, end);
    case 7: return int8_band<7>(a, begin, end);
#endif
    default: return;
  }
}

// With many rows a task is a block of rows that stays in the second-level cache and one tile of panels that stays in
// the first; with few rows the weights are read once, and larger tasks cost less.
void int8_linear(const Int8Linear& a, int num_threads) {
  constexpr int64_t kRowBlock = 16 * kTileRows;
  const int64_t num_panels = a.weight.num_panels(), rows_of_tile = std::min<int64_t>(a.num_rows, kTileRows);
  const int64_t tile = std::min<int64_t>(8, kAccumulators / std::max<int64_t>(1, rows_of_tile));
  const int64_t share = (num_panels / (num_threads * 4) + tile - 1) / tile * tile;
  const int64_t per_task = num_threads == 1 ? num_panels : std::max(share, 2 * tile);
  const int64_t num_groups = (num_panels + per_task - 1) / per_task;
  const int64_t num_blocks = (a.num_rows + kRowBlock - 1) / kRowBlock;
  parallel(num_groups * num_blocks, num_threads, [&](int64_t task) {
    const int64_t begin = task % num_groups * per_task, row = task / num_groups * kRowBlock;
    const int64_t last = std::min(a.num_rows, row + kRowBlock);
    int8_panels(a, row, last, begin, std::min(num_panels, begin + per_task));
  });
}

// Rows are made by `make(row, y)`, quantized at once, and pass the weight.
template <typename Make>
void quantized_linear(const Int8Weight& weight, int64_t num_rows, float* y, int64_t y_stride, float adds,
                      int num_threads, const Make& make) {
  thread_local QuantizedRows own;
  QuantizedRows& rows = own;  // that of the thread that calls, also where others fill it
  rows.resize(num_rows, weight.num_inputs);
  parallel((num_rows + kTileRows - 1) / kTileRows, num_threads, [&](int64_t tile) {
    thread_local Floats made;
    float* x = made.grown(weight.num_inputs);
    const int64_t begin = tile * kTileRows, end = std::min(num_rows, begin + kTileRows);
    for (int64_t row = begin; row < end; row++) rows.quantize(row, make(row, x));
    rows.index(tile, end);
  });
  int8_linear(Int8Linear{rows, weight, y, y_stride, num_rows, adds}, num_threads);
}

}  // namespace
