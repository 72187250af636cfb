// What a model is and what it works on, as plain numbers: enough to count work and memory without
// weights and without tensors.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace shardproof::models {

struct Geometry {
  int64_t layers = 0, heads = 0, head_dim = 0;
  // Latents (frames, rows, columns) that one token holds: the model's own patches, or the packing
  // that the pipeline does before the model.
  std::array<int64_t, 3> patch = {1, 1, 1};
  bool video = false;        // the input has frames
  int64_t usual_text = 512;  // tokens of the pipeline's prompt
  int64_t largest_grid = 0;  // most tokens along a side, 0: any (a position table of fixed size)
  std::string visual_stream = "image";
  int64_t width() const { return heads * head_dim; }
};

// One sample before the VAE and the text encoder.
struct SampleSize {
  int64_t height = 1024, width = 1024;  // pixels
  int64_t frames = 1;
  int64_t text = 512;  // tokens
};

struct StreamTokens {
  std::string name;
  int64_t tokens = 0;
};

// One kind of attention of a model.
struct AttentionUse {
  std::string name;
  int64_t layers = 0;
  std::vector<std::string> queries;  // streams, in joint order
  std::vector<std::string> keys;
  // Keys that every rank holds whole: no plan, no communication.
  bool cross() const { return queries != keys; }
};

// The stream of the first pair whose text `parameter` contains: what models say in stream_of().
inline std::string first_match(const std::string& parameter,
                               const std::vector<std::pair<const char*, const char*>>& streams,
                               const char* otherwise) {
  for (const auto& [part, stream] : streams) {
    if (parameter.find(part) != std::string::npos) return stream;
  }
  return otherwise;
}

}  // namespace shardproof::models
