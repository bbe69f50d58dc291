// Text from the TorchScript model that `python -m mha_ext train` exports (the decoder):
//   generate runs/.../model.pt "How it begins" [characters] [temperature]
#include <torch/script.h>

#include <cstdlib>
#include <iostream>
#include <string>

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: generate MODEL.pt PROMPT [CHARACTERS] [TEMPERATURE]\n";
    return 2;
  }
  const int64_t characters = argc > 3 ? std::atoll(argv[3]) : 200;
  const double temperature = argc > 4 ? std::atof(argv[4]) : 0.0;
  try {
    auto model = torch::jit::load(argv[1]);  // its vocabulary is in it: encode and decode are methods of the model
    const auto prompt = model.get_method("encode")({std::string(argv[2])}).toTensor();
    const auto ids = model.get_method("generate")({prompt.unsqueeze(0), characters, temperature}).toTensor();
    std::cout << model.get_method("decode")({ids[0]}).toStringRef() << "\n";
  } catch (const c10::Error& error) {
    std::cerr << "generate: " << error.what_without_backtrace() << "\n";
    return 1;
  }
}
