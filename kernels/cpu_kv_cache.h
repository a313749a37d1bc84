// The rows of a KV cache. A row is one head of one token: float32, or rounded to bfloat16, float16, or int8 with a
// scale. It is written once; attention expands it to float32 as it reads it, or multiplies pairs of bfloat16 as they
// are, and every build expands and rounds to the same bits.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu_vectors.h"

namespace {

typedef uint32_t BitsVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));
typedef uint16_t HalfVecUnaligned __attribute__((vector_size(kLanes * 2), aligned(1), may_alias));
typedef int8_t ByteVec __attribute__((vector_size(kLanes)));
typedef int8_t ByteVecUnaligned __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef float FloatsAnywhere __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));

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

inline uint16_t half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof half);
  return half;
}

// Each format says how it writes a row; how it reads kLanes of its values from the d-th on, or one; how many bytes a
// value has; and how many neighbours in a 32-bit lane `unpacked` can tell apart there, where it is called.
struct Float32Row {
  static constexpr int64_t kValueBytes = 4;
  static constexpr int kPerLane = 1;
  static int64_t size_bytes(int64_t head_dim) { return 4 * head_dim; }
  static void write(const float* x, int64_t head_dim, uint8_t* row) { std::memcpy(row, x, 4 * head_dim); }
  static float scale(const uint8_t*, int64_t) { return 1; }
  static Vec vector(const uint8_t* row, int64_t d, float) { return *(const FloatsAnywhere*)(row + 4 * d); }
  static float value(const uint8_t* row, int64_t d, float) {
    float x;
    std::memcpy(&x, row + 4 * d, sizeof x);
    return x;
  }
};

// The upper half of a float32, rounded to nearest, ties to even.
struct Bfloat16Row {
  static constexpr int64_t kValueBytes = 2;
  static constexpr int kPerLane = 2;
  static int64_t size_bytes(int64_t head_dim) { return 2 * head_dim; }
  static float scale(const uint8_t*, int64_t) { return 1; }

  static void write(const float* x, int64_t head_dim, uint8_t* row) {
    int64_t d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) *(HalfVecUnaligned*)(row + 2 * d) = rounded(load(x + d));
    if (d == head_dim) return;
    const HalfVec rest = rounded(load_some(x + d, head_dim - d));
    std::memcpy(row + 2 * d, &rest, 2 * (head_dim - d));
  }

  static HalfVec rounded(Vec values) { return __builtin_convertvector(rounded_bits(values), HalfVec); }
  static Vec nearest(Vec values) { return (Vec)(rounded_bits(values) << 16); }

  static BitsVec rounded_bits(Vec values) {
    const BitsVec bits = (BitsVec)values, nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return values == values ? nearest : nearest * 0 + 0x7fc0;
  }

  static Vec vector(const uint8_t* row, int64_t d, float) {
    return (Vec)(__builtin_convertvector((HalfVec)*(const HalfVecUnaligned*)(row + 2 * d), BitsVec) << 16);
  }
  static float value(const uint8_t* row, int64_t d, float) { return float_of(uint32_t{half_at(row + 2 * d)} << 16); }

  static Vec unpacked(Vec lanes, int which, Vec) {
    return (Vec)(which == 0 ? (BitsVec)lanes << 16 : (BitsVec)lanes & 0xffff0000);
  }
};

// What is finite and beyond 65,504 becomes that.
struct Float16Row {
  static constexpr int64_t kValueBytes = 2;
  static constexpr int kPerLane = 1;
  static int64_t size_bytes(int64_t head_dim) { return 2 * head_dim; }
  static float scale(const uint8_t*, int64_t) { return 1; }

  static uint16_t round(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;   // not a number
    if (magnitude == 0x7f800000) return sign | 0x7c00;
    if (magnitude >= 0x477fe000) return sign | 0x7bff;
    // Below the normal range an addition rounds at the place of the last bit: 0.5 has its own 2^-24 away.
    if (magnitude < 0x38800000) return sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000);
    return sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }

  static void write(const float* x, int64_t head_dim, uint8_t* row) {
    int64_t d = 0;
#if defined(__AVX512F__) || defined(__F16C__)
    for (; d + kLanes <= head_dim; d += kLanes) {
      const Vec values = load(x + d), largest = splat(65504.0f), infinity = splat(INFINITY);
      Vec kept = values > largest && values < infinity ? largest : values;
      kept = kept < -largest && kept > -infinity ? -largest : kept;
      kept = kept == kept ? kept : (Vec)(((BitsVec)kept & 0x80000000) | 0x7fc00000);
#if defined(__AVX512F__)
      const HalfVec halves = (HalfVec)_mm512_cvtps_ph((__m512)kept, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
      const HalfVec halves = (HalfVec)_mm256_cvtps_ph((__m256)kept, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
      std::memcpy(row + 2 * d, &halves, sizeof halves);
    }
#endif
    for (; d < head_dim; d++) {
      const uint16_t half = round(x[d]);
      std::memcpy(row + 2 * d, &half, 2);
    }
  }

  static Vec vector(const uint8_t* row, int64_t d, float) {
    const HalfVec halves = *(const HalfVecUnaligned*)(row + 2 * d);
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps((__m128i)halves);
#else
    const BitsVec bits = __builtin_convertvector(halves, BitsVec), magnitude = bits & 0x7fff;
    const BitsVec scaled = (BitsVec)((Vec)(magnitude << 13) * splat(0x1p112f));
    return (Vec)((magnitude >= 0x7c00 ? 0x7f800000 | magnitude << 13 : scaled) | (bits & 0x8000) << 16);
#endif
  }

  static float value(const uint8_t* row, int64_t d, float) {
    const uint16_t half = half_at(row + 2 * d);
    const uint32_t magnitude = half & 0x7fffu;
    const float scaled = float_of(magnitude << 13) * 0x1p112f;
    const uint32_t bits = magnitude >= 0x7c00 ? 0x7f800000 | magnitude << 13 : bits_of(scaled);
    return float_of(bits | (half & 0x8000u) << 16);
  }
};

// head_dim int8 values, then their scale as float32: x = value * scale, scale = max |x| / 127.
struct Int8Row {
  static constexpr int64_t kValueBytes = 1;
  static constexpr int kPerLane = 4;
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

  static float scale(const uint8_t* row, int64_t head_dim) {
    float scale;
    std::memcpy(&scale, row + head_dim, 4);
    return scale;
  }
  static Vec vector(const uint8_t* row, int64_t d, float scale) {
    const IntVec whole = __builtin_convertvector((ByteVec)*(const ByteVecUnaligned*)(row + d), IntVec);
    return __builtin_convertvector(whole, Vec) * splat(scale);
  }
  static Vec unpacked(Vec lanes, int which, Vec scales) {
    return __builtin_convertvector((IntVec)((BitsVec)lanes << (24 - 8 * which)) >> 24, Vec) * scales;
  }
  static float value(const uint8_t* row, int64_t d, float scale) { return static_cast<int8_t>(row[d]) * scale; }
};

// One layer of the cache, as kernels/cpu.py describes it: rows of `format` where they lie.
enum RowFormat : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3 };

struct RowCache {
  uint8_t* blocks;       // [num_blocks, 2, num_kv_heads, block_size, bytes of a row]
  int64_t format;
  int64_t block_stride;  // bytes from one block to the next
  int64_t block_size;
};

// Calls body(a row of the format).
template <typename Body>
void with_rows_of(const RowCache& cache, const Body& body) {
  switch (cache.format) {
    case kFloat32: return body(Float32Row{});
    case kBfloat16: return body(Bfloat16Row{});
    case kFloat16: return body(Float16Row{});
    case kInt8: return body(Int8Row{});
  }
}

// Writes keys and values of one token, [2 * num_kv_heads, head_dim], into a slot; a negative one is a padded row's.
inline void store_kv(const RowCache& c, const float* heads, int64_t num_kv_heads, int64_t head_dim, int64_t slot) {
  if (slot < 0) return;
  with_rows_of(c, [&](auto row) {
    const int64_t size = row.size_bytes(head_dim);
    uint8_t* place = c.blocks + slot / c.block_size * c.block_stride + slot % c.block_size * size;
    for (int64_t h = 0; h < 2 * num_kv_heads; h++)
      row.write(heads + h * head_dim, head_dim, place + h * c.block_size * size);
  });
}

}  // namespace
