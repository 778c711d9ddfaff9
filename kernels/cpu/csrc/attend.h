// Attention over a KV cache: the plan of a call's work, and its checks.
//
// Only cached tokens that some query sees are read: others may be holes.
#pragma once

#include <omp.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "call.h"
#include "decode.h"
#include "prefill.h"
#include "team.h"

namespace folio {

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

// Sequences fewer than threads are divided by heads as well, which changes no result.
inline Plan plan(const AttentionCall& call, int element_bytes, int num_threads) {
  Plan plan;
  const int num_decodes = std::max(1, call.num_seqs);
  const int heads = std::max(1, call.num_kv_heads / ((num_threads + num_decodes - 1) / num_decodes));
  const int most_tokens = split_tokens(int64_t(call.num_kv_heads) * (call.key_dim + call.value_dim) * element_bytes);
  const int positions_per_tile = std::max(1, kMaxRows / (call.num_q_heads / call.num_kv_heads));
  for (int32_t s = 0; s < call.num_seqs; s++) {
    const int32_t num_queries = call.cu_seqlens_q[s + 1] - call.cu_seqlens_q[s];
    if (num_queries == 1 && !call.batch_invariant) {
      const int32_t position = call.cache_seqlens[s] - 1;
      const Span span = visible(call, s, position, position);
      const int32_t useful = std::max(1, (span.size() + most_tokens - 1) / most_tokens);
      const int32_t num_parts = call.num_splits > 0 ? std::min(useful, call.num_splits) : useful;
      const int32_t size = round_up((span.size() + num_parts - 1) / num_parts, kDecodeTile);
      if (num_parts > 1) plan.splits.push_back({s, 0, plan.num_parts});
      for (int32_t begin = span.begin, part = 0; part == 0 || begin < span.end; begin += size, part++) {
        for (int32_t head = 0; head < call.num_kv_heads; head += heads)
          plan.decodes.push_back({s, {begin, std::min(begin + size, span.end)}, head,
                                  std::min(heads, call.num_kv_heads - head), num_parts > 1 ? plan.num_parts : kNoPart});
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
inline Result check(const AttentionCall& call, int element_bytes) {
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

// A call's work, planned by one thread and run by all threads of a parallel region.
template <typename T>
class Attention {
 public:
  // parts: memory for the parts of split sequences; of calls that run one after the other it may be the same.
  Attention(const AttentionCall& call, std::vector<float>& parts)
      : call_(call), plan_(plan(call, call.int8_cache ? 1 : sizeof(T), omp_get_max_threads())), parts_(parts) {
    value_stride_ = round_up(call.value_dim, 2 * kLanes);
    part_floats_ = size_t(call.num_q_heads) * (value_stride_ + 2);
    if (parts.size() < plan_.num_parts * part_floats_) {
      parts.clear();  // so that resize copies nothing
      parts.resize(plan_.num_parts * part_floats_);
    }
  }

  int64_t num_items() const { return plan_.prefills.size() + plan_.decodes.size(); }

  static constexpr int kSteps = 2;  // calls of `Team::each`

  void run(Team& team) const { call_.int8_cache ? run_over<int8_t>(team) : run_over<T>(team); }

 private:
  template <typename Cached>
  void run_over(Team& team) const {
    const int group_size = call_.num_q_heads / call_.num_kv_heads;
    const int num_rows = padded_rows(group_size) * call_.num_kv_heads;
    const auto decode_item = group_size == 1   ? decode<T, Cached, 1, 1>
                             : group_size == 2 ? decode<T, Cached, 2, 2>
                             : group_size <= 4 ? decode<T, Cached, 4, 4>
                                               : decode<T, Cached, 4, 8>;
    const int64_t num_prefills = plan_.prefills.size();
    std::unique_ptr<PrefillScratch> for_prefill;
    std::unique_ptr<DecodeScratch> for_decode;
    team.each(num_items(), [&](int64_t i) {
      if (i < num_prefills) {  // first, because they take longest
        if (!for_prefill)
          for_prefill = std::make_unique<PrefillScratch>(round_up(call_.key_dim, kLanes), value_stride_);
        prefill<T, Cached>(call_, plan_.prefills[i], *for_prefill);
      } else {
        if (!for_decode)
          for_decode = std::make_unique<DecodeScratch>(num_rows, num_rows, call_.key_dim, call_.value_dim,
                                                        call_.int8_cache);
        const DecodeItem& item = plan_.decodes[i - num_prefills];
        decode_item(call_, item, item.part == kNoPart ? nullptr : parts_.data() + item.part * part_floats_, *for_decode);
      }
    });
    if (plan_.splits.empty()) return;
    team.each(plan_.splits.size(), [&](int64_t i) {
      const Split& split = plan_.splits[i];
      join_parts<T>(call_, split.sequence, split.num_parts, parts_.data() + split.first_part * part_floats_, value_stride_);
    });
  }

  AttentionCall call_;
  Plan plan_;
  int value_stride_;
  size_t part_floats_;
  std::vector<float>& parts_;
};

// Returns a Result. Unsupported: more grouped heads than a tile has rows, an odd bf16 head size.
inline Result check_attention(const AttentionCall& call) {
  if (call.num_q_heads / call.num_kv_heads > kMaxRows || (call.dtype == 1 && call.key_dim % 2)) return kUnsupported;
  return check(call, call.int8_cache ? 1 : call.dtype == 0 ? 4 : 2);
}

}  // namespace folio
