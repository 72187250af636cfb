#include "bench/attention_pair.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <cmath>
#include <ctime>
#include <thread>

#include "attention/sequence_parallel.h"
#include "base/error.h"

namespace shardproof::bench {
namespace {

using at::Tensor;

plan::AttentionPlan make_plan(const Shape& shape, const SimSetup& setup) {
  plan::AttentionPlanOptions options;
  options.mesh = mesh_of(setup.mode, setup.sp);
  options.q_heads = options.kv_heads = shape.heads;
  options.streams = {{"image", shape.tokens}};
  options.ring_mode =
      setup.mode.ends_with("allgather") ? plan::RingMode::kAllGather : plan::RingMode::kRotate;
  return plan::make_attention_plan(options);
}

sim::WorldOptions world_options(const AttentionWork& work, const SimSetup& setup) {
  sim::WorldOptions options;
  options.device = work.q.device();
  options.cores = setup.cores;
  options.delivery_checks = setup.checks;
  options.check_races_every_run = false;  // once, at the end of what is timed
  return options;
}

Seconds now() {
  timespec cpu{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
  const auto wall = std::chrono::steady_clock::now().time_since_epoch();
  return {std::chrono::duration<double>(wall).count(),
          static_cast<double>(cpu.tv_sec) + 1e-9 * static_cast<double>(cpu.tv_nsec)};
}

double relative_error(const Tensor& x, const Tensor& expected) {
  const Tensor difference = x.to(at::kFloat) - expected.to(at::kFloat);
  return (difference.norm() / expected.to(at::kFloat).norm()).item<double>();
}

}  // namespace

AttentionWork::AttentionWork(Shape s, at::ScalarType dtype, at::Device device,
                             const std::string& backend)
    : shape(s),
      scale(1.0 / std::sqrt(static_cast<double>(s.head_dim))),
      local(attention::make_local_attention(backend, device, dtype, /*masked=*/false)) {
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(1);
  for (Tensor* x : {&q, &k, &v, &dout}) {
    *x = at::randn({1, s.tokens, s.heads, s.head_dim}, random, at::TensorOptions(at::kFloat))
             .to(dtype)
             .to(device);
  }
}

AttentionResults AttentionWork::run() const {
  const at::NoGradGuard no_grad;
  const auto forward = local->forward(q, k, v, {}, scale);
  const auto grads = local->backward(dout, q, k, v, forward.out, forward.lse, {}, scale);
  return {forward.out, grads.dq, grads.dk, grads.dv};
}

void synchronize(at::Device device) {
  if (!device.is_cpu()) at::accelerator::synchronizeDevice(device.index());
}

comm::MeshShape mesh_of(const std::string& mode, int sp) {
  if (mode == "local" && sp == 1) return {};
  if (mode == "ulysses") return {1, 1, sp};
  if (mode == "ring" || mode == "allgather") return {1, sp, 1};
  if (mode == "hybrid" || mode == "hybrid_allgather") {
    if (sp < 4 || sp % 2 != 0)
      bad_input("mode {} needs an even sp of at least 4; got {}", mode, sp);
    return {1, 2, sp / 2};
  }
  bad_input(
      "mode '{}' with sp={}: expected local with sp=1, ulysses, ring, allgather, hybrid or "
      "hybrid_allgather",
      mode, sp);
}

AttentionPair::AttentionPair(std::shared_ptr<const AttentionWork> work, SimSetup setup)
    : work_(std::move(work)),
      setup_(std::move(setup)),
      plan_(make_plan(work_->shape, setup_)),
      world_(setup_.sp, world_options(*work_, setup_)) {
  make_shards();
  warm_up();
}

void AttentionPair::make_shards() {
  for (const plan::Interval rows : plan_.streams[0].shards) {
    const auto own = [&](const Tensor& x) {
      return x.narrow(1, rows.begin, rows.size()).clone(at::MemoryFormat::Contiguous);
    };
    const auto leaf = [&](const Tensor& x) { return own(x).requires_grad_(true); };
    shards_.push_back({rows, leaf(work_->q), leaf(work_->k), leaf(work_->v), own(work_->dout)});
  }
}

AttentionResults AttentionPair::run_rank(sim::RankContext& rank) const {
  const comm::Mesh mesh(rank, plan_.mesh);
  const attention::SequenceParallelAttention attend(plan_, mesh, work_->local);
  const Shard& shard = shards_[static_cast<size_t>(mesh.sp_rank())];
  const auto result = attend({{shard.q, shard.k, shard.v}}, {}, work_->scale);
  const auto grads =
      torch::autograd::grad(result.streams, {shard.q, shard.k, shard.v}, {shard.dout});
  return {result.streams[0].detach(), grads[0], grads[1], grads[2]};
}

void AttentionPair::run_sim() {
  world_.run([this](sim::RankContext& rank) { run_rank(rank); });
}

// A ratio is worth nothing if the ranks compute something else, or with more threads.
void AttentionPair::warm_up() {
  // A thread takes the process's number of intra-op threads at its first parallel operation, even
  // where it was told another one before. The ranks get there before this thread asks for more.
  world_.run([](sim::RankContext& rank) {
    SP_CHECK(at::get_num_threads() == 1, "rank {}: {} threads", rank.rank(), at::get_num_threads());
  });
  at::set_num_threads(setup_.cores);
  AttentionResults whole;
  double seconds = 0;
  // The first run on a device makes cuDNN's plans and tells nothing about the second.
  for (int i = 0; i < (work_->q.is_cpu() ? 1 : 2); ++i) {
    const Seconds before = now();
    whole = work_->run();
    synchronize(work_->q.device());
    seconds = now().wall - before.wall;
  }
  // On a device the first execution waits for its first launches; training does not stop after
  // every attention, so enough of them run behind one another for that to fade.
  const double target = work_->q.is_cuda() ? 0.3 : 0.05;
  executions_ = static_cast<int>(std::clamp(target / seconds, 1.0, 100.0));
  const bool low = work_->q.element_size() < 4;
  world_.run([&](sim::RankContext& rank) {
    const AttentionResults own = run_rank(rank);
    const plan::Interval rows = shards_[static_cast<size_t>(rank.rank())].rows;
    for (Tensor AttentionResults::*x : {&AttentionResults::out, &AttentionResults::dq,
                                        &AttentionResults::dk, &AttentionResults::dv}) {
      const double error = relative_error(own.*x, (whole.*x).narrow(1, rows.begin, rows.size()));
      SP_CHECK(error < (low ? 3e-2 : 1e-4), "rank {} of {} sp={}: relative error {}", rank.rank(),
               setup_.mode, setup_.sp, error);
    }
  });
}

template <class Function>
Seconds AttentionPair::time(const Function& run) {
  // OpenMP's idle threads spin for some milliseconds after the last parallel region; the other
  // side of the comparison must not pay for them.
  synchronize(work_->q.device());
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const Seconds start = now();
  for (int i = 0; i < executions_; ++i) run();
  world_.check_races();  // a part of what the checks cost; nothing where there are none
  synchronize(work_->q.device());
  const Seconds end = now();
  return {(end.wall - start.wall) / executions_, (end.cpu - start.cpu) / executions_};
}

Seconds AttentionPair::time_whole() {
  at::set_num_threads(setup_.cores);
  return time([this] { work_->run(); });
}

Seconds AttentionPair::time_sim() {
  return time([this] { run_sim(); });
}

}  // namespace shardproof::bench
