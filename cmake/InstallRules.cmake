# cmake --install: the rooms as Shardproof::<name> with their headers, the program with its module,
# and a package that find_package(Shardproof) finds.
include(CMakePackageConfigHelpers)

set(_config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Shardproof)
get_property(_rooms GLOBAL PROPERTY SHARDPROOF_ROOMS)

# ---- rooms and headers

# The headers of the rooms need C++20, which CMAKE_CXX_STANDARD does not pass on to users.
foreach(_room IN LISTS _rooms)
  target_compile_features(${_room} INTERFACE cxx_std_20)
endforeach()
install(TARGETS ${_rooms} EXPORT ShardproofTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})

# The folders stay as they are in the checkout, so that an #include is spelled the same there and here.
set(_include_dir ${CMAKE_INSTALL_INCLUDEDIR}/shardproof)
install(DIRECTORY src/ DESTINATION ${_include_dir} FILES_MATCHING PATTERN "*.h" PATTERN cli EXCLUDE)
install(DIRECTORY sim verify DESTINATION ${_include_dir} FILES_MATCHING PATTERN "*.h")

# ---- the program

# Program and module keep their places relative to each other: the program looks for the module
# from where it lies itself.
function(shardproof_output_dir target kind out)
  get_target_property(dir ${target} ${kind}_OUTPUT_DIRECTORY)
  if(NOT dir)
    get_target_property(dir ${target} BINARY_DIR)
  endif()
  set(${out} "${dir}" PARENT_SCOPE)
endfunction()

set(_program shardproof-cli)
set(_module shardproof_commands)
if(TARGET ${_program})
  install(TARGETS ${_program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
if(TARGET ${_module})
  set(_module_dir ${CMAKE_INSTALL_BINDIR})
  if(TARGET ${_program})
    shardproof_output_dir(${_program} RUNTIME _from)
    shardproof_output_dir(${_module} LIBRARY _to)
    file(RELATIVE_PATH _relative "${_from}" "${_to}")
    cmake_path(SET _module_dir NORMALIZE "${CMAKE_INSTALL_BINDIR}/${_relative}")
  endif()
  install(TARGETS ${_module} LIBRARY DESTINATION ${_module_dir})
endif()

# ---- the package

# What the rooms link, as the namespaces that name it. An unknown one stops the configuration here
# rather than find_package() in somebody else's project.
set(_found_by_fmt "find_dependency(fmt)")
set(_found_by_nlohmann_json "find_dependency(nlohmann_json)")
set(_found_by_Eigen3 "find_dependency(Eigen3 NO_MODULE)")
set(_found_by_CLI11 "find_dependency(CLI11)")
set(_found_by_Threads "find_dependency(Threads)")
set(_found_by_LibTorch "find_dependency(LibTorch)")
set(_found_by_hdf5 "enable_language(C) # FindHDF5 needs it\nfind_dependency(HDF5 COMPONENTS C)")
set(_namespaces)
foreach(_room IN LISTS _rooms)
  get_target_property(_links ${_room} INTERFACE_LINK_LIBRARIES)
  if(_links)
    string(REGEX MATCHALL "[A-Za-z0-9_]+::" _used "${_links}")
    list(APPEND _namespaces ${_used})
  endif()
endforeach()
list(REMOVE_DUPLICATES _namespaces)
list(SORT _namespaces)
set(SHARDPROOF_FIND_DEPENDENCIES "")
foreach(_namespace IN LISTS _namespaces)
  string(REPLACE "::" "" _namespace ${_namespace})
  if(_namespace STREQUAL "Shardproof")
    continue()
  elseif(NOT DEFINED _found_by_${_namespace})
    message(FATAL_ERROR "a room links ${_namespace}::..., of which cmake/InstallRules.cmake does not "
                        "know how an installed Shardproof finds it; add it to the list there")
  endif()
  string(APPEND SHARDPROOF_FIND_DEPENDENCIES "${_found_by_${_namespace}}\n")
endforeach()

install(EXPORT ShardproofTargets NAMESPACE Shardproof:: DESTINATION ${_config_dir})
configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/ShardproofConfig.cmake.in ${CMAKE_BINARY_DIR}/ShardproofConfig.cmake
  INSTALL_DESTINATION ${_config_dir})
# Before 1.0 a minor version may change anything.
write_basic_package_version_file(${CMAKE_BINARY_DIR}/ShardproofConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/ShardproofConfig.cmake
              ${CMAKE_BINARY_DIR}/ShardproofConfigVersion.cmake
              ${CMAKE_CURRENT_LIST_DIR}/FindLibTorch.cmake DESTINATION ${_config_dir})
