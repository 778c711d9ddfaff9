// Products of many bfloat16 rows, on processors with matrix tiles (AMX).
//
// Up to 32 rows × 32 outputs are multiplied at a time in four tiles, whose sums are in float32. Codes are widened to
// bfloat16, scales and offsets included, into the form that `product.h` has in memory, once for many panels of rows;
// so rows need not be rounded to 8 or 16 bits as in codes.h. A result depends neither on other rows nor on the number of
// threads, as long as both times there are enough rows for tiles.
#pragma once

#include "codes.h"
#include "product.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__x86_64__)
#define FOLIO_MATRIX_TILES

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>

namespace folio::tiles {

using codes::kTile;

constexpr int64_t kSlab = codes::kSlab, kPairs = kSlab / 2;
constexpr int64_t kLeastRows = 6, kLeastRowsOfCodes = 16;  // fewer are faster in vectors
constexpr int64_t kItemPanels = 16;   // multiplied with a widened weight
constexpr int64_t kSide = 32;         // outputs, and most rows of a panel
constexpr int64_t kPairBytes = kSide * 4, kSlabBytes = kPairs * kPairBytes;  // of a weight [pair of inputs][32][2]
static_assert(kSide == native::kTile);
struct alignas(64) CacheLine {
  char bytes[64];
};

// Whether the processor has tiles and the system lets this process use them.
inline bool available() {
  static const bool result = [] {
    constexpr unsigned kNeeded = 1u << 22 | 1u << 24;  // AMX-BF16, AMX-TILE
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return true;
    std::fputs("folio: the system refuses matrix tiles (AMX) to this process; products of many rows are slower\n", stderr);
    return false;
  }();
  return result;
}

// The slab of a tile in bfloat16, a half of `kSlabBytes`.
template <int kBits, bool kTable>
void widen_slab(const codes::Tile<kBits>& tile, int64_t slab, char* to) {
  using namespace codes;
  constexpr int kHalves = Tile<kBits>::kHalves, kHalfWords = kWords / kHalves;
  const uint8_t* const packed = tile.codes + slab * kBits * kVector;
  const float zero = static_cast<float>(kTable ? 128 : tile.part.zero);
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; h++) {
    const Floats scale = tile.scale(slab, h, 0), step = 256.0f * scale;
    const Floats offset = (tile.part.has_offsets ? tile.scale(slab, h, 1) : Floats{}) - (256.0f + zero) * scale;
#pragma GCC unroll 8
    for (int i = h * kHalfWords; i < (h + 1) * kHalfWords; i++) {
      Bytes w = word<kBits>(packed, i);
      if constexpr (kTable) w = looked_up(w, tile.part.table);
      const __m512i bits = (__m512i)w, significand = _mm512_set1_epi32(255 << 15), one = _mm512_set1_epi32(0x3f800000);
      const auto rounded = [&](__m512i shifted) {  // the code c in the significand of 1 + c / 256
        const Floats v = (Floats)_mm512_ternarylogic_epi32(shifted, significand, one, 0xea) * step + offset;
        return _mm512_add_epi32((__m512i)v, _mm512_set1_epi32(0x8000));
      };
      const auto join = [&](int row, __m512i first, __m512i second) {
        const __m512i joined = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(first, 16), second);
        _mm512_storeu_si512(to + row * kPairBytes, joined);
      };
      join(2 * i, rounded(_mm512_slli_epi32(bits, 15)), rounded(_mm512_slli_epi32(bits, 7)));
      join(2 * i + 1, rounded(_mm512_srli_epi32(bits, 1)), rounded(_mm512_srli_epi32(bits, 9)));
    }
  }
}

// sums [num_rows][32 outputs]. x: [slab][num_rows][32], 2 to 32 rows; weights: [slab] of `kSlabBytes`.
__attribute__((target("amx-tile,amx-bf16"))) inline void multiply_panel(const BFloat16* x, int64_t num_rows,
                                                                        const char* weights, int64_t slabs, float* sums) {
  const int64_t upper = (num_rows + 1) / 2;
  const uint8_t a = static_cast<uint8_t>(upper), b = static_cast<uint8_t>(num_rows - upper);
  alignas(64) const struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t num_rows[16];
  } shape{.num_rows = {a, a, b, b, a, b, 16, 16}};
  _tile_loadconfig(&shape);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t slab = 0; slab < slabs; slab++, x += num_rows * kSlab, weights += kSlabBytes) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, weights, kPairBytes);
    _tile_loadd(5, x + upper * kSlab, 64);
    _tile_loadd(7, weights + kPairBytes / 2, kPairBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  constexpr int64_t kStride = kSide * sizeof(float);
  _tile_stored(0, sums, kStride);
  _tile_stored(1, sums + kTile, kStride);
  _tile_stored(2, sums + upper * kSide, kStride);
  _tile_stored(3, sums + upper * kSide + kTile, kStride);
  _tile_release();  // so that the system need not save them
}

// 32 outputs of a part from the i-th 32 on, as slabs; `room` has them unless memory has.
inline const char* slabs_of(const WeightPart& part, int64_t i, int64_t inputs, std::vector<CacheLine>& room) {
  const int64_t slabs = (inputs + kSlab - 1) / kSlab, pairs = (inputs + 1) / 2;
  const char* const stored = static_cast<const char*>(part.codes) + i * pairs * kPairBytes;
  if (!part.bits && pairs % kPairs == 0) return stored;
  room.resize(std::max<size_t>(room.size(), slabs * kSlabBytes / sizeof(CacheLine)));
  char* const to = room.data()->bytes;
  if (!part.bits) {
    std::memcpy(to, stored, pairs * kPairBytes);
    std::memset(to + pairs * kPairBytes, 0, slabs * kSlabBytes - pairs * kPairBytes);
    return to;
  }
  codes::with_form(part, [&](auto bits, auto table) {
    for (int64_t t = 0; t < std::min<int64_t>(2, codes::tiles_of(part) - 2 * i); t++) {
      const codes::Tile<bits> tile(part, 2 * i + t, slabs);
      for (int64_t slab = 0; slab < slabs; slab++)
        widen_slab<bits, table>(tile, slab, to + slab * kSlabBytes + t * kPairBytes / 2);
    }
  });
  return to;
}

// Like `codes::multiply`, for at least as many rows as above.
inline void multiply(Team& team, const ProductWeight& weight, const BFloat16* x, ProductResult out, void* panels,
                     int64_t rows) {
  const int64_t inputs = weight.inputs, outputs = weight.outputs, slabs = (inputs + kSlab - 1) / kSlab;
  const int64_t num_panels = (rows + kSide - 1) / kSide;
  const auto first_row = [&](int64_t panel) { return panel * rows / num_panels; };
  const auto panel_at = [&](int64_t panel) { return static_cast<BFloat16*>(panels) + first_row(panel) * slabs * kSlab; };
  team.each(num_panels, [&](int64_t panel) {
    const int64_t first = first_row(panel), count = first_row(panel + 1) - first;
    for (int64_t r = 0; r < count; r++)
      for (int64_t slab = 0; slab < slabs; slab++) {
        const int64_t at = slab * kSlab, left = std::min(kSlab, inputs - at);
        const BFloat16* const row = x + (first + r) * inputs;
        BFloat16* const to = panel_at(panel) + (slab * count + r) * kSlab;
        if (left < kSlab) std::memset(to, 0, kSlab * sizeof *to);
        if (!weight.order) std::memcpy(to, row + at, left * sizeof *to);
        else for (int64_t i = 0; i < left; i++) to[i] = row[weight.order[at + i]];
      }
  });
  const int64_t groups = (num_panels + kItemPanels - 1) / kItemPanels;
  const auto items_of = [](const WeightPart& part) { return (part.outputs + kSide - 1) / kSide; };
  int64_t num_items = 0;
  for (int p = 0; p < weight.num_parts; p++) num_items += items_of(weight.parts[p]);
  team.each(groups * num_items, [&](int64_t item) {
    const int64_t group = item / num_items, begin = group * num_panels / groups, end = (group + 1) * num_panels / groups;
    int64_t i = item % num_items, start = 0;
    const WeightPart* part = weight.parts;
    for (; i >= items_of(*part); part++) i -= items_of(*part), start += part->outputs;
    static thread_local std::vector<CacheLine> room;
    const char* const weights = slabs_of(*part, i, inputs, room);
    for (int64_t panel = begin; panel < end; panel++) {
      alignas(64) float sums[kSide][kSide];
      const int64_t first = first_row(panel), count = first_row(panel + 1) - first;
      multiply_panel(panel_at(panel), count, weights, slabs, sums[0]);
      for (int64_t lane = i * kSide; lane < std::min((i + 1) * kSide, part->outputs); lane += kTile) {
        const int64_t left = std::min<int64_t>(kTile, part->outputs - lane);
        const Vec factor = part->factors ? load_some(part->factors + lane, left) : broadcast(1.0f);
        const Vec offset = weight.bias ? load_some(static_cast<const BFloat16*>(weight.bias) + start + lane, left) : Vec{};
        for (int64_t r = 0; r < count; r++)
          put<BFloat16>(out, load(sums[r] + lane % kSide) * factor + offset, (first + r) * outputs + start + lane, left);
      }
    }
  });
}

}  // namespace folio::tiles

#endif
