#include "verify/mutants/planting.h"

namespace shardproof::verify {

const std::vector<Mutant>& mutant_catalogue() {
  static const std::vector<Mutant> catalogue = [] {
    std::vector<Mutant> all;
    for (const auto& part :
         {scale_mutants(), norm_mutants(), attention_bugs(), layout_mutants(), position_mutants(),
          random_mutants(), collective_mutants(), parameter_mutants(), own_mutants()}) {
      all.insert(all.end(), part.begin(), part.end());
    }
    for (Mutant& mutant : all) {
      const size_t hash = mutant.source.find('#');
      if (hash == std::string::npos) continue;
      mutant.link = "https://github.com/" + mutant.source.substr(0, hash) + "/issues/" +
                    mutant.source.substr(hash + 1);
    }
    return all;
  }();
  return catalogue;
}

}  // namespace shardproof::verify
