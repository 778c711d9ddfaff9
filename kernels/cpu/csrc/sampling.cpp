// Choice of a token for each row of logits: penalties, temperature, min_p, top_k, top_p, and noise; a row on one core.
//
// The definition is in app/engine/sampling/choice.py. Loops that are sums of floating-point numbers have the same order
// in every row, so a row's token depends on nothing else.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "team.h"
#include "vector.h"

extern "C" {

// Mirrored field by field in kernels/cpu/sampling.py.
struct ChooseCall {
  const void* logits;    // [*, vocab_size], rows `stride` elements apart
  const int64_t* where;  // [rows] each: the row of the logits
  const int64_t* key;
  const double* top_p;
  const float* temperature;  // 0: the likeliest
  const float* min_p;        // its logarithm
  const int32_t* top_k;      // 0: all
  const float *repetition, *frequency, *presence;
  const int64_t* const* entries;  // of tokens to penalise, each once: token id << 32 | count in the output
  const int64_t* num_entries;
  int64_t* tokens;
  bool* possible;
  int64_t dtype, rows, vocab_size, stride;
};

}  // extern "C"

namespace {

constexpr int64_t kBlock = 64, kCandidates = 256;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kMostNoise = 22.2;

inline uint64_t mixed(uint64_t number) {
  number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9;
  number = (number ^ number >> 27) * 0x94D049BB133111EB;
  return number ^ number >> 31;
}

// The 31 bits of a token: SplitMix64's n-th number is for tokens 2n and 2n + 1.
inline uint32_t bits_of(uint64_t key, int64_t token) {
  const uint64_t number = mixed(key + (uint64_t(token >> 1) + 1) * 0x9E3779B97F4A7C15);
  return uint32_t(token & 1 ? number >> 32 : number) & 0x7FFFFFFF;
}

inline double noise(uint64_t key, int64_t token) {
  return -std::log(-std::log1p(-(bits_of(key, token) + 0.5) * 0x1p-31));
}

struct Token {
  float logit;
  int64_t id;
};

inline bool precedes(const Token& a, const Token& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// Scale kBlock or, of the last block, `count` logits; returns the highest one. A division takes longer than the rest.
template <typename T>
inline float scale_block(const T* raw, float* own, int64_t count, float temperature) {
  float most = -kInfinity;
  if (temperature == 1) {
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; i++) {
      own[i] = folio::to_float(raw[i]);
      most = own[i] > most ? own[i] : most;
    }
  } else {
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; i++) {
      own[i] = folio::to_float(raw[i]) / temperature;
      most = own[i] > most ? own[i] : most;
    }
  }
  return most;
}

struct Row {
  int64_t width;  // the vocabulary's, in whole blocks; logits beyond the vocabulary are -inf
  std::vector<float> logits, maxima, masses;  // scaled logits, their maxima by blocks, exp(logit - highest)
  std::vector<float> sorted;
  std::vector<Token> candidates;
  float highest;

  template <typename T>
  void scale(const T* raw, int64_t vocab_size, float temperature) {
    const int64_t whole = vocab_size / kBlock, rest = vocab_size % kBlock;
    for (int64_t block = 0; block < whole; block++)
      maxima[block] = scale_block(raw + block * kBlock, logits.data() + block * kBlock, kBlock, temperature);
    if (!rest) return;
    float* own = logits.data() + whole * kBlock;
    maxima[whole] = scale_block(raw + whole * kBlock, own, rest, temperature);
    std::fill(own + rest, own + kBlock, -kInfinity);
  }

  // Like torch's operations one after the other, to the last bit: products are rounded before they are subtracted.
  void penalise(const int64_t* entries, int64_t num, float repetition, float frequency, float presence) {
    float* own = logits.data();
    float repeated[kBlock], less[kBlock];
    for (int64_t begin = 0; begin < num; begin += kBlock) {
      const int64_t count = std::min(kBlock, num - begin);
#pragma omp simd
      for (int64_t i = 0; i < count; i++) {
        const float logit = own[int32_t(entries[begin + i] >> 32)];
        repeated[i] = logit < 0 ? logit * repetition : logit / repetition;
        less[i] = frequency * float(int32_t(entries[begin + i]));
      }
      asm volatile("" : : "r"(repeated), "r"(less) : "memory");  // the compiler would fuse products and differences
#pragma omp simd
      for (int64_t i = 0; i < count; i++) {
        const int64_t entry = entries[begin + i];
        own[int32_t(entry >> 32)] = repeated[i] - less[i] - (int32_t(entry) > 0 ? presence : 0.f);
      }
    }
  }

  template <typename T>
  void load(const ChooseCall& call, const T* raw, int64_t row, float temperature) {
    if (!call.num_entries[row]) return scale(raw, call.vocab_size, temperature);
    for (int64_t i = 0; i < call.vocab_size; i++) logits[i] = folio::to_float(raw[i]);
    penalise(call.entries[row], call.num_entries[row], call.repetition[row], call.frequency[row], call.presence[row]);
    scale(logits.data(), call.vocab_size, temperature);
  }

  Token likeliest() const {
    const int64_t block = std::max_element(maxima.begin(), maxima.end()) - maxima.begin();
    const float* own = logits.data() + block * kBlock;
    return {maxima[block], block * kBlock + (std::max_element(own, own + kBlock) - own)};
  }

  void exclude_below(float least) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) logits[i] = logits[i] < least ? -kInfinity : logits[i];
    for (float& most : maxima) most = most < least ? -kInfinity : most;
  }

  // The masses, and their sum. The exponential is 2^whole times a polynomial of the rest (Cephes, exp2f).
  double weigh() {
    double sum = 0;
    for (int64_t block = 0; block < width; block += kBlock) {
      float part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t i = block; i < block + kBlock; i++) {
        const float x = std::max((logits[i] - highest) * 1.44269504f, -126.f);
        const float whole = std::nearbyint(x), f = x - whole;
        float power = 1.535336188e-4f;
        power = power * f + 1.339887440e-3f;
        power = power * f + 9.618437357e-3f;
        power = power * f + 5.550332471e-2f;
        power = power * f + 2.402264791e-1f;
        power = power * f + 6.931472029e-1f;
        power = power * f + 1.f;
        const int32_t exponent = (int32_t(whole) + 127) << 23;
        float factor;
        std::memcpy(&factor, &exponent, sizeof factor);
        masses[i] = logits[i] == -kInfinity ? 0.f : power * factor;
        part += masses[i];
      }
      sum += part;
    }
    return sum;
  }

  // At least the first `least` tokens in order, or all that are allowed. The first n tokens are in blocks whose maxima
  // are at least the n-th.
  void find_candidates(int64_t least) {
    float floor = -kInfinity;
    if (least < int64_t(maxima.size())) {
      sorted = maxima;
      std::nth_element(sorted.begin(), sorted.begin() + (least - 1), sorted.end(), std::greater<float>());
      floor = sorted[least - 1];
    }
    floor = std::max(floor, std::numeric_limits<float>::lowest());  // above -inf
    size_t num = 0;
    for (int64_t block = 0; block < width / kBlock; block++) {
      if (!(maxima[block] >= floor)) continue;
      if (candidates.size() < num + kBlock) candidates.resize(2 * num + kBlock);
      for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i++) {
        candidates[num] = {logits[i], i};
        num += logits[i] >= floor;
      }
    }
    candidates.resize(num);
    const int64_t count = std::min(least, int64_t(candidates.size()));
    if (count < int64_t(candidates.size())) {
      std::nth_element(candidates.begin(), candidates.begin() + count, candidates.end(), precedes);
      candidates.resize(count);
    }
    std::sort(candidates.begin(), candidates.end(), precedes);
  }

  // The highest sum of logit and noise, of equal ones the lowest id. Few tokens need the noise's logarithms: it is at
  // most -log(v), and a float's bits are its logarithm to base 2, scaled and shifted, and at most 0.09 too low.
  Token draw(uint64_t key) const {
    constexpr float kScale = 0x1p-23f * 0.69314718f, kShift = (127 + 31) * 0.69314718f;
    const Token first = likeliest();
    Token best = first;
    double total = first.logit + noise(key, first.id);
    for (int64_t block = 0; block < width / kBlock; block++) {
      if (maxima[block] + kMostNoise < total) continue;
      const float* own = logits.data() + block * kBlock;
      float bounds[kBlock], most = -kInfinity;
      uint64_t numbers[kBlock / 2];
      const uint64_t start = uint64_t(block * kBlock / 2 + 1);
#pragma omp simd
      for (int64_t i = 0; i < kBlock / 2; i++) numbers[i] = mixed(key + (start + i) * 0x9E3779B97F4A7C15);
      uint32_t halves[kBlock];
      std::memcpy(halves, numbers, sizeof halves);  // little-endian
#pragma omp simd reduction(max : most)
      for (int64_t i = 0; i < kBlock; i++) {
        const float value = float(int32_t(halves[i] & 0x7FFFFFFF));
        int32_t logarithm;
        std::memcpy(&logarithm, &value, sizeof logarithm);
        bounds[i] = own[i] + (kShift - kScale * float(logarithm));
        most = bounds[i] > most ? bounds[i] : most;
      }
      const float slack = 1e-4f + 0x1p-20f * std::fabs(most);  // rounding errors
      if (!(most + slack >= total)) continue;
      for (int64_t i = 0; i < kBlock; i++) {
        if (bounds[i] + slack < total) continue;
        const Token token = {own[i], block * kBlock + i};
        const double sum = token.logit + noise(key, token.id);
        if (sum > total || (sum == total && token.id < best.id)) total = sum, best = token;
      }
    }
    return best;
  }

  // The token drawn of the candidates, or -1 if the mass of the limit is not among them.
  int64_t draw_of_candidates(uint64_t key, int64_t top_k, double top_p, double limit) const {
    if (top_p < 1 && top_k) {
      limit = 0;
      for (const Token& token : candidates) limit += masses[token.id];
      limit *= top_p;
    }
    double before = 0, total = -kInfinity;
    int64_t best = -1;
    bool covered = top_k > 0;
    for (const Token& token : candidates) {
      if (top_p < 1 && before >= limit) {
        covered = true;
        break;
      }
      if (token.logit + kMostNoise >= total) {
        const double sum = token.logit + noise(key, token.id);
        if (sum > total || (sum == total && token.id < best)) total = sum, best = token.id;
      }
      if (top_p < 1) before += masses[token.id];
    }
    return covered || before >= limit || int64_t(candidates.size()) < kCandidates ? best : -1;
  }

  // The least logit of a block's tokens that precede a token of another block.
  static float least_before(const Token& token, int64_t block) {
    return block < token.id / kBlock ? token.logit : std::nextafter(token.logit, kInfinity);
  }

  double mass_before(const Token& token) const {
    double sum = 0;
    const int64_t own = token.id / kBlock;
    for (int64_t block = 0; block < width / kBlock; block++) {
      if (maxima[block] < token.logit || block == own) continue;
      const float *there = logits.data() + block * kBlock, *mass = masses.data() + block * kBlock;
      const float least = least_before(token, block);
      folio::Vec part = {};
      for (int64_t i = 0; i < kBlock; i += folio::kLanes)
        part += folio::load(there + i) >= least ? folio::load(mass + i) : folio::Vec{};
      sum += folio::sum_lanes(part);
    }
    for (int64_t i = own * kBlock; i < (own + 1) * kBlock; i++) sum += precedes({logits[i], i}, token) ? masses[i] : 0.f;
    return sum;
  }

  void exclude_all_but_before(const Token& token) {
    const int64_t own = token.id / kBlock;
    for (int64_t i = own * kBlock; i < (own + 1) * kBlock; i++)
      logits[i] = precedes({logits[i], i}, token) ? logits[i] : -kInfinity;
    for (int64_t block = 0; block < width / kBlock; block++) {
      float* there = logits.data() + block * kBlock;
      const float least = block == own ? -kInfinity : least_before(token, block);
      folio::Vec most = folio::broadcast(-kInfinity);
      for (int64_t i = 0; i < kBlock; i += folio::kLanes) {
        const folio::Vec x = folio::load(there + i);
        const folio::Vec kept = x >= least ? x : folio::broadcast(-kInfinity);
        folio::store(there + i, kept);
        most = folio::max_vec(most, kept);
      }
      maxima[block] = folio::highest_lane(most);
    }
  }

  int64_t choose(const ChooseCall& call, int64_t row, bool* possible) {
    const float temperature = call.temperature[row];
    folio::with_type(int(call.dtype), [&](auto type) {
      const auto* raw = static_cast<const decltype(type)*>(call.logits) + call.where[row] * call.stride;
      load(call, raw, row, temperature == 0 ? 1 : temperature);
    });
    const Token first = likeliest();
    highest = first.logit;
    *possible = highest > -kInfinity;
    if (!*possible || temperature == 0 || highest == kInfinity) return first.id;
    if (call.min_p[row] > -kInfinity) exclude_below(highest + call.min_p[row]);
    const uint64_t key = uint64_t(call.key[row]);
    const int64_t top_k = call.top_k[row];
    const double top_p = call.top_p[row];
    if (!top_k && top_p >= 1) return draw(key).id;
    const double limit = top_p < 1 ? top_p * weigh() : 0;
    find_candidates(top_k ? top_k : kCandidates);
    const int64_t found = draw_of_candidates(key, top_k, top_p, limit);
    if (found >= 0) return found;
    // Drawn of all tokens, one is probably kept. If it is not, then those that it precedes are not, either.
    for (;;) {
      const Token token = draw(key);
      if (mass_before(token) < limit || token.id == first.id) return token.id;
      exclude_all_but_before(token);
    }
  }
};

}  // namespace

extern "C" {

void folio_choose(const ChooseCall* call) {
  const bool parallel = call->rows > 1 && call->rows * call->vocab_size > folio::kParallelElements;
  folio::for_each(parallel, call->rows, [&](int64_t i) {
    static thread_local Row row;  // fresh memory would cost as much as the choice
    const int64_t num_blocks = (call->vocab_size + kBlock - 1) / kBlock;
    row.width = num_blocks * kBlock;
    row.logits.resize(row.width);
    row.masses.resize(row.width);
    row.maxima.resize(num_blocks);
    call->tokens[i] = row.choose(*call, i, call->possible + i);
  });
}

}  // extern "C"
