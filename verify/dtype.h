// The dtype names of case ids and verdicts.
#pragma once
#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>
#include <vector>

namespace shardproof::verify {

std::string dtype_name(c10::ScalarType dtype);       // fp64, fp32, bf16, fp16
c10::ScalarType parse_dtype(std::string_view name);  // Errors: kBadInput
const std::vector<c10::ScalarType>& all_dtypes();
double unit_roundoff(c10::ScalarType dtype);  // 2^-53, 2^-24, 2^-8 (bf16), 2^-11 (fp16)

}  // namespace shardproof::verify
