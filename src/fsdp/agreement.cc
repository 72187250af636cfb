#include "fsdp/agreement.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/checksum.h"

namespace shardproof::fsdp {
namespace {

struct Failure {
  std::string text;
  std::vector<int> ranks;
};

std::string describe(const Failure& failure) {
  return fmt::format("rank{} {}: {}", failure.ranks.size() == 1 ? "" : "s",
                     fmt::join(failure.ranks, ", "), failure.text);
}

// `outcomes`: a digit for the kind and the text, by rank; empty where nothing failed.
std::optional<Error> first_failure(const std::vector<std::string>& outcomes) {
  std::optional<ErrorKind> kind;
  std::vector<Failure> failures;
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].empty()) continue;
    if (!kind) kind = static_cast<ErrorKind>(outcomes[rank][0] - '0');
    const std::string text = outcomes[rank].substr(1);
    auto known = std::find_if(failures.begin(), failures.end(),
                              [&](const Failure& failure) { return failure.text == text; });
    if (known == failures.end()) known = failures.insert(known, Failure{text, {}});
    known->ranks.push_back(static_cast<int>(rank));
  }
  if (!kind) return std::nullopt;
  if (failures[0].ranks.size() == outcomes.size()) return Error(*kind, failures[0].text);
  constexpr size_t kShown = 8;  // of thousands of ranks each may say something else
  std::vector<std::string> lines;
  for (const Failure& failure : failures) {
    if (lines.size() < kShown) lines.push_back(describe(failure));
  }
  if (failures.size() > kShown) lines.push_back("and other ranks with other errors");
  return Error(*kind, fmt::format("{}", fmt::join(lines, "\n")));
}

}  // namespace

at::Tensor Agreement::gather_rows(const at::Tensor& mine, const std::vector<int64_t>& rows) const {
  return group_.all_gather(mine.to(device_), rows).wait().cpu();
}

std::vector<std::vector<int64_t>> Agreement::gather(const std::vector<int64_t>& numbers) const {
  const auto ranks = static_cast<size_t>(group_.size());
  const auto count = static_cast<int64_t>(numbers.size());
  const at::Tensor all =
      gather_rows(at::tensor(numbers, at::kLong).view({count}), std::vector<int64_t>(ranks, count));
  std::vector<std::vector<int64_t>> by_rank;
  const int64_t* data = all.const_data_ptr<int64_t>();
  for (size_t r = 0; r < ranks; ++r, data += count) by_rank.emplace_back(data, data + count);
  return by_rank;
}

std::vector<std::string> Agreement::gather(const std::string& text) const {
  std::vector<int64_t> sizes;
  for (const auto& size : gather(std::vector<int64_t>{static_cast<int64_t>(text.size())})) {
    sizes.push_back(size[0]);
  }
  std::vector<std::string> texts(sizes.size());
  if (std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == 0) return texts;
  at::Tensor mine = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(mine.mutable_data_ptr(), text.data(), text.size());
  const at::Tensor all = gather_rows(mine, sizes);
  const char* data = static_cast<const char*>(all.const_data_ptr());
  for (size_t r = 0; r < sizes.size(); data += sizes[r], ++r) {
    texts[r].assign(data, static_cast<size_t>(sizes[r]));
  }
  return texts;
}

std::vector<std::string> Agreement::gather_if_different(const std::string& text) const {
  const auto sums = gather(std::vector<int64_t>{static_cast<int64_t>(checksum(text))});
  const bool same =
      std::all_of(sums.begin(), sums.end(), [&](const auto& sum) { return sum == sums[0]; });
  return same ? std::vector<std::string>() : gather(text);
}

std::optional<Error> Agreement::attempt(const std::function<void()>& action) const {
  const auto outcome = [](ErrorKind kind, const char* text) {
    return std::to_string(static_cast<int>(kind)) + text;
  };
  std::string mine;
  try {
    action();
  } catch (const Error& error) {
    mine = outcome(error.kind(), error.what());
  } catch (const std::exception& error) {
    mine = outcome(ErrorKind::kInternal, error.what());
  }
  return first_failure(gather(mine));
}

}  // namespace shardproof::fsdp
