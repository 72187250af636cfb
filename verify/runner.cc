#include "verify/runner.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "base/error.h"

namespace shardproof::verify {
namespace {

sim::WorldOptions world_options(const RunOptions& options, int lanes) {
  sim::WorldOptions world;
  world.device = options.device;
  world.schedule_seed = options.schedule_seed;
  world.faults = options.faults;
  // Several lanes keep the cores busy with one rank each; alone, a lane uses them all.
  world.cores = lanes > 1 || options.device.is_cuda() ? 1 : 0;
  return world;
}

std::string replay_command(const Case& c, const RunOptions& options) {
  return fmt::format("./shardproof verify --case '{}'{}{}{}", c.id(), c.replay_arguments(),
                     options.device.is_cuda() ? " --device cuda" : "", options.replay_arguments);
}

// False if the case cannot be made smaller.
bool shrink_failure(const Case& c, CaseResult& result, const RunOptions& options) {
  WorldPool worlds(world_options(options, 1));
  const CasePtr small = c.shrunk([&](const Case& smaller) {
    const CaseResult r = smaller.check(worlds);
    return r.status == Status::kFail && r.first_wrong == result.first_wrong;
  });
  if (small) result.replay = replay_command(*small, options);
  return small != nullptr;
}

}  // namespace

std::vector<CaseResult> run_cases(const std::vector<CasePtr>& cases, const RunOptions& options) {
  int lanes = options.lanes > 0          ? options.lanes
              : options.device.is_cuda() ? 1
                                         : static_cast<int>(std::thread::hardware_concurrency());
  if (options.worlds) lanes = 1;
  lanes = std::max(1, std::min(lanes, static_cast<int>(cases.size())));
  std::vector<CaseResult> results(cases.size());
  std::atomic<size_t> next = 0, done = 0;
  std::mutex reporting;
  const auto work = [&] {
    at::set_num_threads(1);
    WorldPool pool(world_options(options, lanes));
    Worlds& worlds = options.worlds ? *options.worlds : pool;
    for (size_t i = next++; i < cases.size(); i = next++) {
      results[i] = cases[i]->check(worlds);
      results[i].replay = replay_command(*cases[i], options);
      ++done;
      if (options.progress) {
        const std::lock_guard lock(reporting);
        options.progress(done, cases.size());
      }
    }
  };
  std::vector<std::thread> threads;
  for (int lane = 1; lane < lanes; ++lane) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();

  int shrunk = options.worlds ? options.shrink_failures : 0;  // virtual ranks only: it tries meshes
  for (size_t i = 0; i < cases.size() && shrunk < options.shrink_failures; ++i) {
    if (results[i].status != Status::kFail) continue;
    if (shrink_failure(*cases[i], results[i], options)) ++shrunk;
  }
  return results;
}

}  // namespace shardproof::verify
