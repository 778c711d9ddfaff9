// Sharing out the items of several steps among the threads of the pool.
//
// A thread takes the items of its own range one by one, then those that are left of other ranges, from their ends: the
// owner of a range has prefetched its next item. A step is over when all of its items are done; threads that have none
// of them are not waited for. So a thread that the system has suspended, or not woken yet, delays the others by one item
// at most, where a barrier would wait until it runs.
#pragma once

#include <omp.h>

#include <atomic>
#include <cassert>
#include <cstdint>
#include <utility>
#include <vector>

#include "pool.h"

namespace folio {

// Of a step, the items done; of a range, those taken: from the front by its owner, in the lower half, and from the end.
struct alignas(64) Counter {
  std::atomic<uint64_t> value{0};
};

// One thread's view of the steps; all threads call `each` with the same counts in the same order.
class Team {
 public:
  // counters: (num_threads + 1) for each step, zero, and never used again: a thread that comes late passes all steps.
  Team(Counter* counters, int64_t most_steps, int thread, int num_threads)
      : counters_(counters), steps_left_(most_steps), thread_(thread), num_threads_(num_threads) {}

  // Calls item(i) for i in 0 … count - 1, in any thread; returns when all calls have returned, and what they wrote can
  // be read: the additions to `done` are one release sequence.
  template <typename Item>
  void each(int64_t count, Item item) {
    assert(steps_left_ > 0);  // else the counters are other memory
    steps_left_--;
    if (num_threads_ == 1) {
      for (int64_t i = 0; i < count; i++) item(i);
      return;
    }
    std::atomic<uint64_t>& done = counters_->value;
    Counter* const ranges = counters_ + 1;
    counters_ += num_threads_ + 1;
    for (int turn = 0; turn < num_threads_; turn++) {
      const int owner = (thread_ + turn) % num_threads_;
      const int64_t begin = owner * count / num_threads_, size = (owner + 1) * count / num_threads_ - begin;
      std::atomic<uint64_t>& taken = ranges[owner].value;
      const auto any_left = [size](uint64_t taken) { return int64_t(uint32_t(taken)) + int64_t(taken >> 32) < size; };
      uint64_t calls = 0;
      while (any_left(taken.load(std::memory_order_relaxed))) {
        const uint64_t before = taken.fetch_add(turn ? uint64_t(1) << 32 : 1, std::memory_order_relaxed);
        if (!any_left(before)) break;
        item(turn ? begin + size - 1 - int64_t(before >> 32) : begin + int64_t(uint32_t(before)));
        calls++;
      }
      if (calls) done.fetch_add(calls, std::memory_order_release);
    }
    const auto all_done = [&] { return done.load(std::memory_order_acquire) >= uint64_t(count); };
    while (!all_done())
      if (!spin_until(all_done)) sched_yield();
  }

  // The end of the counters that were used.
  Counter* end() const { return counters_; }

 private:
  Counter* counters_;  // of the next step
  int64_t steps_left_;
  int thread_, num_threads_;
};

// Calls body(team) in several threads, as many as torch uses, or only in this one. most_steps: calls of `each` that a
// thread makes at most.
template <typename Body>
void in_team(bool parallel, int64_t most_steps, Body body) {
  const int most_threads = parallel ? omp_get_max_threads() : 1;
  if (most_threads == 1) {
    Team team(nullptr, most_steps, 0, 1);
    body(team);
    return;
  }
  // Kept between calls, all zero: fresh memory for a whole model's steps costs a page fault every 4 KiB.
  static thread_local std::vector<Counter> kept;
  std::vector<Counter> counters = std::move(kept);
  const size_t needed = most_steps * (most_threads + 1);
  if (counters.size() < needed) counters = std::vector<Counter>(needed);
  Counter* used = nullptr;
  const auto run = [&](int thread) {
    Team team(counters.data(), most_steps, thread, most_threads);
    body(team);
    if (thread == 0) used = team.end();
  };
  Pool::get().run([](void* argument, int thread) { (*static_cast<decltype(run)*>(argument))(thread); },
                  const_cast<void*>(static_cast<const void*>(&run)), most_threads);
  for (Counter* counter = counters.data(); counter < used; counter++) counter->value.store(0, std::memory_order_relaxed);
  kept = std::move(counters);
}

// Calls item(i) for i in 0 … count - 1, each once, in several threads or only in this one.
template <typename Item>
void for_each(bool parallel, int64_t count, Item item) {
  in_team(parallel, 1, [&](Team& team) { team.each(count, item); });
}

}  // namespace folio
