#include "models/parameters.h"

#include <ATen/ATen.h>

#include "base/error.h"

namespace shardproof::models {
namespace {

bool is_off_line(const at::Tensor& tensor) {
  constexpr uintptr_t kLineBytes = 64;
  return tensor.device().is_cpu() &&
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kLineBytes != 0;
}

}  // namespace

ParameterSet::ParameterSet(std::vector<ParameterSpec> specs) : specs_(std::move(specs)) {
  for (size_t i = 0; i < specs_.size(); ++i) {
    SP_CHECK(index_.emplace(specs_[i].name, i).second, "parameter '{}' twice", specs_[i].name);
  }
  tensors_.resize(specs_.size());
}

int64_t ParameterSet::count() const {
  int64_t total = 0;
  for (const ParameterSpec& spec : specs_) {
    if (!spec.buffer) total += c10::multiply_integers(spec.shape);
  }
  return total;
}

const ParameterSpec& ParameterSet::spec(const std::string& name) const {
  const auto it = index_.find(name);
  SP_CHECK(it != index_.end(), "the model has no parameter '{}'", name);
  return specs_[it->second];
}

const at::Tensor& ParameterSet::operator[](const std::string& name) const {
  const auto it = index_.find(name);
  SP_CHECK(it != index_.end(), "the model has no parameter '{}'", name);
  const at::Tensor& tensor = tensors_[it->second];
  SP_CHECK(tensor.defined(), "parameter '{}' has no value yet", name);
  SP_CHECK(tensor.numel() == 0 || tensor.storage().nbytes() > 0,
           "parameter '{}' is read while only its shards are there", name);
  return tensor;
}

void ParameterSet::set(const std::string& name, at::Tensor tensor) {
  const auto it = index_.find(name);
  if (it == index_.end()) bad_input("the model has no parameter '{}'", name);
  const ParameterSpec& spec = specs_[it->second];
  if (tensor.sizes() != spec.shape) {
    bad_input("parameter '{}': expected shape {}, got {}", name,
              c10::str(at::IntArrayRef(spec.shape)), c10::str(tensor.sizes()));
  }
  tensors_[it->second] = std::move(tensor);
}

void ParameterSet::allocate(at::TensorOptions options) {
  for (size_t i = 0; i < specs_.size(); ++i) tensors_[i] = at::empty(specs_[i].shape, options);
}

void ParameterSet::add(const ParameterSpec& spec, at::Tensor tensor) {
  SP_CHECK(index_.emplace(spec.name, specs_.size()).second, "parameter '{}' twice", spec.name);
  specs_.push_back(spec);
  tensors_.emplace_back();
  set(spec.name, std::move(tensor));
}

void ParameterSet::freeze(const std::function<bool(const std::string& name)>& which) {
  for (ParameterSpec& spec : specs_) spec.frozen |= which(spec.name);
}

ParameterSet ParameterSet::leaves(at::ScalarType dtype, at::Device device) const {
  ParameterSet copy(specs_);
  copy.adapter_scale_ = adapter_scale_;
  for (size_t i = 0; i < specs_.size(); ++i) {
    SP_CHECK(tensors_[i].defined(), "parameter '{}' has no value yet", specs_[i].name);
    const bool trained = !specs_[i].buffer && !specs_[i].frozen;
    at::Tensor leaf = tensors_[i].to(device, dtype).detach();
    if (is_off_line(leaf)) leaf = leaf.clone();
    copy.tensors_[i] = leaf.requires_grad_(trained);
  }
  return copy;
}

std::vector<std::pair<std::string, at::Tensor>> ParameterSet::trained() const {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (tensors_[i].defined() && tensors_[i].requires_grad()) {
      all.emplace_back(specs_[i].name, tensors_[i]);
    }
  }
  return all;
}

void SpecBuilder::tensor(const std::string& name, std::vector<int64_t> shape, bool buffer) const {
  specs_.push_back({prefix_ + name, std::move(shape), buffer});
}

void SpecBuilder::linear(const std::string& name, int64_t in, int64_t out) const {
  tensor(name + ".weight", {out, in});
  tensor(name + ".bias", {out});
}

void SpecBuilder::norm(const std::string& name, int64_t size) const {
  tensor(name + ".weight", {size});
}

}  // namespace shardproof::models
