// Sixteen float32 lanes in one AVX-512 register.

using F16 = __m512;
using I16 = __m512i;
using M16 = __mmask16;

K3_INLINE F16 set(float x) { return _mm512_set1_ps(x); }
K3_INLINE F16 zero() { return _mm512_setzero_ps(); }
K3_INLINE F16 load(const float* p) { return _mm512_loadu_ps(p); }
// A value that stays in its register: read from memory by each multiply-add it would cost a load every time.
K3_INLINE F16 held(F16 a) { asm("" : "+v"(a)); return a; }
K3_INLINE __mmask16 first(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xFFFFu : (1u << n) - 1u); }
K3_INLINE F16 load_part(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
K3_INLINE void store(float* p, F16 a) { _mm512_storeu_ps(p, a); }
K3_INLINE void store_part(float* p, F16 a, int64_t n) { _mm512_mask_storeu_ps(p, first(n), a); }

K3_INLINE F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
K3_INLINE F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
K3_INLINE F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
K3_INLINE F16 div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
K3_INLINE F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }

K3_INLINE M16 lt(F16 a, F16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
K3_INLINE M16 not_le(F16 a, F16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }
K3_INLINE F16 pick(M16 m, F16 yes, F16 no) { return _mm512_mask_blend_ps(m, no, yes); }
K3_INLINE bool any(M16 m) { return m != 0; }

K3_INLINE I16 bits(F16 a) { return _mm512_castps_si512(a); }
K3_INLINE F16 from_bits(I16 a) { return _mm512_castsi512_ps(a); }
K3_INLINE I16 iset(int32_t x) { return _mm512_set1_epi32(x); }
K3_INLINE I16 iadd(I16 a, I16 b) { return _mm512_add_epi32(a, b); }
K3_INLINE I16 isub(I16 a, I16 b) { return _mm512_sub_epi32(a, b); }
K3_INLINE I16 iand(I16 a, I16 b) { return _mm512_and_si512(a, b); }
K3_INLINE I16 ior(I16 a, I16 b) { return _mm512_or_si512(a, b); }
template <int N> K3_INLINE I16 shl(I16 a) { return _mm512_slli_epi32(a, N); }
template <int N> K3_INLINE I16 sar(I16 a) { return _mm512_srai_epi32(a, N); }
K3_INLINE F16 to_float(I16 a) { return _mm512_cvtepi32_ps(a); }

K3_INLINE float fold(F16 a) {
  const __m256 low = _mm512_castps512_ps256(a);
  const __m256 high = _mm512_extractf32x8_ps(a, 1);
  const __m256 a8 = _mm256_add_ps(low, high);
  const __m128 a4 = _mm_add_ps(_mm256_castps256_ps128(a8), _mm256_extractf128_ps(a8, 1));
  const __m128 a2 = _mm_add_ps(a4, _mm_movehl_ps(a4, a4));
  return _mm_cvtss_f32(_mm_add_ss(a2, _mm_shuffle_ps(a2, a2, 1)));
}

// Elements 0, 2, .. 30 and 1, 3, .. 31 of 32 consecutive ones.
K3_INLINE void pair(const float* p, F16& even, F16& odd) {
  const __m512i e = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i o = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  const __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16);
  even = _mm512_permutex2var_ps(a, e, b);
  odd = _mm512_permutex2var_ps(a, o, b);
}

// A block of 32 bfloat16.
using W32 = __m512i;
K3_INLINE W32 load_w32(const void* p) { return _mm512_loadu_si512(p); }
K3_INLINE void store_w32(void* p, W32 w) { _mm512_storeu_si512(p, w); }
K3_INLINE void pair_w32(W32 w, F16& even, F16& odd) {
  even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
K3_INLINE F16 widen(const uint16_t* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
K3_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

constexpr int kXTile = 8;
constexpr int kColumnVectors = 8;
// Thirty-two registers: one accumulator per (weight row, x row), two decoded halves per weight row.
constexpr int dot_rows(int x_rows) { return x_rows <= 5 ? 4 : 3; }
