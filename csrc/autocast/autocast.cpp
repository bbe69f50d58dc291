// Under autocast the operators run in its dtype, as linear and scaled_dot_product_attention do. The additive bias keeps
// its own: it is added to scores that are accumulated in float32 anyway.
#include "../flat_signatures.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace mha_ext::autocast {
namespace {

using at::Tensor;

// Casts to the dtype of autocast; autocast itself is off while a Cast lives.
template <at::DeviceType device>
class Cast {
 public:
  template <typename T>
  T operator()(const T& tensor) const {
    return at::autocast::cached_cast(dtype_, tensor, device);
  }

 private:
  at::ScalarType dtype_ = at::autocast::get_autocast_dtype(device);
  c10::impl::ExcludeDispatchKeyGuard off_{at::autocast::get_autocast_dispatch_key_from_device_type(device)};
};

template <at::DeviceType device>
ThreeTensors attention(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options) {
  const Cast<device> cast;
  return mha_ext::attention(cast(query), cast(key), cast(value), options);
}

template <at::DeviceType device>
TwoTensors multi_head_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Projections& p,
                                int64_t num_heads, const AttentionOptions& options) {
  const Cast<device> cast;
  return mha_ext::multi_head_attention(
      cast(query), cast(key), cast(value),
      {cast(p.w_q), cast(p.w_k), cast(p.w_v), cast(p.w_o), cast(p.b_q), cast(p.b_k), cast(p.b_v), cast(p.b_o)},
      num_heads, options);
}

template <at::DeviceType device>
void implement(torch::Library& m) {
  m.impl("attention", TORCH_FN(FlatAttention<&attention<device>>::call));
  m.impl("multi_head_attention", TORCH_FN(FlatLayer<&multi_head_attention<device>>::call));
}

}  // namespace
}  // namespace mha_ext::autocast

TORCH_LIBRARY_IMPL(mha_ext, AutocastCPU, m) { mha_ext::autocast::implement<at::kCPU>(m); }
TORCH_LIBRARY_IMPL(mha_ext, AutocastCUDA, m) { mha_ext::autocast::implement<at::kCUDA>(m); }
TORCH_LIBRARY_IMPL(mha_ext, AutocastXPU, m) { mha_ext::autocast::implement<at::kXPU>(m); }
TORCH_LIBRARY_IMPL(mha_ext, AutocastMPS, m) { mha_ext::autocast::implement<at::kMPS>(m); }
