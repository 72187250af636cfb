// What an optimizer changes: this rank's rows of a trained parameter.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

namespace shardproof::fsdp {

struct TrainedTensor {
  std::string name;  // of the parameter
  at::Tensor value;  // this rank's rows in the master dtype; may have none
  at::Tensor grad;   // like value
  // Every rank holds the whole: a norm over ranks counts it once.
  bool replicated = false;
};

}  // namespace shardproof::fsdp
