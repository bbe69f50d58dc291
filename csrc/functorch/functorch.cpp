// While a transform of torch.func (vmap, grad, jvp, ...) is active, every operator is its composite form: transforms
// see through ATen calls at all their levels, but not through a C++ autograd node. The seed of dropout is drawn by an
// ATen call as well, so it follows the randomness that vmap was given, whatever the arguments are.
//
// Autocast comes after these kernels, so its casts are made here. Excluded later it would come back in the levels
// below.
#include "../composite/attention.h"
#include "../composite/multi_head_attention.h"
#include "../flat_signatures.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace mha_ext::functorch {
namespace {

using at::Tensor;

// The casts of csrc/autocast, none if autocast is off. Never cached: what is made at one level must not be met at
// another.
class Cast {
 public:
  explicit Cast(at::DeviceType device) : device_(device) {
    if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) return;
    dtype_ = at::autocast::get_autocast_dtype(device);
    off_.emplace(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  }

  Tensor operator()(const Tensor& tensor) const {
    return dtype_ && at::autocast::is_eligible(tensor, device_) ? tensor.to(*dtype_) : tensor;
  }

  OptionalTensor operator()(const OptionalTensor& tensor) const {
    return tensor ? OptionalTensor((*this)(*tensor)) : std::nullopt;
  }

 private:
  at::DeviceType device_;
  std::optional<at::ScalarType> dtype_;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> off_;
};

ThreeTensors attention(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options) {
  const Cast cast(query.device().type());
  return composite::attention(cast(query), cast(key), cast(value), options);
}

TwoTensors multi_head_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Projections& p,
                                int64_t num_heads, const AttentionOptions& options) {
  const Cast cast(query.device().type());
  return composite::multi_head_attention(
      cast(query), cast(key), cast(value),
      {cast(p.w_q), cast(p.w_k), cast(p.w_v), cast(p.w_o), cast(p.b_q), cast(p.b_k), cast(p.b_v), cast(p.b_o)},
      num_heads, options);
}

}  // namespace
}  // namespace mha_ext::functorch

TORCH_LIBRARY_IMPL(mha_ext, FuncTorchDynamicLayerFrontMode, m) {
  using namespace mha_ext;
  m.impl("attention", TORCH_FN(FlatAttention<&functorch::attention>::call));
  m.impl("attention_backward", TORCH_FN(FlatAttentionBackward<&composite::attention_backward>::call));
  m.impl("multi_head_attention", TORCH_FN(FlatLayer<&functorch::multi_head_attention>::call));
  m.impl("multi_head_attention_forward", TORCH_FN(FlatLayerForward<&composite::multi_head_attention_forward>::call));
  m.impl("multi_head_attention_backward", TORCH_FN(FlatLayerBackward<&composite::multi_head_attention_backward>::call));
}
