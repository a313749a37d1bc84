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

#include "cpu_logit_edits.h"
#include "cpu_noise.h"
#include "cpu_threads.h"
#include "cpu_weights.h"

namespace {

// What a row asks for, and behind it the answer. kernels/cpu_sampling.py lays it out; it is all of 8 bytes.
struct SamplingRow {
  float* logits;          // the model's: what logprobs are of; edited while a token is sampled, and put back
  const RowEdits* edits;  // null: none
  double temperature;    // 0: the likeliest
  double top_p, min_p;
  int64_t top_k;  // 0: off
  uint64_t seed, position;
  int64_t num_top;   // likeliest tokens whose logprobs are told; negative: no logprobs
  int64_t token_id;  // a token whose logprob is wanted, or kSample; then the one sampled, or kNone, or kNotFinite
  double logprob;
};

constexpr int64_t kSample = -1, kNone = -1, kNotFinite = -2;
constexpr double kMostNoise = 36.8;  // -log of the least noise above 0, which is 2^-53
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
  RowEditor editor;
};

inline SamplingScratch& sampling_scratch() {
  static thread_local SamplingScratch scratch;
  return scratch;
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
  Noise(row.seed, row.position).draw(id / 4, words);
  return uniform_of(words[id % 4]);
}

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

// The largest value of each of kStrip runs of kDrawn ids, from `first` on; kForbidden beyond the row.
inline void strip_maxima(const std::vector<float>& maxima, int64_t first, float* largest) {
  constexpr int64_t kGroups = kDrawn / kGroup;
  std::fill(largest, largest + kStrip, kForbidden);
  const int64_t begin = first * kGroups, end = std::min<int64_t>(maxima.size(), begin + kStrip * kGroups);
  for (int64_t i = begin; i < end; i++) {
    float& own = largest[(i - begin) / kGroups];
    own = std::max(own, maxima[i]);
  }
}

// Of all ids up to the last that is kept. Those of a run are drawn for at once, and compared with what its largest
// logit could do.
inline int64_t sample_densely(const SamplingRow& row, const float* x, int64_t size, const Scale& scale,
                              int64_t likeliest, const Scored& last, const std::vector<float>& maxima) {
  Scored best{noisy(0.0, uniform_at(row, likeliest)), likeliest};
  const Noise noise(row.seed, row.position);
  const auto try_run = [&](int64_t start, double highest, uint64_t most) {
    uint64_t words[kDrawn];
    if (!noise.draw_many(start / 4, most, words)) return;
    const int64_t end = std::min(size, start + kDrawn);
    for (int64_t id = start; id < end; id++) {
      const uint64_t word = words[place_of(id - start)];
      if (word > most) continue;
      const Scored plain{scale.of(x[id]), id};
      if (!is_kept(plain, last)) continue;
      const Scored own{noisy(plain.score, uniform_of(word)), id};
      if (own < best) best = own, most = word_of(most_uniform(highest, best.score));
    }
  };
  for (int64_t first = 0; first * kDrawn < size; first += kStrip) {
    float largest[kStrip];
    double highest[kStrip], uniforms[kStrip];
    strip_maxima(maxima, first, largest);
    for (int j = 0; j < kStrip; j++) highest[j] = scale.of(largest[j]);
    for (int j = 0; j < kStrip; j++) uniforms[j] = most_uniform(highest[j], best.score);
    for (int j = 0; j < kStrip && (first + j) * kDrawn < size; j++)
      if (highest[j] >= last.score) try_run((first + j) * kDrawn, highest[j], word_of(uniforms[j]));
  }
  return best.id;
}

// A logit below which no id weighs `least`; some above it do not either.
inline float light_below(const Scale& scale, double least) {
  const double margin = 1e-9 * scale.temperature + 1e-12 * std::fabs(scale.largest);
  const double border = (std::log(least) + scale.highest) * scale.temperature - margin;
  return std::nextafterf(static_cast<float>(border), kForbidden);
}

// `chosen` becomes the ids that weigh `least` or more, in the order of their ids; returns the sum of their weights.
inline double choose_heavy(const float* x, int64_t size, const Scale& scale, double least, SamplingScratch& scratch) {
  const float border = light_below(scale, least);
  double mass = 0.0, weights[2 * kGroup], scores[2 * kGroup];
  int64_t ids[2 * kGroup];
  int count = 0;
  scratch.chosen.clear();
  const auto weigh = [&] {  // many at once, however few a group has
    for (int i = 0; i < count; i++) scores[i] = scale.of(x[ids[i]]);
    for (int i = 0; i < count; i++) weights[i] = exp_double(scores[i]);
    for (int i = 0; i < count; i++)
      if (weights[i] >= least) mass += weights[i], scratch.chosen.push_back({scores[i], ids[i], weights[i]});
    count = 0;
  };
  for (int64_t start = 0; start < size; start += kGroup) {
    if (scratch.maxima[start / kGroup] < border) continue;
    uint64_t bits = at_least(x + start, std::min<int64_t>(kGroup, size - start), border);
    for (; bits != 0; bits &= bits - 1) ids[count++] = start + std::countr_zero(bits);
    if (count >= kGroup) weigh();
  }
  weigh();
  return mass;
}

// Narrows [begin, end) to the bucket of scores in which the weights, the best first, come to `wanted`. Better ones are
// now before it, worse ones behind; returns what the better ones weigh.
inline double find_bucket(double wanted, std::vector<Scored>::iterator& begin, std::vector<Scored>::iterator& end) {
  constexpr int kBuckets = 128;
  const auto bucket_of = [](const Scored& each) { return int(std::min(-8.0 * each.score, kBuckets - 1.0)); };
  double masses[kBuckets] = {}, before = 0.0;
  int last = 0, bucket = 0;
  for (auto each = begin; each != end; each++) {
    const int own = bucket_of(*each);
    masses[own] += each->weight, last = std::max(last, own);
  }
  while (bucket < last && before + masses[bucket] < wanted) before += masses[bucket++];
  begin = std::partition(begin, end, [&](const Scored& each) { return bucket_of(each) < bucket; });
  end = std::partition(begin, end, [&](const Scored& each) { return bucket_of(each) == bucket; });
  return before;
}

// `chosen` becomes the ids of the largest weights that make up top_p of all, at least; the last of them is the worst.
// False where what the sum of all weights may be off by leaves it open which one that is.
inline bool find_nucleus(const SamplingRow& row, const float* x, int64_t size, const Scale& scale,
                         const RoughSum& all, SamplingScratch& scratch) {
  const double total = all.sum, slack = row.top_p * all.error;
  const double wanted = row.top_p * total, rest = (1.0 - row.top_p) * total;
  const double least = 0.999 * rest / size;  // whatever weighs less does not make up the rest, all of it together
  for (double border = std::max(rest / 512, least);; border = std::max(border / 16, least)) {
    const double mass = choose_heavy(x, size, scale, border, scratch);
    if ((mass > 0.0 && mass >= wanted + slack) || !(border > least)) break;
  }
  // The border of the nucleus is looked for in buckets and then in halves: nothing else has to be in order.
  std::vector<Scored>& chosen = scratch.chosen;
  auto begin = chosen.begin(), end = chosen.end();
  double before = find_bucket(wanted, begin, end);
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
  return before >= wanted + slack && before - chosen.back().weight < wanted - slack;
}

inline void nucleus_of(const SamplingRow& row, const float* x, int64_t size, const Scale& scale,
                       SamplingScratch& scratch) {
  if (!find_nucleus(row, x, size, scale, sum_roughly(x, size, scale), scratch))
    find_nucleus(row, x, size, scale, {sum_weights(x, size, scale), 0.0}, scratch);
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

inline int64_t sample_of_top_k(const SamplingRow& row, const float* x, int64_t size, const Scale& scale,
                               SamplingScratch& scratch) {
  std::vector<Scored>& chosen = scratch.chosen;
  largest_of(x, size, row.top_k, scratch.maxima, chosen);
  double total = 0.0;
  for (Scored& each : chosen) {
    each.score = scale.of(each.score);
    total += exp_double(each.score);
  }
  cut_chosen(row, row.top_p < 1.0 ? total : std::numeric_limits<double>::infinity(), chosen);
  return sample_of(row, chosen);
}

inline int64_t sample_randomly(const SamplingRow& row, const float* x, int64_t size, float largest,
                               SamplingScratch& scratch) {
  const Scale scale{row.temperature, largest};
  if (row.top_k > 0 && row.top_k < size) return sample_of_top_k(row, x, size, scale, scratch);
  std::vector<Scored>& chosen = scratch.chosen;
  Scored last{kLeastScore, -1};
  if (row.top_p < 1.0) {
    nucleus_of(row, x, size, scale, scratch);
    last = chosen.back();
  }
  if (row.min_p > 0) {
    const Scored least{std::log(row.min_p), size};
    if (row.top_p >= 1.0) choose_heavy(x, size, scale, 0.999999 * row.min_p, scratch);
    std::erase_if(chosen, [&](const Scored& each) { return !is_kept(each, least); });
    if (least < last) last = least;
  }
  const bool is_cut = row.top_p < 1.0 || row.min_p > 0;
  if (is_cut && static_cast<int64_t>(chosen.size()) < size / kSparse) return sample_of(row, chosen);
  return sample_densely(row, x, size, scale, first_largest(x, size, scratch.maxima, largest), last, scratch.maxima);
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

// The token of a row, kNone or kNotFinite. `largest` is that of x.
inline int64_t sample_from(const SamplingRow& row, const float* x, int64_t size, float largest,
                           SamplingScratch& scratch) {
  if (largest == kForbidden) return kNone;
  if (largest == -kForbidden) return kNotFinite;  // what the request did to its logits overflowed
  if (row.temperature == 0.0) return first_largest(x, size, scratch.maxima, largest);
  return sample_randomly(row, x, size, largest, scratch);
}

inline int64_t sample_edited(const SamplingRow& row, int64_t size, float largest, SamplingScratch& scratch) {
  if (row.edits == nullptr) return sample_from(row, row.logits, size, largest, scratch);
  const float* edited = scratch.editor.edit(*row.edits, row.logits, size, scratch.maxima, largest);
  const int64_t token_id = sample_from(row, edited, size, largest, scratch);
  scratch.editor.undo(row.logits);
  return token_id;
}

inline void sample_row(SamplingRow& row, int64_t size, int64_t* top_ids, double* top_logprobs) {
  SamplingScratch& scratch = sampling_scratch();
  float largest;
  if (!group_maxima(row.logits, size, scratch.maxima, largest)) {
    row.token_id = kNotFinite;
    return;
  }
  if (row.token_id == kSample) {
    row.token_id = sample_edited(row, size, largest, scratch);
    if (row.token_id < 0) return;
    if (row.num_top > 0 && row.edits != nullptr) group_maxima(row.logits, size, scratch.maxima, largest);
  }
  if (row.num_top >= 0) tell_logprobs(row, size, largest, scratch, top_ids, top_logprobs);
}

}  // namespace

// Answers row i of `logits`; its likeliest tokens go to row i of top_ids and top_logprobs, max_top wide.
extern "C" void pdserve_sample(void* rows, int64_t num_rows, float* logits, int64_t stride, int64_t size,
                               int64_t* top_ids, double* top_logprobs, int64_t max_top, int num_threads) {
  SamplingRow* all = static_cast<SamplingRow*>(rows);
  parallel(num_rows, num_threads, [=](int64_t i) {
    all[i].logits = logits + i * stride;
    sample_row(all[i], size, top_ids + i * max_top, top_logprobs + i * max_top);
  });
}
