// Rows of activations as integers, x = scale q. A few channels of a transformer are far larger than the rest: the scale
// is made for the others, whose integers fit 8 bits, and the few get up to 16.
//
// The channels are dealt to 16 groups (channel modulo 16), each with its largest magnitude. Where few are large, they
// are in few of the groups, and the ninth of the 16 in order of size is typical: 1.2 times that is 127 levels.
// Only maxima and a sum in one order: every build, and kernels/int8_linear.py, finds the same bits.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu_vectors.h"

namespace {

#if defined(__AVX512VNNI__)
constexpr int kInputs = 4;  // of one output, side by side in a 32-bit lane of the weights
#else
constexpr int kInputs = 2;
#endif

// Rows of a tile of the matrix product: as many as leave a register for the weights and the input.
constexpr int kTileRows = kLanes == 16 ? 8 : 6;

constexpr int kGroups = 16, kTypicalGroup = 8;
constexpr int32_t kMaxLevels = 127 * 257;  // = 256 * 127 + 127: high and low part are 8 bits each
constexpr float kTypicalLevel = 1.2f / 127, kLeastLevel = 1.0f / kMaxLevels;

// The magnitudes that decide the scale of a row, as integers: in the same order, and what is not a number comes last.
struct GroupMaxima {
  alignas(64) int32_t bits[kGroups];

  explicit GroupMaxima(const float* x, int64_t size) {
    IntVec highest[kGroups / kLanes] = {};
    int64_t i = 0;
    for (; i + kGroups <= size; i += kGroups)
      for (int v = 0; v < kGroups / kLanes; v++) {
        const IntVec magnitude = (IntVec)load(x + i + v * kLanes) & 0x7fffffff;
        highest[v] = magnitude > highest[v] ? magnitude : highest[v];
      }
    std::memcpy(bits, highest, sizeof bits);
    for (; i < size; i++) {
      int32_t one;
      std::memcpy(&one, x + i, sizeof one);
      bits[i % kGroups] = std::max(bits[i % kGroups], one & 0x7fffffff);
    }
  }

  int32_t largest() const {
    int32_t found = 0;
    for (int32_t each : bits) found = std::max(found, each);
    return found;
  }

  // The largest of those that have at most kTypicalGroup below them.
  int32_t typical() const {
    IntVec found = {};
    for (int v = 0; v < kGroups / kLanes; v++) {
      IntVec own, num_below = {};
      std::memcpy(&own, bits + v * kLanes, sizeof own);
      for (int32_t each : bits) num_below -= (each - IntVec{}) < own;
      const IntVec kept = num_below <= kTypicalGroup ? own : IntVec{};
      found = kept > found ? kept : found;
    }
    int32_t all = 0;
    for (int lane = 0; lane < kLanes; lane++) all = std::max<int32_t>(all, found[lane]);
    return all;
  }

  float sum() const {
    float total = 0;
    for (int32_t each : bits) total += as_float(each);
    return total;
  }

  static float as_float(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
};

// Scratch of the thread that calls the kernels: it grows to what a step needs and is kept.
class QuantizedRows {
 public:
  void resize(int64_t num_rows, int64_t num_inputs) {
    num_inputs_ = num_inputs;
    stride_ = (num_inputs + 63) / 64 * 64;
    num_steps_ = (num_inputs + kInputs - 1) / kInputs;
    const size_t size = num_rows * stride_;
    if (scales_.size() < size_t(num_rows)) scales_.resize(num_rows);
#if defined(__AVX512VNNI__)
    const size_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
    if (offsets_.size() < size_t(num_rows)) offsets_.resize(num_rows);
    if (low_.size() < size) low_.resize(size), high_.resize(size);
    if (steps_.size() < num_tiles * num_steps_) steps_.resize(num_tiles * num_steps_);
    if (num_high_steps_.size() < num_tiles) num_high_steps_.resize(num_tiles);
#else
    if (values_.size() < size) values_.resize(size);
#endif
  }

  int64_t stride() const { return stride_; }
  float scale(int64_t row) const { return scales_[row]; }

  void quantize(int64_t row, const float* x) {
    const GroupMaxima maxima(x, num_inputs_);
    const int32_t largest = maxima.largest();
    float scale = 0, inverse = 0;  // nothing but zeros, or so small that the inverse of a scale is not finite
    if (largest >= 0x7f800000) scale = NAN;  // must not look like a result
    if (largest > 0x0d800000 && largest < 0x7f800000) {
      const float most = GroupMaxima::as_float(largest);
      // A sum of products with 127 stays inside 32 bits.
      const float sum_level = float(127 * 1.01 / 2147483648.0 * double((num_inputs_ + kGroups - 1) / kGroups));
      const float fine = std::min(GroupMaxima::as_float(maxima.typical()) * kTypicalLevel, most * (1.0f / 127));
      scale = std::max(std::max(fine, most * kLeastLevel), maxima.sum() * sum_level);
      inverse = 1.0f / scale;
    }
    scales_[row] = scale;
    round(row, x, inverse);
  }

#if defined(__AVX512VNNI__)
  const int8_t* low(int64_t row) const { return low_.data() + row * stride_; }
  const int8_t* high(int64_t row) const { return high_.data() + row * stride_; }
  int32_t offset(int64_t row) const { return offsets_[row]; }  // 128 times the sum of a row's integers
  const uint16_t* high_steps(int64_t tile) const { return steps_.data() + tile * num_steps_; }
  int64_t num_high_steps(int64_t tile) const { return num_high_steps_[tile]; }

  // Lists the steps in which a row of the tile that ends before `end` has a high part.
  void index(int64_t tile, int64_t end) {
    uint16_t* steps = steps_.data() + tile * num_steps_;
    int64_t count = 0;
    for (int64_t i = 0; i < stride_; i += 64) {
      __m512i any = _mm512_setzero_si512();
      for (int64_t row = tile * kTileRows; row < end; row++) any = _mm512_or_si512(any, _mm512_loadu_si512(high(row) + i));
      for (uint32_t mask = _mm512_test_epi32_mask(any, any); mask != 0; mask &= mask - 1)
        steps[count++] = uint16_t(i / 4 + __builtin_ctz(mask));
    }
    num_high_steps_[tile] = count;
  }

 private:
  void round(int64_t row, const float* x, float inverse) {
    int8_t *low = low_.data() + row * stride_, *high = high_.data() + row * stride_;
    IntVec sum = {};
    for (int64_t i = 0; i < stride_; i += kLanes) {
      const int64_t rest = std::clamp<int64_t>(num_inputs_ - i, 0, kLanes);
      const IntVec q = inverse == 0 ? IntVec{} : rounded(load_some(x + i, rest), inverse);
      const __m128i lows = _mm512_cvtepi32_epi8((__m512i)q), highs = _mm512_cvtepi32_epi8((__m512i)((q + 128) >> 8));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i), lows);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i), highs);
      sum += q;
    }
    offsets_[row] = int32_t(uint32_t(_mm512_reduce_add_epi32((__m512i)sum)) << 7);
  }

  std::vector<int8_t> low_, high_;  // [num_rows, stride]: q = 256 high + low
  std::vector<int32_t> offsets_;
  std::vector<uint16_t> steps_;  // [num_tiles, num_steps]
  std::vector<int64_t> num_high_steps_;
#else
  const int16_t* values(int64_t row) const { return values_.data() + row * stride_; }
  void index(int64_t, int64_t) {}

 private:
  typedef int16_t HalfShortVec __attribute__((vector_size(kLanes * 2), aligned(2)));

  void round(int64_t row, const float* x, float inverse) {
    int16_t* values = values_.data() + row * stride_;
    for (int64_t i = 0; i < stride_; i += kLanes) {
      const int64_t rest = std::clamp<int64_t>(num_inputs_ - i, 0, kLanes);
      const IntVec q = inverse == 0 ? IntVec{} : rounded(load_some(x + i, rest), inverse);
      *reinterpret_cast<HalfShortVec*>(values + i) = __builtin_convertvector(q, HalfShortVec);
    }
  }

  std::vector<int16_t> values_;  // [num_rows, stride]
#endif

  static IntVec rounded(Vec x, float inverse) {
    const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: the sum is rounded to an integer, half to even
    return __builtin_convertvector((x * splat(inverse) + shift) - shift, IntVec);
  }

  int64_t num_inputs_ = 0, stride_ = 0, num_steps_ = 0;
  std::vector<float> scales_;
};

}  // namespace
