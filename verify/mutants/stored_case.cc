#include "verify/mutants/stored_case.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "verify/attention/attention_check.h"
#include "verify/common_scale.h"
#include "verify/models/model_check.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

Tensor wide(const Tensor& x) { return x.to(at::kCPU, at::kDouble).contiguous(); }

Tensor changed(const StoredTensor& tensor, const Tensor& direction, double size) {
  return tensor.result() + direction * size;
}

template <class Subject>
Subject keeping(StoredCase& stored) {
  Subject subject;
  subject.observe = [&stored](const Judged& tensor) { stored.tensors.emplace_back(tensor); };
  return subject;
}

}  // namespace

Tensor StoredTensor::result() const { return wide(tensor_.result); }
Tensor StoredTensor::reference() const { return wide(tensor_.reference); }
Tensor StoredTensor::oracle() const {
  return at::tensor(at::ArrayRef<double>(oracle_)).view(tensor_.result.sizes());
}

TensorResult StoredTensor::judged(const Tensor& numbers) const {
  Judged numbers_of = tensor_;
  numbers_of.result = numbers;
  numbers_of.oracle = oracle_;
  numbers_of.magnitude = magnitude_;
  return judge(numbers_of).result;
}

bool StoredTensor::has_reference_bits(const Tensor& numbers) const {
  return at::equal(numbers.to(tensor_.result.scalar_type()).to(at::kDouble), reference());
}

bool StoredCase::is_bitwise() const {
  return std::any_of(result.checks.begin(), result.checks.end(),
                     [](const CheckResult& check) { return check.name == "bitwise"; });
}

bool StoredCase::caught(const ErrorLine& line, double size) const {
  const bool bitwise = is_bitwise();
  std::vector<TensorResult> judged = result.tensors;
  for (const Change& change : line) {
    const StoredTensor& tensor = tensors[change.tensor];
    const Tensor numbers = changed(tensor, change.direction, size);
    if (bitwise && !tensor.has_reference_bits(numbers)) return true;
    if (only_bits) continue;
    const TensorResult now = tensor.judged(numbers);
    if (now.status != Status::kPass) return true;
    const auto same = std::find_if(judged.begin(), judged.end(),
                                   [&](const TensorResult& t) { return t.name == now.name; });
    if (same != judged.end()) *same = now;
  }
  const auto scale = check_common_scale(judged, dtype);
  return scale && scale->status == Status::kFail;
}

std::vector<PeerVerdict> StoredCase::peers(const ErrorLine& line, double size) const {
  PeerTests tests(level, dtype, ranks);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto change =
        std::find_if(line.begin(), line.end(), [&](const Change& one) { return one.tensor == i; });
    tests.add(
        tensors[i].name(),
        change == line.end() ? tensors[i].result() : changed(tensors[i], change->direction, size),
        tensors[i].reference(), tensors[i].oracle());
  }
  return tests.judge();
}

StoredCase store_case(const AttentionCase& c, Worlds& worlds) {
  StoredCase stored;
  stored.level = PeerLevel::kAttention;
  stored.dtype = c.dtype;
  stored.ranks = c.mesh.world();
  stored.result = check_attention(c, keeping<AttentionSubject>(stored), worlds);
  return stored;
}

StoredCase store_case(const ModelCase& c, Worlds& worlds) {
  StoredCase stored;
  stored.level = PeerLevel::kModel;
  stored.dtype = c.dtype;
  stored.ranks = c.mesh.world();
  stored.result = check_model(c, keeping<ModelSubject>(stored), worlds);
  return stored;
}

StoredCase store_case(const TrainingCase& c, Worlds& worlds, TrainingReference reference) {
  StoredCase stored;
  stored.level = PeerLevel::kModel;
  stored.dtype = c.model.dtype;
  stored.ranks = c.model.mesh.world();
  stored.only_bits = reference == TrainingReference::kMatched;
  stored.result = check_training(c, keeping<TrainingSubject>(stored), worlds, reference);
  return stored;
}

}  // namespace shardproof::verify
