// Environment variables that settle what is otherwise found out on the machine.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

namespace mha_ext::cpu {

// The variable's value, one of the two choices; empty when it is not set.
inline std::string_view environment_choice(const char* name, std::initializer_list<std::string_view> choices) {
  const char* value = std::getenv(name);
  if (!value || !*value) return {};
  const auto* found = std::find(choices.begin(), choices.end(), std::string_view(value));
  TORCH_CHECK_VALUE(found != choices.end(), name, ": expected ", *choices.begin(), " or ", *(choices.end() - 1),
                    ", got ", value);
  return *found;
}

}  // namespace mha_ext::cpu
