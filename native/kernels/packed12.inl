// bfloat16 in twelve bits: the low byte as it is, the high byte as a four-bit code into a table of sixteen.
//
// A panel is a run of rows of `cols` (a multiple of 32) weights, in blocks of 32:
//
//   body     every row: its units of four blocks, 192 bytes each, then 48 bytes for each block that is left
//   raw      64 bytes for each listed block: one that holds a high byte which the table lacks
//   numbers  uint32, little-endian, for each listed block: row * (cols / 32) + block, ascending
//
// Unit: 64 low bytes of blocks 0 and 1, 64 low bytes of blocks 2 and 3, 64 bytes of codes. The low bytes of two blocks
// alternate by eights: byte 16 L + 8 k + i belongs to element 8 L + i of block k. Byte n of the codes holds the code
// of low byte n in its low nibble and that of low byte 64 + n in its high one. So interleaving low bytes with looked-up
// high bytes, sixteen at a time, gives whole blocks, in order. A single block: its 32 low bytes, then sixteen codes,
// byte i for elements i (low nibble) and 16 + i. Codes of a listed block mean nothing.

constexpr int64_t kUnitBlocks = 4, kUnitBytes = 192;
constexpr int64_t kPackedBlock = 48, kRawBlock = 64;
constexpr int64_t kPacked12Ahead = 2048;  // bytes read ahead in each row
constexpr int64_t kNone = INT64_MAX;

inline int64_t packed_row_bytes(int64_t cols) { return cols / 32 * kPackedBlock; }

#if defined(K3_AVX512)
using HighBytes = __m512i;
K3_INLINE HighBytes high_bytes_at(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
K3_INLINE void unpack_unit(const uint8_t* p, HighBytes table, W32* w) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i codes = _mm512_loadu_si512(p + 128);
  for (int k = 0; k < 4; k += 2) {
    const __m512i low = _mm512_loadu_si512(p + 32 * k);
    const __m512i code = _mm512_and_si512(k == 0 ? codes : _mm512_srli_epi16(codes, 4), nibble);
    const __m512i high = _mm512_shuffle_epi8(table, code);
    w[k] = _mm512_unpacklo_epi8(low, high);
    w[k + 1] = _mm512_unpackhi_epi8(low, high);
  }
}
#elif defined(K3_AVX2)
using HighBytes = __m256i;
K3_INLINE HighBytes high_bytes_at(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
K3_INLINE void unpack_half(__m256i low, __m256i code, HighBytes table, __m256i& first, __m256i& second) {
  const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(code, _mm256_set1_epi8(15)));
  first = _mm256_unpacklo_epi8(low, high);
  second = _mm256_unpackhi_epi8(low, high);
}
K3_INLINE void unpack_unit(const uint8_t* p, HighBytes table, W32* w) {
  const auto* part = reinterpret_cast<const __m256i*>(p);
  const __m256i lo = _mm256_loadu_si256(part + 4), hi = _mm256_loadu_si256(part + 5);
  unpack_half(_mm256_loadu_si256(part), lo, table, w[0].lo, w[1].lo);
  unpack_half(_mm256_loadu_si256(part + 1), hi, table, w[0].hi, w[1].hi);
  unpack_half(_mm256_loadu_si256(part + 2), _mm256_srli_epi16(lo, 4), table, w[2].lo, w[3].lo);
  unpack_half(_mm256_loadu_si256(part + 3), _mm256_srli_epi16(hi, 4), table, w[2].hi, w[3].hi);
}
#else
using HighBytes = const uint8_t*;
K3_INLINE HighBytes high_bytes_at(const uint8_t* p) { return p; }
K3_INLINE void unpack_unit(const uint8_t* p, HighBytes table, W32* w) {
  for (int k = 0; k < 4; ++k) {
    for (int e = 0; e < 32; ++e) {
      const int n = e / 8 * 16 + k % 2 * 8 + e % 8;
      const int code = p[128 + n] >> (k / 2 * 4) & 15;
      w[k].v[e] = static_cast<uint16_t>(table[code] << 8 | p[64 * (k / 2) + n]);
    }
  }
}
#endif

inline W32 unpack_block(const uint8_t* p, const uint8_t* table) {
  uint16_t words[32];
  for (int i = 0; i < 16; ++i) {
    words[i] = static_cast<uint16_t>(table[p[32 + i] & 15] << 8 | p[i]);
    words[16 + i] = static_cast<uint16_t>(table[p[32 + i] >> 4] << 8 | p[16 + i]);
  }
  return load_w32(words);
}

inline int64_t number_at(const Panel& panel, int64_t i) {
  uint32_t number;
  __builtin_memcpy(&number, panel.numbers + 4 * i, sizeof number);
  return number;
}

// First listed block from `number` on.
inline int64_t listed_from(const Panel& panel, int64_t number) {
  int64_t low = 0, high = panel.listed;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (number_at(panel, middle) < number) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// A walk along consecutive rows of a panel.
struct PackedStream {
  const Panel* panel;
  const uint8_t* row;
  int64_t first;   // number of the row's first block
  int64_t listed;  // next listed block
  int64_t next;    // its place in the row, anywhere beyond the row's end where it lies in a later one

  PackedStream() = default;
  PackedStream(const Matrix& w, int64_t r) {
    panel = &w.panel;
    row = static_cast<const uint8_t*>(w.data) + r * packed_row_bytes(w.cols);
    first = (panel->first_row + r) * (w.cols / 32);
    listed = listed_from(*panel, first);
    find();
  }
  void find() { next = listed < panel->listed ? number_at(*panel, listed) - first : kNone; }
  void next_row(int64_t cols) {
    row += packed_row_bytes(cols);
    first += cols / 32;
    if (next != kNone) next -= cols / 32;
  }
  // The block at `next`, and on to the one behind it.
  W32 take() {
    const W32 w = load_w32(panel->raw + kRawBlock * listed);
    ++listed;
    find();
    return w;
  }
};

// Four blocks of R rows.
template <int R, int T>
K3_INLINE void add_unit(F16 (*acc)[T], const W32 (*w)[kUnitBlocks], const float* x) {
  K3_UNROLL
  for (int k = 0; k < kUnitBlocks; ++k) {
    F16 even[R], odd[R];
    K3_UNROLL
    for (int r = 0; r < R; ++r) pair_w32(w[r][k], even[r], odd[r]);
    add_block<R, T>(acc, even, odd, x + 32 * T * k);
  }
}

// As dot_tile, from packed rows.
template <int R, int T>
K3_INLINE void packed12_tile(PackedStream* row, const uint8_t* high_bytes, const float* x, int64_t cols,
                             float (*sum)[R]) {
  constexpr bool kRowByRow = T <= 2;  // fewer registers, but every row loads x anew
  const HighBytes table = high_bytes_at(high_bytes);
  const int64_t blocks = cols / 32, units = blocks / kUnitBlocks;
  F16 acc[R][T];
  K3_UNROLL
  for (int r = 0; r < R; ++r) {
    K3_UNROLL
    for (int t = 0; t < T; ++t) acc[r][t] = zero();
  }
  for (int64_t u = 0; u < units;) {
    int64_t stop = units;
    K3_UNROLL
    for (int r = 0; r < R; ++r) stop = at_most(stop, row[r].next / kUnitBlocks);
    for (; u < stop; ++u) {
      const float* xu = x + kUnitBlocks * u * 32 * T;
      W32 w[R][kUnitBlocks];
      K3_UNROLL
      for (int r = 0; r < R; ++r) {
        const uint8_t* p = row[r].row + kUnitBytes * u;
        prefetch(p + kPacked12Ahead);
        prefetch(p + kPacked12Ahead + 64);
        prefetch(p + kPacked12Ahead + 128);
        unpack_unit(p, table, w[r]);
        if constexpr (kRowByRow) add_unit<1, T>(acc + r, w + r, xu);
      }
      if constexpr (!kRowByRow) add_unit<R, T>(acc, w, xu);
    }
    if (u == units) break;
    W32 w[R][kUnitBlocks];
    for (int r = 0; r < R; ++r) {
      unpack_unit(row[r].row + kUnitBytes * u, table, w[r]);
      while (row[r].next < kUnitBlocks * (u + 1)) {
        const int64_t k = row[r].next % kUnitBlocks;
        w[r][k] = row[r].take();
      }
    }
    add_unit<R, T>(acc, w, x + kUnitBlocks * u * 32 * T);
    ++u;
  }
  for (int64_t b = units * kUnitBlocks; b < blocks; ++b) {
    F16 even[R], odd[R];
    for (int r = 0; r < R; ++r) {
      const bool listed = row[r].next == b;
      pair_w32(listed ? row[r].take() : unpack_block(row[r].row + kPackedBlock * b, high_bytes), even[r], odd[r]);
    }
    add_block<R, T>(acc, even, odd, x + b * 32 * T);
  }
  K3_UNROLL
  for (int r = 0; r < R; ++r) {
    K3_UNROLL
    for (int t = 0; t < T; ++t) sum[t][r] = fold(acc[r][t]);
    row[r].next_row(cols);
  }
}

// Rows [begin, end) of w times T packed rows of x.
template <int R, int T>
void packed12_rows_by(const Matrix& w, int64_t begin, int64_t end, const float* x, OutRows out) {
  // Rows far apart, as in dot_rows_by.
  const int64_t apart = (end - begin) / R;
  PackedStream row[R];
  for (int r = 0; r < R; ++r) row[r] = PackedStream(w, begin + r * apart);
  for (int64_t i = begin; i < begin + apart; ++i) {
    float sum[T][R];
    packed12_tile<R, T>(row, w.panel.high_bytes, x, w.cols, sum);
    for (int t = 0; t < T; ++t)
      for (int r = 0; r < R; ++r) out.data[t * out.stride + i + r * apart] = sum[t][r];
  }
  const int64_t rest = begin + apart * R;
  if (R > 1 && rest < end) packed12_rows_by<1, T>(w, rest, end, x, out);
}

void packed12_rows_of(const Matrix& w, int64_t begin, int64_t end, const float* x, int64_t x_rows, OutRows out) {
  switch (x_rows) {
#define K3_CASE(T)                                                                                \
  case T:                                                                                         \
    if constexpr (T <= kXTile) packed12_rows_by<dot_rows(T), T>(w, begin, end, x, out);           \
    break;
    K3_CASE(1) K3_CASE(2) K3_CASE(3) K3_CASE(4) K3_CASE(5) K3_CASE(6) K3_CASE(7) K3_CASE(8)
#undef K3_CASE
  }
}

// Rows [begin, end) as bfloat16.
void unpack_rows(const Matrix& w, int64_t begin, int64_t end, uint16_t* bits) {
  const HighBytes table = high_bytes_at(w.panel.high_bytes);
  const int64_t blocks = w.cols / 32, units = blocks / kUnitBlocks;
  PackedStream stream(w, begin);
  for (int64_t r = begin; r < end; ++r, bits += w.cols) {
    for (int64_t u = 0; u < units; ++u) {
      const uint8_t* p = stream.row + kUnitBytes * u;
      W32 words[kUnitBlocks];
      unpack_unit(p, table, words);
      for (int k = 0; k < kUnitBlocks; ++k) store_w32(bits + (kUnitBlocks * u + k) * 32, words[k]);
    }
    for (int64_t b = units * kUnitBlocks; b < blocks; ++b)
      store_w32(bits + 32 * b, unpack_block(stream.row + kPackedBlock * b, w.panel.high_bytes));
    while (stream.next < blocks) {
      uint16_t* to = bits + 32 * stream.next;
      store_w32(to, stream.take());
    }
    stream.next_row(w.cols);
  }
}

void decode12(const void* p, int64_t begin, int64_t end, float*) {
  const auto& a = *static_cast<const DecodeArgs*>(p);
  unpack_rows(a.w, begin, end, a.bits + begin * a.w.cols);
}

// Low bytes and codes of `count` weights, and 255 for each whose high byte is in the table. Loops that vectorise.
K3_INLINE void look_up(const uint16_t* __restrict__ bits, const uint8_t* __restrict__ table, int count,
                       uint8_t* __restrict__ low, uint8_t* __restrict__ code, uint8_t* __restrict__ known) {
  uint8_t high[128];
  for (int i = 0; i < count; ++i) {
    low[i] = static_cast<uint8_t>(bits[i]);
    high[i] = static_cast<uint8_t>(bits[i] >> 8);
    code[i] = 0;
    known[i] = 0;
  }
  for (int c = 15; c >= 0; --c) {
    const uint8_t value = table[c], here = static_cast<uint8_t>(c);
    for (int i = 0; i < count; ++i) {
      const auto same = static_cast<uint8_t>(high[i] == value ? 255 : 0);
      code[i] = static_cast<uint8_t>((code[i] & ~same) | (here & same));
      known[i] |= same;
    }
  }
}

K3_INLINE uint8_t lacks_one(const uint8_t* known) {
  uint8_t all = 255;
  for (int i = 0; i < 32; ++i) all &= known[i];
  return all == 255 ? 0 : 1;
}

void encode_unit(const uint16_t* bits, const uint8_t* table, uint8_t* to, uint8_t* listed) {
  uint8_t low[128], code[128], known[128], mixed[128];
  look_up(bits, table, 128, low, code, known);
  for (int k = 0; k < 4; ++k) {
    listed[k] = lacks_one(known + 32 * k);
    for (int l = 0; l < 4; ++l) {
      const int n = 64 * (k / 2) + 16 * l + 8 * (k % 2);
      __builtin_memcpy(to + n, low + 32 * k + 8 * l, 8);
      __builtin_memcpy(mixed + n, code + 32 * k + 8 * l, 8);
    }
  }
  for (int n = 0; n < 64; ++n) to[128 + n] = static_cast<uint8_t>(mixed[n] | mixed[64 + n] << 4);
}

void encode_block(const uint16_t* bits, const uint8_t* table, uint8_t* to, uint8_t* listed) {
  uint8_t low[32], code[32], known[32];
  look_up(bits, table, 32, low, code, known);
  *listed = lacks_one(known);
  for (int i = 0; i < 32; ++i) to[i] = low[i];
  for (int i = 0; i < 16; ++i) to[32 + i] = static_cast<uint8_t>(code[i] | code[16 + i] << 4);
}

void encode12(const void* p, int64_t begin, int64_t end, float*) {
  const auto& a = *static_cast<const EncodeArgs*>(p);
  const int64_t blocks = a.cols / 32;
  for (int64_t r = begin; r < end; ++r) {
    const uint16_t* bits = a.bits + r * a.cols;
    uint8_t* to = a.body + r * packed_row_bytes(a.cols);
    uint8_t* listed = a.listed + r * blocks;
    int64_t b = 0;
    for (; b + kUnitBlocks <= blocks; b += kUnitBlocks)
      encode_unit(bits + 32 * b, a.high_bytes, to + kPackedBlock * b, listed + b);
    for (; b < blocks; ++b) encode_block(bits + 32 * b, a.high_bytes, to + kPackedBlock * b, listed + b);
  }
}
