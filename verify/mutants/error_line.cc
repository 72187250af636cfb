#include "verify/mutants/error_line.h"

#include <ATen/ATen.h>

#include <array>

#include "base/error.h"
#include "models/transformer.h"
#include "verify/attention/ownership.h"
#include "verify/suites/draw.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

size_t index_of(const StoredCase& stored, const std::string& name) {
  for (size_t i = 0; i < stored.tensors.size(); ++i) {
    if (stored.tensors[i].name() == name) return i;
  }
  internal_error("{} has no {}", stored.result.id, name);
}

// 1 in the rows of one stream that one rank of one replica holds, [B,S,1,1].
Tensor rows_of_a_rank(const AttentionCase& c, Draw& draw) {
  const Ownership ownership = derive_ownership(c);
  const bool shared_text =
      c.text > 0 && c.text_placement == plan::StreamPlacement::kSharded && draw.chance(2);
  const std::vector<TokenHome>& homes = shared_text ? ownership.text : ownership.image;
  const int64_t first = shared_text ? 0 : c.text;
  // The owner of some token: a rank may hold none of a short stream.
  const auto some = draw.between(0, static_cast<int64_t>(homes.size()) - 1);
  const int rank = homes[static_cast<size_t>(some)].sp_rank;
  const int64_t replica = draw.between(0, c.mesh.dp - 1);
  const Tensor mask = at::zeros({c.batch * c.mesh.dp, c.tokens(), 1, 1}, at::kDouble);
  const Tensor own = mask.narrow(0, replica * c.batch, c.batch);
  for (size_t t = 0; t < homes.size(); ++t) {
    if (homes[t].sp_rank == rank) own.select(1, first + static_cast<int64_t>(t)).fill_(1);
  }
  return mask;
}

Tensor one_element(const Tensor& x, int64_t index) {
  const Tensor mask = at::zeros_like(x);
  mask.view(-1)[index] = 1;
  return mask;
}

// 1 where the output is changed; undefined if there is nothing to change.
Tensor part_of_output(const AttentionCase& c, const Tensor& truth, Scope scope) {
  Draw draw(comm::derive_seed(c.seed, static_cast<uint64_t>(scope) + 1));
  if (scope == Scope::kRows) return rows_of_a_rank(c, draw).expand_as(truth);
  if (scope == Scope::kHead) {
    const Tensor mask = at::zeros_like(truth);
    mask.select(2, draw.between(0, c.heads - 1)).fill_(1);
    return mask;
  }
  if (scope == Scope::kLargest) return one_element(truth, truth.abs().argmax().item<int64_t>());
  const Tensor nonzero = truth.view(-1).nonzero();
  if (nonzero.numel() == 0) return {};
  return one_element(truth, nonzero[draw.between(0, nonzero.numel() - 1)].item<int64_t>());
}

bool is_parameter_gradient(const std::string& name) {
  if (!name.ends_with(":grad")) return false;
  const size_t begin = name.rfind('/') + 1;
  return !models::TransformerInputs::is_name(name.substr(begin, name.rfind(':') - begin));
}

}  // namespace

const std::vector<Scope>& all_scopes() {
  static const std::vector<Scope> scopes = {
      Scope::kAllGradients,   Scope::kOneGradient,       Scope::kHead,
      Scope::kRows,           Scope::kLargest,           Scope::kElement,
      Scope::kModelGradients, Scope::kTrainingGradients, Scope::kMatchedGradients};
  return scopes;
}

std::string scope_name(Scope scope) {
  static constexpr std::array kNames = {
      "all_gradients",   "query_gradient",     "one_head",
      "one_ranks_rows",  "largest_element",    "one_element",
      "model_gradients", "training_gradients", "matched_gradients"};
  return kNames[static_cast<size_t>(scope)];
}

std::string scope_text(Scope scope) {
  static constexpr std::array kTexts = {
      "all gradients of attention",      "the query's gradient",
      "one head of the output",          "one rank's rows of the output",
      "largest element of the output",   "one element of the output",
      "all parameter gradients, model",  "all parameter gradients, training",
      "all parameter gradients, matched"};
  return kTexts[static_cast<size_t>(scope)];
}

std::optional<ErrorLine> error_line(const AttentionCase& c, const StoredCase& stored, Scope scope) {
  ErrorLine line;
  if (scope == Scope::kAllGradients || scope == Scope::kOneGradient) {
    for (const char* name : {"q:grad", "k:grad", "v:grad"}) {
      const size_t tensor = index_of(stored, name);
      const StoredTensor& gradient = stored.tensors[tensor];
      // What is left of a gradient that cancels is rounding errors: there is nothing to scale.
      if (gradient.oracle().count_nonzero().item<int64_t>() > 0) {
        line.push_back({tensor, gradient.result()});
      }
      if (scope == Scope::kOneGradient) break;
    }
  } else {
    const size_t tensor = index_of(stored, "output");
    const Tensor truth = stored.tensors[tensor].oracle();
    const Tensor part = part_of_output(c, truth, scope);
    if (part.defined() && (truth * part).count_nonzero().item<int64_t>() > 0) {
      line.push_back({tensor, stored.tensors[tensor].result() * part});
    }
  }
  if (line.empty()) return std::nullopt;
  return line;
}

ErrorLine parameter_gradients(const StoredCase& stored) {
  ErrorLine line;
  for (size_t i = 0; i < stored.tensors.size(); ++i) {
    if (is_parameter_gradient(stored.tensors[i].name())) {
      line.push_back({i, stored.tensors[i].result()});
    }
  }
  return line;
}

}  // namespace shardproof::verify
