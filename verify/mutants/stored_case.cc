#include "verify/mutants/stored_case.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "verify/attention/attention_check.h"
#include "verify/models/model_check.h"
#include "verify/training/training_check.h"

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
  subject.keep = [&stored](const Judged& tensor) { stored.tensors.emplace_back(tensor); };
  return subject;
}

}  // namespace

Tensor StoredTensor::result() const { return wide(tensor_.result); }
Tensor StoredTensor::reference() const { return wide(tensor_.reference); }
Tensor StoredTensor::oracle() const {
  return at::tensor(at::ArrayRef<double>(oracle_)).view(tensor_.result.sizes());
}

bool StoredTensor::holds(const Tensor& numbers) const {
  Judged judged = tensor_;
  judged.result = numbers;
  judged.oracle = oracle_;
  judged.magnitude = magnitude_;
  return judge(judged).result.status == Status::kPass;
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
  return std::any_of(line.begin(), line.end(), [&](const Change& change) {
    const StoredTensor& tensor = tensors[change.tensor];
    const Tensor numbers = changed(tensor, change.direction, size);
    return !tensor.holds(numbers) || (bitwise && !tensor.has_reference_bits(numbers));
  });
}

std::vector<PeerVerdict> StoredCase::peers(const ErrorLine& line, double size) const {
  PeerTests tests(level, dtype, ranks);
  const Observer add = tests.observer();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto change =
        std::find_if(line.begin(), line.end(), [&](const Change& one) { return one.tensor == i; });
    add(tensors[i].name(),
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

StoredCase store_case(const TrainingCase& c, Worlds& worlds) {
  StoredCase stored;
  stored.level = PeerLevel::kModel;
  stored.dtype = c.model.dtype;
  stored.ranks = c.model.mesh.world();
  stored.result = check_training(c, keeping<TrainingSubject>(stored), worlds);
  return stored;
}

}  // namespace shardproof::verify
