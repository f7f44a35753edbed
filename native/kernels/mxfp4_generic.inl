// MXFP4 through the common tile.

void mxfp4_rows_of(const Matrix& w, int64_t begin, int64_t end, const float* x, int64_t x_rows, OutRows out) {
  const Mxfp4Rows rows{static_cast<const uint8_t*>(w.data), w.scales, w.code_table, w.cols};
  dot_rows_of(rows, begin, end, x, x_rows, w.cols, out);
}

inline void mxfp4_pack_row(const float* x, int64_t cols, float* tile, int64_t t, int64_t rows_in_tile) {
  pack_row(x, cols, tile, t, rows_in_tile);
}
