#include "verify/mutants/run_facts.h"

#include <nlohmann/json.hpp>

#include "verify/verdict/html_parts.h"

namespace shardproof::verify {

using Json = nlohmann::ordered_json;

Json report_json(const char* format, const RunFacts& facts, double seconds) {
  Json json = Json::object();
  json["format"] = format;
  json["version"] = 1;
  json["commit"] = facts.commit;
  json["command"] = facts.command;
  json["seed"] = facts.seed;
  json["machine"] = facts.machine;
  json["started"] = facts.started;
  json["seconds"] = seconds;
  return json;
}

std::string dump_report(const Json& json) {
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string facts_html(const RunFacts& facts) {
  std::string out = "<h2>Run</h2>\n<dl>\n" + html_definition("command", facts.command) +
                    html_definition("commit", facts.commit) +
                    html_definition("started", facts.started);
  for (const auto& [name, text] : facts.machine) out += html_definition(name, text);
  return out + "</dl>\n";
}

}  // namespace shardproof::verify
