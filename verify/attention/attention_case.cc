#include "verify/attention/attention_case.h"

#include <array>

#include "base/error.h"
#include "verify/case_id.h"
#include "verify/dtype.h"

namespace shardproof::verify {
namespace {

using plan::StreamPlacement;

constexpr std::array<std::pair<MaskKind, const char*>, 5> kMasks = {
    {{MaskKind::kNone, ""},
     {MaskKind::kRagged, "ragged"},
     {MaskKind::kScattered, "scattered"},
     {MaskKind::kOneKey, "onekey"},
     {MaskKind::kEmptyRank, "emptyrank"}}};

// Words with a meaning of their own; false if `word` is none of them.
bool read_flag(std::string_view word, AttentionCase& c) {
  for (const auto& [kind, name] : kMasks) {
    if (word == name && kind != MaskKind::kNone) return c.mask = kind, true;
  }
  if (word == "strided") return c.strided = true;
  return read_split_word(word, c);
}

void read_variant(std::string_view variant, AttentionCase& c) {
  bool kv_given = false;
  for (std::string_view word : split(variant, '.')) {
    if (word.empty() || word == "default" || read_flag(word, c)) continue;
    if (read_number(word, "kv", c.kv_heads)) {
      kv_given = true;
    } else if (!read_number(word, "b", c.batch) && !read_number(word, "t", c.text) &&
               !read_number(word, "i", c.image) && !read_number(word, "h", c.heads) &&
               !read_number(word, "d", c.head_dim)) {
      bad_input(
          "case variant '{}': unknown word '{}'; known: b<n> t<n> i<n> h<n> kv<n> d<n> ragged "
          "scattered onekey emptyrank textrep tokenpad headuneven headpad A B C strided "
          "@<backend>",
          variant, word);
    }
  }
  if (!kv_given) c.kv_heads = c.heads;
  if (c.batch < 1 || c.text < 0 || c.image < 0 || c.tokens() < 1 || c.head_dim < 1) {
    bad_input("case variant '{}': expected at least one sample, token and channel", variant);
  }
}

}  // namespace

std::string AttentionCase::mode() const { return mode_name(mesh, ring_mode); }

std::string AttentionCase::id() const {
  std::string variant = golden.empty() ? fmt::format("b{}.t{}.i{}.h{}.kv{}.d{}", batch, text, image,
                                                     heads, kv_heads, head_dim)
                                       : "default";
  for (const auto& [kind, name] : kMasks) {
    if (golden.empty() && mask == kind && kind != MaskKind::kNone)
      variant += fmt::format(".{}", name);
  }
  variant += split_words(*this);
  if (text_placement == StreamPlacement::kReplicated) {
    variant += std::string(".") + plan::to_string(convention);
  }
  if (strided) variant += ".strided";
  if (backend != "auto") variant += ".@" + backend;
  const std::string about = golden.empty() ? subject() : golden;
  const std::string drawn = golden.empty() ? fmt::format("#{}", seed) : std::string();
  return fmt::format("{}/{}/{}/{}/{}/{}{}", suite, about, mode(), mesh.to_string(),
                     dtype_name(dtype), variant, drawn);
}

AttentionCase AttentionCase::parse(std::string_view id) {
  const CaseIdParts parts = parse_case_id(id, {"attention", "goldens"});
  AttentionCase c;
  c.suite = parts.suite;
  c.mesh = parts.mesh;
  c.dtype = parts.dtype;
  c.seed = parts.seed;
  c.ring_mode = parse_mode(parts.mode, parts.mesh);
  const bool drawn = c.suite == "attention";
  if (!drawn) c.golden = parts.subject;
  if (drawn && parts.subject != "self" && parts.subject != "joint") {
    bad_input("case '{}': expected subject self or joint", id);
  }
  if (drawn && parts.subject == "joint") c.text = 8;
  read_variant(parts.variant, c);
  if (drawn && c.subject() != parts.subject) {
    bad_input("case '{}': subject {} with {} text tokens", id, parts.subject, c.text);
  }
  return c;
}

plan::AttentionPlan AttentionCase::make_plan() const {
  plan::AttentionPlanOptions options;
  options.mesh = mesh;
  options.q_heads = heads;
  options.kv_heads = kv_heads;
  if (text > 0) options.streams.push_back({"text", text, text_placement});
  if (image > 0) options.streams.push_back({"image", image, StreamPlacement::kSharded});
  options.token_split = token_split;
  options.head_split = head_split;
  options.ring_mode = ring_mode;
  options.convention = convention;
  return plan::make_attention_plan(options);
}

bool AttentionCase::is_even() const {
  return text % mesh.sp() == 0 && image % mesh.sp() == 0 && heads % mesh.ulysses == 0 &&
         kv_heads % mesh.ulysses == 0;
}

}  // namespace shardproof::verify
