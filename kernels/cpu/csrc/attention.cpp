// Attention over a KV cache, and writes into it, for CPUs.

#include <algorithm>
#include <cstring>
#include <vector>

#include "attend.h"
#include "call.h"
#include "team.h"

extern "C" {

// Returns a folio::Result.
int folio_attention(const AttentionCall* call) {
  using namespace folio;
  if (const Result result = check_attention(*call)) return result;
  return with_type(call->dtype, [&](auto type) {
    // Kept between calls: fresh memory costs a page fault every 4 KiB.
    static thread_local std::vector<float> parts;
    const Attention<decltype(type)> attention(*call, parts);
    in_team(attention.num_items() > 1, attention.kSteps, [&](Team& team) { attention.run(team); });
  }) ? kDone : kUnsupported;
}

// Returns a folio::Result.
int folio_write(const WriteCall* call) {
  using namespace folio;
  const int64_t bytes = call->element_bytes, cache_bytes = call->int8_cache ? 1 : bytes, num_slots = call->num_blocks * call->block_tokens;
  for (int32_t t = 0; t < call->num_tokens; t++)
    if (call->slots[t] < 0 || call->slots[t] >= num_slots) return kOutside;
  if (call->num_tokens > 0) {
    const int64_t block = call->slots[0] / call->block_tokens, within = call->slots[0] % call->block_tokens;
    const int64_t key_at = block * call->key_cache_block_stride + within * call->key_cache_token_stride;
    const int64_t value_at = block * call->value_cache_block_stride + within * call->value_cache_token_stride;
    if (!readable(static_cast<char*>(call->key_cache) + key_at * cache_bytes) ||
        !readable(static_cast<char*>(call->value_cache) + value_at * cache_bytes))
      return kUnmapped;
  }
  for_each(call->num_tokens > 64, call->num_tokens, [&](int64_t t) {
    const int64_t block = call->slots[t] / call->block_tokens, within = call->slots[t] % call->block_tokens;
    const char* key = static_cast<const char*>(call->key) + t * call->key_token_stride * bytes;
    const char* value = static_cast<const char*>(call->value) + t * call->value_token_stride * bytes;
    char* key_to = static_cast<char*>(call->key_cache) +
                   (block * call->key_cache_block_stride + within * call->key_cache_token_stride) * cache_bytes;
    char* value_to = static_cast<char*>(call->value_cache) +
                     (block * call->value_cache_block_stride + within * call->value_cache_token_stride) * cache_bytes;
    if (call->int8_cache) {
      with_type(call->dtype, [&](auto type) {
        using T = decltype(type);
        for (int32_t h = 0; h < call->num_kv_heads; h++) {
          quantise_row(reinterpret_cast<const T*>(key) + h * call->key_head_stride, call->key_dim,
                       reinterpret_cast<int8_t*>(key_to) + h * call->key_cache_head_stride);
          quantise_row(reinterpret_cast<const T*>(value) + h * call->value_head_stride, call->value_dim,
                       reinterpret_cast<int8_t*>(value_to) + h * call->value_cache_head_stride);
        }
      });
      return;
    }
    for (int32_t h = 0; h < call->num_kv_heads; h++) {
      std::memcpy(key_to + h * call->key_cache_head_stride * bytes, key + h * call->key_head_stride * bytes,
                  call->key_dim * bytes);
      std::memcpy(value_to + h * call->value_cache_head_stride * bytes, value + h * call->value_head_stride * bytes,
                  call->value_dim * bytes);
    }
  });
  return kDone;
}

}  // extern "C"
