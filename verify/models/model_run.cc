#include "verify/models/model_run.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>

#include "base/error.h"
#include "models/text_padding.h"
#include "verify/attention/ownership.h"
#include "verify/case.h"
#include "verify/dtype.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using plan::GradientConvention;

// Inputs as leaves on the device; a tensor that passes share is one leaf.
std::vector<ModelPass> make_leaves(const std::vector<ModelPass>& passes, at::ScalarType dtype,
                                   at::Device device) {
  std::map<c10::TensorImpl*, Tensor> leaves;
  std::vector<ModelPass> result = passes;
  for (ModelPass& pass : result) {
    for (const auto& [name, x] : pass.inputs.tensors()) {
      Tensor& leaf = leaves[x.unsafeGetTensorImpl()];
      if (!leaf.defined()) {
        leaf = x.is_floating_point() ? x.to(device, dtype).detach().requires_grad_(true)
                                     : x.to(device);
      }
      pass.inputs[name] = leaf;
    }
  }
  return result;
}

Tensor gradient_of(const Tensor& x) {
  return x.grad().defined() ? x.grad().cpu() : at::zeros_like(x, at::TensorOptions(at::kCPU));
}

// What the terms of the gradients of timestep and guidance add up to in size: these gradients are
// sums over the channels of a sinusoid, large terms that cancel.
class SinusoidMagnitudes {
 public:
  // `value` = [cos | sin] of `input`'s number.
  void watch(const std::string& input, const Tensor& value) {
    if (!value.requires_grad()) return;
    seen_.push_back({input, value, std::make_shared<Tensor>()});
    value.register_hook([kept = seen_.back().grad](const Tensor& grad) { *kept = grad; });
  }
  // After the backward, which must have kept the graph. "<input>:grad", like the input.
  void add_to(ModelTensors& magnitudes, const models::TransformerInputs& inputs) const {
    for (const Seen& seen : seen_) {
      if (!seen.grad->defined()) continue;
      // d cos = -sin, d sin = cos: with these signs all terms are positive.
      const auto halves = seen.value.detach().chunk(2, 1);
      const Tensor signs = at::cat({-halves[1].sign(), halves[0].sign()}, 1);
      const Tensor leaf = models::TransformerInputs(inputs)[seen.input];
      const Tensor sum =
          torch::autograd::grad({seen.value}, {leaf}, {seen.grad->abs() * signs}, true)[0];
      Tensor& total = magnitudes[seen.input + ":grad"];
      total = (total.defined() ? total : at::zeros_like(sum)) + sum.abs();
    }
  }

 private:
  struct Seen {
    std::string input;
    Tensor value;
    std::shared_ptr<Tensor> grad;
  };
  std::vector<Seen> seen_;
};

// Forward and backward of loss = sum(cotangent * sum over passes of weight * output), on this rank.
// `magnitudes` may be null.
ModelTensors differentiate(const models::Transformer& model, const models::ParameterSet& parameters,
                           const std::vector<ModelPass>& given, const Tensor& cotangent,
                           const models::ParallelContext& parallel, models::ForwardOptions options,
                           ModelTensors* magnitudes = nullptr) {
  constexpr std::string_view kSinusoid = ".sinusoid";
  ModelTensors results;
  SinusoidMagnitudes sinusoids;
  const std::vector<ModelPass> passes =
      make_leaves(given, cotangent.scalar_type(), parallel.device());
  const Tensor output = weighted_sum(passes, [&](const ModelPass& pass) {
    options.probe = [&](const std::string& name, const Tensor& value) {
      if (!name.ends_with(kSinusoid)) {
        results[pass.prefix + name] = value.detach().cpu();
      } else if (magnitudes) {
        sinusoids.watch(name.substr(0, name.size() - kSinusoid.size()), value);
      }
    };
    options.dropout = pass.dropout;
    return model.forward(parameters, pass.inputs, parallel, options);
  });
  results["output"] = output.detach().cpu();
  torch::autograd::backward({(output * cotangent).sum()}, {}, magnitudes != nullptr);
  for (const auto& [name, x] : parameters.trained()) results[name + ":grad"] = gradient_of(x);
  for (const ModelPass& pass : passes) {
    for (const auto& [name, x] : pass.inputs.tensors()) {
      // What a later pass shares with the first is the first's.
      const bool shared =
          &pass != &passes[0] && models::TransformerInputs(passes[0].inputs)[name].is_same(x);
      if (x.requires_grad() && !shared) results[pass.prefix + name + ":grad"] = gradient_of(x);
    }
  }
  if (magnitudes) {
    sinusoids.add_to(*magnitudes, passes[0].inputs);
    for (auto& [name, x] : *magnitudes) x = x.cpu().to(at::kDouble).contiguous();
  }
  return results;
}

models::ForwardOptions forward_options(const ModelCase& c, models::DtypePolicy policy) {
  models::ForwardOptions options;
  options.policy = policy;
  options.recompute = c.recompute;
  return options;
}

// The cotangent that a rank's own loss has, so that gradients, summed over SP ranks under the
// convention's rules, are those of the whole loss. For kSumThenSlice losses depend on the rank:
// each element of the output counts on one rank only.
Tensor rank_cotangent(const ModelCase& c, const Tensor& cotangent, int sp_rank) {
  if (c.parallel.convention != GradientConvention::kSumThenSlice) return cotangent;
  const Tensor mine = at::arange(cotangent.numel(), at::kLong).remainder(c.mesh.sp()).eq(sp_rank);
  return cotangent.masked_fill(mine.logical_not().view(cotangent.sizes()), 0);
}

ModelTensors run_rank(const ModelCase& c, const ModelData& data, const ModelSubject& subject,
                      comm::BackendFactory& rank) {
  const comm::Mesh mesh(rank, c.mesh);
  models::ParallelOptions split = c.parallel;
  if (subject.edit_options) subject.edit_options(split, rank.rank());
  const std::unique_ptr<models::ParallelContext> parallel =
      subject.make_context ? subject.make_context(mesh, split, rank.rank())
                           : std::make_unique<models::MeshContext>(mesh, split);
  std::vector<ModelPass> passes = replica_passes(c, data, mesh.at().dp);
  if (c.text_aligned) {
    for (ModelPass& pass : passes) pass.inputs = models::pad_text(pass.inputs, c.mesh.sp());
  }
  for (ModelPass& pass : passes) {
    if (subject.edit_inputs) subject.edit_inputs(pass.inputs, rank.rank());
  }
  const Tensor cotangent = data.cotangent.narrow(0, mesh.at().dp * c.batch, c.batch);
  return differentiate(*data.model, data.parameters.leaves(c.dtype, rank.device()), passes,
                       rank_cotangent(c, cotangent, mesh.sp_rank()).to(rank.device(), c.dtype),
                       *parallel, forward_options(c, c.policy()));
}

// Puts the ranks' results together into whole tensors, and looks at what must be equal.
class Assembly {
 public:
  Assembly(const ModelCase& c, const ModelData& data)
      : c_(c), ownership_(derive_ownership(attention_of(c, data))) {}

  ModelTensors assemble(const std::vector<ModelTensors>& ranks) {
    ModelTensors whole;
    for (const auto& [name, first] : ranks[0]) {
      const bool gradient = name.ends_with(":grad");
      std::vector<Tensor> replicas;
      const auto parts_of_replica = static_cast<size_t>(c_.mesh.sp());
      for (int dp = 0; dp < c_.mesh.dp; ++dp) {
        std::vector<Tensor> parts;
        for (int r = 0; r < c_.mesh.sp(); ++r) {
          parts.push_back(
              ranks[static_cast<size_t>(dp) * parts_of_replica + static_cast<size_t>(r)].at(name));
        }
        replicas.push_back(gradient           ? sum(name, parts)
                           : name == "output" ? the_same(name, parts)
                                              : rows(name, parts));
      }
      whole[name] = join(name, first, replicas);
    }
    return whole;
  }
  const std::string& problem() const { return problem_; }

 private:
  void complain(const std::string& what) {
    if (problem_.empty()) problem_ = what;
  }

  static Tensor nothing_like(const Tensor& x) {
    return at::full_like(x, std::numeric_limits<double>::quiet_NaN());
  }

  bool have_one_shape(const std::string& name, const std::vector<Tensor>& parts) {
    for (size_t r = 1; r < parts.size(); ++r) {
      if (parts[r].sizes() == parts[0].sizes()) continue;
      complain(fmt::format("{} of SP rank {} has shape {}, that of rank 0 {}", name, r,
                           c10::str(parts[r].sizes()), c10::str(parts[0].sizes())));
      return false;
    }
    return true;
  }

  // Partial gradients add up to the gradient; convention B's are sp times too large.
  Tensor sum(const std::string& name, const std::vector<Tensor>& parts) {
    if (!have_one_shape(name, parts)) return nothing_like(parts[0]);
    Tensor total = parts[0].to(at::kDouble);
    for (size_t r = 1; r < parts.size(); ++r) total = total + parts[r].to(at::kDouble);
    if (c_.parallel.convention == GradientConvention::kSliceTimesSp) total = total / c_.mesh.sp();
    return total;
  }

  Tensor the_same(const std::string& name, const std::vector<Tensor>& parts) {
    for (size_t r = 1; r < parts.size(); ++r) {
      if (!at::equal(parts[0], parts[r])) {
        complain(fmt::format("{} of SP rank {} differs from that of rank 0", name, r));
      }
    }
    return parts[0];
  }

  // Copies of a stream that every rank computes for itself. Not to the bit: a product over more
  // rows may be summed in another order.
  Tensor alike(const std::string& name, const std::vector<Tensor>& parts) {
    if (!have_one_shape(name, parts)) return nothing_like(parts[0]);
    const bool low = c_.dtype == at::kBFloat16 || c_.dtype == at::kHalf;
    const double limit = (low ? 8 : 64) * unit_roundoff(c_.dtype);
    for (size_t r = 1; r < parts.size(); ++r) {
      const Tensor a = parts[0].to(at::kDouble), b = parts[r].to(at::kDouble);
      const double difference = (a - b).norm().item<double>() / a.norm().item<double>();
      if (!(difference <= limit)) {  // NaN is a difference, too
        complain(fmt::format("{} of SP rank {} differs from that of rank 0 by {:.1e}", name, r,
                             difference));
      }
    }
    return parts[0];
  }

  // Each rank's rows of a token stream, in the order of the tokens.
  Tensor rows(const std::string& name, const std::vector<Tensor>& parts) {
    const bool text = name.ends_with("encoder_hidden_states");
    if (text && c_.parallel.text_placement == plan::StreamPlacement::kReplicated) {
      return alike(name, parts).narrow(1, 0, c_.text);
    }
    const auto& homes = text ? ownership_.text : ownership_.image;
    std::vector<Tensor> tokens;
    for (const TokenHome& home : homes) {
      const Tensor& part = parts[static_cast<size_t>(home.sp_rank)];
      if (home.row >= part.size(1)) {
        complain(fmt::format("{} of SP rank {} has {} rows; expected more", name, home.sp_rank,
                             part.size(1)));
        return nothing_like(parts[0]);
      }
      tokens.push_back(part.narrow(1, home.row, 1));
    }
    const Tensor all = at::cat(tokens, 1);
    return text ? all.narrow(1, 0, c_.text) : all;
  }

  // Replicas hold other samples; gradients of parameters, and of inputs without a batch axis, add
  // up.
  Tensor join(const std::string& name, const Tensor& first, const std::vector<Tensor>& replicas) {
    Tensor all;
    if (is_per_sample(name)) {
      all = at::cat(replicas, 0);
    } else {
      all = replicas[0];
      for (size_t dp = 1; dp < replicas.size(); ++dp) all = all + replicas[dp];
    }
    if (!name.ends_with("encoder_hidden_states:grad") || !c_.text_aligned) return all;
    if (first.size(1) > c_.text &&
        !all.narrow(1, c_.text, first.size(1) - c_.text).eq(0).all().item<bool>()) {
      complain(name + ": padded text has a gradient");
    }
    return all.narrow(1, 0, c_.text);
  }

  static bool is_per_sample(const std::string& name) {
    if (!name.ends_with(":grad")) return true;
    std::string input = name.substr(0, name.size() - 5);
    if (input.starts_with("negative.")) input = input.substr(9);
    return models::TransformerInputs::has_samples(input);
  }

  const ModelCase& c_;
  const Ownership ownership_;
  std::string problem_;
};

}  // namespace

AttentionCase attention_of(const ModelCase& c, const ModelData& data) {
  bool text_in_attention = false;
  for (const plan::TensorRule& rule : data.model->sharding_plan()) {
    text_in_attention |= rule.use == plan::TensorUse::kSplit && rule.stream == "text";
  }
  AttentionCase a;
  a.mesh = c.mesh;
  a.batch = c.batch;
  a.text = text_in_attention ? c.parallel_text() : 0;
  a.image = c.all_image_tokens();
  a.heads = a.kv_heads = c.heads;
  a.head_dim = c.head_dim;
  a.text_placement = c.parallel.text_placement;
  a.token_split = c.parallel.token_split;
  a.head_split = c.parallel.head_split;
  a.ring_mode = c.parallel.ring_mode;
  return a;
}

ModelTensors run_whole_model(const ModelCase& c, const ModelData& data, at::ScalarType dtype,
                             models::DtypePolicy policy, at::Device device,
                             ModelTensors* magnitudes) {
  models::SingleRank single(device);
  const comm::Mesh mesh(single, {});
  models::ParallelOptions options;
  // The oracle in fp64 is computed by what computes in fp64.
  options.backend = dtype == c.dtype ? c.parallel.backend : "auto";
  const models::MeshContext parallel(mesh, options);
  ModelCase plain = c;
  plain.recompute = false;  // the reference keeps its activations
  return differentiate(*data.model, data.parameters.leaves(dtype, device), data.passes,
                       data.cotangent.to(device, dtype), parallel, forward_options(plain, policy),
                       magnitudes);
}

ModelRun run_parallel_model(const ModelCase& c, const ModelData& data, const ModelSubject& subject,
                            RankWorld& world) {
  SP_CHECK(world.size() == c.mesh.world(), "world of {} for {}", world.size(), c.id());
  ModelRun run;
  std::vector<ModelTensors> ranks;
  const auto program = [&](comm::BackendFactory& rank) { return run_rank(c, data, subject, rank); };
  run.completed = run_ranks(world, subject.faults, program, ranks, run.checks);
  if (!run.completed) return run;
  Assembly assembly(c, data);
  run.tensors = assembly.assemble(ranks);
  run.checks.push_back(
      {"coverage", assembly.problem().empty() ? Status::kPass : Status::kFail, assembly.problem()});
  run.checks.push_back(check_model_trace(c, world));
  for (CheckResult& finding : world.findings()) run.checks.push_back(std::move(finding));
  return run;
}

}  // namespace shardproof::verify
