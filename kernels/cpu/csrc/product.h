// Matrix products with packed weights: bound by memory on few rows, by arithmetic on many.
//
// A word is 4 bytes of a row: one float, or two bfloat16. Weights are packed in tiles of 32 outputs, [tiles][words][32],
// so that a thread reads its tiles as one stream; rows in panels of up to 14, [words][rows]. A panel × a tile stays in
// registers over all inputs, and every result is one sum in the order of the inputs: it depends neither on other rows
// nor on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "team.h"
#include "transpose.h"
#include "vector.h"
#include "weight.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)

namespace folio::native {

constexpr int kTile = 2 * kLanes;  // outputs
constexpr int kPanelRows = 14;       // 28 sums, 2 vectors of weights and a word are 31 of 32 registers
constexpr int kChunk = 8;          // words between prefetches
constexpr int64_t kPackedWords = 256;  // packed at a time
constexpr int kStreamingRows = 5;  // up to here memory is the bound, and the hardware prefetcher suffices
constexpr int64_t kCacheBytes = 768 << 10;  // of a core, for a tile and the panels multiplied with it
constexpr int64_t kMinPanels = 8;           // the least panels per read of the weights from memory

typedef uint32_t Word __attribute__((aligned(2), may_alias));

inline void multiply_add(float, Vec& sum, Vec weights, Vec x) { sum += weights * x; }
#if defined(__AVX512BF16__)
inline void multiply_add(BFloat16, Vec& sum, Vec weights, Vec x) {
  sum = (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)x);
}
#endif

// A word of each of 16 outputs.
template <typename T>
inline Vec weights_at(const T* p) {
  return load(reinterpret_cast<const float*>(p));
}

// Input elements in a word.
template <typename T>
constexpr int kPerWord = sizeof(Word) / sizeof(T);

// kRows × one tile. Prefetches `lines` cache lines of `ahead` per chunk: bursts would be dropped.
template <typename T, int kRows>
void block(const Word* x, const T* weights, int64_t words, const char* ahead, int lines, Vec (*out)[2]) {
  constexpr int kVector = kLanes * kPerWord<T>;  // weights in a vector
  Vec sums[kRows][2] = {};
  for (int64_t begin = 0; begin < words; begin += kChunk) {
    const int64_t end = std::min(words, begin + kChunk);
    for (int i = 0; i < lines; i++) __builtin_prefetch(ahead + 64 * i, 0, 2);
    ahead += 64 * lines;
    for (int64_t k = begin; k < end; k++) {
      const Vec first = weights_at(weights + 2 * k * kVector);
      const Vec second = weights_at(weights + (2 * k + 1) * kVector);
#pragma GCC unroll 14
      for (int r = 0; r < kRows; r++) {
        const Vec word = (Vec)_mm512_set1_epi32(static_cast<int>(x[k * kRows + r]));
        multiply_add(T{}, sums[r][0], first, word);
        multiply_add(T{}, sums[r][1], second, word);
      }
    }
  }
  for (int r = 0; r < kRows; r++) out[r][0] = sums[r][0], out[r][1] = sums[r][1];
}

template <typename T>
using Block = void (*)(const Word*, const T*, int64_t, const char*, int, Vec (*)[2]);

template <typename T>
constexpr Block<T> kBlocks[kPanelRows] = {block<T, 1>,  block<T, 2>,  block<T, 3>,  block<T, 4>, block<T, 5>,
                                          block<T, 6>,  block<T, 7>,  block<T, 8>,  block<T, 9>, block<T, 10>,
                                          block<T, 11>, block<T, 12>, block<T, 13>, block<T, 14>};

template <typename T>
int64_t words_of(int64_t inputs) {
  return (inputs + kPerWord<T> - 1) / kPerWord<T>;
}

// Pack words begin … end - 1 of the rows of one panel [words][count]; a last half word is padded with zero.
template <typename T>
void pack_rows(const T* x, Word* panel, int64_t count, int64_t inputs, int64_t begin, int64_t end) {
  const int64_t whole = std::min(end, inputs / kPerWord<T>);
  const uint32_t* rows[kLanes];
  for (int64_t r = 0; r < kLanes; r++)
    rows[r] = reinterpret_cast<const uint32_t*>(x + (r < count ? r : 0) * inputs + begin * kPerWord<T>);
  transpose_dwords(rows, whole - begin, whole - begin, static_cast<int>(count),
                   reinterpret_cast<uint32_t*>(panel + begin * count));
  if (whole == end) return;
  for (int64_t r = 0; r < count; r++) {
    Word word = 0;
    std::memcpy(&word, x + (r + 1) * inputs - 1, sizeof(T));
    panel[whole * count + r] = word;
  }
}

// The product of x [rows, inputs] and the weight. panels: room for rows × words.
template <typename T>
void multiply(Team& team, const ProductWeight& weight, const T* x, ProductResult out, Word* panels, int64_t rows) {
  const int64_t inputs = weight.inputs, outputs = weight.outputs;
  const T* const packed = static_cast<const T*>(weight.parts->codes);
  const T* const bias = static_cast<const T*>(weight.bias);
  const int64_t words = words_of<T>(inputs), tiles = (outputs + kTile - 1) / kTile;
  const int64_t num_panels = (rows + kPanelRows - 1) / kPanelRows, height = (rows + num_panels - 1) / num_panels;
  const int64_t tile_bytes = words * kTile * kPerWord<T> * sizeof(T);
  const int64_t chunks = (words + kChunk - 1) / kChunk;
  const int64_t fitting = (kCacheBytes - tile_bytes) / (height * words * static_cast<int64_t>(sizeof(Word)));
  const int64_t group = std::min(num_panels, std::max(kMinPanels, fitting));
  // Each panel prefetches its part of the thread's next tile.
  const int64_t turns = group * chunks;
  const int lines = rows <= kStreamingRows ? 0 : static_cast<int>((tile_bytes / 64 + turns - 1) / turns);
  if (rows == 1 && inputs % kPerWord<T> == 0) {
    panels = reinterpret_cast<Word*>(const_cast<T*>(x));
  } else {
    const int64_t pieces = (words + kPackedWords - 1) / kPackedWords;
    team.each(num_panels * pieces, [&](int64_t i) {
      const int64_t panel = i / pieces, begin = i % pieces * kPackedWords;
      const int64_t first = panel * height, count = std::min(height, rows - first);
      pack_rows(x + first * inputs, panels + first * words, count, inputs, begin,
                std::min(words, begin + kPackedWords));
    });
  }
  const int64_t groups = (num_panels + group - 1) / group;
  team.each(groups * tiles, [&](int64_t i) {
    const int64_t begin = i / tiles * group, end = std::min(num_panels, begin + group), tile = i % tiles;
    const T* weights = packed + tile * (tile_bytes / sizeof(T));
    const char* ahead = reinterpret_cast<const char*>(weights) + tile_bytes;
    const char* const ahead_end = ahead + (tile + 1 < tiles ? tile_bytes : 0);
    for (int64_t panel = begin; panel < end; panel++) {
      const int64_t first = panel * height, count = std::min(height, rows - first);
      Vec sums[kPanelRows][2];
      kBlocks<T>[count - 1](panels + first * words, weights, words, ahead, ahead < ahead_end ? lines : 0, sums);
      ahead += chunks * lines * 64;
      for (int half = 0; half < 2; half++) {
        const int64_t output = tile * kTile + half * kLanes, left = outputs - output;
        if (left <= 0) break;
        const Vec offset = bias ? load_some(bias + output, left) : Vec{};
        for (int64_t r = 0; r < count; r++)
          put<T>(out, sums[r][half] + offset, (first + r) * outputs + output, left);
      }
    }
  });
}

}  // namespace folio::native

#endif
