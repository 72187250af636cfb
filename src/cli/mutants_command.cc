#include <ATen/ATen.h>

#include <cstdio>
#include <filesystem>

#include "base/atomic_file.h"
#include "base/error.h"
#include "cli/commit.h"
#include "cli/machine.h"
#include "cli/mutants_options.h"
#include "cli/nearest.h"
#include "cli/power_command.h"
#include "comm/device.h"
#include "verify/mutants/fuzz_report.h"

namespace shardproof::cli {
namespace {

std::vector<verify::Mutant> chosen(const MutantsOptions& o) {
  const std::vector<verify::Mutant>& all = verify::mutant_catalogue();
  if (o.only.empty()) return all;
  std::vector<std::string> ids;
  for (const verify::Mutant& mutant : all) ids.push_back(mutant.id);
  std::vector<verify::Mutant> mutants;
  for (const std::string& id : o.only) {
    const auto found = std::find(ids.begin(), ids.end(), id);
    if (found == ids.end()) {
      const std::string near = nearest(id, ids);
      bad_input("there is no mutant '{}'; mutants --list shows all{}", id,
                near.empty() ? "" : " (did you mean " + near + "?)");
    }
    mutants.push_back(all[static_cast<size_t>(found - ids.begin())]);
  }
  return mutants;
}

void list(const std::vector<verify::Mutant>& mutants) {
  for (const verify::Mutant& mutant : mutants) {
    fmt::print("{:<4}  {:<26}  {}\n      {}{}\n", mutant.id, mutant.kind, mutant.text,
               mutant.source,
               mutant.inexpressible.empty() ? "" : "; not planted: " + mutant.inexpressible);
  }
}

verify::RunOptions run_options(const MutantsOptions& o) {
  verify::RunOptions run;
  run.device = comm::compute_device(o.device);
  if (isatty(STDERR_FILENO) && !o.quiet) {
    run.progress = [](size_t done, size_t all) {
      fmt::print(stderr, "\r{}", done == all ? "\033[K" : fmt::format("{}/{} cases", done, all));
    };
  }
  return run;
}

// An output that cannot be written is said before the work.
void check_output(const std::string& path) {
  if (path.empty()) return;
  const auto folder = std::filesystem::absolute(path).parent_path();
  if (!std::filesystem::is_directory(folder)) {
    bad_input("cannot write {}: there is no folder {}", path, folder.string());
  }
}

int run_fuzz(const MutantsOptions& o) {
  check_output(o.json);
  const verify::RunOptions options = run_options(o);
  const verify::RunFacts facts{commit(), o.command, utc_now(), o.seed,
                               describe_machine(options.device)};
  const verify::FuzzRun run = verify::run_fuzz(o.seed, o.from, o.fuzz, options);
  if (!o.json.empty()) write_file_atomically(o.json, verify::fuzz_to_json(run, facts));
  fmt::print("{}", o.quiet ? verify::fuzz_summary(run) + "\n"
                           : verify::fuzz_to_terminal(run, isatty(STDOUT_FILENO)));
  std::fflush(stdout);
  return run.holds() ? 0 : static_cast<int>(ErrorKind::kViolation);
}

int run_mutants(const MutantsOptions& o) {
  if (o.fuzz > 0) return run_fuzz(o);
  const std::vector<verify::Mutant> mutants = chosen(o);
  if (o.list) {
    list(mutants);
    return 0;
  }
  for (const std::string* path : {&o.json, &o.html}) check_output(*path);
  const verify::RunOptions options = run_options(o);
  if (o.power) return run_power(o, options);
  const verify::RunFacts facts{commit(), o.command, utc_now(), o.seed,
                               describe_machine(options.device)};
  const verify::MutantRun run =
      verify::run_mutants(mutants, options, o.seed == 0 ? std::nullopt : std::optional(o.seed));
  if (!o.json.empty()) write_file_atomically(o.json, verify::mutants_to_json(run, facts));
  if (!o.html.empty()) write_file_atomically(o.html, verify::mutants_to_html(run, facts));
  fmt::print("{}", o.quiet ? verify::mutants_summary(run) + "\n"
                           : verify::mutants_to_terminal(run, isatty(STDOUT_FILENO)));
  std::fflush(stdout);
  return run.holds() ? 0 : static_cast<int>(ErrorKind::kViolation);
}

}  // namespace
}  // namespace shardproof::cli

extern "C" int shardproof_run_mutants(const shardproof::cli::MutantsOptions& options) {
  return shardproof::cli::run_mutants(options);
}
