// The machine's own limits, in the same terms as the kernels.

// Multiply-adds of a loop that does nothing else: twelve independent chains hide the latency.
double fma_loop(int64_t rounds) {
  constexpr int kChains = kXTile == 8 ? 12 : 6;
  F16 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = set(static_cast<float>(i));
  F16 factor = set(0.5f), term = set(1.0f);
  for (int64_t n = 0; n < rounds; ++n) {
    K3_UNROLL
    for (int i = 0; i < kChains; ++i) acc[i] = fma(acc[i], factor, term);
  }
  float sink[16];
  for (int i = 1; i < kChains; ++i) acc[0] = add(acc[0], acc[i]);
  store(sink, acc[0]);
  asm volatile("" : : "r"(sink) : "memory");
  return static_cast<double>(rounds) * kChains * 16;
}

K3_INLINE I16 load_words(const uint8_t* p) { return bits(load(reinterpret_cast<const float*>(p))); }

// Adds up a buffer with S read positions at once.
template <int S>
uint64_t read_streams(const uint8_t* data, int64_t bytes) {
  const int64_t part = bytes / S / 256 * 256;
  I16 sum[S];
  K3_UNROLL
  for (int s = 0; s < S; ++s) sum[s] = iset(0);
  for (int64_t i = 0; i < part; i += 128) {
    K3_UNROLL
    for (int s = 0; s < S; ++s) {
      const uint8_t* p = data + s * part + i;
      prefetch(p + 2048);
      prefetch(p + 2112);
      sum[s] = iadd(sum[s], iadd(load_words(p), load_words(p + 64)));
    }
  }
  for (int s = 1; s < S; ++s) sum[0] = iadd(sum[0], sum[s]);
  uint32_t words[16];
  __builtin_memcpy(words, &sum[0], sizeof words);
  uint64_t total = 0;
  for (int i = 0; i < 16; ++i) total += words[i];
  return total;
}

uint64_t read_loop(const uint8_t* data, int64_t bytes, int streams) {
  switch (streams) {
    case 1: return read_streams<1>(data, bytes);
    case 2: return read_streams<2>(data, bytes);
    case 4: return read_streams<4>(data, bytes);
    default: return read_streams<8>(data, bytes);
  }
}
