#include "comm/tag.h"

#include <stdexcept>
#include <thread>

#include "tests/catch.h"

namespace shardproof::comm {

TEST_CASE("without a scope there is no tag", "[tag]") {
  CHECK(current_tag().empty());
  CHECK(current_path().empty());
}

TEST_CASE("scopes nest and end in reverse order", "[tag]") {
  {
    CollectiveScope block("transformer_blocks.3");
    CHECK(current_tag() == "transformer_blocks.3");
    {
      CollectiveScope attention("attn");
      CollectiveScope site("qkv.seq_to_head");
      CHECK(current_tag() == "transformer_blocks.3/attn/qkv.seq_to_head");
      CHECK(current_path() == current_tag());
    }
    CHECK(current_tag() == "transformer_blocks.3");
    CollectiveScope next("mlp");
    CHECK(current_tag() == "transformer_blocks.3/mlp");
  }
  CHECK(current_tag().empty());
}

TEST_CASE("a scope ends with an exception too", "[tag]") {
  CollectiveScope outer("outer");
  try {
    CollectiveScope inner("inner");
    MarkedScope marked("elsewhere", kAdjointMark);
    throw std::runtime_error("");
  } catch (const std::runtime_error&) {
  }
  CHECK(current_tag() == "outer");
}

TEST_CASE("an adjoint carries the forward's tag with a mark", "[tag]") {
  std::string path;
  {
    CollectiveScope block("blocks.0");
    CollectiveScope site("gather");
    path = current_path();
  }
  CollectiveScope unrelated("optimizer");  // what happens to be open when the backward runs
  {
    MarkedScope adjoint(path, kAdjointMark);
    CHECK(current_tag() == "blocks.0/gather'");
    CHECK(current_path() == "blocks.0/gather");
    CollectiveScope inner("inner");  // stands in front of the mark
    CHECK(current_tag() == "blocks.0/gather/inner'");
  }
  CHECK(current_tag() == "optimizer");
}

TEST_CASE("an adjoint inside a recomputation and the reverse", "[tag]") {
  MarkedScope recompute("blocks.1", kRecomputeMark);
  CHECK(current_tag() == "blocks.1~");
  {
    MarkedScope adjoint(current_path(), kAdjointMark);
    CHECK(current_tag() == "blocks.1'");
  }
  CHECK(current_tag() == "blocks.1~");
}

TEST_CASE("every thread has a tag of its own", "[tag]") {
  CollectiveScope here("here");
  std::string at_start, inside;
  std::thread other([&] {
    at_start = current_tag();
    CollectiveScope there("there");
    inside = current_tag();
  });
  other.join();
  CHECK(at_start.empty());
  CHECK(inside == "there");
  CHECK(current_tag() == "here");
}

}  // namespace shardproof::comm
