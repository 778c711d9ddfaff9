// Row-wise operations between the matrix products of a layer, each in one pass over memory.

#include <cmath>
#include <cstdint>

#include "vector.h"

namespace {

using namespace folio;

// 1 / rms of a row
template <typename T>
float inverse_rms(const T* row, int64_t size, float eps) {
  Vec sum = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec v = load_some(row + i, size - i);
    sum += v * v;
  }
  return 1.0f / std::sqrt(sum_lanes(sum) / static_cast<float>(size) + eps);
}

// out[r] = norm of x[r], `x / rms(x) * (weight + offset)`. With a residual and a sum, x is sum[r] = residual[r] + x[r];
// with a residual alone, it is added to the norm.
template <typename T>
void rms_norm(const T* x, const T* residual, const T* weight, T* out, T* sum, int64_t rows, int64_t size, float eps,
              float offset) {
#pragma omp parallel for if (rows * size > kParallelElements)
  for (int64_t r = 0; r < rows; r++) {
    const T *row = x + r * size, *other = residual ? residual + r * size : nullptr;
    if (sum) {
      T* total = sum + r * size;
      for (int64_t i = 0; i < size; i += kLanes)
        store_some(load_some(other + i, size - i) + load_some(row + i, size - i), total + i, size - i);
      row = total;
      other = nullptr;
    }
    const float scale = inverse_rms(row, size, eps);
    for (int64_t i = 0; i < size; i += kLanes) {
      Vec v = load_some(row + i, size - i) * scale * (load_some(weight + i, size - i) + offset);
      if (other) v += load_some(other + i, size - i);
      store_some(v, out + r * size + i, size - i);
    }
  }
}

// 1 / (1 + exp(-x)); exp never overflows
inline Vec sigmoid(Vec x) {
  const Vec decay = exp2_vec((x < 0.0f ? x : -x) * kLog2E);
  return (x < 0.0f ? decay : broadcast(1.0f)) / (1.0f + decay);
}

// The normal distribution function (Abramowitz and Stegun 7.1.26): absolute error 8e-8
inline Vec normal(Vec x) {
  const Vec far = (x < 0.0f ? -x : x) * 0.70710678f;
  const Vec t = 1.0f / (1.0f + 0.3275911f * far);
  Vec p = broadcast(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Vec tail = 0.5f * p * t * exp2_vec(-far * far * kLog2E);
  return x < 0.0f ? tail : 1.0f - tail;
}

struct Silu {
  static Vec apply(Vec x) { return x * sigmoid(x); }
};
struct Gelu {
  static Vec apply(Vec x) { return x * normal(x); }
};
struct GeluTanh {  // (1 + tanh(u)) / 2 = sigmoid(2 u)
  static Vec apply(Vec x) { return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x)); }
};

// out[r][i] = activation(x[r][i]) * x[r][size + i]
template <typename Activation, typename T>
void gate(const T* x, T* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > kParallelElements)
  for (int64_t r = 0; r < rows; r++) {
    const T *gates = x + r * 2 * size, *ups = gates + size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vec active = Activation::apply(load_some(gates + i, size - i));
      store_some(active * load_some(ups + i, size - i), out + r * size + i, size - i);
    }
  }
}

}  // namespace

extern "C" {

// dtype: 0 float32, 1 bfloat16, 2 float16. `residual` and `sum` may be null, as `rms_norm` above says.
void folio_rms_norm(int dtype, const void* x, const void* residual, const void* weight, void* out, void* sum,
                    int64_t rows, int64_t size, float eps, float offset) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    rms_norm(static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const T*>(weight),
             static_cast<T*>(out), static_cast<T*>(sum), rows, size, eps, offset);
  });
}

// activation: 0 silu, 1 gelu, 2 gelu by tanh.
void folio_gate(int dtype, int activation, const void* x, void* out, int64_t rows, int64_t size) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    const auto run = activation == 0 ? gate<Silu, T> : activation == 1 ? gate<Gelu, T> : gate<GeluTanh, T>;
    run(static_cast<const T*>(x), static_cast<T*>(out), rows, size);
  });
}

}  // extern "C"
