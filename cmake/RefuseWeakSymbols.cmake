# cmake -DNM=nm -P RefuseWeakSymbols.cmake OBJECT...    fails if an object defines a weak symbol (see Isa.cmake)
math(EXPR last "${CMAKE_ARGC} - 1")
foreach(i RANGE 4 ${last})
  set(object "${CMAKE_ARGV${i}}")
  execute_process(COMMAND "${NM}" --defined-only "${object}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" weak "${symbols}")
  list(FILTER weak EXCLUDE REGEX " DW\\.ref\\.")  # data that stands for the C++ runtime's exception handler
  if(weak)
    list(JOIN weak "\n  " weak)
    message(FATAL_ERROR "mha_ext: expected no weak symbol in the kernels, got in ${object}:\n  ${weak}\n"
                        "Put the function into an anonymous namespace, or write its few lines out.")
  endif()
endforeach()
