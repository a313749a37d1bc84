// Attention. The context is cut into partitions of kPartition tokens at absolute positions; each partition has its own
// softmax, and partitions are merged in order. So the result for a token depends neither on the chunk in which it was
// computed nor on the tile of tokens that shared the work.

#pragma once

#include <algorithm>
#include <vector>

#include "cpu_threads.h"
#include "cpu_vectors.h"

namespace {

constexpr int64_t kPartition = 256;
constexpr int64_t kMaxQueryTile = 32;

struct Attention {
  const float* query;  // [num_tokens, num_heads, head_dim], tokens `query_stride` apart
  int64_t query_stride;
  const float* kv;  // the cache of one layer: [num_blocks, 2, num_kv_heads, block_size, head_dim]
  int64_t block_stride;  // floats from one block to the next
  float* output;         // [num_tokens, num_heads, head_dim], contiguous
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
};

struct Span {
  int64_t query_start, query_len, context_len;
  const int64_t* block_table;
};

inline const float* key_row(const Attention& a, const Span& span, int64_t kv_head, int64_t position) {
  const float* block = a.kv + span.block_table[position / a.block_size] * a.block_stride;
  return block + (kv_head * a.block_size + position % a.block_size) * a.head_dim;
}

inline int64_t first_visible(const Attention& a, int64_t position) {
  return a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
}

// Query heads of up to kMaxQueryTile tokens that share a KV head. Keys are turned once for all of them, so that a
// vector holds one dimension of kLanes keys and a score is one chain of multiply-adds over the dimensions in order; an
// output is one chain over the positions. A position that a row does not see has the weight 0, which changes no sum.
class QueryTile {
 public:
  QueryTile(const Attention& a, const Span& span, int64_t kv_head, int64_t token, int64_t num_tokens)
      : a_(a), span_(span), kv_head_(kv_head), token_(token), num_tokens_(num_tokens), group_(a.num_heads / a.num_kv_heads) {}

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
    thread_local std::vector<float> scratch;
    thread_local std::vector<const float*> places;
    const size_t size = kKeyVectors * kLanes * a_.head_dim + num_rows() * kPartition;
    if (scratch.size() < size) scratch.resize(size);
    keys_ = scratch.data();
    scores_ = keys_ + kKeyVectors * kLanes * a_.head_dim;
    const int64_t start = partition * kPartition;
    const int64_t first = std::max(start, first_visible(a_, position(0)));
    const int64_t end = std::min(start + kPartition, position(num_tokens_ - 1) + 1);
    places.resize(kPartition + kAhead + kLanes);
    places_ = places.data();
    find_keys(start, start + (first - start) / kKeysAtOnce * kKeysAtOnce, end);
    score_all(start, first, end);
    for (int64_t row = 0; row < num_rows(); row++) soften(row, start, first, end, result);
    weigh_all(first - start, end - start, result);
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
    const float **place = places_ + (first - start), **const begin = place;
    while (first < end) {
      const float* key = key_row(a_, span_, kv_head_, first);
      const int64_t next = std::min(end, first - first % a_.block_size + a_.block_size);
      for (; first < next; first++, key += a_.head_dim) *place++ = key;
    }
    const float** padded = places_ + (place - places_ + kLanes - 1) / kLanes * kLanes;
    std::fill(place, padded, place[-1]);
    // Fetched with the last values: the first keys of the next head, if there is one.
    const int64_t next_key = kv_head_ + 1 < a_.num_kv_heads ? a_.block_size * a_.head_dim - values_offset() : 0;
    for (int64_t i = 0; i < kAhead; i++) padded[i] = begin[i] + next_key;
  }

  int64_t values_offset() const { return a_.num_kv_heads * a_.block_size * a_.head_dim; }  // from a key to its value

  void score_all(int64_t start, int64_t first, int64_t end) {
    const int64_t begin = (first - start) / kKeysAtOnce * kKeysAtOnce, num_keys = end - start;
    for (int64_t i = begin; i < num_keys; i += kKeysAtOnce) {
      for (int64_t v = 0; v < kKeyVectors && i + v * kLanes < num_keys; v++)
        turn_keys(i + v * kLanes, begin, num_keys, v);
      int64_t row = 0;
      for (; row + kTileRows <= num_rows(); row += kTileRows) score<kTileRows>(row, i);
      switch (num_rows() - row) {
        case 1: score<1>(row, i); break;
        case 2: score<2>(row, i); break;
        case 3: score<3>(row, i); break;
        case 4: score<4>(row, i); break;
        case 5: score<5>(row, i); break;
        default: break;
      }
    }
  }

  // keys_[d][v] = dimension d of kLanes keys from the i-th on. Those that are kAhead later are fetched meanwhile, or
  // where there are none, the first values: into the second-level cache, since the first has room for so few misses at
  // once that pieces of 4 KiB came at 12.5 GB/s instead of 20.
  void turn_keys(int64_t i, int64_t begin, int64_t num_keys, int64_t v) {
    const float* const* rows = places_ + i;
    const bool is_key = i + kAhead < num_keys;
    const float* const* later = places_ + (is_key ? i + kAhead : std::min(begin + i + kAhead - num_keys, kPartition));
    const int64_t offset = is_key ? 0 : values_offset();
    float* turned = keys_ + v * kLanes;
    int64_t d = 0;
    for (; d + kLanes <= a_.head_dim; d += kLanes) {
      Vec square[kLanes];
      for (int j = 0; j < kLanes; j++) __builtin_prefetch(later[j] + offset + d, 0, 2);
      for (int j = 0; j < kLanes; j++) square[j] = load(rows[j] + d);
      transpose(square);
      for (int j = 0; j < kLanes; j++) store(turned + (d + j) * kKeyVectors * kLanes, square[j]);
    }
    for (; d < a_.head_dim; d++)
      for (int64_t j = 0; j < kLanes; j++) turned[d * kKeyVectors * kLanes + j] = rows[j][d];
  }

  // Scores of kRows rows against the turned keys: independent chains, so that the multipliers are kept busy.
  template <int kRows>
  void score(int64_t row, int64_t offset) {
    const float* queries[kRows];
    Vec sums[kRows][kKeyVectors];
    for (int r = 0; r < kRows; r++) {
      queries[r] = query(row + r);
      for (int v = 0; v < kKeyVectors; v++) sums[r][v] = Vec{};
    }
    for (int64_t d = 0; d < a_.head_dim; d++) {
      Vec keys[kKeyVectors];
      for (int v = 0; v < kKeyVectors; v++) keys[v] = load(keys_ + (d * kKeyVectors + v) * kLanes);
      for (int r = 0; r < kRows; r++) {
        const Vec value = splat(queries[r][d]);
        for (int v = 0; v < kKeyVectors; v++) sums[r][v] = fma(value, keys[v], sums[r][v]);
      }
    }
    for (int r = 0; r < kRows; r++)
      for (int v = 0; v < kKeyVectors; v++) {
        Vec sum = sums[r][v] * splat(a_.scale);
        if (a_.soft_cap > 0)
          for (int i = 0; i < kLanes; i++) sum[i] = a_.soft_cap * std::tanh(sum[i] / a_.soft_cap);
        store(scores_ + (row + r) * kPartition + offset + v * kLanes, sum);
      }
  }

  // Scores become weights exp(score - highest); those of positions that the row does not see, 0.
  void soften(int64_t row, int64_t start, int64_t tile_first, int64_t tile_end, float* result) {
    float* scores = scores_ + row * kPartition;
    const int64_t last = position(row / group_);
    const int64_t first = std::clamp(first_visible(a_, last), tile_first, tile_end) - start;
    const int64_t end = std::clamp(last + 1, tile_first, tile_end) - start, all = tile_end - start;
    const int64_t begin = (tile_first - start) / kLanes * kLanes;
    const int64_t padded = (all + kLanes - 1) / kLanes * kLanes;
    std::fill(scores + begin, scores + std::max(begin, std::min(first, padded)), -INFINITY);
    std::fill(scores + std::max(begin, end), scores + padded, -INFINITY);
    Vec highs = splat(-INFINITY);
    for (int64_t i = begin; i < padded; i += kLanes) {
      const Vec score = load(scores + i);
      highs = score > highs ? score : highs;
    }
    float high = -INFINITY;
    for (int i = 0; i < kLanes; i++) high = std::max(high, highs[i]);
    Vec sums = {};
    for (int64_t i = begin; i < padded; i += kLanes) {
      const Vec score = load(scores + i);
      const Vec weights = score == splat(-INFINITY) ? Vec{} : exp_nonpositive(score - splat(high));
      store(scores + i, weights);
      sums += weights;
    }
    highest(result)[row] = high;
    totals(result)[row] = sum_lanes(sums);
  }

  void weigh_all(int64_t first, int64_t end, float* result) const {
    int64_t row = 0;
    for (; row + kTileRows <= num_rows(); row += kTileRows) weigh_rows<kTileRows>(row, first, end, result);
    switch (num_rows() - row) {
      case 1: return weigh_rows<1>(row, first, end, result);
      case 2: return weigh_rows<2>(row, first, end, result);
      case 3: return weigh_rows<3>(row, first, end, result);
      case 4: return weigh_rows<4>(row, first, end, result);
      case 5: return weigh_rows<5>(row, first, end, result);
      default: return;
    }
  }

  template <int kRows>
  void weigh_rows(int64_t row, int64_t first, int64_t end, float* result) const {
    int64_t d = 0;
    for (; d + kValueVectors * kLanes <= a_.head_dim; d += kValueVectors * kLanes)
      weigh<kRows, kValueVectors>(row, d, first, end, result);
    for (; d + kLanes <= a_.head_dim; d += kLanes) weigh<kRows, 1>(row, d, first, end, result);
    for (; d < a_.head_dim; d++)
      for (int r = 0; r < kRows; r++) {
        const float* weights = scores_ + (row + r) * kPartition;
        float sum = 0;
        for (int64_t i = first; i < end; i++) sum = fma(weights[i], places_[i][values_offset() + d], sum);
        result[(row + r) * a_.head_dim + d] = sum;
      }
  }

  template <int kRows, int kVectors>
  void weigh(int64_t row, int64_t d, int64_t first, int64_t end, float* result) const {
    Vec sums[kRows][kVectors];
    for (int r = 0; r < kRows; r++)
      for (int v = 0; v < kVectors; v++) sums[r][v] = Vec{};
    const float* weights = scores_ + row * kPartition;
    const int64_t offset = values_offset() + d;
    for (int64_t i = first; i < end; i++) {
      const float *values = places_[i] + offset, *later = places_[i + kAhead] + offset;
      Vec value[kVectors];
      for (int v = 0; v < kVectors; v++) __builtin_prefetch(later + v * kLanes, 0, 2);
      for (int v = 0; v < kVectors; v++) value[v] = load(values + v * kLanes);
      for (int r = 0; r < kRows; r++) {
        const Vec weight = splat(weights[r * kPartition + i]);
        for (int v = 0; v < kVectors; v++) sums[r][v] = fma(weight, value[v], sums[r][v]);
      }
    }
    for (int r = 0; r < kRows; r++)
      for (int v = 0; v < kVectors; v++) store(result + (row + r) * a_.head_dim + d + v * kLanes, sums[r][v]);
  }

  // A tile of kTileRows rows fills the registers: 24 sums of 32, or 12 of 16.
  static constexpr int kTileRows = 6, kKeyVectors = kAccumulators / kTileRows, kValueVectors = kKeyVectors;
  static constexpr int64_t kKeysAtOnce = kKeyVectors * kLanes;
  static constexpr int64_t kAhead = 32;  // positions: 8 KiB of a head of 64, measured against 16 to 128

  const Attention& a_;
  const Span& span_;
  const int64_t kv_head_, token_, num_tokens_, group_;
  float *keys_ = nullptr, *scores_ = nullptr;
  const float** places_ = nullptr;
};

// Tiles of tokens and KV heads are independent. Where they are too few to share among the threads, as for one
// sequence that decodes, their partitions are computed apart and merged in the same order: the same bits.
void attend(const Attention& a, const std::vector<Span>& spans, int num_threads) {
  std::vector<QueryTile> tiles;
  for (const Span& span : spans)
    for (int64_t token = 0; token < span.query_len; token += kMaxQueryTile)
      for (int64_t head = 0; head < a.num_kv_heads; head++)
        tiles.emplace_back(a, span, head, token, std::min(kMaxQueryTile, span.query_len - token));
  if (num_threads == 1 || int64_t(tiles.size()) >= 8 * num_threads) {
    // The heads of the same tokens one after another: each fetches the first keys of the next.
    const bool are_many = num_threads == 1 || int64_t(tiles.size()) >= 8 * num_threads * a.num_kv_heads;
    const int64_t size = are_many ? a.num_kv_heads : 1;
    parallel(tiles.size() / size, num_threads, [&](int64_t i) {
      for (int64_t j = i * size; j < (i + 1) * size; j++) tiles[j].attend();
    });
    return;
  }
  struct Part {
    int64_t tile, partition, place;
  };
  std::vector<Part> parts;
  int64_t size = 0;
  for (int64_t tile = 0; tile < int64_t(tiles.size()); tile++)
    for (int64_t p = tiles[tile].first_partition(); p < tiles[tile].end_partition(); p++) {
      parts.push_back(Part{tile, p, size});
      size += tiles[tile].result_size();
    }
  std::vector<float> results(size);
  parallel(parts.size(), num_threads, [&](int64_t i) {
    QueryTile tile = tiles[parts[i].tile];
    tile.compute(parts[i].partition, results.data() + parts[i].place);
  });
  std::vector<float> merged;
  for (size_t i = 0; i < parts.size();) {
    const QueryTile& tile = tiles[parts[i].tile];
    merged.resize(tile.result_size());
    tile.start(merged.data());
    for (const int64_t which = parts[i].tile; i < parts.size() && parts[i].tile == which; i++)
      tile.merge(results.data() + parts[i].place, merged.data());
    tile.finish(merged.data());
  }
}

}  // namespace
