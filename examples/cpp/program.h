// What the examples share: errors as one sentence and an exit code.
#pragma once

#include <c10/util/Exception.h>

#include <charconv>
#include <cmath>
#include <exception>
#include <iostream>
#include <string>
#include <system_error>

// Runs `body`, an int(): its result, or 1 after a sentence about what went wrong.
template <typename Body>
int run(const std::string& program, const Body& body) {
  std::string what;
  try {
    return body();
  } catch (const c10::Error& error) {
    what = error.what_without_backtrace();
  } catch (const std::exception& error) {  // TorchScript and AOTInductor throw these
    what = error.what();
    const auto inner = what.rfind("RuntimeError: ");  // what TorchScript says comes after the places where it was
    if (inner != std::string::npos) what = what.substr(inner);
  }
  std::cerr << program << ": " << what.substr(0, what.find('\n')) << "\n";
  return 1;
}

// The number that `text` is: whole (int64_t) or not (double), not negative; throws if it is none.
template <typename Number>
Number number(const std::string& text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool all = error == std::errc() && end == text.data() + text.size();
  TORCH_CHECK(all && value >= 0 && std::isfinite(static_cast<double>(value)),
              "expected a number that is not negative, got '", text, "'");
  return value;
}
