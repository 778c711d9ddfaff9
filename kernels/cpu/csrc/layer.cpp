// Decoder layers in one parallel region. A layer: norm, query, key and value, rotation and cache write, attention, its
// output and the residual, norm, gate and up, activation, down and the residual. Threads share out each operation
// (team.h), and what it leaves for the next one is in a workspace. Values are rounded where the single operations round
// them, but the residual is float32 from the first layer to the last.

#include <algorithm>
#include <cstdint>
#include <type_traits>
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

struct LayerWeights {
  const void *query_weight, *key_weight;  // norms of heads, or null
  NormWeight before_attention, before_mlp;
  NormWeight after_attention, after_mlp;  // applied before the residual is added; weights may be null
  ProductWeight qkv, attention_out, gate_up, down;
  int32_t activation;
};

// Tokens of the call that are read in one view. The addresses of heads, queries, results, caches and norm weights in
// both calls are not used.
struct LayerPart {
  const RotaryCall* rotary;
  const AttentionCall* attention;
  int64_t first_token;
};

struct LayerCache {
  void *keys, *values;
};

struct LayerCall {
  const LayerWeights* weights;
  void* heads;               // [rows, qkv.outputs], overwritten
  const LayerPart* parts;
  const LayerCache* caches;  // of each part
  int32_t num_parts;
};

// `folio_multiply` and `folio_linear_panel_bytes` of linear.cpp, which is a library of its own.
typedef void (*Multiply)(folio::Team*, int dtype, const ProductWeight*, const void* x, ProductResult out, void* panels,
                         int64_t rows);
typedef int64_t (*PanelBytes)(int dtype, const ProductWeight*, int64_t rows);

// Layers of one size, each of which has the output of the one before it as its input.
struct LayersCall {
  Multiply multiply;
  PanelBytes panel_bytes;
  const void* hidden;  // [rows, size]
  void* out;           // [rows, size]
  void* workspace;     // of `folio_layers_workspace` bytes
  const LayerCall* layers;
  int64_t rows;
  int32_t num_layers, dtype;
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
  float* sums;                      // the residual of all rows
  T *normed, *gate_up, *activated;  // of the rows of a chunk
  char* panels;
  int64_t chunk, num_bytes = 0;

  explicit Workspace(const LayersCall& call) {
    const int64_t chunks = (call.rows + kChunkRows - 1) / kChunkRows;
    chunk = (call.rows + chunks - 1) / chunks;
    int64_t size = 0, width = 0, gates = 0, panel_bytes = 0;
    for (const LayerCall* layer = call.layers; layer < call.layers + call.num_layers; layer++) {
      const LayerWeights& weights = *layer->weights;
      size = weights.qkv.inputs;
      width = std::max(width, weights.attention_out.inputs);
      gates = std::max(gates, weights.down.inputs);
      for (const ProductWeight* weight : {&weights.qkv, &weights.attention_out, &weights.gate_up, &weights.down})
        panel_bytes = std::max(panel_bytes, call.panel_bytes(call.dtype, weight, chunk));
    }
    attended = take<T>(call, call.rows * width);
    if constexpr (std::is_same_v<T, float>) sums = static_cast<float*>(call.out);
    else sums = take<float>(call, call.rows * size);
    normed = take<T>(call, chunk * size);
    gate_up = take<T>(call, chunk * 2 * gates);
    activated = take<T>(call, chunk * gates);
    panels = take<char>(call, panel_bytes);
  }

 private:
  template <typename U>
  U* take(const LayersCall& call, int64_t count) {
    U* const place = reinterpret_cast<U*>(static_cast<char*>(call.workspace) + num_bytes);
    num_bytes += (count * int64_t(sizeof(U)) + 63) / 64 * 64;
    return place;
  }
};

template <typename From, typename To>
void copy_rows(Team& team, const From* from, To* to, int64_t rows, int64_t size) {
  team.each(rows, [&](int64_t r) {
    for (int64_t i = r * size; i < (r + 1) * size; i += kLanes) {
      const int64_t left = (r + 1) * size - i;
      store_some(load_some(from + i, left), to + i, left);
    }
  });
}

// A layer's rotations and attentions, one of each part.
template <typename T>
struct Attentions {
  std::vector<RotaryCall> rotaries;
  std::vector<Attention<T>> attentions;

  Result prepare(const LayerCall& layer, T* attended) {
    const LayerWeights& weights = *layer.weights;
    // Kept between calls: fresh memory costs a page fault every 4 KiB.
    static thread_local std::vector<std::vector<float>> buffers;
    buffers.resize(std::max(buffers.size(), size_t(layer.num_parts)));
    for (int32_t p = 0; p < layer.num_parts; p++) {
      const LayerPart& part = layer.parts[p];
      RotaryCall rotary = *part.rotary;
      rotary.heads = static_cast<T*>(layer.heads) + part.first_token * weights.qkv.outputs;
      rotary.key_cache = layer.caches[p].keys, rotary.value_cache = layer.caches[p].values;
      rotary.query_weight = weights.query_weight, rotary.key_weight = weights.key_weight;
      AttentionCall attention = *part.attention;
      attention.query = rotary.heads, attention.out = attended + part.first_token * weights.attention_out.inputs;
      attention.key = rotary.key_cache, attention.value = rotary.value_cache;
      if (const Result result = check(rotary)) return result;
      if (const Result result = check_attention(attention)) return result;
      rotaries.push_back(rotary);
      attentions.emplace_back(attention, buffers[p]);
    }
    return kDone;
  }
};

// space.sums = the layer of them.
template <typename T>
void run_layer(Team& team, const LayersCall& call, const LayerCall& layer, const Attentions<T>& prepared,
               const Workspace<T>& space) {
  const LayerWeights& weights = *layer.weights;
  const int64_t size = weights.qkv.inputs, width = weights.attention_out.inputs, gates = weights.down.inputs;
  T* const heads = static_cast<T*>(layer.heads);
  constexpr const T* kNoResidual = nullptr;
  const auto multiply = [&](const ProductWeight& weight, const T* x, ProductResult to, int64_t rows) {
    call.multiply(&team, call.dtype, &weight, x, to, space.panels, rows);
  };
  // What each thread prepares for itself is the same in all of them. One that is late may read values of a later
  // step: then the items that it prepares for are done.
  static thread_local std::vector<T> own;
  const bool alone = call.rows <= kOwnRows;
  if (alone) own.resize(std::max<size_t>(own.size(), call.rows * (size + gates)));
  T* const normed = alone ? own.data() : space.normed;
  T* const activated = alone ? own.data() + call.rows * size : space.activated;
  Team single(nullptr, INT64_MAX, 0, 1);
  Team& own_or_all = alone ? single : team;
  const auto norm = [&](Team& team, const NormWeight& by, const auto* x, const auto* residual, auto* to, int64_t rows) {
    const T* const weight = static_cast<const T*>(by.weight);
    norm_rows(team, x, residual, weight, to, rows, size, by.eps, by.offset);
  };
  // Adds the product of x, or its norm, to sums.
  const auto add = [&](const ProductWeight& weight, const NormWeight& after, const T* x, float* sums, int64_t rows) {
    if (!after.weight) return multiply(weight, x, {sums, kAdded}, rows);
    multiply(weight, x, {space.normed, kRounded}, rows);
    norm(team, after, space.normed, sums, sums, rows);
  };
  for (int64_t first = 0; first < call.rows; first += space.chunk) {
    const int64_t rows = std::min(space.chunk, call.rows - first);
    norm(own_or_all, weights.before_attention, space.sums + first * size, kNoResidual, normed, rows);
    multiply(weights.qkv, normed, {heads + first * weights.qkv.outputs, kRounded}, rows);
  }
  // All writes first: a sequence may share a prefix that another one computes in this step.
  for (const RotaryCall& rotary : prepared.rotaries) rotary_write<T>(team, rotary);
  for (const Attention<T>& attention : prepared.attentions) attention.run(team);
  for (int64_t first = 0; first < call.rows; first += space.chunk) {
    const int64_t rows = std::min(space.chunk, call.rows - first);
    float* const sums = space.sums + first * size;
    add(weights.attention_out, weights.after_attention, space.attended + first * width, sums, rows);
    norm(own_or_all, weights.before_mlp, sums, kNoResidual, normed, rows);
    multiply(weights.gate_up, normed, {space.gate_up, kRounded}, rows);
    gate_rows(own_or_all, weights.activation, space.gate_up, activated, rows, gates);
    add(weights.down, weights.after_mlp, activated, sums, rows);
  }
}

template <typename T>
Result run(const LayersCall& call) {
  const Workspace<T> space(call);
  const int64_t chunks = (call.rows + space.chunk - 1) / space.chunk;
  std::vector<Attentions<T>> attentions(call.num_layers);
  int64_t steps = 0;
  for (int32_t i = 0; i < call.num_layers; i++) {
    if (const Result result = attentions[i].prepare(call.layers[i], space.attended)) return result;
    steps += chunks * (4 * kProductSteps + 5) + call.layers[i].num_parts * (1 + Attention<T>::kSteps);
  }
  const int64_t size = call.layers->weights->qkv.inputs;
  in_team(true, steps + 2, [&](Team& team) {
    copy_rows(team, static_cast<const T*>(call.hidden), space.sums, call.rows, size);
    for (int32_t i = 0; i < call.num_layers; i++) run_layer<T>(team, call, call.layers[i], attentions[i], space);
    if (space.sums != call.out) copy_rows(team, space.sums, static_cast<T*>(call.out), call.rows, size);
  });
  return kDone;
}

}  // namespace

extern "C" {

// Bytes of the workspace for a call's rows, weights and dtype.
int64_t folio_layers_workspace(const LayersCall* call) {
  return call->dtype == 0 ? Workspace<float>(*call).num_bytes : Workspace<BFloat16>(*call).num_bytes;
}

// Returns a folio::Result. Nothing is read or written unless all slots and cached tokens are within the caches.
int folio_layers(const LayersCall* call) {
  if (call->dtype == 0) return run<float>(*call);
  if (call->dtype == 1) return run<BFloat16>(*call);
  return kUnsupported;
}

}  // extern "C"
