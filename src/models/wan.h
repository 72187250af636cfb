#pragma once
#include <memory>

#include "models/transformer.h"

namespace shardproof::models {

// WanTransformer3DModel (text to video) from its config.json. Errors: see make_transformer().
std::unique_ptr<Transformer> make_wan(const JsonValue& config);

}  // namespace shardproof::models
