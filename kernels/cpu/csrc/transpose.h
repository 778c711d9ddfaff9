// Transposition of rows of dwords, so that a vector holds one dword of each of 16 rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vector.h"

namespace folio {

// rows[16] of `num_dwords` dwords (zeros beyond `valid_dwords`) -> packed[num_dwords][width], the first `width` rows.
inline void transpose_dwords(const uint32_t* const rows[kLanes], int64_t valid_dwords, int64_t num_dwords, int width,
                             uint32_t* packed) {
#if defined(__AVX512F__)
  const __mmask16 columns = static_cast<__mmask16>((1u << width) - 1);
  for (int64_t d = 0; d < num_dwords; d += 16) {
    const __mmask16 mask = valid_dwords - d >= 16
                               ? 0xffff
                               : static_cast<__mmask16>((1u << std::max<int64_t>(0, valid_dwords - d)) - 1);
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + d);
    for (int i = 0; i < 8; i++) {
      t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
      r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
      r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
      r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
      r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
      t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
      t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
      t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
      r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
      r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
    const int64_t count = std::min<int64_t>(16, num_dwords - d);
    for (int i = 0; i < count; i++) _mm512_mask_storeu_epi32(packed + (d + i) * width, columns, r[i]);
  }
#else
  for (int64_t d = 0; d < num_dwords; d++)
    for (int i = 0; i < width; i++) packed[d * width + i] = d < valid_dwords ? rows[i][d] : 0;
#endif
}

}  // namespace folio
