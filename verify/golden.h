// Golden folders: inputs and expected results that another implementation computed in float64 or
// better (format: datasets/goldens/README.md). A golden judges this program, so it is itself
// checked in full before use: a damaged one is an error (kBadInput), never a pass or a failure.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace shardproof::verify {

// B batch, S tokens (of queries and keys alike), H heads, D head dim; Hkv divides H. CPU tensors.
struct AttentionGolden {
  std::string name;              // the folder's name
  std::filesystem::path folder;  // absolute
  int64_t batch, tokens, heads, kv_heads, head_dim;
  int64_t text_tokens;      // leading text tokens in joint order, 0 if none
  double scale;             // of the logits
  at::Tensor q, cotangent;  // fp32 [B,S,H,D]; cotangent = d loss / d out
  at::Tensor k, v;          // fp32 [B,S,Hkv,D]
  at::Tensor mask;          // bool [B,S], true = key may be attended to; undefined: all may
  at::Tensor out, dq;       // fp64 [B,S,H,D]
  at::Tensor dk, dv;        // fp64 [B,S,Hkv,D]
  at::Tensor lse;           // fp64 [B,H,S], natural log; -inf where the mask leaves no key
  double loss;              // sum(out * cotangent)
};

// A folder with at least one of case.json, inputs.safetensors and expected.safetensors: one that
// lost a file still counts, so that its loss is reported and not passed over.
bool is_golden_folder(const std::filesystem::path& path);

// The path itself where it is a golden, else its direct subfolders that are, by name.
// Errors: kBadInput where there is none.
std::vector<std::filesystem::path> find_goldens(const std::filesystem::path& path);

// "attention", "model", "sampler" or "grpo". Errors: kBadInput for another kind or a bad case.json.
std::string golden_kind(const std::filesystem::path& folder);

// Errors: one Error of kind kBadInput that lists all problems of the folder: missing or damaged
// files, missing tensors, wrong shapes and dtypes, values that are not finite, a loss that is not
// sum(out * cotangent) to 1e-9 (relative above 1). A folder of another kind has that problem only.
AttentionGolden load_attention_golden(const std::filesystem::path& folder);

}  // namespace shardproof::verify
