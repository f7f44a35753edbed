// Multi-head latent attention in its absorbed form.
//
// A tile of queries (some heads times some rows) shares each pass over the cache; every query's numbers come out as if
// it were alone.

constexpr int64_t kPositionBlock = 64;  // cache rows (2.3 KB each) that stay close while their columns are walked

constexpr int transposed_vectors(int queries) {
  return kXTile == 8 ? (queries == 1 ? 8 : queries == 2 ? 4 : 2) : (queries == 1 ? 4 : queries == 2 ? 2 : 1);
}

K3_INLINE F16 load_weights(const float* p, int64_t n) { return load_some(p, n); }
K3_INLINE F16 load_weights(const uint16_t* p, int64_t n) {
  if (n == 16) return widen(p);
  uint16_t lanes[16] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return widen(lanes);
}

// acc[t][c] = fma(a[t][i], m[i][c], acc[t][c]) for i ascending in [begin, end), V vectors of columns, the last `count`.
template <int T, int V, class W>
K3_INLINE void transposed_block(const W* m, int64_t m_stride, Rows a, int64_t begin, int64_t end, OutRows acc,
                                int64_t c, int64_t count) {
  F16 sum[T][V];
  K3_UNROLL
  for (int t = 0; t < T; ++t) {
    K3_UNROLL
    for (int v = 0; v < V; ++v) sum[t][v] = load_some(acc.data + t * acc.stride + c + 16 * v, v + 1 < V ? 16 : count);
  }
  for (int64_t i = begin; i < end; ++i) {
    F16 w[V];
    K3_UNROLL
    for (int v = 0; v < V; ++v) w[v] = load_weights(m + i * m_stride + c + 16 * v, v + 1 < V ? 16 : count);
    K3_UNROLL
    for (int t = 0; t < T; ++t) {
      const F16 x = set(a.data[t * a.stride + i]);
      K3_UNROLL
      for (int v = 0; v < V; ++v) sum[t][v] = fma(x, w[v], sum[t][v]);
    }
  }
  K3_UNROLL
  for (int t = 0; t < T; ++t) {
    K3_UNROLL
    for (int v = 0; v < V; ++v) store_some(acc.data + t * acc.stride + c + 16 * v, sum[t][v], v + 1 < V ? 16 : count);
  }
}

template <int T, class W>
void transposed_by(const W* m, int64_t m_stride, Rows a, int64_t begin, int64_t end, OutRows acc, int64_t cols) {
  constexpr int V = transposed_vectors(T);
  int64_t c = 0;
  for (; c + 16 * V <= cols; c += 16 * V) transposed_block<T, V>(m, m_stride, a, begin, end, acc, c, 16);
  for (; c < cols; c += 16) transposed_block<T, 1>(m, m_stride, a, begin, end, acc, c, at_most(cols - c, 16));
}

template <class W>
void transposed(const W* m, int64_t m_stride, Rows a, int64_t rows, int64_t begin, int64_t end, OutRows acc,
                int64_t cols) {
  switch (rows) {
#define K3_CASE(T)                                                                                      \
  case T:                                                                                               \
    if constexpr (T <= kXTile) transposed_by<T>(m, m_stride, a, begin, end, acc, cols);                 \
    break;
    K3_CASE(1) K3_CASE(2) K3_CASE(3) K3_CASE(4) K3_CASE(5) K3_CASE(6) K3_CASE(7) K3_CASE(8)
#undef K3_CASE
  }
}

inline int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Where a tile's numbers lie in the scratch. Strides are in floats; a query is a row of each.
struct MlaScratch {
  OutRows query;    // latent and rope part, [queries, latent + rope]
  float* packed;    // the same, de-interleaved
  OutRows score;    // [queries, positions]
  OutRows context;  // [queries, latent]
  uint16_t* words;  // [nope, latent]: W_k of a head, where kv_b is stored in 12 bits
  int64_t floats;

  MlaScratch(const MlaArgs& a, int64_t queries, float* base) {
    const int64_t width = up_to(a.latent + a.rope, 32), positions = up_to(a.start + a.rows, 32);
    const int64_t latent = up_to(a.latent, 32);
    query = {base, width};
    packed = base + queries * width;
    score = {packed + queries * width, positions};
    context = {score.data + queries * positions, latent};
    words = reinterpret_cast<uint16_t*>(context.data + queries * latent);
    floats = queries * (2 * width + positions + latent);
    if (a.kv_b.encoding == Encoding::packed12) floats += a.nope * a.latent / 2;
  }
};

int64_t mla_scratch(const MlaArgs& a) {
  return MlaScratch(a, a.head_tile * a.row_tile, nullptr).floats;
}

// The rows of kv_b that belong to a head, from `row` of its part on.
inline Matrix head_rows(const MlaArgs& a, int64_t head, int64_t row, int64_t count) {
  return rows_from(a.kv_b, head * (a.nope + a.v_dim) + row, count);
}

void mla_queries(const MlaArgs& a, int64_t head, int64_t t0, int64_t rows, OutRows query, uint16_t* words) {
  const Rows q{a.q.data + t0 * a.q.stride + head * (a.nope + a.rope), a.q.stride};
  for (int64_t t = 0; t < rows; ++t) {
    float* to = query.data + t * query.stride;
    for (int64_t c = 0; c < a.latent; ++c) to[c] = 0.0f;
    for (int64_t c = 0; c < a.rope; ++c) to[a.latent + c] = q.data[t * q.stride + a.nope + c];
  }
  Matrix w = head_rows(a, head, 0, a.nope);
  if (w.encoding == Encoding::packed12) w = unpacked(w, words);
  if (w.encoding == Encoding::f32) {
    transposed(static_cast<const float*>(w.data), a.latent, q, rows, 0, a.nope, query, a.latent);
  } else {
    transposed(static_cast<const uint16_t*>(w.data), a.latent, q, rows, 0, a.nope, query, a.latent);
  }
}

// Contexts of queries whose attended lengths are length[0..queries).
void mla_contexts(const MlaArgs& a, OutRows score, OutRows context, const int64_t* length, int64_t queries) {
  int64_t shared = length[0];
  for (int64_t i = 1; i < queries; ++i) shared = at_most(shared, length[i]);
  const auto read_only = [](OutRows r) K3_LAMBDA { return Rows{r.data, r.stride}; };
  for (int64_t p = 0; p < shared; p += kPositionBlock)
    transposed(a.cache.data, a.cache.stride, read_only(score), queries, p, at_most(p + kPositionBlock, shared),
               context, a.latent);
  for (int64_t i = 0; i < queries; ++i) {
    const OutRows one_score{score.data + i * score.stride, score.stride};
    const OutRows one{context.data + i * context.stride, context.stride};
    transposed(a.cache.data, a.cache.stride, read_only(one_score), 1, shared, length[i], one, a.latent);
  }
}

// Softmax weights without their divisor, in place; returns the divisor.
float mla_weights(const MlaArgs& a, float* score, int64_t length) {
  const F16 scale = set(a.scale);
  map_columns(score, score, 0, length, [=](F16 s) K3_LAMBDA { return mul(s, scale); });
  exp_shifted(score, length, greatest(score, length));
  return plain_sum(score, length);
}

void mla_tile(const MlaArgs& a, int64_t h0, int64_t heads, int64_t t0, int64_t rows, float* scratch) {
  const int64_t queries = heads * rows;
  const MlaScratch s(a, queries, scratch);
  for (int64_t h = 0; h < heads; ++h)
    mla_queries(a, h0 + h, t0, rows, {s.query.data + h * rows * s.query.stride, s.query.stride}, s.words);
  const int64_t width = a.latent + a.rope;
  for (int64_t i = 0; i < queries; ++i) pack_row(s.query.data + i * s.query.stride, width, s.packed, i, queries);
  const F32Rows cache{a.cache.data, a.cache.stride};
  dot_rows_of(cache, 0, a.start + t0 + rows, s.packed, queries, width, s.score);

  int64_t length[kMaxXTile];
  float divisor[kMaxXTile];
  for (int64_t i = 0; i < queries; ++i) {
    length[i] = a.start + t0 + i % rows + 1;
    divisor[i] = mla_weights(a, s.score.data + i * s.score.stride, length[i]);
    float* context = s.context.data + i * s.context.stride;
    for (int64_t c = 0; c < a.latent; ++c) context[c] = 0.0f;
  }
  mla_contexts(a, s.score, s.context, length, queries);
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < rows; ++t) {
      float* context = s.context.data + (h * rows + t) * s.context.stride;
      const F16 z = set(divisor[h * rows + t]);
      map_columns(context, context, 0, a.latent, [=](F16 c) K3_LAMBDA { return div(c, z); });
      pack_row(context, a.latent, s.packed, t, rows);
    }
    multiply_rows(head_rows(a, h0 + h, a.nope, a.v_dim), 0, a.v_dim, s.packed, rows,
                  {a.out.data + t0 * a.out.stride + (h0 + h) * a.v_dim, a.out.stride});
  }
}

void mla(const void* p, int64_t begin, int64_t end, float* scratch) {
  const auto& a = *static_cast<const MlaArgs*>(p);
  const int64_t row_blocks = (a.rows + a.row_tile - 1) / a.row_tile;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t h0 = item / row_blocks * a.head_tile, t0 = item % row_blocks * a.row_tile;
    mla_tile(a, h0, at_most(a.head_tile, a.heads - h0), t0, at_most(a.row_tile, a.rows - t0), scratch);
  }
}
