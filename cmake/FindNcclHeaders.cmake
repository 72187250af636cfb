# What c10d's NCCL backend needs to be compiled and linked: the headers of NCCL (wheel nvidia-nccl)
# and of the CUDA runtime (wheel or toolkit), and LibTorch's CUDA libraries.
#
# Provides NcclHeaders_FOUND and, where found, LibTorch::nccl.
set(_wheels ${SHARDPROOF_TORCH_DIR}/../nvidia)
file(GLOB _nccl_folders ${_wheels}/nccl/include ${_wheels}/cu*/include)
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${_nccl_folders})
# cuda_runtime.h of the runtime's wheel needs crt/host_config.h, which is in the compiler's.
find_path(CUDA_RUNTIME_INCLUDE_DIR crt/host_config.h HINTS /usr/local/cuda/include ${_nccl_folders})
mark_as_advanced(NCCL_INCLUDE_DIR CUDA_RUNTIME_INCLUDE_DIR)
set(NcclHeaders_FOUND FALSE)
if(NCCL_INCLUDE_DIR AND CUDA_RUNTIME_INCLUDE_DIR
   AND EXISTS ${SHARDPROOF_TORCH_DIR}/lib/libtorch_cuda.so
   AND EXISTS ${SHARDPROOF_TORCH_DIR}/lib/libc10_cuda.so)
  set(NcclHeaders_FOUND TRUE)
  add_library(LibTorch::nccl INTERFACE IMPORTED GLOBAL)
  target_include_directories(LibTorch::nccl INTERFACE ${NCCL_INCLUDE_DIR}
                                                      ${CUDA_RUNTIME_INCLUDE_DIR})
  target_link_libraries(
    LibTorch::nccl INTERFACE ${SHARDPROOF_TORCH_DIR}/lib/libtorch_cuda.so
                             ${SHARDPROOF_TORCH_DIR}/lib/libc10_cuda.so)
  target_link_options(LibTorch::nccl INTERFACE "-Wl,--unresolved-symbols=ignore-in-shared-libs")
endif()
message(STATUS "NCCL headers: ${NcclHeaders_FOUND}")
