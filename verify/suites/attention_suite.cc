#include "verify/suites/attention_suite.h"

#include <array>

#include "base/error.h"
#include "comm/random_streams.h"
#include "verify/dtype.h"
#include "verify/suites/draw.h"

namespace shardproof::verify {
namespace {

using plan::GradientConvention;
using plan::HeadSplit;
using plan::RingMode;
using plan::StreamPlacement;
using plan::TokenSplit;

struct MeshMode {
  comm::MeshShape mesh;
  RingMode ring_mode;
};

// All ways to arrange sp ranks, both ring modes.
std::vector<MeshMode> factorisations(int sp) {
  std::vector<MeshMode> all;
  for (int ring = 1; ring <= sp; ++ring) {
    if (sp % ring != 0) continue;
    const comm::MeshShape mesh{1, ring, sp / ring};
    all.push_back({mesh, RingMode::kRotate});
    if (ring > 1) all.push_back({mesh, RingMode::kAllGather});
  }
  return all;
}

constexpr int kVariants = 6;

// The six variants of the default suite; together they hold every feature.
void dress(AttentionCase& c, int variant) {
  const int u = c.mesh.ulysses;
  switch (variant) {
    case 0:  // nothing special, even shards
      c.image = c.mesh.sp() * 8;
      c.heads = c.kv_heads = u * (u < 4 ? 2 : 1);
      break;
    case 1:  // text that is replicated, ragged masks, grouped KV heads
      c.text = 7, c.image = 26, c.batch = 3;
      c.heads = 6, c.kv_heads = 2;
      c.mask = MaskKind::kRagged;
      c.text_placement = StreamPlacement::kReplicated;
      c.head_split = u <= 6 ? HeadSplit::kUneven : HeadSplit::kPadded;
      break;
    case 2:  // padded tokens and heads, scattered masks
      c.text = 9, c.image = 25;
      c.heads = c.kv_heads = 5;
      c.mask = MaskKind::kScattered;
      c.token_split = TokenSplit::kPadded;
      c.head_split = HeadSplit::kPadded;
      break;
    case 3:  // one rank without a key, strided inputs, data-parallel replicas, small odd head size
      c.text = 5, c.image = 28;
      c.heads = c.kv_heads = u + 1;
      c.head_dim = 20;
      c.mask = c.mesh.sp() > 1 ? MaskKind::kEmptyRank : MaskKind::kOneKey;
      c.head_split = HeadSplit::kUneven;
      c.strided = true;
      if (c.mesh.sp() <= 4) c.mesh.dp = 2;
      break;
    case 4:  // local tokens and heads alike in number: a transposed layout fits without an error
      c.image = c.mesh.ring * 8;
      c.heads = c.kv_heads = u * 8;
      c.head_dim = 32;
      c.batch = 1;
      break;
    case 5:  // pads without a mask, fewer KV heads than ranks
      c.image = c.mesh.sp() * 5 - 1;
      c.heads = u % 2 == 0 ? u : 2 * u;
      c.kv_heads = c.heads % 4 == 0 && u > 2 ? c.heads / 4 : 1;
      c.token_split = TokenSplit::kPadded;
      break;
    default:
      internal_error("no variant {}", variant);
  }
}

}  // namespace

std::set<int> CaseFilter::wanted_sp() const {
  std::set<int> sizes = sp;
  if (sp.empty() && world != 0) sizes.insert(world);
  return sizes;
}

bool CaseFilter::admits(const AttentionCase& c) const {
  const auto in = [](const auto& set, const auto& value) {
    return set.empty() || set.contains(value);
  };
  if (world != 0 && c.mesh.world() != world) return false;
  return in(sp, c.mesh.sp()) && in(ring, c.mesh.ring) && in(dp, c.mesh.dp) && in(dtypes, c.dtype);
}

std::vector<AttentionCase> attention_suite(const CaseFilter& filter, uint64_t seed, bool quick) {
  std::vector<AttentionCase> cases;
  uint64_t number = 0;
  std::set<int> sizes = {1, 2, 3, 4, 5, 6, 7, 8};
  const std::set<int> wanted = filter.wanted_sp();  // larger ones only if they are asked for
  sizes.insert(wanted.begin(), wanted.end());
  for (int sp : sizes) {
    if (quick && wanted.empty() && (sp == 1 || sp == 5 || sp == 6 || sp == 7)) continue;
    for (const MeshMode& mode : factorisations(sp)) {
      for (size_t d = 0; d < all_dtypes().size(); ++d) {
        for (int variant = 0; variant < kVariants; ++variant) {
          ++number;
          // A Latin-square choice: over the modes each dtype meets each variant.
          if (quick &&
              (static_cast<int>(d) + static_cast<int>(number / 24)) % kVariants != variant) {
            continue;
          }
          AttentionCase c;
          c.mesh = mode.mesh;
          c.ring_mode = mode.ring_mode;
          c.dtype = all_dtypes()[d];
          c.backend = filter.backend;
          dress(c, variant);
          c.seed = case_seed(seed, number);
          if (filter.admits(c)) cases.push_back(c);
        }
      }
    }
  }
  return cases;
}

namespace {

// What the random cases are dealt evenly over.
struct Cell {
  std::string mode;
  c10::ScalarType dtype;
  bool masked, uneven, grouped;
};

Cell cell_of(int64_t number) {
  static constexpr std::array<const char*, 5> kModes = {"ulysses", "ring", "allgather", "hybrid",
                                                        "hybrid_allgather"};
  auto rest = static_cast<uint64_t>(number);
  const auto digit = [&](uint64_t base) {
    const uint64_t d = rest % base;
    rest /= base;
    return d;
  };
  Cell cell;
  cell.mode = kModes[digit(kModes.size())];
  cell.dtype = all_dtypes()[digit(all_dtypes().size())];
  cell.masked = digit(2) == 1;
  cell.uneven = digit(2) == 1;
  cell.grouped = digit(2) == 1;
  return cell;
}

void draw_mesh(AttentionCase& c, const Cell& cell, Draw& draw) {
  c.ring_mode = cell.mode.ends_with("allgather") ? RingMode::kAllGather : RingMode::kRotate;
  const bool ulysses = cell.mode == "ulysses", hybrid = cell.mode.starts_with("hybrid");
  c.mesh.ulysses = static_cast<int>(ulysses ? draw.between(2, 8) : hybrid ? draw.between(2, 4) : 1);
  c.mesh.ring = static_cast<int>(ulysses  ? 1
                                 : hybrid ? draw.between(2, 8 / c.mesh.ulysses)
                                          : draw.between(2, 8));
  c.mesh.dp = c.mesh.sp() <= 4 && draw.between(0, 3) == 0 ? 2 : 1;
}

void draw_shape(AttentionCase& c, const Cell& cell, Draw& draw) {
  const int sp = c.mesh.sp();
  c.batch = draw.between(1, 3);
  c.head_dim = draw.one_of(std::array<int64_t, 5>{4, 8, 16, 20, 32});
  const int64_t per_kv = cell.grouped ? draw.between(2, 3) : 1;
  if (!cell.uneven) {
    const int64_t some = draw.between(0, 1);
    c.text = some * sp * draw.between(1, 2);
    c.image = sp * draw.between(1, 6);
    c.kv_heads = c.mesh.ulysses * draw.between(1, 2);
    c.heads = c.kv_heads * per_kv;
    return;
  }
  const int64_t some = draw.between(0, 1);
  c.text = some * draw.between(1, 12);
  const int64_t rounds = draw.between(1, 5);
  c.image = rounds * sp + draw.between(1, sp - 1);
  c.token_split = draw.between(0, 1) ? TokenSplit::kPadded : TokenSplit::kUneven;
  c.head_split = draw.between(0, 1) ? HeadSplit::kPadded : HeadSplit::kUneven;
  c.kv_heads = draw.between(1, 4);
  c.heads = c.kv_heads * per_kv;
  if (c.heads < c.mesh.ulysses) c.head_split = HeadSplit::kPadded;
}

void draw_features(AttentionCase& c, const Cell& cell, Draw& draw) {
  if (cell.masked) {
    c.mask = draw.one_of(std::array{MaskKind::kRagged, MaskKind::kScattered, MaskKind::kOneKey,
                                    MaskKind::kEmptyRank});
  }
  if (c.text > 0 && draw.between(0, 1)) {
    c.text_placement = StreamPlacement::kReplicated;
    // Division by an sp that is no power of two would round the cotangents of convention B.
    const bool exact = (c.mesh.sp() & (c.mesh.sp() - 1)) == 0;
    c.convention = draw.one_of(
        std::array{GradientConvention::kSliceThenScaleLoss, GradientConvention::kSumThenSlice,
                   GradientConvention::kSliceTimesSp},
        exact ? 2 : 1);
  }
  c.strided = draw.between(0, 3) == 0 && c.heads == c.kv_heads;
}

}  // namespace

std::vector<AttentionCase> random_attention_cases(const CaseFilter& filter, uint64_t seed,
                                                  int64_t count) {
  std::vector<AttentionCase> cases;
  Draw draw(comm::derive_seed(seed, 0));
  for (int64_t i = 0; static_cast<int64_t>(cases.size()) < count; ++i) {
    if (i > 1000 * count) {
      bad_input("no random case fits the options; widen --sp, --ring or --dtype");
    }
    const Cell cell = cell_of(i);
    AttentionCase c;
    c.dtype = cell.dtype;
    c.backend = filter.backend;
    draw_mesh(c, cell, draw);
    draw_shape(c, cell, draw);
    draw_features(c, cell, draw);
    c.seed = case_seed(seed, static_cast<uint64_t>(i));
    if (filter.admits(c)) cases.push_back(c);
  }
  return cases;
}

std::vector<AttentionCase> golden_cases(const AttentionGolden& golden, const CaseFilter& filter,
                                        bool quick) {
  std::vector<AttentionCase> cases;
  std::set<int> sizes = filter.wanted_sp();
  if (sizes.empty()) sizes = quick ? std::set<int>{2} : std::set<int>{2, 4};
  for (int sp : sizes) {
    for (const MeshMode& mode : factorisations(sp)) {
      for (c10::ScalarType dtype : all_dtypes()) {
        AttentionCase c;
        c.suite = "goldens";
        c.golden = golden.name;
        c.mesh = mode.mesh;
        c.ring_mode = mode.ring_mode;
        c.dtype = dtype;
        c.batch = golden.batch;
        c.text = golden.text_tokens;
        c.image = golden.tokens - golden.text_tokens;
        c.heads = golden.heads;
        c.kv_heads = golden.kv_heads;
        c.head_dim = golden.head_dim;
        c.mask = golden.mask.defined() ? MaskKind::kScattered : MaskKind::kNone;
        c.backend = filter.backend;
        if (c.heads % c.mesh.ulysses != 0) {
          c.head_split = c.heads > c.mesh.ulysses ? HeadSplit::kUneven : HeadSplit::kPadded;
        }
        if (filter.admits(c)) cases.push_back(c);
      }
    }
  }
  return cases;
}

}  // namespace shardproof::verify
