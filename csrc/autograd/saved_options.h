// What a node keeps between forward and backward: its tensors as saved variables, its options beside them.
#pragma once

#include "../mha_ext.h"

#include <torch/csrc/autograd/custom_function.h>

#include <vector>

namespace mha_ext::autograd {

class SavedOptions {
 public:
  using Context = torch::autograd::AutogradContext;

  SavedOptions(Context* ctx, const AttentionOptions& options) : ctx_(ctx), options_(options) {
    // One entry: each costs about a microsecond, which small layers feel.
    ctx->saved_data["options"] = c10::ivalue::Tuple::create(
        {options.is_causal, options.dropout_p, c10::IValue(options.scale), options.need_weights,
         options.causal_bottom_right, options.uniform_dead_rows, options.average_weights,
         options.weights_before_dropout, c10::IValue(options.softcap), options.need_logsumexp});
  }

  // Saves the node's own tensors and those of the options.
  void save(torch::autograd::variable_list tensors) const {
    for (const auto& tensor : {options_.mask, options_.bias, options_.key_lengths, options_.seed}) {
      tensors.push_back(tensor.value_or(at::Tensor()));
    }
    ctx_->save_for_backward(std::move(tensors));
  }

  // The node's own tensors and the options.
  static std::pair<torch::autograd::variable_list, AttentionOptions> load(Context* ctx) {
    auto tensors = ctx->get_saved_variables();
    const std::vector<c10::IValue> values = ctx->saved_data["options"].toTuple()->elements().vec();
    const auto last = tensors.size() - 4;
    const auto given = [&](size_t i) {
      return tensors[last + i].defined() ? std::optional<at::Tensor>(tensors[last + i]) : std::nullopt;
    };
    AttentionOptions options{given(0),
                             given(1),
                             values[0].toBool(),
                             values[1].toDouble(),
                             values[2].toOptional<double>(),
                             values[3].toBool(),
                             given(2),
                             values[4].toBool(),
                             values[5].toBool(),
                             given(3),
                             values[6].toBool(),
                             values[7].toBool(),
                             values[8].toOptional<double>(),
                             values[9].toBool()};
    tensors.resize(last);
    return {std::move(tensors), std::move(options)};
  }

 private:
  Context* ctx_;
  const AttentionOptions& options_;
};

}  // namespace mha_ext::autograd
