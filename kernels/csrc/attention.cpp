// Attention over cached keys and values, and the write into the cache, for CPUs.
//
// One tile is a few query rows (query positions x the heads that share a KV head) against 64 cached tokens:
//   1. pack K so that 16 tokens lie side by side in a vector  [dword of the head][16 tokens]
//   2. scores = Q K^T: each step multiplies 16 tokens by one broadcast dword of a query row
//   3. online softmax (FlashAttention), 4. out += P V, with V widened to float once per tile.
// Packing is paid once per tile and shared by all its rows, so the same code serves decode (rows = grouped heads)
// and chunked prefill (up to 64 rows). Nothing past a sequence's last token is read: what lies there may be a hole.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vector.h"

namespace {

using namespace folio;

constexpr int kTileTokens = 64;  // cached tokens in a tile
constexpr int kMaxRows = 64;     // query rows in a tile

// rows[16] of `num_dwords` dwords (zeros beyond `valid_dwords`) -> packed[num_dwords][16].
inline void transpose_dwords(const uint32_t* const rows[kLanes], int valid_dwords, int num_dwords, uint32_t* packed) {
#if defined(__AVX512F__)
  for (int d = 0; d < num_dwords; d += 16) {
    __mmask16 mask =
        valid_dwords - d >= 16 ? 0xffff : static_cast<__mmask16>((1u << std::max(0, valid_dwords - d)) - 1);
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
      _mm512_storeu_si512(packed + (d + i) * 16, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
      _mm512_storeu_si512(packed + (d + i + 8) * 16, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    }
  }
#else
  for (int d = 0; d < num_dwords; d++)
    for (int i = 0; i < 16; i++) packed[d * 16 + i] = d < valid_dwords ? rows[i][d] : 0;
#endif
}

// How keys and queries of a type are held while scores are computed: as floats, or (bf16 with hardware dot products)
// as pairs in one dword.
template <typename T>
struct Packing {
  static constexpr bool kPairs = false;
};
#if defined(__AVX512BF16__)
template <>
struct Packing<BFloat16> {
  static constexpr bool kPairs = true;
};
#endif

template <bool kPairs>
inline Vec multiply_add(Vec acc, Vec keys, uint32_t query) {
#if defined(__AVX512BF16__)
  if constexpr (kPairs) {
    return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc),
                                                  reinterpret_cast<__m512bh>(keys),
                                                  reinterpret_cast<__m512bh>(_mm512_set1_epi32(query))));
  }
#endif
  float value;
  std::memcpy(&value, &query, 4);
  return acc + keys * value;
}

// scores[kRows][kTileTokens] = queries[kRows][num_dwords] . keys[kGroups][num_dwords][16 tokens]
template <bool kPairs, int kRows, int kGroups>
inline void score_block(const uint32_t* queries, const uint32_t* keys, int num_dwords, float* scores) {
  Vec acc[kRows][kGroups] = {};
  for (int d = 0; d < num_dwords; d++) {
    Vec key[kGroups];
    for (int g = 0; g < kGroups; g++)
      key[g] = load(reinterpret_cast<const float*>(keys) + (g * num_dwords + d) * kLanes);
    for (int r = 0; r < kRows; r++)
      for (int g = 0; g < kGroups; g++)
        acc[r][g] = multiply_add<kPairs>(acc[r][g], key[g], queries[r * num_dwords + d]);
  }
  for (int r = 0; r < kRows; r++)
    for (int g = 0; g < kGroups; g++) store(scores + r * kTileTokens + g * kLanes, acc[r][g]);
}

template <bool kPairs, int kGroups>
void score_rows(const uint32_t* queries, const uint32_t* keys, int num_dwords, int num_rows, float* scores) {
  int r = 0;
  for (; r + 4 <= num_rows; r += 4)
    score_block<kPairs, 4, kGroups>(queries + r * num_dwords, keys, num_dwords, scores + r * kTileTokens);
  queries += r * num_dwords, scores += r * kTileTokens;
  switch (num_rows - r) {
    case 3: score_block<kPairs, 3, kGroups>(queries, keys, num_dwords, scores); break;
    case 2: score_block<kPairs, 2, kGroups>(queries, keys, num_dwords, scores); break;
    case 1: score_block<kPairs, 1, kGroups>(queries, keys, num_dwords, scores); break;
  }
}

// out[kRows][stride] += probs[kRows][kTileTokens] . values[num_tokens][stride], kVecs vectors of columns
template <int kRows, int kVecs>
inline void value_block(const float* probs, const float* values, int num_tokens, int stride, float* out) {
  Vec acc[kRows][kVecs];
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kVecs; c++) acc[r][c] = load(out + r * stride + c * kLanes);
  for (int t = 0; t < num_tokens; t++) {
    Vec value[kVecs];
    for (int c = 0; c < kVecs; c++) value[c] = load(values + t * stride + c * kLanes);
    for (int r = 0; r < kRows; r++)
      for (int c = 0; c < kVecs; c++) acc[r][c] += value[c] * probs[r * kTileTokens + t];
  }
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kVecs; c++) store(out + r * stride + c * kLanes, acc[r][c]);
}

template <int kVecs>
void value_rows(const float* probs, const float* values, int num_tokens, int stride, int num_rows, float* out) {
  int r = 0;
  for (; r + 4 <= num_rows; r += 4)
    value_block<4, kVecs>(probs + r * kTileTokens, values, num_tokens, stride, out + r * stride);
  probs += r * kTileTokens, out += r * stride;
  switch (num_rows - r) {
    case 3: value_block<3, kVecs>(probs, values, num_tokens, stride, out); break;
    case 2: value_block<2, kVecs>(probs, values, num_tokens, stride, out); break;
    case 1: value_block<1, kVecs>(probs, values, num_tokens, stride, out); break;
  }
}

template <typename T>
inline void prefetch(const T* row, int count) {
  for (int i = 0; i < count; i += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(row + i);
}

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

extern "C" {

// Mirrored field by field in kernels/cpu.py. Strides count elements.
struct AttentionCall {
  const void* query;  // [num_tokens, num_q_heads, key_dim]
  const void* key;    // [groups, group_tokens, num_kv_heads, key_dim]
  const void* value;  // [groups, group_tokens, num_kv_heads, value_dim]
  void* out;          // [num_tokens, num_q_heads, value_dim], contiguous
  const int32_t* cu_seqlens_q;   // [num_seqs + 1]
  const int32_t* cache_seqlens;  // [num_seqs]
  const int32_t* groups;         // [num_seqs, table_stride]: region slot, or block table
  const float* sinks;            // [num_q_heads] or null
  int64_t query_token_stride, query_head_stride;
  int64_t key_group_stride, key_token_stride, key_head_stride;
  int64_t value_group_stride, value_token_stride, value_head_stride;
  int64_t table_stride, group_tokens;
  int32_t num_seqs, num_q_heads, num_kv_heads, key_dim, value_dim;
  int32_t window_left;  // tokens visible before a query's own, negative: all
  int32_t dtype;        // 0 float32, 1 bfloat16, 2 float16
  float scale, softcap;  // softcap 0: none
};

struct WriteCall {
  const void* key;    // [num_tokens, num_kv_heads, key_dim]
  const void* value;  // [num_tokens, num_kv_heads, value_dim]
  void* key_cache;    // [groups, group_tokens, num_kv_heads, key_dim]
  void* value_cache;  // [groups, group_tokens, num_kv_heads, value_dim]
  const int64_t* slots;  // [num_tokens]: group * group_tokens + position in the group
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  int64_t key_cache_group_stride, key_cache_token_stride, key_cache_head_stride;
  int64_t value_cache_group_stride, value_cache_token_stride, value_cache_head_stride;
  int64_t group_tokens;
  int32_t num_tokens, num_kv_heads, key_dim, value_dim, element_bytes;
};

}  // extern "C"

namespace {

struct Tile {
  int32_t sequence, first, count;  // query positions first … first + count - 1 of the sequence's chunk
};

// Working memory of one thread, sized for one tile.
struct Scratch {
  std::vector<float> buffer;
  uint32_t *queries, *keys;
  float *scores, *values, *out, *row_max, *row_sum, *wide;

  Scratch(int key_stride, int value_stride) {
    size_t sizes[] = {size_t(kMaxRows) * key_stride,   size_t(kTileTokens) * key_stride,
                      size_t(kMaxRows) * kTileTokens,  size_t(kTileTokens) * value_stride,
                      size_t(kMaxRows) * value_stride, kMaxRows, kMaxRows, size_t(kLanes) * key_stride};
    size_t total = kLanes;
    for (size_t size : sizes) total += (size + kLanes - 1) / kLanes * kLanes;
    buffer.resize(total);
    auto place = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) & ~uintptr_t(63));
    float* places[8];
    for (int i = 0; i < 8; i++) {
      places[i] = place;
      place += (sizes[i] + kLanes - 1) / kLanes * kLanes;
    }
    queries = reinterpret_cast<uint32_t*>(places[0]);
    keys = reinterpret_cast<uint32_t*>(places[1]);
    scores = places[2], values = places[3], out = places[4], row_max = places[5], row_sum = places[6];
    wide = places[7];
  }
};

// Scale, cap, mask and exponentiate one row of scores in place; returns the factor by which earlier sums shrink.
inline float softmax_row(float* scores, int num_vecs, int first_valid, int end_valid, float scale, float softcap,
                         float* row_max, float* row_sum) {
  Vec highest = broadcast(-kInf);
  for (int i = 0; i < num_vecs; i++) {
    Vec s = load(scores + i * kLanes) * scale;
    if (softcap > 0.0f) {  // cap * tanh(s / cap), tanh by exp of a negative number
      Vec x = s / softcap;
      Vec magnitude = x < 0.0f ? -x : x;
      Vec e = exp2_vec(magnitude * (-2.0f * kLog2E));
      Vec tanh = (1.0f - e) / (1.0f + e);
      s = (x < 0.0f ? -tanh : tanh) * softcap;
    }
    int base = i * kLanes;
    if (base < first_valid || base + kLanes > end_valid) {
      const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      s = (lane >= first_valid - base) & (lane < end_valid - base) ? s : broadcast(-kInf);
    }
    store(scores + base, s);
    highest = s > highest ? s : highest;
  }
  float new_max = std::max(*row_max, highest_lane(highest));
  if (new_max == -kInf) {  // nothing visible so far
    for (int i = 0; i < num_vecs; i++) store(scores + i * kLanes, Vec{});
    return 1.0f;
  }
  Vec sum = {};
  for (int i = 0; i < num_vecs; i++) {
    Vec p = exp2_vec((load(scores + i * kLanes) - new_max) * kLog2E);
    store(scores + i * kLanes, p);
    sum += p;
  }
  float shrink = std::exp(*row_max - new_max);  // exp(-inf) = 0 for the first tile
  *row_max = new_max;
  *row_sum = *row_sum * shrink + sum_lanes(sum);
  return shrink;
}

template <typename T>
void attend_tile(const AttentionCall& call, const Tile& tile, int kv_head, Scratch& scratch) {
  constexpr bool kPairs = Packing<T>::kPairs;
  const int group_size = call.num_q_heads / call.num_kv_heads;
  const int rows = tile.count * group_size;
  const int valid_dwords = kPairs ? call.key_dim / 2 : call.key_dim;
  const int num_dwords = round_up(valid_dwords, kLanes);
  const int value_stride = round_up(call.value_dim, kLanes);
  const int chunk_start = call.cu_seqlens_q[tile.sequence];
  const int chunk_tokens = call.cu_seqlens_q[tile.sequence + 1] - chunk_start;
  const int first_position = call.cache_seqlens[tile.sequence] - chunk_tokens + tile.first;
  const int end = first_position + tile.count;
  const int begin = call.window_left < 0 ? 0 : std::max(0, first_position - call.window_left);
  const int32_t* groups = call.groups + tile.sequence * call.table_stride;
  const T* key_base = static_cast<const T*>(call.key) + kv_head * call.key_head_stride;
  const T* value_base = static_cast<const T*>(call.value) + kv_head * call.value_head_stride;

  for (int r = 0; r < rows; r++) {
    const T* query = static_cast<const T*>(call.query) +
                     (chunk_start + tile.first + r / group_size) * call.query_token_stride +
                     (kv_head * group_size + r % group_size) * call.query_head_stride;
    uint32_t* to = scratch.queries + r * num_dwords;
    if constexpr (kPairs) {
      std::memset(to, 0, num_dwords * 4);
      std::memcpy(to, query, call.key_dim * sizeof(T));
    } else {
      widen(query, call.key_dim, reinterpret_cast<float*>(to));
    }
  }
  std::fill(scratch.row_max, scratch.row_max + rows, -kInf);
  std::fill(scratch.row_sum, scratch.row_sum + rows, 0.0f);
  std::fill(scratch.out, scratch.out + rows * value_stride, 0.0f);

  // Addresses of the cached rows, one tile ahead of the computation: in the cache consecutive tokens of a layer can
  // lie on different pages, where no hardware prefetcher follows.
  const T *key_rows[2][kTileTokens], *value_rows_at[2][kTileTokens];
  int64_t index = begin / call.group_tokens, within = begin % call.group_tokens;
  auto locate = [&](int start, int slot) {
    const int count = std::min(kTileTokens, end - start);
    for (int t = 0; t < count; t++) {
      const int64_t group = groups[index];
      const T* key = key_base + group * call.key_group_stride + within * call.key_token_stride;
      const T* value = value_base + group * call.value_group_stride + within * call.value_token_stride;
      key_rows[slot][t] = key;
      value_rows_at[slot][t] = value;
      prefetch(key, call.key_dim);
      prefetch(value, call.value_dim);
      if (++within == call.group_tokens) within = 0, index++;
    }
  };
  locate(begin, 0);

  for (int start = begin, slot = 0; start < end; start += kTileTokens, slot ^= 1) {
    const int count = std::min(kTileTokens, end - start);
    const int num_vecs = round_up(count, kLanes) / kLanes;
    if (start + kTileTokens < end) locate(start + kTileTokens, slot ^ 1);
    const T* const* keys = key_rows[slot];
    const T* const* values = value_rows_at[slot];
    for (int v = 0; v < num_vecs; v++) {
      const uint32_t* lanes[kLanes];
      for (int i = 0; i < kLanes; i++) {
        const T* key = keys[std::min(v * kLanes + i, count - 1)];  // lanes past the end repeat a token and are masked
        if constexpr (kPairs || sizeof(T) == 4) {
          lanes[i] = reinterpret_cast<const uint32_t*>(key);
        } else {
          widen(key, call.key_dim, scratch.wide + i * num_dwords);
          lanes[i] = reinterpret_cast<const uint32_t*>(scratch.wide + i * num_dwords);
        }
      }
      transpose_dwords(lanes, valid_dwords, num_dwords, scratch.keys + v * kLanes * num_dwords);
    }
    for (int t = 0; t < count; t++) widen(values[t], call.value_dim, scratch.values + t * value_stride);

    switch (num_vecs) {
      case 1: score_rows<kPairs, 1>(scratch.queries, scratch.keys, num_dwords, rows, scratch.scores); break;
      case 2: score_rows<kPairs, 2>(scratch.queries, scratch.keys, num_dwords, rows, scratch.scores); break;
      case 3: score_rows<kPairs, 3>(scratch.queries, scratch.keys, num_dwords, rows, scratch.scores); break;
      default: score_rows<kPairs, 4>(scratch.queries, scratch.keys, num_dwords, rows, scratch.scores);
    }
    for (int r = 0; r < rows; r++) {
      const int position = first_position + r / group_size;
      const int first_valid = call.window_left < 0 ? 0 : std::max(0, position - call.window_left - start);
      const int end_valid = std::min(count, position + 1 - start);
      const float shrink = softmax_row(scratch.scores + r * kTileTokens, num_vecs, first_valid, end_valid, call.scale,
                                       call.softcap, scratch.row_max + r, scratch.row_sum + r);
      if (shrink != 1.0f)
        for (int c = 0; c < value_stride; c += kLanes)
          store(scratch.out + r * value_stride + c, load(scratch.out + r * value_stride + c) * shrink);
    }
    for (int c = 0; c < value_stride;) {
      const int left = (value_stride - c) / kLanes;
      if (left >= 4) {
        value_rows<4>(scratch.scores, scratch.values + c, count, value_stride, rows, scratch.out + c);
        c += 4 * kLanes;
      } else {
        value_rows<1>(scratch.scores, scratch.values + c, count, value_stride, rows, scratch.out + c);
        c += kLanes;
      }
    }
  }

  for (int r = 0; r < rows; r++) {
    const int head = kv_head * group_size + r % group_size;
    float sum = scratch.row_sum[r], scale = 1.0f;
    if (call.sinks) {  // a sink is one more score in the denominator, without a value
      const float highest = std::max(scratch.row_max[r], call.sinks[head]);
      scale = std::exp(scratch.row_max[r] - highest);
      sum = sum * scale + std::exp(call.sinks[head] - highest);
    }
    const float norm = sum > 0.0f ? scale / sum : 0.0f;
    T* out = static_cast<T*>(call.out) +
             (int64_t(chunk_start + tile.first + r / group_size) * call.num_q_heads + head) * call.value_dim;
    for (int c = 0; c < call.value_dim; c++) from_float(scratch.out[r * value_stride + c] * norm, out + c);
  }
}

template <typename T>
void attend(const AttentionCall& call) {
  const int positions_per_tile = std::max(1, kMaxRows / (call.num_q_heads / call.num_kv_heads));
  std::vector<Tile> tiles;
  for (int32_t s = 0; s < call.num_seqs; s++) {
    const int32_t chunk_tokens = call.cu_seqlens_q[s + 1] - call.cu_seqlens_q[s];
    for (int32_t first = 0; first < chunk_tokens; first += positions_per_tile)
      tiles.push_back({s, first, std::min(positions_per_tile, chunk_tokens - first)});
  }
  const int64_t num_items = int64_t(tiles.size()) * call.num_kv_heads;
#pragma omp parallel if (num_items > 1)
  {
    Scratch scratch(round_up(call.key_dim, kLanes), round_up(call.value_dim, kLanes));
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < num_items; item++)
      attend_tile<T>(call, tiles[item / call.num_kv_heads], static_cast<int>(item % call.num_kv_heads), scratch);
  }
}

}  // namespace

extern "C" {

// Returns 0, or 1 when the shape is not supported (more grouped heads than a tile has rows, odd bf16 head size).
int folio_attention(const AttentionCall* call) {
  if (call->num_q_heads / call->num_kv_heads > kMaxRows || (call->dtype == 1 && call->key_dim % 2)) return 1;
  return with_type(call->dtype, [&](auto type) { attend<decltype(type)>(*call); }) ? 0 : 1;
}

void folio_write(const WriteCall* call) {
  const int64_t bytes = call->element_bytes;
#pragma omp parallel for if (call->num_tokens > 64)
  for (int32_t t = 0; t < call->num_tokens; t++) {
    const int64_t group = call->slots[t] / call->group_tokens, within = call->slots[t] % call->group_tokens;
    const char* key = static_cast<const char*>(call->key) + t * call->key_token_stride * bytes;
    const char* value = static_cast<const char*>(call->value) + t * call->value_token_stride * bytes;
    char* key_to = static_cast<char*>(call->key_cache) +
                   (group * call->key_cache_group_stride + within * call->key_cache_token_stride) * bytes;
    char* value_to = static_cast<char*>(call->value_cache) +
                     (group * call->value_cache_group_stride + within * call->value_cache_token_stride) * bytes;
    for (int32_t h = 0; h < call->num_kv_heads; h++) {
      std::memcpy(key_to + h * call->key_cache_head_stride * bytes, key + h * call->key_head_stride * bytes,
                  call->key_dim * bytes);
      std::memcpy(value_to + h * call->value_cache_head_stride * bytes, value + h * call->value_head_stride * bytes,
                  call->value_dim * bytes);
    }
  }
}

}  // extern "C"
