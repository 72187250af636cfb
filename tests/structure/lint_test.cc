// Rules about the text of the sources, on the project and on samples: a rule must be able to fail.
#include "tests/structure/lint_rules.h"

#include "tests/catch.h"
#include "tests/structure/temp_tree.h"

namespace shardproof::structure {
namespace {

using Rule = std::vector<Finding> (*)(const SourceFile&);

void require_clean(const std::vector<SourceFile>& files, Rule rule) {
  REQUIRE(!files.empty());
  std::vector<Finding> findings;
  for (const SourceFile& file : files) {
    for (const Finding& finding : rule(file)) findings.push_back(finding);
  }
  INFO(to_string(findings));
  REQUIRE(findings.empty());
}

std::vector<SourceFile> sources() { return read_sources(project_root(), {"src", "sim", "verify"}); }

std::vector<SourceFile> headers() {
  std::vector<SourceFile> files = sources();
  std::erase_if(files, [](const SourceFile& file) { return !is_header(file.path); });
  return files;
}

void require_found(Rule rule, const std::string& text, const std::string& name, int line = 1) {
  const std::vector<Finding> findings = rule({"sample.h", text});
  INFO(text << "\n" << to_string(findings));
  REQUIRE(findings.size() == 1);
  REQUIRE(findings[0].rule == name);
  REQUIRE(findings[0].line == line);
}

void require_fine(Rule rule, const std::string& text) {
  const std::vector<Finding> findings = rule({"sample.h", text});
  INFO(text << "\n" << to_string(findings));
  REQUIRE(findings.empty());
}

}  // namespace

TEST_CASE("the sources draw from explicit generators only", "[structure][lint]") {
  require_clean(sources(), check_random);
}
TEST_CASE("no header has a using-directive", "[structure][lint]") {
  require_clean(headers(), check_using_namespace);
}
TEST_CASE("every header has #pragma once", "[structure][lint]") {
  require_clean(headers(), check_pragma_once);
}
TEST_CASE("files and lines are short enough", "[structure][lint]") {
  require_clean(sources(), check_lengths);
}
TEST_CASE("every TODO has an owner", "[structure][lint]") { require_clean(sources(), check_todo); }
TEST_CASE("no file names a path of one machine", "[structure][lint]") {
  require_clean(read_text_files(project_root()), check_machine_paths);
}

TEST_CASE("lint: seeding or asking for the default generator is found", "[structure][lint]") {
  for (const char* bad : {
           "torch::manual_seed(1);",
           "at::manual_seed(seed);",
           "::at::manual_seed(seed);",
           "torch::cuda::manual_seed(1);",
           "torch::cuda::manual_seed_all(1);",
           "auto g = at::detail::getDefaultCPUGenerator();",
           "auto g = at::globalContext().defaultGenerator(device);",
       }) {
    require_found(check_random, bad, "default-generator");
  }
  require_fine(check_random, "generator.manual_seed(1);  // the generator's own seed");
  require_fine(check_random, "// torch::manual_seed(1)\nlog(\"torch::manual_seed(1)\");");
}

TEST_CASE("lint: draws without a generator are found", "[structure][lint]") {
  for (const char* bad : {
           "auto x = at::rand({2, 3});",
           "auto x = torch::randn(sizes, options);",
           "auto x = at::randn(sizes, std::nullopt, options);",
           "auto x = randn({2});",
           "auto x = at::randint(0, 10, {2});",
           "auto x = at::randperm(n);",
           "auto x = at::bernoulli(p);",
           "auto x = at::normal(mean, std);",
           "auto x = at::randn_like(y);",
           "x.normal_();",
           "x->uniform_(0, 1);",
           "x.bernoulli_(0.5);",
           "auto m = x.bernoulli();",
           "auto i = weights.multinomial(1);",
           "x.random_(10);",
           "auto x = at::randn(random_shape(3));",
       }) {
    require_found(check_random, bad, "default-generator");
  }
  require_found(check_random, "int a;\nauto x = at::randn(\n    {f(2), 3},\n    options);",
                "default-generator", 2);
  for (const char* good : {
           "auto x = at::rand({2, 3}, generator);",
           "auto x = at::randn({f(2), 3}, rank.generator(), options);",
           "auto x = at::randperm(n, gen_, options);",
           "x.normal_(0, 1, rng);",
           "auto x = at::randint(0, 9, {1}, random).item();",
           "auto x = at::bernoulli(p, rng.of(rank));",
           "draws.randn(sizes);",
           "std::normal_distribution<double> normal(0, 1);",
           "double normal(double x);",
           "auto f = &at::randn_symint;",
           "my::randn(sizes);",
       }) {
    require_fine(check_random, good);
  }
}

TEST_CASE("lint: library dropout is found", "[structure][lint]") {
  require_found(check_random, "auto y = at::dropout(x, 0.1, true);", "dropout");
  require_found(check_random, "auto y = at::native_dropout(x, 0.1, true);", "dropout");
  require_found(check_random, "torch::nn::Dropout drop(0.1);", "dropout");
  require_found(check_random, "y = torch::nn::functional::dropout(x);", "dropout");
  require_fine(check_random, "auto y = dropout(x, 0.1, rng);");
  require_fine(check_random, "auto y = models::dropout(x, 0.1, rng);");
  require_fine(check_random, "double dropout_p = 0;");
}

TEST_CASE("lint: irreproducible standard generators are found", "[structure][lint]") {
  require_found(check_random, "int i = std::rand();", "std-rand");
  require_found(check_random, "int i = rand();", "std-rand");
  require_found(check_random, "std::srand(1);", "std-rand");
  require_found(check_random, "std::mt19937 engine(std::random_device{}());", "std-rand");
  require_fine(check_random, "std::mt19937 engine(seed);");
  require_fine(check_random, "operand(1); source.rand();");
}

TEST_CASE("lint: an exemption needs its rule and a reason", "[structure][lint]") {
  require_fine(check_random,
               "at::manual_seed(1);  // lint-allow(default-generator): a planted bug");
  require_fine(check_random,
               "// lint-allow(default-generator): a planted bug\nat::manual_seed(1);");
  require_found(check_random,
                "at::manual_seed(1);  // lint-allow(default-generator):", "default-generator");
  require_found(check_random, "at::manual_seed(1);  // lint-allow(dropout): other rule",
                "default-generator");
  require_found(check_random, "// lint-allow(default-generator): too far\n\nat::manual_seed(1);",
                "default-generator", 3);
}

TEST_CASE("lint: using-directives are found", "[structure][lint]") {
  require_found(check_using_namespace, "#pragma once\nusing namespace std;", "using-namespace", 2);
  require_found(check_using_namespace, "void f() { using  namespace fmt::literals; }",
                "using-namespace");
  require_fine(check_using_namespace, "// using namespace std;\nusing std::string;");
  require_fine(check_using_namespace, "namespace fs = std::filesystem;");
}

TEST_CASE("lint: a missing #pragma once is found", "[structure][lint]") {
  require_found(check_pragma_once, "#include <string>\n", "pragma-once", 0);
  require_found(check_pragma_once, "// #pragma once\n", "pragma-once", 0);
  require_fine(check_pragma_once, "// A header.\n#pragma once\n");
}

TEST_CASE("lint: long files and long lines are found", "[structure][lint]") {
  std::string lines;
  for (int i = 0; i < 500; ++i) lines += "x\n";
  require_fine(check_lengths, lines);
  require_found(check_lengths, lines + "x\n", "file-length", 0);
  require_fine(check_lengths, std::string(100, 'x'));
  require_found(check_lengths, "\n" + std::string(101, 'x'), "line-length", 2);
  std::string accents;
  for (int i = 0; i < 100; ++i) accents += "\xc3\xa9";
  require_fine(check_lengths, accents);
}

TEST_CASE("lint: ownerless TODO is found", "[structure][lint]") {
  const std::string todo = "TODO", fixme = "FIXME";
  require_found(check_todo, "// " + todo + ": later", "todo-owner");
  require_found(check_todo, "// " + fixme + " later", "todo-owner");
  require_found(check_todo, "// " + todo + "(): later", "todo-owner");
  require_fine(check_todo, "// " + todo + "(ada): later");
  require_fine(check_todo, "int TODOS;");
}

TEST_CASE("lint: paths of one machine are found", "[structure][lint]") {
  // Put together here, or the rule would find this file.
  const std::string slash = "/", home = slash + "home/", workplace = slash + "work/";
  for (const std::string& bad : {
           "cd " + home + "ada/shardproof",
           workplace + "main",
           "\"" + home + "ada\"",
           "g++ -I" + workplace + "main",
           "PATH=/bin:" + home + "ada/bin",
           "file://" + home + "ada",
           "(" + slash + "Users/ada)",
           slash + "root/.cache",
       }) {
    require_found(check_machine_paths, bad, "machine-path");
  }
  for (const std::string& good : {
           "https://example.com" + home + "page",
           "src" + workplace + "file.cc",
           "${ROOT}" + workplace + "file",
           "." + workplace + "file",
           std::string("/usr/lib/x86_64-linux-gnu"),
           std::string("home and work"),
       }) {
    require_fine(check_machine_paths, good);
  }
}

TEST_CASE("all files of a tree are read, but for hidden and build folders", "[structure]") {
  TempTree tree;
  tree.write("src/a.cc", "a").write("src/b.h", "b").write("src/notes.txt", "c");
  tree.write("docs/d.md", "d").write(".git/e.h", "e").write("build/f.h", "f");
  tree.write("srcs/g.cc", "g").write("data/h.bin", std::string("\0binary", 7));
  REQUIRE(project_files(tree.root()) == std::vector<std::string>{"data/h.bin", "docs/d.md",
                                                                 "src/a.cc", "src/b.h",
                                                                 "src/notes.txt", "srcs/g.cc"});
  std::vector<std::string> read;
  for (const SourceFile& file : read_sources(tree.root(), {"src"})) read.push_back(file.path);
  REQUIRE(read == std::vector<std::string>{"src/a.cc", "src/b.h"});
  REQUIRE(read_text_files(tree.root()).size() == 5);
}

}  // namespace shardproof::structure
