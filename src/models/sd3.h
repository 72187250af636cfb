#pragma once
#include <memory>

#include "models/transformer.h"

namespace shardproof::models {

// SD3Transformer2DModel (3.5 medium: dual attention) from its config.json. Errors: see
// make_transformer().
std::unique_ptr<Transformer> make_sd3(const JsonValue& config);

}  // namespace shardproof::models
