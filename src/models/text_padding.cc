#include "models/text_padding.h"

#include <ATen/ATen.h>

#include "base/error.h"

namespace shardproof::models {

TransformerInputs pad_text(TransformerInputs inputs, int64_t multiple) {
  const at::Tensor& text = inputs.encoder_hidden_states;
  if (multiple < 1) bad_input("pad_text: expected a multiple of at least 1, got {}", multiple);
  if (!text.defined() || text.dim() != 3) {
    bad_input("pad_text: expected encoder_hidden_states [B,T,C]");
  }
  const int64_t pads = (multiple - text.size(1) % multiple) % multiple;
  if (pads == 0) return inputs;
  at::Tensor& mask = inputs.encoder_hidden_states_mask;
  if (!mask.defined()) {
    mask = at::ones({text.size(0), text.size(1)}, text.options().dtype(at::kBool));
  }
  mask = at::cat({mask, at::zeros({mask.size(0), pads}, mask.options())}, 1);
  inputs.encoder_hidden_states =
      at::cat({text, at::zeros({text.size(0), pads, text.size(2)}, text.options())}, 1);
  return inputs;
}

}  // namespace shardproof::models
