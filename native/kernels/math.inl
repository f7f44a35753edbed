// exp, log, tanh and the logistic function as fixed sequences of float32 operations, the same on every machine.
//
// Comparisons are written so that NaN fails them and flows through the arithmetic to the result.

constexpr float kLn2High = 0.693359375f;       // 355/512: its products with small integers are exact
constexpr float kLn2Low = -2.12194440e-4f;     // ln 2 - kLn2High
constexpr float kRoundMagic = 12582912.0f;     // 1.5 * 2^23: adding it rounds to an integer in the low bits
constexpr float kInfinity = __builtin_inff();

// 2^k for -126 <= k <= 127
K3_INLINE F16 power_of_two(I16 k) { return from_bits(shl<23>(iadd(k, iset(127)))); }

// e^x = 2^k (1 + r + r^2 q(r)), k = round(x / ln 2), |r| <= ln(2)/2. The polynomial is that of Cephes' expf. What is
// lost when r and 1 + r are rounded is carried along, so the last addition makes nearly all of the error. Multiplying
// by 2^k in two steps is exact, or rounds once where the result is denormal.
K3_INLINE F16 exp16(F16 x) {
  const F16 t = fma(x, set(1.44269504f), set(kRoundMagic));
  const F16 k = sub(t, set(kRoundMagic));
  const F16 high = fma(k, set(-kLn2High), x);
  const F16 low = mul(k, set(-kLn2Low));
  const F16 r = add(high, low);
  const F16 r_rest = sub(low, sub(r, high));
  F16 q = set(1.9875691500e-4f);
  q = fma(q, r, set(1.3981999507e-3f));
  q = fma(q, r, set(8.3334519073e-3f));
  q = fma(q, r, set(4.1665795894e-2f));
  q = fma(q, r, set(1.6666665459e-1f));
  q = fma(q, r, set(5.0000001201e-1f));
  const F16 tail = fma(mul(r, r), q, r_rest);
  const F16 sum = add(set(1.0f), r);
  const F16 sum_rest = sub(r, sub(sum, set(1.0f)));
  const F16 p = add(sum, add(sum_rest, tail));
  const I16 exponent = isub(bits(t), bits(set(kRoundMagic)));
  const I16 half = sar<1>(exponent);
  const F16 y = mul(mul(p, power_of_two(half)), power_of_two(isub(exponent, half)));
  const F16 capped = pick(lt(set(88.8f), x), set(kInfinity), y);
  return pick(lt(x, set(-104.0f)), zero(), capped);
}

K3_INLINE F16 sigmoid16(F16 x) {
  return div(set(1.0f), add(set(1.0f), exp16(mul(x, set(-1.0f)))));
}

// Near zero x + x^3 P(x^2) (Cephes' tanhf), elsewhere 1 - 2 / (e^2|x| + 1); the sign is copied from x.
K3_INLINE F16 tanh16(F16 x) {
  const I16 sign = iand(bits(x), iset(INT32_MIN));
  const F16 a = from_bits(iand(bits(x), iset(INT32_MAX)));
  const F16 z = mul(a, a);
  F16 p = set(-5.70498872745e-3f);
  p = fma(p, z, set(2.06390887954e-2f));
  p = fma(p, z, set(-5.37397155531e-2f));
  p = fma(p, z, set(1.33314422036e-1f));
  p = fma(p, z, set(-3.33332819422e-1f));
  const F16 small = fma(mul(p, z), a, a);
  const F16 e = exp16(add(a, a));
  const F16 large = sub(set(1.0f), div(set(2.0f), add(e, set(1.0f))));
  return from_bits(ior(bits(pick(lt(a, set(0.625f)), small, large)), sign));
}

// ln x = k ln 2 + ln(1 + f), 1/sqrt 2 <= 1 + f < sqrt 2 (Cephes' logf). Denormals are scaled into the normal range.
K3_INLINE F16 log16(F16 x) {
  const M16 tiny = lt(x, set(1.17549435e-38f));
  const F16 scaled = pick(tiny, mul(x, set(33554432.0f)), x);  // 2^25
  // Subtracting the bits of sqrt(1/2) makes the exponent field count from there.
  const I16 offset = isub(bits(scaled), iset(0x3F3504F3));
  const I16 exponent = sar<23>(offset);
  const F16 m = from_bits(isub(bits(scaled), shl<23>(exponent)));
  const F16 k = sub(to_float(exponent), pick(tiny, set(25.0f), zero()));
  const F16 f = sub(m, set(1.0f));
  const F16 z = mul(f, f);
  F16 p = set(7.0376836292e-2f);
  p = fma(p, f, set(-1.1514610310e-1f));
  p = fma(p, f, set(1.1676998740e-1f));
  p = fma(p, f, set(-1.2420140846e-1f));
  p = fma(p, f, set(1.4249322787e-1f));
  p = fma(p, f, set(-1.6668057665e-1f));
  p = fma(p, f, set(2.0000714765e-1f));
  p = fma(p, f, set(-2.4999993993e-1f));
  p = fma(p, f, set(3.3333331174e-1f));
  F16 y = mul(mul(p, z), f);
  y = fma(k, set(kLn2Low), y);
  y = fma(z, set(-0.5f), y);
  y = fma(k, set(kLn2High), add(f, y));
  y = pick(lt(zero(), x), y, set(-kInfinity));
  y = pick(lt(x, zero()), set(__builtin_nanf("")), y);
  return pick(not_le(x, set(3.40282347e38f)), add(x, x), y);  // infinity and NaN stay what they are
}

K3_INLINE float exp1(float x) {
  float lanes[16];
  store(lanes, exp16(set(x)));
  return lanes[0];
}
K3_INLINE float root(float x) { return __builtin_sqrtf(x); }
