// Decisions: experts, the likeliest token, whether all is finite.

inline bool is_finite(float x) { return x - x == 0.0f; }

// Inserts (value, id) into a list of at most k ordered by falling value. An equal value goes behind: lower ids first.
inline int64_t insert_ranked(float* values, int32_t* ids, int64_t size, int64_t k, float value, int32_t id) {
  if (size == k && !(value > values[k - 1])) return size;
  int64_t at = size < k ? size : k - 1;
  for (; at > 0 && value > values[at - 1]; --at) {
    values[at] = values[at - 1];
    ids[at] = ids[at - 1];
  }
  values[at] = value;
  ids[at] = id;
  return size < k ? size + 1 : k;
}

// Scratch: scores [experts rounded up to 16], ranked values [k], a flag per expert.
void route(const void* p, int64_t begin, int64_t end, float* scratch) {
  const auto& a = *static_cast<const RouteArgs*>(p);
  float* score = scratch;
  float* ranked = scratch + (a.experts + 15) / 16 * 16;
  for (int64_t row = begin; row < end; ++row) {
    const float* logit = a.logits.data + row * a.logits.stride;
    int32_t* ids = a.ids + row * a.top_k;
    float* weights = a.weights + row * a.top_k;
    map_columns(logit, score, 0, a.experts, [](F16 x) K3_LAMBDA { return sigmoid16(x); });
    bool finite = true;
    int64_t size = 0;
    for (int64_t i = 0; i < a.experts; ++i) {
      const float biased = score[i] + a.bias[i];
      finite = finite && is_finite(logit[i]) && is_finite(biased);
      const float key = biased == biased ? biased : -kInfinity;
      size = insert_ranked(ranked, ids, size, a.top_k, key, static_cast<int32_t>(i));
    }
    a.finite[row] = finite;
    float divisor = 0.0f;
    if (a.renormalize && a.top_k > 1) {
      // The smallest chosen id above the last one, k times: k is small.
      int32_t last = -1;
      for (int64_t j = 0; j < a.top_k; ++j) {
        int32_t next = INT32_MAX;
        for (int64_t i = 0; i < a.top_k; ++i)
          if (ids[i] > last && ids[i] < next) next = ids[i];
        divisor = j == 0 ? score[next] : divisor + score[next];
        last = next;
      }
      divisor = divisor + 1e-20f;
    }
    for (int64_t j = 0; j < a.top_k; ++j) {
      const float s = score[ids[j]];
      const float w = a.renormalize && a.top_k > 1 ? s / divisor : s;
      weights[j] = w * a.scaling;
    }
  }
}

void argmax(const void* p, int64_t begin, int64_t end, float*) {
  const auto& a = *static_cast<const ArgmaxArgs*>(p);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = a.logits.data + row * a.logits.stride;
    float best = x[0];
    int64_t id = best == best ? 0 : -1;
    for (int64_t c = 0; c < a.cols && id >= 0; c += 16) {
      const int64_t n = at_most(a.cols - c, 16);
      if (n == 16 && !any(not_le(load(x + c), set(best)))) continue;
      for (int64_t i = c; i < c + n && id >= 0; ++i) {
        if (x[i] > best) {
          best = x[i];
          id = i;
        } else if (x[i] != x[i]) {
          id = -1;
        }
      }
    }
    a.ids[row] = id;
  }
}

void all_finite(const void* p, int64_t begin, int64_t end, float*) {
  const auto& a = *static_cast<const FiniteArgs*>(p);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = a.x.data + row * a.x.stride;
    // x - x is zero, or NaN where x is not finite; NaN stays in the sum.
    F16 sum = zero();
    for_columns(0, a.cols, [&sum, x](int64_t c, int64_t n) K3_LAMBDA {
      const F16 v = load_some(x + c, n);
      sum = add(sum, sub(v, v));
    });
    a.finite[row] = !any(not_le(sum, zero()));
  }
}
