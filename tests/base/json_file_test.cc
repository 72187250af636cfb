#include "base/json_file.h"

#include <nlohmann/json.hpp>

#include "tests/file_support.h"

namespace shardproof {
namespace {

using tests::contains;
using tests::error_text;
using tests::TempFolder;
using tests::write_bytes;

std::string parse_error(std::string_view text) {
  return error_text([&] { parse_json(text, "f.json"); });
}

constexpr char kDocument[] =
    R"({"name": "x\u00e9", "count": 3, "ratio": 0.5, "on": true, "none": null,
  "sizes": [5, 4, -4], "mesh": {"dp": 1, "groups": [{"ranks": [0, 1]}, {"ranks": "all"}]},
  "large": 18446744073709551615, "odd \n key": 1})";

TEST_CASE("values are read with their types", "[json_file]") {
  const JsonValue root = parse_json(kDocument, "f.json");
  CHECK(root.at("name").as_string() == "x\u00e9");
  CHECK(root.at("count").as_integer() == 3);
  CHECK(root.at("count").as_number() == 3.0);
  CHECK(root.at("ratio").as_number() == 0.5);
  CHECK(root.at("on").as_bool());
  CHECK(root.at("none").is_null());
  CHECK(root.at("sizes").as_integers() == std::vector<int64_t>{5, 4, -4});
  CHECK(root.at("large").as_number() == Approx(18446744073709551615.0));
  CHECK(root.find("count")->is_number());
  CHECK(root.find("name")->is_string());
  CHECK_FALSE(root.find("missing"));
  const JsonValue groups = root.at("mesh").at("groups");
  CHECK(groups.elements().size() == 2);
  CHECK(groups.elements()[1].at("ranks").path() == "mesh.groups[1].ranks");
  CHECK(groups.source() == "f.json");
  CHECK(root.at("mesh").members()[0].first == "dp");
  CHECK(root.at("mesh").members()[0].second.raw() == 1);
  CHECK(root.path().empty());
}

TEST_CASE("a value outlives the document's other handles", "[json_file]") {
  const auto inner = [] { return parse_json(R"({"a": {"b": [7]}})", "f").at("a").at("b"); }();
  CHECK(inner.elements()[0].as_integer() == 7);
}

TEST_CASE("missing keys and wrong types name file and key path", "[json_file]") {
  const JsonValue root = parse_json(kDocument, "f.json");
  const JsonValue group = root.at("mesh").at("groups").elements()[1];
  CHECK(error_text([&] { root.at("batch"); }) == "f.json: the key \"batch\" is missing");
  CHECK(error_text([&] { group.at("sizes"); }) ==
        "f.json: mesh.groups[1]: the key \"sizes\" is missing");
  CHECK(error_text([&] { group.at("ranks").as_integers(); }) ==
        "f.json: mesh.groups[1].ranks: expected an array, found the string \"all\"");
  CHECK(error_text([&] { root.at("ratio").as_integer(); }) ==
        "f.json: ratio: expected an integer, found 0.5");
  CHECK(contains(error_text([&] { root.at("large").as_integer(); }), "9223372036854775807"));
  CHECK(contains(error_text([&] { root.at("on").as_integer(); }), "found true"));
  CHECK(contains(error_text([&] { root.at("name").as_number(); }), "expected a number"));
  CHECK(contains(error_text([&] { root.at("none").as_string(); }), "found null"));
  CHECK(contains(error_text([&] { root.at("count").as_bool(); }), "true or false, found 3"));
  CHECK(contains(error_text([&] { root.at("sizes").at("x"); }), "expected an object"));
  CHECK(contains(error_text([&] { root.at("sizes").find("x"); }), "expected an object"));
  CHECK(contains(error_text([&] { root.at("sizes").members(); }), "found an array"));
  CHECK(contains(error_text([&] { root.elements(); }), "f.json: expected an array, found an obj"));
  CHECK(contains(error_text([&] { root.at("odd \n key").as_string(); }), "f.json: odd \\n key:"));
}

TEST_CASE("a key that occurs twice is an error, on every level", "[json_file]") {
  CHECK(parse_error(R"({"a": 1, "a": 1})") ==
        "f.json: not valid at byte 12: the key \"a\" occurs twice; keep one of them. Correct the "
        "file or write it anew");
  CHECK(
      contains(parse_error(R"({"x": [0, {"b": {}, "c": 1, "b": 2}]})"), "\"x[1].b\" occurs twice"));
  CHECK(contains(parse_error("{\"a\": 1, \"\\u0061\": 2}"), "occurs twice"));
  CHECK(parse_json(R"({"a": {"a": 1}, "b": {"a": 1}})", "f").at("a").at("a").as_integer() == 1);
}

TEST_CASE("text that is no strict JSON is an error with its byte", "[json_file]") {
  CHECK(contains(parse_error(""), "f.json: not valid at byte 0: parse error"));
  CHECK(contains(parse_error("{\"a\": }"), "at byte 6"));
  CHECK(contains(parse_error("{\"a\": 1"), "at byte 7"));
  CHECK(contains(parse_error("{\"a\": 1,}"), "at byte 8"));
  CHECK(contains(parse_error("{} x"), "at byte 3"));
  for (const char* text : {"{'a': 1}", "// c\n{}", "{\"a\": NaN}", "{\"a\": 01}", "{\"a\": +1}",
                           "nul", "{\"a\" 1}", "[1 2]", "\"\t\"", "{\"a\": 1e999}", "[", "]"}) {
    INFO(text);
    CHECK(contains(parse_error(text), "f.json: not valid at byte "));
  }
  CHECK(contains(parse_error("\"\xff\""), "not valid at byte 1"));
  CHECK(contains(parse_error(std::string_view("{}\0", 3)), "not valid at byte 2"));
}

TEST_CASE("messages stay short and printable whatever the file holds", "[json_file]") {
  const std::string text = parse_error("\"" + std::string(1'000'000, 'x') + "\x1b[2J\xff");
  CHECK(text.size() < 500);
  for (const char c : text) CHECK((c >= 0x20 && c < 0x7f));
  CHECK(json_quoted("a\x1b\"\xff", 10) == "\"a\\u001b\\\"\xef\xbf\xbd\"");
  CHECK(json_quoted(std::string(50, 'x'), 10) == "\"xxxxxxxxxx...\"");
}

TEST_CASE("deep nesting is an error and not a stack overflow", "[json_file]") {
  const auto nested = [](int levels) {
    return std::string(static_cast<size_t>(levels), '[') +
           std::string(static_cast<size_t>(levels), ']');
  };
  parse_json(nested(128), "f");
  CHECK(contains(parse_error(nested(129)), "nested deeper than 128 levels"));
  CHECK(contains(parse_error(nested(1'000'000)), "nested deeper than 128 levels"));
}

TEST_CASE("files: read, missing, a folder, too large", "[json_file]") {
  const TempFolder folder;
  const auto file = folder / "f.json";
  write_bytes(file, R"({"a": 1})");
  CHECK(read_json_file(file).at("a").as_integer() == 1);
  CHECK(read_json_file(file, 8).at("a").as_integer() == 1);
  const std::string large = error_text([&] { read_json_file(file, 7); });
  CHECK(contains(large, file.string()));
  CHECK(contains(large, "larger than the limit of 7 bytes"));
  CHECK(contains(error_text([&] { read_json_file(folder / "g.json"); }), "No such file"));
  CHECK(contains(error_text([&] { read_json_file(folder.path()); }), "Is a directory"));
  write_bytes(file, "{\"a\": ");
  CHECK(
      contains(error_text([&] { read_json_file(file); }), file.string() + ": not valid at byte 6"));
}

}  // namespace
}  // namespace shardproof
