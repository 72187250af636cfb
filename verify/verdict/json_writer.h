// Writes a verdict as JSON, format shardproof-verdict, version 1 (see docs/formats.md).
//
// Every key of the format is always there, in the order of the format, so that a reader needs no
// case distinction:
// - a text that does not apply ("reason" of a passing case, "first_wrong") is the empty string;
// - "where" of a tensor without a location is null, and so is each part of a location that the
//   tensor lacks ("head" of a bias; "tokens" where there is no token dimension);
// - JSON has no non-finite numbers: they are written as the strings "inf", "-inf" and "nan";
// - bytes that are not UTF-8 are replaced by U+FFFD.
// Finite numbers are written with as many digits as it takes to read back the same double.
#pragma once
#include <string>

#include "verify/verdict/verdict.h"

namespace shardproof::verify {

std::string to_json(const Verdict& verdict);

}  // namespace shardproof::verify
