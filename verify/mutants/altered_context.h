// A rank's context of which single answers are replaced: how mutants enter a model's forward.
#pragma once
#include <memory>

#include "models/parallel.h"

namespace shardproof::verify {

class AlteredContext final : public models::ParallelContext {
 public:
  explicit AlteredContext(std::unique_ptr<models::ParallelContext> right)
      : ParallelContext(right->options()), right_(std::move(right)) {}

  // Each gets what the product answers; empty: that stands.
  std::function<void(plan::AttentionPlan&)> edit_plan;
  std::function<at::Tensor(const at::Tensor& rows, const at::Tensor& whole,
                           const plan::StreamPlan& stream, int64_t dim)>
      edit_rows;
  std::function<models::JointAttention(models::JointAttention)> wrap_attention;
  std::function<at::Tensor(const at::Tensor& whole, const at::Tensor& own,
                           const plan::StreamPlan& stream)>
      edit_gathered;

  at::Device device() const override { return right_->device(); }
  int sp_rank() const override { return right_->sp_rank(); }
  plan::AttentionPlan plan(const std::vector<std::pair<std::string, int64_t>>& streams,
                           int64_t heads) const override {
    plan::AttentionPlan plan = right_->plan(streams, heads);
    if (edit_plan) edit_plan(plan);
    return plan;
  }
  at::Tensor own_rows(const at::Tensor& x, const plan::StreamPlan& stream,
                      int64_t dim) const override {
    const at::Tensor rows = right_->own_rows(x, stream, dim);
    return edit_rows ? edit_rows(rows, x, stream, dim) : rows;
  }
  models::JointAttention attention(plan::AttentionPlan plan, at::ScalarType dtype,
                                   bool masked) const override {
    models::JointAttention attend = right_->attention(std::move(plan), dtype, masked);
    return wrap_attention ? wrap_attention(std::move(attend)) : attend;
  }
  at::Tensor gather(const at::Tensor& x, const plan::StreamPlan& stream,
                    const std::string& site) const override {
    const at::Tensor whole = right_->gather(x, stream, site);
    return edit_gathered ? edit_gathered(whole, x, stream) : whole;
  }

 private:
  std::unique_ptr<models::ParallelContext> right_;
};

// A subject whose ranks have the product's context, with what `alter` replaces in it.
template <class Subject>
Subject in_context(std::function<void(AlteredContext&, int rank)> alter) {
  Subject subject;
  subject.make_context = [alter](const comm::Mesh& mesh, models::ParallelOptions options,
                                 int rank) {
    auto context = std::make_unique<AlteredContext>(
        std::make_unique<models::MeshContext>(mesh, std::move(options)));
    alter(*context, rank);
    return context;
  };
  return subject;
}

}  // namespace shardproof::verify
