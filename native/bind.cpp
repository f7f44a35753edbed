// The Python face of the kernels: checks shapes and types, releases the interpreter lock, calls the engine.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu.hpp"
#include "engine.hpp"
#include "fpmode.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace k3 {
namespace {

using In = nb::ndarray<nb::ro, nb::device::cpu>;
using Out = nb::ndarray<nb::device::cpu>;
using Shape = std::vector<int64_t>;

constexpr int64_t kAny = -1;

std::string text(const Shape& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) s += ", ";
    s += shape[i] == kAny ? "any" : std::to_string(shape[i]);
  }
  return s + "]";
}

template <class Array>
int64_t size_at(const Array& a, size_t axis) {
  return static_cast<int64_t>(a.shape(axis));
}

// Refuses an array that has not the element type, the shape, or contiguous memory from axis `dense_from` on.
template <class T, class Array>
void expect(const Array& a, const std::string& name, const Shape& shape, size_t dense_from) {
  if (a.dtype() != nb::dtype<T>())
    throw nb::value_error((name + " has the wrong element type: expected " + (sizeof(T) == 1   ? "uint8 or bool"
                                                                              : sizeof(T) == 2 ? "uint16"
                                                                              : sizeof(T) == 8 ? "int64"
                                                                              : std::is_integral_v<T> ? "int32"
                                                                                                      : "float32") +
                           ".")
                              .c_str());
  Shape found;
  for (size_t i = 0; i < a.ndim(); ++i) found.push_back(size_at(a, i));
  bool same = found.size() == shape.size();
  for (size_t i = 0; same && i < shape.size(); ++i) same = shape[i] == kAny || shape[i] == found[i];
  if (!same) throw nb::value_error((name + " has shape " + text(found) + ", expected " + text(shape) + ".").c_str());
  int64_t step = 1;
  for (size_t i = a.ndim(); a.size() > 0 && i-- > dense_from; step *= size_at(a, i)) {
    if (size_at(a, i) > 1 && a.stride(i) != step)
      throw nb::value_error((name + " must be contiguous " + (dense_from == 0 ? "throughout." : "along its last axis."))
                                .c_str());
  }
}

int64_t row_stride(const In& a) { return a.stride(0); }

Rows rows_of(const In& a, const char* name, int64_t rows, int64_t cols) {
  expect<float>(a, name, {rows, cols}, 1);
  return {static_cast<const float*>(a.data()), row_stride(a)};
}
Rows any_rows(const In& a, const char* name, int64_t& rows, int64_t& cols) {
  const Rows r = rows_of(a, name, kAny, kAny);
  rows = size_at(a, 0);
  cols = size_at(a, 1);
  return r;
}
OutRows out_of(const Out& a, const char* name, int64_t rows, int64_t cols) {
  expect<float>(a, name, {rows, cols}, 1);
  return {static_cast<float*>(a.data()), a.stride(0)};
}
const float* vector_of(const In& a, const char* name, int64_t count) {
  expect<float>(a, name, {count}, 0);
  return static_cast<const float*>(a.data());
}
void require(bool good, const char* message) {
  if (!good) throw nb::value_error(message);
}

using MaybeShape = std::optional<std::pair<int64_t, int64_t>>;

const uint8_t* high_bytes_of(const In& table) {
  expect<uint8_t>(table, "table", {16}, 0);
  return static_cast<const uint8_t*>(table.data());
}

Matrix panel_of(const In& data, const In& table, int64_t rows, int64_t cols) {
  expect<uint8_t>(data, "weight.data", {kAny}, 0);
  return Engine::packed12(static_cast<const uint8_t*>(data.data()), size_at(data, 0), high_bytes_of(table), rows, cols);
}

// `table` is an MXFP4 matrix's scales or, with the shape, the high bytes of 12-bit weights.
Matrix matrix_of(const Engine& engine, const In& data, const std::optional<In>& table, const MaybeShape& shape) {
  if (shape.has_value()) {
    require(table.has_value(), "12-bit weights need their table of high bytes.");
    return panel_of(data, *table, shape->first, shape->second);
  }
  if (table.has_value()) {
    expect<uint8_t>(data, "weight.packed", {kAny, kAny}, 0);
    const int64_t rows = size_at(data, 0), cols = 2 * size_at(data, 1);
    require(cols % 32 == 0, "weight.packed must hold whole groups of 32 columns (16 bytes).");
    expect<uint8_t>(*table, "weight.scales", {rows, cols / 32}, 0);
    return engine.mxfp4(static_cast<const uint8_t*>(data.data()), static_cast<const uint8_t*>(table->data()), rows,
                        cols);
  }
  const bool bf16 = data.dtype() == nb::dtype<uint16_t>();
  if (bf16) {
    expect<uint16_t>(data, "weight", {kAny, kAny}, 0);
  } else {
    expect<float>(data, "weight", {kAny, kAny}, 0);
  }
  return {bf16 ? Encoding::bf16 : Encoding::f32, data.data(), nullptr, nullptr, nullptr, size_at(data, 0),
          size_at(data, 1)};
}

void matmul(Engine& engine, const In& x, const In& data, const std::optional<In>& table, const MaybeShape& shape,
            const Out& out) {
  const Matrix w = matrix_of(engine, data, table, shape);
  int64_t rows, cols;
  const Rows in = any_rows(x, "x", rows, cols);
  require(cols == w.cols, "x and the weight have different numbers of columns.");
  const OutRows to = out_of(out, "out", rows, w.rows);
  const nb::gil_scoped_release release;
  engine.matmul(in, rows, w, to);
}

int64_t encode12(Engine& engine, const In& bits, const In& table, const Out& panel) {
  expect<uint16_t>(bits, "bits", {kAny, kAny}, 0);
  const int64_t rows = size_at(bits, 0), cols = size_at(bits, 1);
  require(cols % 32 == 0, "bits must hold whole blocks of 32 columns.");
  const uint8_t* high_bytes = high_bytes_of(table);
  expect<uint8_t>(panel, "panel", {kAny}, 0);
  require(size_at(panel, 0) >= packed12_limit(rows, cols), "panel has no room for a matrix of which every block is listed.");
  auto* to = static_cast<uint8_t*>(panel.data());
  const nb::gil_scoped_release release;
  return engine.encode12(static_cast<const uint16_t*>(bits.data()), rows, cols, high_bytes, to);
}

void decode12(Engine& engine, const In& data, const In& table, const Out& bits) {
  expect<uint16_t>(bits, "bits", {kAny, kAny}, 0);
  const Matrix w = panel_of(data, table, size_at(bits, 0), size_at(bits, 1));
  auto* to = static_cast<uint16_t*>(bits.data());
  const nb::gil_scoped_release release;
  engine.decode12(w, to);
}

void count_high_bytes(Engine& engine, const In& bits, const Out& counts) {
  expect<uint16_t>(bits, "bits", {kAny, kAny}, 0);
  expect<int64_t>(counts, "counts", {256}, 0);
  const auto count = static_cast<int64_t>(bits.size());
  auto* to = static_cast<int64_t*>(counts.data());
  const nb::gil_scoped_release release;
  engine.count_high_bytes(static_cast<const uint16_t*>(bits.data()), count, to);
}

void elementwise(Engine& engine, int op, const In& a, const In& b, float beta, float linear_beta, const Out& out) {
  ElementwiseArgs args{};
  args.op = static_cast<Elementwise>(op);
  args.a = any_rows(a, "the first argument", args.rows, args.cols);
  args.b = rows_of(b, "the second argument", args.rows, args.cols);
  args.out = out_of(out, "out", args.rows, args.cols);
  args.beta = beta;
  args.linear_beta = linear_beta;
  const nb::gil_scoped_release release;
  engine.elementwise(args);
}

void rms_norm(Engine& engine, const In& x, const In& weight, float eps, const Out& out) {
  int64_t rows, cols;
  const Rows in = any_rows(x, "x", rows, cols);
  const NormArgs args{in, vector_of(weight, "weight", cols), out_of(out, "out", rows, cols), cols, eps};
  const nb::gil_scoped_release release;
  engine.rms_norm(args, rows);
}

void residual_mix(Engine& engine, const std::vector<In>& sources, const In& norm_weight, const In& proj_weight,
                  float eps, const Out& out) {
  require(!sources.empty(), "residual_mix needs at least one source.");
  int64_t rows, cols;
  std::vector<Rows> in{any_rows(sources[0], "sources[0]", rows, cols)};
  for (size_t i = 1; i < sources.size(); ++i) in.push_back(rows_of(sources[i], "a source", rows, cols));
  const MixArgs args{in.data(),
                     static_cast<int64_t>(in.size()),
                     vector_of(norm_weight, "norm_weight", cols),
                     vector_of(proj_weight, "proj_weight", cols),
                     out_of(out, "out", rows, cols),
                     cols,
                     eps};
  const nb::gil_scoped_release release;
  engine.residual_mix(args, rows);
}

void short_conv(Engine& engine, const In& x, const In& taps, const Out& tail, const Out& out) {
  ConvArgs args{};
  args.x = any_rows(x, "x", args.rows, args.cols);
  args.taps = rows_of(taps, "taps", kAny, args.cols);
  args.width = size_at(taps, 0);
  require(args.width >= 1, "taps must have at least one row.");
  args.tail = out_of(tail, "tail", args.width - 1, args.cols);
  args.out = out_of(out, "out", args.rows, args.cols);
  const nb::gil_scoped_release release;
  engine.short_conv(args);
}

void kda_gate(Engine& engine, const In& z, const In& a_log, const In& dt_bias, float lower_bound, const Out& out) {
  int64_t rows, cols;
  const Rows in = any_rows(z, "z", rows, cols);
  const float* rate = vector_of(a_log, "a_log", kAny);
  const int64_t heads = size_at(a_log, 0);
  require(heads > 0 && cols % heads == 0, "z must have a whole number of columns per entry of a_log.");
  const GateArgs args{in,    rate,         vector_of(dt_bias, "dt_bias", cols), out_of(out, "out", rows, cols),
                      heads, cols / heads, lower_bound};
  const nb::gil_scoped_release release;
  engine.kda_gate(args, rows);
}

void kda_recurrence(Engine& engine, const In& q, const In& k, const In& v, const In& decay, const In& beta,
                    const Out& state, float scale, const Out& out) {
  RecurrenceArgs args{};
  expect<float>(state, "state", {kAny, kAny, kAny}, 0);
  const int64_t heads = size_at(state, 0), dim = size_at(state, 1), cols = heads * dim;
  require(size_at(state, 2) == dim, "state must be [heads, dim, dim].");
  args.q = rows_of(q, "q", kAny, cols);
  args.rows = size_at(q, 0);
  args.k = rows_of(k, "k", args.rows, cols);
  args.v = rows_of(v, "v", args.rows, cols);
  args.decay = rows_of(decay, "decay", args.rows, cols);
  args.beta = rows_of(beta, "beta", args.rows, heads);
  args.state = static_cast<float*>(state.data());
  args.out = out_of(out, "out", args.rows, cols);
  args.dim = dim;
  args.scale = scale;
  const nb::gil_scoped_release release;
  engine.kda_recurrence(args, heads);
}

void kda_output(Engine& engine, const In& o, const In& weight, const In& gate, float eps, const Out& out) {
  HeadNormArgs args{};
  int64_t rows, cols;
  args.o = any_rows(o, "o", rows, cols);
  args.weight = vector_of(weight, "weight", kAny);
  args.dim = size_at(weight, 0);
  require(args.dim > 0 && cols % args.dim == 0, "o must have a whole number of heads as wide as the weight.");
  args.heads = cols / args.dim;
  args.gate = rows_of(gate, "gate", rows, cols);
  args.out = out_of(out, "out", rows, cols);
  args.eps = eps;
  const nb::gil_scoped_release release;
  engine.kda_output(args, rows);
}

void mla_attention(Engine& engine, const In& q, const In& kv_b, const std::optional<In>& table, const MaybeShape& shape,
                   const In& cache, int64_t start, int64_t heads,
                   int64_t nope, int64_t v_dim, float scale, const Out& out) {
  MlaArgs args{};
  require(heads > 0 && nope > 0 && v_dim > 0 && start >= 0, "heads, nope and v_dim must be positive, start >= 0.");
  int64_t q_cols, positions, width;
  args.q = any_rows(q, "q", args.rows, q_cols);
  args.cache = any_rows(cache, "cache", positions, width);
  args.kv_b = matrix_of(engine, kv_b, table, shape);
  require(args.kv_b.encoding != Encoding::mxfp4, "kv_b is an MXFP4 matrix.");
  require(q_cols % heads == 0 && q_cols / heads >= nope, "q must be [rows, heads * (nope + rope)].");
  require(args.kv_b.rows == heads * (nope + v_dim), "kv_b must have heads * (nope + v_dim) rows.");
  args.heads = heads;
  args.nope = nope;
  args.rope = q_cols / heads - nope;
  args.v_dim = v_dim;
  args.latent = args.kv_b.cols;
  args.start = start;
  args.scale = scale;
  require(width == args.latent + args.rope, "cache must be [positions, kv_lora + rope].");
  require(positions >= start + args.rows, "cache must hold the rows of this call: at least start + rows positions.");
  args.out = out_of(out, "out", args.rows, heads * v_dim);
  if (args.rows == 0) return;
  const nb::gil_scoped_release release;
  engine.mla(args);
}

void route(Engine& engine, const In& logits, const In& bias, int64_t top_k, float scaling, bool renormalize,
           const Out& ids, const Out& weights, const Out& finite) {
  RouteArgs args{};
  int64_t rows;
  args.logits = any_rows(logits, "logits", rows, args.experts);
  args.bias = vector_of(bias, "bias", args.experts);
  require(top_k >= 1 && top_k <= args.experts, "top_k must lie between 1 and the number of experts.");
  require(args.experts < std::numeric_limits<int32_t>::max(), "too many experts.");
  args.top_k = top_k;
  args.scaling = scaling;
  args.renormalize = renormalize;
  expect<int32_t>(ids, "ids", {rows, top_k}, 0);
  expect<float>(weights, "weights", {rows, top_k}, 0);
  expect<bool>(finite, "finite", {rows}, 0);
  args.ids = static_cast<int32_t*>(ids.data());
  args.weights = static_cast<float*>(weights.data());
  args.finite = static_cast<bool*>(finite.data());
  const nb::gil_scoped_release release;
  engine.route(args, rows);
}

void accumulate_experts(Engine& engine, const In& outputs, const In& weights, const Out& out) {
  ExpertSumArgs args{};
  expect<float>(outputs, "outputs", {kAny, kAny, kAny}, 2);
  args.rows = size_at(outputs, 0);
  args.experts = size_at(outputs, 1);
  args.cols = size_at(outputs, 2);
  args.outputs = static_cast<const float*>(outputs.data());
  args.row_stride = outputs.stride(0);
  args.expert_stride = outputs.stride(1);
  args.weights = rows_of(weights, "weights", args.rows, args.experts);
  args.out = out_of(out, "out", args.rows, args.cols);
  const nb::gil_scoped_release release;
  engine.expert_sum(args);
}

void argmax(Engine& engine, const In& logits, const Out& ids) {
  ArgmaxArgs args{};
  int64_t rows;
  args.logits = any_rows(logits, "logits", rows, args.cols);
  require(args.cols > 0, "logits must have at least one column.");
  expect<int64_t>(ids, "ids", {rows}, 0);
  args.ids = static_cast<int64_t*>(ids.data());
  const nb::gil_scoped_release release;
  engine.argmax(args, rows);
}

void all_finite(Engine& engine, const In& x, const Out& finite) {
  FiniteArgs args{};
  int64_t rows;
  args.x = any_rows(x, "x", rows, args.cols);
  expect<bool>(finite, "finite", {rows}, 0);
  args.finite = static_cast<bool*>(finite.data());
  const nb::gil_scoped_release release;
  engine.all_finite(args, rows);
}

double fma_rate(Engine& engine) {
  const nb::gil_scoped_release release;
  return engine.fma_rate();
}

double read_seconds(Engine& engine, const In& buffer, int streams, bool all_threads) {
  expect<uint8_t>(buffer, "buffer", {kAny}, 0);
  const auto* data = static_cast<const uint8_t*>(buffer.data());
  const int64_t bytes = size_at(buffer, 0);
  const nb::gil_scoped_release release;
  return engine.read_seconds(data, bytes, streams, all_threads);
}

std::vector<std::string> available() {
  std::vector<std::string> names;
  for (const Table* table : available_tables()) names.emplace_back(table->name);
  return names;
}

}  // namespace
}  // namespace k3

NB_MODULE(_native, m) {
  using namespace k3;
  nb::set_leak_warnings(false);  // a model that lives until the interpreter's end is no fault
  m.def("available", &available);
  m.def("float_mode", &FloatMode::read);
  m.def("set_float_mode", &FloatMode::write, "mode"_a);
  nb::class_<Engine>(m, "Engine")
      .def(nb::init<const std::string&, int>(), "isa"_a, "threads"_a)
      .def_prop_ro("isa", &Engine::isa)
      .def_prop_ro("threads", &Engine::threads)
      .def("matmul", &matmul, "x"_a.noconvert(), "data"_a.noconvert(), "table"_a.noconvert().none(),
           "shape"_a.none(), "out"_a.noconvert())
      .def("encode12", &encode12, "bits"_a.noconvert(), "table"_a.noconvert(), "panel"_a.noconvert())
      .def("decode12", &decode12, "data"_a.noconvert(), "table"_a.noconvert(), "bits"_a.noconvert())
      .def("count_high_bytes", &count_high_bytes, "bits"_a.noconvert(), "counts"_a.noconvert())
      .def("elementwise", &elementwise, "op"_a, "a"_a.noconvert(), "b"_a.noconvert(), "beta"_a, "linear_beta"_a,
           "out"_a.noconvert())
      .def("rms_norm", &rms_norm, "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a, "out"_a.noconvert())
      .def("residual_mix", &residual_mix, "sources"_a, "norm_weight"_a.noconvert(), "proj_weight"_a.noconvert(),
           "eps"_a, "out"_a.noconvert())
      .def("short_conv", &short_conv, "x"_a.noconvert(), "taps"_a.noconvert(), "tail"_a.noconvert(),
           "out"_a.noconvert())
      .def("kda_gate", &kda_gate, "z"_a.noconvert(), "a_log"_a.noconvert(), "dt_bias"_a.noconvert(), "lower_bound"_a,
           "out"_a.noconvert())
      .def("kda_recurrence", &kda_recurrence, "q"_a.noconvert(), "k"_a.noconvert(), "v"_a.noconvert(),
           "decay"_a.noconvert(), "beta"_a.noconvert(), "state"_a.noconvert(), "scale"_a, "out"_a.noconvert())
      .def("kda_output", &kda_output, "o"_a.noconvert(), "weight"_a.noconvert(), "gate"_a.noconvert(), "eps"_a,
           "out"_a.noconvert())
      .def("mla_attention", &mla_attention, "q"_a.noconvert(), "kv_b"_a.noconvert(), "table"_a.noconvert().none(),
           "shape"_a.none(), "cache"_a.noconvert(), "start"_a,
           "heads"_a, "nope"_a, "v_dim"_a, "scale"_a, "out"_a.noconvert())
      .def("route", &route, "logits"_a.noconvert(), "bias"_a.noconvert(), "top_k"_a, "scaling"_a, "renormalize"_a,
           "ids"_a.noconvert(), "weights"_a.noconvert(), "finite"_a.noconvert())
      .def("accumulate_experts", &accumulate_experts, "outputs"_a.noconvert(), "weights"_a.noconvert(),
           "out"_a.noconvert())
      .def("argmax", &argmax, "logits"_a.noconvert(), "ids"_a.noconvert())
      .def("all_finite", &all_finite, "x"_a.noconvert(), "finite"_a.noconvert())
      .def("fma_rate", &fma_rate)
      .def("read_seconds", &read_seconds, "buffer"_a.noconvert(), "streams"_a, "all_threads"_a);
}
