// What sequence parallelism adds to a model's forward: which rows of a token stream this rank
// holds, how tensors are cut and put together again as the model's plan says, and attention over
// the mesh.
#pragma once
#include <ATen/core/Tensor.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attention/sequence_parallel.h"
#include "comm/mesh.h"
#include "models/rope.h"
#include "plan/attention_plan.h"
#include "plan/model_plan.h"

namespace shardproof::models {

struct ParallelOptions {
  plan::TokenSplit token_split = plan::TokenSplit::kUneven;
  plan::HeadSplit head_split = plan::HeadSplit::kEven;
  plan::RingMode ring_mode = plan::RingMode::kRotate;
  plan::StreamPlacement text_placement = plan::StreamPlacement::kSharded;
  // Of the gather of the model's output. Gathers inside the model always sum: their cotangents
  // depend on the rank.
  plan::GradientConvention convention = plan::GradientConvention::kSumThenSlice;
  std::string backend = "auto";  // local attention
};

// Attention over these streams in this (joint) order; "text" is placed as the options say.
plan::AttentionPlan plan_attention(const comm::MeshShape& mesh, const ParallelOptions& options,
                                   const std::vector<std::pair<std::string, int64_t>>& streams,
                                   int64_t heads);

class ParallelContext {
 public:
  // The mesh must outlive the object.
  ParallelContext(const comm::Mesh& mesh, ParallelOptions options)
      : mesh_(mesh), options_(std::move(options)) {}

  const comm::Mesh& mesh() const { return mesh_; }
  const ParallelOptions& options() const { return options_; }

  plan::AttentionPlan plan(const std::vector<std::pair<std::string, int64_t>>& streams,
                           int64_t heads) const {
    return plan_attention(mesh_.shape(), options_, streams, heads);
  }
  attention::SequenceParallelAttention attention(plan::AttentionPlan plan, at::ScalarType dtype,
                                                 bool masked) const;

 private:
  const comm::Mesh& mesh_;
  ParallelOptions options_;
};

// Carries out a model's plan in one forward, and notices what was left out: a tensor that should
// have been split and was not would give wrong numbers, not an error.
class Sharding {
 public:
  // The references must outlive the object.
  Sharding(const plan::ModelPlan& rules, const plan::AttentionPlan& attention,
           const ParallelContext& parallel)
      : rules_(rules), attention_(attention), parallel_(parallel) {}

  // Whole x -> this rank's rows as the rule for `tensor` says, zeros in pads. The adjoint puts them
  // back: gradients of a whole input are partial, their sum over SP ranks is the gradient.
  // Errors (kBadInput): x has another number of dimensions or tokens than the plan says.
  at::Tensor split(const std::string& tensor, const at::Tensor& x);
  RopeTable split(const std::string& tensor, const RopeTable& table);
  // This rank's rows [B, local rows, C] -> whole [B, tokens, C].
  at::Tensor gather(const std::string& tensor, const at::Tensor& x);

  // Errors (kInternal): a rule of the plan that was not carried out.
  void finish() const;

 private:
  const plan::TensorRule& use(const std::string& tensor, plan::TensorUse use);
  const plan::StreamPlan& stream(const plan::TensorRule& rule) const;

  const plan::ModelPlan& rules_;
  const plan::AttentionPlan& attention_;
  const ParallelContext& parallel_;
  std::set<std::string> done_;
};

// A mesh of one rank, for runs without parallelism.
class SingleRank final : public comm::BackendFactory {
 public:
  explicit SingleRank(at::Device device) : device_(device) {}
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  at::Device device() const override { return device_; }
  c10::intrusive_ptr<c10d::Backend> create(const std::string&, const std::vector<int>&) override {
    return {};
  }

 private:
  at::Device device_;
};

}  // namespace shardproof::models
