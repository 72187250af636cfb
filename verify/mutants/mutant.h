// Real bugs, planted: each entry of the catalogue as a mutant of the product (a plan edit, a fault
// plan or a replaced operation), with the cases in which it must fire and those in which it must
// not. Nothing of them is in src/.
#pragma once
#include <string>
#include <variant>
#include <vector>

#include "verify/attention/attention_run.h"
#include "verify/models/model_run.h"
#include "verify/training/training_run.h"

namespace shardproof::verify {

using AnySubject = std::variant<AttentionSubject, ModelSubject, TrainingSubject>;

// A case with a mutant in it.
struct Plant {
  std::string case_id;
  AnySubject subject;
  // The subject draws the case's data itself: it fits no other seed.
  bool one_seed = false;
  bool cpu_only = false;  // what catches it is judged on a CPU only
};

struct Mutant {
  std::string id;      // of the catalogue: S1, A9, ...
  std::string source;  // "deepspeedai/DeepSpeed#5555"; "ours" where nobody has reported it
  std::string link;
  std::string kind;  // class of mutation: "M-SCALE"
  std::string text;  // the bug in a sentence
  // The class of hypothesis that names it (verify/hypothesis.h).
  std::string cause;
  // Of the first wrong tensor in program order, or of the failing check where no tensor is judged:
  // shell patterns, one of which must match.
  std::vector<std::string> first_wrong;
  bool forward_right = false;   // the source says so: no output and no loss may be wrong
  std::vector<Plant> plants;    // its trigger conditions hold
  std::vector<Plant> innocent;  // they do not: planted all the same, the case must pass
  std::string inexpressible;    // why it cannot be planted; then there are no plants
};

// All entries, in the order of the catalogue, then our own.
const std::vector<Mutant>& mutant_catalogue();

// Parts of the catalogue.
std::vector<Mutant> scale_mutants();       // S: factors of losses and gradients
std::vector<Mutant> norm_mutants();        // N: gradient norms
std::vector<Mutant> attention_bugs();      // A: the backward of attention
std::vector<Mutant> layout_mutants();      // L: tokens, heads, strides
std::vector<Mutant> position_mutants();    // P: positions, masks, padding
std::vector<Mutant> random_mutants();      // R: seeds and dropout
std::vector<Mutant> collective_mutants();  // H, X: order, omission, reuse
std::vector<Mutant> parameter_mutants();   // F: frozen, unused, unsharded parameters
std::vector<Mutant> own_mutants();         // O: of nobody, and accepted by published tests

}  // namespace shardproof::verify
