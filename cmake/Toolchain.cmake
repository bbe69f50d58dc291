# The compiler, checked, and the flags that every file is compiled with. A message that begins with `mha_ext:` is the one
# sentence that setup.py shows when the build cannot be configured.
include(CheckLanguage)

check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  message(FATAL_ERROR "mha_ext: expected a C++20 compiler, found none; install g++ (Debian, Ubuntu: apt install g++) or \
clang++, or name one in the environment variable CXX")
endif()
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, RelWithDebInfo or Debug" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG" CACHE STRING "")
enable_language(CXX)

# The first releases with C++20 as PyTorch's headers use it and with __builtin_shufflevector, which the kernels use.
set(least_GNU 12)
set(least_Clang 14)
set(least_AppleClang 14)
set(least ${least_${CMAKE_CXX_COMPILER_ID}})
if(NOT least)
  message(FATAL_ERROR "mha_ext: expected GCC or Clang as the C++ compiler, got ${CMAKE_CXX_COMPILER_ID} \
(${CMAKE_CXX_COMPILER})")
elseif(CMAKE_CXX_COMPILER_VERSION VERSION_LESS least)
  string(REPLACE GNU GCC name ${CMAKE_CXX_COMPILER_ID})
  message(FATAL_ERROR "mha_ext: expected ${name} >= ${least} for C++20, got \
${CMAKE_CXX_COMPILER_VERSION} (${CMAKE_CXX_COMPILER}); name a newer compiler in the environment variable CXX")
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
add_compile_options(-Wall -Wextra -Wno-unused-parameter)
