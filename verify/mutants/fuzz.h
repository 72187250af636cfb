// Random mutants without end: each is a case and one or two operators, drawn from a seed and a
// number. None may survive unless it changes nothing that can be seen.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "verify/mutants/bare_run.h"
#include "verify/runner.h"

namespace shardproof::verify {

// The same for the same seed and index, whatever ran before.
struct RandomMutant {
  std::string operators;  // "scale"; of two: "pair"; of two of the catalogue: "catalogue-pair"
  std::string text;       // with all that was drawn
  Plant plant;
};

// `worlds`: runs the case once without a fault, for the calls that a fault can meet.
RandomMutant random_mutant(uint64_t seed, int64_t index, Worlds& worlds);

enum class FuzzFate {
  kKilled,      // a check of its case fails
  kEquivalent,  // none does, and results and calls are those of the clean case, to the byte, but
                // for what is zero in exact arithmetic
  kError,       // the case ended in an error, which is no kill
  kSurvived
};
const char* to_string(FuzzFate fate);

struct FuzzOutcome {
  int64_t index = 0;
  RandomMutant mutant;
  FuzzFate fate = FuzzFate::kSurvived;
  // What killed it, the error's reason, or how far a survivor is from the clean case.
  std::string detail;
};

// One mutant, judged by the checks of its case.
FuzzOutcome try_mutant(const RandomMutant& mutant, Worlds& worlds);

struct FuzzRun {
  uint64_t seed = 1;
  std::vector<FuzzOutcome> outcomes;  // by index
  double seconds = 0;

  int64_t count(FuzzFate fate) const;
  bool holds() const;  // no survivor and no error
};

// The mutants `from` .. `from + count - 1`, on all cores.
FuzzRun run_fuzz(uint64_t seed, int64_t from, int64_t count, const RunOptions& options);

}  // namespace shardproof::verify
