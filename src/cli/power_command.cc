#include "cli/power_command.h"

#include <unistd.h>

#include <cstdio>

#include "base/atomic_file.h"
#include "base/error.h"
#include "cli/commit.h"
#include "cli/machine.h"
#include "verify/mutants/sensitivity_report.h"

namespace shardproof::cli {

int run_power(const MutantsOptions& o, const verify::RunOptions& run) {
  if (o.seeds < 1 || o.correct < 0) {
    bad_input("--seeds {} --correct {}: expected at least 1 and 0", o.seeds, o.correct);
  }
  verify::PowerOptions options;
  options.seeds = o.seeds;
  options.correct = o.correct;
  if (o.seed != 0) options.seed = o.seed;
  options.run = run;
  const verify::RunFacts facts{commit(), o.command, utc_now(), options.seed,
                               describe_machine(run.device)};
  const verify::PowerRun power = verify::measure_power(options);
  if (!o.json.empty()) write_file_atomically(o.json, verify::power_to_json(power, facts));
  if (!o.html.empty()) write_file_atomically(o.html, verify::power_to_html(power, facts));
  fmt::print("{}", o.quiet ? verify::power_summary(power) + "\n"
                           : verify::power_to_terminal(power, isatty(STDOUT_FILENO)));
  std::fflush(stdout);
  return power.holds() ? 0 : static_cast<int>(ErrorKind::kViolation);
}

}  // namespace shardproof::cli
