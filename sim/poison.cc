#include "sim/poison.h"

#include <ATen/ATen.h>

#include <limits>

namespace shardproof::sim {

std::optional<at::Tensor> as_words(const at::Tensor& flat) {
  const auto per_word = 8 / static_cast<int64_t>(flat.element_size());
  if (per_word == 0 || flat.scalar_type() == at::kBool || flat.numel() % per_word != 0 ||
      flat.storage_offset() % per_word != 0) {
    return std::nullopt;
  }
  return flat.view(at::kLong);
}

// Words of 8 bytes, where they fit, fill faster than small elements.
void poison(const at::Tensor& x) {
  if (x.numel() == 0 || x.is_meta()) return;
  const at::Tensor flat = x.view({-1});
  if (const auto words = as_words(flat)) {
    words->fill_(-1);
  } else if (at::isFloatingType(x.scalar_type())) {
    x.fill_(std::numeric_limits<double>::quiet_NaN());
  } else if (x.scalar_type() != at::kBool) {
    x.fill_(-1);
  }
}

}  // namespace shardproof::sim
