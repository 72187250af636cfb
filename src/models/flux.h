#pragma once
#include <memory>

#include "models/transformer.h"

namespace shardproof::models {

// FluxTransformer2DModel (dev with guidance, schnell without) from its config.json. Errors: see
// make_transformer().
std::unique_ptr<Transformer> make_flux(const JsonValue& config);

}  // namespace shardproof::models
