// What sequence parallelism adds to a model's forward: which rows of a token stream this rank
// holds, how tensors are cut and put together again as the model's plan says, and attention over
// the mesh.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
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

using JointAttention = std::function<attention::SequenceParallelOutput(
    const std::vector<attention::StreamQkv>& streams, const at::Tensor& key_mask)>;

// What a forward asks of the run that it is part of: the one place where tokens of other ranks
// reach it.
class ParallelContext {
 public:
  explicit ParallelContext(ParallelOptions options) : options_(std::move(options)) {}
  virtual ~ParallelContext() = default;
  const ParallelOptions& options() const { return options_; }
  virtual at::Device device() const = 0;
  virtual int sp_rank() const = 0;

  // Who holds which tokens and heads.
  virtual plan::AttentionPlan plan(const std::vector<std::pair<std::string, int64_t>>& streams,
                                   int64_t heads) const = 0;
  // Of a whole x, this rank's rows of the stream along dimension `dim`, zeros in pads.
  virtual at::Tensor own_rows(const at::Tensor& x, const plan::StreamPlan& stream,
                              int64_t dim) const = 0;
  // See attention::SequenceParallelAttention.
  virtual JointAttention attention(plan::AttentionPlan plan, at::ScalarType dtype,
                                   bool masked) const = 0;
  // The stream's rows of this rank [B, local rows, C] -> whole [B, tokens, C]. Its adjoint is the
  // convention of the options. `site` is appended to the tag.
  virtual at::Tensor gather(const at::Tensor& x, const plan::StreamPlan& stream,
                            const std::string& site) const = 0;

 private:
  ParallelOptions options_;
};

// One rank of a mesh.
class MeshContext final : public ParallelContext {
 public:
  // The mesh must outlive the object.
  MeshContext(const comm::Mesh& mesh, ParallelOptions options)
      : ParallelContext(std::move(options)), mesh_(mesh) {}
  at::Device device() const override { return mesh_.device(); }
  int sp_rank() const override { return mesh_.sp_rank(); }
  plan::AttentionPlan plan(const std::vector<std::pair<std::string, int64_t>>& streams,
                           int64_t heads) const override {
    return plan_attention(mesh_.shape(), options(), streams, heads);
  }
  at::Tensor own_rows(const at::Tensor& x, const plan::StreamPlan& stream,
                      int64_t dim) const override;
  JointAttention attention(plan::AttentionPlan plan, at::ScalarType dtype,
                           bool masked) const override;
  at::Tensor gather(const at::Tensor& x, const plan::StreamPlan& stream,
                    const std::string& site) const override;

 private:
  const comm::Mesh& mesh_;
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
