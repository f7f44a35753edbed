#include "pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "fpmode.hpp"

namespace k3 {
namespace {

constexpr int kSpins = 500;  // about 20 microseconds: the gap between two kernels of one layer

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool::Scratch::~Scratch() { std::free(data_); }

void Pool::Scratch::reserve(int64_t floats) {
  if (floats <= floats_) return;
  const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
  void* fresh = std::aligned_alloc(64, bytes);
  if (fresh == nullptr) throw std::bad_alloc();
  std::free(data_);
  data_ = static_cast<float*>(fresh);
  floats_ = static_cast<int64_t>(bytes / sizeof(float));
}

Pool::Pool(int threads) : owner_(getpid()) {
  for (int i = 0; i < threads; ++i) scratch_.push_back(std::make_unique<Scratch>());
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { worker(i); });
}

Pool::~Pool() {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto& thread : workers_) {
    // The threads of a forked process stay with its parent: there is nobody to wait for.
    if (getpid() == owner_) {
      thread.join();
    } else {
      thread.detach();
    }
  }
}

void Pool::work(const Job& job, float* scratch) {
  const FloatMode mode;
  for (;;) {
    const int64_t begin = next_.fetch_add(job.grain, std::memory_order_relaxed);
    if (begin >= job.items) return;
    job.fn(job.args, begin, std::min(begin + job.grain, job.items), scratch);
  }
}

void Pool::run(const Job& job) {
  if (job.items <= 0) return;
  const bool alone = workers_.empty() || job.items <= job.grain || getpid() != owner_;
  scratch_[0]->reserve(job.scratch);
  if (alone) {
    const FloatMode mode;
    job.fn(job.args, 0, job.items, scratch_[0]->data());
    return;
  }
  for (auto& scratch : scratch_) scratch->reserve(job.scratch);
  next_.store(0);
  job_.store(&job);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  work(job, scratch_[0]->data());
  // From here no worker can enter; those inside finish their last item. One that never woke is not waited for.
  job_.store(nullptr);
  for (int spins = 0; inside_.load() != 0; ++spins) {
    if (spins < kSpins) {
      pause_briefly();
    } else {
      std::this_thread::yield();
    }
  }
}

void Pool::worker(int index) {
  uint32_t seen = 0;
  for (;;) {
    for (int spins = 0; spins < kSpins && epoch_.load() == seen; ++spins) pause_briefly();
    epoch_.wait(seen);
    seen = epoch_.load();
    if (stop_.load()) return;
    inside_.fetch_add(1);
    if (const Job* job = job_.load()) work(*job, scratch_[static_cast<size_t>(index)]->data());
    inside_.fetch_sub(1);
  }
}

}  // namespace k3
