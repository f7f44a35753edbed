// Sixteen float32 lanes in two AVX2 registers: lanes 0..7 and 8..15.

struct F16 { __m256 lo, hi; };
struct I16 { __m256i lo, hi; };
struct M16 { __m256 lo, hi; };

K3_INLINE F16 set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
K3_INLINE F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
K3_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
// A value that stays in its registers: read from memory by each multiply-add it would cost a load every time.
K3_INLINE F16 held(F16 a) { asm("" : "+x"(a.lo), "+x"(a.hi)); return a; }
K3_INLINE __m256i first(int64_t n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
}
K3_INLINE F16 load_part(const float* p, int64_t n) {
  const __m256 lo = _mm256_maskload_ps(p, first(n));
  return {lo, n > 8 ? _mm256_maskload_ps(p + 8, first(n - 8)) : _mm256_setzero_ps()};
}
K3_INLINE void store(float* p, F16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
K3_INLINE void store_part(float* p, F16 a, int64_t n) {
  _mm256_maskstore_ps(p, first(n), a.lo);
  if (n > 8) _mm256_maskstore_ps(p + 8, first(n - 8), a.hi);
}

K3_INLINE F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
K3_INLINE F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
K3_INLINE F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
K3_INLINE F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
K3_INLINE F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

K3_INLINE M16 lt(F16 a, F16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
K3_INLINE M16 not_le(F16 a, F16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_NLE_UQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_NLE_UQ)};
}
K3_INLINE F16 pick(M16 m, F16 yes, F16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}
K3_INLINE bool any(M16 m) { return _mm256_movemask_ps(_mm256_or_ps(m.lo, m.hi)) != 0; }

K3_INLINE I16 bits(F16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
K3_INLINE F16 from_bits(I16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
K3_INLINE I16 iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
K3_INLINE I16 iadd(I16 a, I16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
K3_INLINE I16 isub(I16 a, I16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
K3_INLINE I16 iand(I16 a, I16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
K3_INLINE I16 ior(I16 a, I16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int N> K3_INLINE I16 shl(I16 a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }
template <int N> K3_INLINE I16 sar(I16 a) { return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)}; }
K3_INLINE F16 to_float(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

K3_INLINE float fold_halves(__m256 a8) {
  const __m128 a4 = _mm_add_ps(_mm256_castps256_ps128(a8), _mm256_extractf128_ps(a8, 1));
  const __m128 a2 = _mm_add_ps(a4, _mm_movehl_ps(a4, a4));
  return _mm_cvtss_f32(_mm_add_ss(a2, _mm_shuffle_ps(a2, a2, 1)));
}
K3_INLINE float fold(F16 a) { return fold_halves(_mm256_add_ps(a.lo, a.hi)); }

// Elements 0, 2, .. 30 and 1, 3, .. 31 of 32 consecutive ones.
K3_INLINE void pair8(const float* p, __m256& even, __m256& odd) {
  const __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8);
  const __m256d e = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88));
  const __m256d o = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xDD));
  even = _mm256_castpd_ps(_mm256_permute4x64_pd(e, 0xD8));
  odd = _mm256_castpd_ps(_mm256_permute4x64_pd(o, 0xD8));
}
K3_INLINE void pair(const float* p, F16& even, F16& odd) {
  pair8(p, even.lo, odd.lo);
  pair8(p + 16, even.hi, odd.hi);
}

// A block of 32 bfloat16.
using W32 = I16;
K3_INLINE W32 load_w32(const void* p) {
  const auto* half = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(half), _mm256_loadu_si256(half + 1)};
}
K3_INLINE void store_w32(void* p, W32 w) {
  auto* half = static_cast<__m256i*>(p);
  _mm256_storeu_si256(half, w.lo);
  _mm256_storeu_si256(half + 1, w.hi);
}
K3_INLINE void pair_w32(W32 w, F16& even, F16& odd) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(w.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w.hi, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(w.lo, high)), _mm256_castsi256_ps(_mm256_and_si256(w.hi, high))};
}
K3_INLINE __m256 widen8(const uint16_t* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
K3_INLINE F16 widen(const uint16_t* p) { return {widen8(p), widen8(p + 8)}; }
K3_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

constexpr int kXTile = 4;
constexpr int kColumnVectors = 4;
// Sixteen registers: accumulators take two per (weight row, x row).
constexpr int dot_rows(int x_rows) { return x_rows == 1 ? 4 : x_rows == 2 ? 2 : 1; }
