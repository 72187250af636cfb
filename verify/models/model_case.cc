#include "verify/models/model_case.h"

#include <algorithm>

#include "base/error.h"
#include "verify/case_id.h"
#include "verify/dtype.h"

namespace shardproof::verify {
namespace {

struct Flag {
  const char* word;
  bool ModelCase::*value;
};
constexpr Flag kFlags[] = {
    {"ragged", &ModelCase::ragged},          {"cfg", &ModelCase::guided},
    {"textalign", &ModelCase::text_aligned}, {"lora", &ModelCase::lora},
    {"recompute", &ModelCase::recompute},    {"drop", &ModelCase::dropout},
    {"faithful", &ModelCase::faithful},
};

bool read_grid(std::string_view word, std::array<int64_t, 3>& grid) {
  if (!word.starts_with('g')) return false;
  const auto sizes = split(word.substr(1), 'x');
  std::array<int64_t, 3> read{};
  if (sizes.size() != 3) return false;
  for (size_t i = 0; i < 3; ++i) {
    if (!read_number(sizes[i], "", read[i])) return false;
  }
  grid = read;
  return true;
}

void read_variant(std::string_view variant, ModelCase& c) {
  for (std::string_view word : split(variant, '.')) {
    if (word.empty() || word == "default" || read_split_word(word, c.parallel)) continue;
    const auto flag = std::find_if(std::begin(kFlags), std::end(kFlags),
                                   [&](const Flag& f) { return word == f.word; });
    if (flag != std::end(kFlags)) {
      c.*(flag->value) = true;
    } else if (!read_number(word, "b", c.batch) && !read_number(word, "t", c.text) &&
               !read_grid(word, c.grid) && !read_number(word, "l", c.layers) &&
               !read_number(word, "h", c.heads) && !read_number(word, "d", c.head_dim) &&
               !read_number(word, "f", c.ffn)) {
      bad_input(
          "case variant '{}': unknown word '{}'; known: b<n> t<n> g<f>x<h>x<w> l<n> h<n> d<n> f<n> "
          "ragged cfg textalign lora recompute drop faithful textrep tokenpad headuneven headpad "
          "A B C @<backend>",
          variant, word);
    }
  }
}

void check(const ModelCase& c) {
  if (c.batch < 1 || c.text < 1 || c.image_tokens() < 1 ||
      *std::min_element(c.grid.begin(), c.grid.end()) < 1 || c.layers < 1 || c.heads < 1 ||
      c.head_dim < 1) {
    bad_input("case '{}': expected at least one sample, token, layer, head and channel", c.id());
  }
  if (c.dropout && (c.is_golden() || c.text_aligned)) {
    bad_input("case '{}': drop: {}", c.id(),
              c.is_golden() ? "diffusers computed the goldens without dropout"
                            : "masks are drawn for the text as it is, which textalign lengthens");
  }
  if (c.is_golden()) return;
  const bool masks = c.subject.starts_with("qwenimage");
  if (!masks && (c.ragged || c.text_aligned)) {
    bad_input("case '{}': only qwenimage takes a text mask (ragged, textalign)", c.id());
  }
  if (c.subject != "wan" && c.grid[0] != 1) {
    bad_input("case '{}': only wan has frames; expected g1x<h>x<w>", c.id());
  }
  if (c.subject == "qwenimage_edit" && c.grid[1] < 2) {
    bad_input("case '{}': the condition image has one row less than the target", c.id());
  }
  if (c.ffn < 0 || (c.ffn > 0 && c.subject != "wan")) {
    bad_input("case '{}': f<n> is the width of wan's feed-forward", c.id());
  }
  if (c.head_dim % 4 != 0 || c.head_dim < 8) {
    bad_input("case '{}': head dimensions are multiples of 4, at least 8", c.id());
  }
}

}  // namespace

const std::vector<std::string>& model_subjects() {
  static const std::vector<std::string> all = {"qwenimage", "qwenimage_edit", "flux", "sd3", "wan"};
  return all;
}

std::string ModelCase::mode() const { return mode_name(mesh, parallel.ring_mode); }

models::DtypePolicy ModelCase::policy() const {
  // In 16 bits the argument of the timestep's sinusoid (up to 1000) would have no digits left.
  const bool low = dtype == c10::ScalarType::BFloat16 || dtype == c10::ScalarType::Half;
  return low || faithful ? models::DtypePolicy::kFaithful : models::DtypePolicy::kReference;
}

int64_t ModelCase::all_image_tokens() const {
  return image_tokens() + (has_condition() ? (grid[1] - 1) * grid[2] : 0);
}

int64_t ModelCase::parallel_text() const {
  if (!text_aligned) return text;
  return (text + mesh.sp() - 1) / mesh.sp() * mesh.sp();
}

std::string ModelCase::id() const {
  std::string variant = is_golden()
                            ? "default"
                            : fmt::format("b{}.t{}.g{}.l{}.h{}.d{}", batch, text,
                                          fmt::format("{}x{}x{}", grid[0], grid[1], grid[2]),
                                          layers, heads, head_dim);
  if (ffn != 0) variant += fmt::format(".f{}", ffn);
  for (const Flag& flag : kFlags) {
    const bool of_golden = is_golden() && flag.value == &ModelCase::ragged;
    if (this->*(flag.value) && !of_golden) variant += fmt::format(".{}", flag.word);
  }
  variant += split_words(parallel);
  if (parallel.convention != plan::GradientConvention::kSumThenSlice) {
    variant += std::string(".") + plan::to_string(parallel.convention);
  }
  if (parallel.backend != "auto") variant += ".@" + parallel.backend;
  return fmt::format("{}/{}/{}/{}/{}/{}{}", suite, subject, mode(), mesh.to_string(),
                     dtype_name(dtype), variant,
                     is_golden() ? std::string() : fmt::format("#{}", seed));
}

ModelCase ModelCase::parse(std::string_view id) {
  const CaseIdParts parts = parse_case_id(id, {"models", "goldens"});
  ModelCase c;
  c.suite = parts.suite;
  c.subject = parts.subject;
  c.mesh = parts.mesh;
  c.dtype = parts.dtype;
  c.seed = parts.seed;
  c.parallel.ring_mode = parse_mode(parts.mode, parts.mesh);
  const auto& subjects = model_subjects();
  if (!c.is_golden() && std::find(subjects.begin(), subjects.end(), c.subject) == subjects.end()) {
    bad_input("case '{}': unknown model '{}'; known: {}", id, c.subject, fmt::join(subjects, ", "));
  }
  if (c.subject == "wan") c.grid = {2, 3, 4}, c.head_dim = 12;
  read_variant(parts.variant, c);
  check(c);
  return c;
}

}  // namespace shardproof::verify
