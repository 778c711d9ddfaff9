// Weights of products, as their packing functions leave them.
#pragma once

#include <cstdint>

#include "vector.h"

extern "C" {

// Neighbouring outputs whose weights are packed in one way. Mirrored field by field in kernels/cpu/ops.py.
struct WeightPart {
  const void* codes;           // or the values, if `bits` is 0
  const void *scales, *supers;  // of codes, see codes.h; supers may be null
  const float* factors;        // [outputs] or null
  const uint8_t* table;        // 16 values, 128 added to each; or null
  int64_t outputs;
  int32_t bits, zero;
  int32_t every;  // least groups of inputs with one scale
  int32_t has_offsets;
};

// A weight [outputs, inputs], of one part unless it is quantised. Mirrored in kernels/cpu/ops.py.
struct ProductWeight {
  const WeightPart* parts;
  const void* bias;      // [outputs] or null
  const int32_t* order;  // [inputs]: column i belongs to input order[i]; or null
  int64_t outputs, inputs;
  int32_t num_parts;
  int32_t batch_invariant;  // 1: multiplied in vectors, however many rows there are
};

// What becomes of a product: it is stored in the dtype of its rows, or in float32, or added to float32.
enum ProductKind : int32_t { kRounded, kFloats, kAdded };

struct ProductResult {
  void* values;  // [rows, outputs]
  int32_t kind;
};

}  // extern "C"

namespace folio {

constexpr int kProductSteps = 2;  // calls of `Team::each` in a product
// Up to here each thread prepares all rows for itself, which takes less time than to wait for the others.
constexpr int64_t kOwnRows = 2;

// Sums of up to 16 outputs of a row of T, of which element `at` of the result is the first.
template <typename T>
inline void put(const ProductResult& result, Vec sums, int64_t at, int64_t left) {
  if (result.kind == kRounded) return store_some(sums, static_cast<T*>(result.values) + at, left);
  float* const to = static_cast<float*>(result.values) + at;
  store_some(result.kind == kAdded ? load_some(to, left) + sums : sums, to, left);
}

}  // namespace folio
