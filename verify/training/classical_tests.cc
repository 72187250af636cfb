#include "verify/training/classical_tests.h"

#include <ATen/ATen.h>

#include <array>

#include "base/error.h"
#include "verify/case_id.h"
#include "verify/models/model_check.h"
#include "verify/peers/peer_tests.h"
#include "verify/training/training_check.h"

namespace shardproof::verify {
namespace {

constexpr std::array kNames = {"ulysses_forward", "ulysses_forward_backward",
                               "ulysses_forward_backward_fsdp"};
constexpr auto kDtype = c10::ScalarType::BFloat16;

class ClassicalTest final : public Case {
 public:
  ClassicalTest(std::string name, int sp, uint64_t seed, const std::string& backend)
      : name_(std::move(name)) {
    model_.mesh = {4 / sp, 1, sp};
    model_.dtype = kDtype;
    model_.seed = seed;
    model_.parallel.backend = backend;
  }

  std::string id() const override {
    return fmt::format("training/{}/ulysses/{}/bf16/classical#{}", name_, model_.mesh.to_string(),
                       model_.seed);
  }
  std::string replay_arguments() const override {
    const std::string& backend = model_.parallel.backend;
    return backend == "auto" ? "" : " --backend " + backend;
  }
  CasePtr shrunk(const std::function<bool(const Case&)>&) const override { return nullptr; }

  CaseResult check(Worlds& worlds) const override {
    PeerTests peers(PeerLevel::kModel, kDtype, model_.mesh.world());
    CaseResult result = name_ == kNames[2] ? with_fsdp(worlds, peers) : without(worlds, peers);
    result.id = id();
    result.peers = peers.judge();
    return result;
  }

 private:
  CaseResult with_fsdp(Worlds& worlds, PeerTests& peers) const {
    TrainingCase c;
    c.model = model_;
    c.shards = model_.mesh.world();
    c.steps = 1;
    TrainingSubject subject;
    subject.observe = peers.observer();
    return check_training(c, subject, worlds);
  }

  CaseResult without(Worlds& worlds, PeerTests& peers) const {
    const bool forward_only = name_ == kNames[0];
    ModelSubject subject;
    subject.observe = [&](const Judged& tensor) {
      if (forward_only && tensor.name.ends_with(":grad")) return;
      peers.add(tensor);
      if (tensor.name != "output") return;
      const auto loss = [](const at::Tensor& x) { return x.to(at::kDouble).square().mean(); };
      const at::Tensor result = loss(tensor.result), reference = loss(tensor.reference);
      peers.add("loss", result, reference, reference);
    };
    CaseResult result = check_model(model_, subject, worlds);
    if (!forward_only || result.status == Status::kSkip) return result;
    std::erase_if(result.tensors,
                  [](const TensorResult& tensor) { return tensor.name.ends_with(":grad"); });
    std::erase_if(result.checks, [](const CheckResult& check) { return check.name == "scale"; });
    if (result.status != Status::kError) result.status = Status::kPass;
    result.conclude();
    return result;
  }

  std::string name_;
  ModelCase model_;
};

}  // namespace

std::vector<CasePtr> classical_tests(const CaseFilter& filter, uint64_t seed) {
  std::vector<CasePtr> cases;
  for (const char* name : kNames) {
    for (const int sp : {2, 4}) {
      AttentionCase as_attention;
      as_attention.mesh = {4 / sp, 1, sp};
      as_attention.dtype = kDtype;
      if (filter.admits(as_attention)) {
        cases.push_back(std::make_shared<ClassicalTest>(name, sp, seed, filter.backend));
      }
    }
  }
  return cases;
}

bool is_classical_test(const std::string& id) { return id.starts_with("training/ulysses_"); }

std::vector<CasePtr> find_classical_tests(const std::string& id, const std::string& backend) {
  const bool has_seed = id.find('#') != std::string::npos;
  const uint64_t seed = has_seed ? parse_case_id(id, {"training"}).seed : 1;
  std::vector<CasePtr> found;
  CaseFilter any;
  any.backend = backend;
  for (const CasePtr& test : classical_tests(any, seed)) {
    const std::string known = test->id();
    if (id == known || known.starts_with(id + "/")) found.push_back(test);
  }
  if (found.empty()) {
    bad_input("case '{}': expected training/{{{}}}, alone or as verify prints it", id,
              fmt::join(kNames, ","));
  }
  return found;
}

}  // namespace shardproof::verify
