// Arguments of attention calls, and the cached tokens that a query sees.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

extern "C" {

// Mirrored field by field in kernels/cpu/provider.py. Strides count elements.
struct AttentionCall {
  const void* query;  // [num_tokens, num_q_heads, key_dim]
  const void* key;    // [blocks, block_tokens, num_kv_heads, key_dim]
  const void* value;  // [blocks, block_tokens, num_kv_heads, value_dim]
  void* out;          // [num_tokens, num_q_heads, value_dim], contiguous
  float* lse;         // [num_tokens, num_q_heads] or null
  const int32_t* cu_seqlens_q;    // [num_seqs + 1]
  const int32_t* cache_seqlens;   // [num_seqs]
  const int32_t* cache_leftpad;   // [num_seqs] or null
  const int32_t* block_table;     // [num_seqs, table_stride]; in the region view of width 1
  const float* sinks;             // [num_q_heads] or null
  const float* alibi_slopes;      // [num_q_heads], rows alibi_stride apart, or null
  int64_t query_token_stride, query_head_stride;
  int64_t key_block_stride, key_token_stride, key_head_stride;
  int64_t value_block_stride, value_token_stride, value_head_stride;
  int64_t table_stride, num_blocks, block_tokens, alibi_stride;
  int32_t num_tokens, num_seqs, num_q_heads, num_kv_heads, key_dim, value_dim;
  int32_t window_left, window_right;  // tokens visible before and after a query's own, negative: all
  int32_t dtype;                      // 0 float32, 1 bfloat16, 2 float16
  int32_t num_splits;                 // parts of a sequence's cache at most, 0: as many as are useful
  int32_t int8_cache;                 // 1: rows of int8_rows.h, 0: the cache has the dtype
  int32_t batch_invariant;            // 1: a query's sums have one order, whatever is computed beside it
  float scale, softcap;               // softcap 0: none
};

struct WriteCall {
  const void* key;    // [num_tokens, num_kv_heads, key_dim]
  const void* value;  // [num_tokens, num_kv_heads, value_dim]
  void* key_cache;    // [blocks, block_tokens, num_kv_heads, key_dim]
  void* value_cache;  // [blocks, block_tokens, num_kv_heads, value_dim]
  const int64_t* slots;  // [num_tokens]: block * block_tokens + position in the block
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  int64_t key_cache_block_stride, key_cache_token_stride, key_cache_head_stride;
  int64_t value_cache_block_stride, value_cache_token_stride, value_cache_head_stride;
  int64_t num_blocks, block_tokens;
  int32_t num_tokens, num_kv_heads, key_dim, value_dim, element_bytes;
  int32_t dtype, int8_cache;  // dtype of keys and values, read only for a cache of rows of int8_rows.h
};

}  // extern "C"

namespace folio {

// Result of a call, mirrored in kernels/cpu/provider.py. The cache has been read or written only if it is kDone.
enum Result : int { kDone = 0, kUnsupported = 1, kOutside = 2, kUnmapped = 3 };

// True if an address can be read. The system copies the signal mask before it rejects the operation ~0: EFAULT, or
// EINVAL (Abseil, AddressIsReadable). 0.3 us, and without the lock of the memory map that msync and mincore take.
inline bool readable(const void* address) {
  const uintptr_t aligned = reinterpret_cast<uintptr_t>(address) & ~uintptr_t(7);
  return syscall(SYS_rt_sigprocmask, ~0, aligned, nullptr, 8) == 0 || errno != EFAULT;
}

struct Span {
  int32_t begin, end;
  int32_t size() const { return std::max(0, end - begin); }
};

// The union of the cached tokens that the queries at positions first … last see.
inline Span visible(const AttentionCall& call, int32_t sequence, int32_t first, int32_t last) {
  const int32_t leftpad = call.cache_leftpad ? call.cache_leftpad[sequence] : 0;
  const int32_t length = call.cache_seqlens[sequence];
  return {call.window_left < 0 ? leftpad : std::max(leftpad, first - call.window_left),
          call.window_right < 0 ? length : std::min(length, last + call.window_right + 1)};
}

// Iterator over the addresses of a sequence's cached tokens, head 0 of each.
template <typename T>
struct Rows {
  const AttentionCall& call;
  const int32_t* table;
  int64_t index, within;

  Rows(const AttentionCall& call, int32_t sequence, int32_t begin)
      : call(call),
        table(call.block_table + sequence * call.table_stride),
        index(begin / call.block_tokens),
        within(begin % call.block_tokens) {}

  void next(int count, const T** keys, const T** values) {
    while (count > 0) {
      const int run = static_cast<int>(std::min<int64_t>(count, call.block_tokens - within));
      const int64_t block = table[index];
      const T* key = static_cast<const T*>(call.key) + block * call.key_block_stride + within * call.key_token_stride;
      const T* value =
          static_cast<const T*>(call.value) + block * call.value_block_stride + within * call.value_token_stride;
      for (int t = 0; t < run; t++) {
        keys[t] = key + t * call.key_token_stride;
        values[t] = value + t * call.value_token_stride;
      }
      keys += run, values += run, count -= run, within += run;
      if (within == call.block_tokens) within = 0, index++;
    }
  }
};

template <typename T>
inline void prefetch(const T* row, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + i);
}

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace folio
