// Environment variables that settle what is otherwise found out on the machine.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace mha_ext::cpu {

// "a, b or c"
inline std::string one_of(std::initializer_list<std::string_view> choices) {
  std::string list;
  for (const auto* choice = choices.begin(); choice != choices.end(); ++choice) {
    if (choice != choices.begin()) list += choice + 1 == choices.end() ? " or " : ", ";
    list += *choice;
  }
  return list;
}

// The variable's value, one of the choices; empty when it is not set.
inline std::string_view environment_choice(const char* name, std::initializer_list<std::string_view> choices) {
  const char* value = std::getenv(name);
  if (!value || !*value) return {};
  const auto* found = std::find(choices.begin(), choices.end(), std::string_view(value));
  TORCH_CHECK_VALUE(found != choices.end(), name, ": expected ", one_of(choices), ", got ", value);
  return *found;
}

// The variable's value, an integer from `least` to `most`; empty when it is not set.
inline std::optional<int64_t> environment_number(const char* name, int64_t least, int64_t most) {
  const char* value = std::getenv(name);
  if (!value || !*value) return std::nullopt;
  const std::string_view text = value;
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool fits = error == std::errc() && end == text.data() + text.size() && number >= least && number <= most;
  TORCH_CHECK_VALUE(fits, name, ": expected an integer from ", least, " to ", most, ", got ", value);
  return number;
}

}  // namespace mha_ext::cpu
