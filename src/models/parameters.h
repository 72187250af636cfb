// The named tensors of a model, with diffusers' state-dict names.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace shardproof::models {

struct ParameterSpec {
  std::string name;
  std::vector<int64_t> shape;
  bool buffer = false;  // stored in checkpoints, not trained, not counted
  bool frozen = false;  // not trained (base weights under LoRA)
};

class ParameterSet {
 public:
  // Allocates nothing.
  explicit ParameterSet(std::vector<ParameterSpec> specs);

  const std::vector<ParameterSpec>& specs() const { return specs_; }
  int64_t count() const;  // elements of all parameters, without buffers

  bool contains(const std::string& name) const { return index_.contains(name); }
  // Errors (kInternal): no such name.
  const ParameterSpec& spec(const std::string& name) const;
  // Errors (kInternal): no such name, or no tensor yet.
  const at::Tensor& operator[](const std::string& name) const;
  // Errors (kBadInput): unknown name, wrong shape.
  void set(const std::string& name, at::Tensor tensor);

  // New uninitialised tensors for all (the meta device: shapes only).
  void allocate(at::TensorOptions options);
  // Freezes the parameters of which `which` holds.
  void freeze(const std::function<bool(const std::string& name)>& which);
  // Adds parameters that the model's own list does not have (LoRA).
  void add(const ParameterSpec& spec, at::Tensor tensor);
  // Of the low-rank adapters (LoRA) among the parameters: alpha / rank.
  double adapter_scale() const { return adapter_scale_; }
  void set_adapter_scale(double scale) { adapter_scale_ = scale; }
  // Leaves with gradients of their own, in another dtype and on another device; storage is shared
  // where neither changes and the data begins at a multiple of 64 bytes (a mapped file's may not,
  // and kernels then give other bits). All but buffers and frozen ones require grad.
  ParameterSet leaves(at::ScalarType dtype, at::Device device) const;
  // The trained tensors by name, in the list's order.
  std::vector<std::pair<std::string, at::Tensor>> trained() const;

 private:
  std::vector<ParameterSpec> specs_;
  std::map<std::string, size_t> index_;
  std::vector<at::Tensor> tensors_;
  double adapter_scale_ = 1;
};

// Lists shapes under a growing prefix: `at("attn").linear("to_q", in, out)`.
class SpecBuilder {
 public:
  explicit SpecBuilder(std::vector<ParameterSpec>& specs, std::string prefix = {})
      : specs_(specs), prefix_(std::move(prefix)) {}
  SpecBuilder at(const std::string& name) const {
    return SpecBuilder(specs_, prefix_ + name + ".");
  }
  void tensor(const std::string& name, std::vector<int64_t> shape, bool buffer = false) const;
  void linear(const std::string& name, int64_t in, int64_t out) const;  // weight and bias
  void norm(const std::string& name, int64_t size) const;               // weight

 private:
  std::vector<ParameterSpec>& specs_;
  std::string prefix_;
};

}  // namespace shardproof::models
