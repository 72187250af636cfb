// Training steps under FSDP and sequence parallelism as a value, and its id.
//
//   training/flux/hybrid/dp2.ring1.ulysses2.fsdp4/fp64/b1.t6.g1x4x6.l2.h4.d16.lora.s3.acc3.clip#17
//
// The words of model cases (verify/models/model_case.h), and those below in any order.
#pragma once
#include <string>
#include <string_view>

#include "fsdp/policy.h"
#include "verify/models/model_case.h"

namespace shardproof::verify {

enum class TrainingLoss {
  kMean,        // mean square error
  kMaskedMean,  // the same over a mask, of another number of elements on each replica
  kPerRank      // each SP rank reads other elements of the output: C only
};

struct TrainingCase {
  ModelCase model;           // its batch is a replica's in one micro-batch
  int shards = 1;            // fsdp<n> behind the mesh; fewer than the world: HSDP
  int steps = 2;             // s<n>
  int accumulation = 1;      // acc<n> micro-batches a step
  bool deferred = false;     // defer: gradients are exchanged in the last micro-batch only
  bool clip = false;         // clip: to half of the first norm
  bool sgd = false;          // sgd: with momentum; else AdamW
  bool stop = false;         // stop: behind the first block the graph ends on some replicas, in odd
                             // steps on all
  bool keep = false;         // noreshard: blocks stay whole from forward to backward
  bool no_prefetch = false;  // noprefetch
  bool replicated = false;   // repl: norms and biases stay whole on every rank
  bool offload = false;      // offload: shards and optimizer state on the host
  TrainingLoss loss = TrainingLoss::kMean;  // masked, perrank

  std::string id() const;
  // Errors (kBadInput): what cannot be read; shards that do not divide the world; perrank without
  // convention C.
  static TrainingCase parse(std::string_view id);

  // 16 bits: parameters in the case's dtype, sums, shards and optimizer state in fp32.
  fsdp::Policy policy() const;
  // Of AdamW, which multiplies the rounding errors of gradients near zero by 1/epsilon: with
  // torch's default of 1e-8 those of fp64, about 1e-18, would show as 1e-10 in a step.
  double epsilon() const { return model.dtype == c10::ScalarType::Double ? 1e-5 : 1e-3; }
};

}  // namespace shardproof::verify
