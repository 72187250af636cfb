#include "verify/verdict/html_parts.h"

#include <fmt/format.h>

#include "verify/verdict/text.h"

namespace shardproof::verify {
namespace {

// Colours follow the reader's preference; a status is also written out, never told by colour alone.
constexpr const char* kPageStyle = R"(
:root { color-scheme: light dark; --text: #1c1e21; --dim: #5f6670; --page: #ffffff;
  --panel: #f4f5f7; --line: #d6d9de; --good: #1a7f37; --bad: #c4262e; --warn: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e6ea; --dim: #9aa2ad; --page: #15171a;
  --panel: #1f2226; --line: #3a3f46; --good: #4ac26b; --bad: #ff7b72; --warn: #d4a72c; } }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; background: var(--page);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.25rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.pass { color: var(--good); } .fail { color: var(--bad); } .error, .skip { color: var(--warn); }
table { border-collapse: collapse; font-size: 0.9rem; } .scroll { overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: 0.2rem 0.7rem; text-align: left; }
th { color: var(--dim); font-weight: 600; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td:last-child { min-width: 20rem; overflow-wrap: anywhere; }
details { background: var(--panel); border: 1px solid var(--line); border-radius: 6px;
  margin: 0.4rem 0; padding: 0.4rem 0.8rem; }
summary { cursor: pointer; overflow-wrap: anywhere; }
code { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1rem; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
svg { width: 100%; max-width: 46rem; height: auto; } rect.within { fill: var(--good); }
rect.beyond { fill: var(--bad); } .axis { stroke: var(--dim); fill: none; }
.tick { fill: var(--dim); font-size: 9px; text-anchor: middle; }
)";

}  // namespace

std::string html_head(const std::string& title, const std::string& style) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{}</title>\n<style>{}{}</style>\n</head>\n<body>\n",
      escape_text(title), kPageStyle, style);
}

std::string html_cell(const std::string& text) { return "<td>" + escape_text(text) + "</td>"; }

std::string html_number(const std::string& text) {
  return "<td class=\"number\">" + escape_text(text) + "</td>";
}

std::string html_definition(const std::string& term, const std::string& text) {
  // Several lines are a table of ranks, whose columns need a fixed pitch.
  const bool table = text.find('\n') != std::string::npos;
  const std::string shown = escape_text(text);
  return "<dt>" + escape_text(term) + "</dt><dd>" + (table ? "<code>" + shown + "</code>" : shown) +
         "</dd>\n";
}

}  // namespace shardproof::verify
