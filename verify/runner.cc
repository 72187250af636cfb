#include "verify/runner.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <atomic>
#include <filesystem>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "verify/shrink.h"

namespace shardproof::verify {
namespace {

sim::WorldOptions world_options(const RunOptions& options, int lanes) {
  sim::WorldOptions world;
  world.device = options.device;
  world.schedule_seed = options.schedule_seed;
  // Several lanes keep the cores busy with one rank each; alone, a lane uses them all.
  world.cores = lanes > 1 || options.device.is_cuda() ? 1 : 0;
  return world;
}

std::string replay_command(const AttentionCase& c, const AttentionGolden* golden,
                           const RunOptions& options) {
  std::string command = fmt::format("./shardproof verify --case '{}'", c.id());
  if (golden)
    command += fmt::format(" --golden '{}'", std::filesystem::proximate(golden->folder).string());
  if (options.device.is_cuda()) command += " --device cuda";
  return command;
}

const AttentionGolden* golden_of(const AttentionCase& c,
                                 const std::map<std::string, AttentionGolden>& goldens) {
  if (c.golden.empty()) return nullptr;
  const auto it = goldens.find(c.golden);
  if (it == goldens.end()) {
    bad_input("case '{}' needs the golden '{}'; name its folder with --golden", c.id(), c.golden);
  }
  return &it->second;
}

void shrink_failure(const AttentionCase& c, CaseResult& result, const AttentionSubject& subject,
                    const RunOptions& options) {
  WorldPool worlds(world_options(options, 1));
  const auto fails = [&](const AttentionCase& smaller) {
    const CaseResult r = check_attention(smaller, subject, worlds);
    return r.status == Status::kFail && r.first_wrong == result.first_wrong;
  };
  result.replay = replay_command(shrink(c, fails), nullptr, options);
}

}  // namespace

std::vector<CaseResult> run_cases(const std::vector<AttentionCase>& cases,
                                  const std::map<std::string, AttentionGolden>& goldens,
                                  const AttentionSubject& subject, const RunOptions& options) {
  for (const AttentionCase& c : cases) golden_of(c, goldens);  // bad input before any work
  int lanes = options.lanes > 0          ? options.lanes
              : options.device.is_cuda() ? 1
                                         : static_cast<int>(std::thread::hardware_concurrency());
  lanes = std::max(1, std::min(lanes, static_cast<int>(cases.size())));
  std::vector<CaseResult> results(cases.size());
  std::atomic<size_t> next = 0, done = 0;
  std::mutex reporting;
  const auto work = [&] {
    at::set_num_threads(1);
    WorldPool worlds(world_options(options, lanes));
    for (size_t i = next++; i < cases.size(); i = next++) {
      const AttentionGolden* golden = golden_of(cases[i], goldens);
      results[i] = check_attention(cases[i], subject, worlds, golden);
      results[i].replay = replay_command(cases[i], golden, options);
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

  int shrunk = 0;
  for (size_t i = 0; i < cases.size() && shrunk < options.shrink_failures; ++i) {
    if (results[i].status != Status::kFail || !cases[i].golden.empty()) continue;
    shrink_failure(cases[i], results[i], subject, options);
    ++shrunk;
  }
  return results;
}

}  // namespace shardproof::verify
