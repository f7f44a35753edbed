// Products with weight matrices.

constexpr int64_t kBlockBytes = 256 * 1024;  // weights that several tiles of x find in the second-level cache

inline int64_t row_bytes(const Matrix& w) {
  switch (w.encoding) {
    case Encoding::f32: return 4 * w.cols;
    case Encoding::bf16: return 2 * w.cols;
    case Encoding::mxfp4: return w.cols / 2;
  }
  return 1;
}

inline F32Rows f32_rows(const Matrix& w) { return {static_cast<const float*>(w.data), w.cols}; }
inline Bf16Rows bf16_rows(const Matrix& w) { return {static_cast<const uint16_t*>(w.data), w.cols}; }

// Rows [begin, end) of w times one packed tile of x.
void multiply_rows(const Matrix& w, int64_t begin, int64_t end, const float* x, int64_t x_rows, OutRows out) {
  switch (w.encoding) {
    case Encoding::f32: return dot_rows_of(f32_rows(w), begin, end, x, x_rows, w.cols, out);
    case Encoding::bf16: return dot_rows_of(bf16_rows(w), begin, end, x, x_rows, w.cols, out);
    case Encoding::mxfp4: return mxfp4_rows_of(w, begin, end, x, x_rows, out);
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

void matmul(const void* p, int64_t begin, int64_t end, float*) {
  const auto& a = *static_cast<const MatmulArgs*>(p);
  const int64_t blocks = (a.w.cols + 31) / 32;
  const int64_t fit = kBlockBytes / row_bytes(a.w) / 4 * 4;
  const int64_t step = fit < 4 ? 4 : fit;
  for (int64_t r0 = begin; r0 < end; r0 += step) {
    const int64_t r1 = at_most(r0 + step, end);
    for (int64_t t0 = 0; t0 < a.x_rows; t0 += kXTile) {
      const int64_t count = at_most(a.x_rows - t0, kXTile);
      multiply_rows(a.w, r0, r1, a.packed + t0 * blocks * 32, count,
                    {a.out.data + t0 * a.out.stride, a.out.stride});
    }
  }
}
