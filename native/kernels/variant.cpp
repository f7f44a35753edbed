// The kernels for one instruction set: compiled once per variant with -DK3_VARIANT=<name> and that variant's flags.
//
// All code lies in an unnamed namespace and no standard header with inline functions is included, so nothing compiled
// with these flags can be picked by the linker for another variant. A NEON variant needs a vec_neon.inl and a line here.
#include <cstdint>

#if defined(K3_AVX2) || defined(K3_AVX512)
#include <immintrin.h>
#endif

#include "../table.hpp"

#define K3_INLINE inline __attribute__((always_inline))
#define K3_LAMBDA __attribute__((always_inline))
#define K3_UNROLL _Pragma("GCC unroll 16")
#define K3_NAME_(prefix, suffix) prefix##suffix
#define K3_NAME(prefix, suffix) K3_NAME_(prefix, suffix)
#define K3_TEXT_(name) #name
#define K3_TEXT(name) K3_TEXT_(name)

namespace k3 {
namespace K3_VARIANT {
namespace {

#if defined(K3_AVX512)
#include "vec_avx512.inl"
#elif defined(K3_AVX2)
#include "vec_avx2.inl"
#else
#include "vec_scalar.inl"
#endif

#include "math.inl"
#include "dot.inl"
#include "mxfp4.inl"
#ifdef K3_AVX2
#include "mxfp4_avx2.inl"
#else
#include "mxfp4_generic.inl"
#endif
#include "packed12.inl"
#include "matmul.inl"
#include "rows.inl"
#include "route.inl"
#include "kda.inl"
#include "mla.inl"
#include "bench.inl"

const Table kTable = {
    K3_TEXT(K3_VARIANT), kXTile,   pack,         matmul,     encode12, decode12,       elementwise,
    rms_norm,            residual_mix, short_conv, kda_gate, kda_recurrence, kda_output, mla,
    route,               expert_sum, argmax,     all_finite, matmul_scratch, mla_scratch, fma_loop, read_loop,
};

}  // namespace
}  // namespace K3_VARIANT

const Table* K3_NAME(K3_VARIANT, _table)() { return &K3_VARIANT::kTable; }

}  // namespace k3
