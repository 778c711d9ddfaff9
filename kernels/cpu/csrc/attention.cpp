// Attention over a KV cache, and writes into it, for CPUs.
//
// Only cached tokens that some query sees are read: others may be holes.

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "call.h"
#include "decode.h"
#include "prefill.h"

namespace folio {
namespace {

struct Split {
  int32_t sequence, num_parts;
  size_t first_part;
};

// The work of a batch, in independent items.
struct Plan {
  std::vector<DecodeItem> decodes;
  std::vector<PrefillItem> prefills;
  std::vector<Split> splits;  // decoding sequences of more than one part
  size_t num_parts = 0;
};

Plan plan(const AttentionCall& call, int element_bytes) {
  Plan plan;
  const int most_tokens = split_tokens(int64_t(call.num_kv_heads) * (call.key_dim + call.value_dim) * element_bytes);
  const int positions_per_tile = std::max(1, kMaxRows / (call.num_q_heads / call.num_kv_heads));
  for (int32_t s = 0; s < call.num_seqs; s++) {
    const int32_t num_queries = call.cu_seqlens_q[s + 1] - call.cu_seqlens_q[s];
    if (num_queries == 1) {
      const int32_t position = call.cache_seqlens[s] - 1;
      const Span span = visible(call, s, position, position);
      const int32_t useful = std::max(1, (span.size() + most_tokens - 1) / most_tokens);
      const int32_t num_parts = call.num_splits > 0 ? std::min(useful, call.num_splits) : useful;
      const int32_t size = round_up((span.size() + num_parts - 1) / num_parts, kDecodeTile);
      if (num_parts > 1) plan.splits.push_back({s, 0, plan.num_parts});
      for (int32_t begin = span.begin, part = 0; part == 0 || begin < span.end; begin += size, part++) {
        plan.decodes.push_back({s, {begin, std::min(begin + size, span.end)}, nullptr});
        if (num_parts > 1) plan.num_parts++, plan.splits.back().num_parts++;
      }
    } else {
      for (int32_t first = 0; first < num_queries; first += positions_per_tile)
        for (int32_t head = 0; head < call.num_kv_heads; head++)
          plan.prefills.push_back({s, first, std::min(positions_per_tile, num_queries - first), head});
    }
  }
  return plan;
}

// Check that every token that the call reads is within the cache. Only one token is tested for mapped memory: a closed
// memory is unmapped as a whole, and single holes are not looked for.
Result check(const AttentionCall& call, int element_bytes) {
  bool looked = false;
  for (int32_t s = 0; s < call.num_seqs; s++) {
    const int32_t start = call.cu_seqlens_q[s], end = call.cu_seqlens_q[s + 1], length = call.cache_seqlens[s];
    if (start < 0 || end < start || end > call.num_tokens) return kOutside;
    if (length < 0 || length > call.table_stride * call.block_tokens) return kOutside;
    if (start == end) continue;
    const int32_t first = std::max(0, length - (end - start));
    const Span span = visible(call, s, first, length - 1);
    if (!span.size()) continue;
    if (span.begin < 0) return kOutside;
    const int32_t* table = call.block_table + s * call.table_stride;
    for (int64_t index = span.begin / call.block_tokens; index * call.block_tokens < span.end; index++)
      if (table[index] < 0 || table[index] >= call.num_blocks) return kOutside;
    if (looked) continue;
    looked = true;
    const int64_t block = table[span.begin / call.block_tokens], within = span.begin % call.block_tokens;
    const int64_t key_at = block * call.key_block_stride + within * call.key_token_stride;
    const int64_t value_at = block * call.value_block_stride + within * call.value_token_stride;
    if (!readable(static_cast<const char*>(call.key) + key_at * element_bytes) ||
        !readable(static_cast<const char*>(call.value) + value_at * element_bytes))
      return kUnmapped;
  }
  return kDone;
}

template <typename T>
void attend(const AttentionCall& call) {
  Plan work = plan(call, sizeof(T));
  const int group_size = call.num_q_heads / call.num_kv_heads;
  const int num_rows = padded_rows(group_size) * call.num_kv_heads;
  const int value_stride = round_up(call.value_dim, 2 * kLanes);
  const size_t part_floats = size_t(call.num_q_heads) * (value_stride + 2);
  // Kept between calls: fresh memory costs a page fault every 4 KiB.
  static thread_local std::vector<float> buffer;
  if (buffer.size() < work.num_parts * part_floats) {
    buffer.clear();  // so that resize copies nothing
    buffer.resize(work.num_parts * part_floats);
  }
  float* const parts = buffer.data();
  auto decode_item = group_size == 1   ? decode<T, 1, 1>
                     : group_size == 2 ? decode<T, 2, 2>
                     : group_size <= 4 ? decode<T, 4, 4>
                                       : decode<T, 4, 8>;

  size_t next_part = 0, next_split = 0;
  for (DecodeItem& item : work.decodes) {
    while (next_split < work.splits.size() && work.splits[next_split].sequence < item.sequence) next_split++;
    if (next_split < work.splits.size() && work.splits[next_split].sequence == item.sequence)
      item.partial = parts + next_part++ * part_floats;
  }
  const int64_t num_prefills = work.prefills.size(), num_items = num_prefills + work.decodes.size();
#pragma omp parallel if (num_items > 1)
  {
    std::unique_ptr<PrefillScratch> for_prefill;
    std::unique_ptr<DecodeScratch> for_decode;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_items; i++) {
      if (i < num_prefills) {  // first, because they take longest
        if (!for_prefill)
          for_prefill = std::make_unique<PrefillScratch>(round_up(call.key_dim, kLanes), value_stride);
        prefill<T>(call, work.prefills[i], *for_prefill);
      } else {
        if (!for_decode)
          for_decode = std::make_unique<DecodeScratch>(num_rows, num_rows, call.key_dim, call.value_dim);
        decode_item(call, work.decodes[i - num_prefills], *for_decode);
      }
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < int64_t(work.splits.size()); i++) {
      const Split& split = work.splits[i];
      join_parts<T>(call, split.sequence, split.num_parts, parts + split.first_part * part_floats, value_stride);
    }
  }
}

}  // namespace
}  // namespace folio

extern "C" {

// Returns a folio::Result. Unsupported: more grouped heads than a tile has rows, an odd bf16 head size.
int folio_attention(const AttentionCall* call) {
  using namespace folio;
  if (call->num_q_heads / call->num_kv_heads > kMaxRows || (call->dtype == 1 && call->key_dim % 2)) return kUnsupported;
  if (const Result result = check(*call, call->dtype == 0 ? 4 : 2)) return result;
  return with_type(call->dtype, [&](auto type) { attend<decltype(type)>(*call); }) ? kDone : kUnsupported;
}

// Returns a folio::Result.
int folio_write(const WriteCall* call) {
  using namespace folio;
  const int64_t bytes = call->element_bytes, num_slots = call->num_blocks * call->block_tokens;
  for (int32_t t = 0; t < call->num_tokens; t++)
    if (call->slots[t] < 0 || call->slots[t] >= num_slots) return kOutside;
  if (call->num_tokens > 0) {
    const int64_t block = call->slots[0] / call->block_tokens, within = call->slots[0] % call->block_tokens;
    const int64_t key_at = block * call->key_cache_block_stride + within * call->key_cache_token_stride;
    const int64_t value_at = block * call->value_cache_block_stride + within * call->value_cache_token_stride;
    if (!readable(static_cast<char*>(call->key_cache) + key_at * bytes) ||
        !readable(static_cast<char*>(call->value_cache) + value_at * bytes))
      return kUnmapped;
  }
#pragma omp parallel for if (call->num_tokens > 64)
  for (int32_t t = 0; t < call->num_tokens; t++) {
    const int64_t block = call->slots[t] / call->block_tokens, within = call->slots[t] % call->block_tokens;
    const char* key = static_cast<const char*>(call->key) + t * call->key_token_stride * bytes;
    const char* value = static_cast<const char*>(call->value) + t * call->value_token_stride * bytes;
    char* key_to = static_cast<char*>(call->key_cache) +
                   (block * call->key_cache_block_stride + within * call->key_cache_token_stride) * bytes;
    char* value_to = static_cast<char*>(call->value_cache) +
                     (block * call->value_cache_block_stride + within * call->value_cache_token_stride) * bytes;
    for (int32_t h = 0; h < call->num_kv_heads; h++) {
      std::memcpy(key_to + h * call->key_cache_head_stride * bytes, key + h * call->key_head_stride * bytes,
                  call->key_dim * bytes);
      std::memcpy(value_to + h * call->value_cache_head_stride * bytes, value + h * call->value_head_stride * bytes,
                  call->value_dim * bytes);
    }
  }
  return kDone;
}

}  // extern "C"
