#include "linear.h"

#include "environment.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
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

enum Product { kForward, kGradInput, kGradWeight, kProducts };

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

Tensor run(Product product, bool dnn, const Tensor& a, const Tensor& b, const OptionalTensor& bias) {
  switch (product) {
    case kForward: return dnn ? onednn_product(a, b, bias) : at::linear(a, b, bias);
    case kGradInput: return dnn ? onednn_product(a, b.t(), std::nullopt) : at::mm(a, b);
    default: return dnn ? onednn_product(a.t(), b.t(), std::nullopt) : at::mm(a.t(), b);
  }
}

double seconds(Product product, bool dnn, const Tensor& a, const Tensor& b) {
  const auto start = std::chrono::steady_clock::now();
  run(product, dnn, a, b, std::nullopt);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Both in turns, some 10 milliseconds in all; the first turns also warm up. oneDNN has to win by a twentieth: at a tie
// the choice should not hang on noise, as results differ in the last bit.
bool measure_onednn(Product product) {
  if (!onednn()) return false;
  const Tensor rows = at::ones({512, 512}), other = at::ones({512, 512});
  double blas = 1e9, dnn = 1e9;
  try {
    for (int i = 0; i < 6; ++i) {
      blas = std::min(blas, seconds(product, false, rows, other));
      dnn = std::min(dnn, seconds(product, true, rows, other));
    }
    return dnn * 1.05 < blas;
  } catch (const c10::Error&) {
    return false;  // oneDNN refuses this machine
  }
}

bool choose_onednn(Product product) {
  static const std::array<bool, kProducts> choice = [] {
    const std::string_view wish = environment_choice("MHA_EXT_LINEAR", {"blas", "onednn"});
    if (wish == "blas") return std::array<bool, kProducts>{};
    if (wish == "onednn" && onednn()) return std::array<bool, kProducts>{true, true, true};
    return std::array<bool, kProducts>{measure_onednn(kForward), measure_onednn(kGradInput),
                                       measure_onednn(kGradWeight)};
  }();
  return choice[product];
}

bool use_onednn(Product product, const Tensor& a, const Tensor& b) {
  return a.scalar_type() == at::kFloat && a.numel() > 0 && b.numel() > 0 && at::globalContext().userEnabledMkldnn() &&
         choose_onednn(product);
}

Tensor rows_of(const Tensor& x) { return x.reshape({-1, x.size(-1)}); }

Tensor like_rows(const Tensor& y, const Tensor& x) {
  auto sizes = x.sizes().vec();
  sizes.back() = y.size(-1);
  return y.view(sizes);
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  const Tensor rows = x.numel() > 0 ? rows_of(x) : x;
  return like_rows(run(kForward, use_onednn(kForward, x, w), rows, w, b), x).contiguous();
}

Tensor linear_grad_input(const Tensor& dy, const Tensor& w) {
  if (dy.numel() == 0) return at::matmul(dy, w);
  return like_rows(run(kGradInput, use_onednn(kGradInput, dy, w), rows_of(dy), w, std::nullopt), dy).contiguous();
}

Tensor add_linear_grad_input(const Tensor& sum, const Tensor& dy, const Tensor& w) {
  if (sum.numel() == 0 || dy.numel() == 0) return sum;
  if (!use_onednn(kGradInput, dy, w)) {
    rows_of(sum).addmm_(rows_of(dy), w);
    return sum;
  }
  return onednn()->linear_plus.call(rows_of(dy), rows_of(sum), w.t(), std::nullopt, "add").view(sum.sizes());
}

Tensor linear_grad_weight(const Tensor& dy, const Tensor& x) {
  const Tensor rows = dy.flatten(0, -2), inputs = x.flatten(0, -2);
  return run(kGradWeight, use_onednn(kGradWeight, dy, x), rows, inputs, std::nullopt).contiguous();
}

Tensor linear_grad_bias(const Tensor& dy) { return dy.flatten(0, -2).sum(0); }

std::string linear_backend(int product) { return choose_onednn(static_cast<Product>(product)) ? "onednn" : "blas"; }

}  // namespace mha_ext::cpu
