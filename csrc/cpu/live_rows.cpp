#include "live_rows.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <numeric>

namespace mha_ext::cpu {

using at::Tensor;

LiveRows::LiveRows(const std::optional<Tensor>& key_lengths, int64_t length) : length_(length) {
  if (!key_lengths.has_value() || !key_lengths->defined()) return;
  const Tensor lengths = key_lengths->to(at::kLong);
  const auto live = lengths.accessor<int64_t, 1>();
  for (int64_t b = 0; b < live.size(0); ++b) lengths_.push_back(live[b]);
  // Copying rows costs a few hundredths of projecting them.
  const auto total = static_cast<double>(std::accumulate(lengths_.begin(), lengths_.end(), int64_t{0}));
  if (total > 0.9 * static_cast<double>(live.size(0) * length)) lengths_.clear();
}

Tensor LiveRows::take(const Tensor& x) const {
  if (lengths_.empty()) return x;
  std::vector<Tensor> rows;
  for (size_t b = 0; b < lengths_.size(); ++b) rows.push_back(x.select(0, b).narrow(0, 0, lengths_[b]));
  return at::cat(rows);
}

Tensor LiveRows::put(const Tensor& y) const {
  if (lengths_.empty()) return y;
  const Tensor x = at::zeros({static_cast<int64_t>(lengths_.size()), length_, y.size(-1)}, y.options());
  int64_t row = 0;
  for (size_t b = 0; b < lengths_.size(); row += lengths_[b++]) {
    x.select(0, b).narrow(0, 0, lengths_[b]).copy_(y.narrow(0, row, lengths_[b]));
  }
  return x;
}

void LiveRows::add_to(const Tensor& sum, const Tensor& y) const {
  int64_t row = 0;
  for (size_t b = 0; b < lengths_.size(); row += lengths_[b++]) {
    sum.select(0, b).narrow(0, 0, lengths_[b]).add_(y.narrow(0, row, lengths_[b]));
  }
}

}  // namespace mha_ext::cpu
