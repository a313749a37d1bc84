// The random numbers of ids, numpy's: Philox 4x64-10 (Salmon et al. 2011), keyed by the seed and counted by the position
// and by every four ids; of a word its upper 53 bits are a number in [0, 1).

#pragma once

#include <algorithm>
#include <cstdint>
#if defined(__AVX512DQ__)
#include <immintrin.h>
#endif

namespace {

constexpr uint64_t kMultiplier0 = 0xD2E7470EE14C6C93, kMultiplier1 = 0xCA5A826395121157;
constexpr uint64_t kWeyl0 = 0x9E3779B97F4A7C15, kWeyl1 = 0xBB67AE8584CAA73B;

// The noise of a row. Two words of the counter are 0 and the first is small, so that much of the first two rounds is
// the same for all ids: it is computed once, and of their products only what differs.
class Noise {
 public:
  Noise(uint64_t seed, uint64_t position) : seed_(seed) {
    const auto product = static_cast<unsigned __int128>(kMultiplier0) * (seed ^ position);
    high_ = static_cast<uint64_t>(product >> 64) ^ kWeyl1, low_ = static_cast<uint64_t>(product);
  }

  // Four words for ids 4 * group .. 4 * group + 3.
  void draw(uint64_t group, uint64_t* words) const {
    const auto counted = static_cast<unsigned __int128>(kMultiplier0) * (group + 1);
    const auto product = static_cast<unsigned __int128>(kMultiplier1) * static_cast<uint64_t>(counted >> 64);
    uint64_t key_0 = seed_ + kWeyl0, key_1 = kWeyl1;
    uint64_t c0 = static_cast<uint64_t>(product >> 64) ^ key_0, c1 = static_cast<uint64_t>(product);
    uint64_t c2 = high_ ^ static_cast<uint64_t>(counted), c3 = low_;
    for (int round = 2; round < kRounds; round++) {
      key_0 += kWeyl0, key_1 += kWeyl1;
      const auto first = static_cast<unsigned __int128>(kMultiplier0) * c0;
      const auto second = static_cast<unsigned __int128>(kMultiplier1) * c2;
      c0 = static_cast<uint64_t>(second >> 64) ^ c1 ^ key_0, c1 = static_cast<uint64_t>(second);
      c2 = static_cast<uint64_t>(first >> 64) ^ c3 ^ key_1, c3 = static_cast<uint64_t>(first);
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
  }

  // The words of the kDrawn ids from 4 * group on, that of the n-th at place_of(n); false if all are above `most`, and
  // then they may be left unwritten.
  bool draw_many(uint64_t group, uint64_t most, uint64_t* words) const;

 private:
#if defined(__AVX512DQ__)
  template <typename Parts>
  bool draw_vectors(uint64_t group, uint64_t most, uint64_t* words) const;
  bool draw_by_52(uint64_t group, uint64_t most, uint64_t* words) const;
#endif

  static constexpr int kRounds = 10;
  uint64_t seed_, high_, low_;  // c2 after two rounds is high_ xor what differs, c3 is low_
};

#if defined(__AVX512DQ__)
constexpr int kVectors = 4;  // of eight counts each, side by side: fewer wait for their own products, more gain nothing
constexpr int kDrawn = 32 * kVectors;

inline int64_t place_of(int64_t n) { return n / 32 * 32 + n % 4 * 8 + n % 32 / 4; }

// x times a number of 64 bits, in parts of 32 bits.
struct Parts32 {
  static void multiply(__m512i x, uint64_t multiplier, __m512i& high, __m512i& low) {
    const __m512i m = _mm512_set1_epi64(multiplier), m_high = _mm512_set1_epi64(multiplier >> 32);
    const __m512i x_high = _mm512_srli_epi64(x, 32), least = _mm512_mul_epu32(x, m);
    const __m512i across = _mm512_add_epi64(_mm512_mul_epu32(x_high, m), _mm512_srli_epi64(least, 32));
    const __m512i lower_half = _mm512_and_si512(across, _mm512_set1_epi64(0xffffffff));
    const __m512i middle = _mm512_add_epi64(_mm512_mul_epu32(x, m_high), lower_half);
    const __m512i upper = _mm512_add_epi64(_mm512_mul_epu32(x_high, m_high), _mm512_srli_epi64(across, 32));
    high = _mm512_add_epi64(upper, _mm512_srli_epi64(middle, 32));
    low = _mm512_mullo_epi64(x, m);
  }
};

#if defined(__AVX512VNNI__)
// In parts of 52 bits, a sixth faster where the processor multiplies them. With m = p 2^12 + q, x = t 2^52 + y and
// r = q 2^40:
//   floor(x m / 2^64) = floor((t p 2^52 + y p + floor(y r / 2^52) + t r) / 2^52).
struct Parts52 {
  __attribute__((target("avx512ifma"))) static void multiply(__m512i x, uint64_t multiplier, __m512i& high,
                                                             __m512i& low) {
    const __m512i p = _mm512_set1_epi64(multiplier >> 12), r = _mm512_set1_epi64((multiplier & 0xfff) << 40);
    const __m512i top = _mm512_srli_epi64(x, 52);  // what multiplies 52 bits does not look at them
    const __m512i whole = _mm512_madd52hi_epu64(_mm512_madd52hi_epu64(_mm512_mullo_epi64(top, p), x, p), top, r);
    const __m512i least = _mm512_madd52lo_epu64(_mm512_setzero_si512(), x, p);
    const __m512i rest = _mm512_madd52lo_epu64(_mm512_madd52hi_epu64(least, x, r), top, r);
    high = _mm512_add_epi64(whole, _mm512_srli_epi64(rest, 52));
    low = _mm512_mullo_epi64(x, _mm512_set1_epi64(multiplier));
  }
};
#endif

// x below 2^32.
inline void multiply_small(__m512i x, uint64_t multiplier, __m512i& high, __m512i& low) {
  const __m512i m = _mm512_set1_epi64(multiplier), m_high = _mm512_set1_epi64(multiplier >> 32);
  const __m512i least = _mm512_mul_epu32(x, m);
  const __m512i most = _mm512_add_epi64(_mm512_mul_epu32(x, m_high), _mm512_srli_epi64(least, 32));
  high = _mm512_srli_epi64(most, 32);
  low = _mm512_mask_shuffle_epi32(least, 0xaaaa, most, _MM_PERM_CCAA);
}

inline __m512i xor_all(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }

template <typename Parts>
__attribute__((always_inline)) inline bool Noise::draw_vectors(uint64_t group, uint64_t most, uint64_t* words) const {
  __m512i c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
  for (int v = 0; v < kVectors; v++) {
    const __m512i counts = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    __m512i high, low, product_high;
    multiply_small(_mm512_add_epi64(_mm512_set1_epi64(group + 1 + 8 * v), counts), kMultiplier0, high, low);
    multiply_small(high, kMultiplier1, product_high, c1[v]);
    c0[v] = _mm512_xor_si512(product_high, _mm512_set1_epi64(seed_ + kWeyl0));
    c2[v] = _mm512_xor_si512(low, _mm512_set1_epi64(high_)), c3[v] = _mm512_set1_epi64(low_);
  }
#pragma GCC unroll 8
  for (int round = 2; round < kRounds; round++) {
    const __m512i key_0 = _mm512_set1_epi64(seed_ + round * kWeyl0), key_1 = _mm512_set1_epi64(round * kWeyl1);
    for (int v = 0; v < kVectors; v++) {
      __m512i first_high, first_low, second_high, second_low;
      Parts::multiply(c0[v], kMultiplier0, first_high, first_low);
      Parts::multiply(c2[v], kMultiplier1, second_high, second_low);
      c0[v] = xor_all(second_high, c1[v], key_0), c1[v] = second_low;
      c2[v] = xor_all(first_high, c3[v], key_1), c3[v] = first_low;
    }
  }
  __m512i least = c0[0];
  for (int v = 0; v < kVectors; v++)
    for (const __m512i own : {c0[v], c1[v], c2[v], c3[v]}) least = _mm512_min_epu64(least, own);
  if (!_mm512_cmple_epu64_mask(least, _mm512_set1_epi64(most))) return false;
  for (int v = 0; v < kVectors; v++, words += 32) {
    _mm512_storeu_si512(words, c0[v]), _mm512_storeu_si512(words + 8, c1[v]);
    _mm512_storeu_si512(words + 16, c2[v]), _mm512_storeu_si512(words + 24, c3[v]);
  }
  return true;
}

#if defined(__AVX512VNNI__)
__attribute__((target("avx512ifma"))) inline bool Noise::draw_by_52(uint64_t group, uint64_t most,
                                                                    uint64_t* words) const {
  return draw_vectors<Parts52>(group, most, words);
}

inline bool Noise::draw_many(uint64_t group, uint64_t most, uint64_t* words) const {
  static const bool has_52 = __builtin_cpu_supports("avx512ifma");
  return has_52 ? draw_by_52(group, most, words) : draw_vectors<Parts32>(group, most, words);
}
#else
inline bool Noise::draw_many(uint64_t group, uint64_t most, uint64_t* words) const {
  return draw_vectors<Parts32>(group, most, words);
}
#endif
#else
constexpr int kDrawn = 64;

inline int64_t place_of(int64_t n) { return n; }

inline bool Noise::draw_many(uint64_t group, uint64_t most, uint64_t* words) const {
  for (int quad = 0; quad < kDrawn / 4; quad++) draw(group + quad, words + 4 * quad);
  return *std::min_element(words, words + kDrawn) <= most;
}
#endif

inline double uniform_of(uint64_t word) { return static_cast<double>(word >> 11) * 0x1p-53; }

// The largest word whose number is at most `uniform`.
inline uint64_t word_of(double uniform) {
  return static_cast<uint64_t>(std::min(1.0, uniform) * (0x1p53 - 1)) << 11 | 0x7ff;
}

}  // namespace
