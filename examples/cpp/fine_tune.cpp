// Goes on training the TorchScript model that `python -m mha_ext train` exports (the decoder) on another text:
//   fine_tune runs/.../model.pt text.txt steps tuned.pt
#include "program.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>

// `batch` windows of `length` + 1 ids from anywhere in ids (L,).
torch::Tensor windows(const torch::Tensor& ids, int64_t batch, int64_t length) {
  const auto starts = torch::randint(ids.size(0) - length, {batch, 1}, torch::kLong);
  return ids.index({starts + torch::arange(length + 1)});
}

int tune(const char* model_file, const char* text_file, int64_t steps, const char* result_file) {
  auto model = torch::jit::load(model_file);
  std::ifstream file(text_file);
  std::ostringstream text;
  text << file.rdbuf();
  TORCH_CHECK(file && text, "expected a text file, got '", text_file, "', which cannot be read");
  const auto ids = model.get_method("encode")({text.str()}).toTensor();
  const int64_t length = model.attr("context").toInt();
  TORCH_CHECK(ids.size(0) > length, "expected a text of more than ", length, " characters, got ", ids.size(0));

  std::vector<torch::Tensor> parameters;
  for (const auto& parameter : model.parameters()) parameters.push_back(parameter);
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-3));
  torch::manual_seed(0);
  model.train();
  for (int64_t step = 0; step < steps; ++step) {
    const auto batch = windows(ids, 8, length);
    const auto logits = model.forward({batch.slice(1, 0, length)}).toTensor();
    const auto targets = batch.slice(1, 1);
    const auto loss = torch::cross_entropy_loss(logits.flatten(0, 1), targets.flatten(), /*weight=*/{},
                                                at::Reduction::Mean, /*ignore_index=*/0);  // 0: not in the vocabulary
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    std::printf("step %lld  loss %.6f\n", static_cast<long long>(step), loss.item<double>());
  }
  model.eval();
  std::ostringstream bytes;
  model.save(bytes);
  std::ofstream result(result_file, std::ios::binary);
  TORCH_CHECK(result << bytes.str() << std::flush, "cannot write '", result_file, "'");
  return 0;
}

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: fine_tune MODEL.pt TEXT STEPS RESULT.pt\n";
    return 2;
  }
  return run("fine_tune", [&] { return tune(argv[1], argv[2], number<int64_t>(argv[3]), argv[4]); });
}
