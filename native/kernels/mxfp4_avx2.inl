// MXFP4 with AVX2: two weight rows at a time, one in each half of a register.
//
// A scaled code has at most two significant bits, so its float32 value is a bfloat16: two byte look-ups (vpshufb) give
// the low and high bytes of 32 values, and interleaving them gives words that decode like stored bfloat16. The
// sixteen accumulators of the dot product lie in four half registers, in this order of lanes:
constexpr int kLaneOrder[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};

inline void mxfp4_pack_row(const float* x, int64_t cols, float* tile, int64_t t, int64_t rows_in_tile) {
  for (int64_t b = 0; b < cols / 32; ++b) {
    float* to = tile + (b * rows_in_tile + t) * 32;
    for (int i = 0; i < 16; ++i) {
      to[i] = x[32 * b + 2 * kLaneOrder[i]];
      to[16 + i] = x[32 * b + 2 * kLaneOrder[i] + 1];
    }
  }
}

struct RowPair {
  const uint8_t *packed[2], *scales[2];
};

K3_INLINE __m256i two_halves(const uint8_t* low, const uint8_t* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low))),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
}
K3_INLINE __m256 low_words(__m256i w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
K3_INLINE __m256 high_words(__m256i w) {
  return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
K3_INLINE __m256 quad(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }

// Sixteen lanes of two rows in four registers; adds the products of one half (even or odd elements) of a block.
K3_INLINE void add_half(__m256* acc, __m256i first, __m256i second, const float* x) {
  acc[0] = _mm256_fmadd_ps(quad(x), low_words(first), acc[0]);
  acc[1] = _mm256_fmadd_ps(quad(x + 4), high_words(first), acc[1]);
  acc[2] = _mm256_fmadd_ps(quad(x + 8), low_words(second), acc[2]);
  acc[3] = _mm256_fmadd_ps(quad(x + 12), high_words(second), acc[3]);
}

K3_INLINE float fold_quads(__m128 even_lanes, __m128 odd_lanes) {
  const __m128 e = _mm_add_ps(even_lanes, _mm_movehl_ps(even_lanes, even_lanes));
  const __m128 o = _mm_add_ps(odd_lanes, _mm_movehl_ps(odd_lanes, odd_lanes));
  const __m128 e1 = _mm_add_ss(e, _mm_shuffle_ps(e, e, 1));
  const __m128 o1 = _mm_add_ss(o, _mm_shuffle_ps(o, o, 1));
  return _mm_cvtss_f32(_mm_add_ss(e1, o1));
}

// P pairs of rows times rows [t0, t0 + T) of a packed tile of `x_rows`: sum[t][2 * pair + half].
template <int P, int T>
K3_INLINE void pair_tile(const RowPair* pair, const uint8_t* table, const float* x, int64_t x_rows, int64_t blocks,
                         float (*sum)[2 * P]) {
  __m256 acc[P][T][4];
  K3_UNROLL
  for (int p = 0; p < P; ++p) {
    K3_UNROLL
    for (int t = 0; t < T; ++t) {
      K3_UNROLL
      for (int i = 0; i < 4; ++i) acc[p][t][i] = _mm256_setzero_ps();
    }
  }
  const __m256i nibble = _mm256_set1_epi8(15);
  for (int64_t b = 0; b < blocks; ++b) {
    const float* xb = x + b * x_rows * 32;
    K3_UNROLL
    for (int p = 0; p < P; ++p) {
      const uint8_t* table0 = table + 32 * pair[p].scales[0][b];
      const uint8_t* table1 = table + 32 * pair[p].scales[1][b];
      const __m256i low = two_halves(table0, table1), high = two_halves(table0 + 16, table1 + 16);
      prefetch(pair[p].packed[0] + 16 * b + kMxfp4Ahead);
      prefetch(pair[p].packed[1] + 16 * b + kMxfp4Ahead);
      const __m256i bytes = two_halves(pair[p].packed[0] + 16 * b, pair[p].packed[1] + 16 * b);
      const __m256i even = _mm256_and_si256(bytes, nibble);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
      const __m256i even_low = _mm256_shuffle_epi8(low, even), even_high = _mm256_shuffle_epi8(high, even);
      const __m256i odd_low = _mm256_shuffle_epi8(low, odd), odd_high = _mm256_shuffle_epi8(high, odd);
      const __m256i even0 = _mm256_unpacklo_epi8(even_low, even_high);
      const __m256i even1 = _mm256_unpackhi_epi8(even_low, even_high);
      const __m256i odd0 = _mm256_unpacklo_epi8(odd_low, odd_high);
      const __m256i odd1 = _mm256_unpackhi_epi8(odd_low, odd_high);
      K3_UNROLL
      for (int t = 0; t < T; ++t) {
        add_half(acc[p][t], even0, even1, xb + 32 * t);
        add_half(acc[p][t], odd0, odd1, xb + 32 * t + 16);
      }
    }
  }
  K3_UNROLL
  for (int p = 0; p < P; ++p) {
    K3_UNROLL
    for (int t = 0; t < T; ++t) {
      const __m256 e = _mm256_add_ps(acc[p][t][0], acc[p][t][2]);
      const __m256 o = _mm256_add_ps(acc[p][t][1], acc[p][t][3]);
      sum[t][2 * p] = fold_quads(_mm256_castps256_ps128(e), _mm256_castps256_ps128(o));
      sum[t][2 * p + 1] = fold_quads(_mm256_extractf128_ps(e, 1), _mm256_extractf128_ps(o, 1));
    }
  }
}

template <int P, int T>
void mxfp4_rows_by(const Matrix& w, int64_t begin, int64_t end, const float* x, int64_t x_rows, OutRows out) {
  const int64_t blocks = w.cols / 32;
  // Rows far apart, as in dot_rows_by. The last of them may pass the end: the last row is then computed again.
  const int64_t apart = (end - begin + 2 * P - 1) / (2 * P);
  for (int64_t r0 = begin; r0 < begin + apart; ++r0) {
    RowPair pair[P];
    float sum[T][2 * P];
    int64_t row[2 * P];
    for (int i = 0; i < 2 * P; ++i) {
      row[i] = at_most(r0 + i * apart, end - 1);
      pair[i / 2].packed[i % 2] = static_cast<const uint8_t*>(w.data) + row[i] * blocks * 16;
      pair[i / 2].scales[i % 2] = w.scales + row[i] * blocks;
    }
    pair_tile<P, T>(pair, w.byte_table, x, x_rows, blocks, sum);
    for (int t = 0; t < T; ++t)
      for (int i = 0; i < 2 * P; ++i) out.data[t * out.stride + row[i]] = sum[t][i];
  }
}

void mxfp4_rows_of(const Matrix& w, int64_t begin, int64_t end, const float* x, int64_t x_rows, OutRows out) {
  if (x_rows == 1) return mxfp4_rows_by<2, 1>(w, begin, end, x, 1, out);
  for (int64_t t = 0; t < x_rows; t += 2) {
    const OutRows here{out.data + t * out.stride, out.stride};
    if (t + 1 < x_rows) {
      mxfp4_rows_by<1, 2>(w, begin, end, x + 32 * t, x_rows, here);
    } else {
      mxfp4_rows_by<1, 1>(w, begin, end, x + 32 * t, x_rows, here);
    }
  }
}
