# Whether c10d's Gloo backend can be used: its header needs Gloo's, which the wheel lacks. Those of
# the distribution are older than the code inside LibTorch, so a program is run that reduces between
# two threads before they are trusted.
#
# Provides Gloo_FOUND.
find_path(GLOO_INCLUDE_DIR gloo/context.h)
mark_as_advanced(GLOO_INCLUDE_DIR)
if(GLOO_INCLUDE_DIR AND NOT DEFINED SHARDPROOF_GLOO_RUNS)
  message(STATUS "Gloo: running two ranks")
  try_run(SHARDPROOF_GLOO_EXIT SHARDPROOF_GLOO_COMPILES ${CMAKE_BINARY_DIR}/gloo_smoke
          SOURCES ${CMAKE_CURRENT_LIST_DIR}/gloo_smoke.cc
          COMPILE_DEFINITIONS -DUSE_C10D_GLOO -fPIC
          LINK_LIBRARIES LibTorch::cpu Threads::Threads
          CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON
          COMPILE_OUTPUT_VARIABLE SHARDPROOF_GLOO_OUTPUT)
  set(runs FALSE)
  if(SHARDPROOF_GLOO_COMPILES AND SHARDPROOF_GLOO_EXIT EQUAL 0)
    set(runs TRUE)
  endif()
  set(SHARDPROOF_GLOO_RUNS ${runs} CACHE BOOL "c10d's Gloo backend works with the headers found")
  message(STATUS "Gloo: ${runs}")
endif()
set(Gloo_FOUND FALSE)
if(SHARDPROOF_GLOO_RUNS)
  set(Gloo_FOUND TRUE)
endif()
