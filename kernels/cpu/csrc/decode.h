// Decode: one query of a sequence against its cached tokens. All heads of a token are computed together, so that the
// cache is read once and in order.
//
// The query heads that share a KV head are taken in blocks of kRows (1, 2 or 4; missing heads are zeros). A vector of
// scores holds a block for 16 / kRows tokens:  lane = token * kRows + head.  Keys of four tokens are transposed, 16
// bytes each, so that a multiplication serves four tokens and four sums fold into one such vector; maximum, exponential
// and sum of a whole vector then take one instruction each. Where the processor multiplies pairs of bfloat16, weights
// are rounded to bfloat16 and values of two tokens are interleaved: out += V[two tokens] · P[two tokens].
#pragma once

#include <array>
#include <cmath>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "call.h"
#include "int8_rows.h"
#include "vector.h"

namespace folio {

constexpr int kDecodeTile = 32;  // the most cached tokens between two updates of the maximum
// Cached tokens of one part. It depends on the shape alone, so that a sequence's result depends neither on the rest of
// the batch nor on the number of processors. Parts below half a megabyte end before prefetching pays.
inline int split_tokens(int64_t token_bytes) { return token_bytes <= 1024 ? 2048 : 1024; }

#if defined(__AVX512BF16__)
template <typename T>
constexpr bool kPairs = std::is_same_v<T, BFloat16>;
#else
template <typename T>
constexpr bool kPairs = false;
#endif

// What the rows of a cache are multiplied as: codes of int8 are widened first.
template <typename T, typename Cached>
using Multiplied = std::conditional_t<std::is_same_v<T, Cached> || kPairs<T>, T, float>;

constexpr size_t kNoPart = ~size_t(0);

struct DecodeItem {
  int32_t sequence;
  Span tokens;
  int32_t first_head, num_heads;  // KV heads
  size_t part;                    // its number; kNoPart: it is all of the sequence
};

// Position of output column c in the sums: pairs are interleaved within 16 bytes.
template <typename T>
inline int column(int c) {
  if constexpr (!kPairs<T>) return c;
  return c / 32 * 32 + (c % 8 < 4 ? 0 : 16) + c % 32 / 8 * 4 + c % 4;
}

// Points each pointer at so many floats of the buffer, which begin at a cache line.
inline void carve(std::vector<float>& buffer, std::initializer_list<std::pair<float**, size_t>> pieces) {
  size_t total = kLanes;
  for (const auto& [_, size] : pieces) total += (size + kLanes - 1) / kLanes * kLanes;
  buffer.resize(total);
  float* place = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) & ~uintptr_t(63));
  for (const auto& [pointer, size] : pieces) {
    *pointer = place;
    place += (size + kLanes - 1) / kLanes * kLanes;
  }
}

// One thread's working memory, for all heads of a sequence.
struct DecodeScratch {
  std::vector<float> buffer;
  float *queries, *out, *highest, *sum, *scores;
  float *keys, *values, *key_scales, *value_scales;  // of a tile of an int8 cache
  int query_stride, value_stride;  // floats

  DecodeScratch(int num_rows, int num_blocks, int key_dim, int value_dim, bool int8_cache)
      : query_stride(round_up(key_dim, 2 * kLanes)), value_stride(round_up(value_dim, 2 * kLanes)) {
    const size_t lanes = size_t(num_blocks) * kLanes, widened = int8_cache ? kDecodeTile : 0;
    carve(buffer, {{&queries, size_t(num_rows) * query_stride}, {&out, size_t(num_rows) * value_stride},
                   {&highest, lanes}, {&sum, lanes}, {&scores, size_t(2) * kDecodeTile * 4},
                   {&keys, widened * query_stride}, {&values, widened * value_stride},
                   {&key_scales, widened * 4}, {&value_scales, widened * 4}});
  }
};

// 64 bytes of a key, `left` elements of them valid: pairs of bfloat16, other types as floats.
template <typename T>
inline Vec load_key(const T* from, int left) {
#if defined(__AVX512BF16__)
  if constexpr (kPairs<T>) {
    const __mmask32 mask = left >= 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
    return reinterpret_cast<Vec>(_mm512_maskz_loadu_epi16(mask, from));
  }
#endif
  return load_some(from, left);
}

template <typename T>
inline Vec multiply_add_as(Vec acc, Vec a, Vec b) {
#if defined(__AVX512BF16__)
  if constexpr (kPairs<T>)
    return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), (__m512bh)a, (__m512bh)b));
#endif
  return acc + a * b;
}

#if defined(__AVX512F__)
// Scores of kUnits vectors of tokens for kHeads heads, in kBlocks blocks: scores[block][unit]. Meanwhile as many keys,
// `next`, are prefetched. Consecutive tokens of a layer can lie on different pages, where no hardware prefetcher
// follows; many requests at once would wait.
template <typename T, int kRows, int kHeads, int kBlocks, int kUnits>
inline void dot(const T* const* keys, const T* const* next, const float* queries, int query_stride, int dim,
                Vec (&scores)[kBlocks][kUnits]) {
  constexpr int kTokens = kLanes / kRows, kQuads = 4 / kRows;
  constexpr int kElements = kPairs<T> ? 2 * kLanes : kLanes;  // of a key in a vector
  __m512 sums[kBlocks][kUnits][kQuads][kRows] = {};
  for (int c = 0, at = 0; c < dim; c += kElements, at += kLanes) {
    __m512 turned[kUnits][kQuads][4];
#pragma GCC unroll 4
    for (int u = 0; u < kUnits; u++)
#pragma GCC unroll 4
      for (int q = 0; q < kQuads; q++) {
        // Tokens q, q + kQuads, …: their sums come out in the order of the lanes.
        const T* const* from = keys + u * kTokens + q;
        const __m512 a = (__m512)load_key(from[0] + c, dim - c), b = (__m512)load_key(from[kQuads] + c, dim - c);
        const __m512 d = (__m512)load_key(from[2 * kQuads] + c, dim - c);
        const __m512 e = (__m512)load_key(from[3 * kQuads] + c, dim - c);
        const __m512 ab_even = _mm512_shuffle_f32x4(a, b, 0x88), ab_odd = _mm512_shuffle_f32x4(a, b, 0xdd);
        const __m512 de_even = _mm512_shuffle_f32x4(d, e, 0x88), de_odd = _mm512_shuffle_f32x4(d, e, 0xdd);
        turned[u][q][0] = _mm512_shuffle_f32x4(ab_even, de_even, 0x88);
        turned[u][q][1] = _mm512_shuffle_f32x4(ab_odd, de_odd, 0x88);
        turned[u][q][2] = _mm512_shuffle_f32x4(ab_even, de_even, 0xdd);
        turned[u][q][3] = _mm512_shuffle_f32x4(ab_odd, de_odd, 0xdd);
      }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
#pragma GCC unroll 8
      for (int t = i; t < kUnits * kTokens; t += 4) __builtin_prefetch(next[t] + c, 0, 2);
#pragma GCC unroll 8
      for (int head = 0; head < kHeads; head++) {
        const float* place = queries + head * query_stride + at + 4 * i;
        const Vec query = (Vec)_mm512_broadcast_f32x4(_mm_load_ps(place));
#pragma GCC unroll 4
        for (int u = 0; u < kUnits; u++)
#pragma GCC unroll 4
          for (int q = 0; q < kQuads; q++) {
            __m512& sum = sums[head / kRows][u][q][head % kRows];
            sum = (__m512)multiply_add_as<T>((Vec)sum, (Vec)turned[u][q][i], query);
          }
      }
    }
  }
#pragma GCC unroll 2
  for (int block = 0; block < kBlocks; block++)
#pragma GCC unroll 4
    for (int u = 0; u < kUnits; u++) {
      const __m512* sum = &sums[block][u][0][0];
      auto add_halves = [](__m512 x, __m512 y) {
        const __m512d a = _mm512_castps_pd(x), b = _mm512_castps_pd(y);
        return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
      };
      const __m512 x = add_halves(sum[0], sum[1]), y = add_halves(sum[2], sum[3]);
      scores[block][u] = (Vec)_mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
    }
}
#else
template <typename T, int kRows, int kHeads, int kBlocks, int kUnits>
inline void dot(const T* const* keys, const T* const* next, const float* queries, int query_stride, int dim,
                Vec (&scores)[kBlocks][kUnits]) {
  for (int t = 0; t < kUnits * kLanes / kRows; t++) prefetch(next[t], dim);
  for (int u = 0; u < kUnits; u++)
    for (int t = 0; t < kLanes / kRows; t++) {
      Vec sums[kHeads] = {};
      for (int c = 0; c < dim; c += kLanes) {
        const Vec key = load_some(keys[u * kLanes / kRows + t] + c, dim - c);
        for (int r = 0; r < kHeads; r++) sums[r] += key * load(queries + r * query_stride + c);
      }
      for (int r = 0; r < kBlocks * kRows; r++)
        scores[r / kRows][u][t * kRows + r % kRows] = r < kHeads ? sum_lanes(sums[r]) : 0.0f;
    }
}
#endif

// out[kHeads][columns] += weights · values, 16 * kVecs columns. Weights are in blocks of kRows heads, each
// [tokens][kRows], or with pairs [tokens / 2][kRows]. Meanwhile the values `next`, as many, are prefetched.
template <typename T, int kRows, int kHeads, int kVecs>
inline void add_values(const float* weights, const T* const* values, const T* const* next, int count, int first,
                       int columns, float* out, int stride) {
  constexpr int kBlockFloats = kDecodeTile * 4;
  Vec acc[kHeads][kVecs];
  out += first;
#pragma GCC unroll 8
  for (int r = 0; r < kHeads; r++)
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; c++) acc[r][c] = load(out + r * stride + c * kLanes);
  constexpr int kStep = kPairs<T> ? 2 : 1;  // tokens
  for (int t = 0; t < count; t += kStep) {
    constexpr int kLine = 64 / sizeof(T);  // columns
#pragma GCC unroll 8
    for (int c = 0; c < kVecs * kLanes; c += kLine) {
      __builtin_prefetch(next[t] + first + c, 0, 2);
      if constexpr (kStep == 2) __builtin_prefetch(next[t + 1] + first + c, 0, 2);
    }
    Vec value[kVecs];
#if defined(__AVX512BF16__)
    if constexpr (kPairs<T>) {
      const T *one = values[t] + first, *other = values[std::min(t + 1, count - 1)] + first;
#pragma GCC unroll 4
      for (int c = 0; c < kVecs / 2; c++) {
        const int left = columns - first - 32 * c;
        const __mmask32 mask = left >= 32 ? ~__mmask32(0) : left <= 0 ? 0 : (__mmask32(1) << left) - 1;
        const __m512i a = _mm512_maskz_loadu_epi16(mask, one + 32 * c);
        const __m512i b = _mm512_maskz_loadu_epi16(mask, other + 32 * c);
        value[2 * c] = (Vec)_mm512_unpacklo_epi16(a, b);
        value[2 * c + 1] = (Vec)_mm512_unpackhi_epi16(a, b);
      }
    }
#endif
    if constexpr (!kPairs<T>) {
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; c++) {
        const int left = columns - first - c * kLanes;
        value[c] = left > 0 ? load_some(values[t] + first + c * kLanes, left) : Vec{};
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kHeads; r++) {
      const Vec weight = broadcast(weights[r / kRows * kBlockFloats + t / kStep * kRows + r % kRows]);
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; c++) acc[r][c] = multiply_add_as<T>(acc[r][c], value[c], weight);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kHeads; r++)
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; c++) store(out + r * stride + c * kLanes, acc[r][c]);
}

template <typename T>
inline Vec exp2_as(Vec x) {
  return kPairs<T> ? exp2_rough(x) : exp2_vec(x);
}

// The maximum of the lanes of each head, in all of its lanes.
template <int kRows>
inline Vec highest_of_rows(Vec v) {
#pragma GCC unroll 4
  for (int step = kRows; step < kLanes; step *= 2) {
#if defined(__clang__)
    Vec turned;
    for (int i = 0; i < kLanes; i++) turned[i] = v[(i + step) % kLanes];
#else
    const Vec turned = __builtin_shuffle(v, (lane_numbers() + step) & (kLanes - 1));
#endif
    v = max_vec(v, turned);
  }
  return v;
}

inline bool any_differs(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), _CMP_NEQ_UQ);
#else
  return std::memcmp(&a, &b, sizeof a) != 0;
#endif
}

// Weights of a vector for the multiplication by values: floats, or pairs of tokens in bfloat16.
template <typename T, int kRows>
inline void store_weights(Vec weights, int vector, float* to) {
#if defined(__AVX512BF16__)
  if constexpr (kPairs<T>) {
    const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(reinterpret_cast<__m512>(weights));
    alignas(32) static constexpr auto order = [] {
      std::array<uint16_t, 16> order{};
      for (int i = 0; i < 16; i++) {  // word i belongs to token 2 * pair + i % 2 and head i / 2 % kRows
        const int pair = kRows == 16 ? 0 : i / (2 * kRows);
        order[i] = static_cast<uint16_t>((2 * pair + i % 2) * kRows + i / 2 % kRows);
      }
      return order;
    }();
    const __m256i index = _mm256_load_si256(reinterpret_cast<const __m256i*>(order.data()));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + vector * kLanes / 2), _mm256_permutexvar_epi16(index, narrow));
    return;
  }
#endif
  store(to + vector * kLanes, weights);
}

// Running state of some heads that share a KV head, over the tiles of a sequence.
struct Heads {
  const float *queries, *slopes;  // slopes: as the lanes of their blocks, or null
  float *highest, *sum, *out;     // of each block a vector, of each block a vector, of each head value_stride
};

// Rows of a tile's tokens for one KV head; those past its last token repeat it.
template <typename T>
struct TileRows {
  const T *keys[kDecodeTile], *values[kDecodeTile];
  const float *key_scales = nullptr, *value_scales = nullptr;  // as the lanes of scores, or null
};

// One tile of tokens, while the next one is prefetched.
template <typename T, int kRows, int kHeads>
inline void decode_tile(const AttentionCall& call, const TileRows<T>& rows, const TileRows<T>& next, int count,
                        int32_t distance, const Heads& heads, const DecodeScratch& scratch) {
  constexpr int kTokens = kLanes / kRows, kBlocks = (kHeads + kRows - 1) / kRows, kUnits = 2;
  const int num_vecs = (count + kTokens - 1) / kTokens, value_stride = scratch.value_stride;
  auto scores_of = [&](int block, int vector) { return scratch.scores + block * kDecodeTile * 4 + vector * kLanes; };
  Vec tile_highest[kBlocks];
  for (Vec& highest : tile_highest) highest = broadcast(-kInf);
  for (int v = 0; v < num_vecs; v += kUnits) {
    Vec scores[kBlocks][kUnits];
    dot<T, kRows, kHeads, kBlocks, kUnits>(rows.keys + v * kTokens, next.keys + v * kTokens, heads.queries,
                                           scratch.query_stride, call.key_dim, scores);
    for (int u = 0; u < kUnits && v + u < num_vecs; u++)
      for (int block = 0; block < kBlocks; block++) {
        Vec s = scores[block][u] * call.scale;
        if (rows.key_scales) s *= load(rows.key_scales + (v + u) * kLanes);
        if (call.softcap > 0.0f) s = soft_cap(s, call.softcap);
        const IntVec token = lane_numbers() / kRows + (v + u) * kTokens;
        if (heads.slopes) {
          const Vec away = to_floats(distance - token);
          s -= load(heads.slopes + block * kLanes) * (away < 0.0f ? -away : away);
        }
        if ((v + u + 1) * kTokens > count) s = token < count ? s : broadcast(-kInf);
        store(scores_of(block, v + u), s);
        tile_highest[block] = max_vec(tile_highest[block], s);
      }
  }
  for (int block = 0; block < kBlocks; block++) {
    const Vec top = highest_of_rows<kRows>(tile_highest[block]), before = load(heads.highest + block * kLanes);
    const Vec now = max_vec(before, top);
    Vec total = load(heads.sum + block * kLanes);
    if (any_differs(before, now)) {
      const Vec shrink = exp2_vec((before - now) * kLog2E);
      total *= shrink;
      store(heads.highest + block * kLanes, now);
      for (int r = 0; r < kRows && block * kRows + r < kHeads; r++) {
        float* out = heads.out + (block * kRows + r) * value_stride;
        for (int c = 0; c < value_stride; c += kLanes) store(out + c, load(out + c) * shrink[r]);
      }
    }
    for (int v = 0; v < num_vecs; v++) {
      Vec weights = exp2_as<T>(load(scores_of(block, v)) * kLog2E - now * kLog2E);
      total += weights;
      if (rows.value_scales) weights *= load(rows.value_scales + v * kLanes);
      store_weights<T, kRows>(weights, v, scores_of(block, 0));
    }
    store(heads.sum + block * kLanes, total);
  }
  constexpr int kVecs = kHeads > 4 ? 2 : kHeads > 2 ? 4 : 8;
  int c = 0;
  for (; c + kVecs * kLanes <= value_stride; c += kVecs * kLanes)
    add_values<T, kRows, kHeads, kVecs>(scratch.scores, rows.values, next.values, count, c, call.value_dim, heads.out,
                                        value_stride);
  if constexpr (kVecs > 2)
    for (; c < value_stride; c += 2 * kLanes)
      add_values<T, kRows, kHeads, 2>(scratch.scores, rows.values, next.values, count, c, call.value_dim, heads.out,
                                      value_stride);
}

// Outputs of a head from its sums.
template <typename T>
inline void finish_row(const AttentionCall& call, int64_t token, int head, const float* sums, float highest,
                       float total) {
  float norm = 0.0f;
  if (total != 0.0f) {  // NaN stays NaN
    float scale = 1.0f;
    if (call.sinks) {  // a sink is one more score in the denominator, without a value
      const float top = std::max(highest, call.sinks[head]);
      scale = std::exp(highest - top);
      total = total * scale + std::exp(call.sinks[head] - top);
      highest = top;
    }
    norm = scale / total;
  }
  if (call.lse) call.lse[token * call.num_q_heads + head] = total != 0.0f ? highest + std::log(total) : -kInf;
  T* out = static_cast<T*>(call.out) + (token * call.num_q_heads + head) * call.value_dim;
#if defined(__AVX512BF16__)
  if constexpr (kPairs<T>) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // as `column`
    for (int c = 0; c < call.value_dim; c += 32) {
      const __m512 first = (__m512)(load(sums + c) * norm), second = (__m512)(load(sums + c + kLanes) * norm);
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
      const int left = call.value_dim - c;
      const __mmask32 mask = left >= 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
      _mm512_mask_storeu_epi16(out + c, mask, _mm512_permutexvar_epi64(order, both));
    }
    return;
  }
#endif
  for (int c = 0; c < call.value_dim; c++) from_float(sums[column<T>(c)] * norm, out + c);
}

// Rows of scratch for the heads that share a KV head.
inline int padded_rows(int group_size) {
  return group_size <= 2 ? group_size : group_size <= 4 ? 4 : round_up(group_size, 8);
}

template <bool kFirst, typename First, typename Second>
inline const auto& choose(const First& first, const Second& second) {
  if constexpr (kFirst) return first;
  else return second;
}

// A tile of an int8 cache as the rows of `scratch`, while the next one, if any, is prefetched.
template <int kRows, typename M>
inline TileRows<M> widen_tile(const AttentionCall& call, const TileRows<int8_t>& rows, const TileRows<int8_t>& next,
                              int count, DecodeScratch& scratch) {
  TileRows<M> tile;
  tile.key_scales = scratch.key_scales, tile.value_scales = scratch.value_scales;
  for (int t = 0; t < kDecodeTile; t++) {
    const int row = std::min(t, count - 1);  // those past its last token repeat it
    M* const key = reinterpret_cast<M*>(scratch.keys + row * scratch.query_stride);
    M* const value = reinterpret_cast<M*>(scratch.values + row * scratch.value_stride);
    tile.keys[t] = key, tile.values[t] = value;
    if (t < count) {
      prefetch(next.keys[t], call.key_dim);
      prefetch(next.values[t], call.value_dim);
      widen_codes(rows.keys[t], call.key_dim, key);
      widen_codes(rows.values[t], call.value_dim, value);
    }
    for (int r = 0; r < kRows; r++) {
      scratch.key_scales[t * kRows + r] = scale_of(rows.keys[t], call.key_dim);
      scratch.value_scales[t * kRows + r] = scale_of(rows.values[t], call.value_dim);
    }
  }
  return tile;
}

template <typename T, typename Cached, int kRows, int kMostHeads>
void decode(const AttentionCall& call, const DecodeItem& item, float* partial, DecodeScratch& scratch) {
  static_assert(kDecodeTile % (2 * kLanes / kRows) == 0);
  using M = Multiplied<T, Cached>;
  constexpr bool kWidens = !std::is_same_v<T, Cached>;
  const int group_size = call.num_q_heads / call.num_kv_heads, group_rows = padded_rows(group_size);
  const int num_rows = group_rows * item.num_heads, num_blocks = num_rows / kRows;
  const int query_stride = scratch.query_stride, value_stride = scratch.value_stride;
  const int64_t token = call.cu_seqlens_q[item.sequence];
  const int32_t position = call.cache_seqlens[item.sequence] - 1;

  std::fill(scratch.queries, scratch.queries + num_rows * query_stride, 0.0f);
  std::fill(scratch.out, scratch.out + num_rows * value_stride, 0.0f);
  std::fill(scratch.highest, scratch.highest + num_blocks * kLanes, -kInf);
  std::fill(scratch.sum, scratch.sum + num_blocks * kLanes, 0.0f);
  const int first_query = item.first_head * group_size, end_query = first_query + item.num_heads * group_size;
  auto row_of = [&](int head) {
    return (head - first_query) / group_size * group_rows + (head - first_query) % group_size;
  };
  std::vector<float> slopes(call.alibi_slopes ? num_blocks * kLanes : 0);
  for (int head = first_query; head < end_query; head++) {
    const T* query =
        static_cast<const T*>(call.query) + token * call.query_token_stride + head * call.query_head_stride;
    const int row = row_of(head);
    if constexpr (kPairs<T>) {
      std::memcpy(scratch.queries + row * query_stride, query, call.key_dim * sizeof(T));
    } else {
      widen(query, call.key_dim, scratch.queries + row * query_stride);
    }
    if (call.alibi_slopes)
      for (int i = row % kRows; i < kLanes; i += kRows)
        slopes[row / kRows * kLanes + i] = call.alibi_slopes[item.sequence * call.alibi_stride + head];
  }

  // Rows of two tiles: of this one, and of the next one.
  const Cached *keys[2][kDecodeTile], *values[2][kDecodeTile];
  Rows<Cached> rows(call, item.sequence, item.tokens.begin);
  const auto locate = [&](int start, int slot) {
    const int count = std::max(0, std::min(kDecodeTile, item.tokens.end - start));
    rows.next(count, keys[slot], values[slot]);
    for (int t = count; count && t < kDecodeTile; t++)
      keys[slot][t] = keys[slot][t - 1], values[slot][t] = values[slot][t - 1];
    return count;
  };
  const auto of_head = [&](int slot, int head) {
    TileRows<Cached> tile;
    for (int t = 0; t < kDecodeTile; t++) {
      tile.keys[t] = keys[slot][t] + head * call.key_head_stride;
      tile.values[t] = values[slot][t] + head * call.value_head_stride;
    }
    return tile;
  };
  int count = locate(item.tokens.begin, 0);
  for (int head = item.first_head; head < item.first_head + item.num_heads; head++) {
    for (int t = 0; t < count; t++) prefetch(keys[0][t] + head * call.key_head_stride, call.key_dim);
    for (int t = 0; t < count; t++) prefetch(values[0][t] + head * call.value_head_stride, call.value_dim);
  }
  for (int start = item.tokens.begin, slot = 0; start < item.tokens.end; slot ^= 1) {
    const int next_count = locate(start + count, slot ^ 1);
    for (int head = 0; head < item.num_heads; head++) {
      const TileRows<Cached> cached = of_head(slot, item.first_head + head);
      const TileRows<Cached> cached_next = next_count ? of_head(slot ^ 1, item.first_head + head) : cached;
      TileRows<M> widened;
      if constexpr (kWidens) widened = widen_tile<kRows, M>(call, cached, cached_next, count, scratch);
      const TileRows<M>&tile = choose<kWidens>(widened, cached), &next = choose<kWidens>(widened, cached_next);
      for (int first = 0; first < group_size; first += kMostHeads) {
        const int row = head * group_rows + first, block = row / kRows;
        const Heads heads{scratch.queries + row * query_stride,
                          slopes.empty() ? nullptr : slopes.data() + block * kLanes,
                          scratch.highest + block * kLanes,
                          scratch.sum + block * kLanes,
                          scratch.out + row * value_stride};
        constexpr int kLeast = kMostHeads == 8 ? 4 : kMostHeads == 4 ? 3 : kMostHeads;
        with_count<kLeast, kMostHeads>(std::min(kMostHeads, group_size - first), [&](auto num_heads) {
          decode_tile<M, kRows, decltype(num_heads)::value>(call, tile, next, count, position - start, heads, scratch);
        });
      }
    }
    start += count;
    count = next_count;
  }

  for (int head = first_query; head < end_query; head++) {
    const int row = row_of(head), block = row / kRows;
    float total = 0.0f;
    for (int i = row % kRows; i < kLanes; i += kRows) total += scratch.sum[block * kLanes + i];
    const float highest = scratch.highest[block * kLanes + row % kRows];
    const float* sums = scratch.out + row * value_stride;
    if (partial) {
      float* to = partial + int64_t(head) * (value_stride + 2);
      std::memcpy(to, sums, value_stride * sizeof(float));
      to[value_stride] = highest;
      to[value_stride + 1] = total;
    } else {
      finish_row<T>(call, token, head, sums, highest, total);
    }
  }
}

// Combine the parts of a split sequence, in order.
template <typename T>
void join_parts(const AttentionCall& call, int32_t sequence, int num_parts, float* partials, int value_stride) {
  const int64_t token = call.cu_seqlens_q[sequence], row = value_stride + 2, part = row * call.num_q_heads;
  for (int head = 0; head < call.num_q_heads; head++) {
    float* first = partials + head * row;
    float highest = first[value_stride];
    for (int i = 1; i < num_parts; i++) highest = std::max(highest, first[i * part + value_stride]);
    float total = 0.0f;
    for (int i = 0; i < num_parts; i++) {
      const float* sums = first + i * part;
      const float shrink = std::exp(sums[value_stride] - highest);
      total += sums[value_stride + 1] * shrink;
      for (int c = 0; c < value_stride; c += kLanes) {
        const Vec scaled = load(sums + c) * shrink;
        store(first + c, i ? load(first + c) + scaled : scaled);
      }
    }
    finish_row<T>(call, token, head, first, highest, total);
  }
}

}  // namespace folio
