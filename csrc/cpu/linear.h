// The projections of a layer and their gradients, each by the fastest of three matrix products on this machine: tiles
// of our own around oneDNN's brgemm (kernels/linear.h), ATen's oneDNN operator, or the BLAS that torch was built with.
#pragma once

#include "kernels/linear_params.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mha_ext::cpu {

// Products that do not depend on each other: in tiles they share one parallel region. No result is to be read before
// run().
class LinearProducts {
 public:
  // y = x w^T + b: x (..., in), w (out, in), b (out,); y (..., out), contiguous.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b);

  // dx = sum over the terms of dy w: (dy (..., out), w (out, in)) each, at most kLinearTerms; dx (..., in).
  at::Tensor grad_input(const std::vector<std::pair<at::Tensor, at::Tensor>>& terms);

  // dw = dy^T x (out, in) and db = dy (out,), summed over all leading dimensions; undefined unless wanted.
  std::pair<at::Tensor, at::Tensor> grad_weight(const at::Tensor& dy, const at::Tensor& x, bool need_weight,
                                                bool need_bias);

  void run();

 private:
  enum class Reader : uint8_t {
    brgemm,
    copy
  };  // who reads an operand's rows: the product, or a task that copies blocks

  LinearProduct& add(LinearKind kind, const at::Tensor& result);
  Rows rows_of(const at::Tensor& x, Reader reader);

  std::vector<LinearProduct> products_;
  std::vector<at::Tensor> operands_;  // copies among them live until run()
};

// "tiles", "onednn" or "blas" for a kind of product; measured at first use, or as the environment variable
// MHA_EXT_LINEAR says.
std::string linear_backend(LinearKind kind);

}  // namespace mha_ext::cpu
