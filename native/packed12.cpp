// Panels of 12-bit weights as a whole; their layout is described in kernels/packed12.inl.
#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "engine.hpp"

namespace k3 {
namespace {

constexpr int64_t kRaw = 64, kNumber = 4, kListed = kRaw + kNumber;
constexpr int64_t kMaxBlocks = std::numeric_limits<uint32_t>::max();
constexpr int64_t kCounted = 1 << 20;  // words of a counting item

[[noreturn]] void malformed(const std::string& what) {
  throw std::invalid_argument("A panel of 12-bit weights is malformed: " + what +
                              " Its bytes are damaged, or belong to a matrix of another shape.");
}

uint32_t number_at(const uint8_t* numbers, int64_t i) {
  uint32_t number;
  std::memcpy(&number, numbers + kNumber * i, sizeof number);
  return number;
}

void check_numbers(const uint8_t* numbers, int64_t listed, int64_t blocks) {
  bool good = true;
  for (int64_t i = 1; i < listed; ++i) good &= number_at(numbers, i - 1) < number_at(numbers, i);
  if (!good) malformed("the numbers of its listed blocks do not ascend.");
  if (listed > 0 && number_at(numbers, listed - 1) >= blocks)
    malformed("it lists block " + std::to_string(number_at(numbers, listed - 1)) + " and has " +
              std::to_string(blocks) + ".");
}

struct CountArgs {
  const uint16_t* bits;
  int64_t count;
  int64_t (*counts)[256];
};

// Four tables, so that a run of equal bytes doesn't wait for one counter.
void count_range(const void* p, int64_t begin, int64_t end, float*) {
  const auto& a = *static_cast<const CountArgs*>(p);
  for (int64_t item = begin; item < end; ++item) {
    const uint16_t* bits = a.bits + item * kCounted;
    const int64_t count = std::min(kCounted, a.count - item * kCounted);
    uint32_t part[4][256] = {};
    for (int64_t i = 0; i < count; ++i) ++part[i % 4][bits[i] >> 8];
    for (int b = 0; b < 256; ++b) a.counts[item][b] = int64_t{part[0][b]} + part[1][b] + part[2][b] + part[3][b];
  }
}

}  // namespace

Matrix Engine::packed12(const uint8_t* panel, int64_t bytes, const uint8_t* high_bytes, int64_t rows, int64_t cols) {
  if (rows < 0 || cols < 0 || cols % 32 != 0)
    malformed("its shape is " + std::to_string(rows) + " x " + std::to_string(cols) +
              ", and rows must be whole blocks of 32.");
  const int64_t row_blocks = cols / 32;
  if (row_blocks > 0 && rows > std::min(kMaxBlocks, bytes / 48) / row_blocks)
    malformed("it has " + std::to_string(bytes) + " bytes, too few for " + std::to_string(rows) + " x " +
              std::to_string(cols) + " weights.");
  const int64_t blocks = rows * row_blocks;
  const int64_t rest = bytes - packed12_body(rows, cols), listed = rest / kListed;
  if (rest % kListed != 0 || listed > blocks)
    malformed("behind its " + std::to_string(blocks) + " packed blocks lie " + std::to_string(rest) +
              " bytes, which is no list of blocks of " + std::to_string(kListed) + ".");
  const uint8_t* raw = panel + packed12_body(rows, cols);
  const uint8_t* numbers = raw + kRaw * listed;
  check_numbers(numbers, listed, blocks);
  return {Encoding::packed12, panel, nullptr, nullptr, nullptr, rows, cols, {high_bytes, raw, numbers, listed, 0}};
}

int64_t Engine::encode12(const uint16_t* bits, int64_t rows, int64_t cols, const uint8_t* high_bytes, uint8_t* panel) {
  const std::lock_guard lock(mutex_);
  const int64_t blocks = rows * (cols / 32);
  if (blocks > kMaxBlocks) throw std::invalid_argument("A panel holds fewer than 2^32 blocks of 32 weights.");
  listed_.resize(static_cast<size_t>(blocks));
  const EncodeArgs args{bits, cols, high_bytes, panel, listed_.data()};
  run(table_->encode12, &args, rows, static_cast<double>(cols) / 4);
  const int64_t count = std::count(listed_.begin(), listed_.end(), uint8_t{1});
  uint8_t* raw = panel + packed12_body(rows, cols);
  uint8_t* numbers = raw + kRaw * count;
  for (int64_t b = 0; b < blocks; ++b) {
    if (listed_[static_cast<size_t>(b)] == 0) continue;
    const auto number = static_cast<uint32_t>(b);
    std::memcpy(raw, bits + 32 * b, kRaw);
    std::memcpy(numbers, &number, kNumber);
    raw += kRaw;
    numbers += kNumber;
  }
  return numbers - panel;
}

void Engine::decode12(const Matrix& w, uint16_t* bits) {
  const std::lock_guard lock(mutex_);
  const DecodeArgs args{w, bits};
  run(table_->decode12, &args, w.rows, static_cast<double>(w.cols) / 8);
}

void Engine::count_high_bytes(const uint16_t* bits, int64_t count, int64_t* counts) {
  const std::lock_guard lock(mutex_);
  const int64_t items = (count + kCounted - 1) / kCounted;
  std::vector<int64_t> parts(static_cast<size_t>(items * 256));
  const CountArgs args{bits, count, reinterpret_cast<int64_t(*)[256]>(parts.data())};
  run(count_range, &args, items, static_cast<double>(std::min(count, kCounted)));
  std::fill(counts, counts + 256, 0);
  for (int64_t i = 0; i < items * 256; ++i) counts[i % 256] += parts[static_cast<size_t>(i)];
}

}  // namespace k3
