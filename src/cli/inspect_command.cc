#include <charconv>
#include <cstdio>
#include <filesystem>

#include "base/atomic_file.h"
#include "base/error.h"
#include "cli/choose.h"
#include "cli/inspect_options.h"
#include "cli/inspect_report.h"

namespace shardproof::cli {
namespace {

namespace fs = std::filesystem;

constexpr int kMostRanks = 4096;  // a row each

models::ParallelOptions parallel_options(const InspectOptions& o) {
  models::ParallelOptions options;
  options.token_split = choose<plan::TokenSplit>(
      "--token-split", o.token_split,
      {{"uneven", plan::TokenSplit::kUneven}, {"padded", plan::TokenSplit::kPadded}});
  options.head_split = choose<plan::HeadSplit>("--head-split", o.head_split,
                                               {{"even", plan::HeadSplit::kEven},
                                                {"uneven", plan::HeadSplit::kUneven},
                                                {"padded", plan::HeadSplit::kPadded}});
  options.ring_mode = choose<plan::RingMode>(
      "--ring-mode", o.ring_mode,
      {{"rotate", plan::RingMode::kRotate}, {"allgather", plan::RingMode::kAllGather}});
  options.text_placement =
      choose<plan::StreamPlacement>("--text-placement", o.text_placement,
                                    {{"sharded", plan::StreamPlacement::kSharded},
                                     {"replicated", plan::StreamPlacement::kReplicated}});
  return options;
}

models::SampleSize sample_size(const InspectOptions& o, const models::Geometry& g) {
  models::SampleSize size;
  const char* at = o.size.data();
  const char* end = at + o.size.size();
  const auto read = [&](int64_t& number) {
    const std::from_chars_result result = std::from_chars(at, end, number);
    at = result.ptr;
    return result.ec == std::errc();
  };
  const bool whole =
      read(size.height) && at != end && *at++ == 'x' && read(size.width) && at == end;
  if (!whole) bad_input("--size '{}': expected HEIGHTxWIDTH in pixels, like 1024x1024", o.size);
  size.frames = o.frames.value_or(g.video ? 81 : 1);
  size.text = o.text.value_or(g.usual_text);
  return size;
}

fs::path config_of(const fs::path& path) {
  if (!fs::is_directory(path)) return path;
  if (fs::exists(path / "config.json")) return path / "config.json";
  const bool pipeline = fs::exists(path / "transformer" / "config.json");
  bad_input("{} has no config.json{}", path.string(),
            pipeline ? "; did you mean " + (path / "transformer").string() + "?" : "");
}

// The files count only for a folder: beside a lone configuration they may be anybody's.
void count_weights(const fs::path& path, Inspection& inspection) {
  if (!fs::is_directory(path)) return;
  for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
    if (entry.path().extension() != ".safetensors" || !entry.is_regular_file()) continue;
    ++inspection.weight_files;
    inspection.weight_bytes += static_cast<int64_t>(entry.file_size());
  }
}

int run_inspect(const InspectOptions& o) {
  Inspection inspection;
  inspection.path = o.path;
  inspection.options = parallel_options(o);
  inspection.mesh = comm::MeshShape::parse(o.mesh);
  if (inspection.mesh.sp() > kMostRanks) {
    bad_input("mesh {}: inspect shows up to {} sequence-parallel ranks", o.mesh, kMostRanks);
  }
  inspection.model = models::make_transformer(read_json_file(config_of(o.path)));
  inspection.parameters = models::ParameterSet(inspection.model->parameter_specs()).count();
  count_weights(o.path, inspection);
  inspection.size = sample_size(o, inspection.model->geometry());
  inspection.sharing = models::share_work(*inspection.model, inspection.size, o.batch,
                                          inspection.mesh, inspection.options);
  if (!o.json.empty()) write_file_atomically(o.json, to_json(inspection));
  fmt::print("{}", to_text(inspection));
  return 0;
}

}  // namespace
}  // namespace shardproof::cli

extern "C" int shardproof_run_inspect(const shardproof::cli::InspectOptions& options) {
  return shardproof::cli::run_inspect(options);
}
