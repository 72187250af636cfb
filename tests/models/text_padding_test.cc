// Text padded to lengths that ranks can share.
#include "models/text_padding.h"

#include "tests/catch.h"

#include <ATen/ATen.h>

#include "tests/file_support.h"

namespace shardproof::models {
namespace {

TransformerInputs text(int64_t tokens) {
  TransformerInputs in;
  in.encoder_hidden_states = at::ones({2, tokens, 3}, at::kFloat);
  return in;
}

TEST_CASE("text padding: zeros that the mask leaves out", "[models]") {
  const TransformerInputs padded = pad_text(text(5), 4);
  CHECK(padded.encoder_hidden_states.sizes() == at::IntArrayRef({2, 8, 3}));
  CHECK(padded.encoder_hidden_states.narrow(1, 5, 3).abs().sum().item<double>() == 0);
  REQUIRE(padded.encoder_hidden_states_mask.sizes() == at::IntArrayRef({2, 8}));
  CHECK(padded.encoder_hidden_states_mask.sum().item<int64_t>() == 10);
  CHECK(padded.encoder_hidden_states_mask.narrow(1, 0, 5).all().item<bool>());
}

TEST_CASE("text padding: a mask that was there stays", "[models]") {
  TransformerInputs in = text(5);
  in.encoder_hidden_states_mask = at::ones({2, 5}, at::kBool);
  in.encoder_hidden_states_mask[0][4] = false;
  const at::Tensor mask = pad_text(in, 4).encoder_hidden_states_mask;
  CHECK(mask.sum().item<int64_t>() == 9);
  CHECK(!mask[0][4].item<bool>());
}

TEST_CASE("text padding: what fits is left alone, without a mask", "[models]") {
  const TransformerInputs padded = pad_text(text(8), 4);
  CHECK(padded.encoder_hidden_states.size(1) == 8);
  CHECK(!padded.encoder_hidden_states_mask.defined());
}

TEST_CASE("text padding: mistakes are named", "[models]") {
  using tests::contains;
  CHECK(contains(tests::error_text([] { pad_text(text(5), 0); }), "at least 1, got 0"));
  CHECK(contains(tests::error_text([] { pad_text({}, 4); }), "encoder_hidden_states [B,T,C]"));
}

}  // namespace
}  // namespace shardproof::models
