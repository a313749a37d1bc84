// The KV cache in another format than the activations: rows of bfloat16, float16, or int8 with a scale. The
// rule of cpu_kernels.cpp holds here, too: a token's result depends on its own query and context alone.
//
// A row is one head of one token. It is written once, rounded; attention expands rows to float32 as it reads them,
// once for all queries that share them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_threads.h"
#include "cpu_vectors.h"

namespace {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

struct Bfloat16Row {
  static int64_t size_bytes(int64_t head_dim) { return 2 * head_dim; }

  static void write(const float* x, int64_t head_dim, uint8_t* row) {
    for (int64_t d = 0; d < head_dim; d++) {
      const uint32_t bits = bits_of(x[d]);
      const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
      const uint16_t half = x[d] != x[d] ? 0x7fc0 : rounded;
      std::memcpy(row + 2 * d, &half, 2);
    }
  }

  static void expand(const uint8_t* row, int64_t head_dim, float* x) {
    for (int64_t d = 0; d < head_dim; d++) {
      uint16_t half;
      std::memcpy(&half, row + 2 * d, 2);
      x[d] = float_of(uint32_t{half} << 16);
    }
  }
};

struct Float16Row {
  static int64_t size_bytes(int64_t head_dim) { return 2 * head_dim; }

  static uint16_t round(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;   // not a number
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds beyond 65504
    // Below the normal range an addition rounds at the place of the last bit: 0.5 has its own 2^-24 away.
    if (magnitude < 0x38800000) return sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000);
    return sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }

  static void write(const float* x, int64_t head_dim, uint8_t* row) {
    for (int64_t d = 0; d < head_dim; d++) {
      const uint16_t half = round(x[d]);
      std::memcpy(row + 2 * d, &half, 2);
    }
  }

  static void expand(const uint8_t* row, int64_t head_dim, float* x) {
    for (int64_t d = 0; d < head_dim; d++) {
      uint16_t half;
      std::memcpy(&half, row + 2 * d, 2);
      const uint32_t magnitude = half & 0x7fffu;
      const float scaled = float_of(magnitude << 13) * 0x1p112f;
      const uint32_t bits = magnitude >= 0x7c00 ? 0x7f800000 | magnitude << 13 : bits_of(scaled);
      x[d] = float_of(bits | (half & 0x8000u) << 16);
    }
  }
};

// head_dim int8 values, then their scale as float32: x = value * scale, scale = max |x| / 127.
struct Int8Row {
  static int64_t size_bytes(int64_t head_dim) { return head_dim + 4; }

  static void write(const float* x, int64_t head_dim, uint8_t* row) {
    float largest = 0;
    bool is_finite = true;
    for (int64_t d = 0; d < head_dim; d++) {
      largest = std::max(largest, std::fabs(x[d]));
      is_finite &= std::isfinite(x[d]);
    }
    const float scale = is_finite ? largest / 127 : NAN;
    for (int64_t d = 0; d < head_dim; d++) {
      const float value = scale > 0 ? std::nearbyint(x[d] / scale) : 0.0f;
      row[d] = static_cast<uint8_t>(static_cast<int8_t>(std::min(127.0f, std::max(-127.0f, value))));
    }
    std::memcpy(row + head_dim, &scale, 4);
  }

  static void expand(const uint8_t* row, int64_t head_dim, float* x) {
    float scale;
    std::memcpy(&scale, row + head_dim, 4);
    for (int64_t d = 0; d < head_dim; d++) x[d] = static_cast<int8_t>(row[d]) * scale;
  }
};

struct RowCache {
  uint8_t* blocks;       // one layer: [num_blocks, 2, num_kv_heads, block_size, bytes of a row]
  int64_t block_stride;  // bytes from one block to the next
  int64_t num_kv_heads, head_dim, block_size;
};

struct RowAttention {
  RowCache cache;
  const float* query;  // [num_tokens, num_heads, head_dim], tokens `query_stride` apart
  int64_t query_stride;
  float* output;  // [num_tokens, num_heads, head_dim], contiguous
  int64_t num_heads;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
};

struct RowSpan {
  int64_t query_start, query_len, context_len;
  const int64_t* block_table;
};

constexpr int64_t kRowPartition = 256, kRowQueryTile = 16;  // tokens

// The query heads of up to kRowQueryTile tokens that share a KV head. The context is cut into partitions at absolute
// positions, each with a softmax of its own, merged in order.
template <typename Row>
class RowTile {
 public:
  RowTile(const RowAttention& a, const RowSpan& span, int64_t kv_head, int64_t token, int64_t num_tokens)
      : a_(a), span_(span), dim_(a.cache.head_dim), kv_head_(kv_head), group_(a.num_heads / a.cache.num_kv_heads),
        first_position_(span.context_len - span.query_len + token), first_row_(span.query_start + token),
        num_rows_(num_tokens * group_) {}

  void attend() {
    thread_local std::vector<float> scratch;
    scratch.resize(2 * dim_ * kLanes + num_rows_ * (kRowPartition + 2 * dim_ + 4));
    keys_ = scratch.data();
    rows_ = keys_ + dim_ * kLanes;
    scores_ = rows_ + dim_ * kLanes;
    values_ = scores_ + num_rows_ * kRowPartition;
    merged_ = values_ + num_rows_ * dim_;
    maxima_ = merged_ + num_rows_ * dim_;
    totals_ = maxima_ + num_rows_;
    highest_ = totals_ + num_rows_;
    sums_ = highest_ + num_rows_;
    std::fill(merged_, merged_ + num_rows_ * dim_, 0.0f);
    std::fill(maxima_, maxima_ + num_rows_, -INFINITY);
    std::fill(totals_, totals_ + num_rows_, 0.0f);
    const int64_t begin = first_visible(0), end = position(num_rows_ - 1) + 1;
    for (int64_t start = begin / kRowPartition * kRowPartition; start < end; start += kRowPartition)
      partition(start, std::max(start, begin), std::min(start + kRowPartition, end));
    for (int64_t row = 0; row < num_rows_; row++) {
      float* output = a_.output + (token(row) * a_.num_heads + head(row)) * dim_;
      for (int64_t d = 0; d < dim_; d++) output[d] = merged_[row * dim_ + d] / totals_[row];
    }
  }

 private:
  int64_t position(int64_t row) const { return first_position_ + row / group_; }
  int64_t token(int64_t row) const { return first_row_ + row / group_; }
  int64_t head(int64_t row) const { return kv_head_ * group_ + row % group_; }
  int64_t first_visible(int64_t row) const {
    return a_.window > 0 ? std::max<int64_t>(0, position(row) - a_.window + 1) : 0;
  }

  void expand(int64_t position, bool is_value, float* x) const {
    const RowCache& c = a_.cache;
    const int64_t row = (is_value * c.num_kv_heads + kv_head_) * c.block_size + position % c.block_size;
    const int64_t block = span_.block_table[position / c.block_size];
    Row::expand(c.blocks + block * c.block_stride + row * Row::size_bytes(dim_), dim_, x);
  }

  // Adds tokens [first, end) of the partition that begins at `start`.
  void partition(int64_t start, int64_t first, int64_t end) {
    // Vectors of scores begin at fixed positions, so that lane and order of a token are the same for every tile.
    for (int64_t p = start + (first - start) / kLanes * kLanes; p < end; p += kLanes) {
      turn_keys(p, first, end);
      int64_t row = 0;
      for (; row + 6 <= num_rows_; row += 6) score<6>(row, p - start);
      for (; row < num_rows_; row++) score<1>(row, p - start);
    }
    for (int64_t row = 0; row < num_rows_; row++) weigh(row, start);
    std::fill(values_, values_ + num_rows_ * dim_, 0.0f);
    for (int64_t p = first; p < end; p += kLanes) add_values(p, std::min<int64_t>(kLanes, end - p), start);
    for (int64_t row = 0; row < num_rows_; row++)
      if (highest_[row] != -INFINITY) merge(row);
  }

  void turn_keys(int64_t p, int64_t first, int64_t end) {
    for (int64_t i = 0; i < kLanes; i++) {
      expand(std::min(std::max(p + i, first), end - 1), false, rows_);
      for (int64_t d = 0; d < dim_; d++) keys_[d * kLanes + i] = rows_[d];
    }
  }

  template <int kRows>
  void score(int64_t row, int64_t offset) {
    const float* queries[kRows];
    Vec sums[kRows];
    for (int r = 0; r < kRows; r++) {
      queries[r] = a_.query + token(row + r) * a_.query_stride + head(row + r) * dim_;
      sums[r] = Vec{};
    }
    for (int64_t d = 0; d < dim_; d++) {
      const Vec keys = load(keys_ + d * kLanes);
      for (int r = 0; r < kRows; r++) sums[r] = fma(splat(queries[r][d]), keys, sums[r]);
    }
    for (int r = 0; r < kRows; r++) {
      Vec sum = sums[r] * splat(a_.scale);
      if (a_.soft_cap > 0)
        for (int i = 0; i < kLanes; i++) sum[i] = a_.soft_cap * std::tanh(sum[i] / a_.soft_cap);
      store(scores_ + (row + r) * kRowPartition + offset, sum);
    }
  }

  // Turns the scores of a row into weights relative to the highest of them; what the row may not see weighs nothing.
  void weigh(int64_t row, int64_t start) {
    float* scores = scores_ + row * kRowPartition;
    const int64_t first = std::max<int64_t>(0, first_visible(row) - start);
    const int64_t end = std::min(kRowPartition, position(row) + 1 - start);
    highest_[row] = -INFINITY;
    if (first >= end) return;
    for (int64_t i = first / kLanes * kLanes; i < first; i++) scores[i] = -INFINITY;
    for (int64_t i = end; i % kLanes; i++) scores[i] = -INFINITY;
    for (int64_t i = first; i < end; i++) highest_[row] = std::max(highest_[row], scores[i]);
    Vec sums = {};
    for (int64_t i = first / kLanes * kLanes; i < end; i += kLanes) {
      const Vec score = load(scores + i);
      const Vec weights = score == splat(-INFINITY) ? Vec{} : exp_nonpositive(score - splat(highest_[row]));
      store(scores + i, weights);
      sums += weights;
    }
    sums_[row] = sum_lanes(sums);
  }

  // values += weight * value for `count` tokens from p, in order, for each row that sees them.
  void add_values(int64_t p, int64_t count, int64_t start) {
    for (int64_t i = 0; i < count; i++) expand(p + i, true, rows_ + i * dim_);
    for (int64_t row = 0; row < num_rows_; row++) {
      const int64_t begin = std::max<int64_t>(0, first_visible(row) - p), end = std::min(count, position(row) + 1 - p);
      const float* weights = scores_ + row * kRowPartition + (p - start);
      float* values = values_ + row * dim_;
      int64_t d = 0;
      for (; d + 4 * kLanes <= dim_; d += 4 * kLanes) add<4>(weights, begin, end, d, values);
      for (; d + kLanes <= dim_; d += kLanes) add<1>(weights, begin, end, d, values);
      for (; d < dim_; d++)
        for (int64_t i = begin; i < end; i++) values[d] = fma(weights[i], rows_[i * dim_ + d], values[d]);
    }
  }

  template <int kVectors>
  void add(const float* weights, int64_t begin, int64_t end, int64_t d, float* values) const {
    Vec sums[kVectors];
    for (int v = 0; v < kVectors; v++) sums[v] = load(values + d + v * kLanes);
    for (int64_t i = begin; i < end; i++)
      for (int v = 0; v < kVectors; v++)
        sums[v] = fma(splat(weights[i]), load(rows_ + i * dim_ + d + v * kLanes), sums[v]);
    for (int v = 0; v < kVectors; v++) store(values + d + v * kLanes, sums[v]);
  }

  void merge(int64_t row) {
    const float maximum = std::max(maxima_[row], highest_[row]);
    const float keep = maxima_[row] == -INFINITY ? 0.0f : exp_nonpositive(maxima_[row] - maximum);
    const float add = exp_nonpositive(highest_[row] - maximum);
    float* merged = merged_ + row * dim_;
    for (int64_t d = 0; d < dim_; d++) merged[d] = fma(merged[d], keep, values_[row * dim_ + d] * add);
    totals_[row] = fma(totals_[row], keep, sums_[row] * add);
    maxima_[row] = maximum;
  }

  const RowAttention& a_;
  const RowSpan& span_;
  const int64_t dim_, kv_head_, group_, first_position_, first_row_, num_rows_;
  float *keys_ = nullptr, *rows_ = nullptr, *scores_ = nullptr, *values_ = nullptr, *merged_ = nullptr;
  float *maxima_ = nullptr, *totals_ = nullptr, *highest_ = nullptr, *sums_ = nullptr;
};

template <typename Row>
void attend_rows(const RowAttention& a, const std::vector<RowSpan>& spans, int num_threads) {
  std::vector<int64_t> starts(spans.size() + 1, 0);  // tiles before each span
  for (size_t s = 0; s < spans.size(); s++)
    starts[s + 1] = starts[s] + (spans[s].query_len + kRowQueryTile - 1) / kRowQueryTile;
  parallel(starts.back() * a.cache.num_kv_heads, num_threads, [&](int64_t task) {
    const int64_t tile = task / a.cache.num_kv_heads;
    const int64_t s = std::upper_bound(starts.begin(), starts.end(), tile) - starts.begin() - 1;
    const int64_t token = (tile - starts[s]) * kRowQueryTile;
    const int64_t num_tokens = std::min(kRowQueryTile, spans[s].query_len - token);
    RowTile<Row>(a, spans[s], task % a.cache.num_kv_heads, token, num_tokens).attend();
  });
}

// Keys and values of one token: `heads` holds 2 * num_kv_heads heads.
template <typename Row>
void store_rows(const RowCache& c, const float* heads, int64_t slot) {
  uint8_t* rows = c.blocks + slot / c.block_size * c.block_stride + slot % c.block_size * Row::size_bytes(c.head_dim);
  for (int64_t h = 0; h < 2 * c.num_kv_heads; h++)
    Row::write(heads + h * c.head_dim, c.head_dim, rows + h * c.block_size * Row::size_bytes(c.head_dim));
}

enum RowFormat { kBfloat16 = 0, kFloat16 = 1, kInt8 = 2 };

}  // namespace
