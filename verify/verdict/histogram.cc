#include "verify/verdict/histogram.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "verify/verdict/summary.h"
#include "verify/verdict/text.h"

namespace shardproof::verify {
namespace {

constexpr int kBinsWithin = 20;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// In SVG user units.
constexpr int kBarWidth = 28, kBarsTop = 20, kBarsHeight = 120, kLeft = 10;
constexpr int kBaseline = kBarsTop + kBarsHeight;
constexpr int kGap = 16;  // between the bins within the limit and those beyond

int bar_left(std::size_t bin) {
  const int gap = bin >= kBinsWithin ? kGap : 0;
  return kLeft + static_cast<int>(bin) * kBarWidth + gap;
}

std::string bin_name(const QuotientBin& bin) {
  if (std::isinf(bin.end)) return fmt::format("&gt; {:g}", bin.begin);
  return fmt::format("{:g} to {:g}", bin.begin, bin.end);
}

std::string bar(const QuotientBin& bin, std::size_t index, int64_t largest) {
  if (bin.tensors == 0) return "";
  // A bin that is not empty shows, however small beside the largest.
  const double share = static_cast<double>(bin.tensors) / static_cast<double>(largest);
  const int height = std::max(2, static_cast<int>(std::lround(share * kBarsHeight)));
  const int left = bar_left(index);
  return fmt::format(
      "<rect class=\"{}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"><title>{}: {}</title></rect>"
      "<text class=\"tick\" x=\"{}\" y=\"{}\">{}</text>\n",
      index < kBinsWithin ? "within" : "beyond", left + 1, kBaseline - height, kBarWidth - 2,
      height, bin_name(bin), count_of(bin.tensors, "tensor"), left + kBarWidth / 2,
      kBaseline - height - 4, with_thousands(bin.tensors));
}

std::string tick(int x, const std::string& text) {
  return fmt::format("<text class=\"tick\" x=\"{}\" y=\"{}\">{}</text>\n", x, kBaseline + 16, text);
}

}  // namespace

std::vector<QuotientBin> quotient_histogram(const Verdict& verdict) {
  std::vector<QuotientBin> bins;
  for (int i = 0; i < kBinsWithin; ++i) {
    bins.push_back({i / double{kBinsWithin}, (i + 1) / double{kBinsWithin}});
  }
  for (const double begin : {1.0, 2.0, 10.0, 100.0}) bins.push_back({begin, 0});
  for (std::size_t i = kBinsWithin; i + 1 < bins.size(); ++i) bins[i].end = bins[i + 1].begin;
  bins.back().end = kInfinity;

  for (const CaseResult& result : verdict.cases) {
    for (const TensorResult& tensor : result.tensors) {
      if (tensor.status != Status::kPass && tensor.status != Status::kFail) continue;
      const double quotient = limit_quotient(tensor);
      // Upper ends are closed from the limit on, so that an error at its limit is within it.
      auto holds = [&](const QuotientBin& bin) {
        return bin.end < 1 ? quotient < bin.end : quotient <= bin.end;
      };
      ++std::find_if(bins.begin(), bins.end(), holds)->tensors;
    }
  }
  return bins;
}

std::string histogram_svg(const std::vector<QuotientBin>& bins) {
  int64_t largest = 1, beyond = 0, all = 0;
  for (const QuotientBin& bin : bins) {
    largest = std::max(largest, bin.tensors);
    all += bin.tensors;
    if (bin.begin >= 1) beyond += bin.tensors;
  }
  const int width = bar_left(bins.size()) + kLeft;
  std::string svg = fmt::format(
      "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"Histogram of error over limit: {} of "
      "{} "
      "beyond the limit\">\n",
      width, kBaseline + 24, with_thousands(beyond), count_of(all, "tensor"));
  for (std::size_t i = 0; i < bins.size(); ++i) svg += bar(bins[i], i, largest);
  svg += fmt::format("<path class=\"axis\" d=\"M{} {}H{}\"/>\n", kLeft, kBaseline, width - kLeft);
  for (std::size_t i = 0; i <= kBinsWithin; i += 4) {
    const int end = kLeft + static_cast<int>(i) * kBarWidth;
    svg += tick(end, fmt::format("{:.1f}", i / double{kBinsWithin}));
  }
  for (std::size_t i = kBinsWithin; i < bins.size(); ++i) {
    const double end = bins[i].end;
    svg += tick(bar_left(i) + kBarWidth / 2,
                std::isinf(end) ? "more" : fmt::format("&#8804;{:g}", end));
  }
  return svg + "</svg>\n";
}

}  // namespace shardproof::verify
