// The program: reads the command line and calls the command. It does not link LibTorch, so that
// --help and mistakes answer at once; commands that compute live in a module that is loaded then.
#include <dlfcn.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>

#include "base/error.h"
#include "base/run_main.h"
#include "cli/export_options.h"
#include "cli/inspect_options.h"
#include "cli/launch_options.h"
#include "cli/mutants_options.h"
#include "cli/nearest.h"
#include "cli/verify_options.h"

namespace {

using namespace shardproof;
namespace fs = std::filesystem;

fs::path program_folder() { return fs::read_symlink("/proc/self/exe").parent_path(); }

template <class Function>
Function load(const char* symbol) {
  const fs::path module = program_folder() / "shardproof_commands.so";
  void* handle = dlopen(module.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!handle) {
    throw_error(ErrorKind::kMissing,
                "cannot load {}: {}; run ./shardproof build, or put LibTorch's "
                "lib folder on LD_LIBRARY_PATH",
                module.string(), dlerror());
  }
  void* address = dlsym(handle, symbol);
  if (!address) internal_error("{} has no {}", module.string(), symbol);
  return reinterpret_cast<Function>(address);
}

std::string command_line(int argc, char** argv) {
  std::string command = "./shardproof";
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool plain =
        word.find_first_of(" '\"#$*?;&|<>()\\") == std::string::npos && !word.empty();
    command += plain ? " " + word : " '" + word + "'";
  }
  return command;
}

void add_verify(CLI::App& app, cli::VerifyOptions& o) {
  CLI::App* verify =
      app.add_subcommand("verify", "Prove that sequence-parallel results equal non-parallel ones");
  verify->add_option(
      "suite", o.suites,
      "attention, models, goldens (default: these); transports (the simulator against "
      "--transport gloo or nccl)");
  verify->add_option("--golden", o.goldens, "Check this golden folder (or folder of goldens) only");
  verify->add_option("--case", o.case_id, "Run exactly this case");
  verify->add_option("--sp", o.sp, "Only these sequence-parallel sizes (ring x ulysses)")
      ->delimiter(',')
      ->allow_extra_args(false);
  verify->add_option("--ring", o.ring, "Only these ring sizes")
      ->delimiter(',')
      ->allow_extra_args(false);
  verify->add_option("--dp", o.dp, "Only these data-parallel sizes")
      ->delimiter(',')
      ->allow_extra_args(false);
  verify->add_option("--dtype", o.dtypes, "Only these: fp64, fp32, bf16, fp16")
      ->delimiter(',')
      ->allow_extra_args(false);
  verify->add_option("--device", o.device, "cpu or cuda")->capture_default_str();
  verify
      ->add_option("--transport", o.transport,
                   "sim (virtual ranks in this process); gloo or nccl (this process is a rank: see "
                   "launch)")
      ->capture_default_str();
  verify->add_option("--timeout", o.timeout, "Seconds that real ranks wait for one another")
      ->capture_default_str();
  verify
      ->add_option("--backend", o.backend,
                   "Local attention: auto, math, cpu_flash, cuda_flash, cudnn, efficient")
      ->capture_default_str();
  verify
      ->add_option("--plant", o.faults,
                   "Plant a fault, to see that it is caught: KIND[,rank=N][,call=N][,tag=PATTERN]"
                   "[,factor=X], KIND being scale, drop, rotate-peers, round, stale, echo, "
                   "local, omit, reuse, skip-wait, hold-back, delay, kill or (real ranks only) "
                   "hang")
      ->allow_extra_args(false);
  verify->add_option("--seed", o.seed, "Seed of all data")->capture_default_str();
  verify
      ->add_option("--schedule-seed", o.schedule_seed,
                   "Permutes the order in which ranks run; results must not change")
      ->capture_default_str();
  verify->add_option("--random", o.random_cases,
                     "Run this many random cases of each named suite instead (default: attention)");
  verify->add_flag("--quick", o.quick, "A part of the suite that still holds every mode and dtype");
  verify->add_flag("--matched", o.matched,
                   "training: against a run without ranks in the same arithmetic, bit by bit");
  verify->add_flag("--quiet", o.quiet, "Print the last line only");
  verify->add_option("--json", o.json, "Write the verdict as JSON");
  verify->add_option("--junit", o.junit, "Write the verdict as JUnit XML");
  verify->add_option("--html", o.html, "Write the verdict as a page");
  verify->footer(
      "Examples:\n"
      "  ./shardproof verify                                   everything, on this CPU\n"
      "  ./shardproof verify attention --quick                 the everyday check\n"
      "  ./shardproof verify --golden datasets/goldens/attention_keymask --sp 4\n"
      "  ./shardproof verify attention --random 10000 --seed 7 --html report.html\n"
      "Exit codes: 0 holds, 1 violated, 2 bad usage or input, 3 the machine lacks something, 4 "
      "internal error");
}

void add_launch(CLI::App& app, cli::LaunchOptions& o) {
  CLI::App* launch = app.add_subcommand("launch", "Start a command on several ranks of this host");
  launch->add_option("-n,--ranks", o.ranks, "Ranks on this host")->required();
  launch->add_option("--nodes", o.nodes, "Hosts; start launch on each")->capture_default_str();
  launch->add_option("--node-rank", o.node_rank, "This host's number")->capture_default_str();
  launch->add_option("--rdzv", o.rendezvous, "HOST:PORT of node 0, where all ranks meet");
  launch->add_flag("--share-gpu", o.share_gpu, "Let several NCCL ranks use one GPU");
  launch->add_option("command", o.command, "Behind --: verify and its options, or any program")
      ->required();
  launch->footer(
      "Examples:\n"
      "  ./shardproof launch -n 4 -- verify attention --quick --transport gloo\n"
      "  ./shardproof launch -n 2 --share-gpu -- verify models --quick --transport nccl --device "
      "cuda\n"
      "  ./shardproof launch -n 8 --nodes 2 --node-rank 0 --rdzv node0:29500 -- verify --transport "
      "nccl "
      "--device cuda\n"
      "When a rank ends badly the others are ended. Exit code: that of the first such rank.");
}

void add_inspect(CLI::App& app, cli::InspectOptions& o) {
  CLI::App* inspect = app.add_subcommand(
      "inspect", "Show a model's size, work and sharding plan, and what a mesh makes of them");
  inspect->add_option("model", o.path, "config.json, or a folder that holds one")->required();
  inspect->add_option("--mesh", o.mesh, "Ranks, like dp1.ring2.ulysses4")->capture_default_str();
  inspect->add_option("--size", o.size, "HEIGHTxWIDTH in pixels")->capture_default_str();
  inspect->add_option("--frames", o.frames, "Frames of a video (default: 81)");
  inspect->add_option("--text", o.text, "Text tokens (default: 512; SD3: 333)");
  inspect->add_option("--batch", o.batch, "Samples of a replica")->capture_default_str();
  inspect->add_option("--token-split", o.token_split, "uneven or padded")->capture_default_str();
  inspect->add_option("--head-split", o.head_split, "even, uneven or padded")
      ->capture_default_str();
  inspect->add_option("--ring-mode", o.ring_mode, "rotate or allgather")->capture_default_str();
  inspect->add_option("--text-placement", o.text_placement, "sharded or replicated")
      ->capture_default_str();
  inspect->add_option("--json", o.json, "Write the same numbers as JSON");
  inspect->footer(
      "Examples:\n"
      "  ./shardproof inspect Qwen-Image/transformer --mesh ring2.ulysses4\n"
      "  ./shardproof inspect config.json --mesh ulysses5 --head-split padded --json f.json\n"
      "Weights are not needed. Exit codes: 0 shown, 2 bad usage or input, 3 the machine lacks "
      "something");
}

void add_export(CLI::App& app, cli::ExportOptions& o) {
  CLI::App* command = app.add_subcommand(
      "export", "Turn a sharded training checkpoint into a model that diffusers loads");
  command->add_option("checkpoint", o.checkpoint, "Folder with a manifest.json, of any world")
      ->required();
  command->add_option("-o,--output", o.output, "New folder for the model")->required();
  CLI::Option* config = command->add_option(
      "--config", o.config, "config.json of the model, to check names and shapes and to put there");
  command
      ->add_option("--base", o.base,
                   "Folder of the model that training started from: its config.json, and what a "
                   "run does not save (frozen parameters, buffers)")
      ->excludes(config);
  command->add_option("--dtype", o.dtype, "bf16, fp16, fp32, fp64 or as-saved")
      ->capture_default_str();
  command->add_flag("--ema", o.ema, "The moving average of the parameters");
  command->add_flag("--overwrite", o.overwrite, "Replace an older export");
  command->footer(
      "Examples:\n"
      "  ./shardproof export run/step-1000 -o trained --base Qwen-Image/transformer --dtype bf16\n"
      "  ./shardproof export run/step-1000 -o averaged --config config.json --ema\n"
      "Adapters (LoRA) become a peft folder. Exit codes: 0 written, 2 bad usage or input, 3 the "
      "machine lacks something, 4 internal error");
}

void add_mutants(CLI::App& app, cli::MutantsOptions& o) {
  CLI::App* mutants =
      app.add_subcommand("mutants", "Plant bugs of public code and show which checks catch them");
  mutants->add_option("--only", o.only, "Only these, by id")
      ->delimiter(',')
      ->allow_extra_args(false);
  mutants->add_flag("--list", o.list, "Show what is in the catalogue; plant nothing");
  mutants
      ->add_option("--seed", o.seed,
                   "Seed of the cases' data (0: as in the catalogue), or of what is drawn")
      ->capture_default_str();
  CLI::Option* power = mutants->add_flag(
      "--power", o.power, "Instead: how small an error do the checks see, and published tests?");
  mutants->add_option("--seeds", o.seeds, "Cases of each kind and dtype")
      ->needs(power)
      ->capture_default_str();
  mutants
      ->add_option("--correct", o.correct,
                   "So many more correct cases of attention, and a twentieth of models, only to "
                   "count false alarms")
      ->needs(power)
      ->capture_default_str();
  CLI::Option* fuzz =
      mutants->add_option("--fuzz", o.fuzz, "Instead of the catalogue, this many random mutants")
          ->check(CLI::Range(int64_t{1}, int64_t{10'000'000}));
  mutants->add_option("--from", o.from, "Number of the first random mutant")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber)
      ->needs(fuzz);
  mutants->add_option("--device", o.device, "cpu or cuda")->capture_default_str();
  mutants->add_flag("--quiet", o.quiet, "Print the last line only");
  mutants->add_option("--json", o.json, "Write the outcome as JSON");
  CLI::Option* html = mutants->add_option("--html", o.html, "Write the matrix as a page");
  for (const char* other : {"--only", "--list", "--power"}) {
    fuzz->excludes(mutants->get_option(other));
  }
  fuzz->excludes(html);
  mutants->footer(
      "Examples:\n"
      "  ./shardproof mutants                      the whole catalogue, on this CPU\n"
      "  ./shardproof mutants --only A1,S5 --json matrix.json\n"
      "  ./shardproof mutants --html matrix.html\n"
      "  ./shardproof mutants --power --html power.html\n"
      "  ./shardproof mutants --power --seeds 200 --correct 20000 --json power.json\n"
      "  ./shardproof mutants --fuzz 2000 --seed 1  random ones; each line replays what survived\n"
      "Exit codes: 0 all that can be planted are caught, without a false alarm or, of random ones, "
      "an error; 1 not; 2 bad usage "
      "or input, 3 the machine lacks something, 4 internal error");
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

// CLI11 says which word it does not know; add the one that was probably meant.
std::string explain(const CLI::ParseError& error, const CLI::App& app, int argc, char** argv) {
  std::string text = error.what();
  if (app.get_subcommands().empty() && argc > 1) {
    std::vector<std::string> commands = {"setup", "build", "test", "clean"};
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
      commands.push_back(command->get_name());
    }
    const std::string near = cli::nearest(argv[1], commands);
    text = fmt::format("unknown command '{}'{}", argv[1],
                       near.empty() ? "" : "; did you mean " + near + "?");
  }
  for (const CLI::App* command : app.get_subcommands()) {
    for (int i = 2; i < argc; ++i) {
      const std::string word = std::string(argv[i]).substr(0, std::string(argv[i]).find('='));
      if (!word.starts_with("--")) continue;
      const auto names = option_names(*command);
      if (std::find(names.begin(), names.end(), word) != names.end()) continue;
      const std::string near = cli::nearest(word, names);
      if (!near.empty()) text += fmt::format("\n{} is not an option; did you mean {}?", word, near);
    }
  }
  return text + "\nSee --help for what can be asked for.";
}

int run(int argc, char** argv) {
  CLI::App app{
      "Trains diffusion transformers with sequence parallelism and proves that the parallel "
      "run computes what the non-parallel run computes.",
      "./shardproof"};
  app.require_subcommand(0, 1);
  app.footer("The launcher adds: setup, build, test, clean.");
  cli::VerifyOptions verify;
  add_verify(app, verify);
  cli::LaunchOptions launch;
  add_launch(app, launch);
  cli::InspectOptions inspect;
  add_inspect(app, inspect);
  cli::ExportOptions export_options;
  add_export(app, export_options);
  cli::MutantsOptions mutants;
  add_mutants(app, mutants);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "shardproof: {}\n", explain(error, app, argc, argv));
    return static_cast<int>(ErrorKind::kBadInput);
  }
  if (app.get_subcommands().empty()) {
    fmt::print("{}", app.help());
    return static_cast<int>(ErrorKind::kBadInput);
  }
  if (app.got_subcommand("launch")) return cli::run_launch(launch);
  if (app.got_subcommand("inspect")) return load<cli::RunInspect>(cli::kRunInspect)(inspect);
  if (app.got_subcommand("export")) return load<cli::RunExport>(cli::kRunExport)(export_options);
  if (app.got_subcommand("mutants")) {
    mutants.command = command_line(argc, argv);
    return load<cli::RunMutants>(cli::kRunMutants)(mutants);
  }
  verify.command = command_line(argc, argv);
  // c10d warns of every connection that ends, with a backtrace; what matters is said by us.
  if (verify.transport != "sim") setenv("TORCH_CPP_LOG_LEVEL", "ERROR", /*overwrite=*/0);
  verify.source_dir = SHARDPROOF_SOURCE_DIR;
  return load<cli::RunVerify>(cli::kRunVerify)(verify);
}

}  // namespace

int main(int argc, char** argv) {
  shardproof::run_main("shardproof", [=] { return run(argc, argv); });
}
