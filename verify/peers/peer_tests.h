// What published tests of sequence parallelism would say of the numbers of a case: their criteria,
// which are fixed tolerances, on the same tensors. Beside our verdict, never part of it.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "verify/budget.h"

namespace shardproof::verify {

enum class PeerLevel {
  kAttention,  // the case runs attention alone: all tests are asked
  kModel       // a model, or a training step: tests of attention alone never run such code
};

// Collects a case's tensors. Names tell their kind: "output" (of attention or model), "loss",
// "<name>:grad", with "step0/" in front of those of training; others are not asked about.
class PeerTests {
 public:
  PeerTests(PeerLevel level, c10::ScalarType dtype, int ranks)
      : level_(level), dtype_(dtype), ranks_(ranks) {}

  // What published tests compare: a tensor of the run on ranks and of the run without SP in the
  // same dtype; and of the fp64 oracle.
  void add(const std::string& name, const at::Tensor& result, const at::Tensor& reference,
           const at::Tensor& oracle);
  void add(const Judged& tensor);
  Observer observer() {
    return [this](const Judged& tensor) { add(tensor); };
  }
  // Of all tests that are written for the dtype and can run such a case.
  std::vector<PeerVerdict> judge() const;

  struct Sample {
    std::string name;
    at::Tensor result, reference, oracle;  // fp64, on the CPU
  };

 private:
  PeerLevel level_;
  c10::ScalarType dtype_;
  int ranks_;
  std::vector<Sample> samples_;
};

// Names of all tests, as in PeerVerdict, in the order of their columns.
std::vector<std::string> peer_names();

}  // namespace shardproof::verify
