#include "verify/training/training_run.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "fsdp/loss.h"
#include "models/text_padding.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using K = TrainingConstants;

// One rank's program.
class RankTraining {
 public:
  RankTraining(const TrainingCase& c, const TrainingData& data, const TrainingSubject& subject,
               comm::BackendFactory& rank)
      : c_(c),
        data_(data),
        subject_(subject),
        rank_(rank.rank()),
        mesh_(rank, c.model.mesh),
        fsdp_(rank, c.shards),
        parallel_(subject.make_context
                      ? subject.make_context(mesh_, c.model.parallel, rank_)
                      : std::make_unique<models::MeshContext>(mesh_, c.model.parallel)),
        sharded_(models::block_names(*data.model), data.parameters, fsdp_, c.policy()),
        optimizer_(make_training_optimizer(c)),
        average_(K::kEmaDecay) {
    const at::NoGradGuard no_grad;
    for (const auto& tensor : sharded_.trained()) first_[tensor.name] = tensor.value.clone();
  }

  RankResult run() {
    for (int step = 0; step < c_.steps; ++step) take_step(step);
    return std::move(results_);
  }

 private:
  Tensor own_samples(const Tensor& x) const {
    return x.narrow(0, mesh_.at().dp * c_.model.batch, c_.model.batch).to(mesh_.device());
  }

  Tensor forward(const MicroBatch& batch, int step) {
    StoppingUnits units(c_, data_, step, mesh_.at().dp, &sharded_);
    models::ForwardOptions options;
    options.policy = c_.model.policy();
    options.recompute = c_.model.recompute;
    options.units = &units;
    const int sp = c_.model.mesh.sp();
    return weighted_sum(
        micro_batch_passes(c_, data_, batch, mesh_.at().dp, c_.model.dtype, mesh_.device()),
        [&](const ModelPass& pass) {
          options.dropout = pass.dropout;
          if (subject_.edit_dropout) subject_.edit_dropout(options.dropout, rank_);
          return data_.model->forward(
              sharded_.parameters(),
              c_.model.text_aligned ? models::pad_text(pass.inputs, sp) : pass.inputs, *parallel_,
              options);
        });
  }

  // Valid elements of the step, on all replicas.
  double valid_elements(int step) const {
    double count = 0, own = 0;
    for (const MicroBatch& batch : data_.batches[static_cast<size_t>(step)]) {
      const Tensor mask = own_samples(batch.mask);
      own += mask.sum().item<double>();
      count += fsdp::count_valid(mask, mesh_.dp());
    }
    return subject_.edit_count ? subject_.edit_count(count, own) : count;
  }

  Tensor loss(int step, int micro, double valid) {
    const MicroBatch& batch = data_.batches[static_cast<size_t>(step)][static_cast<size_t>(micro)];
    const at::ScalarType wide = sharded_.policy().reduce_dtype;
    const Tensor error =
        (forward(batch, step).to(wide) - own_samples(batch.target).to(wide)).square();
    switch (c_.loss) {
      case TrainingLoss::kMaskedMean:
        return fsdp::masked_mean(error, own_samples(batch.mask), valid, c_.accumulation,
                                 mesh_.dp());
      case TrainingLoss::kPerRank:
        return loss_of_own_elements(c_, error, mesh_.sp_rank());
      default:
        return error.mean();
    }
  }

  Tensor edited_loss(int step, int micro, double valid) {
    const Tensor right = loss(step, micro, valid);
    if (!subject_.edit_loss) return right;
    const Tensor& mask = data_.batches[static_cast<size_t>(step)][static_cast<size_t>(micro)].mask;
    const double own = own_samples(mask).sum().item<double>();
    return subject_.edit_loss(right, {rank_, mesh_.at().dp, micro, own, valid});
  }

  void take_step(int step) {
    const double valid = c_.loss == TrainingLoss::kMaskedMean ? valid_elements(step) : 0;
    fsdp::StepOptions options;
    options.micro_batches = c_.accumulation;
    options.deferred_sync = c_.deferred;
    if (c_.clip) options.max_norm = kClipNorm;
    options.learning_rate = K::kLearningRate;
    options.convention = c_.model.parallel.convention;
    options.probe = [&](const std::vector<fsdp::TrainedTensor>& tensors) {
      if (subject_.edit_gradients) subject_.edit_gradients(tensors, rank_);
      for (const auto& tensor : tensors) keep(step, tensor.name + ":grad", tensor.grad);
    };
    if (subject_.edit_step) subject_.edit_step(options, rank_);
    const fsdp::StepReport report =
        fsdp::training_step(sharded_, *optimizer_, &average_, mesh_, fsdp_, options,
                            [&](int micro) { return edited_loss(step, micro, valid); });
    keep(step, "loss", at::full({1}, report.loss, at::kDouble));
    keep(step, "grad_norm", at::full({1}, report.grad_norm, at::kDouble));
    for (const auto& tensor : sharded_.trained()) {
      keep(step, tensor.name + ":update", tensor.value - first_.at(tensor.name));
    }
    for (const auto& [role, tensors] : optimizer_->state()) {
      for (const auto& [name, x] : tensors) keep(step, name + ":" + role, x);
    }
    for (const auto& [name, x] : average_.averages()) keep(step, name + ":ema", x);
  }

  void keep(int step, const std::string& name, const Tensor& x) {
    results_[fmt::format("step{}/{}", step, name)] = x.detach().cpu().clone();
  }

  const TrainingCase& c_;
  const TrainingData& data_;
  const TrainingSubject& subject_;
  int rank_;
  comm::Mesh mesh_;
  comm::FsdpMesh fsdp_;
  std::unique_ptr<models::ParallelContext> parallel_;
  fsdp::FullySharded sharded_;
  std::unique_ptr<fsdp::Optimizer> optimizer_;
  fsdp::MovingAverage average_;
  std::map<std::string, Tensor> first_;
  RankResult results_;
};

// Which rank holds which rows, derived here once more: ceil(rows/shards) each, in rank order, once
// for every `shards` consecutive ranks.
class Assembly {
 public:
  Assembly(const TrainingCase& c, const TrainingData& data) : c_(c), data_(data) {}

  TrainingTensors assemble(const std::vector<RankResult>& ranks) {
    TrainingTensors whole;
    for (const auto& [name, first] : ranks[0]) {
      std::vector<Tensor> parts;
      for (const RankResult& rank : ranks) parts.push_back(rank.at(name));
      const std::string parameter = parameter_of(name);
      if (parameter.empty()) {
        whole[name] = the_same(name, parts, metric_);
      } else if (replicated(parameter)) {
        whole[name] = the_same(name, parts, coverage_);
      } else {
        whole[name] = rows(name, data_.parameters.spec(parameter), parts);
      }
    }
    return whole;
  }
  CheckResult coverage() const { return check("coverage", coverage_); }
  CheckResult metric() const { return check("metric", metric_); }

 private:
  static CheckResult check(const char* name, const std::string& problem) {
    return {name, problem.empty() ? Status::kPass : Status::kFail, problem};
  }

  // "step0/blocks.0.weight:grad" -> "blocks.0.weight"; empty for numbers.
  static std::string parameter_of(const std::string& name) {
    const size_t from = name.find('/') + 1, to = name.rfind(':');
    return to == std::string::npos ? std::string() : name.substr(from, to - from);
  }

  bool replicated(const std::string& parameter) const {
    const fsdp::Policy policy = c_.policy();
    return policy.replicated && policy.replicated(parameter);
  }

  Tensor the_same(const std::string& name, const std::vector<Tensor>& parts,
                  std::string& problem) const {
    for (size_t r = 1; r < parts.size(); ++r) {
      if (at::equal(parts[0], parts[r]) || !problem.empty()) continue;
      problem = fmt::format("{} of rank {} differs from that of rank 0", name, r);
    }
    return parts[0];
  }

  Tensor rows(const std::string& name, const models::ParameterSpec& spec,
              const std::vector<Tensor>& parts) {
    const auto shards = static_cast<size_t>(c_.shards);
    const int64_t all = spec.shape.empty() ? 1 : spec.shape[0];
    const int64_t each = (all + c_.shards - 1) / c_.shards;
    std::vector<Tensor> held;
    for (size_t r = 0; r < parts.size(); ++r) {
      const int64_t begin = static_cast<int64_t>(r % shards) * each;
      const int64_t own = std::clamp<int64_t>(all - begin, 0, each);
      if (parts[r].size(0) != own && coverage_.empty()) {
        coverage_ =
            fmt::format("{}: rank {} holds {} rows; expected {}", name, r, parts[r].size(0), own);
      }
      if (r < shards) {
        held.push_back(parts[r]);
      } else if (!at::equal(parts[r], parts[r % shards]) && coverage_.empty()) {
        coverage_ = fmt::format("{}: the copy on rank {} differs from that on rank {}", name, r,
                                r % shards);
      }
    }
    const Tensor whole = at::cat(held, 0);
    return coverage_.empty() ? whole.view(spec.shape) : whole;
  }

  const TrainingCase& c_;
  const TrainingData& data_;
  std::string coverage_, metric_;
};

}  // namespace

std::unique_ptr<fsdp::Optimizer> make_training_optimizer(const TrainingCase& c) {
  if (c.sgd) return fsdp::make_sgd({K::kMomentum, K::kSgdDecay, false});
  return fsdp::make_adamw({K::kBeta1, K::kBeta2, c.epsilon(), K::kAdamDecay});
}

TrainingRun run_parallel_training(const TrainingCase& c, const TrainingData& data,
                                  const TrainingSubject& subject, RankWorld& world) {
  SP_CHECK(world.size() == c.model.mesh.world(), "world of {} for {}", world.size(), c.id());
  TrainingRun run;
  std::vector<RankResult> ranks;
  const auto program = [&](comm::BackendFactory& rank) {
    return RankTraining(c, data, subject, rank).run();
  };
  run.completed = run_ranks(world, subject.faults, program, ranks, run.checks);
  if (!run.completed) return run;
  Assembly assembly(c, data);
  run.tensors = assembly.assemble(ranks);
  run.checks.push_back(assembly.coverage());
  run.checks.push_back(assembly.metric());
  run.checks.push_back(check_training_trace(c, data, world));
  for (CheckResult& finding : world.findings()) run.checks.push_back(std::move(finding));
  return run;
}

}  // namespace shardproof::verify
