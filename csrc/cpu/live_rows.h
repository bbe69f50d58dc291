// Rows of a layer's key and value that key_lengths hide from every query: they need no projection, forward or backward.
#pragma once

#include "../mha_ext.h"

#include <vector>

namespace mha_ext::cpu {

class LiveRows {
 public:
  // All rows of (B, L, ...) tensors.
  LiveRows() = default;

  // The first key_lengths[b] rows of each sequence, or all where that would save little. The lengths have been checked.
  LiveRows(const std::optional<at::Tensor>& key_lengths, int64_t length);

  // (B, L, F) -> (live rows, F); x itself if all rows live.
  at::Tensor take(const at::Tensor& x) const;

  // (live rows, F) -> (B, L, F), zeros elsewhere; y itself if all rows live.
  at::Tensor put(const at::Tensor& y) const;

  // sum (B, L, F) += y (live rows, F)
  void add_to(const at::Tensor& sum, const at::Tensor& y) const;

  bool all() const { return lengths_.empty(); }

 private:
  std::vector<int64_t> lengths_;  // of each sequence; empty: all rows
  int64_t length_ = 0;
};

}  // namespace mha_ext::cpu
