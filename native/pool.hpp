// A few persistent threads that share out the items of one job at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "table.hpp"

namespace k3 {

struct Job {
  RangeFn fn;
  const void* args;
  int64_t items;
  int64_t grain;         // items taken at once
  int64_t scratch = 0;   // floats of scratch per thread
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(scratch_.size()); }

  // Runs the job on the calling thread and, where it has more than one grain, on the workers. One caller at a time.
  void run(const Job& job);

 private:
  class Scratch {
   public:
    Scratch() = default;
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    void reserve(int64_t floats);
    float* data() const { return data_; }

   private:
    float* data_ = nullptr;
    int64_t floats_ = 0;
  };

  void worker(int index);
  void work(const Job& job, float* scratch);

  std::vector<std::unique_ptr<Scratch>> scratch_;  // one per thread, the caller's first
  std::vector<std::thread> workers_;
  std::atomic<const Job*> job_{nullptr};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> inside_{0};
  std::atomic<bool> stop_{false};
  int owner_ = 0;
};

}  // namespace k3
