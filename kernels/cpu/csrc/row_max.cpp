// The largest element of each row and its place, for greedy sampling: reads a row once from memory and once from cache.

#include <cstdint>

#include "team.h"
#include "vector.h"

namespace {

using namespace folio;

constexpr int kAtOnce = 4;  // vectors, so that no maximum waits for the one before

// The first place whose element satisfies `is`; `size` if there is none.
template <typename T, typename Is>
int64_t first_place(const T* row, int64_t size, Is is) {
  int64_t begin = 0;
  for (; begin + kLanes <= size; begin += kLanes) {
    const IntVec found = is(load_some(row + begin, kLanes));
    int32_t any = 0;
    for (int i = 0; i < kLanes; i++) any |= found[i];
    if (any) break;
  }
  for (; begin < size; begin++) {
    if (is(broadcast(to_float(row[begin])))[0]) return begin;
  }
  return size;
}

template <typename T>
void row_max(const T* row, int64_t size, float* value, int64_t* place) {
  Vec highest[kAtOnce];
  IntVec is_nan = {};
  for (Vec& lane : highest) lane = broadcast(-kInf);
  int64_t begin = 0;
  for (; begin + kAtOnce * kLanes <= size; begin += kAtOnce * kLanes) {
    for (int i = 0; i < kAtOnce; i++) {
      const Vec x = load_some(row + begin + i * kLanes, kLanes);
      highest[i] = max_vec(highest[i], x);
      is_nan |= x != x;
    }
  }
  float most = -kInf;
  for (Vec lane : highest) most = std::max(most, highest_lane(lane));
  bool has_nan = false;
  for (int i = 0; i < kLanes; i++) has_nan |= is_nan[i] != 0;
  for (; begin < size; begin++) {
    const float x = to_float(row[begin]);
    most = std::max(most, x);
    has_nan |= x != x;
  }
  if (has_nan) {
    *value = std::numeric_limits<float>::quiet_NaN();
    *place = first_place(row, size, [](Vec x) { return x != x; });
  } else {
    *value = most;
    *place = first_place(row, size, [&](Vec x) { return x == most; });
  }
}

}  // namespace

extern "C" {

// x [rows, size], rows `stride` elements apart; values, places [rows]. A NaN is larger than everything else; of equal
// elements the first one counts.
void folio_row_max(int dtype, const void* x, float* values, int64_t* places, int64_t rows, int64_t size,
                   int64_t stride) {
  with_type(dtype, [&](auto type) {
    const auto* from = static_cast<const decltype(type)*>(x);
    for_each(rows * size > kParallelElements, rows,
             [&](int64_t row) { row_max(from + row * stride, size, values + row, places + row); });
  });
}

}  // extern "C"
