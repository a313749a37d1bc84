// Products of attention over rows of bfloat16, a pair of neighbours an instruction (AVX-512 BF16): a lane gets
// fma(a.even, b.even, fma(a.odd, b.odd, sum)) in float32, where what is too small for a normal number counts as 0.
// A pair are two dimensions of a query and a key, or two positions with the weights that a row gives them; where one of
// the two is missing it is 0, which changes no sum. FloatProducts has the same bits.

#pragma once

#include <algorithm>
#include <cstring>

#include "cpu_float_products.h"
#include "cpu_kv_cache.h"
#include "cpu_tile_scratch.h"

namespace {

#if defined(__AVX512BF16__)

class PairProducts {
 public:
  static constexpr bool kHasOwnQueries = true, kExpands = true;

  // In 32-bit lanes, each of a pair.
  static int64_t query_size(int64_t head_dim) { return padded(head_dim) / 2; }
  static int64_t keys_size(int64_t head_dim) { return kKeysAtOnce * padded(head_dim) / 2; }
  static int64_t values_size(int64_t head_dim) { return kPartition / 2 * padded(head_dim); }

  explicit PairProducts(const TileScratch& scratch) : t_(scratch) {}

  void take_query(const float* query, float* own) const {
    for (int64_t d = 0; d < t_.head_dim; d += kHalves) {
      const Vec lower = load_some(query + d, count_from(d));
      const Vec upper = load_some(query + d + kLanes, count_from(d + kLanes));
      const __m512bh halves = _mm512_cvtne2ps_pbh((__m512)upper, (__m512)lower);
      std::memcpy(own + d / 2, &halves, sizeof halves);
    }
  }

  // keys[p][v] = dimensions 2 p and 2 p + 1 of the kLanes keys `rows`, while fetch_later(d) looks ahead.
  template <typename Fetch>
  void turn_keys(const uint8_t* const* rows, int64_t v, const Fetch& fetch_later) const {
    float* turned = t_.keys + v * kLanes;
    for (int64_t d = 0; d < t_.head_dim; d += kHalves) {
      Vec square[kLanes];
      fetch_later(d);
      for (int j = 0; j < kLanes; j++) square[j] = (Vec)load_halves(rows[j], d);
      transpose(square);
      for (int j = 0; j < kLanes; j++) store(turned + (d / 2 + j) * kKeysAtOnce, square[j]);
    }
  }

  // Adds to sums[r][v] what query r gives with the turned keys: independent chains, so that the multipliers are busy.
  template <int kRows, int kVectors>
  void score(const float* const (&queries)[kRows], Vec (&sums)[kRows][kVectors]) const {
    for (int64_t pair = 0; 2 * pair < t_.head_dim; pair++) {
      Vec keys[kVectors];
      for (int v = 0; v < kVectors; v++) keys[v] = load(t_.keys + (pair * kKeyVectors + v) * kLanes);
      for (int r = 0; r < kRows; r++) {
        const __m512i both = splat_pair(queries[r] + pair);
        for (int v = 0; v < kVectors; v++) sums[r][v] = multiply_add(both, (__m512i)keys[v], sums[r][v]);
      }
    }
  }

  // Keeps exp(score - highest) of positions [i, i + kLanes) as bfloat16, the i-th half of the row's memory; returns it
  // as it is multiplied. What is written lies before the scores that are still to be read.
  static Vec keep_weights(float* scores, int64_t i, Vec highest) {
    const Vec weights = coarse_exp_nonpositive(load(scores + i) - highest);
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)weights);
    std::memcpy(reinterpret_cast<uint8_t*>(scores) + 2 * i, &halves, sizeof halves);
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
  }

  static void clear_weights(float* scores, int64_t begin, int64_t end) {
    std::memset(reinterpret_cast<uint8_t*>(scores) + 2 * begin, 0, 2 * (end - begin));
  }

  // values[p] = the pairs of the values at positions 2 p and 2 p + 1 of the partition, as `interleave` has them.
  void expand_values(int64_t first, int64_t end) const {
    const int64_t stride = padded(t_.head_dim), row_bytes = Bfloat16Row::size_bytes(t_.head_dim);
    for (int64_t pair = first / 2; 2 * pair < end; pair++) {
      const uint8_t *even = value(2 * pair), *odd = value(2 * pair + 1);
      for (int64_t i = 0; i < 2; i++) fetch(value(2 * pair + i + kAhead<Bfloat16Row>), row_bytes);
      for (int64_t d = 0; d < t_.head_dim; d += kHalves) {
        Vec both[2];
        interleave(load_halves(even, d), load_halves(odd, d), both);
        for (int v = 0; v < 2; v++) store(t_.values + pair * stride + d + v * kLanes, both[v]);
      }
    }
  }

  // results[r] = the values at positions [first, end), weighed for row r of the tile.
  template <bool kIsExpanded, int kRows>
  void weigh(int64_t row, int64_t first, int64_t end, float* results) const {
    constexpr int kSteps = kValueVectors / 2;
    int64_t d = 0;
    for (; d + kSteps * kHalves <= t_.head_dim; d += kSteps * kHalves)
      weigh_vectors<kIsExpanded, kRows, kSteps>(row, d, first, end, results);
    for (; d < t_.head_dim; d += kHalves) weigh_vectors<kIsExpanded, kRows, 1>(row, d, first, end, results);
  }

 private:
  static constexpr int64_t kHalves = 2 * kLanes;

  static int64_t padded(int64_t head_dim) { return (head_dim + kHalves - 1) / kHalves * kHalves; }
  int64_t count_from(int64_t d) const { return std::clamp<int64_t>(t_.head_dim - d, 0, kLanes); }
  const uint8_t* value(int64_t i) const { return t_.places[i] + t_.values_offset; }

  // kHalves values of a row from the d-th on; beyond its end, 0.
  __m512i load_halves(const uint8_t* row, int64_t d) const {
    const int64_t count = t_.head_dim - d;
    if (count >= kHalves) return _mm512_loadu_si512(row + 2 * d);
    return _mm512_maskz_loadu_epi16((uint32_t{1} << count) - 1, row + 2 * d);
  }

  static __m512i splat_pair(const float* pair) {
    int32_t bits;
    std::memcpy(&bits, pair, sizeof bits);
    return _mm512_set1_epi32(bits);
  }

  static Vec multiply_add(__m512i a, __m512i b, Vec sum) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }

  // Pairs of kHalves dimensions: each quarter of a vector has the first four of eight, or the last four.
  static void interleave(__m512i even, __m512i odd, Vec (&both)[2]) {
    both[0] = (Vec)_mm512_unpacklo_epi16(even, odd), both[1] = (Vec)_mm512_unpackhi_epi16(even, odd);
  }

  // Puts sums of such pairs into the order of the dimensions.
  static void in_order(Vec (&sums)[2]) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const __m512 lower = (__m512)sums[0], upper = (__m512)sums[1];
    sums[0] = (Vec)_mm512_permutex2var_ps(lower, first, upper);
    sums[1] = (Vec)_mm512_permutex2var_ps(lower, second, upper);
  }

  template <bool kIsExpanded, int kRows, int kSteps>
  void weigh_vectors(int64_t row, int64_t d, int64_t first, int64_t end, float* results) const {
    Vec sums[kRows][kSteps][2];
    for (int r = 0; r < kRows; r++)
      for (int s = 0; s < kSteps; s++) sums[r][s][0] = sums[r][s][1] = Vec{};
    const float *weights = t_.scores_of(row), *expanded = t_.values + d;
    const int64_t stride = padded(t_.head_dim);
    for (int64_t pair = first / 2; 2 * pair < end; pair++) {
      Vec both[kSteps][2];
      for (int s = 0; s < kSteps; s++) {
        const int64_t from = d + s * kHalves;
        if constexpr (kIsExpanded) {
          for (int v = 0; v < 2; v++) both[s][v] = load(expanded + pair * stride + s * kHalves + v * kLanes);
        } else {
          for (int64_t i = 0; i < 2; i++) fetch(value(2 * pair + i + kAhead<Bfloat16Row>) + 2 * from, 2 * kHalves);
          const uint8_t *even = value(2 * pair), *odd = value(2 * pair + 1);
          if constexpr (kSteps > 1)
            interleave(_mm512_loadu_si512(even + 2 * from), _mm512_loadu_si512(odd + 2 * from), both[s]);
          else
            interleave(load_halves(even, from), load_halves(odd, from), both[s]);
        }
      }
      for (int r = 0; r < kRows; r++) {
        const __m512i weight = splat_pair(weights + r * kScoreStride + pair);
        for (int s = 0; s < kSteps; s++)
          for (int v = 0; v < 2; v++) sums[r][s][v] = multiply_add(weight, (__m512i)both[s][v], sums[r][s][v]);
      }
    }
    for (int r = 0; r < kRows; r++)
      for (int s = 0; s < kSteps; s++) {
        in_order(sums[r][s]);
        for (int v = 0; v < 2; v++) {
          const int64_t from = d + s * kHalves + v * kLanes;
          store_some(results + r * t_.head_dim + from, sums[r][s][v], count_from(from));
        }
      }
  }

  const TileScratch& t_;
};

#endif

template <typename Row>
struct ProductsOf {
  typedef FloatProducts<Row> Type;
};

#if defined(__AVX512BF16__)
template <>
struct ProductsOf<Bfloat16Row> {
  typedef PairProducts Type;
};
#endif

}  // namespace
