// Vectors of floats as GCC/Clang vector extensions; the build gives the instruction set (see pyproject.toml).

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kAccumulators = 24;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8, kAccumulators = 12;
#else
constexpr int kLanes = 4, kAccumulators = 12;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float VecUnaligned __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));

inline Vec load(const float* p) { return *reinterpret_cast<const VecUnaligned*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<VecUnaligned*>(p) = v; }
inline Vec splat(float s) { return s - Vec{}; }

// The first `count` of kLanes floats; the rest is 0, and left alone in memory.
inline Vec load_some(const float* p, int64_t count) {
  if (count == kLanes) return load(p);
  Vec v = {};
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}
inline void store_some(float* p, Vec v, int64_t count) {
  if (count == kLanes) return store(p, v);
  std::memcpy(p, &v, count * sizeof(float));
}

// Scratch that grows and is kept; it begins with a line of the cache, so that threads that write columns of it apart
// share no line.
class Floats {
 public:
  float* grown(int64_t size) {
    if (int64_t(floats_.size()) < size + 16) floats_.resize(size + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(floats_.data()) + 63) / 64 * 64);
  }

 private:
  std::vector<float> floats_;
};

// a * b + c, with one rounding where the processor can; never left to the compiler's choice.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline float fma(float a, float b, float c) {
#if defined(__FMA__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// a where it is larger than b, else b, also where a is not a number.
inline Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// Bit i: whether x[i] is at least `border`, of `count` <= 64.
inline uint64_t at_least(const float* x, int64_t count, float border) {
  uint64_t bits = 0;
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + kLanes <= count; i += kLanes)
    bits |= uint64_t(_mm512_cmp_ps_mask((__m512)load(x + i), _mm512_set1_ps(border), _CMP_GE_OQ)) << i;
#elif defined(__AVX2__)
  for (; i + kLanes <= count; i += kLanes)
    bits |= uint64_t(_mm256_movemask_ps(_mm256_cmp_ps((__m256)load(x + i), _mm256_set1_ps(border), _CMP_GE_OQ))) << i;
#endif
  for (; i < count; i++) bits |= uint64_t(x[i] >= border) << i;
  return bits;
}

// Lanes combined pairwise in a fixed tree: i with i + kLanes / 2, then the same of the first half.
template <typename Combine>
inline float fold_lanes(Vec v, const Combine& combine) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 upper = _mm512_extractf32x8_ps((__m512)v, 1), eight = combine(_mm512_castps512_ps256((__m512)v), upper);
#else
  const __m256 eight = (__m256)v;
#endif
  const __m128 four = combine(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = combine(four, _mm_movehl_ps(four, four));
  return combine(two, _mm_movehdup_ps(two))[0];
#else
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = combine(lanes[i], lanes[i + width]);
  return lanes[0];
#endif
}

inline float sum_lanes(Vec v) {
  return fold_lanes(v, [](auto a, auto b) { return a + b; });
}

// A sum over a row has this many partial sums, whatever the length of a vector, so that builds have the same bits.
constexpr int kSumLanes = 16;

template <int kVectors>
inline float sum_lanes(Vec (&sums)[kVectors]) {
  static_assert(kVectors * kLanes == kSumLanes);
  for (int width = kVectors / 2; width > 0; width /= 2)
    for (int v = 0; v < width; v++) sums[v] += sums[v + width];
  return sum_lanes(sums[0]);
}

// None of them may be what is not a number.
inline float largest_lane(Vec v) {
  return fold_lanes(v, [](auto a, auto b) { return a > b ? a : b; });
}

// Swaps lane j of row i with lane i of row j: log2(kLanes) rounds in which pairs of rows exchange halves.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define PDSERVE_SHUFFLES 1
#endif
#endif

#if defined(PDSERVE_SHUFFLES)
template <int kHalf, int... kLane>
inline void exchange(Vec& upper, Vec& lower, std::integer_sequence<int, kLane...>) {
  const Vec first = __builtin_shufflevector(upper, lower, ((kLane & kHalf) ? kLane - kHalf + kLanes : kLane)...);
  lower = __builtin_shufflevector(upper, lower, ((kLane & kHalf) ? kLane + kLanes : kLane + kHalf)...);
  upper = first;
}

template <int kHalf>
inline void exchange_all(Vec* rows) {
  for (int i = 0; i < kLanes; i++)
    if (!(i & kHalf)) exchange<kHalf>(rows[i], rows[i + kHalf], std::make_integer_sequence<int, kLanes>());
}

inline void transpose(Vec* rows) {
  exchange_all<1>(rows);
  exchange_all<2>(rows);
  if constexpr (kLanes >= 8) exchange_all<4>(rows);
  if constexpr (kLanes >= 16) exchange_all<8>(rows);
}
#else
inline void transpose(Vec* rows) {
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < i; j++) {
      const float kept = rows[i][j];
      rows[i][j] = rows[j][i], rows[j][i] = kept;
    }
}
#endif

// While it lives, this thread takes subnormal numbers as 0, and rounds to 0 what would become one, unless
// `has_subnormals`. Not for short work: setting the register waits for all that is under way (a tenth of a microsecond
// here). On other processors it does nothing.
class SubnormalGuard {
 public:
#if defined(__x86_64__)
  explicit SubnormalGuard(bool has_subnormals) : before_(_mm_getcsr()), is_set_(!has_subnormals) {
    if (is_set_) _mm_setcsr(before_ | kFlushToZero | kSubnormalsAreZeros);
  }
  ~SubnormalGuard() {
    if (is_set_) _mm_setcsr(before_);
  }
  SubnormalGuard(const SubnormalGuard&) = delete;
  SubnormalGuard& operator=(const SubnormalGuard&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kSubnormalsAreZeros = 0x0040;
  const unsigned before_;
  const bool is_set_;
#else
  explicit SubnormalGuard(bool) {}
#endif
};

// exp(x) for x <= 0: 2^n * p(r) with |r| <= ln(2)/2 and a degree-6 polynomial, relative error below 2e-7.
inline Vec exp_nonpositive(Vec x) {
  x = x < splat(-87.0f) ? splat(-87.0f) : x;
  Vec scaled = fma(x, splat(1.44269504f), splat(12582912.0f));  // rounds to an integer in the low bits
  Vec n = scaled - splat(12582912.0f);
  Vec r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.0f / 720);
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  IntVec bits = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return p * (Vec)bits;
}

inline float exp_nonpositive(float x) { return exp_nonpositive(splat(x))[0]; }

inline Vec floored(Vec x) {
#if defined(__AVX512F__)
  return (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (Vec)_mm256_floor_ps((__m256)x);
#else
  const Vec whole = __builtin_convertvector(__builtin_convertvector(x, IntVec), Vec);
  return whole > x ? whole - splat(1.0f) : whole;
#endif
}

// exp(x) for x <= 0, for what is rounded to bfloat16 at once: 2^n * p(f) with f in [0, 1), relative error below 2e-5,
// and 0 for what would be below 2^-126.
inline Vec coarse_exp_nonpositive(Vec x) {
  const Vec power = x * splat(1.44269504f), least = splat(-126.0f);
  const Vec bounded = larger(least, power);  // also where it is not a number
  const Vec n = floored(bounded), f = bounded - n;
  Vec p = splat(0.0134266847f);
  p = fma(p, f, splat(0.0522424728f));
  p = fma(p, f, splat(0.241280198f));
  p = fma(p, f, splat(0.693044841f));
  p = fma(p, f, splat(1.0f));
#if defined(__AVX512F__)
  const __mmask16 is_kept = _mm512_cmp_ps_mask((__m512)power, (__m512)least, _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(is_kept, (__m512)p, (__m512)n);
#else
  const IntVec bits = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return power < least ? Vec{} : p * (Vec)bits;
#endif
}

}  // namespace
