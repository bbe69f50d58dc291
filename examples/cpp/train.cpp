// The operator and the module in a LibTorch program: gradients of attention, and a layer that learns to reverse
// sequences.
#include <mha_ext.h>
#include <mha_ext_nn.h>
#include <torch/torch.h>

#include <cstdio>

// The operator: softmax(Q K^T / sqrt(D)) V with a learned bias, and the gradient of everything.
void differentiate() {
  const auto leaf = torch::TensorOptions().requires_grad(true);
  const auto query = torch::randn({2, 8, 10, 64}, leaf), key = torch::randn({2, 8, 12, 64}, leaf);
  const auto value = torch::randn({2, 8, 12, 64}, leaf), bias = torch::zeros({8, 10, 12}, leaf);
  const auto [output, weights, logsumexp] = mha_ext::attention(query, key, value, {.bias = bias, .need_weights = true});
  output.square().sum().backward();
  std::printf("output %s, weights %s, gradient of the bias %.4g\n", c10::str(output.sizes()).c_str(),
              c10::str(weights.sizes()).c_str(), bias.grad().norm().item<double>());
}

// Position i of the target is position L - 1 - i of the input: the layer must learn where to look.
struct Reverser : torch::nn::Module {
  explicit Reverser(int64_t length, int64_t d_model)
      : positions(register_parameter("positions", torch::randn({length, d_model}))),
        attention(register_module("attention", mha_ext::nn::MultiHeadAttention(d_model, /*num_heads=*/4))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    const auto h = x + positions;
    return std::get<0>(attention->forward(h, h, h, /*mask=*/{}, /*is_causal=*/false, /*need_weights=*/false));
  }

  torch::Tensor positions;
  mha_ext::nn::MultiHeadAttention attention;
};

int main() {
  torch::manual_seed(0);
  differentiate();

  Reverser model(/*length=*/8, /*d_model=*/32);
  torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(3e-3));
  for (int step = 0; step <= 300; ++step) {
    const auto x = torch::randn({32, 8, 32});
    const auto loss = torch::mse_loss(model.forward(x), x.flip(1));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step % 100 == 0) std::printf("step %3d  loss %.4f\n", step, loss.item<double>());
  }
}
