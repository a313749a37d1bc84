// Products of attention in float32: keys and values are expanded, and each score and each output is one chain of
// multiply-adds, over the dimensions or the positions in order.
//
// Over rows of bfloat16, queries and weights are rounded to bfloat16 too, and of each pair of neighbours the odd one
// comes first, with what is too small for a normal number taken as 0: the bits of the instruction that multiplies such
// pairs (cpu_pair_products.h), for processors without it. (A build that does not fuse multiply and add, or for another
// processor family, is as near as the formula, but has not the same bits.)

#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu_kv_cache.h"
#include "cpu_tile_scratch.h"

namespace {

template <typename Row>
class FloatProducts {
 public:
  static constexpr bool kIsRounded = std::is_same_v<Row, Bfloat16Row>;
  static constexpr bool kHasOwnQueries = kIsRounded;  // else they are multiplied where they lie
  static constexpr bool kExpands = !std::is_same_v<Row, Float32Row>;

  // In floats, of a row of queries, of the turned keys, of the expanded values of a partition.
  static int64_t query_size(int64_t head_dim) { return head_dim; }
  static int64_t keys_size(int64_t head_dim) { return kKeysAtOnce * head_dim; }
  static int64_t values_size(int64_t head_dim) { return kPartition * head_dim; }

  explicit FloatProducts(const TileScratch& scratch) : t_(scratch) {}

  void take_query(const float* query, float* own) const {
    int64_t d = 0;
    for (; d + kLanes <= t_.head_dim; d += kLanes) store(own + d, Bfloat16Row::nearest(load(query + d)));
    if (d == t_.head_dim) return;
    const int64_t count = t_.head_dim - d;
    store_some(own + d, Bfloat16Row::nearest(load_some(query + d, count)), count);
  }

  // keys[d][v] = dimension d of the kLanes keys `rows`, while fetch_later(d) looks ahead.
  template <typename Fetch>
  void turn_keys(const uint8_t* const* rows, int64_t v, const Fetch& fetch_later) const {
    const int64_t size = t_.head_dim, stride = kKeysAtOnce;
    float scales[kLanes], *turned = t_.keys + v * kLanes;
    for (int j = 0; j < kLanes; j++) scales[j] = Row::scale(rows[j], size);
    int64_t d = 0;
    if constexpr (Row::kPerLane > 1)  // several dimensions in a lane: so much less to turn
      for (constexpr int64_t kStep = Row::kPerLane * kLanes; d + kStep <= size; d += kStep) {
        Vec square[kLanes];
        fetch_later(d);
        for (int j = 0; j < kLanes; j++) square[j] = Float32Row::vector(rows[j] + d * Row::kValueBytes, 0, 1);
        transpose(square);
        for (int j = 0; j < kLanes; j++)
          for (int which = 0; which < Row::kPerLane; which++)
            store(turned + (d + j * Row::kPerLane + which) * stride, Row::unpacked(square[j], which, load(scales)));
      }
    for (; d + kLanes <= size; d += kLanes) {
      Vec square[kLanes];
      fetch_later(d);
      for (int j = 0; j < kLanes; j++) square[j] = Row::vector(rows[j], d, scales[j]);
      transpose(square);
      for (int j = 0; j < kLanes; j++) store(turned + (d + j) * stride, square[j]);
    }
    for (; d < size; d++)
      for (int64_t j = 0; j < kLanes; j++) turned[d * stride + j] = Row::value(rows[j], d, scales[j]);
  }

  // Adds to sums[r][v] what query r gives with the turned keys: independent chains, so that the multipliers are busy.
  template <int kRows, int kVectors>
  void score(const float* const (&queries)[kRows], Vec (&sums)[kRows][kVectors]) const {
    for (int64_t i = 0; i < t_.head_dim; i++) {
      const int64_t d = in_order(i, 0, t_.head_dim);
      Vec keys[kVectors];
      for (int v = 0; v < kVectors; v++) keys[v] = load(t_.keys + (d * kKeyVectors + v) * kLanes);
      for (int r = 0; r < kRows; r++) {
        const Vec value = splat(queries[r][d]);
        for (int v = 0; v < kVectors; v++) sums[r][v] = fma(value, keys[v], sums[r][v]);
      }
    }
  }

  // Keeps exp(score - highest) of positions [i, i + kLanes) in place of the scores; returns it as it is multiplied.
  static Vec keep_weights(float* scores, int64_t i, Vec highest) {
    const Vec score = load(scores + i);
    Vec weights;
    if constexpr (kIsRounded)
      weights = Bfloat16Row::nearest(coarse_exp_nonpositive(score - highest));
    else
      weights = score == splat(-INFINITY) ? Vec{} : exp_nonpositive(score - highest);
    store(scores + i, weights);
    return weights;
  }

  static void clear_weights(float* scores, int64_t begin, int64_t end) {
    std::fill(scores + begin, scores + end, 0.0f);
  }

  // values[i] = the value at position i of the partition, for [first, end).
  void expand_values(int64_t first, int64_t end) const {
    const int64_t size = t_.head_dim;
    for (int64_t i = first; i < end; i++) {
      const uint8_t* row = t_.places[i] + t_.values_offset;
      const float scale = Row::scale(row, size);
      float* values = t_.values + i * size;
      fetch(t_.places[i + kAhead<Row>] + t_.values_offset, Row::size_bytes(size));
      int64_t d = 0;
      for (; d + kLanes <= size; d += kLanes) store(values + d, Row::vector(row, d, scale));
      for (; d < size; d++) values[d] = Row::value(row, d, scale);
    }
  }

  // results[r] = the values at positions [first, end), weighed for row r of the tile.
  template <bool kIsExpanded, int kRows>
  void weigh(int64_t row, int64_t first, int64_t end, float* results) const {
    int64_t d = 0;
    for (; d + kValueVectors * kLanes <= t_.head_dim; d += kValueVectors * kLanes)
      weigh_vectors<kIsExpanded, kRows, kValueVectors>(row, d, first, end, results);
    for (; d + kLanes <= t_.head_dim; d += kLanes)
      weigh_vectors<kIsExpanded, kRows, 1>(row, d, first, end, results);
    for (; d < t_.head_dim; d++)
      for (int r = 0; r < kRows; r++) {
        const float* weights = t_.scores_of(row + r);
        float sum = 0;
        for (int64_t j = first; j < end; j++) {
          const int64_t i = in_order(j, first, end);
          sum = fma(weights[i], one_value<kIsExpanded>(i, d), sum);
        }
        results[r * t_.head_dim + d] = sum;
      }
  }

 private:
  // The i-th of [begin, end) as a chain takes them: where rows are rounded, the odd one of a pair first.
  static int64_t in_order(int64_t i, int64_t begin, int64_t end) {
    if constexpr (!kIsRounded) return i;
    const int64_t other = i ^ 1;
    return begin <= other && other < end ? other : i;
  }

  template <bool kIsExpanded>
  float one_value(int64_t i, int64_t d) const {
    if (kIsExpanded) return t_.values[i * t_.head_dim + d];
    const uint8_t* row = t_.places[i] + t_.values_offset;
    return Row::value(row, d, Row::scale(row, t_.head_dim));
  }

  template <bool kIsExpanded, int kRows, int kVectors>
  void weigh_vectors(int64_t row, int64_t d, int64_t first, int64_t end, float* results) const {
    Vec sums[kRows][kVectors];
    for (int r = 0; r < kRows; r++)
      for (int v = 0; v < kVectors; v++) sums[r][v] = Vec{};
    const float* weights = t_.scores_of(row);
    const int64_t offset = t_.values_offset;
    const auto add = [&](int64_t i) __attribute__((always_inline)) {
      Vec value[kVectors];
      if constexpr (kIsExpanded) {
        for (int v = 0; v < kVectors; v++) value[v] = load(t_.values + i * t_.head_dim + d + v * kLanes);
      } else {
        const uint8_t* stored = t_.places[i] + offset;
        const float scale = Row::scale(stored, t_.head_dim);
        fetch(t_.places[i + kAhead<Row>] + offset + d * Row::kValueBytes, kVectors * kLanes * Row::kValueBytes);
        for (int v = 0; v < kVectors; v++) value[v] = Row::vector(stored, d + v * kLanes, scale);
      }
      for (int r = 0; r < kRows; r++) {
        const Vec weight = splat(weights[r * kScoreStride + i]);
        for (int v = 0; v < kVectors; v++) sums[r][v] = fma(weight, value[v], sums[r][v]);
      }
    };
    int64_t i = first;
    if constexpr (kIsRounded) {
      if (i % 2 != 0 && i < end) add(i++);
      for (; i + 2 <= end; i += 2) add(i + 1), add(i);
    }
    for (; i < end; i++) add(i);
    for (int r = 0; r < kRows; r++)
      for (int v = 0; v < kVectors; v++) store(results + r * t_.head_dim + d + v * kLanes, sums[r][v]);
  }

  const TileScratch& t_;
};

}  // namespace
