// What a tile of query rows shares with its products: where its keys and values lie, and memory for what is multiplied.

#pragma once

#include <cstdint>

#include "cpu_vectors.h"

namespace {

constexpr int64_t kPartition = 256;
// A tile of kQueryRows rows fills the registers: 24 sums of 32, or 12 of 16.
constexpr int kQueryRows = 6, kKeyVectors = kAccumulators / kQueryRows, kValueVectors = kKeyVectors;
constexpr int64_t kKeysAtOnce = kKeyVectors * kLanes;
constexpr int64_t kScoreStride = kPartition + 16;  // a line more, so that rows share no sets of the cache
constexpr int64_t kFetchBytes = 4 * kLanes;        // a line, or half of one: rows begin anywhere

template <typename Row>
constexpr int64_t kAhead = Row::kValueBytes == 4 ? 32 : 48;  // positions, measured against 16 to 128

struct TileScratch {
  int64_t head_dim, values_offset;  // from a key to its value, in bytes
  const uint8_t** places;           // of the keys of a partition
  float *keys, *scores, *values, *queries;

  float* scores_of(int64_t row) const { return scores + row * kScoreStride; }
};

inline void fetch(const uint8_t* p, int64_t size) {
  for (int64_t i = 0; i < size; i += kFetchBytes) __builtin_prefetch(p + i, 0, 2);
}

}  // namespace
