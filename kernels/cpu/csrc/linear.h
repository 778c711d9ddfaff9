// Products with packed weights, by the kernel that this processor has for their form.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codes.h"
#include "matrix_tiles.h"
#include "product.h"
#include "team.h"
#include "weight.h"
#include "wide_product.h"

namespace folio {

// True if weights that are not quantised are multiplied by `native`, else by `wide`.
template <typename T>
constexpr bool kNativeProduct =
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    true;
#elif defined(__AVX512F__) && defined(__AVX512BW__)
    std::is_same_v<T, float>;
#else
    false;
#endif

// Bytes of the packed rows of a product.
template <typename T>
int64_t panel_bytes(const ProductWeight& weight, int64_t rows) {
  return 4 * (weight.parts->bits ? codes::panel_words<T>(rows, weight.inputs) : rows * (weight.inputs + 31));
}

// The product of x [rows, inputs] and the weight. x: the same values in all threads, at one address or at several.
// panels: of `panel_bytes`.
template <typename T>
void multiply(Team& team, const ProductWeight& weight, const T* x, ProductResult out, void* panels, int64_t rows) {
#if defined(FOLIO_MATRIX_TILES)
  if constexpr (std::is_same_v<T, BFloat16>)
    if (rows >= (weight.parts->bits ? tiles::kLeastRowsOfCodes : tiles::kLeastRows) && !weight.batch_invariant &&
        tiles::available())
      return tiles::multiply(team, weight, x, out, panels, rows);
#endif
  if (weight.parts->bits) return codes::multiply(team, weight, x, out, panels, rows);
#if defined(__AVX512F__) && defined(__AVX512BW__)
  if constexpr (kNativeProduct<T>)
    return native::multiply(team, weight, x, out, static_cast<native::Word*>(panels), rows);
#endif
#if defined(FOLIO_WIDE_PRODUCTS)
  if constexpr (!kNativeProduct<T>)
    return wide::multiply(team, weight, x, out, static_cast<float*>(panels), rows);
#endif
}

}  // namespace folio
