// Uses what a library user would: the attention oracle and the error type. One query against two
// equal keys attends to both by half, so out is the mean of v and lse = x + log 2.
#include <cmath>
#include <cstdio>
#include <vector>

#include "base/error.h"
#include "verify/oracle/attention_oracle.h"

namespace {

bool oracle_is_right() {
  const std::vector<double> q = {1, 2}, k = {3, 4, 3, 4}, v = {1, 10, 3, 30};
  shardproof::verify::AttentionProblem problem;
  problem.batch = 1;
  problem.q_tokens = 1;
  problem.kv_tokens = 2;
  problem.q_heads = 1;
  problem.kv_heads = 1;
  problem.head_dim = 2;
  problem.scale = 0.5;
  problem.q = q.data();
  problem.k = k.data();
  problem.v = v.data();
  const auto reference = shardproof::verify::attention_oracle(problem);
  const double lse = 0.5 * (1 * 3 + 2 * 4) + std::log(2.0);
  std::printf("out = %g %g (expected 2 20), lse = %.15g (expected %.15g)\n", reference.out[0],
              reference.out[1], reference.lse[0], lse);
  return std::abs(reference.out[0] - 2) < 1e-12 && std::abs(reference.out[1] - 20) < 1e-12 &&
         std::abs(reference.lse[0] - lse) < 1e-12;
}

bool bad_input_is_refused() {
  shardproof::verify::AttentionProblem problem;
  problem.head_dim = -1;
  try {
    shardproof::verify::attention_oracle(problem);
  } catch (const shardproof::Error& error) {
    std::printf("refused as it should be, exit code %d: %s\n", error.exit_code(), error.what());
    return error.kind() == shardproof::ErrorKind::kBadInput;
  }
  std::printf("head_dim = -1 was accepted; expected shardproof::Error\n");
  return false;
}

}  // namespace

int main() { return oracle_is_right() && bad_input_is_refused() ? 0 : 1; }
