// Text from an AOTInductor package of the decoder, made by `python -m mha_ext export RUN --to aoti`:
//   generate_package runs/.../package.pt2 "How it begins" [characters]
// The package is a function from ids (B, L) to logits (B, L, V); the vocabulary stands in its metadata.
#include "program.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <string>
#include <vector>

constexpr int64_t kFirstCharacter = 3;  // ids below stand for no character; 0 is one that the vocabulary lacks

// The characters of UTF-8 text.
std::vector<std::string> characters_of(const std::string& text) {
  std::vector<std::string> characters;
  for (const char byte : text) {
    const bool continues = (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
    if (continues && !characters.empty()) {
      characters.back() += byte;
    } else {
      characters.emplace_back(1, byte);
    }
  }
  return characters;
}

std::string generate(const char* package, const std::string& prompt, int64_t length) {
  torch::inductor::AOTIModelPackageLoader model(package);
  const auto metadata = model.get_metadata();
  TORCH_CHECK(metadata.contains("model") && metadata.at("model") == "decoder",
              "expected a package of the decoder, as `mha-ext export` writes it");
  const auto vocabulary = characters_of(metadata.at("characters"));
  const int64_t context = std::stoll(metadata.at("context"));
  std::map<std::string, int64_t> id_of;
  for (size_t i = 0; i < vocabulary.size(); ++i) id_of[vocabulary[i]] = kFirstCharacter + static_cast<int64_t>(i);

  std::vector<int64_t> ids;
  for (const auto& character : characters_of(prompt)) ids.push_back(id_of.contains(character) ? id_of[character] : 0);
  TORCH_CHECK(!ids.empty(), "expected a prompt of at least one character, got ''");
  std::string text = prompt;
  const c10::InferenceMode inference;
  for (int64_t i = 0; i < length; ++i) {
    const int64_t seen = std::min<int64_t>(context, ids.size());
    const auto window = at::tensor(std::vector<int64_t>(ids.end() - seen, ids.end())).unsqueeze(0);
    const auto logits = model.run({window})[0];                 // (1, L, V)
    const auto next = logits[0][-1].slice(0, kFirstCharacter);  // of the characters
    const int64_t best = next.argmax().item<int64_t>();
    ids.push_back(kFirstCharacter + best);
    text += vocabulary[best];
  }
  return text;
}

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: generate_package PACKAGE.pt2 PROMPT [CHARACTERS]\n";
    return 2;
  }
  return run("generate_package", [&] {
    std::cout << generate(argv[1], argv[2], argc > 3 ? number<int64_t>(argv[3]) : 200) << "\n";
    return 0;
  });
}
