// Sixteen float32 lanes in portable C++. Compiled with the target's baseline flags: no vector extension is assumed.

struct F16 { float v[16]; };
struct I16 { int32_t v[16]; };
struct M16 { bool v[16]; };

#define K3_LANES for (int i = 0; i < 16; ++i)

K3_INLINE F16 set(float x) { F16 r; K3_LANES r.v[i] = x; return r; }
K3_INLINE F16 zero() { return set(0.0f); }
K3_INLINE F16 load(const float* p) { F16 r; K3_LANES r.v[i] = p[i]; return r; }
K3_INLINE F16 held(const F16& a) { return a; }
K3_INLINE F16 load_part(const float* p, int64_t n) { F16 r; K3_LANES r.v[i] = i < n ? p[i] : 0.0f; return r; }
K3_INLINE void store(float* p, const F16& a) { K3_LANES p[i] = a.v[i]; }
K3_INLINE void store_part(float* p, const F16& a, int64_t n) { K3_LANES if (i < n) p[i] = a.v[i]; }

K3_INLINE F16 add(const F16& a, const F16& b) { F16 r; K3_LANES r.v[i] = a.v[i] + b.v[i]; return r; }
K3_INLINE F16 sub(const F16& a, const F16& b) { F16 r; K3_LANES r.v[i] = a.v[i] - b.v[i]; return r; }
K3_INLINE F16 mul(const F16& a, const F16& b) { F16 r; K3_LANES r.v[i] = a.v[i] * b.v[i]; return r; }
K3_INLINE F16 div(const F16& a, const F16& b) { F16 r; K3_LANES r.v[i] = a.v[i] / b.v[i]; return r; }
K3_INLINE F16 fma(const F16& a, const F16& b, const F16& c) {
  F16 r;
  K3_LANES r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return r;
}

K3_INLINE M16 lt(const F16& a, const F16& b) { M16 r; K3_LANES r.v[i] = a.v[i] < b.v[i]; return r; }
K3_INLINE M16 not_le(const F16& a, const F16& b) { M16 r; K3_LANES r.v[i] = !(a.v[i] <= b.v[i]); return r; }
K3_INLINE F16 pick(const M16& m, const F16& yes, const F16& no) {
  F16 r;
  K3_LANES r.v[i] = m.v[i] ? yes.v[i] : no.v[i];
  return r;
}
K3_INLINE bool any(const M16& m) { bool r = false; K3_LANES r = r || m.v[i]; return r; }

K3_INLINE I16 bits(const F16& a) { I16 r; __builtin_memcpy(&r, &a, sizeof r); return r; }
K3_INLINE F16 from_bits(const I16& a) { F16 r; __builtin_memcpy(&r, &a, sizeof r); return r; }
K3_INLINE I16 iset(int32_t x) { I16 r; K3_LANES r.v[i] = x; return r; }
K3_INLINE I16 iadd(const I16& a, const I16& b) {
  I16 r;
  K3_LANES r.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i]));
  return r;
}
K3_INLINE I16 isub(const I16& a, const I16& b) {
  I16 r;
  K3_LANES r.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) - static_cast<uint32_t>(b.v[i]));
  return r;
}
K3_INLINE I16 iand(const I16& a, const I16& b) { I16 r; K3_LANES r.v[i] = a.v[i] & b.v[i]; return r; }
K3_INLINE I16 ior(const I16& a, const I16& b) { I16 r; K3_LANES r.v[i] = a.v[i] | b.v[i]; return r; }
template <int N> K3_INLINE I16 shl(const I16& a) {
  I16 r;
  K3_LANES r.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << N);
  return r;
}
template <int N> K3_INLINE I16 sar(const I16& a) { I16 r; K3_LANES r.v[i] = a.v[i] >> N; return r; }
K3_INLINE F16 to_float(const I16& a) { F16 r; K3_LANES r.v[i] = static_cast<float>(a.v[i]); return r; }

K3_INLINE float fold(F16 a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] + a.v[i + half];
  return a.v[0];
}

// Elements 0, 2, .. 30 and 1, 3, .. 31 of 32 consecutive ones.
K3_INLINE void pair(const float* p, F16& even, F16& odd) {
  K3_LANES { even.v[i] = p[2 * i]; odd.v[i] = p[2 * i + 1]; }
}
K3_INLINE float widen_one(uint16_t h) {
  const uint32_t word = static_cast<uint32_t>(h) << 16;
  float f;
  __builtin_memcpy(&f, &word, sizeof f);
  return f;
}

// A block of 32 bfloat16.
struct W32 { uint16_t v[32]; };
K3_INLINE W32 load_w32(const void* p) { W32 w; __builtin_memcpy(&w, p, sizeof w); return w; }
K3_INLINE void store_w32(void* p, const W32& w) { __builtin_memcpy(p, &w, sizeof w); }
K3_INLINE void pair_w32(const W32& w, F16& even, F16& odd) {
  K3_LANES { even.v[i] = widen_one(w.v[2 * i]); odd.v[i] = widen_one(w.v[2 * i + 1]); }
}
K3_INLINE F16 widen(const uint16_t* p) { F16 r; K3_LANES r.v[i] = widen_one(p[i]); return r; }
K3_INLINE void prefetch(const void*) {}

#undef K3_LANES

constexpr int kXTile = 4;
constexpr int kColumnVectors = 4;  // accumulators of a transposed product
constexpr int dot_rows(int) { return 1; }
