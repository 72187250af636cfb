// What `shardproof launch` was asked for.
#pragma once
#include <string>
#include <vector>

namespace shardproof::cli {

struct LaunchOptions {
  int ranks = 1;  // on this host
  int nodes = 1;
  int node_rank = 0;
  std::string rendezvous;            // host:port of node 0's store; empty: a free port of this host
  bool share_gpu = false;            // several NCCL ranks on one GPU
  std::vector<std::string> command;  // behind --; a command of this program, or any other
};

// Starts the ranks, prints their output line by line behind their numbers, passes signals on, and
// ends all when one ends badly. Returns the exit code of the first that did, else 0; a rank that a
// signal killed counts as 4. Errors (kBadInput): numbers that make no sense, no command; (kMissing)
// a command that cannot be run.
int run_launch(const LaunchOptions& options);

}  // namespace shardproof::cli
