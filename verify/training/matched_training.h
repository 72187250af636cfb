// The same training steps without ranks, in the arithmetic that ranks have: tokens in the same
// chunks, sums in the same order. FSDP and sequence parallelism must equal it bit by bit, in any
// dtype, on the same device and build.
//
// Nothing of src/comm, the plan's builder, FSDP and the step is called. What works element by
// element (AdamW, SGD, the average, clipping) is the product's, on whole parameters: that it is
// right is held by reference_training.h.
#pragma once
#include "verify/training/reference_training.h"

namespace shardproof::verify {

// Names as run_reference_training()'s. Sums over ranks are taken in rank order, as the simulator
// takes them; a transport that sums in another order gives other bits.
TrainingTensors run_matched_training(const TrainingCase& c, const TrainingData& data,
                                     double max_norm, at::Device device);

}  // namespace shardproof::verify
