# shardproof_check_headers([TORCH_FREE ...] [LEFT_OUT ...] [LIBRARIES ...])
#
# Headers must be self-contained and must bear being included twice. For each header of src, sim and
# verify this writes a translation unit that includes the header first, and a second time, and puts
# it into an object library: building the library is the test.
#
# TORCH_FREE  folders or headers, relative to the source tree, that must compile where there is no
#             LibTorch: their units do not see its include path.
# LEFT_OUT    folders or headers that this build cannot compile (CUDA without its toolkit).
# LIBRARIES   other libraries that the headers need, for their include paths.
#
# All other units get LibTorch's precompiled header, because parsing LibTorch takes 17 s a unit. The
# price: a header that forgot a LibTorch or standard header which is in cmake/torch_pch.h passes.
function(shardproof_check_headers)
  cmake_parse_arguments(ARG "" "" "TORCH_FREE;LEFT_OUT;LIBRARIES" ${ARGN})
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "shardproof_check_headers does not take '${ARG_UNPARSED_ARGUMENTS}'")
  endif()
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}
       ${PROJECT_SOURCE_DIR}/src/*.h ${PROJECT_SOURCE_DIR}/sim/*.h ${PROJECT_SOURCE_DIR}/verify/*.h)
  _shardproof_take_headers(headers _left_out "${ARG_LEFT_OUT}")
  _shardproof_take_headers(headers torch_free "${ARG_TORCH_FREE}")
  _shardproof_header_library(shardproof_headers_torch_free "${torch_free}" "${ARG_LIBRARIES}")
  _shardproof_header_library(shardproof_headers_torch "${headers}" "${ARG_LIBRARIES}")
  if(TARGET shardproof_headers_torch)
    target_link_libraries(shardproof_headers_torch PRIVATE LibTorch::cpu)
    shardproof_use_torch_pch(shardproof_headers_torch)
  endif()
endfunction()

# Moves the headers that `entries` (folders or headers) name from the list `from` to the list `to`.
# An entry that names no header is an error: it would silently check nothing after a renaming.
function(_shardproof_take_headers from to entries)
  set(rest ${${from}})
  set(taken)
  foreach(entry IN LISTS entries)
    string(REGEX REPLACE "([][+.*()^$?|\\])" "\\\\\\1" pattern ${entry})
    set(found ${rest})
    list(FILTER found INCLUDE REGEX "^${pattern}(/|$)")
    if(NOT found)
      message(FATAL_ERROR "shardproof_check_headers: '${entry}' names no header that is left to take")
    endif()
    list(REMOVE_ITEM rest ${found})
    list(APPEND taken ${found})
  endforeach()
  set(${from} ${rest} PARENT_SCOPE)
  set(${to} ${taken} PARENT_SCOPE)
endfunction()

function(_shardproof_header_library target headers libraries)
  if(NOT headers)
    return()
  endif()
  set(units)
  foreach(header IN LISTS headers)
    # The name by which the sources include it: src/ itself is on the include path.
    string(REGEX REPLACE "^src/" "" name ${header})
    set(unit ${CMAKE_CURRENT_BINARY_DIR}/headers/${header}.cc)
    # Writes only what has changed, so that a new configuration compiles nothing anew.
    file(CONFIGURE OUTPUT ${unit} CONTENT "#include \"${name}\"\n#include \"${name}\"\n" @ONLY)
    list(APPEND units ${unit})
  endforeach()
  add_library(${target} OBJECT ${units})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wno-unused-parameter)
  target_link_libraries(${target} PRIVATE ${libraries})
endfunction()
