// What published tests of sequence parallelism would say of the numbers of a case: their criteria,
// which are fixed tolerances, on the same tensors. Beside our verdict, never part of it.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "verify/verdict/verdict.h"

namespace shardproof::verify {

// A tensor of the run on ranks, of the run without SP in the same dtype, and of the fp64 oracle, as
// a case judges them.
using Observer = std::function<void(const std::string& name, const at::Tensor& result,
                                    const at::Tensor& reference, const at::Tensor& oracle)>;

enum class PeerLevel {
  kAttention,  // the case runs attention alone: all tests are asked
  kModel       // a model, or a training step: tests of attention alone never run such code
};

// Collects a case's tensors. Names tell their kind: "output" (of attention or model), "loss",
// "<name>:grad"; prefixes up to a slash ("step0/") do not count, others are not asked about.
class PeerTests {
 public:
  PeerTests(PeerLevel level, c10::ScalarType dtype, int ranks)
      : level_(level), dtype_(dtype), ranks_(ranks) {}

  Observer observer() {
    return [this](const std::string& name, const at::Tensor& result, const at::Tensor& reference,
                  const at::Tensor& oracle) { add(name, result, reference, oracle); };
  }
  // Of all tests that are written for the dtype and can run such a case.
  std::vector<PeerVerdict> judge() const;

  struct Sample {
    std::string name;
    at::Tensor result, reference, oracle;  // fp64, on the CPU
  };

 private:
  void add(const std::string& name, const at::Tensor& result, const at::Tensor& reference,
           const at::Tensor& oracle);

  PeerLevel level_;
  c10::ScalarType dtype_;
  int ranks_;
  std::vector<Sample> samples_;
};

// Names of all tests, as in PeerVerdict, in the order of their columns.
std::vector<std::string> peer_names();

}  // namespace shardproof::verify
