// A diffusion transformer as diffusers defines it: configuration, named parameters, forward.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/json_file.h"
#include "models/dropout.h"
#include "models/geometry.h"
#include "models/parallel.h"
#include "models/parameters.h"
#include "models/recompute.h"
#include "models/rope.h"

namespace shardproof::models {

// Named as in diffusers' forward(); undefined where a model does not take them. Every SP rank of a
// replica is given the same whole tensors.
struct TransformerInputs {
  at::Tensor hidden_states;          // tokens [B,S,C]; SD3: latents [B,C,H,W]; Wan: [B,C,F,H,W]
  at::Tensor encoder_hidden_states;  // text [B,T,C]
  at::Tensor encoder_hidden_states_mask;  // bool [B,T], true = valid (QwenImage)
  at::Tensor pooled_projections;          // [B,C] (Flux, SD3)
  at::Tensor timestep;                    // [B]
  at::Tensor guidance;                    // [B] (Flux dev)
  at::Tensor img_ids, txt_ids;            // [S,3], [T,3] (Flux)
  std::vector<std::vector<ImageShape>>
      img_shapes;  // per sample the images' (frames,h,w) (QwenImage)

  // The tensors that are defined, by the names above.
  std::vector<std::pair<std::string, at::Tensor>> tensors() const;
  // Whether `name` is one of them; whether its first dimension counts samples (ids have none).
  static bool is_name(const std::string& name);
  static bool has_samples(const std::string& name);
  // A name above; errors (kBadInput): another one.
  at::Tensor& operator[](const std::string& name);
};

// Provides the parameters of a block while it needs them (FSDP).
class BlockUnits {
 public:
  virtual ~BlockUnits() = default;
  // block(inputs), with the parameters of the module `name` there in forward and backward.
  virtual std::vector<at::Tensor> run(const std::string& name, const Block& block,
                                      const std::vector<at::Tensor>& inputs) = 0;
};

struct ForwardOptions {
  DtypePolicy policy = DtypePolicy::kReference;
  bool recompute = false;       // activation checkpointing by block
  BlockUnits* units = nullptr;  // null: all parameters are there
  Dropout dropout;              // of training
  // Told the results of each block, "block.<i>.hidden_states", ...: this rank's rows; and the
  // sinusoids of numbers, "timestep.sinusoid" [B,C]. Values are part of the graph.
  std::function<void(const std::string& name, const at::Tensor& value)> probe;
  void tell(const std::string& name, const at::Tensor& value) const {
    if (probe) probe(name, value);
  }
};

class Transformer {
 public:
  virtual ~Transformer() = default;
  virtual std::string class_name() const = 0;
  virtual std::vector<ParameterSpec> parameter_specs() const = 0;
  virtual const plan::ModelPlan& sharding_plan() const = 0;

  // Sizes of the work, from the configuration alone.
  virtual Geometry geometry() const = 0;
  virtual std::vector<AttentionUse> attentions() const = 0;
  // Whose tokens a linear layer sees, by the name of its weight: a stream's, those of all streams
  // ("joint"), or those of none ("": conditioning, once for each row of the timestep).
  virtual std::string stream_of(const std::string& parameter) const = 0;
  // Rows that a conditioning layer sees for one sample.
  virtual int64_t conditioning_rows(const std::string& parameter) const { return 1; }

  // The plan of the model's (joint) self-attention for these inputs.
  virtual plan::AttentionPlan attention_plan(const TransformerInputs& inputs,
                                             const ParallelContext& parallel) const = 0;
  // Collective over the SP group. The whole output on every rank, in diffusers' shape.
  // Errors (kBadInput): inputs that are missing or do not fit, options out of range.
  virtual at::Tensor forward(const ParameterSet& parameters, const TransformerInputs& inputs,
                             const ParallelContext& parallel,
                             const ForwardOptions& options) const = 0;
};

// How every forward() runs its blocks: as the options say, its collectives under the block's name.
std::vector<at::Tensor> run_block(const ForwardOptions& options, const std::string& name,
                                  const Block& block, const std::vector<at::Tensor>& inputs);

// The blocks among the modules of a model, in the order of its forward: "transformer_blocks.0", ...
std::vector<std::string> block_names(const Transformer& model);

// What every forward() begins with. Errors (kBadInput): an input that the plan does not name; one
// that it names and that is missing; another number of dimensions than it says; samples that differ
// in number.
void check_inputs(const plan::ModelPlan& plan, const TransformerInputs& inputs);

// From diffusers' config.json. Errors (kBadInput): an unknown _class_name or key, a value that is
// not supported; all problems in one error.
std::unique_ptr<Transformer> make_transformer(const JsonValue& config);

}  // namespace shardproof::models
