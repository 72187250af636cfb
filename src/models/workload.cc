#include "models/workload.h"

#include <algorithm>

#include "base/error.h"

namespace shardproof::models {
namespace {

constexpr int64_t kVaeFactor = 8, kVaeFrames = 4;
constexpr int64_t kMostTokens = 10'000'000;  // attention plans list tokens one by one
constexpr int64_t kMostAlong = 1 << 20;      // pixels, frames: products stay far from overflow

// Tokens along one side of an image.
int64_t along(const char* name, int64_t pixels, int64_t patch, int64_t largest) {
  const int64_t unit = kVaeFactor * patch;
  if (pixels < 1 || pixels > kMostAlong || pixels % unit != 0) {
    bad_input("{} of {} pixels: expected a multiple of {} (VAE {} x patch {}) up to {}", name,
              pixels, unit, kVaeFactor, patch, kMostAlong);
  }
  if (largest > 0 && pixels / unit > largest) {
    bad_input("{} of {} pixels: {} patches; the model's position table has {} along a side", name,
              pixels, pixels / unit, largest);
  }
  return pixels / unit;
}

int64_t latent_frames(int64_t frames, bool video, int64_t patch) {
  if (!video) {
    if (frames != 1) bad_input("{} frames: this model makes single images", frames);
    return 1;
  }
  if (frames < 1 || frames > kMostAlong || (frames - 1) % kVaeFrames != 0) {
    bad_input("{} frames: expected 1 more than a multiple of {} (the VAE's factor)", frames,
              kVaeFrames);
  }
  const int64_t latents = (frames - 1) / kVaeFrames + 1;
  if (latents % patch != 0) {
    bad_input("{} frames are {} of latents, which patches of {} do not divide", frames, latents,
              patch);
  }
  return latents / patch;
}

// Weights of linear layers and of convolutions whose kernel is their stride: each element meets
// each token once.
bool is_linear(const ParameterSpec& spec) {
  return !spec.buffer && spec.shape.size() >= 2 && spec.name.ends_with(".weight");
}

}  // namespace

std::vector<StreamTokens> stream_tokens(const Transformer& model, const SampleSize& size) {
  const Geometry g = model.geometry();
  const int64_t rows = along("height", size.height, g.patch[1], g.largest_grid);
  const int64_t columns = along("width", size.width, g.patch[2], g.largest_grid);
  const int64_t frames = latent_frames(size.frames, g.video, g.patch[0]);
  if (size.text < 1 || size.text > kMostTokens || rows * columns > kMostTokens / frames) {
    bad_input("{} text and {}x{}x{} visual tokens: expected at least 1 and at most {} of each",
              size.text, frames, rows, columns, kMostTokens);
  }
  std::vector<StreamTokens> streams;
  const auto add = [&](const std::string& name) {
    const auto same = [&](const StreamTokens& s) { return s.name == name; };
    if (std::any_of(streams.begin(), streams.end(), same)) return;
    streams.push_back({name, name == g.visual_stream ? frames * rows * columns : size.text});
  };
  const std::vector<AttentionUse> uses = model.attentions();
  for (const AttentionUse& use : uses) std::for_each(use.queries.begin(), use.queries.end(), add);
  for (const AttentionUse& use : uses) std::for_each(use.keys.begin(), use.keys.end(), add);
  return streams;
}

int64_t tokens_of(const std::vector<StreamTokens>& streams, const std::string& name) {
  int64_t all = 0;
  for (const StreamTokens& stream : streams) {
    if (stream.name == name) return stream.tokens;
    all += stream.tokens;
  }
  SP_CHECK(name == "joint", "no stream '{}'", name);
  return all;
}

std::vector<LinearWork> linear_work(const Transformer& model) {
  std::vector<LinearWork> work;
  for (const ParameterSpec& spec : model.parameter_specs()) {
    if (!is_linear(spec)) continue;
    const std::string stream = model.stream_of(spec.name);
    double flops = 2;
    for (const int64_t n : spec.shape) flops *= static_cast<double>(n);
    if (stream.empty()) flops *= static_cast<double>(model.conditioning_rows(spec.name));
    auto it = std::find_if(work.begin(), work.end(),
                           [&](const LinearWork& w) { return w.stream == stream; });
    if (it == work.end()) it = work.insert(it, {stream, 0});
    it->flops_per_row += flops;
  }
  return work;
}

double Workload::forward_flops() const {
  double sum = 0;
  for (const WorkPart& part : forward) sum += part.flops;
  return sum;
}

Workload count_work(const Transformer& model, const SampleSize& size, int64_t samples) {
  if (samples < 1 || samples > kMostAlong) {
    bad_input("{} samples: expected 1 to {}", samples, kMostAlong);
  }
  Workload work{samples, stream_tokens(model, size), {}};
  const Geometry g = model.geometry();
  const auto n = static_cast<double>(samples);
  for (const LinearWork& linear : linear_work(model)) {
    if (linear.stream.empty()) {
      work.forward.push_back({"conditioning", n * linear.flops_per_row});
    } else {
      const auto tokens = static_cast<double>(tokens_of(work.streams, linear.stream));
      work.forward.push_back({"linear " + linear.stream, n * tokens * linear.flops_per_row});
    }
  }
  const auto sum = [&](const std::vector<std::string>& names) {
    int64_t tokens = 0;
    for (const std::string& name : names) tokens += tokens_of(work.streams, name);
    return static_cast<double>(tokens);
  };
  for (const AttentionUse& use : model.attentions()) {
    // Scores and the weighted sum of values, two products.
    const double one = 4 * sum(use.queries) * sum(use.keys) * static_cast<double>(g.width());
    work.forward.push_back({"attention " + use.name, n * static_cast<double>(use.layers) * one});
  }
  return work;
}

}  // namespace shardproof::models
