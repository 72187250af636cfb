// The benchmarks of bench_sim_overhead.
#pragma once
#include "bench/options.h"

namespace shardproof::bench {

// attention_whole, attention_sim: the main comparison. attention_ranks, attention_tokens: its
// scaling series.
void register_attention(const Options& options);

// Hand-over of a collective, making and running a world, one verify case.
void register_micro(const Options& options);

}  // namespace shardproof::bench
