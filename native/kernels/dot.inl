// The one dot product: blocks of 32, sixteen accumulators, even elements before odd ones, a fixed fold.

inline int64_t at_most(int64_t n, int64_t limit) { return n < limit ? n : limit; }

// The last cols % 32 elements of a row, padded with zeros to a block.
K3_INLINE void pair_tail(const float* p, int64_t count, F16& even, F16& odd) {
  float block[32] = {};
  for (int64_t i = 0; i < count; ++i) block[i] = p[i];
  pair(block, even, odd);
}

template <class Load>
K3_INLINE float dot_of(int64_t n, Load load_pairs) {
  F16 acc = zero(), xe, xo, we, wo;
  const int64_t full = n / 32 * 32;
  for (int64_t i = 0; i < full; i += 32) {
    load_pairs(i, int64_t{32}, xe, xo, we, wo);
    acc = fma(xe, we, acc);
    acc = fma(xo, wo, acc);
  }
  if (full < n) {
    load_pairs(full, n - full, xe, xo, we, wo);
    acc = fma(xe, we, acc);
    acc = fma(xo, wo, acc);
  }
  return fold(acc);
}

K3_INLINE void pairs_at(const float* p, int64_t count, F16& even, F16& odd) {
  if (count == 32) {
    pair(p, even, odd);
  } else {
    pair_tail(p, count, even, odd);
  }
}

// dot(x, x)
inline float square_sum(const float* x, int64_t n) {
  return dot_of(n, [x](int64_t i, int64_t count, F16& xe, F16& xo, F16& we, F16& wo) K3_LAMBDA {
    pairs_at(x + i, count, xe, xo);
    we = xe;
    wo = xo;
  });
}

// dot(x, ones)
inline float plain_sum(const float* x, int64_t n) {
  return dot_of(n, [x](int64_t i, int64_t count, F16& xe, F16& xo, F16& we, F16& wo) K3_LAMBDA {
    pairs_at(x + i, count, xe, xo);
    we = wo = set(1.0f);
  });
}

// dot(x, a * b), the product rounded first
inline float product_dot(const float* x, const float* a, const float* b, int64_t n) {
  return dot_of(n, [=](int64_t i, int64_t count, F16& xe, F16& xo, F16& we, F16& wo) K3_LAMBDA {
    F16 be, bo;
    pairs_at(x + i, count, xe, xo);
    pairs_at(a + i, count, we, wo);
    pairs_at(b + i, count, be, bo);
    we = mul(we, be);
    wo = mul(wo, bo);
  });
}

// Rows of a weight matrix, a block of 32 at a time. `tail` copies the elements behind the last full block.
struct F32Row {
  const float* p;
  K3_INLINE void block(int64_t b, F16& even, F16& odd) const { pair(p + 32 * b, even, odd); }
  K3_INLINE void tail(int64_t from, int64_t count, float* to) const {
    for (int64_t i = 0; i < count; ++i) to[i] = p[from + i];
  }
};

struct Bf16Row {
  const uint16_t* p;
  K3_INLINE void block(int64_t b, F16& even, F16& odd) const {
    prefetch(p + 32 * b + 1024);  // 2 KB ahead
    pair_w32(load_w32(p + 32 * b), even, odd);
  }
  K3_INLINE void tail(int64_t from, int64_t count, float* to) const {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t word = static_cast<uint32_t>(p[from + i]) << 16;
      __builtin_memcpy(to + i, &word, sizeof word);
    }
  }
};

// An operand of R multiply-adds.
template <int R>
K3_INLINE F16 shared(F16 x) {
  if constexpr (R > 1) return held(x);
  return x;
}

// One block of R weight rows and T rows of x.
template <int R, int T>
K3_INLINE void add_block(F16 (*acc)[T], const F16* even, const F16* odd, const float* x) {
  K3_UNROLL
  for (int t = 0; t < T; ++t) {
    const F16 xe = shared<R>(load(x + 32 * t));
    K3_UNROLL
    for (int r = 0; r < R; ++r) acc[r][t] = fma(xe, even[r], acc[r][t]);
  }
  K3_UNROLL
  for (int t = 0; t < T; ++t) {
    const F16 xo = shared<R>(load(x + 32 * t + 16));
    K3_UNROLL
    for (int r = 0; r < R; ++r) acc[r][t] = fma(xo, odd[r], acc[r][t]);
  }
}

// R weight rows times T packed rows of x: sum[t][r]. Registers hold all accumulators.
template <class Row, int R, int T>
K3_INLINE void dot_tile(const Row* row, const float* x, int64_t cols, float (*sum)[R]) {
  F16 acc[R][T];
  K3_UNROLL
  for (int r = 0; r < R; ++r) {
    K3_UNROLL
    for (int t = 0; t < T; ++t) acc[r][t] = zero();
  }
  const int64_t blocks = cols / 32;
  for (int64_t b = 0; b < blocks; ++b) {
    const float* xb = x + b * 32 * T;
    if constexpr (T == 1) {
      const F16 xe = load(xb), xo = load(xb + 16);
      K3_UNROLL
      for (int r = 0; r < R; ++r) {
        F16 even, odd;
        row[r].block(b, even, odd);
        acc[r][0] = fma(xe, even, acc[r][0]);
        acc[r][0] = fma(xo, odd, acc[r][0]);
      }
    } else {
      F16 even[R], odd[R];
      K3_UNROLL
      for (int r = 0; r < R; ++r) row[r].block(b, even[r], odd[r]);
      add_block<R, T>(acc, even, odd, xb);
    }
  }
  if (const int64_t count = cols % 32; count != 0) {
    K3_UNROLL
    for (int r = 0; r < R; ++r) {
      float block[32] = {};
      row[r].tail(blocks * 32, count, block);
      F16 even, odd;
      pair(block, even, odd);
      K3_UNROLL
      for (int t = 0; t < T; ++t) {
        acc[r][t] = fma(load(x + (blocks * T + t) * 32), even, acc[r][t]);
        acc[r][t] = fma(load(x + (blocks * T + t) * 32 + 16), odd, acc[r][t]);
      }
    }
  }
  K3_UNROLL
  for (int r = 0; r < R; ++r) {
    K3_UNROLL
    for (int t = 0; t < T; ++t) sum[t][r] = fold(acc[r][t]);
  }
}

// Rows [begin, end) of `weights` times T packed rows of x; result (r, t) goes to out.data + t * stride + r.
template <class Weights, int R, int T>
void dot_rows_by(const Weights& weights, int64_t begin, int64_t end, const float* x, int64_t cols, OutRows out) {
  using Row = decltype(weights.row(0));
  // R rows far apart: each continues where the last one before it ended, a stream that the processor reads ahead.
  const int64_t apart = (end - begin) / R;
  for (int64_t i = begin; i < begin + apart; ++i) {
    Row row[R];
    float sum[T][R];
    for (int r = 0; r < R; ++r) row[r] = weights.row(i + r * apart);
    dot_tile<Row, R, T>(row, x, cols, sum);
    for (int t = 0; t < T; ++t)
      for (int r = 0; r < R; ++r) out.data[t * out.stride + i + r * apart] = sum[t][r];
  }
  int64_t r0 = begin + apart * R;
  for (; r0 < end; ++r0) {
    const Row row = weights.row(r0);
    float sum[T][1];
    dot_tile<Row, 1, T>(&row, x, cols, sum);
    for (int t = 0; t < T; ++t) out.data[t * out.stride + r0] = sum[t][0];
  }
}

template <class Weights>
void dot_rows_of(const Weights& weights, int64_t begin, int64_t end, const float* x, int64_t x_rows, int64_t cols,
                 OutRows out) {
  switch (x_rows) {
#define K3_CASE(T)                                                                                  \
  case T:                                                                                           \
    if constexpr (T <= kXTile) dot_rows_by<Weights, dot_rows(T), T>(weights, begin, end, x, cols, out); \
    break;
    K3_CASE(1) K3_CASE(2) K3_CASE(3) K3_CASE(4) K3_CASE(5) K3_CASE(6) K3_CASE(7) K3_CASE(8)
#undef K3_CASE
  }
}

struct F32Rows {
  const float* p;
  int64_t stride;
  K3_INLINE F32Row row(int64_t r) const { return {p + r * stride}; }
};

struct Bf16Rows {
  const uint16_t* p;
  int64_t stride;
  K3_INLINE Bf16Row row(int64_t r) const { return {p + r * stride}; }
};

// One row of x into place t of a tile of T rows.
K3_INLINE void pack_row(const float* x, int64_t cols, float* tile, int64_t t, int64_t rows_in_tile) {
  F16 even, odd;
  for (int64_t i = 0; i < cols; i += 32) {
    pairs_at(x + i, at_most(cols - i, 32), even, odd);
    float* to = tile + (i / 32 * rows_in_tile + t) * 32;
    store(to, even);
    store(to + 16, odd);
  }
}
