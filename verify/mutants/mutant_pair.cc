#include "verify/mutants/mutant_pair.h"

namespace shardproof::verify {
namespace {

// One edit after the other; an empty one does nothing.
template <class... Arguments>
std::function<void(Arguments...)> in_turn(std::function<void(Arguments...)> a,
                                          std::function<void(Arguments...)> b) {
  if (!a || !b) return a ? a : b;
  return [a, b](Arguments... arguments) {
    a(arguments...);
    b(arguments...);
  };
}

// `b` is given what `a` makes of the value; the other arguments go to both.
template <class Result, class First, class... Rest>
std::function<Result(First, Rest...)> chained(std::function<Result(First, Rest...)> a,
                                              std::function<Result(First, Rest...)> b) {
  if (!a || !b) return a ? a : b;
  return [a, b](First first, Rest... rest) { return b(a(first, rest...), rest...); };
}

sim::FaultPlan joined(sim::FaultPlan a, const sim::FaultPlan& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

bool merges_right(const attention::MergeFunction& merge) {
  using Plain = decltype(&attention::merge_block);
  const Plain* plain = merge.target<Plain>();
  return plain && *plain == &attention::merge_block;
}

std::optional<AnySubject> pair(const AttentionSubject& a, const AttentionSubject& b) {
  if (!merges_right(a.merge) && !merges_right(b.merge)) return {};
  AttentionSubject subject;
  subject.edit_plan = in_turn(a.edit_plan, b.edit_plan);
  subject.wrap_local = chained(a.wrap_local, b.wrap_local);
  subject.edit_inputs = chained(a.edit_inputs, b.edit_inputs);
  subject.merge = merges_right(a.merge) ? b.merge : a.merge;
  subject.faults = joined(a.faults, b.faults);
  return subject;
}

std::optional<AnySubject> pair(const ModelSubject& a, const ModelSubject& b) {
  if (a.make_context && b.make_context) return {};
  ModelSubject subject;
  subject.faults = joined(a.faults, b.faults);
  subject.edit_options = in_turn(a.edit_options, b.edit_options);
  subject.edit_inputs = in_turn(a.edit_inputs, b.edit_inputs);
  subject.make_context = a.make_context ? a.make_context : b.make_context;
  return subject;
}

std::optional<AnySubject> pair(const TrainingSubject& a, const TrainingSubject& b) {
  if (a.make_context && b.make_context) return {};
  TrainingSubject subject;
  subject.faults = joined(a.faults, b.faults);
  subject.make_context = a.make_context ? a.make_context : b.make_context;
  subject.edit_step = in_turn(a.edit_step, b.edit_step);
  subject.edit_loss = chained(a.edit_loss, b.edit_loss);
  subject.edit_dropout = in_turn(a.edit_dropout, b.edit_dropout);
  subject.edit_count = chained(a.edit_count, b.edit_count);
  subject.edit_gradients = in_turn(a.edit_gradients, b.edit_gradients);
  return subject;
}

}  // namespace

std::optional<AnySubject> both(const AnySubject& a, const AnySubject& b) {
  return std::visit(
      [](const auto& x, const auto& y) -> std::optional<AnySubject> {
        if constexpr (std::is_same_v<decltype(x), decltype(y)>) return pair(x, y);
        return {};
      },
      a, b);
}

}  // namespace shardproof::verify
