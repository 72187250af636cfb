// Does ring attention hide its communication? On real ranks, the same ring forward and backward
// three times: as it is, over a transport that delivers nothing (computation alone), and its
// exchanges without the computation. Start it as a world:
//
//   shardproof launch -n 2 -- build/release/bin/bench_ring_overlap --transport nccl
//
// Rank 0 prints one line of JSON: medians of the slowest rank, in milliseconds, and the part of the
// communication that is hidden, (compute + exchange - together) / exchange.
#include <ATen/ATen.h>

#include <fmt/ranges.h>

#include <chrono>
#include <cstdio>
#include <functional>

#include "attention/ring.h"
#include "base/error.h"
#include "base/run_main.h"
#include "bench/attention_pair.h"
#include "bench/command_line.h"
#include "bench/real_ranks.h"
#include "comm/mesh.h"
#include "verify/budget.h"
#include "verify/dtype.h"

namespace {

using namespace shardproof;
using at::Tensor;

struct Options {
  std::string transport = "nccl";
  std::string dtype;
  std::string backend;
  std::vector<int64_t> shape;
  int repetitions = 20;
};

class NoWork final : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override { return true; }
};

// Sends nothing; what is received stays as it was allocated.
class SilentBackend final : public c10d::Backend {
 public:
  SilentBackend(int rank, int size) : c10d::Backend(rank, size) {}
  const std::string getBackendName() const override { return "silent"; }
  using Work = c10::intrusive_ptr<c10d::Work>;
  Work send(std::vector<Tensor>&, int, int) override { return c10::make_intrusive<NoWork>(); }
  Work recv(std::vector<Tensor>&, int, int) override { return c10::make_intrusive<NoWork>(); }
};

class Measurement {
 public:
  Measurement(comm::ProcessWorld& world, const Options& options)
      : world_(world),
        options_(options),
        mesh_(world, {1, world.world_size(), 1}),
        dtype_(verify::parse_dtype(options.dtype)),
        work_({options.shape[0] / world.world_size(), options.shape[1], options.shape[2]}, dtype_,
              world.device(), options.backend) {
    plan::AttentionPlanOptions plan;
    plan.mesh = mesh_.shape();
    plan.q_heads = plan.kv_heads = options.shape[1];
    plan.streams = {{"image", options.shape[0]}};
    plan_ = plan::make_attention_plan(plan);
  }

  std::string report() {
    const comm::Communicator silent(
        c10::make_intrusive<SilentBackend>(world_.rank(), world_.world_size()), "ring",
        mesh_.ring().world_ranks());
    const double together = median([&] { run(mesh_.ring()); });
    const double compute = median([&] { run(silent); });
    const double exchange = median([&] { exchange_only(); });
    return fmt::format(
        "{{\"ranks\": {}, \"transport\": \"{}\", \"dtype\": \"{}\", \"backend\": \"{}\", "
        "\"shape\": [{}, {}, {}], \"repetitions\": {}, \"together_ms\": {:.3f}, \"compute_ms\": "
        "{:.3f}, \"exchange_ms\": {:.3f}, \"together_over_compute\": {:.3f}, \"hidden\": {:.3f}}}",
        world_.world_size(), options_.transport, options_.dtype, work_.local->name(),
        options_.shape[0], options_.shape[1], options_.shape[2], options_.repetitions, together,
        compute, exchange, together / compute, (compute + exchange - together) / exchange);
  }

 private:
  void run(const comm::Communicator& group) {
    const at::NoGradGuard no_grad;
    const attention::MergeFunction merge = attention::merge_block;
    const std::vector<Tensor> no_masks(static_cast<size_t>(group.size()));
    const attention::Ring ring(plan_, group, *work_.local, merge, no_masks, {}, work_.scale);
    const auto forward = ring.forward(work_.q, work_.k, work_.v);
    ring.backward(work_.dout, work_.q, work_.k, work_.v, forward.out, forward.lse);
  }

  // What forward and backward send: K, V in both, and dK, dV in the accumulate type.
  void exchange_only() {
    const comm::Communicator& group = mesh_.ring();
    const int n = group.size(), to = (group.rank() + 1) % n, from = (group.rank() + n - 1) % n;
    const auto rotate = [&](const Tensor& pair, int times) {
      for (int i = 0; i < times; ++i) group.exchange(pair, to, pair.sizes(), from).wait();
    };
    const Tensor kv = at::stack({work_.k, work_.v}, 0);
    const Tensor dkv = kv.to(attention::accumulate_type(dtype_));
    rotate(kv, 2 * (n - 1));
    rotate(dkv, n);
  }

  // Of the slowest rank, in milliseconds.
  double median(const std::function<void()>& step) {
    std::vector<double> times;
    for (int i = -3; i < options_.repetitions; ++i) {
      bench::synchronize(world_.device());
      mesh_.ring().barrier();
      bench::synchronize(world_.device());
      const auto start = std::chrono::steady_clock::now();
      step();
      bench::synchronize(world_.device());
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - start;
      if (i >= 0) times.push_back(slowest(took.count()));
    }
    return verify::median(std::move(times));
  }

  double slowest(double mine) {
    const Tensor all = at::full({1}, mine, at::kDouble).to(world_.device());
    return mesh_.ring().all_reduce(all, comm::Reduce::kMax).wait().item<double>();
  }

  comm::ProcessWorld& world_;
  const Options& options_;
  comm::Mesh mesh_;
  at::ScalarType dtype_;
  bench::AttentionWork work_;  // one rank's block
  plan::AttentionPlan plan_;
};

int run(int argc, char** argv) {
  Options o;
  CLI::App app{"Measures how much of ring attention's communication its computation hides."};
  app.add_option("--transport", o.transport, "nccl or gloo")
      ->check(CLI::IsMember({"nccl", "gloo"}));
  app.add_option("--dtype", o.dtype, "fp64, fp32, bf16 or fp16 (default: bf16; Gloo: fp32)");
  app.add_option("--backend", o.backend, "Local attention (default: cudnn; Gloo: auto)");
  app.add_option("--shape", o.shape,
                 "S,H,D, all ranks together (default: 16640,24,128; Gloo: "
                 "2048,4,64)")
      ->delimiter(',')
      ->expected(3)
      ->check(CLI::PositiveNumber);
  app.add_option("--repetitions", o.repetitions)->check(CLI::Range(1, 10000));
  if (!bench::parse_command_line(app, argc, argv)) return 0;
  const bool nccl = o.transport == "nccl";
  if (o.dtype.empty()) o.dtype = nccl ? "bf16" : "fp32";
  if (o.backend.empty()) o.backend = nccl ? "cudnn" : "auto";
  if (o.shape.empty()) {
    o.shape = nccl ? std::vector<int64_t>{16640, 24, 128} : std::vector<int64_t>{2048, 4, 64};
  }
  const comm::Rendezvous rendezvous = comm::rendezvous_from_environment();
  if (o.shape[0] % rendezvous.world_size != 0) {
    bad_input("--shape: {} tokens do not divide among {} ranks", o.shape[0], rendezvous.world_size);
  }
  const auto world = bench::join_world(rendezvous, o.transport,
                                       fmt::format("{}", fmt::join(argv + 1, argv + argc, " ")));
  const std::string report = Measurement(*world, o).report();
  if (world->rank() == 0) fmt::print("{}\n", report);
  std::fflush(stdout);
  world->barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  shardproof::run_main("bench_ring_overlap", [=] { return run(argc, argv); });
}
