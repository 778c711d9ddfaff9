// Norms and gated activations of many rows.

#include <cstdint>

#include "rows.h"
#include "team.h"
#include "vector.h"

extern "C" {

// dtype: 0 float32, 1 bfloat16, 2 float16. `residual` and `sum` may be null, as `norm_row` says.
void folio_rms_norm(int dtype, const void* x, const void* residual, const void* weight, void* out, void* sum,
                    int64_t rows, int64_t size, float eps, float offset) {
  using namespace folio;
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    in_team(rows * size > kParallelElements, 1, [&](Team& team) {
      norm_rows(team, static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const T*>(weight),
                static_cast<T*>(out), rows, size, eps, offset, static_cast<T*>(sum));
    });
  });
}

// activation: 0 silu, 1 gelu, 2 gelu by tanh.
void folio_gate(int dtype, int activation, const void* x, void* out, int64_t rows, int64_t size) {
  using namespace folio;
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    in_team(rows * size > kParallelElements, 1, [&](Team& team) {
      gate_rows(team, activation, static_cast<const T*>(x), static_cast<T*>(out), rows, size);
    });
  });
}

}  // extern "C"
