// Rows of an int8 cache: the codes of a token's head, and behind them their scale, a float (kernels/int8_cache.py).
//
// Attention multiplies codes, which float and bfloat16 hold exactly: scores are multiplied by the keys' scales, and
// weights by the values'.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "vector.h"

namespace folio {

typedef int8_t CodeVec __attribute__((vector_size(16)));

inline float scale_of(const int8_t* row, int dim) {
  float scale;
  std::memcpy(&scale, row + dim, sizeof scale);
  return scale;
}

// Up to 16 codes, `count` of them valid; the rest reads as zero. Reads nothing behind the row, which may end a page.
inline Vec load_codes(const int8_t* from, int count) {
  CodeVec codes = {};
  if (count >= kLanes) std::memcpy(&codes, from, sizeof codes);
  else std::memcpy(&codes, from, count);
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)codes));
#elif defined(__AVX2__)
  const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)codes));
  const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)codes, 8)));
  Vec floats;
  std::memcpy(&floats, &low, sizeof low);
  std::memcpy(reinterpret_cast<char*>(&floats) + sizeof low, &high, sizeof high);
  return floats;
#else
  return __builtin_convertvector(__builtin_convertvector(codes, IntVec), Vec);
#endif
}

// The codes of a row, with zeros up to 32.
inline void widen_codes(const int8_t* row, int dim, float* to) {
  for (int c = 0; c < dim; c += kLanes) store(to + c, load_codes(row + c, dim - c));
}
inline void widen_codes(const int8_t* row, int dim, BFloat16* to) {
  for (int c = 0; c < dim; c += 2 * kLanes) {
    const Vec first = load_codes(row + c, dim - c);
    const Vec second = dim - c > kLanes ? load_codes(row + c + kLanes, dim - c - kLanes) : Vec{};
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(to + c, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    store_some(first, to + c, kLanes);
    store_some(second, to + c + kLanes, kLanes);
#endif
  }
}

// The row of `dim` elements: rounded to nearest, the largest becomes 127. With a NaN or an infinity its scale is NaN.
template <typename T>
void quantise_row(const T* from, int dim, int8_t* row) {
  Vec top = {}, wrong = {};
  for (int c = 0; c < dim; c += kLanes) {
    const Vec v = load_some(from + c, dim - c);
    top = max_vec(top, v < 0.0f ? -v : v);
    wrong += v - v;  // NaN unless finite
  }
  const bool finite = sum_lanes(wrong) == 0.0f;
  const float largest = std::max(highest_lane(top), 1e-30f), factor = 127.0f / largest;
  const float scale = finite ? largest / 127.0f : NAN;
  std::memcpy(row + dim, &scale, sizeof scale);
  if (!finite) {
    std::memset(row, 0, dim);
    return;
  }
  for (int c = 0; c < dim; c += kLanes) {
    // Adding 1.5 * 2^23 rounds to an integer, to nearest even.
    const Vec shifted = load_some(from + c, dim - c) * factor + 12582912.0f;
    const IntVec integers = (IntVec)shifted - 0x4b400000;
    const CodeVec codes = __builtin_convertvector(integers, CodeVec);
    std::memcpy(row + c, &codes, std::min(kLanes, dim - c));
  }
}

}  // namespace folio
