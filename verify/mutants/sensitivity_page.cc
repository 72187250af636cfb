// The curves as a page.
#include <fmt/format.h>

#include <cmath>

#include "verify/dtype.h"
#include "verify/mutants/sensitivity_report.h"
#include "verify/verdict/html_parts.h"
#include "verify/verdict/text.h"

namespace shardproof::verify {
namespace {

constexpr const char* kStyle = R"(
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-size: 0.85rem; color: var(--dim); }
polyline { fill: none; stroke-linejoin: round; }
.ours { stroke: var(--good); stroke-width: 2.5; }
.peer { stroke: var(--dim); stroke-width: 1.2; stroke-dasharray: 4 2; }
.grid { stroke: var(--line); fill: none; } .tick.side { text-anchor: end; }
.key svg { width: 2.2rem; height: 0.7rem; vertical-align: middle; }
td:last-child { min-width: 0; }
)";

constexpr const char* kIntroduction =
    "<p>How small a mistake do the checks notice? Each case is a correct run, of another random "
    "shape and mesh. After it ran, a part of its numbers is multiplied by 1 + e, as a missing or "
    "doubled factor in the code would do, and the numbers are judged again. A curve shows in how "
    "many of the cases that is noticed: far left the mistake is tiny, far right (e = 1) the "
    "numbers are twice what they should be. The further left a curve rises, the sharper the "
    "judge.</p>\n"
    "<p class=\"key\"><svg viewBox=\"0 0 30 10\"><polyline class=\"ours\" points=\"0,5 30,5\"/>"
    "</svg> Shardproof <svg viewBox=\"0 0 30 10\"><polyline class=\"peer\" points=\"0,5 30,5\"/>"
    "</svg> a published test: its fixed tolerances on the same numbers (point at a line to see "
    "which). A judge's cases are those that it accepts without a mistake. Where ranks only "
    "exchange data (Ulysses) every bit must be that of the run without parallelism: such cases "
    "notice the smallest change, which gives some curves a first, low step.</p>\n";

// The drawing's inside.
constexpr double kLeft = 34, kRight = 252, kTop = 8, kBottom = 112;

constexpr int kDecades = 16;  // error_sizes()

double x_of(double size) { return kLeft + (std::log10(size) / kDecades + 1) * (kRight - kLeft); }
double y_of(double share) { return kBottom - share * (kBottom - kTop); }

std::string polyline(const PowerCurve& curve, const std::vector<double>& sizes, const char* kind,
                     const std::string& title) {
  std::string points;
  for (size_t i = 0; i < curve.caught.size(); ++i) {
    const double share = static_cast<double>(curve.caught[i]) / curve.cases;
    points += fmt::format("{:.1f},{:.1f} ", x_of(sizes[i]), y_of(share));
  }
  return fmt::format("<polyline class=\"{}\" points=\"{}\"><title>{}</title></polyline>\n", kind,
                     points, escape_text(title));
}

std::string axes() {
  std::string out;
  for (const double share : {0.0, 0.5, 0.99}) {
    out += fmt::format("<path class=\"grid\" d=\"M{} {:.1f}H{}\"/>", kLeft, y_of(share), kRight);
    out += fmt::format("<text class=\"tick side\" x=\"{}\" y=\"{:.1f}\">{:.0f}%</text>\n",
                       kLeft - 4, y_of(share) + 3, 100 * share);
  }
  for (int decade = -15; decade <= 0; decade += 3) {
    const double x = x_of(std::pow(10.0, decade));
    out += fmt::format("<path class=\"axis\" d=\"M{:.1f} {}v3\"/>", x, kBottom);
    out += fmt::format("<text class=\"tick\" x=\"{:.1f}\" y=\"{}\">{}</text>\n", x, kBottom + 13,
                       decade == 0 ? "1" : fmt::format("1e{}", decade));
  }
  return out +
         fmt::format("<text class=\"tick\" x=\"{}\" y=\"{}\">e</text>\n", kRight + 4, kBottom);
}

std::string caption(const ScopePower& scope) {
  const PeerRange peers = peer_range(scope);
  std::string text =
      fmt::format("{}: noticed in 99% of {} from e = {} on", dtype_name(scope.dtype),
                  count_of(scope.ours.cases, "case"), size_text(scope.ours.smallest()));
  text += peers.sharpest.empty() ? "; no published test looks at it"
                                 : fmt::format("; sharpest published test {} ({})",
                                               size_text(peers.smallest), peers.sharpest);
  return text;
}

std::string panel(const ScopePower& scope, const std::vector<double>& sizes) {
  std::string out = "<figure><svg viewBox=\"0 0 260 130\" role=\"img\" aria-label=\"" +
                    escape_attribute(caption(scope)) + "\">\n" + axes();
  const auto draw = [&](const PowerCurve& curve, const char* kind, const std::string& judge) {
    if (curve.cases == 0) return;
    out += polyline(curve, sizes, kind, judge + ", 99% from e = " + size_text(curve.smallest()));
  };
  for (const auto& [test, curve] : scope.peers) draw(curve, "peer", test);
  draw(scope.ours, "ours", "Shardproof");
  return out + "</svg><figcaption>" + escape_text(caption(scope)) + "</figcaption></figure>\n";
}

std::string table(const PowerRun& run) {
  std::string out =
      "<h2>In numbers</h2>\n<p>The smallest e from which on 99% of the cases are "
      "noticed; &gt; 1: not even e = 1. Last: how many cases the test refuses although they are "
      "right.</p>\n<div class=\"scroll\"><table>\n<tr>";
  for (const char* head : {"numbers", "multiplied by 1 + e", "Shardproof", "published test", "e",
                           "correct cases refused"}) {
    out += fmt::format("<th>{}</th>", head);
  }
  out += "</tr>\n";
  for (const ScopePower& scope : run.scopes) {
    const std::string first = fmt::format(
        "<tr><td>{}</td><td>{}</td><td>{}</td>", dtype_name(scope.dtype),
        escape_text(scope_text(scope.scope)), escape_text(size_text(scope.ours.smallest())));
    if (scope.peers.empty()) out += first + "<td>none</td><td>-</td><td>-</td></tr>\n";
    for (const auto& [test, curve] : scope.peers) {
      out +=
          first + fmt::format("<td>{}</td><td>{}</td><td>{} of {}</td></tr>\n", escape_text(test),
                              curve.cases > 0 ? escape_text(size_text(curve.smallest())) : "-",
                              curve.excluded, curve.excluded + curve.cases);
    }
  }
  return out + "</table></div>\n";
}

}  // namespace

std::string power_to_html(const PowerRun& run, const RunFacts& facts) {
  constexpr const char* kTitle = "How small an error the checks see";
  std::string out = html_head(kTitle, kStyle) + fmt::format("<h1>{}</h1>\n", kTitle);
  out += kIntroduction;
  for (const Scope scope : all_scopes()) {
    std::string panels;
    for (const ScopePower& power : run.scopes) {
      if (power.scope == scope) panels += panel(power, run.sizes);
    }
    if (panels.empty()) continue;
    out += "<h2>1 + e times " + escape_text(scope_text(scope)) + "</h2>\n<div class=\"panels\">\n" +
           panels + "</div>\n";
  }
  out += table(run) + "<h2>False alarms</h2>\n<ul>\n";
  for (const AlarmCount& count : run.alarms) {
    out += "<li>" + escape_text(alarm_text(count)) + "</li>\n";
    for (const std::string& alarm : count.alarms) {
      out += "<li class=\"fail\">" + escape_text(alarm) + "</li>\n";
    }
  }
  return out + "</ul>\n" + facts_html(facts) + kHtmlEnd;
}

}  // namespace shardproof::verify
