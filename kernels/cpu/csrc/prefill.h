// Prefill: a chunk of a sequence's queries against its cached tokens.
//
// One tile is a few query rows (query positions x the heads that share a KV head) against 64 cached tokens:
//   1. pack K so that 16 tokens lie side by side in a vector  [dword of the head][16 tokens]
//   2. scores = Q K^T: each step multiplies 16 tokens by one broadcast dword of a query row
//   3. online softmax (FlashAttention), 4. out += P V, with V widened to float, or two tokens interleaved, once a tile.
// Packing is paid once a tile and shared by all its rows.
#pragma once

#include <cmath>
#include <vector>

#include "call.h"
#include "decode.h"
#include "transpose.h"
#include "vector.h"

namespace folio {

constexpr int kTileTokens = 64;  // cached tokens in a tile
constexpr int kMaxRows = 64;     // query rows in a tile

// The accumulators of 4 rows x kBlockVecs vectors stay in registers: 16 of 32 with AVX-512, else 8 of 16 of half width.
#if defined(__AVX512F__)
constexpr int kRegisters = 1, kBlockVecs = 4;
#else
constexpr int kRegisters = 2, kBlockVecs = 1;
#endif
typedef float Register __attribute__((vector_size(sizeof(Vec) / kRegisters)));  // kRegisters are a Vec
constexpr int kRegisterLanes = kLanes / kRegisters;

struct PrefillItem {
  int32_t sequence, first, count;  // query positions first … first + count - 1 of the sequence's chunk
  int32_t kv_head;
};

// One thread's working memory, sized for one tile.
struct PrefillScratch {
  std::vector<float> buffer;
  float *queries, *keys, *scores, *values, *out, *row_max, *row_sum, *wide, *wide_values, *key_scales, *value_scales;

  PrefillScratch(int key_stride, int value_stride) {
    carve(buffer, {{&queries, size_t(kMaxRows) * key_stride}, {&keys, size_t(kTileTokens) * key_stride},
                   {&scores, size_t(kMaxRows) * kTileTokens}, {&values, size_t(kTileTokens) * value_stride},
                   {&out, size_t(kMaxRows) * value_stride}, {&row_max, kMaxRows}, {&row_sum, kMaxRows},
                   {&wide, size_t(kLanes) * round_up(key_stride, 2 * kLanes)},
                   {&wide_values, size_t(2) * value_stride}, {&key_scales, kTileTokens}, {&value_scales, kTileTokens}});
  }
};

inline Register load_register(const void* from) {
  Register lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}
inline void store_register(Register lanes, float* to) { std::memcpy(to, &lanes, sizeof(lanes)); }

template <bool kDots>
inline Register multiply_add(Register acc, Register keys, uint32_t query) {
#if defined(__AVX512BF16__)
  if constexpr (kDots) {
    return reinterpret_cast<Register>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc),
                                                       reinterpret_cast<__m512bh>(keys),
                                                       reinterpret_cast<__m512bh>(_mm512_set1_epi32(query))));
  }
#endif
  float value;
  std::memcpy(&value, &query, 4);
  return acc + keys * value;
}

// scores[kRows][kTileTokens] = queries[kRows][num_dwords] . keys[kGroups][num_dwords][16 tokens]
template <bool kDots, int kRows, int kGroups>
inline void score_block(const uint32_t* queries, const uint32_t* keys, int num_dwords, float* scores) {
  Register acc[kRows][kGroups][kRegisters] = {};
  for (int d = 0; d < num_dwords; d++) {
    Register key[kGroups][kRegisters];
    for (int g = 0; g < kGroups; g++)
      for (int i = 0; i < kRegisters; i++)
        key[g][i] = load_register(keys + (g * num_dwords + d) * kLanes + i * kRegisterLanes);
    for (int r = 0; r < kRows; r++)
      for (int g = 0; g < kGroups; g++)
        for (int i = 0; i < kRegisters; i++)
          acc[r][g][i] = multiply_add<kDots>(acc[r][g][i], key[g][i], queries[r * num_dwords + d]);
  }
  for (int r = 0; r < kRows; r++)
    for (int g = 0; g < kGroups; g++)
      for (int i = 0; i < kRegisters; i++)
        store_register(acc[r][g][i], scores + r * kTileTokens + g * kLanes + i * kRegisterLanes);
}

template <bool kDots>
void score_rows(const uint32_t* queries, const uint32_t* keys, int num_dwords, int num_rows, int num_vecs,
                float* scores) {
  for (int v = 0; v < num_vecs; v += kBlockVecs)
    with_count<1, kBlockVecs>(num_vecs - v, [&](auto groups) {
      for (int r = 0; r < num_rows; r += 4)
        with_count<1, 4>(num_rows - r, [&](auto rows) {
          score_block<kDots, decltype(rows)::value, decltype(groups)::value>(
              queries + r * num_dwords, keys + v * kLanes * num_dwords, num_dwords,
              scores + r * kTileTokens + v * kLanes);
        });
    });
}

// out[kRows][stride] += weights[kRows][kTileTokens] · values, kVecs vectors of columns. Values are floats
// [num_tokens][stride], or, with dot products of pairs, two tokens in each dword [num_tokens / 2][stride].
template <bool kDots, int kRows, int kVecs>
inline void value_block(const float* weights, const float* values, int num_steps, int stride, float* out) {
  constexpr int kColumns = kVecs * kRegisters;  // registers
  Register acc[kRows][kColumns];
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kColumns; c++) acc[r][c] = load_register(out + r * stride + c * kRegisterLanes);
  for (int t = 0; t < num_steps; t++) {
    Register value[kColumns];
    for (int c = 0; c < kColumns; c++) value[c] = load_register(values + t * stride + c * kRegisterLanes);
    for (int r = 0; r < kRows; r++) {
      uint32_t weight;
      std::memcpy(&weight, weights + r * kTileTokens + t, 4);
      for (int c = 0; c < kColumns; c++) acc[r][c] = multiply_add<kDots>(acc[r][c], value[c], weight);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kColumns; c++) store_register(acc[r][c], out + r * stride + c * kRegisterLanes);
}

template <bool kDots, int kVecs>
void value_rows(const float* weights, const float* values, int num_steps, int stride, int num_rows, float* out) {
  for (int r = 0; r < num_rows; r += 4)
    with_count<1, 4>(num_rows - r, [&](auto rows) {
      value_block<kDots, decltype(rows)::value, kVecs>(weights + r * kTileTokens, values, num_steps, stride,
                                                       out + r * stride);
    });
}

// The row of a value for `value_block`: two tokens interleaved (as in `column`), or one as floats.
template <typename T>
inline void pack_values(const T* first, const T* second, int count, float* to) {
#if defined(__AVX512BF16__)
  if constexpr (kPairs<T>) {
    for (int c = 0; c < count; c += 32) {
      const __mmask32 mask = count - c >= 32 ? ~__mmask32(0) : (__mmask32(1) << (count - c)) - 1;
      const __m512i a = _mm512_maskz_loadu_epi16(mask, first + c), b = _mm512_maskz_loadu_epi16(mask, second + c);
      _mm512_storeu_si512(to + c, _mm512_unpacklo_epi16(a, b));
      _mm512_storeu_si512(to + c + kLanes, _mm512_unpackhi_epi16(a, b));
    }
    return;
  }
#endif
  widen(first, count, to);
}

// Scores first_valid … end_valid - 1 of one row become weights, the others zeros; returns the factor by which earlier
// sums shrink. `distance` is from the row's position to the tile's first token; scales are of an int8 cache, or null.
template <typename T>
inline float softmax_row(const AttentionCall& call, float* scores, int num_vecs, int first_valid, int end_valid,
                         int32_t distance, float slope, const float* key_scales, const float* value_scales,
                         float* row_max, float* row_sum) {
  Vec highest = broadcast(-kInf);
  for (int i = 0; i < num_vecs; i++) {
    Vec s = load(scores + i * kLanes) * call.scale;
    if (key_scales) s *= load(key_scales + i * kLanes);
    if (call.softcap > 0.0f) s = soft_cap(s, call.softcap);
    const int base = i * kLanes;
    if (slope != 0.0f) {
      const Vec away = to_floats(distance - base - lane_numbers());
      s -= slope * (away < 0.0f ? -away : away);
    }
    if (base < first_valid || base + kLanes > end_valid) {
      const IntVec lane = lane_numbers();
      s = (lane >= first_valid - base) & (lane < end_valid - base) ? s : broadcast(-kInf);
    }
    store(scores + base, s);
    highest = max_vec(highest, s);
  }
  const float new_max = std::max(*row_max, highest_lane(highest));
  if (new_max == -kInf) {  // nothing visible so far
    for (int i = 0; i < num_vecs; i++) store(scores + i * kLanes, Vec{});
    return 1.0f;
  }
  Vec sum = {};
  for (int i = 0; i < num_vecs; i++) {
    Vec p = exp2_as<T>((load(scores + i * kLanes) - new_max) * kLog2E);
    sum += p;
    if (value_scales) p *= load(value_scales + i * kLanes);
    store_weights<T, 1>(p, i, scores);
  }
  const float shrink = std::exp(*row_max - new_max);  // exp(-inf) = 0 for the first tile
  *row_max = new_max;
  *row_sum = *row_sum * shrink + sum_lanes(sum);
  return shrink;
}

template <typename T, typename Cached>
void prefill(const AttentionCall& call, const PrefillItem& item, PrefillScratch& scratch) {
  constexpr bool kDots = kPairs<T>, kWidens = !std::is_same_v<T, Cached>;
  using M = Multiplied<T, Cached>;
  const int group_size = call.num_q_heads / call.num_kv_heads;
  const int rows = item.count * group_size;
  const int valid_dwords = kDots ? call.key_dim / 2 : call.key_dim;
  const int num_dwords = round_up(valid_dwords, kLanes);
  const int value_stride = round_up(call.value_dim, 2 * kLanes);
  const int chunk_start = call.cu_seqlens_q[item.sequence];
  const int chunk_tokens = call.cu_seqlens_q[item.sequence + 1] - chunk_start;
  const int first_position = call.cache_seqlens[item.sequence] - chunk_tokens + item.first;
  const Span span = visible(call, item.sequence, first_position, first_position + item.count - 1);
  // Tiles from one place on for all queries: the lane of a token, and so the order of sums, is that of its position.
  const int first_token = call.batch_invariant ? span.begin / kTileTokens * kTileTokens : span.begin;
  const float* slopes = call.alibi_slopes ? call.alibi_slopes + item.sequence * call.alibi_stride : nullptr;

  uint32_t* queries = reinterpret_cast<uint32_t*>(scratch.queries);
  uint32_t* packed_keys = reinterpret_cast<uint32_t*>(scratch.keys);
  for (int r = 0; r < rows; r++) {
    const T* query = static_cast<const T*>(call.query) +
                     (chunk_start + item.first + r / group_size) * call.query_token_stride +
                     (item.kv_head * group_size + r % group_size) * call.query_head_stride;
    uint32_t* to = queries + r * num_dwords;
    if constexpr (kDots) {
      std::memset(to, 0, num_dwords * 4);
      std::memcpy(to, query, call.key_dim * sizeof(T));
    } else {
      widen(query, call.key_dim, reinterpret_cast<float*>(to));
    }
  }
  std::fill(scratch.row_max, scratch.row_max + rows, -kInf);
  std::fill(scratch.row_sum, scratch.row_sum + rows, 0.0f);
  std::fill(scratch.out, scratch.out + rows * value_stride, 0.0f);

  // Addresses of the cached rows, one tile ahead of the computation.
  const Cached *key_rows[2][kTileTokens], *value_rows_at[2][kTileTokens];
  Rows<Cached> source(call, item.sequence, span.begin);
  auto locate = [&](int start, int slot) {
    const int count = std::min(kTileTokens, span.end - start), unseen = std::max(0, span.begin - start);
    source.next(count - unseen, key_rows[slot] + unseen, value_rows_at[slot] + unseen);
    std::fill_n(key_rows[slot], unseen, key_rows[slot][unseen]);  // may be holes; masked
    std::fill_n(value_rows_at[slot], unseen, value_rows_at[slot][unseen]);
    for (int t = 0; t < count; t++) {
      key_rows[slot][t] += item.kv_head * call.key_head_stride;
      value_rows_at[slot][t] += item.kv_head * call.value_head_stride;
      prefetch(key_rows[slot][t], call.key_dim);
      prefetch(value_rows_at[slot][t], call.value_dim);
    }
  };
  if (span.size()) locate(first_token, 0);

  for (int start = first_token, slot = 0; start < span.end; start += kTileTokens, slot ^= 1) {
    const int count = std::min(kTileTokens, span.end - start);
    const int num_vecs = round_up(count, kLanes) / kLanes;
    if (start + kTileTokens < span.end) locate(start + kTileTokens, slot ^ 1);
    const Cached* const* keys = key_rows[slot];
    const Cached* const* values = value_rows_at[slot];
    for (int v = 0; v < num_vecs; v++) {
      const uint32_t* lanes[kLanes];
      for (int i = 0; i < kLanes; i++) {
        // Lanes past the end repeat a token and are masked.
        const Cached* key = keys[std::min(v * kLanes + i, count - 1)];
        if constexpr (kWidens) {
          float* const wide = scratch.wide + i * round_up(num_dwords, 2 * kLanes);
          widen_codes(key, call.key_dim, reinterpret_cast<M*>(wide));
          scratch.key_scales[v * kLanes + i] = scale_of(key, call.key_dim);
          lanes[i] = reinterpret_cast<const uint32_t*>(wide);
        } else if constexpr (kDots || sizeof(T) == 4) {
          lanes[i] = reinterpret_cast<const uint32_t*>(key);
        } else {
          widen(key, call.key_dim, scratch.wide + i * num_dwords);
          lanes[i] = reinterpret_cast<const uint32_t*>(scratch.wide + i * num_dwords);
        }
      }
      transpose_dwords(lanes, valid_dwords, num_dwords, kLanes, packed_keys + v * kLanes * num_dwords);
    }
    const int tokens_per_step = kDots ? 2 : 1, num_steps = (count + tokens_per_step - 1) / tokens_per_step;
    for (int t = 0; t < count; t += tokens_per_step) {
      const Cached *first = values[t], *second = values[std::min(t + 1, count - 1)];
      float* const to = scratch.values + t / tokens_per_step * value_stride;
      if constexpr (!kWidens) {
        pack_values(first, second, call.value_dim, to);
      } else if constexpr (kDots) {
        T* const wide = reinterpret_cast<T*>(scratch.wide_values);
        widen_codes(first, call.value_dim, wide);
        widen_codes(second, call.value_dim, wide + value_stride);
        pack_values(wide, wide + value_stride, call.value_dim, to);
      } else {
        widen_codes(first, call.value_dim, to);
      }
    }
    if constexpr (kWidens)
      for (int t = 0; t < num_vecs * kLanes; t++)
        scratch.value_scales[t] = scale_of(values[std::min(t, count - 1)], call.value_dim);

    score_rows<kDots>(queries, packed_keys, num_dwords, rows, num_vecs, scratch.scores);
    for (int r = 0; r < rows; r++) {
      const int position = first_position + r / group_size;
      const Span seen = visible(call, item.sequence, position, position);
      const float slope = slopes ? slopes[item.kv_head * group_size + r % group_size] : 0.0f;
      const float shrink =
          softmax_row<T>(call, scratch.scores + r * kTileTokens, num_vecs, std::max(0, seen.begin - start),
                         std::min(count, seen.end - start), position - start, slope, kWidens ? scratch.key_scales : nullptr,
                         kWidens ? scratch.value_scales : nullptr, scratch.row_max + r, scratch.row_sum + r);
      if (shrink != 1.0f)
        for (int c = 0; c < value_stride; c += kLanes)
          store(scratch.out + r * value_stride + c, load(scratch.out + r * value_stride + c) * shrink);
    }
    for (int c = 0; c < value_stride; c += kBlockVecs * kLanes)
      with_count<1, kBlockVecs>((value_stride - c) / kLanes, [&](auto vecs) {
        value_rows<kDots, decltype(vecs)::value>(scratch.scores, scratch.values + c, num_steps, value_stride, rows,
                                                 scratch.out + c);
      });
  }

  for (int r = 0; r < rows; r++)
    finish_row<T>(call, chunk_start + item.first + r / group_size, item.kv_head * group_size + r % group_size,
                  scratch.out + r * value_stride, scratch.row_max[r], scratch.row_sum[r]);
}

}  // namespace folio
