// Operators of random mutants: what each does to a case, and where in the case it can act.
#pragma once
#include <optional>
#include <string>

#include "verify/mutants/bare_run.h"
#include "verify/suites/draw.h"

namespace shardproof::verify {

// A case as operators see it.
struct FuzzTarget {
  std::string case_id;
  AnySubject clean;  // says the kind
  c10::ScalarType dtype = c10::ScalarType::Double;
  comm::MeshShape mesh;
  Traffic calls;  // of the clean run: a fault always has a call that it meets
};

struct Operation {
  std::string name;  // of the operator: "scale", "swap-intervals"
  std::string text;  // with all that was drawn
  AnySubject subject;
  std::string tag = {};  // of faults
};

// The least |factor - 1| that scaling operators draw: twice what checks must see. A model's
// gradients in 16 bits err by up to 3e-2 without SP, so that their checks allow up to 8e-2 of them:
// ten times what those of attention do.
double least_change(const FuzzTarget& target);

// Any operator that has a target in the case and can do harm there.
Operation draw_operation(const FuzzTarget& target, Draw& draw);
// An operator that scales, by this factor.
Operation draw_scaling(const FuzzTarget& target, Draw& draw, double factor);

}  // namespace shardproof::verify
