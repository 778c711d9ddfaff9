// Norms and rotation of a step's queries and keys, and the write of keys and values into the cache, in one pass.
#pragma once

#include <cstdint>
#include <cstring>

#include "call.h"
#include "int8_rows.h"
#include "rows.h"
#include "team.h"
#include "vector.h"

extern "C" {

// Mirrored field by field in kernels/cpu/ops.py. Strides count elements.
struct RotaryCall {
  void* heads;                            // [num_tokens, num_q_heads + 2 * num_kv_heads, dim]
  void* key_cache;                        // [blocks, block_tokens, num_kv_heads, dim], or null: keys stay in place
  void* value_cache;
  const void *query_weight, *key_weight;  // [dim] or null: without norms
  const void *cos, *sin;                  // [num_tokens, columns]
  const int64_t* slots;                   // [num_tokens]: block * block_tokens + position in the block
  int64_t token_stride, head_stride;
  int64_t key_block_stride, key_token_stride, key_head_stride;
  int64_t value_block_stride, value_token_stride, value_head_stride;
  int64_t num_blocks, block_tokens;
  int32_t num_tokens, num_q_heads, num_kv_heads, dim, rotary_dim, columns, dtype;
  int32_t element_bytes;  // of the caches; 1: rows of int8_rows.h
  float query_eps, query_offset, key_eps, key_offset;
};

}  // extern "C"

namespace folio {

// Check that all slots are within the cache, and that the first one is mapped.
inline Result check(const RotaryCall& call) {
  if (!call.key_cache || call.num_tokens == 0) return kDone;
  const int64_t num_slots = call.num_blocks * call.block_tokens;
  for (int32_t t = 0; t < call.num_tokens; t++)
    if (call.slots[t] < 0 || call.slots[t] >= num_slots) return kOutside;
  const int64_t block = call.slots[0] / call.block_tokens, within = call.slots[0] % call.block_tokens;
  const int64_t key_at = block * call.key_block_stride + within * call.key_token_stride;
  const int64_t value_at = block * call.value_block_stride + within * call.value_token_stride;
  const bool mapped = readable(static_cast<char*>(call.key_cache) + key_at * call.element_bytes) &&
                      readable(static_cast<char*>(call.value_cache) + value_at * call.element_bytes);
  return mapped ? kDone : kUnmapped;
}

// `to` = the head `from`, normed if there is a weight, with its first elements rotated, pairs rotary_dim / 2 apart. The
// cosines of a pair's second element are the first's with tables of half the size. `to` may be `from`.
template <typename T>
void turn(const RotaryCall& call, const T* from, T* to, const T* weight, float eps, float offset, const T* cos,
          const T* sin) {
  const int64_t half = call.rotary_dim / 2, second = call.columns == call.rotary_dim ? half : 0;
  const float scale = weight ? inverse_rms(from, call.dim, eps) : 1.0f;
  const auto normed = [&](int64_t i, int64_t left) {
    const Vec v = load_some(from + i, left);
    return weight ? v * scale * (load_some(weight + i, left) + offset) : v;
  };
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const Vec a = normed(i, left), b = normed(half + i, left);
    store_some(a * load_some(cos + i, left) - b * load_some(sin + i, left), to + i, left);
    store_some(b * load_some(cos + second + i, left) + a * load_some(sin + second + i, left), to + half + i, left);
  }
  if (weight || to != from)
    for (int64_t i = call.rotary_dim; i < call.dim; i += kLanes)
      store_some(normed(i, call.dim - i), to + i, call.dim - i);
}

template <typename T>
void rotary_write(Team& team, const RotaryCall& call) {
  const auto *cos = static_cast<const T*>(call.cos), *sin = static_cast<const T*>(call.sin);
  const auto *query_weight = static_cast<const T*>(call.query_weight),
             *key_weight = static_cast<const T*>(call.key_weight);
  team.each(call.num_tokens, [&](int64_t t) {
    T* head = static_cast<T*>(call.heads) + t * call.token_stride;
    const T *c = cos + t * call.columns, *s = sin + t * call.columns;
    for (int32_t h = 0; h < call.num_q_heads; h++, head += call.head_stride)
      turn(call, head, head, query_weight, call.query_eps, call.query_offset, c, s);
    int64_t key_at = 0, value_at = 0;
    if (call.key_cache) {
      const int64_t block = call.slots[t] / call.block_tokens, within = call.slots[t] % call.block_tokens;
      key_at = block * call.key_block_stride + within * call.key_token_stride;
      value_at = block * call.value_block_stride + within * call.value_token_stride;
    }
    if (call.key_cache && call.element_bytes == 1) {
      auto *key = static_cast<int8_t*>(call.key_cache) + key_at, *value = static_cast<int8_t*>(call.value_cache) + value_at;
      for (int32_t h = 0; h < call.num_kv_heads; h++, head += call.head_stride) {
        turn(call, head, head, key_weight, call.key_eps, call.key_offset, c, s);
        quantise_row(head, call.dim, key + h * call.key_head_stride);
      }
      for (int32_t h = 0; h < call.num_kv_heads; h++, head += call.head_stride)
        quantise_row(head, call.dim, value + h * call.value_head_stride);
      return;
    }
    T* const key = call.key_cache ? static_cast<T*>(call.key_cache) + key_at : head;
    T* const value = call.key_cache ? static_cast<T*>(call.value_cache) + value_at : nullptr;
    const int64_t key_stride = call.key_cache ? call.key_head_stride : call.head_stride;
    for (int32_t h = 0; h < call.num_kv_heads; h++, head += call.head_stride)
      turn(call, head, key + h * key_stride, key_weight, call.key_eps, call.key_offset, c, s);
    if (value)
      for (int32_t h = 0; h < call.num_kv_heads; h++, head += call.head_stride)
        std::memcpy(value + h * call.value_head_stride, head, call.dim * sizeof(T));
  });
}

}  // namespace folio
