#include "attention/local_attention.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "attention/fused_attention.h"
#include "base/error.h"

namespace shardproof::attention {

at::ScalarType accumulate_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// [B,S,H,D] -> [B,H,S,D] in the accumulate type, KV heads repeated for their query heads.
at::Tensor to_math(const at::Tensor& x, int64_t repeat) {
  at::Tensor y = x.transpose(1, 2).to(accumulate_type(x.scalar_type()));
  return repeat == 1 ? y : y.repeat_interleave(repeat, 1);
}

// Sums the gradients of a KV head's query heads; back to [B,S,Hk,D] in the dtype of `like`.
at::Tensor from_math(const at::Tensor& grad, const at::Tensor& like, int64_t repeat) {
  at::Tensor g = grad;
  if (repeat != 1) {
    g = g.reshape({g.size(0), g.size(1) / repeat, repeat, g.size(2), g.size(3)}).sum(2);
  }
  return g.transpose(1, 2).to(like.scalar_type()).contiguous();
}

at::Tensor masked_logits(const at::Tensor& q, const at::Tensor& k, const at::Tensor& key_mask,
                         double scale) {
  at::Tensor logits = at::matmul(q, k.transpose(-2, -1)).mul_(scale);
  if (key_mask.defined()) {
    logits.masked_fill_(key_mask.logical_not().unsqueeze(1).unsqueeze(1), -kInf);
  }
  return logits;
}

// Plain matrix arithmetic in the accumulate type: any device and dtype. Runs of query rows are
// worked on one after the other, so that there are at most this many logits at a time (1 GiB in
// fp64); rows are independent, gradients of k and v add up over the runs.
constexpr int64_t kMostLogits = int64_t{1} << 27;

class MathAttention final : public LocalAttention {
 public:
  std::string name() const override { return "math"; }

  AttentionOutput forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& key_mask, double scale) const override {
    const int64_t repeat = q.size(2) / std::max<int64_t>(1, k.size(2));
    const at::Tensor km = to_math(k, repeat), vm = to_math(v, repeat);
    std::vector<at::Tensor> outs, lses;
    for (const auto& [begin, rows] : parts(q, k)) {
      const at::Tensor qm = to_math(q.narrow(1, begin, rows), 1);
      const at::Tensor logits = masked_logits(qm, km, key_mask, scale);
      lses.push_back(k.size(1) == 0
                         ? at::full({q.size(0), q.size(2), rows}, -kInf, logits.options())
                         : at::logsumexp(logits, {-1}));
      const at::Tensor out = at::matmul(probabilities(logits, lses.back()), vm);
      outs.push_back(out.transpose(1, 2).to(q.scalar_type()).contiguous());
    }
    return {join(outs, 1), join(lses, 2)};
  }

  AttentionGradients backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                              const at::Tensor& key_mask, double scale) const override {
    if (q.numel() == 0 || k.numel() == 0) {
      return {at::zeros_like(q), at::zeros_like(k), at::zeros_like(v)};
    }
    const int64_t repeat = q.size(2) / std::max<int64_t>(1, k.size(2));
    const at::Tensor km = to_math(k, repeat), vm = to_math(v, repeat);
    std::vector<at::Tensor> dqs;
    at::Tensor dk, dv;
    const auto add = [](at::Tensor& sum, const at::Tensor& share) {
      sum = sum.defined() ? sum.add_(share) : share;
    };
    for (const auto& [begin, rows] : parts(q, k)) {
      const auto cut = [&, b = begin, n = rows](const at::Tensor& x) {
        return to_math(x.narrow(1, b, n), 1);
      };
      const at::Tensor qm = cut(q), dom = cut(dout);
      const at::Tensor p =
          probabilities(masked_logits(qm, km, key_mask, scale), lse.narrow(2, begin, rows));
      const at::Tensor delta = (dom * cut(out)).sum(-1, /*keepdim=*/true);
      const at::Tensor dlogits = (at::matmul(dom, vm.transpose(-2, -1)) - delta).mul_(p);
      dqs.push_back(from_math(at::matmul(dlogits, km).mul_(scale), q.narrow(1, begin, rows), 1));
      add(dk, at::matmul(dlogits.transpose(-2, -1), qm).mul_(scale));
      add(dv, at::matmul(p.transpose(-2, -1), dom));
    }
    return {join(dqs, 1), from_math(dk, k, repeat), from_math(dv, v, repeat)};
  }

 private:
  // Runs of query rows (begin, count); one run unless the logits are too many.
  static std::vector<std::pair<int64_t, int64_t>> parts(const at::Tensor& q, const at::Tensor& k) {
    const int64_t all = q.size(1), per_row = q.size(0) * q.size(2) * k.size(1);
    const int64_t most = std::max<int64_t>(1, kMostLogits / std::max<int64_t>(1, per_row));
    if (all <= most) return {{0, all}};
    std::vector<std::pair<int64_t, int64_t>> runs;
    for (int64_t begin = 0; begin < all; begin += most) {
      runs.emplace_back(begin, std::min(most, all - begin));
    }
    return runs;
  }
  static at::Tensor join(const std::vector<at::Tensor>& runs, int64_t dim) {
    return runs.size() == 1 ? runs[0] : at::cat(runs, dim);
  }

  // exp(logits - lse); rows with lse = -inf (no key) are zeros.
  static at::Tensor probabilities(const at::Tensor& logits, const at::Tensor& lse) {
    return at::exp(logits - lse.masked_fill(lse.eq(-kInf), kInf).unsqueeze(-1));
  }
};

bool is_low_precision(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

std::string backends_that(bool masked, at::ScalarType dtype, const char* device) {
  std::string names;
  for (const LocalBackendInfo& info : local_backends()) {
    const bool dtype_ok = dtype == at::kDouble  ? info.fp64
                          : dtype == at::kFloat ? info.fp32
                                                : is_low_precision(dtype) && info.low_precision;
    if (!dtype_ok || (masked && !info.takes_mask)) continue;
    if (info.device != "any" && info.device != device) continue;
    names += (names.empty() ? "" : ", ") + std::string(info.name);
  }
  return names;
}

}  // namespace

const std::vector<LocalBackendInfo>& local_backends() {
  static const std::vector<LocalBackendInfo> backends = {
      {"math", "any", true, true, true, true, true, "1 GiB of logits at a time"},
      {"cpu_flash", "cpu", true, true, true, true, true, "bitwise only with one intra-op thread"},
      {"cuda_flash", "cuda", false, false, false, true, false, "dq varies between runs"},
      {"cudnn", "cuda", true, false, false, true, false, "dq varies between runs"},
      {"efficient", "cuda", true, false, true, true, true, ""},
  };
  return backends;
}

std::shared_ptr<const LocalAttention> make_local_attention(std::string_view name, at::Device device,
                                                           at::ScalarType dtype, bool masked) {
  const char* device_name = device.is_cuda() ? "cuda" : "cpu";
  if (backends_that(false, dtype, device_name).empty()) {
    bad_input("no attention backend computes in {}; expected Double, Float, BFloat16 or Half",
              c10::toString(dtype));
  }
  if (name == "auto") {
    name = !device.is_cuda() ? "cpu_flash" : is_low_precision(dtype) ? "cudnn" : "math";
  }
  for (const LocalBackendInfo& info : local_backends()) {
    if (info.name != name) continue;
    const std::string usable = backends_that(masked, dtype, device_name);
    if (info.device != "any" && info.device != device_name) {
      bad_input("attention backend '{}' runs on {}; on {} choose one of: {}", name, info.device,
                device_name, usable);
    }
    if (masked && !info.takes_mask) {
      bad_input("attention backend '{}' takes no mask; choose one of: {}", name, usable);
    }
    if (usable.find(name) == std::string::npos) {
      bad_input("attention backend '{}' does not compute in {}; choose one of: {}", name,
                c10::toString(dtype), usable);
    }
    if (name == "math") return std::make_shared<MathAttention>();
    return make_fused_attention(name);
  }
  std::string known;
  for (const auto& info : local_backends()) known += " " + std::string(info.name);
  bad_input("no attention backend '{}'; known: auto{}", name, known);
}

}  // namespace shardproof::attention
