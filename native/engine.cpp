#include "engine.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>

#include "cpu.hpp"
#include "fpmode.hpp"

namespace k3 {
namespace {

constexpr double kGrainNanoseconds = 8000;  // worth waking a thread for
constexpr int64_t kPackedRows = 64;         // rows of x packed at once; bounds the working memory
constexpr int64_t kScoreFloats = 512 * 1024;  // scores of a tile of queries: half of a second-level cache

const Table* table_named(const std::string& isa) {
  for (const Table* table : available_tables())
    if (isa == table->name) return table;
  throw std::invalid_argument("this machine does not run the instruction set " + isa);
}

constexpr float kCodes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

// Code times 2^(scale - 127), as OCP Microscaling defines it: exact, denormal or infinite where float32 says so.
float code_value(int scale, int code) {
  if (scale == 255) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = std::ldexp(kCodes[code % 8], scale - 127);
  return code < 8 ? magnitude : -magnitude;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct ReadArgs {
  const Table* table;
  const uint8_t* data;
  int64_t bytes, part;
  int streams;
  uint64_t* sums;
};

void read_range(const void* p, int64_t begin, int64_t end, float*) {
  const auto& a = *static_cast<const ReadArgs*>(p);
  for (int64_t i = begin; i < end; ++i)
    a.sums[i] = a.table->read_loop(a.data + i * a.part, std::min(a.part, a.bytes - i * a.part), a.streams);
}

}  // namespace

Engine::Engine(const std::string& isa, int threads)
    : table_(table_named(isa)), pool_(threads), code_table_(256 * 16 + 16), byte_table_(256 * 32) {
  const FloatMode mode;
  for (int scale = 0; scale < 256; ++scale) {
    for (int code = 0; code < 16; ++code) {
      const float value = code_value(scale, code);
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      byte_table_[static_cast<size_t>(scale * 32 + code)] = static_cast<uint8_t>(bits >> 16);
      byte_table_[static_cast<size_t>(scale * 32 + 16 + code)] = static_cast<uint8_t>(bits >> 24);
    }
  }
  Matrix aligned = mxfp4(nullptr, nullptr, 0, 0);
  float* table = const_cast<float*>(aligned.code_table);
  for (int i = 0; i < 256 * 16; ++i) table[i] = code_value(i / 16, i % 16);
}

Matrix Engine::mxfp4(const uint8_t* packed, const uint8_t* scales, int64_t rows, int64_t cols) const {
  const auto address = reinterpret_cast<uintptr_t>(code_table_.data());
  const auto* aligned = reinterpret_cast<const float*>((address + 63) / 64 * 64);
  return {Encoding::mxfp4, packed, scales, aligned, byte_table_.data(), rows, cols};
}

void Engine::run(RangeFn fn, const void* args, int64_t items, double nanoseconds, int64_t scratch, int64_t multiple) {
  const auto least = static_cast<int64_t>(kGrainNanoseconds / std::max(nanoseconds, 0.1));
  // Long runs of rows are read faster; a sixteenth of a thread's share still evens out the end.
  const int64_t wanted = std::max<int64_t>({least, items / (16 * pool_.threads()), 1});
  const int64_t grain = ceil_div(std::min(wanted, std::max<int64_t>(items, 1)), multiple) * multiple;
  pool_.run({fn, args, items, grain, scratch});
}

void Engine::matmul(Rows x, int64_t x_rows, const Matrix& w, OutRows out) {
  const std::lock_guard lock(mutex_);
  const int64_t width = ceil_div(w.cols, 32) * 32;
  const int64_t room = std::min(x_rows, kPackedRows) * width;
  if (static_cast<int64_t>(packed_.size()) < room + 16) packed_.resize(static_cast<size_t>(room + 16));
  const auto address = reinterpret_cast<uintptr_t>(packed_.data());
  auto* packed = reinterpret_cast<float*>((address + 63) / 64 * 64);
  for (int64_t t = 0; t < x_rows; t += kPackedRows) {
    const int64_t count = std::min(kPackedRows, x_rows - t);
    const PackArgs pack{{x.data + t * x.stride, x.stride}, count, w.cols, w.encoding, packed};
    run(table_->pack, &pack, ceil_div(count, table_->x_tile), static_cast<double>(table_->x_tile * width) / 8);
    const MatmulArgs args{packed, count, w, {out.data + t * out.stride, out.stride}};
    run(table_->matmul, &args, w.rows, static_cast<double>(count * w.cols) / 20, table_->matmul_scratch(args), 4);
  }
}

void Engine::elementwise(const ElementwiseArgs& args) {
  const std::lock_guard lock(mutex_);
  run(table_->elementwise, &args, args.rows * ceil_div(args.cols, kChunk),
      static_cast<double>(std::min(args.cols, kChunk)) * 2);
}

void Engine::rms_norm(const NormArgs& args, int64_t rows) {
  const std::lock_guard lock(mutex_);
  run(table_->rms_norm, &args, rows, static_cast<double>(args.cols) / 4);
}

void Engine::residual_mix(const MixArgs& args, int64_t rows) {
  const std::lock_guard lock(mutex_);
  run(table_->residual_mix, &args, rows, static_cast<double>(args.cols * args.count) / 4,
      ceil_div(args.count, 16) * 16);
}

void Engine::short_conv(const ConvArgs& args) {
  const std::lock_guard lock(mutex_);
  run(table_->short_conv, &args, ceil_div(args.cols, kConvChunk),
      static_cast<double>(std::min(args.cols, kConvChunk) * args.rows));
}

void Engine::kda_gate(const GateArgs& args, int64_t rows) {
  const std::lock_guard lock(mutex_);
  run(table_->kda_gate, &args, rows * args.heads, static_cast<double>(args.dim) * 2);
}

void Engine::kda_recurrence(const RecurrenceArgs& args, int64_t heads) {
  const std::lock_guard lock(mutex_);
  run(table_->kda_recurrence, &args, heads, static_cast<double>(args.dim * args.dim * args.rows) / 8,
      2 * ceil_div(args.dim, 16) * 16);
}

void Engine::kda_output(const HeadNormArgs& args, int64_t rows) {
  const std::lock_guard lock(mutex_);
  run(table_->kda_output, &args, rows * args.heads, static_cast<double>(args.dim) * 2);
}

void Engine::mla(MlaArgs args) {
  const std::lock_guard lock(mutex_);
  const int64_t positions = args.start + args.rows;
  const int64_t queries = std::clamp<int64_t>(kScoreFloats / positions, 1, table_->x_tile);
  args.row_tile = std::min(args.rows, queries);
  args.head_tile = std::min(args.heads, queries / args.row_tile);
  const int64_t row_blocks = ceil_div(args.rows, args.row_tile);
  const auto items = [&] { return ceil_div(args.heads, args.head_tile) * row_blocks; };
  while (args.head_tile > 1 && items() < 2 * pool_.threads()) args.head_tile /= 2;
  const double work = static_cast<double>(args.nope + args.v_dim + 2 * positions) * static_cast<double>(args.latent);
  run(table_->mla, &args, items(), work * static_cast<double>(args.head_tile * args.row_tile) / 20,
      table_->mla_scratch(args));
}

void Engine::route(const RouteArgs& args, int64_t rows) {
  const std::lock_guard lock(mutex_);
  run(table_->route, &args, rows, static_cast<double>(args.experts) * 4, ceil_div(args.experts, 16) * 16 + args.top_k);
}

void Engine::expert_sum(const ExpertSumArgs& args) {
  const std::lock_guard lock(mutex_);
  run(table_->expert_sum, &args, args.rows * ceil_div(args.cols, kChunk),
      static_cast<double>(std::min(args.cols, kChunk) * args.experts) / 8);
}

void Engine::argmax(const ArgmaxArgs& args, int64_t rows) {
  const std::lock_guard lock(mutex_);
  run(table_->argmax, &args, rows, static_cast<double>(args.cols) / 8);
}

void Engine::all_finite(const FiniteArgs& args, int64_t rows) {
  const std::lock_guard lock(mutex_);
  run(table_->all_finite, &args, rows, static_cast<double>(args.cols) / 8);
}

double Engine::fma_rate() {
  const std::lock_guard lock(mutex_);
  const FloatMode mode;
  int64_t rounds = 1000;
  for (;;) {
    const auto start = std::chrono::steady_clock::now();
    const double done = table_->fma_loop(rounds);
    const double seconds = seconds_since(start);
    if (seconds > 0.02) return done / seconds;
    rounds *= 2;
  }
}

double Engine::read_seconds(const uint8_t* data, int64_t bytes, int streams, bool all_threads) {
  const std::lock_guard lock(mutex_);
  const int64_t part = all_threads ? int64_t{32} << 20 : bytes;
  const int64_t items = ceil_div(bytes, part);
  std::vector<uint64_t> sums(static_cast<size_t>(items));
  const ReadArgs args{table_, data, bytes, part, streams, sums.data()};
  const auto start = std::chrono::steady_clock::now();
  pool_.run({read_range, &args, items, all_threads ? 1 : items});
  return seconds_since(start);
}

}  // namespace k3
