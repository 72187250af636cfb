// R: seeds, noise and dropout.
#include <ATen/ATen.h>

#include "verify/mutants/planting.h"

namespace shardproof::verify {
namespace {

TrainingSubject dropout(std::function<void(models::Dropout&, int rank)> edit) {
  TrainingSubject subject;
  subject.edit_dropout = std::move(edit);
  return subject;
}

// Every replica is given the first one's `input`.
std::vector<Plant> same_on_all_replicas(const ModelSpot& spot, const std::string& input) {
  std::vector<Plant> all;
  for (const c10::ScalarType dtype : {c10::ScalarType::Double, c10::ScalarType::BFloat16}) {
    const std::string id = case_id(spot, dtype);
    ModelSubject subject;
    subject.edit_inputs = [id, input](models::TransformerInputs& inputs, int) {
      const ModelCase c = ModelCase::parse(id);
      inputs[input] = replica_passes(c, draw_model_data(c), 0)[0].inputs[input];
    };
    all.push_back({id, subject, /*one_seed=*/true});
  }
  return all;
}

}  // namespace

std::vector<Mutant> random_mutants() {
  const TrainingSpot sp2 = TrainingSpot{"dp1.ring1.ulysses2.fsdp2"}.with("drop"),
                     dp2 = TrainingSpot{"dp2.ring1.ulysses1.fsdp2"}.with("drop");
  const ModelSpot replicas{"dp2.ring1.ulysses1"};
  const auto own_seed =
      dropout([](models::Dropout& d, int rank) { d.seed += static_cast<uint64_t>(rank); });
  const auto one_mask = dropout([](models::Dropout& d, int) { d.first_sample = 0; });
  return {
      {.id = "R1",
       .source = "NVIDIA/Megatron-LM#1256",
       .kind = "M-RNG",
       .text = "dropout draws outside the random state that sequence parallelism prescribes: SP "
               "ranks disagree about masks",
       .cause = "random",
       .first_wrong = {"*/loss"},
       .plants = plants(sp2, own_seed)},
      {.id = "R2",
       .source = "verl-project/verl-omni#561",
       .kind = "M-RNG",
       .text = "seeds come from a local index: replicas start from the same noise",
       .cause = "random",
       .first_wrong = {"block.0.*"},
       .plants = same_on_all_replicas(replicas, "hidden_states")},
      {.id = "R4",
       .source = "Robbyant/lingbot-vla-v2#41",
       .kind = "M-RNG",
       .text = "timesteps are the same on all ranks",
       .cause = "random",
       .first_wrong = {"block.0.*"},
       .plants = same_on_all_replicas(replicas, "timestep")},
      {.id = "R5",
       .source = "PaddlePaddle/PaddleFleetX#1005",
       .kind = "M-RNG",
       .text = "replicas share their dropout masks",
       .cause = "random",
       .first_wrong = {"*/loss"},
       .plants = plants(dp2, one_mask),
       .innocent = {plant(sp2, one_mask)}},
  };
}

}  // namespace shardproof::verify
