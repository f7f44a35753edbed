// Element by element, norms, the residual mix, sums over experts.

// Applies f(column, count) to whole and part vectors of columns [begin, end).
template <class F>
K3_INLINE void for_columns(int64_t begin, int64_t end, F f) {
  for (int64_t c = begin; c < end; c += 16) f(c, at_most(end - c, 16));
}
K3_INLINE F16 load_some(const float* p, int64_t count) { return count == 16 ? load(p) : load_part(p, count); }
K3_INLINE void store_some(float* p, F16 a, int64_t count) {
  if (count == 16) {
    store(p, a);
  } else {
    store_part(p, a, count);
  }
}

K3_INLINE F16 situ16(F16 g, F16 u, F16 beta, F16 linear_beta) {
  const F16 gate = mul(mul(beta, tanh16(div(g, beta))), sigmoid16(g));
  return mul(gate, mul(linear_beta, tanh16(div(u, linear_beta))));
}

template <class F>
K3_INLINE void map_columns(const float* a, float* out, int64_t begin, int64_t end, F f) {
  for_columns(begin, end, [=](int64_t c, int64_t n) K3_LAMBDA { store_some(out + c, f(load_some(a + c, n)), n); });
}
template <class F>
K3_INLINE void zip_columns(const float* a, const float* b, float* out, int64_t begin, int64_t end, F f) {
  for_columns(begin, end, [=](int64_t c, int64_t n) K3_LAMBDA {
    store_some(out + c, f(load_some(a + c, n), load_some(b + c, n)), n);
  });
}

void elementwise(const void* p, int64_t begin, int64_t end, float*) {
  const auto& e = *static_cast<const ElementwiseArgs*>(p);
  const int64_t chunks = (e.cols + kChunk - 1) / kChunk;
  const F16 beta = set(e.beta), linear_beta = set(e.linear_beta);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / chunks, c0 = item % chunks * kChunk, c1 = at_most(c0 + kChunk, e.cols);
    const float* a = e.a.data + row * e.a.stride;
    const float* b = e.b.data + row * e.b.stride;
    float* out = e.out.data + row * e.out.stride;
    switch (e.op) {
      case Elementwise::exp: map_columns(a, out, c0, c1, [](F16 x) K3_LAMBDA { return exp16(x); }); break;
      case Elementwise::log: map_columns(a, out, c0, c1, [](F16 x) K3_LAMBDA { return log16(x); }); break;
      case Elementwise::tanh: map_columns(a, out, c0, c1, [](F16 x) K3_LAMBDA { return tanh16(x); }); break;
      case Elementwise::sigmoid: map_columns(a, out, c0, c1, [](F16 x) K3_LAMBDA { return sigmoid16(x); }); break;
      case Elementwise::gated:
        zip_columns(a, b, out, c0, c1, [](F16 x, F16 g) K3_LAMBDA { return mul(x, sigmoid16(g)); });
        break;
      case Elementwise::add:
        zip_columns(a, b, out, c0, c1, [](F16 x, F16 y) K3_LAMBDA { return add(x, y); });
        break;
      case Elementwise::situ:
        zip_columns(a, b, out, c0, c1, [=](F16 g, F16 u) K3_LAMBDA { return situ16(g, u, beta, linear_beta); });
        break;
    }
  }
}

K3_INLINE float inverse_rms(float squares, int64_t n, float eps) {
  return 1.0f / root(squares / static_cast<float>(n) + eps);
}

void rms_norm(const void* p, int64_t begin, int64_t end, float*) {
  const auto& a = *static_cast<const NormArgs*>(p);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = a.x.data + row * a.x.stride;
    const F16 r = set(inverse_rms(square_sum(x, a.cols), a.cols, a.eps));
    zip_columns(x, a.weight, a.out.data + row * a.out.stride, 0, a.cols,
                [=](F16 v, F16 w) K3_LAMBDA { return mul(w, mul(v, r)); });
  }
}

// The largest of n numbers, NaN if one of them is.
inline float greatest(const float* x, int64_t n) {
  float best = x[0];
  for (int64_t i = 1; i < n; ++i) best = !(x[i] <= best) && best == best ? x[i] : best;
  return best;
}

// x[i] = exp(x[i] - shift), in place
inline void exp_shifted(float* x, int64_t n, float shift) {
  map_columns(x, x, 0, n, [=](F16 v) K3_LAMBDA { return exp16(sub(v, set(shift))); });
}

void residual_mix(const void* p, int64_t begin, int64_t end, float* scratch) {
  const auto& a = *static_cast<const MixArgs*>(p);
  float* weight = scratch;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t i = 0; i < a.count; ++i) {
      const float* v = a.sources[i].data + row * a.sources[i].stride;
      const float r = inverse_rms(square_sum(v, a.cols), a.cols, a.eps);
      weight[i] = r * product_dot(v, a.norm_weight, a.proj_weight, a.cols);
    }
    exp_shifted(weight, a.count, greatest(weight, a.count));
    float sum = weight[0];
    for (int64_t i = 1; i < a.count; ++i) sum = sum + weight[i];
    for (int64_t i = 0; i < a.count; ++i) weight[i] = weight[i] / sum;
    float* out = a.out.data + row * a.out.stride;
    for_columns(0, a.cols, [=, &a](int64_t c, int64_t n) K3_LAMBDA {
      F16 acc = zero();
      for (int64_t i = 0; i < a.count; ++i)
        acc = fma(set(weight[i]), load_some(a.sources[i].data + row * a.sources[i].stride + c, n), acc);
      store_some(out + c, acc, n);
    });
  }
}

void expert_sum(const void* p, int64_t begin, int64_t end, float*) {
  const auto& a = *static_cast<const ExpertSumArgs*>(p);
  const int64_t chunks = (a.cols + kChunk - 1) / kChunk;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / chunks, c0 = item % chunks * kChunk, c1 = at_most(c0 + kChunk, a.cols);
    const float* e = a.outputs + row * a.row_stride;
    const float* w = a.weights.data + row * a.weights.stride;
    float* out = a.out.data + row * a.out.stride;
    for_columns(c0, c1, [=, &a](int64_t c, int64_t n) K3_LAMBDA {
      F16 acc = zero();
      for (int64_t j = 0; j < a.experts; ++j)
        acc = fma(set(w[j]), load_some(e + j * a.expert_stride + c, n), acc);
      store_some(out + c, acc, n);
    });
  }
}
