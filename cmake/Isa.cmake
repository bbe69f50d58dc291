# The instruction sets: the only place with -m flags. Each compiles the same source into objects of its own, as
# MHA_EXT_ISA=<name>; the library chooses among them when it runs, so it works on machines without the newer ones.

# Fast where the result does not depend on it: no errno, no traps, a * b + c fused. Infinities and NaNs keep their meaning
# (no -ffast-math). -Wno-psabi: vectors are passed between functions of one file only.
set(kernel_flags -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast -fvisibility=hidden -Wno-psabi)

set(isa_names default)
set(isa_flags_default "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND isa_names avx2 avx512)
  set(isa_flags_avx2 -mavx2 -mfma -mf16c)
  set(isa_flags_avx512 ${isa_flags_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
endif()

# Compiles SOURCE once per instruction set and adds the objects to TARGET, which is told what it holds by
# MHA_EXT_HAVE_<NAME>. The kernels get no include path of PyTorch, and must not export weak symbols: the linker keeps one
# of equal weak symbols, and an AVX-512 copy of, say, std::max would then run on every machine.
function(mha_ext_add_kernels target source)
  set(objects "")
  foreach(isa IN LISTS isa_names)
    set(kernels ${target}_kernels_${isa})
    add_library(${kernels} OBJECT ${source})
    target_include_directories(${kernels} PRIVATE csrc)
    target_compile_definitions(${kernels} PRIVATE MHA_EXT_ISA=${isa})
    target_compile_options(${kernels} PRIVATE ${kernel_flags} ${isa_flags_${isa}})
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${kernels}>)
    string(TOUPPER ${isa} upper)
    target_compile_definitions(${target} PRIVATE MHA_EXT_HAVE_${upper})
    list(APPEND objects $<TARGET_OBJECTS:${kernels}>)
  endforeach()
  if(CMAKE_NM AND NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize")
    add_custom_command(TARGET ${target} PRE_LINK VERBATIM COMMAND_EXPAND_LISTS
      COMMAND "${CMAKE_COMMAND}" "-DNM=${CMAKE_NM}" -P "${PROJECT_SOURCE_DIR}/cmake/RefuseWeakSymbols.cmake" ${objects})
  endif()
endfunction()
