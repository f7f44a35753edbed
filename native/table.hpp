// What the binding and the instruction-set variants agree on: plain argument structs and a table of functions.
//
// Every variant of the kernels is the same sources compiled with other flags. This header is seen by all of them,
// so it holds no inline function: one compiled with AVX flags could be kept by the linker for the portable path.
#pragma once

#include <cstdint>

namespace k3 {

// Row t of a matrix lies at data + t * stride (in floats); its columns are contiguous.
struct Rows {
  const float* data;
  int64_t stride;
};

struct OutRows {
  float* data;
  int64_t stride;
};

enum class Encoding : int { f32, bf16, mxfp4, packed12 };

// What a panel of 12-bit weights has besides its packed rows, see kernels/packed12.inl.
struct Panel {
  const uint8_t* high_bytes;  // [16]
  const uint8_t* raw;         // [listed][64]: blocks as bfloat16
  const uint8_t* numbers;     // [listed] uint32, ascending: row of the panel * blocks of a row + block
  int64_t listed;
  int64_t first_row;          // of the matrix in the panel
};

// A weight matrix as stored. `data` is float, bf16 bits, packed nibbles or packed rows of a panel; `scales` and the
// tables serve MXFP4 only, `panel` 12-bit weights only.
struct Matrix {
  Encoding encoding;
  const void* data;
  const uint8_t* scales;
  const float* code_table;      // [256][16]: value of each code under each scale byte
  const uint8_t* byte_table;    // [256][2][16]: low, then high byte of the same values as bfloat16
  int64_t rows, cols;
  Panel panel{};
};

// De-interleaves rows of x for the dot product: packed is [tile][block][row in tile][32]; a tile has x_tile rows.
struct PackArgs {
  Rows x;
  int64_t rows, cols;
  Encoding encoding;
  float* packed;
};

struct MatmulArgs {
  const float* packed;
  int64_t x_rows;
  Matrix w;
  OutRows out;
};

// Rows of bfloat16 bits to packed rows; `listed` [rows][blocks] is set where a high byte is not among the sixteen.
struct EncodeArgs {
  const uint16_t* bits;
  int64_t cols;
  const uint8_t* high_bytes;
  uint8_t* body;
  uint8_t* listed;
};

struct DecodeArgs {
  Matrix w;
  uint16_t* bits;
};

// y = f(a, b) column by column; an item is one chunk of columns of one row.
enum class Elementwise : int { exp, log, tanh, sigmoid, gated, add, situ };

struct ElementwiseArgs {
  Elementwise op;
  Rows a, b;
  OutRows out;
  int64_t rows, cols;
  float beta, linear_beta;
};

struct NormArgs {
  Rows x;
  const float* weight;
  OutRows out;
  int64_t cols;
  float eps;
};

struct MixArgs {
  const Rows* sources;
  int64_t count;
  const float *norm_weight, *proj_weight;
  OutRows out;
  int64_t cols;
  float eps;
};

struct ConvArgs {
  Rows x, taps;
  OutRows tail, out;
  int64_t rows, cols, width;
};

struct GateArgs {
  Rows z;
  const float *a_log, *dt_bias;
  OutRows out;
  int64_t heads, dim;
  float lower_bound;
};

struct RecurrenceArgs {
  Rows q, k, v, decay, beta;
  float* state;
  OutRows out;
  int64_t rows, dim;
  float scale;
};

struct HeadNormArgs {
  Rows o, gate;
  const float* weight;
  OutRows out;
  int64_t heads, dim;
  float eps;
};

struct MlaArgs {
  Rows q, cache;
  Matrix kv_b;
  OutRows out;
  int64_t rows, start;
  int64_t heads, nope, rope, v_dim, latent;
  int64_t head_tile, row_tile;  // queries that share a pass over the cache; does not change a bit of the result
  float scale;
};

struct RouteArgs {
  Rows logits;
  const float* bias;
  int64_t experts, top_k;
  float scaling;
  bool renormalize;
  int32_t* ids;
  float* weights;
  bool* finite;
};

struct ExpertSumArgs {
  const float* outputs;
  int64_t row_stride, expert_stride;
  Rows weights;
  OutRows out;
  int64_t rows, experts, cols;
};

struct ArgmaxArgs {
  Rows logits;
  int64_t cols;
  int64_t* ids;
};

struct FiniteArgs {
  Rows x;
  int64_t cols;
  bool* finite;
};

// Computes items [begin, end) of a job. `scratch` is the thread's own, 64-byte aligned.
using RangeFn = void (*)(const void* args, int64_t begin, int64_t end, float* scratch);

struct Table {
  const char* name;
  int64_t x_tile;      // rows of x that share one decoding of the weights
  RangeFn pack;        // item: one tile of x rows
  RangeFn matmul;      // item: one weight row, as for the next two
  RangeFn encode12;
  RangeFn decode12;
  RangeFn elementwise; // item: one chunk of columns of one row
  RangeFn rms_norm;    // item: one row, as for the next
  RangeFn residual_mix;
  RangeFn short_conv;  // item: one chunk of columns, all rows
  RangeFn kda_gate;    // item: one head of one row
  RangeFn kda_recurrence;  // item: one head, all rows
  RangeFn kda_output;      // item: one head of one row
  RangeFn mla;             // item: one tile of heads times rows
  RangeFn route;           // item: one row
  RangeFn expert_sum;      // item: one chunk of columns of one row
  RangeFn argmax;          // item: one row
  RangeFn all_finite;      // item: one row
  int64_t (*matmul_scratch)(const MatmulArgs& args);
  int64_t (*mla_scratch)(const MlaArgs& args);
  double (*fma_loop)(int64_t rounds);  // multiply-adds done
  uint64_t (*read_loop)(const uint8_t* data, int64_t bytes, int streams);
};

constexpr int64_t kChunk = 1024;      // columns of an elementwise item
constexpr int64_t kConvChunk = 256;   // columns of a convolution item
constexpr int64_t kMaxXTile = 8;

const Table* scalar_table();
#ifdef K3_X86
const Table* avx2_table();
const Table* avx512_table();
#endif

}  // namespace k3
