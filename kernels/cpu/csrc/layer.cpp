// A decoder layer in one parallel region: norm, query, key and value, rotation and cache write, attention, its output
// and the residual, norm, gate and up, activation, down and the residual. Threads share out each operation (team.h),
// and what it leaves for the next one is in a workspace. Every value is rounded where the single operations round it.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attend.h"
#include "call.h"
#include "rotary.h"
#include "rows.h"
#include "team.h"
#include "vector.h"
#include "weight.h"

extern "C" {

// Structures are mirrored field by field in kernels/cpu/layer.py.
struct NormWeight {
  const void* weight;
  float eps, offset;
};

// Tokens of the call that are read in one view. The addresses of heads, queries, results, caches and norm weights in
// both calls are not used.
struct LayerPart {
  const RotaryCall* rotary;
  const AttentionCall* attention;
  void *key_cache, *value_cache;  // of this layer
  int64_t first_token;
};

// `folio_multiply` and `folio_linear_panel_bytes` of linear.cpp, which is a library of its own.
typedef void (*Multiply)(folio::Team*, int dtype, const ProductWeight*, const void* x, const void* residual, void* out,
                         void* panels, int64_t rows);
typedef int64_t (*PanelBytes)(int dtype, const ProductWeight*, int64_t rows);

struct LayerCall {
  Multiply multiply;
  PanelBytes panel_bytes;
  const void* hidden;  // [rows, size]
  void* out;           // [rows, size]
  void* heads;         // [rows, qkv.outputs], overwritten
  void* workspace;     // of `folio_layer_workspace` bytes
  const LayerPart* parts;
  const void *query_weight, *key_weight;  // norms of heads, or null
  NormWeight before_attention, before_mlp;
  NormWeight after_attention, after_mlp;  // applied before the residual is added; weights may be null
  ProductWeight qkv, attention_out, gate_up, down;
  int64_t rows;
  int32_t num_parts, dtype, activation;
};

}  // extern "C"

namespace {

using namespace folio;

// Rows that pass through the MLP together: their activations stay in the last cache, and the weights are read once for
// enough rows.
constexpr int64_t kChunkRows = 448;

template <typename T>
struct Workspace {
  T* attended;                      // of all rows
  T *normed, *gate_up, *activated;  // of the rows of a chunk
  char* panels;
  int64_t chunk, num_bytes = 0;

  explicit Workspace(const LayerCall& call) {
    const int64_t chunks = (call.rows + kChunkRows - 1) / kChunkRows;
    chunk = (call.rows + chunks - 1) / chunks;
    attended = take<T>(call, call.rows * call.attention_out.inputs);
    normed = take<T>(call, chunk * call.qkv.inputs);
    gate_up = take<T>(call, chunk * call.gate_up.outputs);
    activated = take<T>(call, chunk * call.down.inputs);
    int64_t most = 0;
    for (const ProductWeight* weight : {&call.qkv, &call.attention_out, &call.gate_up, &call.down})
      most = std::max(most, call.panel_bytes(call.dtype, weight, chunk));
    panels = take<char>(call, most);
  }

 private:
  template <typename U>
  U* take(const LayerCall& call, int64_t count) {
    U* const place = reinterpret_cast<U*>(static_cast<char*>(call.workspace) + num_bytes);
    num_bytes += (count * int64_t(sizeof(U)) + 63) / 64 * 64;
    return place;
  }
};

template <typename T>
Result run(const LayerCall& call) {
  const Workspace<T> space(call);
  const int64_t size = call.qkv.inputs, width = call.attention_out.inputs;
  T* const heads = static_cast<T*>(call.heads);
  std::vector<RotaryCall> rotaries;
  std::vector<Attention<T>> attentions;
  // Kept between calls: fresh memory costs a page fault every 4 KiB.
  static thread_local std::vector<std::vector<float>> buffers;
  buffers.resize(std::max(buffers.size(), size_t(call.num_parts)));
  for (int32_t p = 0; p < call.num_parts; p++) {
    const LayerPart& part = call.parts[p];
    RotaryCall rotary = *part.rotary;
    rotary.heads = heads + part.first_token * call.qkv.outputs;
    rotary.key_cache = part.key_cache, rotary.value_cache = part.value_cache;
    rotary.query_weight = call.query_weight, rotary.key_weight = call.key_weight;
    AttentionCall attention = *part.attention;
    attention.query = rotary.heads, attention.out = space.attended + part.first_token * width;
    attention.key = part.key_cache, attention.value = part.value_cache;
    if (const Result result = check(rotary)) return result;
    if (const Result result = check_attention(attention)) return result;
    rotaries.push_back(rotary);
    attentions.emplace_back(attention, buffers[p]);
  }
  const T* const hidden = static_cast<const T*>(call.hidden);
  T* const out = static_cast<T*>(call.out);
  const int64_t chunks = (call.rows + space.chunk - 1) / space.chunk;
  const int64_t steps = chunks * (4 * kProductSteps + 5) + call.num_parts * (1 + Attention<T>::kSteps);
  in_team(true, steps, [&](Team& team) {
    const auto multiply = [&](const ProductWeight& weight, const T* x, const T* residual, T* out, int64_t rows) {
      call.multiply(&team, call.dtype, &weight, x, residual, out, space.panels, rows);
    };
    // What each thread prepares for itself is the same in all of them. One that is late may read values of a later
    // step: then the items that it prepares for are done.
    static thread_local std::vector<T> own;
    const bool alone = call.rows <= kOwnRows;
    if (alone) own.resize(std::max<size_t>(own.size(), call.rows * (size + call.down.inputs)));
    T* const normed = alone ? own.data() : space.normed;
    T* const activated = alone ? own.data() + call.rows * size : space.activated;
    Team single(nullptr, INT64_MAX, 0, 1);
    Team& own_or_all = alone ? single : team;
    const auto norm = [&](Team& team, const NormWeight& by, const T* x, const T* residual, T* to, int64_t rows) {
      norm_rows<T>(team, x, residual, static_cast<const T*>(by.weight), to, nullptr, rows, size, by.eps, by.offset);
    };
    // to = residual + the product of x, or its norm.
    const auto add = [&](const ProductWeight& weight, const NormWeight& after, const T* x, const T* residual, T* to,
                         int64_t rows) {
      if (!after.weight) return multiply(weight, x, residual, to, rows);
      multiply(weight, x, nullptr, space.normed, rows);
      norm(team, after, space.normed, residual, to, rows);
    };
    for (int64_t first = 0; first < call.rows; first += space.chunk) {
      const int64_t rows = std::min(space.chunk, call.rows - first);
      norm(own_or_all, call.before_attention, hidden + first * size, nullptr, normed, rows);
      multiply(call.qkv, normed, nullptr, heads + first * call.qkv.outputs, rows);
    }
    // All writes first: a sequence may share a prefix that another one computes in this step.
    for (const RotaryCall& rotary : rotaries) rotary_write<T>(team, rotary);
    for (const Attention<T>& attention : attentions) attention.run(team);
    for (int64_t first = 0; first < call.rows; first += space.chunk) {
      const int64_t rows = std::min(space.chunk, call.rows - first);
      T* const sums = out + first * size;
      const T* const attended = space.attended + first * width;
      add(call.attention_out, call.after_attention, attended, hidden + first * size, sums, rows);
      norm(own_or_all, call.before_mlp, sums, nullptr, normed, rows);
      multiply(call.gate_up, normed, nullptr, space.gate_up, rows);
      gate_rows(own_or_all, call.activation, space.gate_up, activated, rows, call.down.inputs);
      add(call.down, call.after_mlp, activated, sums, sums, rows);
    }
  });
  return kDone;
}

}  // namespace

extern "C" {

// Bytes of the workspace for a call's rows, weights and dtype.
int64_t folio_layer_workspace(const LayerCall* call) {
  return call->dtype == 0 ? Workspace<float>(*call).num_bytes : Workspace<BFloat16>(*call).num_bytes;
}

// Returns a folio::Result. Nothing is read or written unless all slots and cached tokens are within the cache.
int folio_layer(const LayerCall* call) {
  if (call->dtype == 0) return run<float>(*call);
  if (call->dtype == 1) return run<BFloat16>(*call);
  return kUnsupported;
}

}  // extern "C"
