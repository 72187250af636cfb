#include "verify/dtype.h"

#include "base/error.h"

namespace shardproof::verify {
namespace {
struct Entry {
  c10::ScalarType dtype;
  const char* name;
  double roundoff;
};
constexpr Entry kEntries[] = {{c10::ScalarType::Double, "fp64", 0x1p-53},
                              {c10::ScalarType::Float, "fp32", 0x1p-24},
                              {c10::ScalarType::BFloat16, "bf16", 0x1p-8},
                              {c10::ScalarType::Half, "fp16", 0x1p-11}};

const Entry& entry(c10::ScalarType dtype) {
  for (const Entry& e : kEntries) {
    if (e.dtype == dtype) return e;
  }
  internal_error("no dtype {} in verify", static_cast<int>(dtype));
}
}  // namespace

std::string dtype_name(c10::ScalarType dtype) { return entry(dtype).name; }
double unit_roundoff(c10::ScalarType dtype) { return entry(dtype).roundoff; }

c10::ScalarType parse_dtype(std::string_view name) {
  for (const Entry& e : kEntries) {
    if (name == e.name) return e.dtype;
  }
  bad_input("unknown dtype '{}'; expected fp64, fp32, bf16 or fp16", name);
}

const std::vector<c10::ScalarType>& all_dtypes() {
  static const std::vector<c10::ScalarType> dtypes = [] {
    std::vector<c10::ScalarType> all;
    for (const Entry& e : kEntries) all.push_back(e.dtype);
    return all;
  }();
  return dtypes;
}

}  // namespace shardproof::verify
