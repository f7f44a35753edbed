// MXFP4 rows for the dot product. A table holds the sixteen values of the codes under each scale byte, exactly.

constexpr int64_t kMxfp4Ahead = 1024;  // bytes read ahead in each of the rows' streams

struct Mxfp4Row {
  const uint8_t* packed;
  const uint8_t* scales;
  const float* table;

#ifdef K3_AVX512
  K3_INLINE void block(int64_t b, F16& even, F16& odd) const {
    prefetch(packed + 16 * b + kMxfp4Ahead);
    const __m512 values = _mm512_load_ps(table + 16 * scales[b]);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + 16 * b));
    const __m512i codes = _mm512_cvtepu8_epi32(bytes);
    // vpermps looks at the low four bits of a lane only: no mask is needed for the even element.
    even = _mm512_permutexvar_ps(codes, values);
    odd = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), values);
  }
#else
  K3_INLINE void block(int64_t b, F16& even, F16& odd) const {
    const float* values = table + 16 * scales[b];
    float lanes[32];
    for (int i = 0; i < 16; ++i) {
      const uint8_t byte = packed[16 * b + i];
      lanes[i] = values[byte & 15];
      lanes[16 + i] = values[byte >> 4];
    }
    even = load(lanes);
    odd = load(lanes + 16);
  }
#endif
  K3_INLINE void tail(int64_t, int64_t, float*) const {}  // groups are whole blocks
};

struct Mxfp4Rows {
  const uint8_t* packed;
  const uint8_t* scales;
  const float* table;
  int64_t cols;
  K3_INLINE Mxfp4Row row(int64_t r) const {
    return {packed + r * (cols / 2), scales + r * (cols / 32), table};
  }
};
