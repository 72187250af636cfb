#include "verify/case_id.h"

#include <algorithm>

#include "base/error.h"
#include "verify/dtype.h"

namespace shardproof::verify {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text = text.substr(at + 1);
  }
}

CaseIdParts parse_case_id(std::string_view id, const std::vector<std::string>& suites) {
  CaseIdParts c;
  std::string_view body = id;
  if (const size_t hash = id.rfind('#'); hash != std::string_view::npos) {
    if (!read_number(id.substr(hash), "#", c.seed)) bad_input("case '{}': bad seed", id);
    body = id.substr(0, hash);
  }
  const auto parts = split(body, '/');
  if (parts.size() != 6 || std::find(suites.begin(), suites.end(), parts[0]) == suites.end()) {
    bad_input(
        "case '{}': expected <suite>/<subject>/<mode>/<mesh>/<dtype>/<variant>[#seed] with suite "
        "{}",
        id, fmt::join(suites, " or "));
  }
  c.suite = parts[0];
  c.subject = parts[1];
  c.mesh = comm::MeshShape::parse(parts[3]);
  constexpr int kMostRanks = 512;  // one thread each
  if (c.mesh.world() > kMostRanks) {
    bad_input("case '{}': the simulator runs up to {} ranks", id, kMostRanks);
  }
  c.dtype = parse_dtype(parts[4]);
  c.mode = parts[2];
  parse_mode(c.mode, c.mesh);
  c.variant = parts[5];
  return c;
}

std::string mode_name(const comm::MeshShape& mesh, plan::RingMode ring_mode) {
  const bool gathers = ring_mode == plan::RingMode::kAllGather;
  if (mesh.ring == 1) return mesh.ulysses == 1 ? "local" : "ulysses";
  if (mesh.ulysses == 1) return gathers ? "allgather" : "ring";
  return gathers ? "hybrid_allgather" : "hybrid";
}

plan::RingMode parse_mode(std::string_view mode, const comm::MeshShape& mesh) {
  const plan::RingMode ring_mode = mode == "allgather" || mode == "hybrid_allgather"
                                       ? plan::RingMode::kAllGather
                                       : plan::RingMode::kRotate;
  if (mode_name(mesh, ring_mode) != mode) {
    bad_input("case mode '{}' does not go with mesh {}, which makes it '{}'", mode,
              mesh.to_string(), mode_name(mesh, ring_mode));
  }
  return ring_mode;
}

}  // namespace shardproof::verify
