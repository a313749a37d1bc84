// Threads. Workers spin for some tens of microseconds after a task, since the next one usually follows at once, and
// then sleep. Tasks are taken one by one: a core that something else uses delays only the task it has.
// Processes that share a machine share its cores evenly while they compute: each round asks how many do so now.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// One byte for each process of this machine, 1 while it computes, in memory that all of them map.
class CoreShare {
 public:
  void follow(const uint64_t* busy, int64_t num_words, int num_cores) {
    num_words_ = num_words, num_cores_ = num_cores;
    busy_.store(busy, std::memory_order_release);
  }

  int part_of(int num_threads) const {
    const uint64_t* busy = busy_.load(std::memory_order_acquire);
    if (busy == nullptr || num_threads == 1) return num_threads;
    int num_busy = 0;
    for (int64_t i = 0; i < num_words_; i++) num_busy += __builtin_popcountll(__atomic_load_n(busy + i, __ATOMIC_RELAXED));
    return std::min(num_threads, std::max(1, num_cores_ / std::max(1, num_busy)));
  }

 private:
  std::atomic<const uint64_t*> busy_{nullptr};
  int64_t num_words_ = 0;
  int num_cores_ = 1;
};

CoreShare& core_share() {
  static CoreShare instance;
  return instance;
}

class Pool {
 public:
  typedef void (*Task)(const void* context, int64_t index);

  void run(Task task, const void* context, int64_t num_tasks, int num_threads) {
    num_threads = core_share().part_of(num_threads);
    if (num_threads <= 1 || num_tasks <= 1) {
      for (int64_t i = 0; i < num_tasks; i++) task(context, i);
      return;
    }
    for (; num_workers_ < num_threads - 1; num_workers_++) std::thread(&Pool::work, this, num_workers_).detach();
    const uint64_t round = round_.load() + 1;
    next_.store(round << 32 | kClosed);  // whoever still looks at the last round finds it over before it changes
    task_.store(task), context_.store(context), num_tasks_.store(num_tasks), num_active_.store(num_threads - 1);
    num_done_.store(0);
    next_.store(round << 32);
    round_.store(round);
    if (num_asleep_.load() > 0) round_.notify_all();
    take(round, task, context, num_tasks);
    // Every task is taken; wait for those that a worker has. A worker that never woke up is not waited for.
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < num_tasks; spins++)
      if (spins < 4096) relax(); else std::this_thread::yield();
  }

 private:
  void work(int which) {
    for (uint64_t seen = 0;;) {
      for (int spins = 0; round_.load(std::memory_order_acquire) == seen && spins < kSpins; spins++) relax();
      if (round_.load() == seen) {
        num_asleep_.fetch_add(1);
        round_.wait(seen);
        num_asleep_.fetch_sub(1);
      }
      seen = round_.load();
      if (which < num_active_.load()) take(seen, task_.load(), context_.load(), num_tasks_.load());
    }
  }

  // Takes tasks of one round until none is left or another round has begun.
  void take(uint64_t round, Task task, const void* context, int64_t num_tasks) {
    for (uint64_t ticket = next_.load();;) {
      const int64_t index = ticket & kClosed;
      if (ticket >> 32 != (round & kClosed) || index >= num_tasks) return;
      if (!next_.compare_exchange_weak(ticket, ticket + 1)) continue;
      task(context, index);
      num_done_.fetch_add(1, std::memory_order_release);
      ticket = next_.load();
    }
  }

  static constexpr int kSpins = 1500;
  static constexpr uint64_t kClosed = 0xffffffff;
  std::atomic<Task> task_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> num_tasks_{0}, num_done_{0};
  std::atomic<uint64_t> next_{kClosed}, round_{0};  // next_: the round in the upper half, the next task in the lower
  std::atomic<int> num_active_{0}, num_asleep_{0};
  int num_workers_ = 0;
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: its workers outlive every static
  return *instance;
}

template <typename Body>
void parallel(int64_t num_tasks, int num_threads, const Body& body) {
  pool().run([](const void* context, int64_t i) { (*static_cast<const Body*>(context))(i); }, &body, num_tasks,
             num_threads);
}

}  // namespace
