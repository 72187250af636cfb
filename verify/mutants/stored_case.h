// A correct case that ran once, kept so that changed numbers can be judged in place of its own:
// cheap, and exact, since the judge is the one that the case had.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "verify/attention/attention_case.h"
#include "verify/budget.h"
#include "verify/models/model_case.h"
#include "verify/peers/peer_tests.h"
#include "verify/rank_world.h"
#include "verify/training/training_check.h"

namespace shardproof::verify {

class StoredTensor {
 public:
  explicit StoredTensor(const Judged& tensor)
      : tensor_(tensor),
        oracle_(tensor.oracle.begin(), tensor.oracle.end()),
        magnitude_(tensor.magnitude.begin(), tensor.magnitude.end()) {}
  const std::string& name() const { return tensor_.name; }
  at::Tensor result() const;     // fp64, as are
  at::Tensor reference() const;  // all
  at::Tensor oracle() const;
  // What our judge says of other numbers (fp64) in place of the result.
  TensorResult judged(const at::Tensor& changed) const;
  // The numbers, rounded to the tensor's dtype, have the bits of the run without SP.
  bool has_reference_bits(const at::Tensor& changed) const;

 private:
  Judged tensor_;  // its spans are set where it is judged
  std::vector<double> oracle_, magnitude_;
};

// An error that grows along a line: `size` times `direction` is added to the tensor's result.
struct Change {
  size_t tensor;         // of the stored case
  at::Tensor direction;  // fp64, of the tensor's shape
};
using ErrorLine = std::vector<Change>;

struct StoredCase {
  CaseResult result;  // of the case as it ran
  PeerLevel level = PeerLevel::kAttention;
  c10::ScalarType dtype = c10::ScalarType::Float;
  int ranks = 1;
  std::vector<StoredTensor> tensors;

  bool only_bits = false;  // these alone are judged: TrainingReference::kMatched

  bool ran() const { return !tensors.empty(); }
  // The case must have the bits of the run without SP.
  bool is_bitwise() const;
  // Our checks see the error.
  bool caught(const ErrorLine& line, double size) const;
  // What published tests say of it.
  std::vector<PeerVerdict> peers(const ErrorLine& line, double size) const;
};

StoredCase store_case(const AttentionCase& c, Worlds& worlds);
StoredCase store_case(const ModelCase& c, Worlds& worlds);
StoredCase store_case(const TrainingCase& c, Worlds& worlds,
                      TrainingReference reference = TrainingReference::kBudget);

}  // namespace shardproof::verify
