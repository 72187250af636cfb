// The rooms of the source tree include each other only in the direction of the design.
#include "tests/structure/dependency_rules.h"

#include <algorithm>

#include "tests/catch.h"
#include "tests/structure/temp_tree.h"

namespace shardproof::structure {
namespace {

const std::vector<std::string> kFolders = {"src", "sim", "verify", "bench"};

std::vector<Finding> check(const TempTree& tree) {
  return check_dependencies(read_sources(tree.root(), kFolders), project_rooms());
}

// A small tree in which everything is as it should be.
void write_good_tree(TempTree& tree) {
  tree.write("src/base/error.h", "#pragma once\n#include <string>\n")
      .write("src/base/tensors.h", "#include <ATen/ATen.h>\n#include \"base/error.h\"\n")
      .write("src/comm/mesh.h", "#include \"base/error.h\"\n")
      .write("src/comm/mesh.cc", "#include \"comm/mesh.h\"\n#include \"mesh.h\"\n")
      .write("sim/engine/clock.h", "#include \"base/error.h\"\n")
      .write("sim/world.h", "#include \"comm/mesh.h\"\n#include \"sim/engine/clock.h\"\n")
      .write("verify/verdict/verdict.h", "#include \"base/error.h\"\n")
      .write("verify/suites/attention.cc",
             "#include \"sim/world.h\"\n#include \"verify/verdict/verdict.h\"\n")
      .write("bench/step.cc", "#include \"comm/mesh.h\"\n")
      .write("src/cli/main.cc", "#include \"verify/verdict/verdict.h\"\n");
}

void require_one(const std::vector<Finding>& findings, const std::string& file, int line,
                 const std::string& rule) {
  INFO(to_string(findings));
  REQUIRE(findings.size() == 1);
  REQUIRE(findings[0].file == file);
  REQUIRE(findings[0].line == line);
  REQUIRE(findings[0].rule == rule);
}

}  // namespace

TEST_CASE("the project's includes follow the room graph", "[structure]") {
  const std::vector<SourceFile> files = read_sources(project_root(), kFolders);
  REQUIRE(!files.empty());
  const std::string findings = to_string(check_dependencies(files, project_rooms()));
  INFO(findings);
  REQUIRE(findings.empty());
}

TEST_CASE("the table of rooms is itself without a cycle and knows its own names", "[structure]") {
  const RoomRules rules = project_rooms();
  std::set<std::string> placed;  // rooms whose dependencies are all placed
  for (std::size_t round = 0; round < rules.allowed.size(); ++round) {
    for (const auto& [room, targets] : rules.allowed) {
      const bool ready =
          std::all_of(targets.begin(), targets.end(),
                      [&](const std::string& target) { return placed.contains(target); });
      if (ready) placed.insert(room);
    }
  }
  REQUIRE(placed.size() == rules.allowed.size());
  for (const std::string& room : rules.torch_free) REQUIRE(rules.allowed.contains(room));
}

TEST_CASE("a good tree has no findings", "[structure]") {
  TempTree tree;
  write_good_tree(tree);
  const std::string findings = to_string(check(tree));
  INFO(findings);
  REQUIRE(findings.empty());
}

TEST_CASE("an upward include is found", "[structure]") {
  TempTree tree;
  write_good_tree(tree);
  SECTION("to a higher room of src") {
    tree.write("src/base/bad.cc", "// first line\n#include \"comm/mesh.h\"\n");
    require_one(check(tree), "src/base/bad.cc", 2, "room-edge");
  }
  SECTION("from the product to the simulator") {
    tree.write("src/comm/bad.cc", "  #  include \"sim/world.h\"\n");
    require_one(check(tree), "src/comm/bad.cc", 1, "room-edge");
  }
  SECTION("from the verifier to the command line") {
    tree.write("src/cli/options.h", "").write("verify/bad.cc", "#include \"cli/options.h\"\n");
    require_one(check(tree), "verify/bad.cc", 1, "room-edge");
  }
  SECTION("to a kernel from a room that has no business with it") {
    tree.write("src/kernels/pack.h", "")
        .write("src/attention/ulysses.cc", "#include \"kernels/pack.h\"\n")
        .write("src/fsdp/bad.cc", "#include \"kernels/pack.h\"\n");
    require_one(check(tree), "src/fsdp/bad.cc", 1, "room-edge");
  }
  SECTION("by a path that goes up and down again") {
    tree.write("src/base/bad.cc", "#include \"../comm/mesh.h\"\n");
    require_one(check(tree), "src/base/bad.cc", 1, "room-edge");
  }
  SECTION("with angle brackets") {
    tree.write("src/base/bad.cc", "#include <comm/mesh.h>\n");
    require_one(check(tree), "src/base/bad.cc", 1, "room-edge");
  }
  SECTION("but not in a comment or a string") {
    tree.write("src/base/good.cc",
               "// #include \"comm/mesh.h\"\n/*\n#include \"comm/mesh.h\"\n*/\n"
               "const char* s = R\"(\n#include \"comm/mesh.h\"\n)\";\n");
    REQUIRE(to_string(check(tree)).empty());
  }
}

TEST_CASE("unknown rooms and missing files are found", "[structure]") {
  TempTree tree;
  write_good_tree(tree);
  SECTION("a file in a folder that the table does not know") {
    tree.write("src/helpers/thing.h", "");
    require_one(check(tree), "src/helpers/thing.h", 0, "unknown-room");
  }
  SECTION("a file in no folder") {
    tree.write("src/thing.h", "");
    require_one(check(tree), "src/thing.h", 0, "unknown-room");
  }
  SECTION("an include of a file that is not there") {
    tree.write("src/comm/bad.cc", "#include \"base/gone.h\"\n");
    require_one(check(tree), "src/comm/bad.cc", 1, "missing-include");
  }
}

TEST_CASE("LibTorch in a torch-free room is found", "[structure]") {
  TempTree tree;
  write_good_tree(tree);
  SECTION("included by the file itself") {
    tree.write("sim/engine/bad.cc", "#include <c10/util/Exception.h>\n");
    require_one(check(tree), "sim/engine/bad.cc", 0, "torch-free");
  }
  SECTION("included with quotes") {
    tree.write("verify/oracle/bad.cc", "#include \"torch/torch.h\"\n");
    require_one(check(tree), "verify/oracle/bad.cc", 0, "torch-free");
  }
  SECTION("through an allowed header of base") {
    tree.write("verify/verdict/bad.cc", "#include \"base/tensors.h\"\n");
    const std::vector<Finding> findings = check(tree);
    require_one(findings, "verify/verdict/bad.cc", 0, "torch-free");
    REQUIRE(findings[0].text == "verify/verdict/bad.cc -> src/base/tensors.h -> <ATen/ATen.h>");
  }
}

TEST_CASE("a cycle among headers is found", "[structure]") {
  TempTree tree;
  write_good_tree(tree);
  SECTION("of three files") {
    tree.write("src/plan/a.h", "#include \"plan/b.h\"\n")
        .write("src/plan/b.h", "#include \"plan/c.h\"\n")
        .write("src/plan/c.h", "#include \"plan/a.h\"\n");
    const std::vector<Finding> findings = check(tree);
    require_one(findings, "src/plan/a.h", 0, "include-cycle");
    REQUIRE(findings[0].text == "src/plan/a.h -> src/plan/b.h -> src/plan/c.h -> src/plan/a.h");
  }
  SECTION("of a file with itself") {
    tree.write("src/plan/a.h", "#include \"a.h\"\n");
    require_one(check(tree), "src/plan/a.h", 0, "include-cycle");
  }
  SECTION("but a diamond is none") {
    tree.write("src/plan/top.h", "#include \"plan/l.h\"\n#include \"plan/r.h\"\n")
        .write("src/plan/l.h", "#include \"plan/bottom.h\"\n")
        .write("src/plan/r.h", "#include \"plan/bottom.h\"\n")
        .write("src/plan/bottom.h", "");
    REQUIRE(to_string(check(tree)).empty());
  }
}

TEST_CASE("files belong to the innermost room", "[structure]") {
  const RoomRules rules = project_rooms();
  REQUIRE(room_of("src/base/error.h", rules) == "base");
  REQUIRE(room_of("src/models/flux/block.h", rules) == "models");
  REQUIRE(room_of("sim/engine/clock.h", rules) == "sim/engine");
  REQUIRE(room_of("sim/meta/shapes.h", rules) == "sim");
  REQUIRE(room_of("sim/world.h", rules) == "sim");
  REQUIRE(room_of("verify/verdict/verdict.h", rules) == "verify/verdict");
  REQUIRE(room_of("verify/cases/attention.h", rules) == "verify");
  REQUIRE(room_of("tests/catch.h", rules).empty());
}

TEST_CASE("comments and strings are told from code", "[structure]") {
  REQUIRE(blank_comments("a // b\nc /* d\n e */ f") == "a     \nc     \n      f");
  REQUIRE(blank_comments("\"// no\" '\"' // yes") == "\"// no\" '\"'       ");
  REQUIRE(blank_comments_and_strings("f(\"a\\\"b\", 'c')") == "f(\"    \", ' ')");
  REQUIRE(blank_comments_and_strings("1'000 + x // 'q") == "1'000 + x      ");
  REQUIRE(blank_comments_and_strings("R\"x(a)\"b)x\" + c") == "R\"x(    )x\" + c");
  REQUIRE(blank_comments_and_strings("u8'a' + 0x1'F") == "u8' ' + 0x1'F");
}

}  // namespace shardproof::structure
