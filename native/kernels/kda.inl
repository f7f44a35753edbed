// Kimi delta attention: convolution, gate, recurrence, output.

K3_INLINE F16 silu16(F16 a) { return mul(a, sigmoid16(a)); }

// The inputs of a channel are its tail, oldest first, then the rows of x.
void short_conv(const void* p, int64_t begin, int64_t end, float*) {
  const auto& a = *static_cast<const ConvArgs*>(p);
  const int64_t kept = a.width - 1;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t c0 = item * kConvChunk, c1 = at_most(c0 + kConvChunk, a.cols);
    for_columns(c0, c1, [=, &a](int64_t c, int64_t n) K3_LAMBDA {
      const auto input = [=, &a](int64_t i) K3_LAMBDA {
        return load_some(i < kept ? a.tail.data + i * a.tail.stride + c : a.x.data + (i - kept) * a.x.stride + c, n);
      };
      for (int64_t t = 0; t < a.rows; ++t) {
        F16 acc = zero();
        for (int64_t j = 0; j < a.width; ++j)
          acc = fma(load_some(a.taps.data + j * a.taps.stride + c, n), input(t + j), acc);
        store_some(a.out.data + t * a.out.stride + c, silu16(acc), n);
      }
      for (int64_t i = 0; i < kept; ++i) store_some(a.tail.data + i * a.tail.stride + c, input(a.rows + i), n);
    });
  }
}

void kda_gate(const void* p, int64_t begin, int64_t end, float*) {
  const auto& a = *static_cast<const GateArgs*>(p);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / a.heads, head = item % a.heads;
    const F16 rate = set(exp1(a.a_log[head])), bound = set(a.lower_bound);
    zip_columns(a.z.data + row * a.z.stride, a.dt_bias, a.out.data + row * a.out.stride, head * a.dim,
                (head + 1) * a.dim, [=](F16 z, F16 b) K3_LAMBDA {
                  return exp16(mul(bound, sigmoid16(mul(rate, add(z, b)))));
                });
  }
}

struct StepVectors {
  const float *q, *k, *v, *decay;
  float* out;
  float beta;
};

// One position of one head for V vectors of columns at c; `count` of the last vector are real. state is [dim, dim].
template <int V>
K3_INLINE void advance_columns(const StepVectors& s, float* state, int64_t dim, int64_t c, int64_t count) {
  F16 acc[V];
  K3_UNROLL
  for (int j = 0; j < V; ++j) acc[j] = zero();
  for (int64_t i = 0; i < dim; ++i) {
    const float* row = state + i * dim + c;
    const F16 d = set(s.decay[i]), k = set(s.k[i]);
    K3_UNROLL
    for (int j = 0; j < V; ++j) acc[j] = fma(k, mul(d, load_some(row + 16 * j, j + 1 < V ? 16 : count)), acc[j]);
  }
  F16 u[V];
  K3_UNROLL
  for (int j = 0; j < V; ++j) {
    u[j] = mul(set(s.beta), sub(load_some(s.v + c + 16 * j, j + 1 < V ? 16 : count), acc[j]));
    acc[j] = zero();
  }
  for (int64_t i = 0; i < dim; ++i) {
    float* row = state + i * dim + c;
    const F16 d = set(s.decay[i]), k = set(s.k[i]), q = set(s.q[i]);
    K3_UNROLL
    for (int j = 0; j < V; ++j) {
      const int64_t n = j + 1 < V ? 16 : count;
      const F16 fresh = fma(k, u[j], mul(d, load_some(row + 16 * j, n)));
      store_some(row + 16 * j, fresh, n);
      acc[j] = fma(q, fresh, acc[j]);
    }
  }
  K3_UNROLL
  for (int j = 0; j < V; ++j) store_some(s.out + c + 16 * j, acc[j], j + 1 < V ? 16 : count);
}

inline void unit(const float* x, int64_t n, float* out) {
  const F16 r = set(1.0f / root(square_sum(x, n) + 1e-6f));
  map_columns(x, out, 0, n, [=](F16 v) K3_LAMBDA { return mul(v, r); });
}

// Scratch: q and k of a head.
void kda_recurrence(const void* p, int64_t begin, int64_t end, float* scratch) {
  const auto& a = *static_cast<const RecurrenceArgs*>(p);
  const int64_t dim = a.dim, whole = dim / (16 * kColumnVectors) * (16 * kColumnVectors);
  float* q = scratch;
  float* k = scratch + (dim + 15) / 16 * 16;
  const F16 scale = set(a.scale);
  for (int64_t head = begin; head < end; ++head) {
    float* state = a.state + head * dim * dim;
    const int64_t at = head * dim;
    for (int64_t t = 0; t < a.rows; ++t) {
      unit(a.q.data + t * a.q.stride + at, dim, q);
      map_columns(q, q, 0, dim, [=](F16 v) K3_LAMBDA { return mul(v, scale); });
      unit(a.k.data + t * a.k.stride + at, dim, k);
      const StepVectors step{q,
                             k,
                             a.v.data + t * a.v.stride + at,
                             a.decay.data + t * a.decay.stride + at,
                             a.out.data + t * a.out.stride + at,
                             a.beta.data[t * a.beta.stride + head]};
      for (int64_t c = 0; c < whole; c += 16 * kColumnVectors)
        advance_columns<kColumnVectors>(step, state, dim, c, 16);
      for (int64_t c = whole; c < dim; c += 16) advance_columns<1>(step, state, dim, c, at_most(dim - c, 16));
    }
  }
}

void kda_output(const void* p, int64_t begin, int64_t end, float*) {
  const auto& a = *static_cast<const HeadNormArgs*>(p);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / a.heads, at = item % a.heads * a.dim;
    const float* o = a.o.data + row * a.o.stride + at;
    const float* gate = a.gate.data + row * a.gate.stride + at;
    float* out = a.out.data + row * a.out.stride + at;
    const F16 r = set(inverse_rms(square_sum(o, a.dim), a.dim, a.eps));
    for_columns(0, a.dim, [=, &a](int64_t c, int64_t n) K3_LAMBDA {
      const F16 normed = mul(mul(load_some(o + c, n), r), load_some(a.weight + c, n));
      store_some(out + c, mul(normed, sigmoid16(load_some(gate + c, n))), n);
    });
  }
}
