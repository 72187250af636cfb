// Writes a verdict as one self-contained HTML page (inline style and SVG, no script, nothing from
// outside) for CI artefacts and for mail: what the terminal says, a histogram of error/limit over
// all judged tensors, and every case with its tensors; failing cases are unfolded.
#pragma once
#include <string>

#include "verify/verdict/verdict.h"

namespace shardproof::verify {

std::string to_html(const Verdict& verdict);

}  // namespace shardproof::verify
