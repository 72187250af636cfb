// `mutants --power`: how small an error the checks see.
#pragma once
#include "cli/mutants_options.h"
#include "verify/runner.h"

namespace shardproof::cli {

int run_power(const MutantsOptions& o, const verify::RunOptions& run);

}  // namespace shardproof::cli
