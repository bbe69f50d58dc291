// When the engine's own autograd node cannot serve a call, and the composite form has to.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <optional>

namespace mha_ext::autograd {

// Undefined tensors, which C++ programs can pass, must not meet autograd's own code, which expects none.
inline bool all_defined(std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return tensor.defined(); });
}

inline bool requires_grad(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() && tensor->requires_grad();
}

inline bool any_requires_grad(c10::ArrayRef<std::optional<at::Tensor>> tensors) {
  if (!c10::GradMode::is_enabled()) return false;
  for (const auto& tensor : tensors) {
    if (requires_grad(tensor)) return true;
  }
  return false;
}

// A functorch transform (grad, vmap, jvp, ...) is running: it sees through ATen calls, but not through a C++ node.
// csrc/functorch answers such calls, except those of somebody's operator that decomposes inside a transform.
inline bool inside_functorch() {
  const auto& tls = at::functorch::functorchTLSAccessor();
  if (!tls) return false;
  try {
    tls->checkSupportsCppAutogradFunction();
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

// Forward-mode AD: one of the inputs carries a tangent.
inline bool any_tangent(c10::ArrayRef<std::optional<at::Tensor>> tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.has_value() && tensor->defined() && tensor->_fw_grad(/*level=*/0).defined()) return true;
  }
  return false;
}

}  // namespace mha_ext::autograd
