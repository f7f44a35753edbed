// One set of kernels with its threads, look-up tables and working memory. Calls are serialised.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "pool.hpp"
#include "table.hpp"

namespace k3 {

class Engine {
 public:
  Engine(const std::string& isa, int threads);

  const char* isa() const { return table_->name; }
  int threads() const { return pool_.threads(); }

  // Fills in the tables of an MXFP4 matrix.
  Matrix mxfp4(const uint8_t* packed, const uint8_t* scales, int64_t rows, int64_t cols) const;

  void matmul(Rows x, int64_t x_rows, const Matrix& w, OutRows out);
  void elementwise(const ElementwiseArgs& args);
  void rms_norm(const NormArgs& args, int64_t rows);
  void residual_mix(const MixArgs& args, int64_t rows);
  void short_conv(const ConvArgs& args);
  void kda_gate(const GateArgs& args, int64_t rows);
  void kda_recurrence(const RecurrenceArgs& args, int64_t heads);
  void kda_output(const HeadNormArgs& args, int64_t rows);
  void mla(MlaArgs args);
  void route(const RouteArgs& args, int64_t rows);
  void expert_sum(const ExpertSumArgs& args);
  void argmax(const ArgmaxArgs& args, int64_t rows);
  void all_finite(const FiniteArgs& args, int64_t rows);

  double fma_rate();                                                             // per second, this thread
  double read_seconds(const uint8_t* data, int64_t bytes, int streams, bool all_threads);

 private:
  // `nanoseconds` is a rough cost of one item: small jobs stay on the calling thread.
  void run(RangeFn fn, const void* args, int64_t items, double nanoseconds, int64_t scratch = 0, int64_t multiple = 1);

  const Table* table_;
  Pool pool_;
  std::mutex mutex_;
  std::vector<float> packed_;
  std::vector<float> code_table_;
  std::vector<uint8_t> byte_table_;
};

}  // namespace k3
