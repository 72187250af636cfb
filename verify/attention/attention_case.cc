#include "verify/attention/attention_case.h"

#include <array>
#include <charconv>
#include <vector>

#include "base/error.h"
#include "verify/dtype.h"

namespace shardproof::verify {
namespace {

using plan::GradientConvention;
using plan::HeadSplit;
using plan::RingMode;
using plan::StreamPlacement;
using plan::TokenSplit;

constexpr std::array<std::pair<MaskKind, const char*>, 5> kMasks = {
    {{MaskKind::kNone, ""},
     {MaskKind::kRagged, "ragged"},
     {MaskKind::kScattered, "scattered"},
     {MaskKind::kOneKey, "onekey"},
     {MaskKind::kEmptyRank, "emptyrank"}}};

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text = text.substr(at + 1);
  }
}

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

// Words with a meaning of their own; false if `word` is none of them.
bool read_flag(std::string_view word, AttentionCase& c) {
  for (const auto& [kind, name] : kMasks) {
    if (word == name && kind != MaskKind::kNone) return c.mask = kind, true;
  }
  if (word == "textrep") return c.text_placement = StreamPlacement::kReplicated, true;
  if (word == "tokenpad") return c.token_split = TokenSplit::kPadded, true;
  if (word == "headuneven") return c.head_split = HeadSplit::kUneven, true;
  if (word == "headpad") return c.head_split = HeadSplit::kPadded, true;
  if (word == "A") return c.convention = GradientConvention::kSliceThenScaleLoss, true;
  if (word == "B") return c.convention = GradientConvention::kSliceTimesSp, true;
  if (word == "C") return c.convention = GradientConvention::kSumThenSlice, true;
  if (word == "strided") return c.strided = true;
  if (word.starts_with('@')) return c.backend = word.substr(1), true;
  return false;
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

void read_mode(std::string_view mode, AttentionCase& c) {
  const bool gathers = mode == "allgather" || mode == "hybrid_allgather";
  c.ring_mode = gathers ? RingMode::kAllGather : RingMode::kRotate;
  if (c.mode() != mode) {
    bad_input("case mode '{}' does not go with mesh {}, which makes it '{}'", mode,
              c.mesh.to_string(), c.mode());
  }
}

}  // namespace

std::string AttentionCase::mode() const {
  const bool gathers = ring_mode == RingMode::kAllGather;
  if (mesh.ring == 1) return mesh.ulysses == 1 ? "local" : "ulysses";
  if (mesh.ulysses == 1) return gathers ? "allgather" : "ring";
  return gathers ? "hybrid_allgather" : "hybrid";
}

std::string AttentionCase::id() const {
  std::string variant = golden.empty() ? fmt::format("b{}.t{}.i{}.h{}.kv{}.d{}", batch, text, image,
                                                     heads, kv_heads, head_dim)
                                       : "default";
  for (const auto& [kind, name] : kMasks) {
    if (golden.empty() && mask == kind && kind != MaskKind::kNone)
      variant += fmt::format(".{}", name);
  }
  if (text_placement == StreamPlacement::kReplicated) variant += ".textrep";
  if (token_split == TokenSplit::kPadded) variant += ".tokenpad";
  if (head_split == HeadSplit::kUneven) variant += ".headuneven";
  if (head_split == HeadSplit::kPadded) variant += ".headpad";
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
  AttentionCase c;
  std::string_view body = id;
  if (const size_t hash = id.rfind('#'); hash != std::string_view::npos) {
    if (!read_number(id.substr(hash), "#", c.seed)) bad_input("case '{}': bad seed", id);
    body = id.substr(0, hash);
  }
  const auto parts = split(body, '/');
  if (parts.size() != 6 || (parts[0] != "attention" && parts[0] != "goldens")) {
    bad_input(
        "case '{}': expected <suite>/<subject>/<mode>/<mesh>/<dtype>/<variant>[#seed] with "
        "suite attention or goldens",
        id);
  }
  c.suite = parts[0];
  c.mesh = comm::MeshShape::parse(parts[3]);
  constexpr int kMostRanks = 512;  // one thread each
  if (c.mesh.world() > kMostRanks) {
    bad_input("case '{}': the simulator runs up to {} ranks", id, kMostRanks);
  }
  c.dtype = parse_dtype(parts[4]);
  read_mode(parts[2], c);
  const bool drawn = c.suite == "attention";
  if (!drawn) c.golden = parts[1];
  if (drawn && parts[1] != "self" && parts[1] != "joint") {
    bad_input("case '{}': expected subject self or joint", id);
  }
  if (drawn && parts[1] == "joint") c.text = 8;
  read_variant(parts[5], c);
  if (drawn && c.subject() != parts[1]) {
    bad_input("case '{}': subject {} with {} text tokens", id, parts[1], c.text);
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
