#include <ATen/ATen.h>

#include <cstdio>

#include "base/atomic_file.h"
#include "base/error.h"
#include "cli/commit.h"
#include "cli/machine.h"
#include "cli/mutants_options.h"
#include "cli/nearest.h"
#include "cli/power_command.h"
#include "cli/run_support.h"
#include "comm/device.h"
#include "verify/mutants/fuzz_report.h"
#include "verify/mutants/mutant_report.h"

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
  run.progress = progress_line(o.quiet);
  return run;
}

int run_fuzz(const MutantsOptions& o) {
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
  check_outputs({o.json, o.html});
  if (o.fuzz > 0) return run_fuzz(o);
  if (o.power) return run_power(o, run_options(o));
  const std::vector<verify::Mutant> mutants = chosen(o);
  if (o.list) {
    list(mutants);
    return 0;
  }
  const verify::RunOptions options = run_options(o);
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
