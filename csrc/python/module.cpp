// `_C`: what Python asks the library about itself, and the settings for tests and tuning. No operators: those are
// reached through torch.ops.mha_ext. Types for Python: mha_ext/_C.pyi.
#include "composite/fused.h"
#include "cpu/brgemm.h"
#include "cpu/dispatch.h"
#include "cpu/kept_memory.h"
#include "cpu/linear.h"
#include "cpu/work_split.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>

namespace {

namespace py = pybind11;
using namespace mha_ext::cpu;

std::string cpu_capability() { return kernel_table().name; }

constexpr std::array<const char*, 3> kLinearKinds = {"forward", "grad_input", "grad_weight"};  // in LinearKind's order

py::dict linear_backends() {
  py::dict backends;
  for (size_t kind = 0; kind < kLinearKinds.size(); ++kind) {
    backends[kLinearKinds[kind]] = linear_backend(static_cast<LinearKind>(kind));
  }
  return backends;
}

std::tuple<int64_t, int64_t, int64_t, int64_t> get_tile_size() {
  const TileSize t = tile_size();
  return {t.forward_queries, t.forward_keys, t.backward_queries, t.backward_keys};
}

// Of each task, in the order in which they are taken: batch, key head, first and last (excluded) row and key.
using Task = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

std::vector<Task> work_list(bool backward, int64_t batch, int64_t heads, int64_t kv_heads, int64_t q_len,
                            int64_t kv_len, bool is_causal, int64_t threads) {
  BackwardParams p{};
  p.batch = batch;
  p.heads = heads;
  p.kv_heads = kv_heads;
  p.q_len = q_len;
  p.kv_len = kv_len;
  p.is_causal = is_causal;
  p.tile = tile_size();
  std::vector<Task> tasks;
  const int64_t rows = p.group() * q_len;
  if (backward) {
    for (const auto& t : split_backward(p, threads).tasks) {
      tasks.emplace_back(t.batch, t.kv_head, 0, rows, t.first_block * p.tile.backward_keys,
                         std::min(kv_len, t.last_block * p.tile.backward_keys));
    }
    return tasks;
  }
  for (const auto& t : split_forward(p, threads).tasks) {
    tasks.emplace_back(t.batch, t.kv_head, t.first_block * p.tile.forward_queries,
                       std::min(rows, t.last_block * p.tile.forward_queries), 0, kv_len);
  }
  return tasks;
}

// Of each task of one product: first and last (excluded) row, first and last column of the result.
std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>> linear_work_list(const std::string& kind, int64_t rows,
                                                                             int64_t columns, int64_t depth,
                                                                             int64_t threads) {
  const auto* found = std::find(kLinearKinds.begin(), kLinearKinds.end(), kind);
  TORCH_CHECK_VALUE(found != kLinearKinds.end(), "linear_work_list: expected forward, grad_input or grad_weight, got ",
                    kind);
  LinearProduct product{};
  product.kind = static_cast<LinearKind>(found - kLinearKinds.begin());
  product.rows = rows;
  product.columns = columns;
  product.terms[product.term_count++].depth = depth;
  std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>> tasks;
  for (const auto& t : split_linear({product}, threads)) {
    tasks.emplace_back(t.first_row, t.last_row, t.first_column, t.last_column);
  }
  return tasks;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "What libmha_ext uses on this machine, and its settings.";

  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const c10::ValueError& error) {
      py::set_error(PyExc_ValueError, error.what_without_backtrace());
    }
  });

  m.def("cpu_capability", &cpu_capability, "The kernels in use: 'default', 'avx2' or 'avx512'.");
  m.def("brgemm_available", &brgemm_available,
        "Whether float32 tile products run in oneDNN's batch-reduce GEMM; otherwise in the kernels' own.");
  m.def("linear_backends", &linear_backends,
        "'tiles', 'onednn' or 'blas' for the projections' products 'forward', 'grad_input' and 'grad_weight'.");
  m.def(
      "kept_memory", [] { return std::make_tuple(kept_bytes(), most_kept_bytes()); },
      "Bytes of freed tensors that are kept for later calls, and at most.");
  m.def("release_kept_memory", &release_kept_memory, "Gives them back to the system.");
  m.def("multiply_add", &multiply_add, py::arg("iterations"), py::call_guard<py::gil_scoped_release>(),
        "Multiplies and adds float32 numbers in the registers of all threads; returns how many operations that were.");
  m.def("tile_size", &get_tile_size, "Rows and columns of the score tile: forward queries and keys, then backward's.");
  m.def("work_list", &work_list, py::arg("backward"), py::arg("batch"), py::arg("heads"), py::arg("kv_heads"),
        py::arg("q_len"), py::arg("kv_len"), py::arg("is_causal"), py::arg("threads"),
        "The tasks of a call in the order in which threads take them: tuples of batch, key head, first and last "
        "(excluded) row of those that share the key head, first and last key.");
  m.def("linear_work_list", &linear_work_list, py::arg("kind"), py::arg("rows"), py::arg("columns"), py::arg("depth"),
        py::arg("threads"),
        "The tasks of one product of a projection, 'forward', 'grad_input' or 'grad_weight', in their order: tuples of "
        "first and last (excluded) row, first and last column of its result (rows, columns).");
  m.def(
      "set_tile_size",
      [](int64_t forward_queries, int64_t forward_keys, int64_t backward_queries, int64_t backward_keys) {
        set_tile_size({forward_queries, forward_keys, backward_queries, backward_keys});
      },
      py::arg("forward_queries"), py::arg("forward_keys"), py::arg("backward_queries"), py::arg("backward_keys"),
      "Sets what tile_size gives; not while another thread runs an operator.");
  m.def(
      "set_fused_on_cpu", &mha_ext::composite::set_fused_on_cpu, py::arg("on"),
      "Lets the composite kernels use PyTorch's fused attention for tensors of the CPU as they do for other devices'.");
}
