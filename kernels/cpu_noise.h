// The random numbers of ids, numpy's: Philox 4x64-10 (Salmon et al. 2011), keyed by the seed and counted by the position
// and by every four ids; of a word its upper 53 bits are a number in [0, 1).

#pragma once

#include <algorithm>
#include <cstdint>
#if defined(__AVX512DQ__)
#include <immintrin.h>
#endif

namespace {

constexpr int kGroup = 64;  // ids whose words are computed together
constexpr uint64_t kMultiplier0 = 0xD2E7470EE14C6C93, kMultiplier1 = 0xCA5A826395121157;
constexpr uint64_t kWeyl0 = 0x9E3779B97F4A7C15, kWeyl1 = 0xBB67AE8584CAA73B;

// Four words for ids 4 * group .. 4 * group + 3.
inline void philox(uint64_t seed, uint64_t position, uint64_t group, uint64_t* words) {
  uint64_t c0 = group + 1, c1 = position, c2 = 0, c3 = 0, key_0 = seed, key_1 = 0;
  for (int round = 0; round < 10; round++) {
    const auto first = static_cast<unsigned __int128>(kMultiplier0) * c0;
    const auto second = static_cast<unsigned __int128>(kMultiplier1) * c2;
    c0 = static_cast<uint64_t>(second >> 64) ^ c1 ^ key_0, c1 = static_cast<uint64_t>(second);
    c2 = static_cast<uint64_t>(first >> 64) ^ c3 ^ key_1, c3 = static_cast<uint64_t>(first);
    key_0 += kWeyl0, key_1 += kWeyl1;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// Words of the kGroup ids from 4 * group on; that of the n-th lies at place_of(n).
#if defined(__AVX512DQ__)
constexpr int kVectors = 2;  // of eight counts each, side by side: one alone waits for its own products

inline int64_t place_of(int64_t n) { return n / 32 * 32 + n % 4 * 8 + n % 32 / 4; }

inline void multiply_wide(__m512i x, uint64_t multiplier, __m512i& high, __m512i& low) {
  const __m512i m = _mm512_set1_epi64(multiplier), m_high = _mm512_set1_epi64(multiplier >> 32);
  const __m512i x_high = _mm512_srli_epi64(x, 32), least = _mm512_mul_epu32(x, m);
  const __m512i across = _mm512_add_epi64(_mm512_mul_epu32(x_high, m), _mm512_srli_epi64(least, 32));
  const __m512i lower_half = _mm512_and_si512(across, _mm512_set1_epi64(0xffffffff));
  const __m512i middle = _mm512_add_epi64(_mm512_mul_epu32(x, m_high), lower_half);
  const __m512i upper = _mm512_add_epi64(_mm512_mul_epu32(x_high, m_high), _mm512_srli_epi64(across, 32));
  high = _mm512_add_epi64(upper, _mm512_srli_epi64(middle, 32));
  low = _mm512_mullo_epi64(x, m);
}

inline void philox_group(uint64_t seed, uint64_t position, uint64_t group, uint64_t* words) {
  __m512i c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
  for (int v = 0; v < kVectors; v++) {
    c0[v] = _mm512_add_epi64(_mm512_set1_epi64(group + 1 + 8 * v), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    c1[v] = _mm512_set1_epi64(position), c2[v] = c3[v] = _mm512_setzero_si512();
  }
#pragma GCC unroll 10
  for (int round = 0; round < 10; round++) {
    const __m512i key_0 = _mm512_set1_epi64(seed + round * kWeyl0), key_1 = _mm512_set1_epi64(round * kWeyl1);
    for (int v = 0; v < kVectors; v++) {
      __m512i first_high, first_low, second_high, second_low;
      multiply_wide(c0[v], kMultiplier0, first_high, first_low);
      multiply_wide(c2[v], kMultiplier1, second_high, second_low);
      c0[v] = _mm512_xor_si512(_mm512_xor_si512(second_high, c1[v]), key_0), c1[v] = second_low;
      c2[v] = _mm512_xor_si512(_mm512_xor_si512(first_high, c3[v]), key_1), c3[v] = first_low;
    }
  }
  for (int v = 0; v < kVectors; v++, words += 32) {
    _mm512_storeu_si512(words, c0[v]), _mm512_storeu_si512(words + 8, c1[v]);
    _mm512_storeu_si512(words + 16, c2[v]), _mm512_storeu_si512(words + 24, c3[v]);
  }
}
#else
inline int64_t place_of(int64_t n) { return n; }

inline void philox_group(uint64_t seed, uint64_t position, uint64_t group, uint64_t* words) {
  for (int quad = 0; quad < kGroup / 4; quad++) philox(seed, position, group + quad, words + 4 * quad);
}
#endif

inline double uniform_of(uint64_t word) { return static_cast<double>(word >> 11) * 0x1p-53; }

// The largest word whose number is at most `uniform`.
inline uint64_t word_of(double uniform) {
  return static_cast<uint64_t>(std::min(1.0, uniform) * (0x1p53 - 1)) << 11 | 0x7ff;
}

}  // namespace
