// Products and a layer against plain loops in float64, for processors that have no Python here (`test_arm.py`).

#include "layer.cpp"
#include "linear.cpp"

#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>

namespace {

typedef std::vector<double> Numbers;

std::mt19937 dice(5);
double normal() { return std::normal_distribution<double>()(dice); }
int below(int end) { return static_cast<int>(dice() % end); }
int failures = 0;

template <typename T>
T as(double x) {
  T value;
  from_float(static_cast<float>(x), &value);
  return value;
}
template <typename T>
constexpr int kDtype = std::is_same_v<T, float> ? 0 : 1;

template <typename T>
std::vector<T> random(int64_t count, double scale = 1.0) {
  std::vector<T> values(count);
  for (T& value : values) value = as<T>(scale * normal());
  return values;
}

// The largest difference must be less than `most` of the largest value.
template <typename T>
void compare(const char* what, int number, const std::vector<T>& actual, const Numbers& expected, double most) {
  double difference = 0.0, largest = 0.0;
  for (size_t i = 0; i < expected.size(); i++) {
    const double error = std::fabs(static_cast<double>(to_float(actual[i])) - expected[i]);
    difference = error <= difference ? difference : error;  // or NaN
    largest = std::max(largest, std::fabs(expected[i]));
  }
  const bool good = difference < most * largest;
  failures += !good;
  std::printf("%s %s %d, dtype %d: %.2g of %.2g\n", good ? "ok" : "WRONG", what, number, kDtype<T>, difference, largest);
}

// A weight with its packed form and its values; several forms of codes, or not quantised if `bits` is 0.
template <typename T>
struct Weight {
  int64_t outputs, inputs;
  int bits;
  Numbers values;  // [outputs, inputs], of columns in the packed order
  std::vector<int32_t> order;
  std::vector<T> plain, bias;
  std::vector<uint8_t> packed, table;
  std::vector<float> factors;
  std::vector<Half> scales, supers;
  std::vector<int8_t> small;
  WeightPart part{};
  ProductWeight weight{};

  enum Form { kPlain, kOffsets, kTable, kSupers };

  Weight(int64_t outputs, int64_t inputs, int bits, Form form = kPlain, int every = 1)
      : outputs(outputs), inputs(inputs), bits(bits), values(outputs * inputs), bias(random<T>(outputs)) {
    bits ? quantised(form, every) : unquantised();
    part.outputs = outputs, part.bits = bits;
    weight = {&part, bias.data(), order.empty() ? nullptr : order.data(), outputs, inputs, 1};
  }
  Weight(const Weight&) = delete;

  void unquantised() {
    plain = random<T>(outputs * inputs, 1 / std::sqrt(inputs));
    for (size_t i = 0; i < plain.size(); i++) values[i] = to_float(plain[i]);
    const int64_t tile = folio_linear_tile(kDtype<T>), words = (inputs * sizeof(T) + 3) / 4;
    packed.resize((outputs + tile - 1) / tile * tile * words * 4);
    folio_linear_pack(kDtype<T>, plain.data(), packed.data(), outputs, inputs);
    part.codes = packed.data();
  }

  void quantised(Form form, int every) {
    const int64_t lanes = folio_linear_tile(-1), tiles = (outputs + lanes - 1) / lanes, slabs = (inputs + 31) / 32;
    const int64_t least = bits == 4 || bits == 5 || bits == 8 ? 32 : 16, group = least * every;
    const int64_t groups = (slabs * 32 / least + every - 1) / every, width = form == kOffsets || form == kSupers ? 2 : 1;
    std::vector<uint8_t> codes(outputs * inputs);
    for (uint8_t& code : codes) code = static_cast<uint8_t>(below(1 << bits));
    packed.resize(tiles * slabs * bits * lanes * 4);
    folio_codes_pack(bits, codes.data(), packed.data(), outputs, inputs);
    const double unit = 1.0 / (1 << (bits - 1)) / std::sqrt(inputs);
    for (int64_t i = 0; i < tiles * groups * width * lanes; i++) {
      scales.push_back(static_cast<Half>(unit * (0.5 + below(100) / 100.0)));
      small.push_back(static_cast<int8_t>(1 + below(60)));
    }
    if (form == kSupers)
      for (int64_t i = 0; i < tiles * ((slabs + 7) / 8) * width * lanes; i++)
        supers.push_back(static_cast<Half>(unit / 30 * (0.5 + below(100) / 100.0)));
    for (int i = 0; form == kTable && i < 16; i++) table.push_back(static_cast<uint8_t>(1 + 16 * i + below(15)));
    if (every > 1)
      for (int64_t i = 0; i < inputs; i++) order.push_back(static_cast<int32_t>((i * 7 + 3) % inputs));
    for (int64_t o = 0; o < outputs; o++) factors.push_back(static_cast<float>(0.5 + below(100) / 100.0));
    const int zero = width == 2 ? 0 : 1 << (bits - 1);
    for (int64_t o = 0; o < outputs; o++)
      for (int64_t i = 0; i < inputs; i++) {
        const int64_t tile = o / lanes, lane = o % lanes;
        const auto scale = [&](int64_t which) -> double {
          const int64_t at = ((tile * groups + i / group) * width + which) * lanes + lane;
          if (form != kSupers) return static_cast<float>(scales[at]);
          return static_cast<float>(supers[((tile * ((slabs + 7) / 8) + i / 256) * width + which) * lanes + lane]) * small[at];
        };
        const int code = codes[o * inputs + i];
        const double value = scale(0) * (form == kTable ? table[code] - 128 : code - zero) + (width == 2 ? scale(1) : 0.0);
        values[o * inputs + i] = value * factors[o];
      }
    part.codes = packed.data(), part.factors = factors.data(), part.table = form == kTable ? table.data() : nullptr;
    part.scales = form == kSupers ? static_cast<const void*>(small.data()) : scales.data();
    part.supers = form == kSupers ? supers.data() : nullptr;
    part.zero = zero, part.every = every, part.has_offsets = width == 2;
  }

  // x [rows, inputs]; rounded to 8 bits where the kernel rounds it so: where the largest value is not above the mean.
  Numbers product(const Numbers& x) const {
    const int64_t rows = x.size() / inputs;
    Numbers out;
    for (int64_t r = 0; r < rows; r++) {
      Numbers row;
      for (int64_t i = 0; i < inputs; i++) row.push_back(x[r * inputs + (order.empty() ? i : order[i])]);
      std::vector<float> most((inputs + 31) / 32);  // of less than `kPackedSlabs` slabs
      for (int64_t i = 0; i < inputs; i++) most[i / 32] = std::max(most[i / 32], std::fabs(static_cast<float>(row[i])));
      const float mean = std::accumulate(most.begin(), most.end(), 0.0f) / static_cast<float>(most.size());
      for (int64_t begin = 0; bits && kDtype<T> && begin < inputs; begin += 32) {
        const int64_t end = std::min(inputs, begin + 32);
        const float largest = most[begin / 32];
        if (largest > mean) continue;  // 16 bits
        const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        for (int64_t i = begin; i < end; i++)
          row[i] = static_cast<double>(std::nearbyintf(static_cast<float>(row[i]) * inverse)) * (largest / 127.0f);
      }
      for (int64_t o = 0; o < outputs; o++) {
        double sum = to_float(bias[o]);
        for (int64_t i = 0; i < inputs; i++) sum += row[i] * values[o * inputs + i];
        out.push_back(sum);
      }
    }
    return out;
  }
};

template <typename T>
Numbers widened(const std::vector<T>& values) {
  Numbers wide;
  for (const T& value : values) wide.push_back(to_float(value));
  return wide;
}

template <typename T>
void check_products(int64_t outputs, int64_t inputs, int bits, typename Weight<T>::Form form, int every) {
  const Weight<T> weight(outputs, inputs, bits, form, every);
  for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 16, 40}) {
    const std::vector<T> x = random<T>(rows * inputs);
    std::vector<T> out(rows * outputs);
    std::vector<char> panels(folio_linear_panel_bytes(kDtype<T>, &weight.weight, rows));
    folio_linear(kDtype<T>, &weight.weight, x.data(), out.data(), kRounded, panels.data(), rows);
    const std::string what = std::to_string(bits) + " bits, form " + std::to_string(form) + ", rows";
    compare(what.c_str(), static_cast<int>(rows), out, weight.product(widened(x)), kDtype<T> ? 5e-3 : 1e-5);
  }
  if (!bits) return;
  std::vector<int64_t> chosen = {outputs - 1, 0, outputs / 2};
  std::vector<T> rows(chosen.size() * inputs);
  folio_codes_rows(kDtype<T>, &weight.weight, chosen.data(), rows.data(), chosen.size());
  Numbers expected(rows.size());
  for (size_t r = 0; r < chosen.size(); r++)
    for (int64_t i = 0; i < inputs; i++)
      expected[r * inputs + (weight.order.empty() ? i : weight.order[i])] = weight.values[chosen[r] * inputs + i];
  compare("look-up, bits", bits, rows, expected, kDtype<T> ? 5e-3 : 1e-5);
}

constexpr int64_t kSize = 48, kWidth = 80, kDim = 16, kQueries = 4, kKeys = 2, kBlock = 4, kBlocks = 16;
constexpr int64_t kHeads = kQueries + 2 * kKeys;

Numbers normed(const Numbers& x, const Numbers& weight, double eps) {
  Numbers out;
  for (size_t begin = 0; begin < x.size(); begin += weight.size()) {
    double squares = 0.0;
    for (size_t i = 0; i < weight.size(); i++) squares += x[begin + i] * x[begin + i];
    for (size_t i = 0; i < weight.size(); i++)
      out.push_back(x[begin + i] / std::sqrt(squares / weight.size() + eps) * weight[i]);
  }
  return out;
}

// Two sequences: one that decodes, and a prompt. Caches [blocks, block_tokens, kv_heads, dim], tokens in order.
template <typename T>
void check_layer(int bits) {
  const Weight<T> qkv(kHeads * kDim, kSize, bits), attention_out(kSize, kQueries * kDim, bits),
      gate_up(2 * kWidth, kSize, bits), down(kSize, kWidth, bits);
  const std::vector<int32_t> starts = {0, 1, 7}, lengths = {29, 9};
  const int64_t rows = starts.back(), table_stride = 8;
  std::vector<int32_t> table;
  for (int32_t i = 0; i < kBlocks; i++) table.push_back(kBlocks - 1 - i);
  std::vector<T> hidden = random<T>(rows * kSize), cos = random<T>(rows * kDim), sin = random<T>(rows * kDim);
  std::vector<T> norm1 = random<T>(kSize), norm2 = random<T>(kSize), heads(rows * kHeads * kDim), out(rows * kSize);
  std::vector<T> keys = random<T>(kBlocks * kBlock * kKeys * kDim), values = random<T>(keys.size());
  Numbers all_keys = widened(keys), all_values = widened(values);
  const auto place = [&](int64_t s, int64_t token) {
    return (table[s * table_stride + token / kBlock] * kBlock + token % kBlock) * kKeys * kDim;
  };
  std::vector<int64_t> slots;
  for (int64_t s = 0; s < 2; s++)
    for (int32_t r = starts[s]; r < starts[s + 1]; r++)
      slots.push_back(place(s, lengths[s] - starts[s + 1] + r) / (kKeys * kDim));

  RotaryCall rotary{};
  rotary.cos = cos.data(), rotary.sin = sin.data(), rotary.slots = slots.data();
  rotary.token_stride = kHeads * kDim, rotary.head_stride = kDim;
  rotary.key_block_stride = rotary.value_block_stride = kBlock * kKeys * kDim;
  rotary.key_token_stride = rotary.value_token_stride = kKeys * kDim;
  rotary.key_head_stride = rotary.value_head_stride = kDim;
  rotary.num_blocks = kBlocks, rotary.block_tokens = kBlock, rotary.num_tokens = rows;
  rotary.num_q_heads = kQueries, rotary.num_kv_heads = kKeys;
  rotary.dim = rotary.rotary_dim = rotary.columns = kDim, rotary.dtype = kDtype<T>, rotary.element_bytes = sizeof(T);
  AttentionCall attention{};
  attention.cu_seqlens_q = starts.data(), attention.cache_seqlens = lengths.data(), attention.block_table = table.data();
  attention.query_token_stride = kHeads * kDim, attention.query_head_stride = kDim;
  attention.key_block_stride = attention.value_block_stride = kBlock * kKeys * kDim;
  attention.key_token_stride = attention.value_token_stride = kKeys * kDim;
  attention.key_head_stride = attention.value_head_stride = kDim;
  attention.table_stride = table_stride, attention.num_blocks = kBlocks, attention.block_tokens = kBlock;
  attention.num_tokens = rows, attention.num_seqs = 2, attention.num_q_heads = kQueries;
  attention.num_kv_heads = kKeys, attention.key_dim = attention.value_dim = kDim;
  attention.window_left = -1, attention.dtype = kDtype<T>, attention.scale = 0.25f;
  LayerWeights weights{};
  weights.before_attention = {norm1.data(), 1e-5f, 0.0f}, weights.before_mlp = {norm2.data(), 1e-5f, 0.0f};
  weights.qkv = qkv.weight, weights.attention_out = attention_out.weight, weights.gate_up = gate_up.weight;
  weights.down = down.weight;
  const LayerPart part{&rotary, &attention, 0};
  const LayerCache cache{keys.data(), values.data()};
  const LayerCall layer{&weights, heads.data(), &part, &cache, 1};
  LayersCall call{};
  call.multiply = folio_multiply, call.panel_bytes = folio_linear_panel_bytes, call.hidden = hidden.data();
  call.out = out.data(), call.layers = &layer, call.rows = rows, call.num_layers = 1, call.dtype = kDtype<T>;
  std::vector<char> workspace(folio_layers_workspace(&call));
  call.workspace = workspace.data();
  const int result = folio_layers(&call);
  failures += result != kDone;

  Numbers x = widened(hidden), c = widened(cos), s = widened(sin);
  Numbers projected = qkv.product(normed(x, widened(norm1), 1e-5));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t h = 0; h < kHeads; h++) {
      double* const head = projected.data() + (r * kHeads + h) * kDim;
      for (int64_t i = 0; h < kQueries + kKeys && i < kDim / 2; i++) {
        const double a = head[i], b = head[i + kDim / 2], *cosines = c.data() + r * kDim, *sines = s.data() + r * kDim;
        head[i] = a * cosines[i] - b * sines[i];
        head[i + kDim / 2] = b * cosines[i + kDim / 2] + a * sines[i + kDim / 2];
      }
      if (h < kQueries) continue;
      Numbers& to = h < kQueries + kKeys ? all_keys : all_values;
      std::copy(head, head + kDim, to.begin() + slots[r] * kKeys * kDim + (h - kQueries) % kKeys * kDim);
    }
  Numbers attended(rows * kQueries * kDim);
  for (int64_t q = 0; q < 2; q++)
    for (int32_t r = starts[q]; r < starts[q + 1]; r++)
      for (int64_t h = 0; h < kQueries; h++) {
        double total = 0.0;
        double* const to = attended.data() + (r * kQueries + h) * kDim;
        for (int64_t token = 0; token <= lengths[q] - starts[q + 1] + r; token++) {
          const int64_t at = place(q, token) + h / (kQueries / kKeys) * kDim;
          double score = 0.0;
          for (int64_t i = 0; i < kDim; i++) score += projected[(r * kHeads + h) * kDim + i] * all_keys[at + i];
          total += score = std::exp(score / 4);
          for (int64_t i = 0; i < kDim; i++) to[i] += score * all_values[at + i];
        }
        for (int64_t i = 0; i < kDim; i++) to[i] /= total;
      }
  const auto add = [](Numbers a, const Numbers& b) {
    for (size_t i = 0; i < a.size(); i++) a[i] += b[i];
    return a;
  };
  x = add(x, attention_out.product(attended));
  const Numbers gates = gate_up.product(normed(x, widened(norm2), 1e-5));
  Numbers active;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < kWidth; i++) {
      const double gate = gates[r * 2 * kWidth + i];
      active.push_back(gate / (1 + std::exp(-gate)) * gates[r * 2 * kWidth + kWidth + i]);
    }
  compare("layer, bits", bits, out, add(x, down.product(active)), kDtype<T> ? 4e-2 : 1e-4);
  compare("its keys, bits", bits, keys, all_keys, kDtype<T> ? 4e-2 : 1e-4);
}

template <typename T>
void check() {
  using Of = Weight<T>;
  check_products<T>(70, 300, 0, Of::kPlain, 1);
  check_products<T>(33, 100, 8, Of::kPlain, 1);
  check_products<T>(70, 300, 8, Of::kOffsets, 2);
  for (int bits = 2; bits <= 6; bits++) {
    check_products<T>(37, 300, bits, Of::kPlain, 1);
    check_products<T>(37, 512, bits, Of::kSupers, 1);
    check_products<T>(37, 290, bits, Of::kOffsets, 4);
  }
  check_products<T>(37, 300, 4, Of::kTable, 1);
  for (int bits : {0, 4, 8}) check_layer<T>(bits);
}

}  // namespace

int main() {
  check<float>();
  check<BFloat16>();
  return failures ? 1 : 0;
}
