// Text from the TorchScript model that `python -m mha_ext train` exports (the decoder):
//   generate runs/.../model.pt "How it begins" [characters] [temperature]
#include "program.h"

#include <torch/script.h>

#include <iostream>
#include <string>

std::string generate(const char* file, const std::string& prompt, int64_t characters, double temperature) {
  TORCH_CHECK(!prompt.empty(), "expected a prompt of at least one character, got ''");
  auto model = torch::jit::load(file);  // its vocabulary is in it: encode and decode are methods of the model
  const auto ids = model.get_method("encode")({prompt}).toTensor().unsqueeze(0);
  const auto written = model.get_method("generate")({ids, characters, temperature}).toTensor();
  return model.get_method("decode")({written[0]}).toStringRef();
}

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: generate MODEL.pt PROMPT [CHARACTERS] [TEMPERATURE]\n";
    return 2;
  }
  return run("generate", [&] {
    const int64_t characters = argc > 3 ? number<int64_t>(argv[3]) : 200;
    const double temperature = argc > 4 ? number<double>(argv[4]) : 0.0;
    std::cout << generate(argv[1], argv[2], characters, temperature) << "\n";
    return 0;
  });
}
