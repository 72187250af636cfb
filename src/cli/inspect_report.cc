#include "cli/inspect_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace shardproof::cli {
namespace {

using Json = nlohmann::ordered_json;
using models::RankShare;
using models::WorkSharing;
using Rows = std::vector<std::vector<std::string>>;

constexpr size_t kShownRanks = 64;

std::string grouped(int64_t n) {
  return n < 1000 ? std::to_string(n) : fmt::format("{},{:03}", grouped(n / 1000), n % 1000);
}

std::string scaled(double n, const char* unit) {
  constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T", "P", "E", "Z"};
  size_t i = 0;
  for (; n >= 1000 && i + 1 < std::size(kPrefixes); ++i) n /= 1000;
  return fmt::format("{:.4g} {}{}", n, kPrefixes[i], unit);
}

// Columns as wide as their widest cell; the first is left-aligned, the others are numbers.
std::string table(const Rows& rows) {
  std::vector<size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line = fmt::format("{:<{}}", row[0], widths[0]);
    for (size_t c = 1; c < row.size(); ++c) line += fmt::format("  {:>{}}", row[c], widths[c]);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string input_line(const Inspection& i) {
  std::string text = fmt::format("{}x{}", i.size.height, i.size.width);
  if (i.model->geometry().video) text += fmt::format(", {} frames", i.size.frames);
  text += ":";
  for (const models::StreamTokens& s : i.sharing.work.streams) {
    text += fmt::format(" {} {},", grouped(s.tokens), s.name);
  }
  text.back() = ' ';
  text += fmt::format("tokens, {} sample{}", i.sharing.work.samples,
                      i.sharing.work.samples == 1 ? "" : "s");
  return i.mesh.dp > 1 ? text + fmt::format(" for each of {} replicas", i.mesh.dp) : text;
}

std::string summary(const Inspection& i) {
  const models::Geometry g = i.model->geometry();
  const auto n = static_cast<double>(i.parameters);
  std::string weights = "none here";
  if (i.weight_files > 0) {
    weights = fmt::format("{} safetensors file{}, {} bytes", i.weight_files,
                          i.weight_files == 1 ? "" : "s", grouped(i.weight_bytes));
  }
  return fmt::format("model       {}\n", i.model->class_name()) +
         fmt::format("blocks      {}, {} heads x {}, width {}\n", g.layers, g.heads, g.head_dim,
                     g.width()) +
         fmt::format("parameters  {}, bf16 {}, fp32 {}\n", grouped(i.parameters),
                     scaled(2 * n, "B"), scaled(4 * n, "B")) +
         fmt::format("weights     {}\n", weights) + fmt::format("input       {}\n", input_line(i));
}

std::string work_table(const models::Workload& work) {
  const double all = work.forward_flops();
  Rows rows = {{"work", "FLOPs", "share"}};
  for (const models::WorkPart& part : work.forward) {
    rows.push_back(
        {part.name, scaled(part.flops, ""), fmt::format("{:.1f} %", 100 * part.flops / all)});
  }
  rows.push_back({"forward", scaled(all, ""), "100.0 %"});
  rows.push_back({"training step", scaled(work.step_flops(false), ""), ""});
  rows.push_back({"with recomputation", scaled(work.step_flops(true), ""), ""});
  return table(rows);
}

// Of all ranks, sent in one layer.
models::AttentionTraffic most_sent(const WorkSharing& s) {
  models::AttentionTraffic most;
  for (const RankShare& rank : s.ranks) {
    most.forward = std::max(most.forward, rank.traffic.forward);
    most.backward = std::max(most.backward, rank.traffic.backward);
  }
  return most;
}

std::string rank_table(const Inspection& i) {
  const WorkSharing& s = i.sharing;
  Rows rows = {{"SP rank", "ring", "ulysses"}};
  for (const plan::StreamPlan& stream : s.plan.streams) rows[0].push_back(stream.name);
  rows[0].insert(rows[0].end(), {"pad rows", "heads", "padded heads", "work"});
  for (size_t r = 0; r < std::min(s.ranks.size(), kShownRanks); ++r) {
    const RankShare& rank = s.ranks[r];
    const int n = static_cast<int>(r);
    std::vector<std::string> row = {std::to_string(r), std::to_string(n / i.mesh.ulysses),
                                    std::to_string(n % i.mesh.ulysses)};
    for (const int64_t tokens : rank.tokens) row.push_back(std::to_string(tokens));
    const double share = rank.flops / s.total();
    row.insert(
        row.end(),
        {std::to_string(s.pad_rows(n)), fmt::format("[{},{})", rank.heads.begin, rank.heads.end),
         std::to_string(s.padded_heads(n)), fmt::format("{:.2f} %", 100 * share)});
    rows.push_back(row);
  }
  std::string text = table(rows);
  if (s.ranks.size() > kShownRanks) {
    text += fmt::format("and {} more ranks (all are in --json)\n", s.ranks.size() - kShownRanks);
  }
  return text;
}

std::string sharing(const Inspection& i) {
  const WorkSharing& s = i.sharing;
  const models::AttentionTraffic sent = most_sent(s);
  std::string text = fmt::format(
      "attention on {}: tokens {}, heads {}, ring {}, text {}\n", i.mesh.to_string(),
      to_string(i.options.token_split), to_string(i.options.head_split),
      to_string(i.options.ring_mode),
      i.options.text_placement == plan::StreamPlacement::kSharded ? "sharded" : "replicated");
  text += rank_table(i);
  text += fmt::format(
      "all ranks together: {:.4f} of the forward; the slowest: {:.4f} of the mean\n"
      "a rank sends in each of {} attentions (bf16): at most {} forward, {} backward\n",
      s.total() / s.work.forward_flops(), s.slowest() / s.mean(), s.layers,
      scaled(static_cast<double>(sent.forward), "B"),
      scaled(static_cast<double>(sent.backward), "B"));
  for (const std::string& warning : s.warnings) text += "WARNING " + warning + "\n";
  return text;
}

Json json_model(const Inspection& i) {
  const models::Geometry g = i.model->geometry();
  return {{"class", i.model->class_name()},
          {"blocks", g.layers},
          {"heads", g.heads},
          {"head_dim", g.head_dim},
          {"width", g.width()},
          {"parameters", i.parameters},
          {"bytes", {{"bf16", 2 * i.parameters}, {"fp32", 4 * i.parameters}}},
          {"weights", {{"files", i.weight_files}, {"bytes", i.weight_bytes}}}};
}

Json json_input(const Inspection& i) {
  Json tokens = Json::object();
  for (const models::StreamTokens& s : i.sharing.work.streams) tokens[s.name] = s.tokens;
  return {{"height", i.size.height},
          {"width", i.size.width},
          {"frames", i.size.frames},
          {"samples", i.sharing.work.samples},
          {"tokens", tokens}};
}

Json json_flops(const models::Workload& work) {
  Json parts = Json::object();
  for (const models::WorkPart& part : work.forward) parts[part.name] = part.flops;
  return {{"parts", parts},
          {"forward", work.forward_flops()},
          {"training_step", work.step_flops(false)},
          {"training_step_with_recomputation", work.step_flops(true)}};
}

Json json_rules(const plan::ModelPlan& plan) {
  Json rules = Json::array();
  for (const plan::TensorRule& rule : plan) {
    const bool whole = rule.use == plan::TensorUse::kWhole;
    const bool split = rule.use == plan::TensorUse::kSplit;
    rules.push_back({{"tensor", rule.tensor},
                     {"module", rule.module},
                     {"use", whole   ? "whole"
                             : split ? "split"
                                     : "gather"},
                     {"stream", rule.stream},
                     {"dim", whole ? Json() : Json(rule.dim)},
                     {"optional", rule.optional}});
  }
  return rules;
}

Json json_ranks(const Inspection& i) {
  const WorkSharing& s = i.sharing;
  Json ranks = Json::array();
  for (size_t r = 0; r < s.ranks.size(); ++r) {
    const RankShare& rank = s.ranks[r];
    const int n = static_cast<int>(r);
    Json tokens = Json::object();
    for (size_t k = 0; k < rank.tokens.size(); ++k) {
      tokens[s.plan.streams[k].name] = rank.tokens[k];
    }
    ranks.push_back(
        {{"rank", n},
         {"ring", n / i.mesh.ulysses},
         {"ulysses", n % i.mesh.ulysses},
         {"tokens", tokens},
         {"pad_rows", s.pad_rows(n)},
         {"heads", {rank.heads.begin, rank.heads.end}},
         {"padded_heads", s.padded_heads(n)},
         {"flops", rank.flops},
         {"sent", {{"forward", rank.traffic.forward}, {"backward", rank.traffic.backward}}}});
  }
  return ranks;
}

}  // namespace

std::string to_text(const Inspection& i) {
  return summary(i) + "\n" + work_table(i.sharing.work) + "\n" +
         plan::to_table(i.model->sharding_plan()) + "\n" + sharing(i);
}

std::string to_json(const Inspection& i) {
  const Json document = {
      {"format", "shardproof-inspect"},
      {"version", 1},
      {"path", i.path},
      {"model", json_model(i)},
      {"input", json_input(i)},
      {"flops", json_flops(i.sharing.work)},
      {"sharding_plan", json_rules(i.model->sharding_plan())},
      {"mesh", i.mesh.to_string()},
      {"token_split", to_string(i.options.token_split)},
      {"head_split", to_string(i.options.head_split)},
      {"ring_mode", to_string(i.options.ring_mode)},
      {"text_placement",
       i.options.text_placement == plan::StreamPlacement::kSharded ? "sharded" : "replicated"},
      {"attentions", i.sharing.layers},
      {"ranks", json_ranks(i)},
      {"total_of_forward", i.sharing.total() / i.sharing.work.forward_flops()},
      {"slowest_of_mean", i.sharing.slowest() / i.sharing.mean()},
      {"warnings", i.sharing.warnings}};
  return document.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace shardproof::cli
