# The Python that builds and the PyTorch installed in it, as imported targets. find_package(Torch) is not used: it wants
# the CUDA toolkit and MKL of the machine that built PyTorch, none of which is needed here.
if(NOT DEFINED Python_EXECUTABLE AND NOT DEFINED ENV{VIRTUAL_ENV} AND NOT DEFINED ENV{CONDA_PREFIX}
   AND EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
  set(Python_EXECUTABLE "${PROJECT_SOURCE_DIR}/.venv/bin/python")
endif()
find_package(Python 3.10 QUIET COMPONENTS Interpreter OPTIONAL_COMPONENTS Development.Module)
if(NOT Python_Interpreter_FOUND)
  message(FATAL_ERROR "mha_ext: expected Python >= 3.10, found none; name one with -DPython_EXECUTABLE=PATH")
elseif(NOT Python_Development.Module_FOUND)
  message(FATAL_ERROR "mha_ext: expected the header Python.h of Python ${Python_VERSION} (${Python_EXECUTABLE}), found \
none; install it (Debian, Ubuntu: apt install python3-dev)")
endif()

# Found without importing torch, which would take seconds and may fail for reasons of its own.
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/find_torch.py"
  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
list(GET found 0 torch_dir)
list(GET found 1 MHA_EXT_TORCH_VERSION)
list(GET found 2 pybind11_include)
set(least_torch 2.11)
if(NOT torch_dir)
  message(FATAL_ERROR "mha_ext: expected torch >= ${least_torch} in ${Python_EXECUTABLE}, found none; install it there, \
then build with `pip install --no-build-isolation .`, which builds against the torch that is installed")
elseif(MHA_EXT_TORCH_VERSION VERSION_LESS least_torch)
  message(FATAL_ERROR "mha_ext: expected torch >= ${least_torch} in ${Python_EXECUTABLE}, got ${MHA_EXT_TORCH_VERSION}")
elseif(NOT EXISTS "${torch_dir}/include/ATen/ATen.h")
  message(FATAL_ERROR "mha_ext: expected PyTorch's C++ headers in ${torch_dir}/include, found none")
elseif(NOT pybind11_include)
  message(FATAL_ERROR "mha_ext: expected pybind11 in ${torch_dir}/include, found none there nor in \
${Python_EXECUTABLE}; run `pip install pybind11`")
endif()
message(STATUS "Found torch ${MHA_EXT_TORCH_VERSION} in ${torch_dir}")

function(mha_ext_import target file)
  add_library(${target} SHARED IMPORTED)
  set_target_properties(${target} PROPERTIES IMPORTED_LOCATION "${file}")
endfunction()

mha_ext_import(mha_ext::c10 "${torch_dir}/lib/libc10${CMAKE_SHARED_LIBRARY_SUFFIX}")
mha_ext_import(mha_ext::torch "${torch_dir}/lib/libtorch_cpu${CMAKE_SHARED_LIBRARY_SUFFIX}")
set(torch_include "${torch_dir}/include" "${torch_dir}/include/torch/csrc/api/include")
target_include_directories(mha_ext::torch SYSTEM INTERFACE ${torch_include})
target_link_libraries(mha_ext::torch INTERFACE mha_ext::c10)

# The OpenMP runtime must be the one that PyTorch uses, or two thread pools would fight for the cores: link the file that
# PyTorch ships, whatever its name, and the compiler's own only where PyTorch ships none.
file(GLOB torch_openmp "${torch_dir}/lib/libgomp*.so*" "${torch_dir}/lib/libomp.dylib")
add_library(mha_ext::openmp INTERFACE IMPORTED)
if(torch_openmp)
  list(GET torch_openmp 0 torch_openmp)
  target_compile_options(mha_ext::openmp INTERFACE $<$<PLATFORM_ID:Darwin>:-Xpreprocessor> -fopenmp)
  target_link_libraries(mha_ext::openmp INTERFACE "${torch_openmp}")
else()
  find_package(OpenMP REQUIRED COMPONENTS CXX)
  target_link_libraries(mha_ext::openmp INTERFACE OpenMP::OpenMP_CXX)
endif()

# Libraries find PyTorch as it lies beside the installed package, and each other in the package.
if(APPLE)
  set(origin "@loader_path")
else()
  set(origin "$ORIGIN")
endif()
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "${origin};${origin}/../torch/lib")

function(mha_ext_add_python_module name)
  Python_add_library(${name} MODULE WITH_SOABI ${ARGN})
  target_include_directories(${name} SYSTEM PRIVATE "${pybind11_include}")
  set_target_properties(${name} PROPERTIES CXX_VISIBILITY_PRESET hidden)
endfunction()
