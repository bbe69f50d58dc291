// mha_ext::nn::MultiHeadAttention on the inputs of test_cpp.py, which compares the results with the Python class:
//   module INPUTS RESULTS    two dictionaries of tensors, as torch.save writes and torch.load reads them
#include <mha_ext_nn.h>
#include <torch/torch.h>

#include <fstream>
#include <iterator>
#include <sstream>

using mha_ext::nn::MultiHeadAttention;
using mha_ext::nn::MultiHeadAttentionOptions;
using Tensors = c10::Dict<std::string, at::Tensor>;

Tensors load(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  Tensors tensors;
  for (const auto& item : torch::pickle_load(bytes).toGenericDict()) {
    tensors.insert(item.key().toStringRef(), item.value().toTensor());
  }
  return tensors;
}

void save(const Tensors& tensors, const char* path) {
  const auto bytes = torch::pickle_save(tensors);
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// What is drawn, and what is left of the generator.
void initialise(Tensors& results) {
  torch::manual_seed(4);
  MultiHeadAttention layer(12, 3);
  for (const auto& parameter : layer->named_parameters()) {
    results.insert("initial." + parameter.key(), parameter.value().detach());
  }
  results.insert("drawn after", torch::rand({3}));
}

struct Call {
  at::Tensor mask = {};
  bool is_causal = false, need_weights = true;
  at::Tensor key_lengths = {}, bias = {};
  bool causal_bottom_right = false;
};

// Output, weights and all gradients of a call, under its name.
void run(const std::string& name, MultiHeadAttention& layer, const Tensors& inputs, const Call& call,
         Tensors& results) {
  std::vector<at::Tensor> leaves;
  for (const char* input : {"query", "key", "value"}) {
    leaves.push_back(inputs.at(input).detach().clone().requires_grad_());
  }
  if (call.bias.defined()) leaves.push_back(call.bias.detach().clone().requires_grad_());
  torch::manual_seed(7);
  const auto [output, weights] =
      layer->forward(leaves[0], leaves[1], leaves[2], call.mask, call.is_causal, call.need_weights, call.key_lengths,
                     call.bias.defined() ? leaves[3] : call.bias, call.causal_bottom_right);
  TORCH_CHECK(weights.defined() == call.need_weights);
  auto loss = (output * inputs.at("grad_output")).sum();
  if (weights.defined()) loss = loss + weights.square().sum();
  for (const auto& parameter : layer->parameters()) leaves.push_back(parameter);
  const auto gradients = torch::autograd::grad({loss}, leaves);
  results.insert(name + ".output", output.detach());
  if (weights.defined()) results.insert(name + ".weights", weights.detach());
  for (size_t i = 0; i < gradients.size(); ++i) results.insert(name + ".gradient" + std::to_string(i), gradients[i]);
}

void compute(const Tensors& inputs, Tensors& results) {
  MultiHeadAttention layer(MultiHeadAttentionOptions(12, 3).dropout(0.4));
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : layer->named_parameters()) parameter.value().copy_(inputs.at(parameter.key()));
  }
  run("training", layer, inputs, {}, results);
  layer->eval();
  run("plain", layer, inputs, {}, results);
  run("no weights", layer, inputs, {.need_weights = false}, results);
  run("mask", layer, inputs, {.mask = inputs.at("mask")}, results);
  run("bool mask", layer, inputs, {.mask = inputs.at("mask") != 0}, results);
  run("causal", layer, inputs, {.is_causal = true}, results);
  run("bottom right", layer, inputs, {.is_causal = true, .causal_bottom_right = true}, results);
  run("lengths", layer, inputs, {.key_lengths = inputs.at("key_lengths")}, results);
  run("bias", layer, inputs, {.bias = inputs.at("bias")}, results);

  // What LibTorch does with modules.
  const MultiHeadAttention copy(std::dynamic_pointer_cast<mha_ext::nn::MultiHeadAttentionImpl>(layer->clone()));
  torch::NoGradGuard no_grad;
  layer->W_q->weight.zero_();
  std::stringstream stream;
  torch::save(copy, stream);
  MultiHeadAttention loaded(MultiHeadAttentionOptions(12, 3).dropout(0.4));
  torch::load(loaded, stream);
  loaded->eval();
  torch::nn::AnyModule any(loaded);  // calls it with the defaults of what is not given
  const auto& query = inputs.at("query");
  const auto found = any.forward<std::tuple<at::Tensor, at::Tensor>>(query, inputs.at("key"), inputs.at("value"));
  results.insert("copied, saved, loaded", std::get<0>(found));
  loaded->to(torch::kDouble);
  TORCH_CHECK(std::get<0>(loaded->forward(query.to(torch::kDouble), query.to(torch::kDouble), query.to(torch::kDouble)))
                  .scalar_type() == torch::kDouble);
  TORCH_CHECK(c10::str(loaded).starts_with("mha_ext::nn::MultiHeadAttention(d_model=12, num_heads=3, dropout=0.4)"),
              c10::str(loaded));
  TORCH_CHECK(MultiHeadAttention(MultiHeadAttentionOptions(12, 3).bias(false))->parameters().size() == 4);
}

// The text of the c10::ValueError that `call` throws.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "none";
}

void check_errors() {
  const auto expect = [](const std::string& found, const std::string& expected) {
    TORCH_CHECK(found == expected, "expected '", expected, "', got '", found, "'");
  };
  expect(error_of([] { MultiHeadAttention(12, 5); }),
         "MultiHeadAttention: expected d_model >= 1, a multiple of num_heads, got 12 and 5");
  expect(error_of([] { MultiHeadAttention(12, 0); }), "MultiHeadAttention: expected num_heads >= 1, got 0");
  expect(error_of([] { MultiHeadAttention(MultiHeadAttentionOptions(12, 3).dropout(1.5)); }),
         "MultiHeadAttention: expected dropout between 0 and 1, got 1.5");
  const auto x = torch::zeros({2, 4, 12});
  expect(error_of([&] { MultiHeadAttention(12, 3)->forward(x[0], x, x); }),
         "multi_head_attention: expected query of shape (B, Lq, E), got [4, 12]");
  expect(error_of([&] { MultiHeadAttention(12, 3)->forward(x, {}, x); }),
         "multi_head_attention: expected key to be a tensor, got an undefined one");
  const auto heads = torch::zeros({2, 3, 4, 4}).requires_grad_();
  expect(error_of([&] { mha_ext::attention(heads, heads, {}); }),
         "attention: expected value to be a tensor, got an undefined one");
}

int main(int argc, char** argv) {
  TORCH_CHECK(argc == 3, "usage: module INPUTS RESULTS");
  Tensors results;
  initialise(results);
  compute(load(argv[1]), results);
  check_errors();
  save(results, argv[2]);
}
