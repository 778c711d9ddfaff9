// The threads that compute: one set for all libraries and callers of a process.
//
// A caller works itself, and lends its work to those threads that are free: it waits for the ones that have begun, never
// for one that the system has not woken yet. Waiting threads spin for a while, because the next operation mostly comes
// within microseconds, and then sleep, because other processes need the processors, too.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

namespace folio {

constexpr int64_t kSpinNanoseconds = 60'000;  // twice what passes between two layers of a small model
constexpr int kMostThreads = 256;

// Tells the processor that this thread waits for another one's store.
inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until done() or the time is over; returns done().
template <typename Done>
inline bool spin_until(Done done) {
  const auto now = [] {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * int64_t(1'000'000'000) + at.tv_nsec;
  };
  const int64_t end = now() + kSpinNanoseconds;
  for (int spins = 1; !done(); spins++) {
    if (spins % 32 == 0 && now() > end) return done();
    spin_pause();
  }
  return true;
}

class Pool {
 public:
  typedef void (*Body)(void* argument, int thread);

  // The process's pool: GCC makes such an object unique among all libraries (STB_GNU_UNIQUE).
  static Pool& get() {
    static Pool* const pool = new Pool;  // never destroyed: its threads outlive `exit`
    return *pool;
  }

  // Calls body(argument, thread) in this thread as thread 0, and in up to `most_threads` - 1 others, each with another
  // number below `most_threads`. Returns when all calls have returned. If another caller has the threads, only this one
  // works.
  void run(Body body, void* argument, int most_threads) {
    most_threads = std::min(most_threads, kMostThreads);
    if (most_threads < 2 || taken_.exchange(true, std::memory_order_acquire)) return body(argument, 0);
    grow(most_threads - 1);
    body_ = body, argument_ = argument;
    places_.store(most_threads - 1, std::memory_order_release);
    round_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) futex(FUTEX_WAKE, most_threads - 1);
    body(argument, 0);
    // No thread begins from here on: places are counted down to 0, or taken away.
    places_.exchange(0, std::memory_order_seq_cst);
    while (busy_.load(std::memory_order_seq_cst))
      if (!spin_until([&] { return busy_.load(std::memory_order_acquire) == 0; })) sched_yield();
    taken_.store(false, std::memory_order_release);
  }

 private:
  Pool() {
    pthread_atfork(nullptr, nullptr, [] { get().forget(); });
  }

  // In a child of `fork`, which has this thread only.
  void forget() {
    num_threads_ = 0;
    sleepers_.store(0), places_.store(0), busy_.store(0), taken_.store(false);
  }

  void grow(int threads) {
    while (num_threads_ < threads) {
      sigset_t all, before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
      pthread_t thread;
      // From the present round on: the thread may come after this caller's work is over.
      struct Start {
        Pool* pool;
        uint32_t round;
      };
      Start* const start = new Start{this, round_.load(std::memory_order_relaxed)};
      const int failed = pthread_create(
          &thread, nullptr,
          [](void* argument) -> void* {
            const Start start = *static_cast<Start*>(argument);
            delete static_cast<Start*>(argument);
            start.pool->work(start.round);
            return nullptr;
          },
          start);
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      if (failed) {
        delete start;
        return;  // with fewer threads
      }
      pthread_setname_np(thread, "folio-team");
      pthread_detach(thread);
      num_threads_++;
    }
  }

  void work(uint32_t seen) {
    for (;;) {
      const auto called = [&] { return round_.load(std::memory_order_acquire) != seen; };
      if (!spin_until(called)) {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (!called()) futex(FUTEX_WAIT, seen);
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
      }
      seen = round_.load(std::memory_order_acquire);
      // `busy` first: a caller that finds it 0 after it has taken the places away has no thread in its work.
      busy_.fetch_add(1, std::memory_order_seq_cst);
      int places = places_.load(std::memory_order_seq_cst);
      while (places > 0 && !places_.compare_exchange_weak(places, places - 1, std::memory_order_acq_rel)) {
      }
      if (places > 0) body_(argument_, places);
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  long futex(int operation, uint32_t value) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&round_), operation | FUTEX_PRIVATE_FLAG, value, nullptr,
                   nullptr, 0);
  }

  std::atomic<bool> taken_{false};  // by a caller
  alignas(64) std::atomic<uint32_t> round_{0};  // number of the latest work
  alignas(64) std::atomic<int> places_{0};  // threads that may still begin the work
  std::atomic<int> busy_{0};  // threads that look for a place, or work
  std::atomic<int> sleepers_{0};
  Body body_ = nullptr;
  void* argument_ = nullptr;
  int num_threads_ = 0;
};

}  // namespace folio
