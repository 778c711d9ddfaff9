// Matrix products for processors without products of bfloat16: weights stay short in memory, and are widened to float32
// in registers. AVX2 with FMA, AVX-512 without BF16, and Arm's NEON.
//
// Weights are packed in tiles of 16 outputs, [tiles][words][16][inputs of a word]: a word is 2 bfloat16 or a float. Rows are widened once, in panels [inputs][rows]. The sums of a panel × some tiles stay in registers.
//
//     few rows    a panel × several tiles at a time, else each sum would wait for the one before
//     many rows   256 inputs of a tile are widened once into the first-level cache, and multiplied with many panels
//
// Either way a result is one sum in the order of the inputs: it depends neither on other rows nor on the number of
// threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "team.h"
#include "vector.h"
#include "weight.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if (defined(__AVX2__) && defined(__FMA__)) || defined(__aarch64__)
#define FOLIO_WIDE_PRODUCTS
#endif

#if defined(FOLIO_WIDE_PRODUCTS)

namespace folio::wide {

#if defined(__AVX512F__)
constexpr int kNative = 16, kSums = 24, kMaxRows = 12;
#elif defined(__AVX2__)
constexpr int kNative = 8, kSums = 12, kMaxRows = 6;  // 12 sums, 2 vectors of weights and one of x are 15 of 16 registers
#else
constexpr int kNative = 4, kSums = 24, kMaxRows = 6;  // 29 of 32
#endif
constexpr int kTile = 16;                   // outputs
constexpr int kParts = kTile / kNative;     // vectors of a tile
constexpr int kMostTiles = 4;               // multiplied at a time
constexpr int64_t kDirectPanels = 2;        // up to here rows are few
constexpr int64_t kAheadBytes = 4 << 10;    // of weights that few rows are multiplied with
constexpr int64_t kChunk = 256;             // inputs that are widened at a time: 16 KiB
constexpr int64_t kCacheBytes = 384 << 10;  // of a core's second-level cache, for panels
constexpr int64_t kMinPanels = 8, kMaxPanels = 64;  // multiplied with a widened tile

typedef float Native __attribute__((vector_size(4 * kNative)));
typedef float Unaligned __attribute__((vector_size(4 * kNative), aligned(4)));
typedef uint32_t Bits __attribute__((vector_size(4 * kNative)));

constexpr int kMaxSums = std::max(kSums * kNative, kMaxRows * kTile);

// Inputs of a word of weights that are stored as S.
template <typename S>
constexpr int kPerWord = sizeof(S) == 2 ? 2 : 1;

constexpr int tiles_at_once(int rows) {
  const int fitting = kSums / (rows * kParts);
  return fitting < 1 ? 1 : fitting < kMostTiles ? fitting : kMostTiles;
}

// Input i of the words of kNative outputs.
inline Native widen(const float* p, int) { return *reinterpret_cast<const Unaligned*>(p); }
inline Native widen(const BFloat16* p, int i) {
  Bits bits;
  std::memcpy(&bits, p, sizeof bits);
  return reinterpret_cast<Native>(i ? bits & 0xffff0000u : bits << 16);
}

// Weights that are read soon: of each tile `word_bytes` a word, from `at` on.
struct Ahead {
  const void* at;
  int64_t word_bytes;
};

// sums [rows][tiles][16] += kRows × kTiles tiles, `tile_size` weights apart.
template <typename S, int kRows, int kTiles>
void block(const float* x, const S* weights, int64_t words, int64_t tile_size, Ahead ahead, float* to) {
  constexpr int kWide = kPerWord<S>;
  constexpr int kVectors = kRows * kTiles * kParts;
  Native sums[kVectors];
#pragma GCC unroll 24
  for (int v = 0; v < kVectors; v++) sums[v] = reinterpret_cast<const Unaligned*>(to)[v];
  for (int64_t k = 0; k < words; k++) {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++)
      __builtin_prefetch(static_cast<const S*>(ahead.at) + t * tile_size + k * ahead.word_bytes / sizeof(S), 0, 2);
#pragma GCC unroll 2
    for (int i = 0; i < kWide; i++) {
      Native w[kTiles][kParts];
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++)
#pragma GCC unroll 4
        for (int p = 0; p < kParts; p++) w[t][p] = widen(weights + t * tile_size + (k * kTile + p * kNative) * kWide, i);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; r++) {
        const Native value = x[(k * kWide + i) * kRows + r] - Native{};  // + would keep an addition, for -0
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; t++)
#pragma GCC unroll 4
          for (int p = 0; p < kParts; p++) sums[(r * kTiles + t) * kParts + p] += w[t][p] * value;
      }
    }
  }
#pragma GCC unroll 24
  for (int v = 0; v < kVectors; v++) reinterpret_cast<Unaligned*>(to)[v] = sums[v];
}

template <typename S>
using Block = void (*)(const float*, const S*, int64_t, int64_t, Ahead, float*);

// The block of a number of rows, and of at most `tiles` tiles, whose number it is reduced to.
template <typename S, int kRows, int kTiles = tiles_at_once(kRows)>
Block<S> choose_block(int64_t* tiles) {
  if constexpr (kTiles > 1)
    if (*tiles < kTiles) return choose_block<S, kRows, kTiles - 1>(tiles);
  *tiles = kTiles;
  return block<S, kRows, kTiles>;
}

template <typename S, int kRows = kMaxRows>
Block<S> choose_block(int64_t rows, int64_t* tiles) {
  if constexpr (kRows > 1)
    if (rows < kRows) return choose_block<S, kRows - 1>(rows, tiles);
  return choose_block<S, kRows>(tiles);
}

template <typename S>
int64_t words_of(int64_t inputs) {
  return (inputs + kPerWord<S> - 1) / kPerWord<S>;
}

// Widen the rows of one panel as [inputs][count], zeros up to the last word.
template <typename T>
void pack_rows(const T* x, float* to, int64_t count, int64_t inputs, int64_t padded) {
  alignas(64) float lanes[kMaxRows][kLanes];
  for (int64_t i = 0; i < inputs; i += kLanes) {
    for (int64_t r = 0; r < count; r++) store(lanes[r], load_some(x + r * inputs + i, inputs - i));
    for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, inputs - i); lane++)
      for (int64_t r = 0; r < count; r++) to[(i + lane) * count + r] = lanes[r][lane];
  }
  std::memset(to + inputs * count, 0, (padded - inputs) * count * sizeof(float));
}

// A product, without the division among threads.
template <typename T>
struct Product {
  const T* packed;
  const T* bias;
  ProductResult out;
  const float* panels;
  int64_t rows, outputs, inputs;

  int64_t words() const { return words_of<T>(inputs); }
  int64_t padded() const { return words() * kPerWord<T>; }
  int64_t num_panels() const { return (rows + kMaxRows - 1) / kMaxRows; }
  int64_t height() const { return (rows + num_panels() - 1) / num_panels(); }
  int64_t count(int64_t panel) const { return std::min(height(), rows - panel * height()); }

  // Tiles from `tile` on, `step` of them, × one panel.
  void few_rows(int64_t panel, int64_t tile, int64_t step) const {
    for (int64_t at_once; step > 0; tile += at_once, step -= at_once) {
      alignas(64) float sums[kMaxSums] = {};
      at_once = step;
      const Block<T> multiply = choose_block<T>(count(panel), &at_once);
      const T* const weights = packed + tile * kTile * padded();
      const Ahead ahead{weights + kAheadBytes / sizeof(T), kTile * kPerWord<T> * sizeof(T)};
      multiply(panels + panel * height() * padded(), weights, words(), kTile * padded(), ahead, sums);
      for (int64_t t = 0; t < at_once; t++) write(panel, tile + t, sums + t * kTile, at_once * kTile);
    }
  }

  // One tile × the panels begin … end - 1.
  void many_rows(int64_t begin, int64_t end, int64_t tile) const {
    alignas(64) float sums[kMaxPanels][kMaxRows * kTile];
    alignas(64) float wide[kChunk * kTile];
    std::memset(sums, 0, (end - begin) * sizeof sums[0]);
    for (int64_t k = 0; k < padded(); k += kChunk) {
      const int64_t depth = std::min(kChunk, padded() - k);
      const T* weights = packed + (tile * padded() + k) * kTile;
      if constexpr (sizeof(T) < sizeof(float)) widen_tile(weights, depth, wide);
      for (int64_t panel = begin; panel < end; panel++) {
        int64_t one = 1;
        const Block<float> multiply = choose_block<float>(count(panel), &one);
        const float* x = panels + panel * height() * padded() + k * count(panel);
        const Ahead ahead{weights + kChunk * kTile, kTile * sizeof(T)};  // the next chunk
        if constexpr (sizeof(T) < sizeof(float)) multiply(x, wide, depth, 0, ahead, sums[panel - begin]);
        else multiply(x, weights, depth, 0, ahead, sums[panel - begin]);
      }
    }
    for (int64_t panel = begin; panel < end; panel++) write(panel, tile, sums[panel - begin], kTile);
  }

 private:
  static void widen_tile(const T* weights, int64_t depth, float* to) {
    constexpr int kWide = kPerWord<T>;
    for (int64_t k = 0; k < depth; k += kWide)
      for (int p = 0; p < kParts; p++) {
        for (int i = 0; i < kWide; i++) {
          const Native lanes = widen(weights + k * kTile + p * kNative * kWide, i);
          std::memcpy(to + (k + i) * kTile + p * kNative, &lanes, sizeof lanes);
        }
      }
  }

  // Sums of a panel's rows, `stride` apart, for one tile.
  void write(int64_t panel, int64_t tile, const float* sums, int64_t stride) const {
    const int64_t output = tile * kTile, left = outputs - output;
    const Vec offset = bias ? load_some(bias + output, left) : Vec{};
    for (int64_t r = 0; r < count(panel); r++)
      put<T>(out, load(sums + r * stride) + offset, (panel * height() + r) * outputs + output, left);
  }
};

// Like `native::multiply`; panels: room for rows × (inputs + 1) floats.
template <typename T>
void multiply(Team& team, const ProductWeight& weight, const T* x, ProductResult out, float* panels, int64_t rows) {
  const int64_t inputs = weight.inputs;
  const Product<T> product{static_cast<const T*>(weight.parts->codes), static_cast<const T*>(weight.bias),
                           out, panels, rows, weight.outputs, inputs};
  const int64_t num_panels = product.num_panels(), height = product.height(), padded = product.padded();
  const int64_t tiles = (weight.outputs + kTile - 1) / kTile;
  const int64_t fitting = kCacheBytes / (height * padded * static_cast<int64_t>(sizeof(float)));
  const int64_t group = std::min(num_panels, std::clamp(fitting, kMinPanels, kMaxPanels));
  team.each(num_panels, [&](int64_t panel) {
    const int64_t first = panel * height;
    pack_rows(x + first * inputs, panels + first * padded, product.count(panel), inputs, padded);
  });
  if (num_panels <= kDirectPanels) {
    const int64_t at_once = tiles_at_once(static_cast<int>(height));
    team.each((tiles + at_once - 1) / at_once, [&](int64_t i) {
      const int64_t tile = i * at_once;
      for (int64_t panel = 0; panel < num_panels; panel++)
        product.few_rows(panel, tile, std::min(at_once, tiles - tile));
    });
  } else {
    team.each((num_panels + group - 1) / group * tiles, [&](int64_t i) {
      const int64_t begin = i / tiles * group;
      product.many_rows(begin, std::min(num_panels, begin + group), i % tiles);
    });
  }
}

}  // namespace folio::wide

#endif
