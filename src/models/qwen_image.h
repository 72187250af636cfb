#pragma once
#include <memory>

#include "models/transformer.h"

namespace shardproof::models {

// QwenImageTransformer2DModel from its config.json. Errors: see make_transformer().
std::unique_ptr<Transformer> make_qwen_image(const JsonValue& config);

}  // namespace shardproof::models
