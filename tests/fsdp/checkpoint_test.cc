#include "fsdp/checkpoint.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <set>

#include "base/checksum.h"
#include "fsdp/checkpoint_manifest.h"
#include "io/safetensors.h"
#include "tests/device.h"
#include "tests/fsdp/checkpoint_support.h"

namespace shardproof::fsdp {
namespace {

namespace fs = std::filesystem;
using tests::all_ones;
using tests::contains;
using tests::device;
using tests::error_text;
using tests::info_of;
using tests::load_and_compare;
using tests::load_error;
using tests::rank_state_of;
using tests::read_bytes;
using tests::run_ranks;
using tests::same_bits;
using tests::save_error;
using tests::save_state;
using tests::shards_of;
using tests::TempFolder;
using tests::training_state;
using tests::WholeTensor;
using tests::write_bytes;

using Shards = std::vector<ShardedTensor>;

const std::vector<WholeTensor>& state() {
  static const std::vector<WholeTensor> all = training_state(1);
  return all;
}

ShardedTensor& find(Shards& shards, const std::string& name) {
  for (ShardedTensor& shard : shards) {
    if (shard.name == name) return shard;
  }
  throw std::out_of_range(name);
}

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

// A checkpoint of four ranks in a folder of its own.
struct Saved {
  Saved() { save_state(folder(), state(), 4); }
  fs::path folder() const { return parent / "step-100"; }
  fs::path file(int rank) const { return folder() / rank_file_name(rank); }
  void edit_manifest(std::string_view from, std::string_view to) const {
    const fs::path manifest = folder() / "manifest.json";
    write_bytes(manifest, replaced(read_bytes(manifest), from, to));
  }
  std::string error(const tests::Edit& edit = {}, int ranks = 4) const {
    return load_error(folder(), state(), ranks, edit);
  }

  TempFolder parent;
};

TEST_CASE("a checkpoint of four ranks loads on any number of ranks", "[checkpoint]") {
  const Saved saved;
  CHECK(names_in(saved.folder()) ==
        std::set<std::string>{"manifest.json", "rank00000.safetensors", "rank00001.safetensors",
                              "rank00002.safetensors", "rank00003.safetensors"});
  CHECK(names_in(saved.parent.path()) == std::set<std::string>{"step-100"});
  for (const int ranks : {1, 2, 3, 4, 8}) load_and_compare(saved.folder(), state(), ranks);
}

TEST_CASE("checkpoints of other worlds, and of worlds of worlds", "[checkpoint]") {
  const TempFolder folder;
  for (const int from : {1, 2, 8}) {
    const fs::path saved = folder / fmt::format("step-{}", from);
    save_state(saved, state(), from);
    for (const int to : {1, 3, 4}) load_and_compare(saved, state(), to);
  }
}

TEST_CASE("a rank's state comes back on the same mesh alone", "[checkpoint]") {
  const Saved saved;
  const auto same = load_and_compare(saved.folder(), state(), 4);
  for (int rank = 0; rank < 4; ++rank) {
    const RankState& got = same[static_cast<size_t>(rank)].rank_state;
    REQUIRE(got.size() == 2);
    for (const auto& [key, value] : rank_state_of(rank)) CHECK(same_bits(got.at(key), value));
  }
  for (const LoadedCheckpoint& other : load_and_compare(saved.folder(), state(), 4, "ulysses4")) {
    CHECK(other.rank_state.empty());
  }
  for (const LoadedCheckpoint& other : load_and_compare(saved.folder(), state(), 2, "dp4")) {
    CHECK(other.rank_state.empty());
  }
}

TEST_CASE("what the run was comes back", "[checkpoint]") {
  const TempFolder folder;
  CheckpointInfo info = info_of(1);
  info.model = "a \"model\"\n{\u00e9}";
  info.step = std::numeric_limits<int64_t>::max();
  info.numbers = {{"tenth", 0.1}, {"large", 1e300}, {"whole", 3}};
  const Shards shards = shards_of(state(), 1, 0, true);
  const comm::Communicator alone;
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1} << 53, (uint64_t{1} << 53) + 1,
                              std::numeric_limits<uint64_t>::max()}) {
    info.seed = seed;
    const fs::path saved = folder / fmt::format("{}", seed);
    save_checkpoint(saved, info, shards, {}, alone, device());
    const CheckpointInfo got = load_checkpoint(saved, info, shards, alone, device()).info;
    CHECK(got.model == info.model);
    CHECK(got.mesh == info.mesh);
    CHECK(got.plan == info.plan);
    CHECK(got.commit == info.commit);
    CHECK(got.seed == seed);
    CHECK(got.step == info.step);
    CHECK(got.numbers == info.numbers);
    const std::string text = read_bytes(saved / "manifest.json");
    CHECK(contains(text, fmt::format("\"seed\": \"{}\"", seed)) == (seed > uint64_t{1} << 53));
  }
  info.numbers["loss"] = std::nan("");
  const std::string text =
      error_text([&] { save_checkpoint(folder / "nan", info, shards, {}, alone, device()); });
  CHECK(contains(text, "loss is nan"));
  CHECK(folder.file_count() == 4);
}

TEST_CASE("a rank opens the files of its own rows alone", "[checkpoint]") {
  const Saved saved;
  for (const int other : {1, 3}) fs::remove(saved.file(other));
  Shards got = shards_of(state(), 4, 2, false);
  // Of rank 2's own file, but for "replicated", which rank 0 has.
  load_checkpoint(saved.folder(), info_of(1), got, {}, device());
  const Shards want = shards_of(state(), 4, 2, true);
  for (size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i].rows, want[i].rows));
}

TEST_CASE("parameters and rows that do not lie together are saved and filled", "[checkpoint]") {
  const TempFolder folder;
  const at::Tensor values = at::arange(12, at::kFloat).view({3, 4}).to(device());
  const auto shard = [](const at::Tensor& rows) {
    return Shards{{"w", {4, 3}, {4, 1}, 0, rows, true}};
  };
  save_checkpoint(folder / "c", info_of(1), shard(values.t()), {}, {}, device());
  at::Tensor got = at::zeros({3, 4}).to(device()).t().requires_grad_();
  load_checkpoint(folder / "c", info_of(1), shard(got), {}, device());
  CHECK(at::equal(got, values.t()));
  CHECK(got.is_leaf());
}

TEST_CASE("a folder that is there already is not touched", "[checkpoint]") {
  const Saved saved;
  CHECK(contains(save_error(saved.folder(), training_state(2), 4), "is there already"));
  CHECK(contains(save_error(saved.folder() / "", training_state(2), 4), "is there already"));
  load_and_compare(saved.folder(), state(), 4);
  write_bytes(saved.parent / "file", "");
  CHECK(contains(save_error(saved.parent / "file", state(), 2), "is there already"));
  CHECK(contains(save_error(saved.parent / "file/step-1", state(), 2), "could not"));
  write_bytes(saved.parent / "step-3.partial", "mine");
  CHECK(contains(save_error(saved.parent / "step-3", state(), 2), "in the way"));
  CHECK(read_bytes(saved.parent / "step-3.partial") == "mine");
}

TEST_CASE("a save that fails on one rank leaves nothing, and older ones", "[checkpoint]") {
  const Saved saved;
  const fs::path next = saved.parent / "step-200";
  const auto with = [&](int rank, const std::function<void(ShardedTensor&)>& change,
                        ErrorKind kind = ErrorKind::kBadInput) {
    std::string text = save_error(
        next, state(), 4,
        [&](int r, Shards& shards) {
          if (r == rank) change(find(shards, "ids"));
        },
        kind);
    CHECK(names_in(saved.parent.path()) == std::set<std::string>{"step-100"});
    return text;
  };
  const std::string meta = with(2, [](auto& t) { t.rows = t.rows.to(at::kMeta); });
  CHECK(contains(meta, "rank 2: "));
  CHECK(contains(meta, "\"ids\""));
  CHECK(contains(meta, "has no data"));
  const std::string complex = with(3, [](auto& t) { t.rows = t.rows.to(at::kComplexFloat); });
  CHECK(contains(complex, "rank 3: dtype ComplexFloat cannot be written"));
  const auto reshaped = [](auto& t) { t.rows = t.rows.narrow(0, 0, 1); };
  CHECK(contains(with(1, reshaped, ErrorKind::kInternal), "rows of shape [1,2], expected [3,2]"));
  const auto undefined = [](auto& t) { t.rows = at::Tensor(); };
  CHECK(contains(with(0, undefined, ErrorKind::kInternal), "rank 0: "));
  load_and_compare(saved.folder(), state(), 4);
  CHECK(latest_checkpoint(saved.parent.path()) == saved.folder());
  save_state(next, state(), 4);
  CHECK(latest_checkpoint(saved.parent.path()) == next);
}

TEST_CASE("each row must be written by one rank", "[checkpoint]") {
  const TempFolder folder;
  const auto text = [&](const std::string& name, int rank, auto change) {
    std::string error = save_error(folder / "c", state(), 4, [&](int r, Shards& shards) {
      if (r == rank) change(find(shards, name));
    });
    CHECK(folder.file_count() == 0);
    return error;
  };
  const auto skip = [](ShardedTensor& t) { t.writes = false; };
  CHECK(text("ids", 1, skip) == "tensor \"ids\": no rank writes its rows 3 to 5 (of 10)");
  CHECK(text("ids", 3, skip) == "tensor \"ids\": no rank writes its rows 9 to 9 (of 10)");
  CHECK(text("replicated", 0, skip) ==
        "tensor \"replicated\": no rank writes its rows 0 to 4 (of 5)");
  CHECK(text("scale", 0, skip) == "tensor \"scale\": no rank writes its rows 0 to 0 (of 1)");
  CHECK(text("replicated", 2, [](ShardedTensor& t) { t.writes = true; }) ==
        "tensor \"replicated\": ranks 0 and 2 both write its row 0");
  const auto take_second = [](ShardedTensor& t) { t.index = 1, t.rows = t.rows.clone(); };
  CHECK(text("ids", 2, take_second) == "tensor \"ids\": ranks 1 and 2 both write its row 3");
}

TEST_CASE("ranks must list the same tensors, in any order", "[checkpoint]") {
  const TempFolder folder;
  const auto text = [&](const tests::Edit& edit) {
    std::string error = save_error(folder / "c", state(), 3, edit);
    CHECK(folder.file_count() == 0);
    return error;
  };
  CHECK(contains(text([](int rank, Shards& shards) {
                   if (rank == 1) find(shards, "ids").name = "idx";
                 }),
                 "rank 0 \"ids\" I64 [10,2], rank 1 \"idx\" I64 [10,2]"));
  CHECK(contains(text([](int rank, Shards& shards) {
                   if (rank == 2) std::erase_if(shards, [](auto& t) { return t.name == "scale"; });
                 }),
                 "rank 0 \"scale\" F32 [], rank 2 no further tensor"));
  CHECK(contains(text([](int rank, Shards& shards) {
                   ShardedTensor& t = find(shards, "ids");
                   if (rank == 2) t.rows = t.rows.to(at::kInt);
                 }),
                 "rank 2 \"ids\" I32 [10,2]"));
  run_ranks(3, [&](int rank, const comm::Communicator& all) {
    Shards shards = shards_of(state(), 3, rank, true);
    if (rank == 1) std::reverse(shards.begin(), shards.end());
    save_checkpoint(folder / "c", info_of(3), shards, {}, all, device());
  });
  load_and_compare(folder / "c", state(), 2);
}

TEST_CASE("a save needs one folder of all hosts", "[checkpoint]") {
  const TempFolder folder;
  run_ranks(2, [&](int rank, const comm::Communicator& all) {
    std::string text;
    try {
      save_checkpoint(folder / fmt::format("host{}", rank), info_of(2),
                      shards_of(state(), 2, rank, true), {}, all, device());
    } catch (const Error& error) {
      text = error.what();
    }
    if (!contains(text, "rank 1: ") || !contains(text, "that all hosts share")) {
      throw std::runtime_error("unexpected: " + text);
    }
  });
  CHECK(folder.file_count() == 0);
}

// Saves a checkpoint of a megabyte in a process that ends at its first 64 KiB of any file.
int die_while_saving(const fs::path& folder) {
  // On the CPU: a forked child cannot use a GPU. It has none of the parent's OpenMP threads:
  // whatever would share work waits for ever.
  const at::Tensor rows = at::zeros({1 << 18});
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    at::set_num_threads(1);
    const rlimit limit{64 << 10, 64 << 10};
    ::signal(SIGXFSZ, [](int) { ::_exit(7); });
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const Shards shards = {{"w", {1 << 18}, {1 << 18, 1}, 0, rows, true}};
    save_checkpoint(folder, info_of(1), shards, {}, {}, at::kCPU);
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

TEST_CASE("a save that was killed is no checkpoint, and the next one clears it", "[checkpoint]") {
  const Saved saved;
  const fs::path next = saved.parent / "step-200", partial = saved.parent / "step-200.partial";
  REQUIRE(die_while_saving(next) == 7);
  CHECK(fs::is_directory(partial));
  CHECK_FALSE(fs::exists(partial / "manifest.json"));
  CHECK_FALSE(fs::exists(next));
  CHECK(latest_checkpoint(saved.parent.path()) == saved.folder());
  CHECK(contains(load_error(next, state(), 2), "step-200.partial: its save was broken off"));
  CHECK(contains(load_error(partial, state(), 2), "no complete checkpoint"));
  CHECK(contains(load_error(saved.parent / "step-300", state(), 2), "no save of it"));
  load_and_compare(saved.folder(), state(), 4);

  write_bytes(partial / rank_file_name(9), "stale");
  save_state(next, state(), 2);
  CHECK(names_in(next) ==
        std::set<std::string>{"manifest.json", "rank00000.safetensors", "rank00001.safetensors"});
  CHECK_FALSE(fs::exists(partial));
  load_and_compare(next, state(), 3);
}

TEST_CASE("a damaged or missing file is named, on every rank", "[checkpoint]") {
  const Saved saved;
  const std::string whole = read_bytes(saved.file(1)), file = saved.file(1).string();
  for (const size_t at : {size_t{3}, size_t{20}, whole.size() - 40, whole.size() - 1}) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    write_bytes(saved.file(1), damaged);
    for (const int ranks : {1, 2, 4}) CHECK(contains(saved.error({}, ranks), file));
    if (at > 20) CHECK(contains(saved.error(), "rank 1: " + file + " is damaged"));
  }
  write_bytes(saved.file(1), std::string_view(whole).substr(0, whole.size() - 8));
  CHECK(contains(saved.error(), file));
  fs::copy_file(saved.file(2), saved.file(1), fs::copy_options::overwrite_existing);
  CHECK(contains(saved.error(), file + " is damaged"));
  fs::remove(saved.file(1));
  CHECK(contains(saved.error(), "rank 1: cannot read " + file));
  write_bytes(saved.file(1), whole);
  load_and_compare(saved.folder(), state(), 4);
}

TEST_CASE("a file without the rows that the manifest promises is named", "[checkpoint]") {
  const Saved saved;
  const auto put = [&](const std::map<std::string, at::Tensor>& tensors) {
    const auto record = [&] {
      const std::string bytes = read_bytes(saved.file(1));
      return fmt::format("\"bytes\": {}, \"checksum\": \"{:016x}\"", bytes.size(), checksum(bytes));
    };
    const std::string old = record();
    save_safetensors(saved.file(1), tensors);
    saved.edit_manifest(old, record());
    return saved.error();
  };
  const SafetensorsFile file = SafetensorsFile::open(saved.file(1));
  std::map<std::string, at::Tensor> tensors;
  for (const SafetensorsEntry& entry : file.entries())
    tensors[entry.name] = file.tensor(entry.name);
  const at::Tensor ids = tensors.at("ids");
  tensors.erase("ids");
  CHECK(contains(put(tensors), saved.file(1).string() + ": tensor \"ids\": not in the file"));
  tensors["ids"] = ids.narrow(0, 0, 2);
  CHECK(contains(put(tensors), saved.file(1).string() + ": tensor \"ids\": the manifest says I64 "
                                                        "[3,2], found I64 [2,2]"));
  tensors["ids"] = ids.to(at::kInt);
  CHECK(contains(put(tensors), "the manifest says I64 [3,2], found I32 [3,2]"));
}

TEST_CASE("a checkpoint of another run is refused", "[checkpoint]") {
  const Saved saved;
  saved.edit_manifest("QwenImage", "Flux");
  CHECK(contains(saved.error(), "is of another model: expected \"QwenImage"));
  saved.edit_manifest("Flux", "QwenImage");
  const std::string all = saved.error([](int, Shards& shards) {
    find(shards, "block.0.bias:param").name = "other";
    ShardedTensor& ids = find(shards, "ids");
    ids.rows = ids.rows.to(at::kInt);
    ShardedTensor& weight = find(shards, "block.1.weight:param");
    weight.shape[2] = 4;
    weight.rows = weight.rows.narrow(2, 0, 4);
  });
  CHECK(contains(all, "4 problems"));
  CHECK_FALSE(contains(all, "rank "));  // all say the same
  CHECK(contains(all, "tensor \"other\" is missing"));
  CHECK(contains(all, "tensor \"block.0.bias:param\" is not of this run"));
  CHECK(contains(all, "tensor \"ids\": expected I32 [10,2], found I64 [10,2]"));
  CHECK(contains(all, "tensor \"block.1.weight:param\": expected F64 [3,2,4], found F64 [3,2,5]"));
  const std::string one = saved.error([](int rank, Shards& shards) {
    if (rank == 3) shards.pop_back();
  });
  CHECK(contains(one, "rank 3: "));
  CHECK(contains(one, "tensor \"replicated\" is not of this run"));
}

TEST_CASE("a manifest must be one of this version, and whole", "[checkpoint]") {
  const struct {
    const char *from, *to, *expected;
  } cases[] = {
      {"shardproof-checkpoint", "safetensors", "format: expected \"shardproof-checkpoint\""},
      {"\"version\": 1", "\"version\": 2", "version: this program reads version 1, found 2"},
      {"\"world\": 4", "\"world\": 5", "world: 5 ranks, but 4 files"},
      {"\"name\": \"rank00002", "\"name\": \"../rank00002", "files[2].name: expected \"rank00002"},
      {"\"checksum\": \"", "\"checksum\": \"x", "files[0].checksum: expected a number"},
      {"\"seed\": 7", "\"seed\": -7", "seed: expected a seed of at least 0"},
      {"[1, 3, 6]", "[4, 3, 6]", "no file 4: there are 4"},
      {"[1, 3, 6]", "[1, 3]", "expected [file, first row, row after the last]"},
      {"[1, 3, 6]", "[1, 4, 6]", "no rank writes its rows 3 to 3 (of 10)"},
      {"[1, 3, 6]", "[1, 2, 6]", "ranks 0 and 1 both write its row 2"},
      {"[3, 9, 10]", "[3, 9, 11]", "rank 3 writes rows 9 up to, not including, 11 of 10"},
      {"\"step\": 100,", "", "the key \"step\" is missing"},
      {"{", "", "manifest.json"},
  };
  const Saved saved;
  const std::string whole = read_bytes(saved.folder() / "manifest.json");
  for (const auto& [from, to, expected] : cases) {
    saved.edit_manifest(from, to);
    const std::string text = saved.error();
    INFO(text);
    CHECK(contains(text, "manifest.json"));
    CHECK(contains(text, expected));
    write_bytes(saved.folder() / "manifest.json", whole);
  }
  load_and_compare(saved.folder(), state(), 4);
}

TEST_CASE("hosts with copies of two checkpoints are refused", "[checkpoint]") {
  const Saved a, b;
  b.edit_manifest("\"step\": 100", "\"step\": 101");
  run_ranks(2, [&](int rank, const comm::Communicator& all) {
    const Shards shards = shards_of(state(), 2, rank, false);
    std::string text;
    try {
      load_checkpoint(rank == 0 ? a.folder() : b.folder(), info_of(2), shards, all, device());
    } catch (const Error& error) {
      text = error.what();
    }
    if (!contains(text, "manifests differ")) throw std::runtime_error("unexpected: " + text);
    if (!all_ones(shards)) throw std::runtime_error("a tensor has changed");
  });
}

TEST_CASE("the latest checkpoint is the complete one of the largest step", "[checkpoint]") {
  const TempFolder folder;
  CHECK(latest_checkpoint(folder / "missing").empty());
  CHECK(latest_checkpoint(folder.path()).empty());
  for (const char* name : {"step-9", "step-10", "step-300.partial", "step-", "step--400", "step-4x",
                           "other-500", "step-99999999999999999999"}) {
    fs::create_directory(folder / name);
    write_bytes(folder / name / "manifest.json", "{}");
  }
  fs::create_directory(folder / "step-200");  // without a manifest
  write_bytes(folder / "step-201", "a file");
  CHECK(latest_checkpoint(folder.path()) == folder / "step-10");
  CHECK(contains(error_text([&] { latest_checkpoint(folder / "step-201"); }), "cannot look"));
}

}  // namespace
}  // namespace shardproof::fsdp
