// Products with weight matrices.

constexpr int64_t kBlockBytes = 256 * 1024;  // weights that several tiles of x find in the second-level cache

inline int64_t row_bytes(const Matrix& w) {
  switch (w.encoding) {
    case Encoding::f32: return 4 * w.cols;
    case Encoding::bf16: return 2 * w.cols;
    case Encoding::mxfp4: return w.cols / 2;
    case Encoding::packed12: return packed_row_bytes(w.cols);
  }
  return 1;
}

// `count` rows of w from `first` on.
inline Matrix rows_from(const Matrix& w, int64_t first, int64_t count) {
  Matrix part = w;
  part.rows = count;
  part.data = static_cast<const uint8_t*>(w.data) + first * row_bytes(w);
  if (w.scales != nullptr) part.scales += first * (w.cols / 32);
  part.panel.first_row += first;
  return part;
}

// The same rows as bfloat16.
inline Matrix unpacked(const Matrix& w, uint16_t* words) {
  unpack_rows(w, 0, w.rows, words);
  return {Encoding::bf16, words, nullptr, nullptr, nullptr, w.rows, w.cols};
}

inline F32Rows f32_rows(const Matrix& w) { return {static_cast<const float*>(w.data), w.cols}; }
inline Bf16Rows bf16_rows(const Matrix& w) { return {static_cast<const uint16_t*>(w.data), w.cols}; }

// Rows [begin, end) of w times one packed tile of x.
void multiply_rows(const Matrix& w, int64_t begin, int64_t end, const float* x, int64_t x_rows, OutRows out) {
  switch (w.encoding) {
    case Encoding::f32: return dot_rows_of(f32_rows(w), begin, end, x, x_rows, w.cols, out);
    case Encoding::bf16: return dot_rows_of(bf16_rows(w), begin, end, x, x_rows, w.cols, out);
    case Encoding::mxfp4: return mxfp4_rows_of(w, begin, end, x, x_rows, out);
    case Encoding::packed12: return packed12_rows_of(w, begin, end, x, x_rows, out);
  }
}

void pack(const void* p, int64_t begin, int64_t end, float*) {
  const auto& a = *static_cast<const PackArgs*>(p);
  const int64_t blocks = (a.cols + 31) / 32;
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t t0 = tile * kXTile;
    const int64_t count = at_most(a.rows - t0, kXTile);
    float* to = a.packed + t0 * blocks * 32;
    for (int64_t t = 0; t < count; ++t) {
      const float* x = a.x.data + (t0 + t) * a.x.stride;
      if (a.encoding == Encoding::mxfp4) {
        mxfp4_pack_row(x, a.cols, to, t, count);
      } else {
        pack_row(x, a.cols, to, t, count);
      }
    }
  }
}

// Whether weight rows are unpacked first, once for all tiles of x: worth its stores from the third tile on.
inline bool unpacks(const MatmulArgs& a) { return a.w.encoding == Encoding::packed12 && a.x_rows > 2 * kXTile; }

inline int64_t rows_at_once(const MatmulArgs& a) {
  const int64_t bytes = unpacks(a) ? 2 * a.w.cols : row_bytes(a.w);
  const int64_t fit = bytes > 0 ? kBlockBytes / bytes / 4 * 4 : 0;
  return fit < 4 ? 4 : fit;
}

int64_t matmul_scratch(const MatmulArgs& a) { return unpacks(a) ? rows_at_once(a) * a.w.cols / 2 : 0; }

void matmul(const void* p, int64_t begin, int64_t end, float* scratch) {
  const auto& a = *static_cast<const MatmulArgs*>(p);
  const int64_t blocks = (a.w.cols + 31) / 32, step = rows_at_once(a);
  for (int64_t r0 = begin; r0 < end; r0 += step) {
    const int64_t count = at_most(step, end - r0);
    Matrix w = rows_from(a.w, r0, count);
    if (unpacks(a)) w = unpacked(w, reinterpret_cast<uint16_t*>(scratch));
    for (int64_t t0 = 0; t0 < a.x_rows; t0 += kXTile) {
      multiply_rows(w, 0, count, a.packed + t0 * blocks * 32, at_most(a.x_rows - t0, kXTile),
                    {a.out.data + t0 * a.out.stride + r0, a.out.stride});
    }
  }
}
