// Products with quantised weights, whose codes stay packed in memory and are unpacked in registers.
//
// A slab is 32 inputs of a tile, which has as many outputs as a vector has floats. Its codes are 8 words, of 4 inputs
// each: a vector with 4 bytes of each output. In memory a slab is `bits` vectors, planes of bits from several words:
//
//     bits   planes
//     8      a vector for each word
//     4      vector i has word i in the lower halves of its bytes, and word i + 4 in the upper ones
//     5, 6   likewise, then a vector with the fifth bit of word i in bit i, or two with bits 2 (i % 4) of word i
//     2, 3   two vectors, bits 2 (i % 4) of word i in vector i / 4; then one with the third bit of word i in bit i
//
// Scales are [tile][group][1, or 2 with offsets][lane] halves; of two levels, bytes like this, beside super scales
// [tile][8 slabs][1 or 2][lane] in halves.
//
// Rows are packed in panels, slab by slab. In bfloat16 they are rounded to 8 bits, with a scale for each slab, or to 16
// where the slab's largest value is above 1.5 times the mean of those beside it: there most of the error would be, which
// grows with that value, and they are about a seventh of the slabs of real models. The sums of a slab are exact.
// In float32 they are not rounded. A result depends neither on other rows nor on the number of threads. Many bfloat16 rows
// are faster in matrix tiles (matrix_tiles.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "team.h"
#include "vector.h"
#include "weight.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace folio::codes {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int kNative = 16, kPanelRows = 8;
#elif defined(__AVX2__)
constexpr int kNative = 8, kPanelRows = 4;
#else
constexpr int kNative = 4, kPanelRows = 8;
#endif
#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || (!defined(__AVX2__) && !defined(__ARM_FEATURE_DOTPROD))
#define FOLIO_UNSIGNED_DOT  // sums of unsigned codes; otherwise codes of 8 bits and tables are made signed
#endif

constexpr int kTile = kNative;         // outputs
constexpr int kVector = 4 * kNative;   // bytes
constexpr int kSlab = 32, kWords = 8;  // inputs of a slab, its words
constexpr int kSuper = 8;              // slabs with one super scale
constexpr int64_t kAheadSlabs = 16;    // that are read from memory meanwhile
constexpr int64_t kPackedSlabs = 64;   // of a row, packed by one thread at a time and compared with each other
constexpr float kLongAbove = 1.5f;     // means of these: a slab whose largest value is above has 16 bits
constexpr int64_t kItemBytes = 8 << 10;  // of weights that a thread takes at a time
constexpr int64_t kPanelBytes = 512 << 10;  // of rows in a core's cache, for one reading of the weights

typedef uint8_t Bytes __attribute__((vector_size(kVector)));
typedef uint16_t Shorts __attribute__((vector_size(kVector)));
typedef uint32_t Bits __attribute__((vector_size(kVector)));
typedef int32_t Ints __attribute__((vector_size(kVector)));
typedef float Floats __attribute__((vector_size(kVector)));
typedef Floats UnalignedFloats __attribute__((aligned(4)));
typedef int8_t Small __attribute__((vector_size(kNative)));

inline Bytes load_bytes(const uint8_t* p) {
  Bytes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Bytes mask(Shorts v, uint8_t bits) { return reinterpret_cast<Bytes>(v) & (Bytes{} + bits); }

// Bits `from` on of each byte, at bit `to`; `keep` is their mask there.
inline Bytes moved(Bytes v, int from, int to, uint8_t keep) {
  const Shorts shorts = reinterpret_cast<Shorts>(v);
  return mask(to > from ? shorts << (to - from) : shorts >> (from - to), keep);
}

// Word i of the slab at p.
template <int kBits>
inline Bytes word(const uint8_t* p, int i) {
  if constexpr (kBits == 8) return load_bytes(p + i * kVector);
  constexpr int kPlanes = kBits < 4 ? 2 : 4;
  const uint8_t* const high = p + kPlanes * kVector;
  Bytes low;
  if constexpr (kBits < 4) low = moved(load_bytes(p + i / 4 * kVector), 2 * (i % 4), 0, 3);
  else low = moved(load_bytes(p + i % 4 * kVector), i < 4 ? 0 : 4, 0, 15);
  if constexpr (kBits == 3) return low | moved(load_bytes(high), i, 2, 4);
  if constexpr (kBits == 5) return low | moved(load_bytes(high), i, 4, 16);
  if constexpr (kBits == 6) return low | moved(load_bytes(high + i / 4 * kVector), 2 * (i % 4), 4, 48);
  return low;
}

// table[code] of each byte.
inline Bytes looked_up(Bytes codes, const uint8_t* table) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (Bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), (__m512i)codes);
#elif defined(__AVX2__)
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)codes);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Bytes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#else
  for (int i = 0; i < kVector; i++) codes[i] = table[codes[i]];
  return codes;
#endif
}

// Halves or small integers of a tile, as floats.
inline Floats widened(const Half* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Floats v;
  for (int i = 0; i < kNative; i++) v[i] = static_cast<float>(p[i]);
  return v;
#endif
}
inline Floats widened(const int8_t* p) {  // compilers would convert one by one
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  Small v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, Floats);
#endif
}

// A part of a weight, and a tile of it.
template <int kBits>
struct Tile {
  static constexpr int kHalves = kBits == 4 || kBits == 5 || kBits == 8 ? 1 : 2;  // groups of a slab, if groups are least

  const WeightPart& part;
  const uint8_t* codes;
  const char* scales;
  const Half* supers;
  int width;  // values of a scale and an offset
  int64_t slab_scale_bytes;  // rounded down

  Tile(const WeightPart& part, int64_t tile, int64_t slabs) : part(part), width(part.has_offsets ? 2 : 1) {
    codes = static_cast<const uint8_t*>(part.codes) + tile * slabs * kBits * kVector;
    const int64_t groups = (slabs * kHalves + part.every - 1) / part.every;
    const int64_t group_bytes = width * kNative * (part.supers ? 1 : 2);
    scales = static_cast<const char*>(part.scales) + tile * groups * group_bytes;
    slab_scale_bytes = kHalves * group_bytes / part.every;
    supers = static_cast<const Half*>(part.supers);
    if (supers) supers += tile * ((slabs + kSuper - 1) / kSuper) * width * kNative;
  }

  // The scales, or with `which` 1 the offsets, of a half of a slab.
  Floats scale(int64_t slab, int half, int which) const {
    const int64_t group = slab * kHalves + half;
    if (supers) {
      const int64_t at = (slab / kSuper * width + which) * kNative;
      return widened(supers + at) * widened(reinterpret_cast<const int8_t*>(scales) + (group * width + which) * kNative);
    }
    const int64_t at = part.every == 1 ? group : group / part.every;
    return widened(reinterpret_cast<const Half*>(scales) + (at * width + which) * kNative);
  }
};

// Rows of a panel in codes of 8 or 16 bits: of each slab [word][row] of the upper 8 bits, a row's scale, the sums of the
// rounded values of each half of the slab and of all, how many rows have 16 bits, first of the first four and then of
// the others, and at last [word][row] of the lower 8 bits, signed like the upper.
struct RoundedRows {
  static constexpr int kScale = kWords, kSums = kScale + 1, kLong = kSums + 3, kLower = kLong + 1;
  static constexpr int kSlabWords = kLower + kWords;
  static constexpr int kLongRows = 4;  // that get the lower bits together: not all rows of a panel, if few have them
  typedef int32_t Value;
};
// Unrounded rows: of each slab [input][row], then the sums of each half.
struct FloatRows {
  static constexpr int kSlabWords = kSlab + 2;
  typedef float Value;
};
template <typename T>
using RowsOf = std::conditional_t<std::is_same_v<T, float>, FloatRows, RoundedRows>;

// 4-byte words of a panel for rows of T.
template <typename T>
int64_t panel_words(int64_t rows, int64_t inputs) {
  return rows * ((inputs + kSlab - 1) / kSlab) * RowsOf<T>::kSlabWords;
}

inline Vec load_ordered(const float* x, const int32_t* order, int64_t count) {
  Vec v = {};
  for (int i = 0; i < std::min<int64_t>(count, kLanes); i++) v[i] = x[order[i]];
  return v;
}
template <typename T>
inline Vec load_ordered(const T* x, const int32_t* order, int64_t count) {
  Vec v = {};
  for (int i = 0; i < std::min<int64_t>(count, kLanes); i++) v[i] = to_float(x[order[i]]);
  return v;
}

// A slab of a row.
template <typename T>
inline void load_slab(const T* x, int64_t inputs, const int32_t* order, int64_t slab, Vec (&halves)[2]) {
  for (int h = 0; h < 2; h++) {
    const int64_t at = slab * kSlab + h * kLanes;
    if (at >= inputs) halves[h] = Vec{};
    else if (order) halves[h] = load_ordered(x, order + at, inputs - at);
    else halves[h] = load_some(x + at, inputs - at);
  }
}

// Pack slabs begin … end - 1 of the rows of one panel.
template <typename T>
void pack_rows(const T* x, float* panel, int64_t count, int64_t inputs, const int32_t* order, int64_t begin,
                 int64_t end) {
  Vec halves[2];
  for (int64_t slab = begin; slab < end; slab++) {
    float* const to = panel + slab * count * FloatRows::kSlabWords;
    for (int64_t r = 0; r < count; r++) {
      load_slab(x + r * inputs, inputs, order, slab, halves);
      for (int i = 0; i < kSlab; i++) to[i * count + r] = halves[i / kLanes][i % kLanes];
      for (int h = 0; h < 2; h++) to[(kSlab + h) * count + r] = sum_lanes(halves[h]);
    }
  }
}

// At most `kPackedSlabs`.
template <typename T>
void pack_rows(const T* x, int32_t* panel, int64_t count, int64_t inputs, const int32_t* order, int64_t begin,
                  int64_t end) {
  using Rows = RoundedRows;
  typedef int8_t Codes __attribute__((vector_size(kLanes)));
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  float largest[kPackedSlabs];
  Vec halves[2];
  for (int64_t slab = begin; slab < end; slab++)
    std::fill_n(panel + (slab * Rows::kSlabWords + Rows::kLong) * count, count, 0);
  for (int64_t r = 0; r < count; r++) {
    float total = 0.0f;
    for (int64_t slab = begin; slab < end; slab++) {
      load_slab(x + r * inputs, inputs, order, slab, halves);
      const Vec magnitudes[2] = {halves[0] < 0.0f ? -halves[0] : halves[0], halves[1] < 0.0f ? -halves[1] : halves[1]};
      total += largest[slab - begin] = highest_lane(max_vec(magnitudes[0], magnitudes[1]));
    }
    const float mean = total / static_cast<float>(end - begin);
    for (int64_t slab = begin; slab < end; slab++) {
      int32_t* const to = panel + slab * Rows::kSlabWords * count;
      const float most = largest[slab - begin];
      const bool is_long = most > kLongAbove * mean;
      const float levels = is_long ? 127.0f * 256.0f : 127.0f, inverse = most > 0.0f ? levels / most : 0.0f;
      load_slab(x + r * inputs, inputs, order, slab, halves);
      float sums[3] = {};
      for (int h = 0; h < 2; h++) {
        const Vec code = (halves[h] * inverse + magic) - magic;
        const Vec upper = is_long ? ((code + 0.5f) * (1.0f / 256.0f) + magic) - magic : code;
        Vec lower = is_long ? code - upper * 256.0f : Vec{};
        lower = lower < -127.0f ? broadcast(-127.0f) : lower;  // -128 has no magnitude in 8 bits
        const auto put = [&](Vec codes, int at) {
          const Codes bytes = __builtin_convertvector(__builtin_convertvector(codes, IntVec), Codes);
          int32_t words[4];
          std::memcpy(words, &bytes, sizeof words);
          for (int i = 0; i < 4; i++) to[(at + 4 * h + i) * count + r] = words[i];
        };
        put(upper, 0);
        put(lower, Rows::kLower);
        sums[2] += sums[h] = sum_lanes(upper * 256.0f + lower);
      }
      // A slab of 8 bits has the units of 16, times 256. NaN if a value is infinite or NaN.
      const float scale = most / (127.0f * 256.0f) + 0.0f * sums[2];
      std::memcpy(to + Rows::kScale * count + r, &scale, sizeof scale);
      for (int i = 0; i < 3; i++) {
        sums[i] *= scale;
        std::memcpy(to + (Rows::kSums + i) * count + r, sums + i, sizeof sums[i]);
      }
      to[Rows::kLong * count + r / Rows::kLongRows] += is_long;
    }
  }
}

#if !defined(FOLIO_UNSIGNED_DOT)
// Codes of up to 6 bits: products of 2 words are added in 16 bits, as many as fit.
constexpr int words_in_shorts(int bits) { return bits == 6 ? 2 : bits == 4 ? 8 : 4; }
#endif

// sums [row][lane] of a tile and a panel.
template <int kBits, bool kTable, int kRows>
void block(const Tile<kBits>& tile, const RoundedRows::Value* x, int64_t slabs, Floats* out) {
  constexpr int kHalves = Tile<kBits>::kHalves, kHalfWords = kWords / kHalves;
  [[maybe_unused]] constexpr bool kWide = kBits == 8 || kTable;  // codes of the whole byte
  constexpr int kLongRows = RoundedRows::kLongRows;
  static_assert(kPanelRows <= 2 * kLongRows);
  constexpr std::integral_constant<int, 0> kNone;
  constexpr std::integral_constant<int, kLongRows> kMiddle;
  constexpr std::integral_constant<int, kRows> kAll;
  const uint8_t* codes = tile.codes;
  const int32_t zero = kTable ? 128 : tile.part.zero;
#if defined(FOLIO_UNSIGNED_DOT)
  const auto start = static_cast<float>(-zero);
#else
  const auto start = static_cast<float>((kWide ? 128 : 0) - zero);
#endif
  Floats sums[kRows] = {};  // in registers
  for (int64_t slab = 0; slab < slabs; slab++, codes += kBits * kVector, x += RoundedRows::kSlabWords * kRows) {
#pragma GCC unroll 8
    for (int i = 0; i < kBits * kVector; i += 64) __builtin_prefetch(codes + kAheadSlabs * kBits * kVector + i, 0, 2);
    __builtin_prefetch(tile.scales + (slab + kAheadSlabs) * tile.slab_scale_bytes, 0, 2);
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; h++) {
      Ints dots[kRows] = {}, odd[kRows] = {};
      // Adds the products of rows `from` … `to` - 1 with the words of the upper or the lower bits.
      const auto add_products = [&](const int32_t* words, auto from, auto to) __attribute__((always_inline)) {
#if defined(__AVX2__) && !defined(FOLIO_UNSIGNED_DOT)
        Shorts shorts[kRows];
        constexpr int kInShorts = kWide ? 1 : words_in_shorts(kBits) < kHalfWords ? words_in_shorts(kBits) : kHalfWords;
#endif
#pragma GCC unroll 8
        for (int i = 0; i < kHalfWords; i++) {
          Bytes w = word<kBits>(codes, h * kHalfWords + i);
          if constexpr (kTable) w = looked_up(w, tile.part.table);
          const int32_t* const values = words + (h * kHalfWords + i) * kRows;
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
          Ints* const chain = kRows <= kOwnRows && i % 2 ? odd : dots;  // two chains take half the latency of one
#pragma GCC unroll 8
          for (int r = from; r < to; r++)
            chain[r] = (Ints)_mm512_dpbusd_epi32((__m512i)chain[r], (__m512i)w, _mm512_set1_epi32(values[r]));
#elif defined(__AVX2__)
          if constexpr (kWide) w ^= Bytes{} + 128;
#if defined(__AVX512BW__)
          const __m512i ones = _mm512_set1_epi16(1), magnitude = _mm512_abs_epi8((__m512i)w);
          const __mmask64 negative = _mm512_movepi8_mask((__m512i)w);
#pragma GCC unroll 8
          for (int r = from; r < to; r++) {
            __m512i value = _mm512_set1_epi32(values[r]);
            if (kWide) value = _mm512_mask_sub_epi8(value, negative, _mm512_setzero_si512(), value);
            const Shorts pairs = (Shorts)_mm512_maddubs_epi16(kWide ? magnitude : (__m512i)w, value);
            shorts[r] = i % kInShorts == 0 ? pairs : shorts[r] + pairs;
            if (i % kInShorts == kInShorts - 1) dots[r] += (Ints)_mm512_madd_epi16((__m512i)shorts[r], ones);
          }
#else
          const __m256i ones = _mm256_set1_epi16(1), magnitude = _mm256_abs_epi8((__m256i)w);
#pragma GCC unroll 8
          for (int r = from; r < to; r++) {
            __m256i value = _mm256_set1_epi32(values[r]);
            if (kWide) value = _mm256_sign_epi8(value, (__m256i)w);
            const Shorts pairs = (Shorts)_mm256_maddubs_epi16(kWide ? magnitude : (__m256i)w, value);
            shorts[r] = i % kInShorts == 0 ? pairs : shorts[r] + pairs;
            if (i % kInShorts == kInShorts - 1) dots[r] += (Ints)_mm256_madd_epi16((__m256i)shorts[r], ones);
          }
#endif
#elif defined(__ARM_FEATURE_DOTPROD)
          if constexpr (kWide) w ^= Bytes{} + 128;
#pragma GCC unroll 8
          for (int r = from; r < to; r++)
            dots[r] = (Ints)vdotq_s32((int32x4_t)dots[r], (int8x16_t)w, (int8x16_t)vdupq_n_s32(values[r]));
#else
          for (int r = from; r < to; r++) {
            int8_t four[4];
            std::memcpy(four, values + r, 4);
            for (int lane = 0; lane < kNative; lane++)
              for (int b = 0; b < 4; b++) dots[r][lane] += int32_t(w[4 * lane + b]) * four[b];
          }
#endif
        }
      };
      add_products(x, kNone, kAll);
      const Floats scale = tile.scale(slab, h, 0);
      const Floats offset = (tile.part.has_offsets ? tile.scale(slab, h, 1) : Floats{}) + start * scale;
      Floats units[2] = {256.0f * scale, 256.0f * scale};  // of rows of 8 bits, by group
      // Makes room for the lower bits of these rows, and adds their products.
      const auto add_lower = [&](auto from, auto to) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = from; r < to; r++) dots[r] <<= 8, odd[r] <<= 8;
        add_products(x + RoundedRows::kLower * kRows, from, to);
      };
      const int32_t* const any_long = x + RoundedRows::kLong * kRows;
      if (any_long[0]) units[0] = scale;
      if constexpr (kRows > kLongRows) {
        if (any_long[1]) units[1] = scale;
        if (any_long[0] && any_long[1]) add_lower(kNone, kAll);
        else if (any_long[0]) add_lower(kNone, kMiddle);
        else if (any_long[1]) add_lower(kMiddle, kAll);
      } else if (any_long[0]) {
        add_lower(kNone, kAll);
      }
      const float* const of_rows = reinterpret_cast<const float*>(x) + RoundedRows::kScale * kRows;
      const float* const totals = of_rows + (kHalves == 1 ? 3 : 1 + h) * kRows;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const Floats exact = __builtin_convertvector(dots[r] + odd[r], Floats);
        sums[r] += exact * (units[r / kLongRows] * of_rows[r]);
        sums[r] += offset * totals[r];
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) out[r] = sums[r];
}

template <int kBits, bool kTable, int kRows>
void block(const Tile<kBits>& tile, const FloatRows::Value* x, int64_t slabs, Floats* sums) {
  constexpr int kHalves = Tile<kBits>::kHalves, kHalfWords = kWords / kHalves;
  const uint8_t* codes = tile.codes;
  const float zero = static_cast<float>(kTable ? 128 : tile.part.zero);
  for (int r = 0; r < kRows; r++) sums[r] = Floats{};
  for (int64_t slab = 0; slab < slabs; slab++, codes += kBits * kVector, x += FloatRows::kSlabWords * kRows) {
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; h++) {
      const float* const totals = x + (kSlab + h) * kRows;
      Floats dots[kRows] = {};
      for (int i = h * kHalfWords; i < (h + 1) * kHalfWords; i++) {
        Bytes w = word<kBits>(codes, i);
        if constexpr (kTable) w = looked_up(w, tile.part.table);
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++) {
          const Ints lanes = reinterpret_cast<Ints>((reinterpret_cast<Bits>(w) >> (8 * b)) & 255u);
          const Floats values = __builtin_convertvector(lanes, Floats) - zero;  // exact: small integers
#pragma GCC unroll 8
          for (int r = 0; r < kRows; r++) dots[r] += values * x[(4 * i + b) * kRows + r];
        }
      }
      const Floats scale = tile.scale(slab, h, 0);
      const Floats offset = tile.part.has_offsets ? tile.scale(slab, h, 1) : Floats{};
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        sums[r] += dots[r] * scale;
        if (tile.part.has_offsets) sums[r] += offset * (kHalves == 1 ? totals[r] + totals[r + kRows] : totals[r]);
      }
    }
  }
}

// Calls function(bits, has a table) with compile-time values.
template <typename Function>
void with_form(const WeightPart& part, Function function) {
  const auto bits = [&](auto number) { function(number, std::false_type{}); };
  switch (part.bits) {
    case 2: return bits(std::integral_constant<int, 2>{});
    case 3: return bits(std::integral_constant<int, 3>{});
    case 4:
      if (part.table) return function(std::integral_constant<int, 4>{}, std::true_type{});
      return bits(std::integral_constant<int, 4>{});
    case 5: return bits(std::integral_constant<int, 5>{});
    case 6: return bits(std::integral_constant<int, 6>{});
    case 8: return bits(std::integral_constant<int, 8>{});
  }
}

inline int64_t tiles_of(const WeightPart& part) { return (part.outputs + kTile - 1) / kTile; }

// Like `products::multiply`.
template <typename T>
void multiply(Team& team, const ProductWeight& weight, const T* x, ProductResult out, void* panels, int64_t rows) {
  using Value = typename RowsOf<T>::Value;
  const int64_t inputs = weight.inputs, outputs = weight.outputs, slabs = (inputs + kSlab - 1) / kSlab;
  const int64_t num_panels = (rows + kPanelRows - 1) / kPanelRows, height = (rows + num_panels - 1) / num_panels;
  const int64_t row_words = slabs * RowsOf<T>::kSlabWords;
  const int64_t pieces = (slabs + kPackedSlabs - 1) / kPackedSlabs;
  const auto panel_at = [&](int64_t panel) { return static_cast<Value*>(panels) + panel * height * row_words; };
  const auto pack = [&](int64_t panel, int64_t piece) {
    const int64_t begin = piece * kPackedSlabs, end = std::min(slabs, begin + kPackedSlabs), first = panel * height;
    pack_rows(x + first * inputs, panel_at(panel), std::min(height, rows - first), inputs, weight.order, begin, end);
  };
  static thread_local std::vector<Value> own;
  if (rows <= kOwnRows) {
    own.resize(std::max<size_t>(own.size(), rows * row_words));
    panels = own.data();
    for (int64_t i = 0; i < pieces; i++) pack(0, i);
  }
  if (rows > kOwnRows) team.each(num_panels * pieces, [&](int64_t i) { pack(i / pieces, i % pieces); });
  const int64_t fitting = kPanelBytes / (height * row_words * int64_t(sizeof(Value)));
  const int64_t group = std::clamp<int64_t>(fitting, 1, num_panels), groups = (num_panels + group - 1) / group;
  int64_t num_items = 0;
  const auto at_once = [&](const WeightPart& part) {
    return std::max<int64_t>(1, kItemBytes / (slabs * part.bits * kVector));
  };
  const auto items_of = [&](const WeightPart& part) { return (tiles_of(part) + at_once(part) - 1) / at_once(part); };
  for (int p = 0; p < weight.num_parts; p++) num_items += items_of(weight.parts[p]);
  team.each(groups * num_items, [&](int64_t item) {
    const int64_t begin = item / num_items * group, end = std::min(num_panels, begin + group);
    int64_t i = item % num_items, start = 0;
    const WeightPart* part = weight.parts;
    for (; i >= items_of(*part); part++) i -= items_of(*part), start += part->outputs;
    const int64_t first_tile = i * at_once(*part), last_tile = std::min(tiles_of(*part), first_tile + at_once(*part));
    for (int64_t t = first_tile; t < last_tile; t++) {
      const int64_t lane = t * kTile, left = std::min<int64_t>(kTile, part->outputs - lane), output = start + lane;
      const Vec factor = part->factors ? load_some(part->factors + lane, left) : broadcast(1.0f);
      const Vec offset = weight.bias ? load_some(static_cast<const T*>(weight.bias) + output, left) : Vec{};
      for (int64_t panel = begin; panel < end; panel++) {
        const int64_t first = panel * height, count = std::min(height, rows - first);
        alignas(64) float sums[kPanelRows + 1][kNative] = {};  // a vector is more than the last row has
        with_form(*part, [&](auto bits, auto table) {
          with_count<1, kPanelRows>(static_cast<int>(count), [&](auto number) {
            const Tile<bits> tile(*part, t, slabs);
            block<bits, table, number>(tile, panel_at(panel), slabs, reinterpret_cast<Floats*>(sums));
          });
        });
        for (int64_t r = 0; r < count; r++) {
          const Vec sum = load_some(sums[r], kNative) * factor + offset;
          put<T>(out, sum, (first + r) * outputs + output, left);
        }
      }
    }
  });
}

}  // namespace folio::codes
