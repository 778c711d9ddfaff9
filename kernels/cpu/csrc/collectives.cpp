// Sums, gathers and broadcasts of the ranks of one machine, over memory that all of them have mapped.
//
//     Header │ Rank of each rank │ of each rank: 2 slots of kSlotBytes
//
// A collective consists of rounds of at most kSlotBytes of each rank, counted from 1. In round n a rank writes its data
// to its slot n % 2, announces n, waits until the others have, and reads their slots. A rank that announces n has read
// the slots of round n - 1: so slot n % 2 is free when all ranks have announced n - 1.
//
// Waiting ranks spin, then yield, then sleep on a futex: ranks that share a core do not keep each other from it.

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <ctime>

#include "team.h"
#include "vector.h"

extern "C" {

// Mirrored field by field in kernels/cpu/collectives.py.
struct SharedGroup {
  char* memory;
  int32_t rank, size;
  uint32_t round;  // the last one
};

}  // extern "C"

namespace {

using namespace folio;

constexpr int64_t kSlotBytes = 256 << 10;
constexpr int64_t kLineBytes = 64;
// The ranks' layers differ by some microseconds. Waking a sleeper takes tens.
constexpr std::chrono::microseconds kSpin{20}, kYield{220};
constexpr timespec kSleep{0, 50'000'000};  // at most: a sleeper may miss the end of the group
constexpr int kPauses = 32;  // between two looks at the clock

struct alignas(kLineBytes) Header {
  std::atomic<uint32_t> ended;  // no collective completes any more
};

struct alignas(kLineBytes) Rank {
  std::atomic<uint32_t> round;     // announced; also the futex
  std::atomic<uint32_t> sleepers;  // ranks that may have to be woken
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

inline void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

class Rounds {
 public:
  explicit Rounds(SharedGroup& group) : group_(group) {}

  bool ended() const { return header().ended.load(std::memory_order_acquire); }

  // Begin a round; false if the group has ended. The rank's own slot may be written from then on.
  bool begin() {
    const uint32_t before = group_.round++;
    for (int r = 0; r < group_.size; r++)
      if (!wait(r, before)) return false;
    return true;
  }

  char* slot(int r) const {
    const int64_t index = 2 * r + group_.round % 2;
    return group_.memory + sizeof(Header) + group_.size * sizeof(Rank) + index * kSlotBytes;
  }

  void announce() {
    Rank& own = rank(group_.rank);
    own.round.store(group_.round);  // before the load below, in one order for all: else a sleeper is missed
    if (own.sleepers.load()) futex(own.round, FUTEX_WAKE, 1 << 30, nullptr);
  }

  // Wait until a rank has announced this round; false if the group has ended.
  bool wait(int r) { return wait(r, group_.round); }

  void end() {
    header().ended.store(1);
    for (int r = 0; r < group_.size; r++) futex(rank(r).round, FUTEX_WAKE, 1 << 30, nullptr);
  }

 private:
  Header& header() const { return *reinterpret_cast<Header*>(group_.memory); }
  Rank& rank(int r) const { return reinterpret_cast<Rank*>(group_.memory + sizeof(Header))[r]; }

  // Rounds wrap around: at most one lies between two ranks.
  static bool reached(uint32_t announced, uint32_t round) { return static_cast<int32_t>(announced - round) >= 0; }

  bool wait(int r, uint32_t round) {
    if (r == group_.rank) return true;
    Rank& other = rank(r);
    if (reached(other.round.load(std::memory_order_acquire), round)) return !ended();
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    for (Clock::duration waited{}; waited < kYield; waited = Clock::now() - start) {
      for (int i = 0; i < kPauses; i++) {
        if (reached(other.round.load(std::memory_order_acquire), round)) return !ended();
        spin_pause();
      }
      if (waited > kSpin) sched_yield();
    }
    other.sleepers.fetch_add(1);
    for (uint32_t seen; !reached(seen = other.round.load(), round) && !ended();)
      futex(other.round, FUTEX_WAIT, seen, &kSleep);
    other.sleepers.fetch_sub(1);
    return !ended();
  }

  SharedGroup& group_;
};

// own = the sum of all ranks' elements in this round, in the order of ranks, rounded once.
template <typename T>
void sum(const Rounds& rounds, const SharedGroup& group, T* own, int64_t count) {
  constexpr int64_t kPiece = 256 * kLanes;
  for_each(count > kParallelElements, (count + kPiece - 1) / kPiece, [&](int64_t piece) {
    for (int64_t i = piece * kPiece; i < std::min(count, (piece + 1) * kPiece); i += kLanes) {
      Vec total = {};
      for (int r = 0; r < group.size; r++) {
        const T* from = r == group.rank ? own : reinterpret_cast<const T*>(rounds.slot(r));
        total += load_some(from + i, count - i);
      }
      store_some(total, own + i, count - i);
    }
  });
}

// Copy bytes `begin` … `end` of a rank's rows to their columns of the joined rows.
void copy_rows(const char* from, int64_t begin, int64_t end, int64_t row_bytes, char* to, int64_t stride) {
  while (begin < end) {
    const int64_t row = begin / row_bytes, column = begin % row_bytes;
    const int64_t count = std::min(end - begin, row_bytes - column);
    std::memcpy(to + row * stride + column, from, count);
    from += count, begin += count;
  }
}

}  // namespace

extern "C" {

int64_t folio_group_bytes(int size) { return sizeof(Header) + size * (sizeof(Rank) + 2 * kSlotBytes); }

// The collectives return false if the group has ended; results are undefined then.

// data [count] = its sum over all ranks, the same bits on each; dtype: 0 float32, 1 bfloat16, 2 float16.
int folio_all_reduce(SharedGroup* group, int dtype, void* data, int64_t count) {
  Rounds rounds(*group);
  bool done = true;
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int64_t kMost = kSlotBytes / sizeof(T);
    for (int64_t begin = 0; begin < count; begin += kMost) {
      T* const own = static_cast<T*>(data) + begin;
      const int64_t left = std::min(kMost, count - begin);
      if (!(done = rounds.begin())) return;
      std::memcpy(rounds.slot(group->rank), own, left * sizeof(T));
      rounds.announce();
      for (int r = 0; r < group->size; r++)
        if (!(done = rounds.wait(r))) return;
      sum(rounds, *group, own, left);
    }
  });
  return done;
}

// out [rows, all columns] = every rank's data [rows, row_bytes of the rank], side by side; null: only give the data.
int folio_gather(SharedGroup* group, const void* data, int64_t rows, const int64_t* row_bytes, void* out) {
  Rounds rounds(*group);
  int64_t stride = 0, most = 0;
  for (int r = 0; r < group->size; r++) stride += row_bytes[r], most = std::max(most, row_bytes[r]);
  for (int64_t begin = 0; begin < rows * most; begin += kSlotBytes) {
    if (!rounds.begin()) return false;
    const auto end = [&](int r) { return std::min(begin + kSlotBytes, rows * row_bytes[r]); };
    const char* own = static_cast<const char*>(data) + begin;
    if (begin < end(group->rank)) std::memcpy(rounds.slot(group->rank), own, end(group->rank) - begin);
    rounds.announce();
    char* to = static_cast<char*>(out);
    for (int r = 0; r < group->size && out; to += row_bytes[r++]) {
      if (!rounds.wait(r)) return false;
      copy_rows(r == group->rank ? own : rounds.slot(r), begin, end(r), row_bytes[r], to, stride);
    }
  }
  return !rounds.ended();
}

// data [num_bytes] = that of rank `source`.
int folio_broadcast(SharedGroup* group, void* data, int64_t num_bytes, int source) {
  Rounds rounds(*group);
  for (int64_t begin = 0; begin < num_bytes; begin += kSlotBytes) {
    char* const part = static_cast<char*>(data) + begin;
    const int64_t count = std::min(kSlotBytes, num_bytes - begin);
    if (!rounds.begin()) return false;
    if (group->rank == source) std::memcpy(rounds.slot(source), part, count);
    rounds.announce();
    if (!rounds.wait(source)) return false;
    if (group->rank != source) std::memcpy(part, rounds.slot(source), count);
  }
  return !rounds.ended();
}

// End the waits of all ranks, from any thread of any rank.
void folio_end_group(SharedGroup* group) { Rounds(*group).end(); }

}  // extern "C"
