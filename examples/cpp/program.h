// What the examples share: errors as one sentence and an exit code.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <iostream>
#include <string>

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

// The number that `text` is; throws if it is none.
inline double number(const std::string& text) {
  size_t end = 0;
  double value = 0;
  try {
    value = std::stod(text, &end);
  } catch (const std::exception&) {
    end = text.size() + 1;
  }
  TORCH_CHECK(end == text.size() && value >= 0, "expected a number that is not negative, got '", text, "'");
  return value;
}
