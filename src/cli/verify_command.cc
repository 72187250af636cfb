#include <ATen/ATen.h>

#include <cstdio>
#include <filesystem>

#include "base/atomic_file.h"
#include "base/error.h"
#include "cli/commit.h"
#include "cli/machine.h"
#include "cli/nearest.h"
#include "cli/run_support.h"
#include "cli/verify_options.h"
#include "comm/device.h"
#include "comm/process_world.h"
#include "sim/delivery_guard.h"
#include "verify/attention/attention_check.h"
#include "verify/case_id.h"
#include "verify/collectives_case.h"
#include "verify/dtype.h"
#include "verify/models/model_check.h"
#include "verify/process_rank_world.h"
#include "verify/runner.h"
#include "verify/suites/attention_suite.h"
#include "verify/suites/model_suite.h"
#include "verify/suites/training_suite.h"
#include "verify/training/classical_tests.h"
#include "verify/training/training_check.h"
#include "verify/transport_check.h"
#include "verify/verdict/html_writer.h"
#include "verify/verdict/json_writer.h"
#include "verify/verdict/junit_writer.h"
#include "verify/verdict/terminal_writer.h"

namespace shardproof::cli {
namespace {

namespace fs = std::filesystem;

// By kind and name; cases point into them.
struct Goldens {
  std::map<std::string, verify::AttentionGolden> attention;
  std::map<std::string, verify::ModelGolden> models;
};

// The suites attention and models, each case on the simulator as well.
bool compares_transports(const VerifyOptions& o) {
  return std::find(o.suites.begin(), o.suites.end(), "transports") != o.suites.end();
}

void check_words(const VerifyOptions& o) {
  const std::vector<std::string> suites = {"attention", "models", "training", "goldens",
                                           "transports"};
  for (const std::string& suite : o.suites) {
    if (std::find(suites.begin(), suites.end(), suite) != suites.end()) continue;
    const std::string near = nearest(suite, suites);
    bad_input("unknown suite '{}'; known: {}{}", suite, fmt::join(suites, ", "),
              near.empty() ? "" : " (did you mean " + near + "?)");
  }
  if (o.transport != "sim" && o.transport != "gloo" && o.transport != "nccl") {
    bad_input("unknown transport '{}'; expected sim, gloo or nccl", o.transport);
  }
  if (compares_transports(o) && (o.transport == "sim" || o.suites.size() > 1)) {
    bad_input(
        "verify transports compares the simulator with --transport gloo or nccl; give one of them, "
        "and no other suite");
  }
  const char* device = o.transport == "nccl" ? "cuda" : o.transport == "gloo" ? "cpu" : nullptr;
  if (device && o.device != device) {
    bad_input("--transport {} moves tensors of --device {}; got --device {}", o.transport, device,
              o.device);
  }
  if (!(o.timeout >= 1 && o.timeout <= 86400)) {
    bad_input("--timeout {}: expected 1 to 86400 seconds", o.timeout);
  }
  const bool training_only = o.suites == std::vector<std::string>{"training"} ||
                             (o.suites.empty() && o.case_id.starts_with("training/"));
  if (o.matched && (!training_only || o.random_cases > 0 || o.transport != "sim")) {
    bad_input(
        "--matched is for the suite training on the simulator, which sums in the order of ranks: "
        "verify training --matched");
  }
  if (o.random_cases < 0) bad_input("--random {}: expected a positive number", o.random_cases);
  for (const auto* sizes : {&o.sp, &o.ring, &o.dp}) {
    for (int n : *sizes) {
      if (n < 1 || n > 64) bad_input("mesh dimension {}: expected 1 to 64", n);
    }
  }
}

verify::CaseFilter make_filter(const VerifyOptions& o) {
  verify::CaseFilter filter;
  filter.sp = {o.sp.begin(), o.sp.end()};
  filter.ring = {o.ring.begin(), o.ring.end()};
  filter.dp = {o.dp.begin(), o.dp.end()};
  for (const std::string& name : o.dtypes) filter.dtypes.insert(verify::parse_dtype(name));
  filter.backend = o.backend;
  return filter;
}

Goldens load_goldens(const VerifyOptions& o, bool wanted) {
  std::vector<fs::path> folders;
  for (const std::string& path : o.goldens) {
    for (const fs::path& folder : verify::find_goldens(path)) folders.push_back(folder);
  }
  if (o.goldens.empty() && wanted) {
    folders = verify::find_goldens(fs::path(o.source_dir) / "datasets" / "goldens");
  }
  Goldens goldens;
  for (const fs::path& folder : folders) {
    const std::string kind = verify::golden_kind(folder);
    if (kind != "attention" && kind != "model") {
      if (o.goldens.empty()) continue;
      bad_input(
          "golden {} is of kind '{}'; this version checks goldens of kind attention and model",
          folder.string(), kind);
    }
    const std::string name = fs::canonical(folder).filename().string();
    if (goldens.attention.contains(name) || goldens.models.contains(name)) {
      bad_input("two goldens are called '{}'; cases are told apart by the folder's name", name);
    }
    if (kind == "attention") {
      goldens.attention.emplace(name, verify::load_attention_golden(folder));
    } else {
      goldens.models.emplace(name, verify::load_model_golden(folder));
    }
  }
  return goldens;
}

verify::TrainingReference reference_of(const VerifyOptions& o) {
  return o.matched ? verify::TrainingReference::kMatched : verify::TrainingReference::kBudget;
}

// The case that is called `id` among those that a golden offers on the id's mesh.
template <class C>
C golden_case(const std::string& id, const std::vector<C>& offered) {
  for (const C& known : offered) {
    if (known.id() == C::parse(id).id() || known.id() == id) return known;
  }
  bad_input("case '{}': the golden cannot be run like that", id);
}

std::vector<verify::CasePtr> one_case(const VerifyOptions& o, const Goldens& goldens) {
  if (o.case_id.starts_with("transports/")) {
    return {verify::collectives_check(verify::CollectivesCase::parse(o.case_id))};
  }
  if (verify::is_classical_test(o.case_id))
    return verify::find_classical_tests(o.case_id, o.backend);
  if (o.case_id.starts_with("training/")) {
    return verify::training_checks({verify::TrainingCase::parse(o.case_id)}, {}, reference_of(o));
  }
  if (o.case_id.starts_with("models/")) {
    return verify::model_checks({verify::ModelCase::parse(o.case_id)});
  }
  const verify::CaseIdParts parts =
      verify::parse_case_id(o.case_id, {"attention", "models", "goldens"});
  if (parts.suite == "attention") {
    return verify::attention_checks({verify::AttentionCase::parse(o.case_id)});
  }
  verify::CaseFilter any;
  any.sp = {parts.mesh.sp()};
  if (const auto it = goldens.models.find(parts.subject); it != goldens.models.end()) {
    any.backend = verify::ModelCase::parse(o.case_id).parallel.backend;
    const auto offered = verify::golden_model_cases(it->second, any, false);
    return verify::model_checks({golden_case(o.case_id, offered)}, goldens.models);
  }
  const auto it = goldens.attention.find(parts.subject);
  if (it == goldens.attention.end()) {
    bad_input("case '{}': there is no golden '{}'", o.case_id, parts.subject);
  }
  any.backend = verify::AttentionCase::parse(o.case_id).backend;
  const auto offered = verify::golden_cases(it->second, any, false);
  return verify::attention_checks({golden_case(o.case_id, offered)}, goldens.attention);
}

bool wants(const VerifyOptions& o, const std::string& suite) {
  if (!o.goldens.empty()) return suite == "goldens";
  if (compares_transports(o)) return suite != "goldens";
  return o.suites.empty() || std::find(o.suites.begin(), o.suites.end(), suite) != o.suites.end();
}

// `world`: of how many ranks; 0: any.
std::vector<verify::CasePtr> choose_cases(const VerifyOptions& o, const Goldens& goldens,
                                          int world) {
  if (!o.case_id.empty()) return one_case(o, goldens);
  verify::CaseFilter filter = make_filter(o);
  filter.world = world;
  std::vector<verify::CasePtr> cases;
  const auto add = [&](std::vector<verify::CasePtr> more) {
    cases.insert(cases.end(), more.begin(), more.end());
  };
  if (o.random_cases > 0) {
    const auto named = [&](const char* suite) {
      return compares_transports(o) ||
             std::find(o.suites.begin(), o.suites.end(), suite) != o.suites.end();
    };
    if (o.suites.empty() || named("attention")) {
      add(verify::attention_checks(verify::random_attention_cases(filter, o.seed, o.random_cases)));
    }
    if (named("models")) {
      add(verify::model_checks(verify::random_model_cases(filter, o.seed, o.random_cases)));
    }
    if (cases.empty()) bad_input("--random draws cases of the suites attention and models");
    return cases;
  }
  if (compares_transports(o)) {
    for (const verify::CollectivesCase& c : verify::collectives_suite(world, o.seed)) {
      if (filter.dtypes.empty() || filter.dtypes.contains(c.dtype)) {
        cases.push_back(verify::collectives_check(c));
      }
    }
  }
  if (wants(o, "attention")) {
    add(verify::attention_checks(verify::attention_suite(filter, o.seed, o.quick)));
  }
  if (wants(o, "models")) {
    add(verify::model_checks(verify::model_suite(filter, o.seed, o.quick)));
  }
  if (wants(o, "training")) {
    if (!o.matched) add(verify::classical_tests(filter, o.seed));
    add(verify::training_checks(verify::training_suite(filter, o.seed, o.quick), {},
                                reference_of(o)));
  }
  if (wants(o, "goldens")) {
    for (const auto& [name, golden] : goldens.attention) {
      add(verify::attention_checks(verify::golden_cases(golden, filter, o.quick),
                                   goldens.attention));
    }
    for (const auto& [name, golden] : goldens.models) {
      add(verify::model_checks(verify::golden_model_cases(golden, filter, o.quick),
                               goldens.models));
    }
  }
  if (cases.empty()) {
    bad_input("no case fits these options; widen --sp, --ring, --dp or --dtype{}",
              world == 0 ? "" : fmt::format("; this world has {} ranks", world));
  }
  return cases;
}

sim::FaultPlan parse_faults(const VerifyOptions& o) {
  sim::FaultPlan faults;
  for (const std::string& text : o.faults) faults.push_back(sim::parse_fault(text));
  return faults;
}

// This process as a rank of a world; null for the simulator.
std::unique_ptr<comm::ProcessWorld> join_world(const VerifyOptions& o) {
  if (o.transport == "sim") return nullptr;
  const comm::Rendezvous rendezvous = comm::rendezvous_from_environment();
  comm::ProcessWorldOptions options;
  options.transport = o.transport == "gloo" ? comm::Transport::kGloo : comm::Transport::kNccl;
  options.device = comm::compute_device(o.device, comm::local_device(rendezvous));
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(o.timeout * 1000));
  options.fingerprint = fmt::format("commit {}, {}", commit(), o.command);
  options.observer = std::make_shared<sim::DeliveryGuard>(parse_faults(o), rendezvous.rank);
  return std::make_unique<comm::ProcessWorld>(rendezvous, options);
}

verify::RunOptions run_options(const VerifyOptions& o, at::Device device) {
  verify::RunOptions run;
  run.device = device;
  run.schedule_seed = o.schedule_seed;
  if (o.transport == "sim") run.faults = parse_faults(o);  // real ranks plant their own
  for (const std::string& fault : o.faults) {
    run.replay_arguments += fmt::format(" --plant '{}'", fault);
  }
  run.progress = progress_line(o.quiet);
  return run;
}

void write_outputs(const VerifyOptions& o, const verify::Verdict& verdict) {
  if (!o.json.empty()) write_file_atomically(o.json, verify::to_json(verdict));
  if (!o.junit.empty()) write_file_atomically(o.junit, verify::to_junit(verdict));
  if (!o.html.empty()) write_file_atomically(o.html, verify::to_html(verdict));
}

int exit_code(const verify::Verdict& verdict) {
  switch (verdict.status()) {
    case verify::Status::kPass:
      return 0;
    case verify::Status::kFail:
      return static_cast<int>(ErrorKind::kViolation);
    default:
      return static_cast<int>(ErrorKind::kInternal);
  }
}

// Writes and prints the verdict. Returns the exit code.
int report(const VerifyOptions& o, const verify::Verdict& verdict) {
  const auto skipped = [](const verify::CaseResult& r) {
    return r.status == verify::Status::kSkip;
  };
  if (std::all_of(verdict.cases.begin(), verdict.cases.end(), skipped)) {
    throw Error(ErrorKind::kBadInput, verdict.cases[0].reason);
  }
  write_outputs(o, verdict);
  verify::TerminalOptions terminal;
  terminal.color = isatty(STDOUT_FILENO);
  terminal.quiet = o.quiet;
  fmt::print("{}", verify::to_terminal(verdict, terminal));
  std::fflush(stdout);
  return exit_code(verdict);
}

// Results are compared bit by bit. Operations that have no deterministic kernel
// run all the same: what they compute then differs, and is reported.
void use_deterministic_kernels() {
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().setDeterministicCuDNN(true);
}

verify::Verdict judge_cases(const VerifyOptions& o, comm::ProcessWorld* world) {
  const bool all_goldens = o.case_id.starts_with("goldens/") ||
                           (o.case_id.empty() && o.random_cases == 0 && wants(o, "goldens"));
  const Goldens goldens = load_goldens(o, all_goldens);
  const std::vector<verify::CasePtr> cases =
      choose_cases(o, goldens, world ? world->world_size() : 0);
  // A rank has chosen its device when it joined: asking again would make the first one current.
  verify::RunOptions run = run_options(o, world ? world->device() : comm::compute_device(o.device));
  std::unique_ptr<verify::Worlds> real, simulated, compared;
  if (world) {
    real = std::make_unique<verify::ProcessWorlds>(*world);
    run.worlds = real.get();
  }
  if (compares_transports(o) || o.matched) use_deterministic_kernels();
  if (compares_transports(o)) {
    sim::WorldOptions options;
    options.device = run.device;
    simulated = std::make_unique<verify::WorldPool>(options);
    compared = std::make_unique<verify::ComparedWorlds>(*real, *simulated);
    run.worlds = compared.get();
  }
  verify::Verdict verdict;
  verdict.commit = commit();
  verdict.command = o.command;
  verdict.seed = o.seed;
  verdict.machine = describe_machine(run.device);
  verdict.machine["transport"] =
      world ? fmt::format("{}, {} processes", o.transport, world->world_size()) : "sim";
  verdict.started = utc_now();
  const auto start = std::chrono::steady_clock::now();
  verdict.cases = verify::run_cases(cases, run);
  verdict.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return verdict;
}

int run_verify(const VerifyOptions& o) {
  check_words(o);
  check_outputs({o.json, o.junit, o.html});
  const auto world = join_world(o);
  if (!world) return report(o, judge_cases(o, nullptr));
  int code = 0;
  std::exception_ptr refused;  // what rank 0 says after all others have left in peace
  try {
    const verify::Verdict verdict = judge_cases(o, world.get());
    // Printed before the others hear of it: a launcher may end all when one ends.
    if (world->rank() == 0) {
      try {
        code = report(o, verdict);
      } catch (const Error& error) {
        code = static_cast<int>(error.kind());
        refused = std::current_exception();
      }
    }
    code = std::stoi(world->broadcast(std::to_string(code)));
  } catch (const std::exception& error) {
    world->announce_failure(error.what());
    throw;
  }
  if (refused) std::rethrow_exception(refused);
  return code;
}

}  // namespace
}  // namespace shardproof::cli

extern "C" int shardproof_run_verify(const shardproof::cli::VerifyOptions& options) {
  return shardproof::cli::run_verify(options);
}
