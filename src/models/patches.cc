#include "models/patches.h"

#include <ATen/ATen.h>

#include "base/error.h"

namespace shardproof::models {

at::Tensor to_patches(const at::Tensor& x, const Patch& patch) {
  const auto [pf, ph, pw] = patch;
  if (x.dim() != 5 || x.size(2) % pf != 0 || x.size(3) % ph != 0 || x.size(4) % pw != 0) {
    bad_input("latents of shape {} cannot be cut into patches of ({},{},{})", c10::str(x.sizes()),
              pf, ph, pw);
  }
  const int64_t f = x.size(2) / pf, h = x.size(3) / ph, w = x.size(4) / pw;
  return x.reshape({x.size(0), x.size(1), f, pf, h, ph, w, pw})
      .permute({0, 2, 4, 6, 1, 3, 5, 7})
      .reshape({x.size(0), f * h * w, -1});
}

at::Tensor from_patches(const at::Tensor& x, const Patch& grid, const Patch& patch) {
  const auto [f, h, w] = grid;
  const auto [pf, ph, pw] = patch;
  return x.reshape({x.size(0), f, h, w, pf, ph, pw, -1})
      .permute({0, 7, 1, 4, 2, 5, 3, 6})
      .reshape({x.size(0), -1, f * pf, h * ph, w * pw});
}

}  // namespace shardproof::models
