// Attention of a tile of query rows. The context is cut into partitions of kPartition tokens at absolute positions; each
// partition has its own softmax, and partitions are merged in order. So the result for a token depends neither on the
// chunk in which it was computed nor on the tile of tokens that shared the work.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "cpu_kv_cache.h"
#include "cpu_pair_products.h"
#include "cpu_tile_scratch.h"
#include "cpu_vectors.h"

namespace {

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
// vector holds a dimension (or a pair of them) of kLanes keys and a score is one chain of multiply-adds over the
// dimensions; an output is one chain over the positions. A position that a row does not see has the weight 0, which
// changes no sum. A row's weights are divided by the sum of what is multiplied, so that an output is a mean of values.
template <typename Row>
class QueryTile {
 public:
  QueryTile(const Attention& a, const Span& span, int64_t kv_head, int64_t token, int64_t num_tokens)
      : a_(a), span_(span), kv_head_(kv_head), token_(token), num_tokens_(num_tokens),
        group_(a.num_heads / a.num_kv_heads), row_bytes_(Row::size_bytes(a.head_dim)) {}

  // Products of pairs take subnormal numbers as 0; what is around them does so too, on every build. Functions that a
  // guard of the caller is to cover are not inlined, so that none of it is computed outside.
  static constexpr bool kHasSubnormals = !std::is_same_v<Row, Bfloat16Row>;

  int64_t first_partition() const { return first_visible(a_, position(0)) / kPartition; }
  int64_t end_partition() const { return position(num_tokens_ - 1) / kPartition + 1; }

  // Floats of the result of one partition: for each row its values, its highest score and the sum of its weights.
  int64_t result_size() const { return num_rows() * (a_.head_dim + 2); }

  __attribute__((noinline)) void attend() {
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
  __attribute__((noinline)) void compute(int64_t partition, float* result) {
    const int64_t start = partition * kPartition;
    const int64_t first = std::max(start, first_visible(a_, position(0)));
    const int64_t end = std::min(start + kPartition, position(num_tokens_ - 1) + 1);
    lay_out();
    find_keys(start, first, end);
    score_all(start, first, end);
    soften_all(start, first, end, result);
    if (!is_expanded()) return weigh_all<false>(start, first, end, result);
    Products(scratch_).expand_values(first - start, end - start);
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
  typedef typename ProductsOf<Row>::Type Products;

  void lay_out() {
    thread_local Floats memory;
    thread_local std::vector<const uint8_t*> places;
    const int64_t size = a_.head_dim, query_size = Products::kHasOwnQueries ? Products::query_size(size) : 0;
    const int64_t keys_size = Products::keys_size(size), scores_size = num_rows() * kScoreStride;
    const int64_t values_size = is_expanded() ? Products::values_size(size) : 0;
    places.resize(kPartition + kAhead<Row> + kLanes);
    float* keys = memory.grown(keys_size + scores_size + values_size + num_rows() * query_size);
    float *scores = keys + keys_size, *values = scores + scores_size, *queries = values + values_size;
    scratch_ = TileScratch{size, values_offset(), places.data(), keys, scores, values, queries};
    if constexpr (Products::kHasOwnQueries)
      for (int64_t row = 0; row < num_rows(); row++)
        Products(scratch_).take_query(query(row), queries + row * query_size);
  }

  int64_t num_rows() const { return num_tokens_ * group_; }
  // Values that several tiles of rows need are expanded once for all of them.
  bool is_expanded() const { return Products::kExpands && num_rows() > kQueryRows; }
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

  const float* multiplied_query(int64_t row) const {
    if constexpr (!Products::kHasOwnQueries) return query(row);
    return scratch_.queries + row * Products::query_size(a_.head_dim);
  }

  // places[i] = the key at position start + i, for [first, end); before the first and beyond the end, the nearest.
  void find_keys(int64_t start, int64_t first, int64_t end) {
    const uint8_t **const begin = scratch_.places + begin_of(first - start);
    const uint8_t **const found = scratch_.places + (first - start), **place = found;
    const int64_t block_size = a_.cache.block_size;
    while (first < end) {
      const uint8_t* block = a_.cache.blocks + span_.block_table[first / block_size] * a_.cache.block_stride;
      const uint8_t* key = block + (kv_head_ * block_size + first % block_size) * row_bytes_;
      const int64_t next = std::min(end, first - first % block_size + block_size);
      for (; first < next; first++, key += row_bytes_) *place++ = key;
    }
    std::fill(begin, found, *found);
    const uint8_t** padded = scratch_.places + (place - scratch_.places + kLanes - 1) / kLanes * kLanes;
    std::fill(place, padded, place[-1]);
    // Fetched with the last values: the first keys of the next head, if there is one.
    const int64_t next_key = kv_head_ + 1 < a_.num_kv_heads ? block_size * row_bytes_ - values_offset() : 0;
    for (int64_t i = 0; i < kAhead<Row>; i++) padded[i] = begin[i] + next_key;
  }

  static int64_t begin_of(int64_t first) { return first / kKeysAtOnce * kKeysAtOnce; }

  int64_t values_offset() const { return a_.num_kv_heads * a_.cache.block_size * row_bytes_; }  // from a key to its value

  void score_all(int64_t start, int64_t first, int64_t end) {
    const int64_t begin = begin_of(first - start), num_keys = end - start;
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
    if constexpr (kRows == kQueryRows && kVectors > 1)
      if (num_vectors < kVectors) return score_seen<kRows, kVectors - 1>(row, offset, num_vectors);
    score<kRows, kVectors>(row, offset);
  }

  // Calls body(the first row of a tile, how many rows it has as a constant).
  template <typename Body>
  void for_row_tiles(const Body& body) const {
    int64_t row = 0;
    for (; row + kQueryRows <= num_rows(); row += kQueryRows) body(row, std::integral_constant<int, kQueryRows>{});
    switch (num_rows() - row) {
      case 1: return body(row, std::integral_constant<int, 1>{});
      case 2: return body(row, std::integral_constant<int, 2>{});
      case 3: return body(row, std::integral_constant<int, 3>{});
      case 4: return body(row, std::integral_constant<int, 4>{});
      case 5: return body(row, std::integral_constant<int, 5>{});
      default: return;
    }
  }

  // Keys that are kAhead later than those that are turned are fetched meanwhile, or where there are none, the first
  // values: into the second-level cache, since the first has room for so few misses at once that pieces of 4 KiB came
  // at 12.5 GB/s instead of 20. Inlined into all that surrounds it, its squares spill: a decode step's attention over
  // int8 took 8 % longer.
  __attribute__((noinline)) void turn_keys(int64_t i, int64_t begin, int64_t num_keys, int64_t v) {
    constexpr int64_t kLater = kAhead<Row>;
    const bool is_key = i + kLater < num_keys;
    const int64_t offset = is_key ? 0 : values_offset();
    const int64_t from = is_key ? i + kLater : std::min(begin + i + kLater - num_keys, kPartition);
    const uint8_t* const* later = scratch_.places + from;
    Products(scratch_).turn_keys(scratch_.places + i, v, [=](int64_t d) {
      if (d * Row::kValueBytes % kFetchBytes) return;
      for (int j = 0; j < kLanes; j++) __builtin_prefetch(later[j] + offset + d * Row::kValueBytes, 0, 2);
    });
  }

  template <int kRows, int kVectors>
  void score(int64_t row, int64_t offset) const {
    const float* queries[kRows];
    Vec sums[kRows][kVectors];
    for (int r = 0; r < kRows; r++) {
      queries[r] = multiplied_query(row + r);
      for (int v = 0; v < kVectors; v++) sums[r][v] = Vec{};
    }
    Products(scratch_).score(queries, sums);
    for (int r = 0; r < kRows; r++)
      for (int v = 0; v < kVectors; v++) {
        Vec sum = sums[r][v] * splat(a_.scale);
        if (a_.soft_cap > 0)
          for (int i = 0; i < kLanes; i++) sum[i] = a_.soft_cap * std::tanh(sum[i] / a_.soft_cap);
        store(scratch_.scores_of(row + r) + offset + v * kLanes, sum);
      }
  }

  void soften_all(int64_t start, int64_t first, int64_t end, float* result) {
    for (int64_t token = 0; token < num_rows(); token += group_)
      for (int64_t row = token; row < token + group_;) {
        const int64_t left = token + group_ - row;
        if (left >= 3) soften<3>(row, start, first, end, result), row += 3;
        else if (left == 2) soften<2>(row, start, first, end, result), row += 2;
        else soften<1>(row, start, first, end, result), row += 1;
      }
  }

  // Scores of rows of one token become weights exp(score - highest); those of positions that the token does not see, 0.
  // Rows take turns, since each waits for its own highest score.
  template <int kRows>
  void soften(int64_t row, int64_t start, int64_t tile_first, int64_t tile_end, float* result) {
    constexpr int kVectors = kSumLanes / kLanes;
    const int64_t last = last_of(row);
    const int64_t begin = (tile_first - start) / kSumLanes * kSumLanes, all = padded(tile_end - start);
    const int64_t first = std::clamp(first_visible(a_, last), tile_first, tile_end) - start;
    const int64_t end = std::clamp(last + 1, tile_first, tile_end) - start, seen = first < end ? padded(end) : begin;
    float* scores[kRows];
    Vec highs[kRows], sums[kRows][kVectors];
    for (int r = 0; r < kRows; r++) {
      scores[r] = scratch_.scores_of(row + r), highs[r] = splat(-INFINITY);
      std::fill(scores[r] + begin, scores[r] + std::min(first, seen), -INFINITY);
      std::fill(scores[r] + std::min(end, seen), scores[r] + seen, -INFINITY);
      for (int v = 0; v < kVectors; v++) sums[r][v] = Vec{};
    }
    for (int64_t i = begin; i < seen; i += kLanes)
      for (int r = 0; r < kRows; r++) highs[r] = larger(load(scores[r] + i), highs[r]);
    for (int r = 0; r < kRows; r++) highs[r] = splat(highest(result)[row + r] = largest_lane(highs[r]));
    for (int64_t i = begin; i < seen; i += kSumLanes)
      for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kVectors; v++)
          sums[r][v] += Products::keep_weights(scores[r], i + v * kLanes, highs[r]);
    for (int r = 0; r < kRows; r++) {
      Products::clear_weights(scores[r], seen, all);
      totals(result)[row + r] = sum_lanes(sums[r]);
    }
  }

  static int64_t padded(int64_t count) { return (count + kSumLanes - 1) / kSumLanes * kSumLanes; }

  template <bool kIsExpanded>
  void weigh_all(int64_t start, int64_t first, int64_t end, float* result) const {
    for_row_tiles([&](int64_t row, auto count) {
      const int64_t seen = std::clamp(last_of(row + count - 1) + 1, first, end);
      Products(scratch_).template weigh<kIsExpanded, count>(row, first - start, seen - start,
                                                            result + row * a_.head_dim);
    });
  }

  const Attention& a_;
  const Span& span_;
  const int64_t kv_head_, token_, num_tokens_, group_, row_bytes_;
  TileScratch scratch_{};
};

}  // namespace
