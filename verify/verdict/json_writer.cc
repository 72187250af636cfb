#include "verify/verdict/json_writer.h"

#include <cmath>
#include <nlohmann/json.hpp>

namespace shardproof::verify {
namespace {

using Json = nlohmann::ordered_json;

Json number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

Json location(const std::optional<Location>& where) {
  if (!where) return nullptr;
  Json json = Json::object();
  json["rank"] = where->rank >= 0 ? Json(where->rank) : Json(nullptr);
  json["head"] = where->head >= 0 ? Json(where->head) : Json(nullptr);
  json["tokens"] =
      where->token_begin >= 0 ? Json::array({where->token_begin, where->token_end}) : Json(nullptr);
  return json;
}

Json tensor(const TensorResult& result) {
  Json json = Json::object();
  json["name"] = result.name;
  json["shape"] = result.shape;
  json["dtype"] = result.dtype;
  json["status"] = to_string(result.status);
  json["error"] = number(result.error);
  json["reference_error"] = number(result.reference_error);
  json["limit"] = number(result.limit);
  json["ratio"] = number(result.ratio);
  json["ratio_limit"] = number(result.ratio_limit);
  json["cosine"] = number(result.cosine);
  json["max_abs"]["value"] = number(result.max_abs);
  json["max_abs"]["index"] = result.max_abs_index;
  json["where"] = location(result.where);
  return json;
}

Json check(const CheckResult& result) {
  Json json = Json::object();
  json["name"] = result.name;
  json["status"] = to_string(result.status);
  json["detail"] = result.detail;
  return json;
}

Json hypothesis(const Hypothesis& hypothesis) {
  Json json = Json::object();
  json["class"] = hypothesis.kind;
  json["text"] = hypothesis.text;
  json["evidence"] = hypothesis.evidence;
  return json;
}

Json peer(const PeerVerdict& verdict) {
  Json json = Json::object();
  json["test"] = verdict.test;
  json["accepts"] = verdict.accepts;
  json["evidence"] = verdict.evidence;
  return json;
}

template <class T>
Json list(const std::vector<T>& values, Json (*convert)(const T&)) {
  Json json = Json::array();
  for (const T& value : values) json.push_back(convert(value));
  return json;
}

Json case_result(const CaseResult& result) {
  Json json = Json::object();
  json["id"] = result.id;
  json["status"] = to_string(result.status);
  json["seconds"] = number(result.seconds);
  json["reason"] = result.reason;
  json["tensors"] = list(result.tensors, tensor);
  json["checks"] = list(result.checks, check);
  json["first_wrong"] = result.first_wrong;
  json["hypotheses"] = list(result.hypotheses, hypothesis);
  if (!result.peers.empty()) json["peers"] = list(result.peers, peer);
  json["replay"] = result.replay;
  return json;
}

Json counts(const Verdict::Counts& counts) {
  Json json = Json::object();
  json["pass"] = counts.pass;
  json["fail"] = counts.fail;
  json["skip"] = counts.skip;
  json["error"] = counts.error;
  return json;
}

}  // namespace

std::string to_json(const Verdict& verdict) {
  Json json = Json::object();
  json["format"] = "shardproof-verdict";
  json["version"] = 1;
  json["commit"] = verdict.commit;
  json["command"] = verdict.command;
  json["seed"] = verdict.seed;
  json["machine"] = Json::object();
  for (const auto& [key, value] : verdict.machine) json["machine"][key] = value;
  json["started"] = verdict.started;
  json["seconds"] = number(verdict.seconds);
  json["status"] = to_string(verdict.status());
  json["counts"] = counts(verdict.counts());
  json["cases"] = list(verdict.cases, case_result);
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace shardproof::verify
