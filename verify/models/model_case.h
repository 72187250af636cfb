// One check of a whole transformer as a value, and its id.
//
//   models/qwenimage/hybrid/dp1.ring2.ulysses2/fp64/b2.t7.g1x4x6.l2.h4.d16.ragged.tokenpad#17
//
// Subjects: qwenimage, qwenimage_edit (zero_cond_t, a target and a condition image), flux, sd3,
// wan; of goldens the golden's name. Words of the variant, in any order; what is not said has the
// subject's default.
#pragma once
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/parallel.h"
#include "verify/attention/attention_case.h"

namespace shardproof::verify {

// Of cases with `drop`: many elements of small tensors are dropped, most are left.
inline constexpr double kDropProbability = 0.2;

struct ModelCase {
  std::string suite = "models";
  std::string subject = "qwenimage";
  comm::MeshShape mesh;
  c10::ScalarType dtype = c10::ScalarType::Double;
  int64_t batch = 2;                     // b<n>; per data-parallel replica
  int64_t text = 8;                      // t<n>
  std::array<int64_t, 3> grid{1, 4, 6};  // g<f>x<h>x<w>: frames, rows and columns of image tokens
  int64_t layers = 2;                    // l<n>; Flux: double blocks, and one single block more
  int64_t heads = 4;                     // h<n>
  int64_t head_dim = 16;                 // d<n>
  int64_t ffn = 0;                   // f<n>: width of Wan\'s feed-forward; 0: twice the model\'s
  bool ragged = false;               // ragged: text of another length a sample, masked
  bool guided = false;               // cfg: two passes, positive and negative text
  bool text_aligned = false;         // textalign: text padded to a multiple of sp, masked out
  bool lora = false;                 // lora: adapters are trained, the rest is frozen
  bool recompute = false;            // recompute: activation checkpointing by block
  bool dropout = false;              // drop: of kDropProbability, masks from the seed; no textalign
  bool faithful = false;             // faithful: casts where diffusers casts; 16 bits: always
  models::ParallelOptions parallel;  // textrep tokenpad headuneven headpad A B C @<backend>
  uint64_t seed = 1;

  bool is_golden() const { return suite == "goldens"; }
  std::string mode() const;
  std::string id() const;
  // Errors (kBadInput): what cannot be read, with what was expected.
  static ModelCase parse(std::string_view id);

  int64_t image_tokens() const { return grid[0] * grid[1] * grid[2]; }
  models::DtypePolicy policy() const;
  // Two images a sample; the condition image has one row less.
  bool has_condition() const { return !is_golden() && subject == "qwenimage_edit"; }
  int64_t all_image_tokens() const;
  // The text tokens that the parallel run is given (text_aligned).
  int64_t parallel_text() const;
};

// Subjects that a case can name; words that only some of them take: ragged and textalign need a
// text mask, cfg needs text in the attention's streams or not at all.
const std::vector<std::string>& model_subjects();

}  // namespace shardproof::verify
