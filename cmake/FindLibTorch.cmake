# Finds the LibTorch that is inside the PyPI wheel `torch`, without find_package(Torch), which would
# drag in CUDA. It works in the checkout and, installed beside ShardproofConfig.cmake, in another
# project. Search order: -DSHARDPROOF_TORCH=DIR, environment SHARDPROOF_TORCH (these two are final),
# the private folder that ./shardproof fills (.deps/python/torch of the checkout),
# SHARDPROOF_TORCH_HINT (the installed package sets it to the folder it was built with), the torch
# that python3 imports. DIR is the package folder: the one that holds include/ and lib/.
#
# Provides
#   LibTorch::cpu   libtorch_cpu and libc10, headers, NDEBUG
#   SHARDPROOF_TORCH_DIR, SHARDPROOF_TORCH_VERSION
set(SHARDPROOF_TORCH_WANTED 2.11.0)

# shardproof_torch_version(DIR OUT): the version of the package in DIR (2.11.0 of 2.11.0+cu130), or
# empty where DIR holds no complete package.
function(shardproof_torch_version dir out)
  set(version "")
  if(EXISTS "${dir}/lib/libtorch_cpu.so" AND EXISTS "${dir}/version.py")
    file(STRINGS "${dir}/version.py" line REGEX "^__version__ = ")
    if(line MATCHES "['\"]([0-9.]+)")
      set(version ${CMAKE_MATCH_1})
    endif()
  endif()
  set(${out} "${version}" PARENT_SCOPE)
endfunction()

set(_candidates)
set(_ask_python FALSE)
if(SHARDPROOF_TORCH)
  list(APPEND _candidates "${SHARDPROOF_TORCH}")
elseif(NOT "$ENV{SHARDPROOF_TORCH}" STREQUAL "")
  list(APPEND _candidates "$ENV{SHARDPROOF_TORCH}")
else()
  get_filename_component(_private "${CMAKE_CURRENT_LIST_DIR}/../.deps/python/torch" ABSOLUTE)
  list(APPEND _candidates "${_private}" ${SHARDPROOF_TORCH_HINT})
  set(_ask_python TRUE)
endif()

set(SHARDPROOF_TORCH_DIR "")
set(SHARDPROOF_TORCH_VERSION "")
set(_seen "")
while(NOT SHARDPROOF_TORCH_DIR AND (_candidates OR _ask_python))
  if(_candidates)
    list(POP_FRONT _candidates _dir)
  else()
    # Last, because it starts a process. The package is found, not imported.
    set(_ask_python FALSE)
    set(_dir "")
    find_program(SHARDPROOF_PYTHON3 python3)
    mark_as_advanced(SHARDPROOF_PYTHON3)
    if(SHARDPROOF_PYTHON3)
      execute_process(
        COMMAND ${SHARDPROOF_PYTHON3} -c
                "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
        OUTPUT_VARIABLE _dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
  endif()
  if(_dir)
    shardproof_torch_version("${_dir}" _version)
    if(_version VERSION_EQUAL SHARDPROOF_TORCH_WANTED)
      set(SHARDPROOF_TORCH_DIR "${_dir}")
      set(SHARDPROOF_TORCH_VERSION ${_version})
    elseif(_version)
      string(APPEND _seen " ${_dir} (version ${_version}),")
    else()
      string(APPEND _seen " ${_dir} (no torch there),")
    endif()
  endif()
endwhile()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  LibTorch REQUIRED_VARS SHARDPROOF_TORCH_DIR VERSION_VAR SHARDPROOF_TORCH_VERSION
  REASON_FAILURE_MESSAGE
    "expected torch ${SHARDPROOF_TORCH_WANTED}, looked in:${_seen} and did not find it. Run ./shardproof setup, or set SHARDPROOF_TORCH to the folder of that torch package")

if(LibTorch_FOUND AND NOT TARGET LibTorch::cpu)
  add_library(LibTorch::cpu INTERFACE IMPORTED GLOBAL)
  # -idirafter: the wheel carries its own fmt, which would shadow the system's. NDEBUG: without it
  # inlined code of the headers tests flags that the release library never sets. The quotes keep a
  # path with spaces one argument.
  target_compile_options(
    LibTorch::cpu
    INTERFACE "SHELL:-idirafter \"${SHARDPROOF_TORCH_DIR}/include\""
              "SHELL:-idirafter \"${SHARDPROOF_TORCH_DIR}/include/torch/csrc/api/include\"")
  target_compile_definitions(LibTorch::cpu INTERFACE NDEBUG)
  target_link_libraries(LibTorch::cpu INTERFACE "${SHARDPROOF_TORCH_DIR}/lib/libtorch_cpu.so"
                                                "${SHARDPROOF_TORCH_DIR}/lib/libc10.so")
  target_link_options(
    LibTorch::cpu INTERFACE "-Wl,-rpath,${SHARDPROOF_TORCH_DIR}/lib"
    "-Wl,-rpath-link,${SHARDPROOF_TORCH_DIR}/lib"
    "-Wl,-rpath-link,${SHARDPROOF_TORCH_DIR}/../nvidia/cu13/lib")
endif()
