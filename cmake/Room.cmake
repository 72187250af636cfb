# shardproof_room(NAME [TORCH] SOURCES ... [DEPENDS ...] [PRIVATE_DEPENDS ...])
#
# One static library a room (folder). DEPENDS are the rooms below it; tests/structure checks that
# the includes agree with this graph. TORCH rooms share one precompiled header of LibTorch.
function(shardproof_room name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPENDS;PRIVATE_DEPENDS" ${ARGN})
  set(target shardproof_${name})
  add_library(${target} STATIC ${ARG_SOURCES})
  add_library(Shardproof::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  target_include_directories(
    ${target} PUBLIC $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}> $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/src>
                     $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/shardproof>)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wno-unused-parameter)
  target_link_libraries(${target} PUBLIC ${ARG_DEPENDS} PRIVATE ${ARG_PRIVATE_DEPENDS})
  if(ARG_TORCH)
    target_link_libraries(${target} PUBLIC LibTorch::cpu)
    shardproof_use_torch_pch(${target})
  endif()
  set_property(GLOBAL APPEND PROPERTY SHARDPROOF_ROOMS ${target})
endfunction()

# The precompiled header must be compiled with the flags of its users.
function(shardproof_use_torch_pch target)
  if(NOT TARGET shardproof_torch_pch)
    file(WRITE ${CMAKE_BINARY_DIR}/torch_pch.cc "// carries the precompiled header\n")
    add_library(shardproof_torch_pch OBJECT ${CMAKE_BINARY_DIR}/torch_pch.cc)
    target_compile_options(shardproof_torch_pch PRIVATE -Wall -Wextra -Wno-unused-parameter)
    target_link_libraries(shardproof_torch_pch PRIVATE LibTorch::cpu)
    target_precompile_headers(shardproof_torch_pch PRIVATE ${CMAKE_SOURCE_DIR}/cmake/torch_pch.h)
  endif()
  target_precompile_headers(${target} REUSE_FROM shardproof_torch_pch)
endfunction()
