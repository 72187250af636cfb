// Short words for the places where mutants are planted.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "verify/mutants/mutant.h"

namespace shardproof::verify {

// A training case: a small model on a mesh with shards, and words of its variant.
struct TrainingSpot {
  std::string mesh;  // "dp2.ring1.ulysses2.fsdp4"
  std::string words = {};
  std::string subject = "qwenimage";
  int batch = 1, steps = 1, layers = 1;
  TrainingSpot with(const std::string& more) const {
    TrainingSpot spot = *this;
    spot.words += "." + more;
    return spot;
  }
  TrainingSpot of(const std::string& model) const {
    TrainingSpot spot = *this;
    spot.subject = model;
    return spot;
  }
};

// A model's forward and backward.
struct ModelSpot {
  std::string mesh;  // "dp1.ring1.ulysses2"
  std::string subject = "qwenimage";
  int batch = 2;
};

// Attention alone: text and image tokens, q and kv heads by `words`.
struct AttentionSpot {
  std::string mesh;
  std::string words = "b2.t8.i24.h4.d16";
};

// Their ids, in one of the dtypes below.
std::string case_id(const ModelSpot& spot, c10::ScalarType dtype);
std::string case_id(const TrainingSpot& spot, c10::ScalarType dtype);

// A fault of verify/mutants/attention_mutants.h. Errors (kInternal): no such fault, or not in this
// case.
std::vector<Plant> plants(const AttentionSpot& spot, const std::string& attention_mutant);

// Each in fp64 and in bf16, where published tests are asked as well.
std::vector<Plant> plants(const TrainingSpot& spot, const TrainingSubject& subject);
std::vector<Plant> plants(const ModelSpot& spot, const ModelSubject& subject);
std::vector<Plant> plants(const AttentionSpot& spot, const AttentionSubject& subject);
// In fp64.
Plant plant(const TrainingSpot& spot, const TrainingSubject& subject);
Plant plant(const ModelSpot& spot, const ModelSubject& subject);
Plant plant(const AttentionSpot& spot, const AttentionSubject& subject);

inline std::vector<Plant> operator+(std::vector<Plant> a, const std::vector<Plant>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline sim::Fault fault(sim::FaultKind kind, const std::string& tag, sim::Fault detail = {}) {
  detail.kind = kind;
  detail.tag = tag;
  return detail;
}

template <class Subject>
Subject with_faults(sim::FaultPlan faults) {
  Subject subject;
  subject.faults = std::move(faults);
  return subject;
}

}  // namespace shardproof::verify
