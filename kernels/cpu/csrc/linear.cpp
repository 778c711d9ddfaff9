// Linear layers: a matrix product with packed weights, and the packing.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "product.h"
#include "vector.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)

namespace {

using namespace folio;
using namespace folio::products;

constexpr int64_t kParallelProducts = 1 << 16;  // below, a second thread costs more than it saves

// `scales`, for 8-bit weights: an output's largest weight is 127 times its scale.
template <typename T, typename S>
void pack(const T* weight, S* packed, float* scales, int64_t outputs, int64_t inputs) {
  constexpr int kWide = kPerWord<T>;
  const int64_t words = words_of<T>(inputs), tiles = (outputs + kTile - 1) / kTile;
#pragma omp parallel for
  for (int64_t tile = 0; tile < tiles; tile++) {
    S* to = packed + tile * words * kTile * kWide;
    std::memset(to, 0, words * kTile * kWide * sizeof(S));
    for (int64_t i = 0; i < std::min<int64_t>(kTile, outputs - tile * kTile); i++) {
      const int64_t output = tile * kTile + i;
      const T* row = weight + output * inputs;
      float largest = 0.0f;
      if constexpr (sizeof(S) != sizeof(T)) {
        for (int64_t j = 0; j < inputs; j++) largest = std::max(largest, std::fabs(to_float(row[j])));
        scales[output] = largest / 127.0f;
      }
      const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
      for (int64_t j = 0; j < inputs; j++) {
        S* at = to + (j / kWide * kTile + i) * kWide + j % kWide;
        if constexpr (sizeof(S) == sizeof(T)) *at = row[j];
        else *at = static_cast<S>(std::lrintf(to_float(row[j]) * inverse));
      }
    }
  }
}

}  // namespace

#endif

extern "C" {

// True if this processor has the products; dtype: 0 float32, 1 bfloat16, 2 float16.
int folio_linear_supports(int dtype) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  return dtype == 0 || dtype == 1;
#elif defined(__AVX512F__) && defined(__AVX512BW__)
  return dtype == 0;
#else
  return 0;
#endif
}

// With scales, which are filled, weights are packed as 8-bit integers.
void folio_linear_pack(int dtype, const void* weight, void* packed, float* scales, int64_t outputs, int64_t inputs) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(weight);
    if (scales) pack(from, static_cast<int8_t*>(packed), scales, outputs, inputs);
    else pack(from, static_cast<T*>(packed), scales, outputs, inputs);
  });
#endif
}

// x [rows, inputs], out [rows, outputs]; scales or bias may be null; panels: room for rows × words.
void folio_linear(int dtype, const void* x, const void* packed, const float* scales, const void* bias, void* out,
                  void* panels, int64_t rows, int64_t outputs, int64_t inputs) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const ProductWeight weight{packed, scales, bias, outputs, inputs};
  const auto run = [&](auto type, auto stored) {
    using T = decltype(type);
    in_team(rows * outputs * inputs > kParallelProducts, kSteps, [&](Team& team) {
      multiply<T, decltype(stored)>(team, weight, static_cast<const T*>(x), nullptr, static_cast<T*>(out),
                                    static_cast<Word*>(panels), rows);
    });
  };
  if (dtype == 0) scales ? run(float{}, int8_t{}) : run(float{}, float{});
#if defined(__AVX512BF16__)
  if (dtype == 1) scales ? run(BFloat16{}, int8_t{}) : run(BFloat16{}, BFloat16{});
#endif
#endif
}

}  // extern "C"
