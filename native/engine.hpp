// One set of kernels with its threads, look-up tables and working memory. Calls are serialised.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "pool.hpp"
#include "table.hpp"

namespace k3 {

constexpr int64_t packed12_body(int64_t rows, int64_t cols) { return rows * (cols / 32) * 48; }
constexpr int64_t packed12_limit(int64_t rows, int64_t cols) { return rows * (cols / 32) * (48 + 64 + 4); }

class Engine {
 public:
  Engine(const std::string& isa, int threads);

  const char* isa() const { return table_->name; }
  int threads() const { return pool_.threads(); }

  // Fills in the tables of an MXFP4 matrix.
  Matrix mxfp4(const uint8_t* packed, const uint8_t* scales, int64_t rows, int64_t cols) const;

  // A matrix of 12-bit weights from a panel's bytes; throws std::invalid_argument where they cannot be one.
  static Matrix packed12(const uint8_t* panel, int64_t bytes, const uint8_t* high_bytes, int64_t rows, int64_t cols);
  // Writes a panel of at most packed12_limit(rows, cols) bytes and returns how many.
  int64_t encode12(const uint16_t* bits, int64_t rows, int64_t cols, const uint8_t* high_bytes, uint8_t* panel);
  void decode12(const Matrix& w, uint16_t* bits);
  // How often each high byte occurs in words of 16 bits.
  void count_high_bytes(const uint16_t* bits, int64_t count, int64_t* counts);

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
  std::vector<uint8_t> listed_;
};

}  // namespace k3
