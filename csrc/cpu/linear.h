// The projections of a layer and their gradients, each by the faster of ATen's two matrix products on this machine: the
// BLAS that torch was built with, or oneDNN (on AVX-512 machines that are not Intel's MKL is at half of oneDNN's
// speed).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace mha_ext::cpu {

// y = x w^T + b: x (..., in), w (out, in), b (out,); returns (..., out), contiguous.
at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b);

// dx = dy w: dy (..., out); returns (..., in).
at::Tensor linear_grad_input(const at::Tensor& dy, const at::Tensor& w);

// sum + dy w, in sum's memory or in new: sum is given up.
at::Tensor add_linear_grad_input(const at::Tensor& sum, const at::Tensor& dy, const at::Tensor& w);

// dw = dy^T x, summed over all leading dimensions; returns (out, in).
at::Tensor linear_grad_weight(const at::Tensor& dy, const at::Tensor& x);

// db = dy summed over all leading dimensions; returns (out,).
at::Tensor linear_grad_bias(const at::Tensor& dy);

// "blas" or "onednn" for each of the three products; measured at first use, or as the environment variable
// MHA_EXT_LINEAR=blas|onednn says.
std::string linear_backend(int product);

}  // namespace mha_ext::cpu
