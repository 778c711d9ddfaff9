// Linear layers: a matrix product with packed weights, the packing, and the look-up of rows.

#include <cstdint>
#include <cstring>
#include <vector>

#include "linear.h"

namespace {

using namespace folio;

constexpr int64_t kParallelProducts = 1 << 16;  // below, a second thread costs more than it saves

// Copy a weight into tiles [words][kTile][kWide].
template <int kTile, int kWide, typename T>
void pack(const T* weight, T* packed, int64_t outputs, int64_t inputs) {
  const int64_t tile_size = (inputs + kWide - 1) / kWide * kTile * kWide, tiles = (outputs + kTile - 1) / kTile;
  in_team(true, 1, [&](Team& team) {
    team.each(tiles, [&](int64_t tile) {
      T* const to = packed + tile * tile_size;
      std::memset(to, 0, tile_size * sizeof(T));
      for (int64_t i = 0; i < std::min<int64_t>(kTile, outputs - tile * kTile); i++) {
        const T* const row = weight + (tile * kTile + i) * inputs;
        for (int64_t j = 0; j < inputs; j++) to[(j / kWide * kTile + i) * kWide + j % kWide] = row[j];
      }
    });
  });
}

// Put the words of a slab into planes.
void pack_slab(int bits, const uint8_t (*words)[codes::kVector], uint8_t* to) {
  using codes::kVector, codes::kWords;
  std::memset(to, 0, bits * kVector);
  uint8_t* const high = to + (bits < 4 ? 2 : 4) * kVector;
  for (int i = 0; i < kWords; i++)
    for (int b = 0; b < kVector; b++) {
      const uint8_t code = words[i][b];
      if (bits == 8) to[i * kVector + b] = code;
      else if (bits < 4) to[i / 4 * kVector + b] |= (code & 3) << 2 * (i % 4);
      else to[i % 4 * kVector + b] |= (code & 15) << (i < 4 ? 0 : 4);
      if (bits == 3) high[b] |= (code >> 2 & 1) << i;
      if (bits == 5) high[b] |= (code >> 4 & 1) << i;
      if (bits == 6) high[i / 4 * kVector + b] |= (code >> 4 & 3) << 2 * (i % 4);
    }
}

// The values of the tile's output `lane`, [slabs * 32].
template <int kBits>
void unpack_row(const codes::Tile<kBits>& tile, int64_t slabs, int lane, float* to) {
  using namespace codes;
  const WeightPart& part = tile.part;
  for (int64_t slab = 0; slab < slabs; slab++)
    for (int i = 0; i < kWords; i++) {
      const int half = i * Tile<kBits>::kHalves / kWords;
      const Bytes w = word<kBits>(tile.codes + slab * kBits * kVector, i);
      const float scale = tile.scale(slab, half, 0)[lane];
      for (int b = 0; b < 4; b++) {
        const int code = w[4 * lane + b];
        float value = scale * static_cast<float>(part.table ? part.table[code] - 128 : code - part.zero);
        if (part.has_offsets) value += tile.scale(slab, half, 1)[lane];
        to[slab * kSlab + 4 * i + b] = value;
      }
    }
}

template <typename T>
void unpack_rows(const ProductWeight& weight, const int64_t* outputs, T* out, int64_t rows) {
  const int64_t slabs = (weight.inputs + codes::kSlab - 1) / codes::kSlab;
  in_team(rows * weight.inputs > kParallelElements, 1, [&](Team& team) {
    team.each(rows, [&](int64_t r) {
      static thread_local std::vector<float> values;
      values.resize(slabs * codes::kSlab);
      int64_t output = outputs[r];
      const WeightPart* part = weight.parts;
      for (; output >= part->outputs; part++) output -= part->outputs;
      codes::with_form(*part, [&](auto bits, auto) {
        const codes::Tile<bits> tile(*part, output / codes::kTile, slabs);
        unpack_row<bits>(tile, slabs, static_cast<int>(output % codes::kTile), values.data());
      });
      const float factor = part->factors ? part->factors[output] : 1.0f;
      T* const to = out + r * weight.inputs;
      for (int64_t i = 0; i < weight.inputs; i++)
        from_float(values[i] * factor, to + (weight.order ? weight.order[i] : i));
    });
  });
}

}  // namespace

extern "C" {

// Outputs of a tile of weights of this dtype, or of codes if it is -1; 0 if this processor has no such product.
// dtype: 0 float32, 1 bfloat16.
int folio_linear_tile(int dtype) {
  if (dtype < 0) return codes::kTile;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  if (dtype == 0 || (dtype == 1 && kNativeProduct<BFloat16>)) return native::kTile;
#endif
#if defined(FOLIO_WIDE_PRODUCTS)
  if (dtype == 0 || dtype == 1) return wide::kTile;
#endif
  return 0;
}

void folio_linear_pack(int dtype, const void* weight, void* packed, int64_t outputs, int64_t inputs) {
  const auto run = [&](auto type, auto wide) {
    using T = decltype(type);
    const T* const from = static_cast<const T*>(weight);
    T* const to = static_cast<T*>(packed);
    folio_linear_tile(dtype) == 32 ? pack<32, wide>(from, to, outputs, inputs) : pack<16, wide>(from, to, outputs, inputs);
  };
  if (dtype == 0) run(float{}, std::integral_constant<int, 1>{});
  if (dtype == 1) run(BFloat16{}, std::integral_constant<int, 2>{});
}

// codes [outputs, inputs], a byte each.
void folio_codes_pack(int bits, const uint8_t* from, uint8_t* packed, int64_t outputs, int64_t inputs) {
  using namespace codes;
  const int64_t slabs = (inputs + kSlab - 1) / kSlab, tiles = (outputs + kTile - 1) / kTile;
  in_team(true, 1, [&](Team& team) {
    team.each(tiles, [&](int64_t tile) {
      for (int64_t slab = 0; slab < slabs; slab++) {
        uint8_t words[kWords][kVector] = {};
        for (int64_t lane = 0; lane < std::min<int64_t>(kTile, outputs - tile * kTile); lane++) {
          const uint8_t* const row = from + (tile * kTile + lane) * inputs + slab * kSlab;
          for (int64_t k = 0; k < std::min<int64_t>(kSlab, inputs - slab * kSlab); k++)
            words[k / 4][4 * lane + k % 4] = row[k];
        }
        pack_slab(bits, words, packed + (tile * slabs + slab) * bits * kVector);
      }
    });
  });
}

// out [rows, inputs]: these outputs of a quantised weight, which must be there.
void folio_codes_rows(int dtype, const ProductWeight* weight, const int64_t* outputs, void* out, int64_t rows) {
  with_type(dtype, [&](auto type) { unpack_rows(*weight, outputs, static_cast<decltype(type)*>(out), rows); });
}

int64_t folio_linear_panel_bytes(int dtype, const ProductWeight* weight, int64_t rows) {
  return dtype == 0 ? panel_bytes<float>(*weight, rows) : panel_bytes<BFloat16>(*weight, rows);
}

// See `folio::multiply`.
void folio_multiply(Team* team, int dtype, const ProductWeight* weight, const void* x, ProductResult out, void* panels,
                    int64_t rows) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    multiply<T>(*team, *weight, static_cast<const T*>(x), out, panels, rows);
  };
  if (dtype == 0) run(float{});
  if (dtype == 1) run(BFloat16{});
}

// x [rows, inputs], out [rows, outputs] of a ProductKind; panels: of `folio_linear_panel_bytes`.
void folio_linear(int dtype, const ProductWeight* weight, const void* x, void* out, int kind, void* panels,
                  int64_t rows) {
  in_team(rows * weight->outputs * weight->inputs > kParallelProducts, kProductSteps,
          [&](Team& team) { folio_multiply(&team, dtype, weight, x, {out, kind}, panels, rows); });
}

// A product for each expert: x [rows, inputs] has the rows of the first expert first, ends[e] is the first row after
// those of expert e; out [rows, outputs]. weight: of the first expert. strides: bytes from an expert to the next, of bias
// and order, then of codes, scales, supers and factors of each part. panels: of `folio_linear_panel_bytes` for the most
// rows of an expert.
void folio_experts(int dtype, const ProductWeight* weight, const int64_t* strides, const int64_t* ends, int64_t experts,
                   const void* x, void* out, void* panels) {
  const int64_t bytes = dtype == 0 ? sizeof(float) : sizeof(BFloat16);
  int64_t active = 0;
  for (int64_t e = 0; e < experts; e++) active += ends[e] > (e ? ends[e - 1] : 0);
  const bool parallel = ends[experts - 1] * weight->outputs * weight->inputs > kParallelProducts;
  in_team(parallel, kProductSteps * active, [&](Team& team) {
    std::vector<WeightPart> parts(weight->num_parts);
    for (int64_t e = 0, begin = 0; e < experts; begin = ends[e++]) {
      if (ends[e] == begin) continue;
      const int64_t* stride = strides;
      const auto moved = [&](auto* pointer) {
        using Pointer = decltype(pointer);
        const int64_t offset = e * *stride++;
        return pointer ? reinterpret_cast<Pointer>(reinterpret_cast<const char*>(pointer) + offset) : nullptr;
      };
      ProductWeight own = *weight;
      own.bias = moved(own.bias);
      own.order = moved(own.order);
      for (int p = 0; p < own.num_parts; p++) {
        WeightPart& part = parts[p] = weight->parts[p];
        part.codes = moved(part.codes);
        part.scales = moved(part.scales);
        part.supers = moved(part.supers);
        part.factors = moved(part.factors);
      }
      own.parts = parts.data();
      folio_multiply(&team, dtype, &own, static_cast<const char*>(x) + begin * own.inputs * bytes,
                     {static_cast<char*>(out) + begin * own.outputs * bytes, kRounded}, panels, ends[e] - begin);
    }
  });
}

}  // extern "C"
