// The outcome of a verification run with its evidence: plain values, no LibTorch.
// Written as JSON (format shardproof-verdict, version 1), JUnit and a terminal table by the writers
// beside this file.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace shardproof::verify {

enum class Status { kPass, kFail, kSkip, kError };
const char* to_string(Status status);

// Where the error of a tensor sits. Absent parts are -1 (a tensor without heads, an output that all
// ranks share). Tokens are a half-open range in the whole (unsharded) tensor.
struct Location {
  int rank = -1;
  int head = -1;
  int64_t token_begin = -1;
  int64_t token_end = -1;
};

struct TensorResult {
  std::string name;  // diffusers' module path plus role, e.g. "image.q:grad"
  std::vector<int64_t> shape;
  std::string dtype;  // fp64, fp32, bf16, fp16
  Status status = Status::kPass;
  double error = 0;            // relative L2 against the fp64 oracle
  double reference_error = 0;  // the same of the non-SP run in this dtype
  double limit = 0;            // `error` above this fails
  double ratio = 1;            // best-fit scale of the result against the oracle
  double ratio_limit = 0;      // |ratio - 1| above this fails
  int64_t nonzero = 0;         // elements that are not zero in the reference
  double cosine = 1;           // explains only
  double max_abs = 0;          // explains only
  std::vector<int64_t> max_abs_index;
  std::optional<Location> where;  // set where the status is fail
};

// A check that is not a comparison of tensors.
struct CheckResult {
  std::string name;  // trace|deadlock|race|rng|memory|metric|coverage|bitwise
  Status status = Status::kPass;
  std::string detail;
};

struct Hypothesis {
  std::string kind;  // written as "class"
  std::string text;
  std::string evidence;
};

// What a published test would have said of the same numbers. Beside the verdict, not part of it.
struct PeerVerdict {
  std::string test;
  bool accepts = false;
  std::string evidence;
};

struct CaseResult {
  std::string id;  // <suite>/<subject>/<mode>/<mesh>/<dtype>/<variant>[#seed]
  Status status = Status::kPass;
  double seconds = 0;
  std::string reason;                 // for skip and error
  std::vector<TensorResult> tensors;  // in program order
  std::vector<CheckResult> checks;
  std::string first_wrong;  // first failing tensor in program order, else empty
  std::vector<Hypothesis> hypotheses;
  std::vector<PeerVerdict> peers;  // of cases that ask them
  std::string replay;  // command line that runs this case, or a smaller one that fails alike

  // Derives `status` and `first_wrong` from tensors and checks (skip and error stay). An erring
  // part makes an error, else a failing one a fail; parts that were all skipped make a skip. A case
  // without any part proves nothing and becomes an error. A tensor marked as passed whose error is
  // NaN becomes a fail: NaN is not above any limit, so a comparison with `>` would let it through.
  void conclude();
};

struct Verdict {
  std::string commit;
  std::string command;
  uint64_t seed = 0;
  std::map<std::string, std::string> machine;
  std::string started;  // ISO 8601, UTC
  double seconds = 0;
  std::vector<CaseResult> cases;

  struct Counts {
    int pass = 0, fail = 0, skip = 0, error = 0;
  };
  Counts counts() const;
  // error if any case is an error or none passed or failed (a run that decided nothing must not
  // look green), else fail if any failed, else pass.
  Status status() const;
};

}  // namespace shardproof::verify
