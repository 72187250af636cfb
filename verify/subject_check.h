// Cases about a subject under test, whose data are drawn or a golden's, as the runner takes them.
#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "verify/case.h"
#include "verify/shrink.h"

namespace shardproof::verify {

// C: a case as a value, Golden: with a folder.
template <class C, class Subject, class Golden>
class SubjectCheck final : public Case {
 public:
  // `golden` is null or outlives the object.
  using Judge = CaseResult (*)(const C&, const Subject&, Worlds&, const Golden*);

  SubjectCheck(C c, Subject subject, const Golden* golden, Judge judge)
      : case_(std::move(c)), subject_(std::move(subject)), golden_(golden), judge_(judge) {}

  std::string id() const override { return case_.id(); }
  CaseResult check(Worlds& worlds) const override {
    return judge_(case_, subject_, worlds, golden_);
  }
  std::string replay_arguments() const override {
    if (!golden_) return {};
    return fmt::format(" --golden '{}'", std::filesystem::proximate(golden_->folder).string());
  }
  CasePtr shrunk(const std::function<bool(const Case&)>& fails) const override {
    if (golden_) return nullptr;
    const auto with = [&](const C& c) { return SubjectCheck(c, subject_, nullptr, judge_); };
    return std::make_shared<SubjectCheck>(
        with(shrink(case_, [&](const C& c) { return fails(with(c)); })));
  }

 private:
  C case_;
  Subject subject_;
  const Golden* golden_;
  Judge judge_;
};

// `golden_of`: the name of the golden that a case is about, empty if its data are drawn. Errors
// (kBadInput): a golden that is not among `goldens`.
template <class C, class Subject, class Golden, class GoldenOf>
std::vector<CasePtr> subject_checks(const std::vector<C>& cases,
                                    const std::map<std::string, Golden>& goldens,
                                    const Subject& subject,
                                    typename SubjectCheck<C, Subject, Golden>::Judge judge,
                                    GoldenOf golden_of) {
  std::vector<CasePtr> checks;
  for (const C& c : cases) {
    const std::string name = golden_of(c);
    const auto golden = goldens.find(name);
    if (!name.empty() && golden == goldens.end()) {
      bad_input("case '{}' needs the golden '{}'; name its folder with --golden", c.id(), name);
    }
    checks.push_back(std::make_shared<SubjectCheck<C, Subject, Golden>>(
        c, subject, name.empty() ? nullptr : &golden->second, judge));
  }
  return checks;
}

}  // namespace shardproof::verify
