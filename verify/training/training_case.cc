#include "verify/training/training_case.h"

#include <algorithm>

#include "base/error.h"
#include "verify/case_id.h"

namespace shardproof::verify {
namespace {

struct Flag {
  const char* word;
  bool TrainingCase::*value;
};
constexpr Flag kFlags[] = {
    {"defer", &TrainingCase::deferred},  {"clip", &TrainingCase::clip},
    {"sgd", &TrainingCase::sgd},         {"stop", &TrainingCase::stop},
    {"noreshard", &TrainingCase::keep},  {"noprefetch", &TrainingCase::no_prefetch},
    {"repl", &TrainingCase::replicated}, {"offload", &TrainingCase::offload},
};

bool read_word(std::string_view word, TrainingCase& c) {
  if (word == "masked") return c.loss = TrainingLoss::kMaskedMean, true;
  if (word == "perrank") return c.loss = TrainingLoss::kPerRank, true;
  for (const Flag& flag : kFlags) {
    if (word == flag.word) return c.*(flag.value) = true, true;
  }
  return read_number(word, "s", c.steps) || read_number(word, "acc", c.accumulation);
}

// Takes ".fsdp<n>" off the mesh. 0 if there is none.
int take_shards(std::string& mesh) {
  const size_t at = mesh.rfind(".fsdp");
  int shards = 0;
  if (at == std::string::npos) return 0;
  if (!read_number(std::string_view(mesh).substr(at), ".fsdp", shards) || shards < 1) {
    bad_input("mesh '{}': expected fsdp and a positive number", mesh);
  }
  mesh.resize(at);
  return shards;
}

void check(const TrainingCase& c) {
  const std::string id = c.id();
  if (c.model.mesh.world() % c.shards != 0) {
    bad_input("case '{}': {} shards do not divide the world of {} ranks", id, c.shards,
              c.model.mesh.world());
  }
  if (c.steps < 1 || c.steps > 1000 || c.accumulation < 1 || c.accumulation > 1000) {
    bad_input("case '{}': expected 1 to 1000 steps and micro-batches", id);
  }
  if (c.loss == TrainingLoss::kPerRank &&
      c.model.parallel.convention != plan::GradientConvention::kSumThenSlice) {
    bad_input("case '{}': a loss that depends on the rank has a gradient under convention C only",
              id);
  }
}

}  // namespace

std::string TrainingCase::id() const {
  const std::string of_model = model.id();
  std::vector<std::string> parts;
  for (std::string_view part : split(of_model, '/')) parts.emplace_back(part);
  parts[0] = "training";
  parts[3] += fmt::format(".fsdp{}", shards);
  std::string& variant = parts[5];
  const size_t seed_at = variant.find('#');
  std::string words = fmt::format(".s{}", steps);
  if (accumulation != 1) words += fmt::format(".acc{}", accumulation);
  if (loss == TrainingLoss::kMaskedMean) words += ".masked";
  if (loss == TrainingLoss::kPerRank) words += ".perrank";
  for (const Flag& flag : kFlags) {
    if (this->*(flag.value)) words += fmt::format(".{}", flag.word);
  }
  variant.insert(seed_at == std::string::npos ? variant.size() : seed_at, words);
  return fmt::format("{}", fmt::join(parts, "/"));
}

TrainingCase TrainingCase::parse(std::string_view id) {
  std::vector<std::string> parts;
  for (std::string_view part : split(id, '/')) parts.emplace_back(part);
  if (parts.size() != 6 || parts[0] != "training") {
    bad_input(
        "case '{}': expected training/<subject>/<mode>/<mesh>.fsdp<n>/<dtype>/<variant>[#seed]",
        id);
  }
  TrainingCase c;
  const int shards = take_shards(parts[3]);
  std::string seed;
  if (const size_t at = parts[5].find('#'); at != std::string::npos) {
    seed = parts[5].substr(at);
    parts[5].resize(at);
  }
  std::string words;
  for (std::string_view word : split(parts[5], '.')) {
    if (!read_word(word, c)) words += fmt::format("{}{}", words.empty() ? "" : ".", word);
  }
  parts[0] = "models";
  parts[5] = (words.empty() ? "default" : words) + seed;
  c.model = ModelCase::parse(fmt::format("{}", fmt::join(parts, "/")));
  c.shards = shards > 0 ? shards : c.model.mesh.world();
  check(c);
  return c;
}

fsdp::Policy TrainingCase::policy() const {
  const bool low = model.dtype == c10::ScalarType::BFloat16 || model.dtype == c10::ScalarType::Half;
  fsdp::Policy policy = fsdp::Policy::uniform(low ? c10::ScalarType::Float : model.dtype);
  policy.param_dtype = model.dtype;
  policy.reshard_after_forward = !keep;
  policy.prefetch = !no_prefetch;
  policy.offload = offload;
  if (replicated) {
    policy.replicated = [](const std::string& name) {
      return name.ends_with(".bias") || name.find("norm") != std::string::npos;
    };
  }
  return policy;
}

}  // namespace shardproof::verify
