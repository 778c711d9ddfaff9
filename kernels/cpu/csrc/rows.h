// Row-wise operations between the matrix products of a layer, each in one pass over memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "team.h"
#include "vector.h"

namespace folio {

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

// out = norm of x, `x / rms(x) * (weight + offset)`. With a residual and a sum, x is sum = residual + x; with a
// residual alone, it is added to the norm.
template <typename X, typename T, typename Out>
void norm_row(const X* x, const Out* residual, const T* weight, Out* out, int64_t size, float eps, float offset,
              X* sum = nullptr) {
  if (sum) {
    for (int64_t i = 0; i < size; i += kLanes)
      store_some(load_some(residual + i, size - i) + load_some(x + i, size - i), sum + i, size - i);
    x = sum;
    residual = nullptr;
  }
  const float scale = inverse_rms(x, size, eps);
  for (int64_t i = 0; i < size; i += kLanes) {
    Vec v = load_some(x + i, size - i) * scale * (load_some(weight + i, size - i) + offset);
    if (residual) v += load_some(residual + i, size - i);
    store_some(v, out + i, size - i);
  }
}

// `norm_row` of each row; residual and sum may be null.
template <typename X, typename T, typename Out>
void norm_rows(Team& team, const X* x, const Out* residual, const T* weight, Out* out, int64_t rows, int64_t size,
               float eps, float offset, X* sum = nullptr) {
  team.each(rows, [&](int64_t r) {
    norm_row(x + r * size, residual ? residual + r * size : nullptr, weight, out + r * size, size, eps, offset,
             sum ? sum + r * size : nullptr);
  });
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
void gate_rows(Team& team, const T* x, T* out, int64_t rows, int64_t size) {
  constexpr int64_t kColumns = 64 * kLanes;
  const int64_t pieces = (size + kColumns - 1) / kColumns;
  team.each(rows * pieces, [&](int64_t piece) {
    const int64_t row = piece / pieces, begin = piece % pieces * kColumns;
    const T *gates = x + row * 2 * size, *ups = gates + size;
    for (int64_t i = begin; i < std::min(size, begin + kColumns); i += kLanes) {
      const Vec active = Activation::apply(load_some(gates + i, size - i));
      store_some(active * load_some(ups + i, size - i), out + row * size + i, size - i);
    }
  });
}

// activation: 0 silu, 1 gelu, 2 gelu by tanh.
template <typename T>
void gate_rows(Team& team, int activation, const T* x, T* out, int64_t rows, int64_t size) {
  const auto run = activation == 0 ? gate_rows<Silu, T> : activation == 1 ? gate_rows<Gelu, T> : gate_rows<GeluTanh, T>;
  run(team, x, out, rows, size);
}

}  // namespace folio
