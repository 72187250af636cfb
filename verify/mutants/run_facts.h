// What a report says of the run that it is about.
#pragma once
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace shardproof::verify {

struct RunFacts {
  std::string commit, command, started;
  uint64_t seed = 0;
  std::map<std::string, std::string> machine;
};

// The first keys of a report of `format`, version 1.
nlohmann::ordered_json report_json(const char* format, const RunFacts& facts, double seconds);
std::string dump_report(const nlohmann::ordered_json& json);
// A section of a page.
std::string facts_html(const RunFacts& facts);

}  // namespace shardproof::verify
