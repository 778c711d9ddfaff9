// Row-wise operations between the matrix products of a layer, each in one pass over memory.

#include <cmath>
#include <cstdint>

#include "vector.h"

namespace {

using namespace folio;

// out[r] = x[r] / rms(x[r]) * (weight + offset)
template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t size, float eps, float offset) {
#pragma omp parallel for if (rows * size > kParallelElements)
  for (int64_t r = 0; r < rows; r++) {
    const T* row = x + r * size;
    Vec sum = {};
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vec v = load_some(row + i, size - i);
      sum += v * v;
    }
    const float scale = 1.0f / std::sqrt(sum_lanes(sum) / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vec v = load_some(row + i, size - i) * scale * (load_some(weight + i, size - i) + offset);
      store_some(v, out + r * size + i, size - i);
    }
  }
}

// out[r][i] = silu(x[r][i]) * x[r][size + i]
template <typename T>
void silu_mul(const T* x, T* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > kParallelElements)
  for (int64_t r = 0; r < rows; r++) {
    const T *gate = x + r * 2 * size, *up = gate + size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vec g = load_some(gate + i, size - i);
      const Vec decay = exp2_vec((g < 0.0f ? g : -g) * kLog2E);  // exp(-|g|), never overflows
      const Vec sigmoid = (g < 0.0f ? decay : broadcast(1.0f)) / (1.0f + decay);
      store_some(g * sigmoid * load_some(up + i, size - i), out + r * size + i, size - i);
    }
  }
}

// Rotate the first `dim` elements of every head, pairs dim / 2 apart: x = x * cos + rotated * sin
template <typename T>
void rotate(T* x, const T* cos, const T* sin, int64_t rows, int64_t heads, int64_t dim, int64_t row_stride,
            int64_t head_stride) {
  const int64_t half = dim / 2;
#pragma omp parallel for if (rows * heads * dim > kParallelElements)
  for (int64_t r = 0; r < rows; r++) {
    const T *c = cos + r * dim, *s = sin + r * dim;
    for (int64_t h = 0; h < heads; h++) {
      T *first = x + r * row_stride + h * head_stride, *second = first + half;
      for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t left = half - i;
        const Vec a = load_some(first + i, left), b = load_some(second + i, left);
        store_some(a * load_some(c + i, left) - b * load_some(s + i, left), first + i, left);
        store_some(b * load_some(c + half + i, left) + a * load_some(s + half + i, left), second + i, left);
      }
    }
  }
}

}  // namespace

extern "C" {

// dtype: 0 float32, 1 bfloat16, 2 float16.
void folio_rms_norm(int dtype, const void* x, const void* weight, void* out, int64_t rows, int64_t size, float eps,
                    float offset) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    rms_norm(static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<T*>(out), rows, size, eps, offset);
  });
}

void folio_silu_mul(int dtype, const void* x, void* out, int64_t rows, int64_t size) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    silu_mul(static_cast<const T*>(x), static_cast<T*>(out), rows, size);
  });
}

void folio_rotate(int dtype, void* x, const void* cos, const void* sin, int64_t rows, int64_t heads, int64_t dim,
                  int64_t row_stride, int64_t head_stride) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    rotate(static_cast<T*>(x), static_cast<const T*>(cos), static_cast<const T*>(sin), rows, heads, dim, row_stride,
           head_stride);
  });
}

}  // extern "C"
