// The parts of case ids, <suite>/<subject>/<mode>/<mesh>/<dtype>/<variant>[#seed], that all suites
// have in common. See docs/formats.md.
#pragma once
#include <c10/core/ScalarType.h>

#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/mesh_shape.h"
#include "plan/attention_plan.h"

namespace shardproof::verify {

std::vector<std::string_view> split(std::string_view text, char separator);

// `prefix` and a number; false leaves `value` alone.
template <class T>
bool read_number(std::string_view word, std::string_view prefix, T& value) {
  if (!word.starts_with(prefix)) return false;
  const char* begin = word.data() + prefix.size();
  const char* end = word.data() + word.size();
  T parsed{};
  const auto [stop, error] = std::from_chars(begin, end, parsed);
  if (error != std::errc() || stop != end) return false;
  value = parsed;
  return true;
}

struct CaseIdParts {
  std::string suite, subject, mode, variant;
  comm::MeshShape mesh;
  c10::ScalarType dtype = c10::ScalarType::Float;
  uint64_t seed = 1;
};
// Errors (kBadInput): what cannot be read, a suite that is not among `suites`, a world larger than
// the simulator takes.
CaseIdParts parse_case_id(std::string_view id, const std::vector<std::string>& suites);

// "local", "ulysses", "ring", "allgather", "hybrid", "hybrid_allgather".
std::string mode_name(const comm::MeshShape& mesh, plan::RingMode ring_mode);
// The ring mode that `mode` names. Errors (kBadInput): a mode that the mesh does not make.
plan::RingMode parse_mode(std::string_view mode, const comm::MeshShape& mesh);

// Words of a variant that say how work is split. `Choice` has text_placement, token_split,
// head_split, convention and backend. False if the word is none of them.
template <class Choice>
bool read_split_word(std::string_view word, Choice& c) {
  using plan::GradientConvention;
  if (word == "textrep") return c.text_placement = plan::StreamPlacement::kReplicated, true;
  if (word == "tokenpad") return c.token_split = plan::TokenSplit::kPadded, true;
  if (word == "headuneven") return c.head_split = plan::HeadSplit::kUneven, true;
  if (word == "headpad") return c.head_split = plan::HeadSplit::kPadded, true;
  if (word == "A") return c.convention = GradientConvention::kSliceThenScaleLoss, true;
  if (word == "B") return c.convention = GradientConvention::kSliceTimesSp, true;
  if (word == "C") return c.convention = GradientConvention::kSumThenSlice, true;
  if (word.starts_with('@')) return c.backend = word.substr(1), true;
  return false;
}

// The same words, each with a dot in front; what has its default is left out.
template <class Choice>
std::string split_words(const Choice& c) {
  std::string words;
  if (c.text_placement == plan::StreamPlacement::kReplicated) words += ".textrep";
  if (c.token_split == plan::TokenSplit::kPadded) words += ".tokenpad";
  if (c.head_split == plan::HeadSplit::kUneven) words += ".headuneven";
  if (c.head_split == plan::HeadSplit::kPadded) words += ".headpad";
  return words;
}

}  // namespace shardproof::verify
