// Attention: tiles of query rows and parts of their contexts, shared among the threads.

#pragma once

#include <algorithm>
#include <vector>

#include "cpu_kv_cache.h"
#include "cpu_query_tile.h"
#include "cpu_threads.h"

namespace {

struct Part {
  int64_t tile, partition, place;  // of its result
};

template <typename Row>
__attribute__((noinline)) void merge_parts(const std::vector<QueryTile<Row>>& tiles, const std::vector<Part>& parts,
                                           const float* results) {
  std::vector<float> merged;
  for (size_t i = 0; i < parts.size();) {
    const QueryTile<Row>& tile = tiles[parts[i].tile];
    merged.resize(tile.result_size());
    tile.start(merged.data());
    for (const int64_t which = parts[i].tile; i < parts.size() && parts[i].tile == which; i++)
      tile.merge(results + parts[i].place, merged.data());
    tile.finish(merged.data());
  }
}

// Tiles of tokens and KV heads are independent. Where they are too few to share among the threads, as for one
// sequence that decodes, their partitions are computed apart and merged in the same order: the same bits.
template <typename Row>
void attend_rows(const Attention& a, const std::vector<Span>& spans, int num_threads) {
  constexpr bool kHasSubnormals = QueryTile<Row>::kHasSubnormals;
  std::vector<QueryTile<Row>> tiles;
  for (const Span& span : spans)
    for (int64_t token = 0; token < span.query_len; token += kMaxQueryTile)
      for (int64_t head = 0; head < a.num_kv_heads; head++)
        tiles.emplace_back(a, span, head, token, std::min(kMaxQueryTile, span.query_len - token));
  if (num_threads == 1 || int64_t(tiles.size()) >= 8 * num_threads) {
    // The heads of the same tokens one after another: each fetches the first keys of the next.
    const bool are_many = num_threads == 1 || int64_t(tiles.size()) >= 8 * num_threads * a.num_kv_heads;
    const int64_t size = are_many ? a.num_kv_heads : 1;
    const int64_t num_tasks = tiles.size() / size;
    parallel(num_tasks, num_threads, [&](int64_t task) {
      const SubnormalGuard guard(kHasSubnormals);
      const int64_t first = (num_tasks - 1 - task) * size;  // the last tokens of a prompt see the most: first
      for (int64_t j = first; j < first + size; j++) tiles[j].attend();
    });
    return;
  }
  std::vector<Part> parts;
  int64_t size = 0;
  for (int64_t tile = 0; tile < int64_t(tiles.size()); tile++)
    for (int64_t p = tiles[tile].first_partition(); p < tiles[tile].end_partition(); p++) {
      parts.push_back(Part{tile, p, size});
      size += tiles[tile].result_size();
    }
  std::vector<float> results(size);
  parallel(parts.size(), num_threads, [&](int64_t i) {
    const SubnormalGuard guard(kHasSubnormals);
    QueryTile<Row> tile = tiles[parts[i].tile];
    tile.compute(parts[i].partition, results.data() + parts[i].place);
  });
  const SubnormalGuard guard(kHasSubnormals);
  merge_parts(tiles, parts, results.data());
}

inline void attend(const Attention& a, const std::vector<Span>& spans, int num_threads) {
  with_rows_of(a.cache, [&](auto row) { attend_rows<decltype(row)>(a, spans, num_threads); });
}

}  // namespace
