// Rounding to nearest, denormals kept, exceptions masked, for the life of the object; then what was there before.
//
// A library loaded with fast-math start-up code leaves flush-to-zero on for the threads that it runs in.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace k3 {

class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatMode() { _mm_setcsr(saved_); }

  static uint64_t read() { return _mm_getcsr(); }
  static void write(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatMode() : saved_(read()) { write(0); }
  ~FloatMode() { write(saved_); }

  static uint64_t read() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }

 private:
  uint64_t saved_;
#else
  FloatMode() : saved_(std::fegetround()) { std::fesetround(FE_TONEAREST); }
  ~FloatMode() { std::fesetround(saved_); }

  static uint64_t read() { return static_cast<uint64_t>(std::fegetround()); }
  static void write(uint64_t mode) { std::fesetround(static_cast<int>(mode)); }

 private:
  int saved_;
#endif

 public:
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;
};

}  // namespace k3
