// Attention of a tile of query rows. The context is cut into partitions of kPartition tokens at absolute positions; each
// partition has its own softmax, and partitions are merged in order. So the result for a token depends neither on the
// chunk in which it was computed nor on the tile of tokens that shared the work.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "cpu_kv_cache.h"
#include "cpu_vectors.h"

namespace {

constexpr int64_t kPartition = 256;
constexpr int64_t kMaxQueryTile = 32;

struct Attention {
  const float* query;  // [num_tokens, num_heads, head_dim], tokens `query_stride` apart
  int64_t query_stride;
  RowCache cache;
  float* output;  // [num_tokens, num_heads, head_dim], contiguous
  int64_t num_heads, num_kv_heads, head_dim;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
};

struct Span {
  int64_t query_start, query_len, context_len;
  const int64_t* block_table;
};

inline int64_t first_visible(const Attention& a, int64_t position) {
  return a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
}

// Query heads of up to kMaxQueryTile tokens that share a KV head. Keys are turned once for all of them, so that a
// vector holds one dimension of kLanes keys and a score is one chain of multiply-adds over the dimensions in order; an
// output is one chain over the positions. A position that a row does not see has the weight 0, which changes no sum.
template <typename Row>
class QueryTile {
 public:
  QueryTile(const Attention& a, const Span& span, int64_t kv_head, int64_t token, int64_t num_tokens)
      : a_(a), span_(span), kv_head_(kv_head), token_(token), num_tokens_(num_tokens),
        group_(a.num_heads / a.num_kv_heads), row_bytes_(Row::size_bytes(a.head_dim)) {}

  int64_t first_partition() const { return first_visible(a_, position(0)) / kPartition; }
  int64_t end_partition() const { return position(num_tokens_ - 1) / kPartition + 1; }

  // Floats of the result of one partition: for each row its values, its highest score and the sum of its weights.
  int64_t result_size() const { return num_rows() * (a_.head_dim + 2); }

  void attend() {
    thread_local std::vector<float> own;
    own.resize(2 * result_size());
    float* merged = own.data();
    start(merged);
    for (int64_t partition = first_partition(); partition < end_partition(); partition++) {
      compute(partition, own.data() + result_size());
      merge(own.data() + result_size(), merged);
    }
    finish(merged);
  }

  void start(float* merged) const {
    std::fill(merged, merged + result_size(), 0.0f);
    std::fill(highest(merged), highest(merged) + num_rows(), -INFINITY);
  }

  // Attends to the positions of one partition.
  void compute(int64_t partition, float* result) {
    thread_local Floats scratch;
    thread_local std::vector<const uint8_t*> places;
    const int64_t keys_size = kKeyVectors * kLanes * a_.head_dim, scores_size = num_rows() * kScoreStride;
    keys_ = scratch.grown(keys_size + scores_size + (is_expanded() ? kPartition * a_.head_dim : 0));
    scores_ = keys_ + keys_size;
    values_ = scores_ + scores_size;
    const int64_t start = partition * kPartition;
    const int64_t first = std::max(start, first_visible(a_, position(0)));
    const int64_t end = std::min(start + kPartition, position(num_tokens_ - 1) + 1);
    places.resize(kPartition + kAhead + kLanes);
    places_ = places.data();
    find_keys(start, start + (first - start) / kKeysAtOnce * kKeysAtOnce, end);
    score_all(start, first, end);
    for (int64_t row = 0; row < num_rows(); row++) soften(row, start, first, end, result);
    if (!is_expanded()) return weigh_all<false>(start, first, end, result);
    expand_values(first - start, end - start);
    weigh_all<true>(start, first, end, result);
  }

  // Adds the result of one partition to what the rows have so far.
  void merge(const float* result, float* merged) const {
    for (int64_t row = 0; row < num_rows(); row++) {
      const float here = highest(result)[row];
      if (here == -INFINITY) continue;
      float& before = highest(merged)[row];
      const float maximum = std::max(before, here);
      const float keep = before == -INFINITY ? 0.0f : exp_nonpositive(before - maximum);
      const float add = exp_nonpositive(here - maximum);
      const float* values = result + row * a_.head_dim;
      float* sums = merged + row * a_.head_dim;
      for (int64_t d = 0; d < a_.head_dim; d++) sums[d] = fma(sums[d], keep, values[d] * add);
      totals(merged)[row] = fma(totals(merged)[row], keep, totals(result)[row] * add);
      before = maximum;
    }
  }

  void finish(const float* merged) const {
    for (int64_t row = 0; row < num_rows(); row++) {
      const int64_t token = span_.query_start + token_ + row / group_, head = kv_head_ * group_ + row % group_;
      float* output = a_.output + (token * a_.num_heads + head) * a_.head_dim;
      const float total = totals(merged)[row];
      for (int64_t d = 0; d < a_.head_dim; d++) output[d] = merged[row * a_.head_dim + d] / total;
    }
  }

 private:
  int64_t num_rows() const { return num_tokens_ * group_; }
  // Values that several tiles of rows need are expanded once for all of them.
  bool is_expanded() const { return !std::is_same_v<Row, Float32Row> && num_rows() > kTileRows; }
  int64_t last_of(int64_t row) const { return position(row / group_); }  // the last position that a row sees
  int64_t position(int64_t i) const { return span_.context_len - span_.query_len + token_ + i; }
  float* highest(float* result) const { return result + num_rows() * a_.head_dim; }
  const float* highest(const float* result) const { return result + num_rows() * a_.head_dim; }
  float* totals(float* result) const { return highest(result) + num_rows(); }
  const float* totals(const float* result) const { return highest(result) + num_rows(); }

  const float* query(int64_t row) const {
    const int64_t token = span_.query_start + token_ + row / group_, head = kv_head_ * group_ + row % group_;
    return a_.query + token * a_.query_stride + head * a_.head_dim;
  }

  // places_[i] = the key at position start + i, for [first, end); beyond the end, the last key again.
  void find_keys(int64_t start, int64_t first, int64_t end) {
    const uint8_t **place = places_ + (first - start), **const begin = place;
    const int64_t block_size = a_.cache.block_size;
    while (first < end) {
      const uint8_t* block = a_.cache.blocks + span_.block_table[first / block_size] * a_.cache.block_stride;
      const uint8_t* key = block + (kv_head_ * block_size + first % block_size) * row_bytes_;
      const int64_t next = std::min(end, first - first % block_size + block_size);
      for (; first < next; first++, key += row_bytes_) *place++ = key;
    }
    const uint8_t** padded = places_ + (place - places_ + kLanes - 1) / kLanes * kLanes;
    std::fill(place, padded, place[-1]);
    // Fetched with the last values: the first keys of the next head, if there is one.
    const int64_t next_key = kv_head_ + 1 < a_.num_kv_heads ? block_size * row_bytes_ - values_offset() : 0;
    for (int64_t i = 0; i < kAhead; i++) padded[i] = begin[i] + next_key;
  }

  int64_t values_offset() const { return a_.num_kv_heads * a_.cache.block_size * row_bytes_; }  // from a key to its value

  void score_all(int64_t start, int64_t first, int64_t end) {
    const int64_t begin = (first - start) / kKeysAtOnce * kKeysAtOnce, num_keys = end - start;
    for (int64_t i = begin; i < num_keys; i += kKeysAtOnce) {
      for (int64_t v = 0; v < kKeyVectors && i + v * kLanes < num_keys; v++)
        turn_keys(i + v * kLanes, begin, num_keys, v);
      for_row_tiles([&](int64_t row, auto count) {
        const int64_t num_seen = std::min(num_keys, last_of(row + count - 1) + 1 - start) - i;
        if (num_seen > 0) score_seen<count, kKeyVectors>(row, i, (num_seen + kLanes - 1) / kLanes);
      });
    }
  }

  // Leaves out the vectors of keys that none of a whole tile's rows sees.
  template <int kRows, int kVectors>
  void score_seen(int64_t row, int64_t offset, int64_t num_vectors) const {
    if constexpr (kRows == kTileRows && kVectors > 1)
      if (num_vectors < kVectors) return score_seen<kRows, kVectors - 1>(row, offset, num_vectors);
    score<kRows, kVectors>(row, offset);
  }

  // Calls body(the first row of a tile, how many rows it has as a constant).
  template <typename Body>
  void for_row_tiles(const Body& body) const {
    int64_t row = 0;
    for (; row + kTileRows <= num_rows(); row += kTileRows) body(row, std::integral_constant<int, kTileRows>{});
    switch (num_rows() - row) {
      case 1: return body(row, std::integral_constant<int, 1>{});
      case 2: return body(row, std::integral_constant<int, 2>{});
      case 3: return body(row, std::integral_constant<int, 3>{});
      case 4: return body(row, std::integral_constant<int, 4>{});
      case 5: return body(row, std::integral_constant<int, 5>{});
      default: return;
    }
  }

  // keys_[d][v] = dimension d of kLanes keys from the i-th on. Those that are kAhead later are fetched meanwhile, or
  // where there are none, the first values: into the second-level cache, since the first has room for so few misses at
  // once that pieces of 4 KiB came at 12.5 GB/s instead of 20.
  void turn_keys(int64_t i, int64_t begin, int64_t num_keys, int64_t v) {
    const uint8_t* const* rows = places_ + i;
    const bool is_key = i + kAhead < num_keys;
    const uint8_t* const* later = places_ + (is_key ? i + kAhead : std::min(begin + i + kAhead - num_keys, kPartition));
    const int64_t offset = is_key ? 0 : values_offset(), stride = kKeyVectors * kLanes;
    float scales[kLanes], *turned = keys_ + v * kLanes;
    for (int j = 0; j < kLanes; j++) scales[j] = Row::scale(rows[j], a_.head_dim);
    int64_t d = 0;
    if constexpr (Row::kPerLane > 1)  // several dimensions in a lane: so much less to turn
      for (constexpr int64_t kStep = Row::kPerLane * kLanes; d + kStep <= a_.head_dim; d += kStep) {
        Vec square[kLanes];
        fetch_keys(later, offset, d);
        for (int j = 0; j < kLanes; j++) square[j] = Float32Row::vector(rows[j] + d * Row::kValueBytes, 0, 1);
        transpose(square);
        for (int j = 0; j < kLanes; j++)
          for (int which = 0; which < Row::kPerLane; which++)
            store(turned + (d + j * Row::kPerLane + which) * stride, Row::unpacked(square[j], which, load(scales)));
      }
    for (; d + kLanes <= a_.head_dim; d += kLanes) {
      Vec square[kLanes];
      fetch_keys(later, offset, d);
      for (int j = 0; j < kLanes; j++) square[j] = Row::vector(rows[j], d, scales[j]);
      transpose(square);
      for (int j = 0; j < kLanes; j++) store(turned + (d + j) * stride, square[j]);
    }
    for (; d < a_.head_dim; d++)
      for (int64_t j = 0; j < kLanes; j++) turned[d * stride + j] = Row::value(rows[j], d, scales[j]);
  }

  static void fetch_keys(const uint8_t* const* rows, int64_t offset, int64_t d) {
    if (d * Row::kValueBytes % kFetchBytes) return;
    for (int j = 0; j < kLanes; j++) __builtin_prefetch(rows[j] + offset + d * Row::kValueBytes, 0, 2);
  }

  // Scores of kRows rows against the turned keys: independent chains, so that the multipliers are kept busy.
  template <int kRows, int kVectors>
  void score(int64_t row, int64_t offset) const {
    const float* queries[kRows];
    Vec sums[kRows][kVectors];
    for (int r = 0; r < kRows; r++) {
      queries[r] = query(row + r);
      for (int v = 0; v < kVectors; v++) sums[r][v] = Vec{};
    }
    for (int64_t d = 0; d < a_.head_dim; d++) {
      Vec keys[kVectors];
      for (int v = 0; v < kVectors; v++) keys[v] = load(keys_ + (d * kKeyVectors + v) * kLanes);
      for (int r = 0; r < kRows; r++) {
        const Vec value = splat(queries[r][d]);
        for (int v = 0; v < kVectors; v++) sums[r][v] = fma(value, keys[v], sums[r][v]);
      }
    }
    for (int r = 0; r < kRows; r++)
      for (int v = 0; v < kVectors; v++) {
        Vec sum = sums[r][v] * splat(a_.scale);
        if (a_.soft_cap > 0)
          for (int i = 0; i < kLanes; i++) sum[i] = a_.soft_cap * std::tanh(sum[i] / a_.soft_cap);
        store(scores_ + (row + r) * kScoreStride + offset + v * kLanes, sum);
      }
  }

  // Scores become weights exp(score - highest); those of positions that the row does not see, 0.
  void soften(int64_t row, int64_t start, int64_t tile_first, int64_t tile_end, float* result) {
    float* scores = scores_ + row * kScoreStride;
    const int64_t last = last_of(row);
    const int64_t begin = (tile_first - start) / kLanes * kLanes, all = padded(tile_end - start);
    const int64_t first = std::clamp(first_visible(a_, last), tile_first, tile_end) - start;
    const int64_t end = std::clamp(last + 1, tile_first, tile_end) - start, seen = first < end ? padded(end) : begin;
    std::fill(scores + begin, scores + std::min(first, seen), -INFINITY);
    std::fill(scores + std::min(end, seen), scores + seen, -INFINITY);
    Vec highs = splat(-INFINITY);
    for (int64_t i = begin; i < seen; i += kLanes) highs = larger(load(scores + i), highs);
    const float high = largest_lane(highs);
    Vec sums = {};
    for (int64_t i = begin; i < seen; i += kLanes) {
      const Vec score = load(scores + i);
      const Vec weights = score == splat(-INFINITY) ? Vec{} : exp_nonpositive(score - splat(high));
      store(scores + i, weights);
      sums += weights;
    }
    std::fill(scores + seen, scores + all, 0.0f);
    highest(result)[row] = high;
    totals(result)[row] = sum_lanes(sums);
  }

  static int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

  // values_[i] = the value at position start + i, for [first, end).
  void expand_values(int64_t first, int64_t end) {
    const int64_t size = a_.head_dim;
    for (int64_t i = first; i < end; i++) {
      const uint8_t* row = places_[i] + values_offset();
      const float scale = Row::scale(row, size);
      float* values = values_ + i * size;
      fetch(places_[i + kAhead] + values_offset(), row_bytes_);
      int64_t d = 0;
      for (; d + kLanes <= size; d += kLanes) store(values + d, Row::vector(row, d, scale));
      for (; d < size; d++) values[d] = Row::value(row, d, scale);
    }
  }

  template <bool kIsExpanded>
  void weigh_all(int64_t start, int64_t first, int64_t end, float* result) const {
    for_row_tiles([&](int64_t row, auto count) {
      const int64_t seen = std::clamp(last_of(row + count - 1) + 1, first, end);
      weigh_rows<kIsExpanded, count>(row, first - start, seen - start, result);
    });
  }

  template <bool kIsExpanded, int kRows>
  void weigh_rows(int64_t row, int64_t first, int64_t end, float* result) const {
    int64_t d = 0;
    for (; d + kValueVectors * kLanes <= a_.head_dim; d += kValueVectors * kLanes)
      weigh<kIsExpanded, kRows, kValueVectors>(row, d, first, end, result);
    for (; d + kLanes <= a_.head_dim; d += kLanes) weigh<kIsExpanded, kRows, 1>(row, d, first, end, result);
    for (; d < a_.head_dim; d++)
      for (int r = 0; r < kRows; r++) {
        const float* weights = scores_ + (row + r) * kScoreStride;
        float sum = 0;
        for (int64_t i = first; i < end; i++) sum = fma(weights[i], one_value<kIsExpanded>(i, d), sum);
        result[(row + r) * a_.head_dim + d] = sum;
      }
  }

  template <bool kIsExpanded>
  float one_value(int64_t i, int64_t d) const {
    if (kIsExpanded) return values_[i * a_.head_dim + d];
    const uint8_t* row = places_[i] + values_offset();
    return Row::value(row, d, Row::scale(row, a_.head_dim));
  }

  template <bool kIsExpanded, int kRows, int kVectors>
  void weigh(int64_t row, int64_t d, int64_t first, int64_t end, float* result) const {
    Vec sums[kRows][kVectors];
    for (int r = 0; r < kRows; r++)
      for (int v = 0; v < kVectors; v++) sums[r][v] = Vec{};
    const float* weights = scores_ + row * kScoreStride;
    const int64_t offset = values_offset();
    for (int64_t i = first; i < end; i++) {
      Vec value[kVectors];
      if constexpr (kIsExpanded) {
        for (int v = 0; v < kVectors; v++) value[v] = load(values_ + i * a_.head_dim + d + v * kLanes);
      } else {
        const uint8_t* stored = places_[i] + offset;
        const float scale = Row::scale(stored, a_.head_dim);
        fetch(places_[i + kAhead] + offset + d * Row::kValueBytes, kVectors * kLanes * Row::kValueBytes);
        for (int v = 0; v < kVectors; v++) value[v] = Row::vector(stored, d + v * kLanes, scale);
      }
      for (int r = 0; r < kRows; r++) {
        const Vec weight = splat(weights[r * kScoreStride + i]);
        for (int v = 0; v < kVectors; v++) sums[r][v] = fma(weight, value[v], sums[r][v]);
      }
    }
    for (int r = 0; r < kRows; r++)
      for (int v = 0; v < kVectors; v++) store(result + (row + r) * a_.head_dim + d + v * kLanes, sums[r][v]);
  }

  static void fetch(const uint8_t* p, int64_t size) {
    for (int64_t i = 0; i < size; i += kFetchBytes) __builtin_prefetch(p + i, 0, 2);
  }

  // A tile of kTileRows rows fills the registers: 24 sums of 32, or 12 of 16.
  static constexpr int kTileRows = 6, kKeyVectors = kAccumulators / kTileRows, kValueVectors = kKeyVectors;
  static constexpr int64_t kScoreStride = kPartition + 16;  // a line more, so that rows share no sets of the cache
  static constexpr int64_t kKeysAtOnce = kKeyVectors * kLanes;
  static constexpr int64_t kAhead = Row::kValueBytes == 4 ? 32 : 48;  // positions, measured against 16 to 128
  static constexpr int64_t kFetchBytes = 4 * kLanes;  // a line, or half of one: rows begin anywhere

  const Attention& a_;
  const Span& span_;
  const int64_t kv_head_, token_, num_tokens_, group_, row_bytes_;
  float *keys_ = nullptr, *scores_ = nullptr, *values_ = nullptr;
  const uint8_t** places_ = nullptr;
};

}  // namespace
