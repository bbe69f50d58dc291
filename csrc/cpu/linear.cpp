#include "linear.h"

#include "../outputs.h"
#include "brgemm.h"
#include "dispatch.h"
#include "environment.h"
#include "kernels/tile_size.h"
#include "parallel.h"
#include "work_split.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <string_view>

namespace mha_ext::cpu {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

enum class Backend : uint8_t { blas, onednn, tiles };
constexpr size_t kKinds = 3;

// x (m, k) times w^T (k, n) plus b in oneDNN; both operands may be transposed views.
using OneDnnLinear = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view,
                            at::List<std::optional<at::Scalar>>, std::optional<std::string_view>);

// The same plus a third matrix (m, n).
using OneDnnLinearPlus = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, std::string_view);

struct OneDnn {
  c10::TypedOperatorHandle<OneDnnLinear> linear;
  c10::TypedOperatorHandle<OneDnnLinearPlus> linear_plus;
};

const std::optional<OneDnn>& onednn() {
  static const auto ops = []() -> std::optional<OneDnn> {
    auto& dispatcher = c10::Dispatcher::singleton();
    const auto linear = dispatcher.findSchema({"mkldnn::_linear_pointwise", ""});
    const auto linear_plus = dispatcher.findSchema({"mkldnn::_linear_pointwise", "binary"});
    if (!linear || !linear_plus || !at::globalContext().hasMKLDNN()) return std::nullopt;
    return OneDnn{linear->typed<OneDnnLinear>(), linear_plus->typed<OneDnnLinearPlus>()};
  }();
  return ops;
}

Tensor onednn_product(const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  // It takes any strides of x and w, but reads b as if it were dense.
  const auto dense = b.has_value() && b->defined() ? OptionalTensor(b->contiguous()) : std::nullopt;
  return onednn()->linear.call(x, w, dense, "none", at::List<std::optional<at::Scalar>>(), "");
}

// Of matrices, by a library.
Tensor library_product(LinearKind kind, bool dnn, const Tensor& a, const Tensor& b, const OptionalTensor& bias) {
  switch (kind) {
    case LinearKind::forward: return dnn ? onednn_product(a, b, bias) : at::linear(a, b, bias);
    case LinearKind::grad_input: return dnn ? onednn_product(a, b.t(), std::nullopt) : at::mm(a, b);
    default: return dnn ? onednn_product(a.t(), b.t(), std::nullopt) : at::mm(a.t(), b);
  }
}

void run_products(const std::vector<LinearProduct>& products) {
  double flops = 0;
  for (const LinearProduct& p : products) {
    for (int64_t i = 0; i < p.term_count; ++i) {
      flops +=
          2.0 * static_cast<double>(p.rows) * static_cast<double>(p.columns) * static_cast<double>(p.terms[i].depth);
    }
  }
  const int64_t threads = useful_threads(flops);
  const std::vector<LinearTask> tasks = split_linear(products, threads);
  TaskQueue<LinearTask> queue{tasks.data(), static_cast<int64_t>(tasks.size())};
  const KernelTable& kernels = kernel_table();
  run_workers(threads, queue, kernels.linear_scratch_bytes(),
              [&](std::byte* scratch) { kernels.linear_worker(products.data(), queue, scratch); });
}

// Seconds for (rows, 512) times (512, 512).
double measure(LinearKind kind, Backend backend, const Tensor& a, const Tensor& b, const Tensor& result) {
  const auto start = std::chrono::steady_clock::now();
  if (backend == Backend::tiles) {
    const Rows rows_a = {a.const_data_ptr<float>(), a.size(1)}, rows_b = {b.const_data_ptr<float>(), b.size(1)};
    const bool transposed = kind == LinearKind::grad_weight;
    run_products({{.kind = kind,
                   .rows = a.size(transposed ? 1 : 0),
                   .columns = 512,
                   .terms = {{rows_a, rows_b, a.size(transposed ? 0 : 1)}},
                   .term_count = 1,
                   .result = result.mutable_data_ptr<float>()}});
  } else {
    library_product(kind, backend == Backend::onednn, a, b, std::nullopt);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// All in turns, some 10 milliseconds; the first turns also warm up. To be chosen before one that stands earlier in the
// list a backend has to win by a twentieth: at a tie the choice should not hang on noise, as results differ in the last
// bit.
Backend measured_backend(LinearKind kind) {
  std::vector<Backend> candidates;
  if (brgemm_available()) candidates.push_back(Backend::tiles);
  candidates.push_back(Backend::blas);
  if (onednn()) candidates.push_back(Backend::onednn);
  const int64_t count = std::clamp<int64_t>(64 * at::get_num_threads(), 128, 1024);  // work for every thread
  const Tensor rows = at::ones({count, 512}, at::kFloat);                            // whatever the default dtype is
  const Tensor other = at::ones({kind == LinearKind::grad_weight ? count : 512, 512}, at::kFloat);
  const Tensor result = at::empty({kind == LinearKind::grad_weight ? 512 : count, 512}, at::kFloat);
  std::array<double, 3> best{1e9, 1e9, 1e9};
  for (int i = 0; i < 6; ++i) {
    for (const Backend backend : candidates) {
      auto& seconds = best[static_cast<size_t>(backend)];
      try {
        seconds = std::min(seconds, measure(kind, backend, rows, other, result));
      } catch (const c10::Error&) {  // oneDNN refuses this machine: never chosen
      }
    }
  }
  Backend choice = candidates.front();
  for (const Backend backend : candidates) {
    if (best[static_cast<size_t>(backend)] * 1.05 < best[static_cast<size_t>(choice)]) choice = backend;
  }
  return choice;
}

Backend backend_of(LinearKind kind) {
  static const std::array<Backend, kKinds> choice = [] {
    const std::string_view wish = environment_choice("MHA_EXT_LINEAR", {"blas", "onednn", "tiles"});
    std::array<Backend, kKinds> all{};
    if (wish == "onednn" && onednn()) all.fill(Backend::onednn);
    if (wish == "tiles" && brgemm_available()) all.fill(Backend::tiles);
    if (wish.empty()) {
      for (size_t kind = 0; kind < kKinds; ++kind) all[kind] = measured_backend(static_cast<LinearKind>(kind));
    }
    return all;
  }();
  return choice[static_cast<size_t>(kind)];
}

Backend backend_for(LinearKind kind, const Tensor& a, const Tensor& b) {
  const bool fits = a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat && a.numel() > 0 && b.numel() > 0 &&
                    at::globalContext().userEnabledMkldnn();
  return fits ? backend_of(kind) : Backend::blas;
}

Tensor matrix_of(const Tensor& x) { return x.reshape({-1, x.size(-1)}); }

Tensor like_rows(const Tensor& y, const Tensor& x) {
  auto sizes = x.sizes().vec();
  sizes.back() = y.size(-1);
  return y.view(sizes);
}

Tensor empty_like_rows(const Tensor& x, int64_t columns) {
  auto sizes = x.sizes().vec();
  sizes.back() = columns;
  return empty(c10::fromIntArrayRefSlow(sizes), x.options());
}

// sum + dy w, in sum's memory or in new: sum is given up.
Tensor add_grad_input(const Tensor& sum, const Tensor& dy, const Tensor& w, bool dnn) {
  if (!dnn) return matrix_of(sum).addmm_(matrix_of(dy), w);
  return onednn()->linear_plus.call(matrix_of(dy), matrix_of(sum), w.t(), std::nullopt, "add");
}

}  // namespace

LinearProduct& LinearProducts::add(LinearKind kind, const Tensor& result) {
  LinearProduct product{};
  product.kind = kind;
  if (result.defined()) product.result = result.mutable_data_ptr<float>();
  return products_.emplace_back(product);
}

Rows LinearProducts::rows_of(const Tensor& x, Reader reader) {
  Tensor matrix = x.dim() == 2 ? x : matrix_of(x);
  // Strides of dimensions of size 1 say nothing.
  const int64_t distance = matrix.size(0) > 1 ? matrix.stride(0) : matrix.size(1);
  const bool rows_are_dense = matrix.size(1) == 1 || matrix.stride(1) == 1;
  // oneDNN compiles and keeps a kernel for each distance of rows, and has none for 2 GB.
  const bool fits = reader == Reader::brgemm ? distance == matrix.size(1) : distance >= matrix.size(1);
  if (!rows_are_dense || !fits) matrix = matrix.contiguous();
  operands_.push_back(matrix);
  return {matrix.const_data_ptr<float>(), matrix.size(0) > 1 ? matrix.stride(0) : matrix.size(1)};
}

Tensor LinearProducts::forward(const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  const Backend backend = backend_for(LinearKind::forward, x, w);
  if (backend != Backend::tiles) {
    const Tensor rows = x.numel() > 0 ? matrix_of(x) : x;
    return like_rows(library_product(LinearKind::forward, backend == Backend::onednn, rows, w, b), x).contiguous();
  }
  const Tensor y = empty_like_rows(x, w.size(0));
  LinearProduct& p = add(LinearKind::forward, y);
  p.rows = x.numel() / x.size(-1);
  p.columns = w.size(0);
  const Reader reader = p.rows <= kFewLinearRows ? Reader::copy : Reader::brgemm;
  p.terms[p.term_count++] = {rows_of(x, reader), rows_of(w, Reader::copy), w.size(1)};
  if (b.has_value() && b->defined()) p.bias = operands_.emplace_back(b->contiguous()).const_data_ptr<float>();
  return y;
}

Tensor LinearProducts::grad_input(const std::vector<std::pair<Tensor, Tensor>>& terms) {
  const auto& [first_dy, first_w] = terms.front();
  if (first_dy.numel() == 0 || first_w.numel() == 0) return at::matmul(first_dy, first_w);
  const Backend backend = backend_for(LinearKind::grad_input, first_dy, first_w);
  if (backend != Backend::tiles) {
    const bool dnn = backend == Backend::onednn;
    Tensor sum = library_product(LinearKind::grad_input, dnn, matrix_of(first_dy), first_w, std::nullopt).contiguous();
    for (size_t i = 1; i < terms.size(); ++i) sum = add_grad_input(sum, terms[i].first, terms[i].second, dnn);
    return like_rows(sum, first_dy);
  }
  const Tensor dx = empty_like_rows(first_dy, first_w.size(1));
  LinearProduct& p = add(LinearKind::grad_input, dx);
  p.rows = first_dy.numel() / first_dy.size(-1);
  p.columns = first_w.size(1);
  for (const auto& [dy, w] : terms) {
    p.terms[p.term_count++] = {rows_of(dy, Reader::brgemm), rows_of(w, Reader::brgemm), w.size(0)};
  }
  return dx;
}

std::pair<Tensor, Tensor> LinearProducts::grad_weight(const Tensor& dy, const Tensor& x, bool need_weight,
                                                      bool need_bias) {
  std::pair<Tensor, Tensor> grads;
  if (!need_weight && !need_bias) return grads;
  const Tensor rows = dy.flatten(0, -2), inputs = x.flatten(0, -2);
  const Backend backend = backend_for(LinearKind::grad_weight, rows, inputs);
  if (backend != Backend::tiles) {
    if (need_weight) {
      grads.first =
          library_product(LinearKind::grad_weight, backend == Backend::onednn, rows, inputs, std::nullopt).contiguous();
    }
    if (need_bias) grads.second = rows.sum(0);
    return grads;
  }
  if (need_weight) grads.first = empty({rows.size(1), inputs.size(1)}, dy.options());
  if (need_bias) grads.second = at::empty({rows.size(1)}, dy.options());
  LinearProduct& p = add(LinearKind::grad_weight, grads.first);
  p.rows = rows.size(1);
  p.columns = need_weight ? inputs.size(1) : 1;
  const Rows x_rows = need_weight ? rows_of(inputs, Reader::brgemm) : Rows{nullptr, 0};
  p.terms[p.term_count++] = {rows_of(rows, Reader::copy), x_rows, rows.size(0)};
  if (need_bias) p.row_sums = grads.second.mutable_data_ptr<float>();
  return grads;
}

void LinearProducts::run() {
  if (!products_.empty()) run_products(products_);
  products_.clear();
  operands_.clear();
}

std::string linear_backend(LinearKind kind) {
  constexpr std::array<const char*, 3> names = {"blas", "onednn", "tiles"};
  return names[static_cast<size_t>(backend_of(kind))];
}

}  // namespace mha_ext::cpu
