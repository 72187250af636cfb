// The global gradient norm over sharded and replicated parameters, and clipping by it.
#pragma once
#include <vector>

#include "comm/communicator.h"
#include "fsdp/trained_tensor.h"

namespace shardproof::fsdp {

// The L2 norm of all gradients together, the same on every rank, to the bit. `shards`: the group
// whose ranks hold each sharded parameter once; replicated ones count once (should copies differ,
// as the mean of their squares). Summed in fp64. `device`: whose
// tensors the group moves (gradients may be on the host). Collective over the group, one
// all-reduce; none where there are no tensors, which must then be so on every rank (shards without
// rows are listed).
double gradient_norm(const std::vector<TrainedTensor>& tensors, const comm::Communicator& shards,
                     at::Device device);

// torch.nn.utils.clip_grad_norm_: gradients times min(1, max_norm / (norm + 1e-6)). Not for norms
// that are not finite: skip the step, which every rank decides alike.
void clip_gradients(const std::vector<TrainedTensor>& tensors, double norm, double max_norm);

}  // namespace shardproof::fsdp
