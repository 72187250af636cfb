// Text lengths that the number of ranks divides, for code that only knows equal shards.
#pragma once
#include "models/transformer.h"

namespace shardproof::models {

// The same inputs with the text padded by zero embeddings, masked out, to a multiple of `multiple`.
// The mask is made if there was none. Only for models that take a text mask (QwenImage): in others
// padded text would take part. Errors (kBadInput): a multiple below 1, no text.
TransformerInputs pad_text(TransformerInputs inputs, int64_t multiple);

}  // namespace shardproof::models
