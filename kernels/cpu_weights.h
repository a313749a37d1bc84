// What the ids of a row weigh, exp(x / temperature - that of the largest), and the sum of it: in float64, or roughly.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "cpu_logit_edits.h"
#include "cpu_noise.h"

namespace {

constexpr double kLeastScore = -707.0;  // what is scored less weighs nothing

inline double multiply_add(double a, double b, double c) {
#if defined(__FMA__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// exp(x) for x <= 0, to the last bit or two; 1e-307 where it would be less.
inline double exp_double(double x) {
  constexpr double kToInteger = 6755399441055744.0;  // 1.5 * 2^52: the integer is in the low bits of the sum
  x = x < kLeastScore ? kLeastScore : x;
  const double shifted = multiply_add(x, 1.4426950408889634, kToInteger), n = shifted - kToInteger;
  double r = multiply_add(n, -6.93147180369123816490e-01, x);
  r = multiply_add(n, -1.90821492927058770002e-10, r);
  double p = 1.0 / 6227020800.0;
  p = multiply_add(p, r, 1.0 / 479001600.0);
  p = multiply_add(p, r, 1.0 / 39916800.0);
  p = multiply_add(p, r, 1.0 / 3628800.0);
  p = multiply_add(p, r, 1.0 / 362880.0);
  p = multiply_add(p, r, 1.0 / 40320.0);
  p = multiply_add(p, r, 1.0 / 5040.0);
  p = multiply_add(p, r, 1.0 / 720.0);
  p = multiply_add(p, r, 1.0 / 120.0);
  p = multiply_add(p, r, 1.0 / 24.0);
  p = multiply_add(p, r, 1.0 / 6.0);
  p = multiply_add(p, r, 0.5);
  p = multiply_add(p, r, 1.0);
  p = multiply_add(p, r, 1.0);
  return std::bit_cast<double>(std::bit_cast<int64_t>(p) + (std::bit_cast<int64_t>(shifted) << 52));
}

inline double sum_strip(const double* lanes) {
  double sums[kStrip];
  std::copy(lanes, lanes + kStrip, sums);
  for (int width = kStrip / 2; width > 0; width /= 2)
    for (int j = 0; j < width; j++) sums[j] += sums[j + width];
  return sums[0];
}

// What a row's logits become: x / temperature - that of the largest.
struct Scale {
  Scale(double temperature, double largest)
      : temperature(temperature), largest(largest), highest(largest / temperature) {}
  double of(double x) const { return x / temperature - highest; }

  const double temperature, largest, highest;
};

// The sum of exp(scaled) over a row.
inline double sum_weights(const float* x, int64_t size, const Scale& scale) {
  const double inverse = 1.0 / scale.temperature, largest = scale.largest;
  double sums[kStrip] = {};
  const int64_t whole = size / kStrip * kStrip;
  for (int64_t i = 0; i < whole; i += kStrip)
    for (int j = 0; j < kStrip; j++) sums[j] += exp_double((static_cast<double>(x[i + j]) - largest) * inverse);
  for (int64_t i = whole; i < size; i++) sums[i - whole] += exp_double((static_cast<double>(x[i]) - largest) * inverse);
  return sum_strip(sums);
}

// The same in float32, four times as fast, and how far it can be from the truth.
struct RoughSum {
  double sum, error;
};

inline float exp_float(float x) {  // -80 <= x <= 0
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23
  const float shifted = multiply_add(x, 1.44269504f, kToInteger), n = shifted - kToInteger;
  const float r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, x));
  float p = 1.0f / 720.0f;
  p = multiply_add(p, r, 1.0f / 120.0f);
  p = multiply_add(p, r, 1.0f / 24.0f);
  p = multiply_add(p, r, 1.0f / 6.0f);
  p = multiply_add(p, r, 0.5f);
  p = multiply_add(p, r, 1.0f);
  p = multiply_add(p, r, 1.0f);
  return std::bit_cast<float>(std::bit_cast<int32_t>(p) + (std::bit_cast<int32_t>(shifted) << 23));
}

inline RoughSum sum_roughly(const float* x, int64_t size, const Scale& scale) {
  const float inverse = static_cast<float>(1.0 / scale.temperature), largest = scale.largest;
  double sums[kStrip] = {}, moments[kStrip] = {};  // of weights, and of weights times what they are the exp of
  for (int64_t start = 0; start < size; start += kGroup) {
    float own[kStrip] = {}, moment[kStrip] = {};
    const int64_t end = std::min(size, start + kGroup), whole = start + (end - start) / kStrip * kStrip;
    const auto add = [&](float value, int j) {
      const float scaled = (value - largest) * inverse, score = scaled < -80.0f ? -80.0f : scaled;
      const float weight = exp_float(score);
      own[j] += weight;
      moment[j] = multiply_add(weight, score, moment[j]);
    };
    for (int64_t i = start; i < whole; i += kStrip)
      for (int j = 0; j < kStrip; j++) add(x[i + j], j);
    for (int64_t i = whole; i < end; i++) add(x[i], i - whole);
    for (int j = 0; j < kStrip; j++) sums[j] += own[j], moments[j] += moment[j];
  }
  const double sum = sum_strip(sums);
  // A score is off by at most 3 roundings of itself, its exp by some 8, a sum of 4 by 3: less than half of this.
  return {sum, 0x1p-22 * (8.0 * sum - 2.0 * sum_strip(moments))};
}

}  // namespace
