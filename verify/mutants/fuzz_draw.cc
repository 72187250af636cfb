// Which case, and which operators together.
#include <array>
#include <map>

#include "base/error.h"
#include "verify/mutants/fuzz.h"
#include "verify/mutants/fuzz_operators.h"
#include "verify/mutants/mutant_pair.h"
#include "verify/mutants/planting.h"
#include "verify/suites/attention_suite.h"

namespace shardproof::verify {
namespace {

constexpr std::array kDtypes = {c10::ScalarType::Double, c10::ScalarType::Float,
                                c10::ScalarType::BFloat16};
constexpr std::array<const char*, 4> kModels = {"qwenimage", "flux", "sd3", "wan"};

FuzzTarget attention_target(Draw& draw) {
  // As many as there are cells of the suite, of which one is taken: all cells are as likely.
  constexpr int64_t kCells = 120;
  CaseFilter filter;
  filter.dtypes = {kDtypes.begin(), kDtypes.end()};
  const auto cases =
      random_attention_cases(filter, static_cast<uint64_t>(draw.between(0, 999999)), kCells);
  const AttentionCase& c = cases[static_cast<size_t>(draw.between(0, kCells - 1))];
  return {c.id(), AttentionSubject{}, c.dtype, c.mesh, {}};
}

FuzzTarget model_target(Draw& draw) {
  constexpr std::array<const char*, 4> kMeshes = {"dp1.ring1.ulysses2", "dp1.ring2.ulysses1",
                                                  "dp1.ring2.ulysses2", "dp2.ring1.ulysses2"};
  ModelSpot spot{draw.one_of(kMeshes), draw.one_of(kModels), /*batch=*/1};
  const c10::ScalarType dtype = draw.one_of(kDtypes);
  return {case_id(spot, dtype), ModelSubject{}, dtype, comm::MeshShape::parse(spot.mesh), {}};
}

FuzzTarget training_target(Draw& draw) {
  constexpr std::array<const char*, 4> kMeshes = {"dp1.ring1.ulysses2", "dp1.ring2.ulysses1",
                                                  "dp2.ring1.ulysses2", "dp2.ring1.ulysses1"};
  constexpr std::array<const char*, 5> kWords = {"", ".masked", ".clip", ".acc2", ".sgd"};
  const std::string mesh = draw.one_of(kMeshes);
  const comm::MeshShape shape = comm::MeshShape::parse(mesh);
  TrainingSpot spot{fmt::format("{}.fsdp{}", mesh, shape.world()), draw.one_of(kWords),
                    draw.one_of(kModels)};
  const c10::ScalarType dtype = draw.one_of(kDtypes);
  return {case_id(spot, dtype), TrainingSubject{}, dtype, shape, {}};
}

// Attention is cheap, so most mutants are of attention.
FuzzTarget draw_target(Draw& draw, Worlds& worlds) {
  const int64_t kind = draw.between(0, 9);
  FuzzTarget target = kind < 6   ? attention_target(draw)
                      : kind < 8 ? model_target(draw)
                                 : training_target(draw);
  target.calls = run_bare({target.case_id, target.clean}, worlds).calls;
  return target;
}

// Two operators in one case. Half of the time two that scale, by a power of two and its inverse:
// where they meet they cancel to the bit.
RandomMutant operator_pair(Draw& draw, Worlds& worlds) {
  const FuzzTarget target = draw_target(draw, worlds);
  constexpr int kTries = 100;
  for (int i = 0; i < kTries; ++i) {
    const bool cancel = draw.chance(2);
    const double factor = draw.one_of(std::array{0.25, 0.5, 2.0, 4.0});
    const auto drawn = [&](double by) {
      return cancel ? draw_scaling(target, draw, by) : draw_operation(target, draw);
    };
    const Operation a = drawn(factor), b = drawn(1 / factor);
    // Of two faults of one call the simulator plants the first only.
    if (!a.tag.empty() && a.tag == b.tag) continue;
    const auto subject = both(a.subject, b.subject);
    if (!subject) continue;
    return {"pair", a.text + " and " + b.text, {target.case_id, *subject}};
  }
  internal_error("{}: no two operators in {} attempts", target.case_id, kTries);
}

struct Planted {
  const Mutant* mutant;
  const Plant* plant;
};

// Cases in which two mutants of the catalogue can be planted together.
const std::vector<std::vector<Planted>>& shared_cases() {
  static const std::vector<std::vector<Planted>> all = [] {
    std::map<std::string, std::vector<Planted>> by_case;
    for (const Mutant& mutant : mutant_catalogue()) {
      for (const Plant& plant : mutant.plants) by_case[plant.case_id].push_back({&mutant, &plant});
    }
    std::vector<std::vector<Planted>> shared;
    for (auto& [id, plants] : by_case) {
      if (plants.size() > 1) shared.push_back(std::move(plants));
    }
    return shared;
  }();
  return all;
}

// S5 takes the gather for convention A, S6 makes it so: together they are a right program, that of
// the case with the word A.
bool make_a_right_program(const Mutant& a, const Mutant& b) {
  return (a.id == "S5" && b.id == "S6") || (a.id == "S6" && b.id == "S5");
}

RandomMutant catalogue_pair(Draw& draw) {
  constexpr int kTries = 100;
  for (int i = 0; i < kTries; ++i) {
    const auto& all = shared_cases();
    const auto& plants = all[static_cast<size_t>(draw.between(0, std::ssize(all) - 1))];
    const auto any = [&] {
      return plants[static_cast<size_t>(draw.between(0, std::ssize(plants) - 1))];
    };
    const Planted a = any(), b = any();
    if (a.mutant == b.mutant || make_a_right_program(*a.mutant, *b.mutant)) continue;
    const auto subject = both(a.plant->subject, b.plant->subject);
    if (!subject) continue;
    return {"catalogue-pair", a.mutant->id + " and " + b.mutant->id, {a.plant->case_id, *subject}};
  }
  internal_error("no two mutants of the catalogue in {} attempts", kTries);
}

}  // namespace

RandomMutant random_mutant(uint64_t seed, int64_t index, Worlds& worlds) {
  Draw draw(comm::derive_seed(comm::derive_seed(seed, "fuzz"), static_cast<uint64_t>(index)));
  if (draw.chance(5)) return draw.chance(3) ? catalogue_pair(draw) : operator_pair(draw, worlds);
  const FuzzTarget target = draw_target(draw, worlds);
  const Operation operation = draw_operation(target, draw);
  return {operation.name, operation.text, {target.case_id, operation.subject}};
}

}  // namespace shardproof::verify
