#include "verify/mutants/planting.h"

#include "base/error.h"
#include "verify/case_id.h"
#include "verify/dtype.h"
#include "verify/mutants/attention_mutants.h"

namespace shardproof::verify {
namespace {

std::string mode_of(const std::string& mesh) {
  const std::string ranks = mesh.substr(0, mesh.find(".fsdp"));
  return mode_name(comm::MeshShape::parse(ranks), plan::RingMode::kRotate);
}

}  // namespace

std::string case_id(const ModelSpot& spot, c10::ScalarType dtype) {
  return fmt::format("models/{}/{}/{}/{}/b{}.t8.g1x4x6.l1.h4.d16#3", spot.subject,
                     mode_of(spot.mesh), spot.mesh, dtype_name(dtype), spot.batch);
}

std::string case_id(const TrainingSpot& spot, c10::ScalarType dtype) {
  return fmt::format("training/{}/{}/{}/{}/b{}.t8.g1x4x6.l{}.h4.d16.s{}{}#3", spot.subject,
                     mode_of(spot.mesh), spot.mesh, dtype_name(dtype), spot.batch, spot.layers,
                     spot.steps, spot.words);
}

namespace {

constexpr auto kDtypes = {c10::ScalarType::Double, c10::ScalarType::BFloat16};

// A word "t<n>".
bool has_text(const std::string& words) {
  for (size_t at = words.find(".t"); at != std::string::npos; at = words.find(".t", at + 1)) {
    if (std::isdigit(static_cast<unsigned char>(words[at + 2]))) return true;
  }
  return false;
}

std::string case_id(const AttentionSpot& spot, c10::ScalarType dtype) {
  return fmt::format("attention/{}/{}/{}/{}/{}#3", has_text(spot.words) ? "joint" : "self",
                     mode_of(spot.mesh), spot.mesh, dtype_name(dtype), spot.words);
}

using verify::case_id;

template <class Spot, class Subject>
std::vector<Plant> in_all_dtypes(const Spot& spot, const Subject& subject) {
  std::vector<Plant> all;
  for (const c10::ScalarType dtype : kDtypes) all.push_back({case_id(spot, dtype), subject});
  return all;
}

}  // namespace

std::vector<Plant> plants(const TrainingSpot& spot, const TrainingSubject& subject) {
  return in_all_dtypes(spot, subject);
}
std::vector<Plant> plants(const ModelSpot& spot, const ModelSubject& subject) {
  return in_all_dtypes(spot, subject);
}
std::vector<Plant> plants(const AttentionSpot& spot, const AttentionSubject& subject) {
  return in_all_dtypes(spot, subject);
}

std::vector<Plant> plants(const AttentionSpot& spot, const std::string& attention_mutant) {
  for (const AttentionMutant& mutant : attention_mutants()) {
    if (mutant.id != attention_mutant) continue;
    std::vector<Plant> all;
    for (const c10::ScalarType dtype : kDtypes) {
      const std::string id = case_id(spot, dtype);
      const auto subject = mutant.plant(AttentionCase::parse(id));
      SP_CHECK(subject.has_value(), "{} is nothing in {}", attention_mutant, id);
      all.push_back({id, *subject});
    }
    return all;
  }
  internal_error("there is no attention mutant '{}'", attention_mutant);
}

Plant plant(const TrainingSpot& spot, const TrainingSubject& subject) {
  return {case_id(spot, c10::ScalarType::Double), subject};
}
Plant plant(const ModelSpot& spot, const ModelSubject& subject) {
  return {case_id(spot, c10::ScalarType::Double), subject};
}
Plant plant(const AttentionSpot& spot, const AttentionSubject& subject) {
  return {case_id(spot, c10::ScalarType::Double), subject};
}

}  // namespace shardproof::verify
