// Weights of products, as their packing functions leave them.
#pragma once

#include <cstdint>

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
};

}  // extern "C"

namespace folio {

constexpr int kProductSteps = 2;  // calls of `Team::each` in a product
// Up to here each thread prepares all rows for itself, which takes less time than to wait for the others.
constexpr int64_t kOwnRows = 2;

}  // namespace folio
