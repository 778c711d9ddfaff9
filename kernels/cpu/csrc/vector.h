// Vectors of 16 floats, and conversions of shorter floats. GCC's vector extensions lower them to the processor's
// vectors; intrinsics are used only where the extensions do not suffice.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace folio {

constexpr int kLanes = 16;  // floats in a vector
constexpr float kLog2E = 1.44269504f;
constexpr int64_t kParallelElements = 1 << 15;  // below, a second thread costs more than it saves
constexpr float kInf = std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef uint32_t BitsVec __attribute__((vector_size(64)));
typedef uint16_t ShortVec __attribute__((vector_size(32)));
typedef float UnalignedVec __attribute__((vector_size(64), aligned(4)));

struct BFloat16 {
  uint16_t bits;
};
#if defined(__aarch64__)
typedef __fp16 Half;  // GCC 12 has no _Float16 there
#else
typedef _Float16 Half;
#endif

inline float to_float(float x) { return x; }
inline float to_float(Half x) { return static_cast<float>(x); }
inline float to_float(BFloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, Half* out) { *out = static_cast<Half>(x); }
inline void from_float(float x, BFloat16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) {
    out->bits = 0x7fc0;
  } else {
    out->bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // round to nearest even
  }
}

inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }
inline Vec broadcast(float x) { return x - Vec{}; }  // + would keep an addition, for -0

// 2^x by splitting off the integer part; x <= 0 here, and below -126 the result is flushed to 0.
inline Vec exp2_vec(Vec x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec clamped = x < -126.0f ? broadcast(-126.0f) : x;
  Vec shifted = clamped + magic;
  Vec f = clamped - (shifted - magic);  // in [-0.5, 0.5]
  Vec p = broadcast(1.5403530e-4f);
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  IntVec exponent = (reinterpret_cast<IntVec>(shifted) - reinterpret_cast<IntVec>(magic)) << 23;
  Vec result = reinterpret_cast<Vec>(reinterpret_cast<IntVec>(p) + exponent);
  return x < -126.0f ? Vec{} : result;
}

inline Vec max_vec(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

// 2^x with a relative error of 4e-5, for weights that are rounded to bfloat16.
inline Vec exp2_rough(Vec x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  const Vec f = (Vec)_mm512_reduce_ps((__m512)x, 0);  // x minus the nearest integer
  Vec p = broadcast(9.6181291e-3f);
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  // Rounds x towards minus infinity itself, hence x - f.
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)(x - f));
#else
  return exp2_vec(x);
#endif
}

// cap * tanh(s / cap), tanh by exp of a negative number
inline Vec soft_cap(Vec s, float cap) {
  Vec x = s / cap;
  Vec magnitude = x < 0.0f ? -x : x;
  Vec e = exp2_vec(magnitude * (-2.0f * kLog2E));
  Vec tanh = (1.0f - e) / (1.0f + e);
  return (x < 0.0f ? -tanh : tanh) * cap;
}

inline IntVec lane_numbers() { return IntVec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
inline Vec to_floats(IntVec v) { return __builtin_convertvector(v, Vec); }

inline float highest_lane(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v));
#else
  float result = v[0];
  for (int i = 1; i < kLanes; i++) result = std::max(result, v[i]);
  return result;
#endif
}
inline float sum_lanes(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v));
#else
  float result = 0.0f;
  for (int i = 0; i < kLanes; i++) result += v[i];
  return result;
#endif
}

// Widen `count` elements to floats, zeros up to the next full vector.
template <typename T>
inline void widen(const T* from, int count, float* to) {
  int i = 0;
  for (; i < count; i++) to[i] = to_float(from[i]);
  for (; i % kLanes; i++) to[i] = 0.0f;
}
#if defined(__AVX512F__) && defined(__AVX512BW__)
template <>
inline void widen<BFloat16>(const BFloat16* from, int count, float* to) {
  for (int i = 0; i < count; i += kLanes) {
    __mmask16 mask = count - i >= kLanes ? 0xffff : static_cast<__mmask16>((1u << (count - i)) - 1);
    __m256i bits = _mm256_maskz_loadu_epi16(mask, from + i);
    __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
    _mm512_storeu_ps(to + i, _mm512_castsi512_ps(wide));
  }
}
#endif

// Load or store up to 16 elements, `count` of them valid; the rest reads as zero and is not written.
template <typename T>
inline Vec load_some(const T* from, int64_t count) {
  alignas(64) float lanes[kLanes];
  widen(from, static_cast<int>(std::min<int64_t>(count, kLanes)), lanes);
  return load(lanes);
}
template <typename T>
inline void store_some(Vec v, T* to, int64_t count) {
  for (int i = 0; i < std::min<int64_t>(count, kLanes); i++) from_float(v[i], to + i);
}
template <>
inline Vec load_some<float>(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  alignas(64) float lanes[kLanes] = {};
  std::memcpy(lanes, from, count * sizeof(float));
  return load(lanes);
}
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
inline __mmask16 first_lanes(int64_t count) {
  return count >= kLanes ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
}
template <>
inline Vec load_some<BFloat16>(const BFloat16* from, int64_t count) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), from));
  return reinterpret_cast<Vec>(_mm512_slli_epi32(wide, 16));
}
#if defined(__AVX512BF16__)
template <>
inline void store_some<BFloat16>(Vec v, BFloat16* to, int64_t count) {
  const __m256bh narrow = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));  // rounds to nearest even
  _mm256_mask_storeu_epi16(to, first_lanes(count), reinterpret_cast<__m256i>(narrow));
}
#endif
#else
template <>
inline Vec load_some<BFloat16>(const BFloat16* from, int64_t count) {
  ShortVec bits = {};
  if (count >= kLanes) std::memcpy(&bits, from, sizeof bits);
  else std::memcpy(&bits, from, count * sizeof *from);
  return reinterpret_cast<Vec>(__builtin_convertvector(bits, BitsVec) << 16);
}
template <>
inline void store_some<BFloat16>(Vec v, BFloat16* to, int64_t count) {
  BitsVec bits = reinterpret_cast<BitsVec>(v);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // round to nearest even
  const ShortVec narrow = __builtin_convertvector(v == v ? bits : BitsVec{} + 0x7fc0, ShortVec);
  if (count >= kLanes) std::memcpy(to, &narrow, sizeof narrow);
  else std::memcpy(to, &narrow, count * sizeof *to);
}
#endif

// The floats as a T would hold them.
template <typename T>
inline Vec rounded(Vec v) {
  T lanes[kLanes];
  store_some(v, lanes, kLanes);
  return load_some(lanes, kLanes);
}

// Calls the function with a compile-time number of kLeast … kMost, the one given, or kLeast if that is less.
template <int kLeast, int kMost, typename Function>
inline void with_count(int count, Function function) {
  if constexpr (kMost > kLeast)
    if (count < kMost) return with_count<kLeast, kMost - 1>(count, function);
  function(std::integral_constant<int, kMost>{});
}

template <typename Function>
inline bool with_type(int dtype, Function function) {
  switch (dtype) {
    case 0: function(float{}); return true;
    case 1: function(BFloat16{}); return true;
    case 2: function(Half{}); return true;
    default: return false;
  }
}

}  // namespace folio
