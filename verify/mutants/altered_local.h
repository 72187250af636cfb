// A local attention of which single operations are replaced.
#pragma once
#include <memory>

#include "verify/attention/attention_run.h"

namespace shardproof::verify {

class AlteredLocal : public attention::LocalAttention {
 public:
  explicit AlteredLocal(AttentionSubject::Local inner) : inner_(std::move(inner)) {}
  std::string name() const override { return inner_->name(); }
  attention::AttentionOutput forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const at::Tensor& mask, double scale) const override {
    return inner_->forward(q, k, v, mask, scale);
  }
  attention::AttentionGradients backward(const at::Tensor& dout, const at::Tensor& q,
                                         const at::Tensor& k, const at::Tensor& v,
                                         const at::Tensor& out, const at::Tensor& lse,
                                         const at::Tensor& mask, double scale) const override {
    return inner_->backward(dout, q, k, v, out, lse, mask, scale);
  }

 protected:
  const attention::LocalAttention& inner() const { return *inner_; }

 private:
  AttentionSubject::Local inner_;
};

// On every rank.
template <class Altered>
AttentionSubject alter_local() {
  AttentionSubject subject;
  subject.wrap_local = [](AttentionSubject::Local local, int) -> AttentionSubject::Local {
    return std::make_shared<Altered>(std::move(local));
  };
  return subject;
}

}  // namespace shardproof::verify
