// A row of logits as a request edits it: kernels/logit_edits.py is the reference. And the largest of each group of ids.
//
//   x += bias;   x = x > 0 ? x / repetition : x * repetition  (seen);   x -= presence + frequency * count  (generated)

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "cpu_noise.h"
#include "cpu_vectors.h"

namespace {

constexpr int kStrip = 16;
constexpr int kGroup = 64;  // ids of which the largest value is kept
constexpr float kForbidden = -std::numeric_limits<float>::infinity();

// kernels/cpu_sampling.py lays it out. An id beyond the row is passed over.
struct RowEdits {
  const int32_t* bias_ids;
  const float* biases;
  int64_t num_biases;
  const int32_t* seen_ids;
  const int32_t* counts;  // how often each was generated
  int64_t num_seen;
  const int32_t* allowed_ids;
  int64_t num_allowed;  // negative: all
  const uint8_t* banned;  // one byte for each id of the row; null: none
  float repetition, presence, frequency, unused;
};

// The largest of a group of `count` values; the exponents of its largest by magnitude are gathered in `exponents`.
inline float group_largest(const float* x, int64_t count, IntVec& exponents) {
  Vec most = splat(kForbidden);
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Vec own = load(x + i);
    most = larger(own, most);
    const IntVec exponent = (IntVec)own & 0x7f800000;
    exponents = exponent > exponents ? exponent : exponents;
  }
  float largest = largest_lane(most);
  for (int64_t i = whole; i < count; i++) {
    largest = std::max(largest, x[i]);
    exponents[0] = std::max(exponents[0], std::bit_cast<int32_t>(x[i]) & 0x7f800000);
  }
  return largest;
}

inline float largest_group(const std::vector<float>& maxima) {
  const int64_t size = maxima.size(), whole = size / kLanes * kLanes;
  Vec most = splat(kForbidden);
  for (int64_t i = 0; i < whole; i += kLanes) most = larger(load(maxima.data() + i), most);
  float largest = largest_lane(most);
  for (int64_t i = whole; i < size; i++) largest = std::max(largest, maxima[i]);
  return largest;
}

// The largest value of each group of 64, and of all; false if a value is not finite.
inline bool group_maxima(const float* x, int64_t size, std::vector<float>& maxima, float& largest) {
  IntVec exponents = {};
  maxima.resize((size + kGroup - 1) / kGroup);
  const int64_t whole = size / kGroup;
  for (int64_t group = 0; group < whole; group++) maxima[group] = group_largest(x + kGroup * group, kGroup, exponents);
  if (size % kGroup) maxima[whole] = group_largest(x + kGroup * whole, size % kGroup, exponents);
  largest = largest_group(maxima);
  bool is_finite = true;
  for (int lane = 0; lane < kLanes; lane++) is_finite &= exponents[lane] != 0x7f800000;
  return is_finite;
}

// What edits do to a few ids is done in the row itself and taken back: a model's row is the largest thing that sampling
// touches, and a copy of it costs more than all edits. What bans by default is done in a copy, in memory that is kept.
class RowEditor {
 public:
  // Returns the edited row. Its maxima, which are those of x before, are brought up to date, and `largest` with them.
  const float* edit(const RowEdits& edits, float* x, int64_t size, std::vector<float>& maxima, float& largest) {
    before_.clear();
    add_biases(edits, x, size);
    penalize(edits, x, size);
    if (edits.num_allowed < 0 && edits.banned == nullptr) {
      refresh(x, size, maxima);
      largest = largest_group(maxima);
      return x;
    }
    const float* row = edits.num_allowed < 0 ? x : keep_allowed(edits, x, size);
    if (edits.banned != nullptr) row = drop_banned(edits, row, size);
    group_maxima(row, size, maxima, largest);
    return row;
  }

  // Makes x what it was.
  void undo(float* x) const {
    for (auto each = before_.rbegin(); each != before_.rend(); each++) x[each->first] = each->second;
  }

 private:
  void add_biases(const RowEdits& edits, float* x, int64_t size) {
    for (int64_t i = 0; i < edits.num_biases; i++) {
      const int32_t id = edits.bias_ids[i];
      if (id >= size) continue;
      before_.emplace_back(id, x[id]);
      x[id] += edits.biases[i];
    }
  }

  void penalize(const RowEdits& edits, float* x, int64_t size) {
    for (int64_t i = 0; i < edits.num_seen; i++) {
      const int32_t id = edits.seen_ids[i], count = edits.counts[i];
      if (id >= size) continue;
      const float own = x[id];
      before_.emplace_back(id, own);
      const float penalized = own > 0 ? own / edits.repetition : own * edits.repetition;
      x[id] = count == 0 ? penalized : penalized - (edits.presence + edits.frequency * static_cast<float>(count));
    }
  }

  // An edit changes the largest of its group only where it was that, or has become it.
  void refresh(const float* x, int64_t size, std::vector<float>& maxima) const {
    IntVec exponents = {};
    const auto update = [&](int64_t group) {
      const int64_t start = kGroup * group;
      maxima[group] = group_largest(x + start, std::min<int64_t>(kGroup, size - start), exponents);
    };
    if (before_.size() >= maxima.size()) {
      for (size_t group = 0; group < maxima.size(); group++) update(group);
      return;
    }
    for (const auto& [id, before] : before_)
      if (const float most = maxima[id / kGroup]; before >= most || x[id] > most) update(id / kGroup);
  }

  const float* keep_allowed(const RowEdits& edits, const float* x, int64_t size) {
    copy_.assign(size, kForbidden);
    for (int64_t i = 0; i < edits.num_allowed; i++)
      if (const int32_t id = edits.allowed_ids[i]; id < size) copy_[id] = x[id];
    return copy_.data();
  }

  const float* drop_banned(const RowEdits& edits, const float* x, int64_t size) {
    copy_.resize(size);  // x may be what it holds
    for (int64_t i = 0; i < size; i++) copy_[i] = edits.banned[i] ? kForbidden : x[i];
    return copy_.data();
  }

  std::vector<std::pair<int32_t, float>> before_;  // (id, logit) in the order of the edits
  std::vector<float> copy_;
};

}  // namespace
