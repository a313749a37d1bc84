// From logits to a token, one row at a time: argmax, or top-k, top-p, min-p and the Gumbel-max trick; and logprobs.
//
//   token = argmax over kept ids of x / temperature - log E(seed, position, id),   E = -log(1 - u),  u in [0, 1)
//
// u is numpy's: Philox 4x64-10 (Salmon et al. 2011), keyed by the seed and counted by the position, 53 bits. Sums run
// over 16 lanes in a fixed order, whatever the instruction set. kernels/sampling.py is the reference.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu_noise.h"
#include "cpu_threads.h"

namespace {

// What a row asks for, and behind it the answer. kernels/cpu_sampling.py lays it out; it is all of 8 bytes.
struct SamplingRow {
  const float* logits;   // the model's: what logprobs are of
  const float* allowed;  // what is sampled from; -inf forbids
  double temperature;    // 0: the likeliest
  double top_p, min_p;
  int64_t top_k;  // 0: off
  uint64_t seed, position;
  int64_t num_top;   // likeliest tokens whose logprobs are told; negative: no logprobs
  int64_t token_id;  // a token whose logprob is wanted, or kSample; then the one sampled, or kNone, or kNotFinite
  double logprob;
};

constexpr int64_t kSample = -1, kNone = -1, kNotFinite = -2;
constexpr int kStrip = 16;
constexpr double kMostNoise = 36.8;  // -log of the least noise above 0, which is 2^-53
constexpr double kLeastScore = -707.0;  // what is scored less weighs nothing
constexpr int64_t kSparse = 8;  // fewer than one id in so many are drawn for one by one

struct Scored {
  double score;
  int64_t id;
  double weight = 0.0;  // exp(score), where it is wanted
  bool operator<(const Scored& other) const { return score != other.score ? score > other.score : id < other.id; }
};

// Memory of one thread, kept from row to row. None of it is as long as a row of a peaked distribution: what a model has
// pushed out of the caches costs more than to compute it again.
struct SamplingScratch {
  std::vector<float> maxima;
  std::vector<Scored> chosen;
};

inline SamplingScratch& sampling_scratch() {
  static thread_local SamplingScratch scratch;
  return scratch;
}

inline double multiply_add(double a, double b, double c) {
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

// The largest value of each group of 64, and of all; false if a value is not finite.
inline bool group_maxima(const float* x, int64_t size, std::vector<float>& maxima, float& largest) {
  uint32_t exponents[kStrip] = {};
  maxima.clear();
  largest = -std::numeric_limits<float>::infinity();
  for (int64_t start = 0; start < size; start += kGroup) {
    float most[kStrip];
    std::fill(most, most + kStrip, -std::numeric_limits<float>::infinity());
    const int64_t end = std::min(size, start + kGroup), whole = start + (end - start) / kStrip * kStrip;
    for (int64_t i = start; i < whole; i += kStrip)
      for (int j = 0; j < kStrip; j++) {
        most[j] = x[i + j] > most[j] ? x[i + j] : most[j];
        const uint32_t exponent = std::bit_cast<uint32_t>(x[i + j]) & 0x7f800000;
        exponents[j] = exponent > exponents[j] ? exponent : exponents[j];
      }
    for (int64_t i = whole; i < end; i++) {
      most[0] = std::max(most[0], x[i]);
      exponents[0] = std::max(exponents[0], std::bit_cast<uint32_t>(x[i]) & 0x7f800000);
    }
    maxima.push_back(*std::max_element(most, most + kStrip));
    largest = std::max(largest, maxima.back());
  }
  return *std::max_element(exponents, exponents + kStrip) != 0x7f800000;
}

// The first id with the largest value.
inline int64_t first_largest(const float* x, int64_t size, const std::vector<float>& maxima, float largest) {
  int64_t i = kGroup * (std::find(maxima.begin(), maxima.end(), largest) - maxima.begin());
  while (i < size && x[i] != largest) i++;
  return i;
}

// The `count` largest values in order, the smaller id first among equals. `maxima` are those of groups of x.
inline void largest_of(const float* x, int64_t size, int64_t count, const std::vector<float>& maxima,
                       std::vector<Scored>& chosen) {
  float border = -std::numeric_limits<float>::infinity();
  if (count <= static_cast<int64_t>(maxima.size())) {  // as many groups have a value that large
    std::vector<float> sorted = maxima;
    std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(), std::greater<float>());
    border = sorted[count - 1];
  }
  chosen.clear();
  for (size_t group = 0; group < maxima.size(); group++) {
    if (maxima[group] < border) continue;
    const int64_t start = kGroup * group, end = std::min(size, start + kGroup);
    for (int64_t i = start; i < end; i++)
      if (x[i] >= border) chosen.push_back({x[i], i});
  }
  count = std::min<int64_t>(count, chosen.size());
  std::partial_sort(chosen.begin(), chosen.begin() + count, chosen.end());
  chosen.resize(count);
}

inline double noisy(double scaled, double uniform) { return scaled - std::log(-std::log1p(-uniform)); }

inline double uniform_at(const SamplingRow& row, int64_t id) {
  uint64_t words[4];
  philox(row.seed, row.position, id / 4, words);
  return uniform_of(words[id % 4]);
}

// What a row's logits become: x / temperature - that of the largest.
struct Scale {
  Scale(double temperature, double largest)
      : temperature(temperature), largest(largest), highest(largest / temperature) {}
  double of(double x) const { return x / temperature - highest; }

  const double temperature, largest, highest;
};

// What is kept: a better score than the last, or its own id and the smaller ones of the same score.
inline bool is_kept(const Scored& own, const Scored& last) {
  return own.score > last.score || (own.score == last.score && own.id <= last.id);
}

// Since E >= u, only where u <= exp(scaled - best) can an id be better than the best so far: few logarithms are taken.
inline double most_uniform(double scaled, double best) {
  return std::isfinite(best) ? 1.000001 * exp_double(std::min(0.0, scaled - best)) : 1.0;
}

inline int64_t sample_of(const SamplingRow& row, const std::vector<Scored>& kept) {
  Scored best{-std::numeric_limits<double>::infinity(), kept.front().id};
  for (const Scored& each : kept) {
    if (each.score + kMostNoise <= best.score) continue;
    const double uniform = uniform_at(row, each.id);
    if (uniform > most_uniform(each.score, best.score)) continue;
    const Scored own{noisy(each.score, uniform), each.id};
    if (own < best) best = own;
  }
  return best.id;
}

// Of all ids up to the last that is kept. A group of ids is drawn for at once, and compared with what its largest
// logit could do.
inline int64_t sample_densely(const SamplingRow& row, int64_t size, const Scale& scale, int64_t likeliest,
                              const Scored& last, const std::vector<float>& maxima) {
  Scored best{noisy(0.0, uniform_at(row, likeliest)), likeliest};
  for (int64_t start = 0; start < size; start += kGroup) {
    const double highest = scale.of(maxima[start / kGroup]);
    if (highest < last.score) continue;
    const int64_t end = std::min(size, start + kGroup);
    const auto limit = [&] { return word_of(most_uniform(highest, best.score)); };
    uint64_t most = limit();
    uint64_t words[kGroup];
    philox_group(row.seed, row.position, start / 4, words);
    uint64_t smallest = words[0];
    for (int i = 1; i < kGroup; i++) smallest = std::min(smallest, words[i]);
    if (smallest > most) continue;
    for (int64_t id = start; id < end; id++) {
      const uint64_t word = words[place_of(id - start)];
      const Scored plain{scale.of(row.allowed[id]), id};
      if (word > most || !is_kept(plain, last)) continue;
      const Scored own{noisy(plain.score, uniform_of(word)), id};
      if (own < best) best = own, most = limit();
    }
  }
  return best.id;
}

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

// `chosen` becomes the ids that weigh `least` or more, in the order of their ids; returns the sum of their weights.
inline double choose_heavy(const float* x, int64_t size, const Scale& scale, double least, SamplingScratch& scratch) {
  double mass = 0.0, weights[kGroup], scores[kGroup];
  scratch.chosen.clear();
  for (int64_t start = 0; start < size; start += kGroup) {
    if (exp_double(scale.of(scratch.maxima[start / kGroup])) < least) continue;
    const int64_t count = std::min<int64_t>(kGroup, size - start);
    for (int64_t j = 0; j < count; j++) {
      scores[j] = scale.of(x[start + j]);
      weights[j] = exp_double(scores[j]);
    }
    for (int64_t j = 0; j < count; j++)
      if (weights[j] >= least) mass += weights[j], scratch.chosen.push_back({scores[j], start + j, weights[j]});
  }
  return mass;
}

// `chosen` becomes the ids of the largest weights that make up top_p of all, at least; the last of them is the worst.
inline void nucleus_of(const SamplingRow& row, int64_t size, const Scale& scale, double total,
                       SamplingScratch& scratch) {
  const double wanted = row.top_p * total, rest = (1.0 - row.top_p) * total;
  const double least = 0.999 * rest / size;  // whatever weighs less does not make up the rest, all of it together
  for (double border = std::max(rest / 32, least);; border = std::max(border / 16, least)) {
    const double mass = choose_heavy(row.allowed, size, scale, border, scratch);
    if ((mass > 0.0 && mass >= wanted) || !(border > least)) break;
  }
  // The border of the nucleus is looked for in halves: nothing else has to be in order.
  std::vector<Scored>& chosen = scratch.chosen;
  auto begin = chosen.begin(), end = chosen.end();
  double before = 0.0;
  while (end - begin > kGroup) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end);
    double mass = before;
    for (auto each = begin; each != middle; each++) mass += each->weight;
    if (mass >= wanted) end = middle; else begin = middle, before = mass;
  }
  std::sort(begin, end);
  do before += begin++->weight; while (begin != end && before < wanted);
  chosen.erase(begin, chosen.end());
}

// Drops from `chosen`, which is in order, what top-p and min-p cut off; the first always stays.
inline void cut_chosen(const SamplingRow& row, double total, std::vector<Scored>& chosen) {
  const double wanted = row.top_p * total, least = row.min_p > 0 ? std::log(row.min_p) : kLeastScore;
  double before = 0.0;
  size_t count = 0;
  for (; count < chosen.size(); count++) {
    if (count > 0 && (before >= wanted || chosen[count].score < least)) break;
    before += exp_double(chosen[count].score);
  }
  chosen.resize(count);
}

inline int64_t sample_of_top_k(const SamplingRow& row, int64_t size, const Scale& scale, SamplingScratch& scratch) {
  std::vector<Scored>& chosen = scratch.chosen;
  largest_of(row.allowed, size, row.top_k, scratch.maxima, chosen);
  double total = 0.0;
  for (Scored& each : chosen) {
    each.score = scale.of(each.score);
    total += exp_double(each.score);
  }
  cut_chosen(row, row.top_p < 1.0 ? total : std::numeric_limits<double>::infinity(), chosen);
  return sample_of(row, chosen);
}

inline int64_t sample_randomly(const SamplingRow& row, int64_t size, float largest, SamplingScratch& scratch) {
  const Scale scale{row.temperature, largest};
  if (row.top_k > 0 && row.top_k < size) return sample_of_top_k(row, size, scale, scratch);
  std::vector<Scored>& chosen = scratch.chosen;
  Scored last{kLeastScore, -1};
  if (row.top_p < 1.0) {
    nucleus_of(row, size, scale, sum_weights(row.allowed, size, scale), scratch);
    last = chosen.back();
  }
  if (row.min_p > 0) {
    const Scored least{std::log(row.min_p), size};
    if (row.top_p >= 1.0) choose_heavy(row.allowed, size, scale, 0.999999 * row.min_p, scratch);
    std::erase_if(chosen, [&](const Scored& each) { return !is_kept(each, least); });
    if (least < last) last = least;
  }
  const bool is_cut = row.top_p < 1.0 || row.min_p > 0;
  if (is_cut && static_cast<int64_t>(chosen.size()) < size / kSparse) return sample_of(row, chosen);
  return sample_densely(row, size, scale, first_largest(row.allowed, size, scratch.maxima, largest), last,
                        scratch.maxima);
}

// The logprob of the row's token and its likeliest ones, most likely first, as float32 has them.
inline void tell_logprobs(SamplingRow& row, int64_t size, float largest, SamplingScratch& scratch, int64_t* top_ids,
                          double* top_logprobs) {
  double sums[kStrip] = {};
  const int64_t whole = size / kStrip * kStrip;
  for (int64_t i = 0; i < whole; i += kStrip)
    for (int j = 0; j < kStrip; j++) sums[j] += exp_double(static_cast<double>(row.logits[i + j]) - largest);
  for (int64_t i = whole; i < size; i++) sums[i - whole] += exp_double(static_cast<double>(row.logits[i]) - largest);
  const double log_sum = std::log(sum_strip(sums));
  const auto logprob = [&](int64_t id) {
    return static_cast<float>(static_cast<double>(row.logits[id]) - largest - log_sum);
  };
  row.logprob = logprob(row.token_id);
  if (row.num_top == 0) return;
  largest_of(row.logits, size, row.num_top, scratch.maxima, scratch.chosen);
  for (size_t i = 0; i < scratch.chosen.size(); i++) {
    top_ids[i] = scratch.chosen[i].id;
    top_logprobs[i] = logprob(top_ids[i]);
  }
}

inline void sample_row(SamplingRow& row, int64_t size, int64_t* top_ids, double* top_logprobs) {
  SamplingScratch& scratch = sampling_scratch();
  float largest;
  if (!group_maxima(row.logits, size, scratch.maxima, largest)) {
    row.token_id = kNotFinite;
    return;
  }
  if (row.token_id == kSample) {
    float most = largest;
    if (row.allowed != row.logits) group_maxima(row.allowed, size, scratch.maxima, most);
    if (most == -std::numeric_limits<float>::infinity()) return;  // kNone
    if (most == std::numeric_limits<float>::infinity()) {  // what the request did to its logits overflowed
      row.token_id = kNotFinite;
      return;
    }
    row.token_id = row.temperature == 0.0 ? first_largest(row.allowed, size, scratch.maxima, most)
                                          : sample_randomly(row, size, most, scratch);
    if (row.num_top > 0 && row.allowed != row.logits) group_maxima(row.logits, size, scratch.maxima, largest);
  }
  if (row.num_top >= 0) tell_logprobs(row, size, largest, scratch, top_ids, top_logprobs);
}

}  // namespace

// Answers each row; its likeliest tokens go to row i of top_ids and top_logprobs, max_top wide.
extern "C" void pdserve_sample(void* rows, int64_t num_rows, int64_t size, int64_t* top_ids, double* top_logprobs,
                               int64_t max_top, int num_threads) {
  SamplingRow* all = static_cast<SamplingRow*>(rows);
  parallel(num_rows, num_threads, [=](int64_t i) {
    sample_row(all[i], size, top_ids + i * max_top, top_logprobs + i * max_top);
  });
}
