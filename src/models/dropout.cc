#include "models/dropout.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "comm/random_streams.h"

namespace shardproof::models {

using at::Tensor;

std::shared_ptr<const StreamDropout> StreamDropout::make(const Dropout& dropout,
                                                         const plan::AttentionPlan& plan,
                                                         int sp_rank) {
  if (!(dropout.probability >= 0 && dropout.probability < 1)) {  // NaN is outside, too
    bad_input("dropout: expected a probability of at least 0 and less than 1; got {}",
              dropout.probability);
  }
  if (dropout.probability == 0) return nullptr;
  const auto rank = static_cast<size_t>(sp_rank);
  std::vector<Rows> rows;
  for (const plan::StreamPlan& stream : plan.streams) {
    const bool whole = stream.placement == plan::StreamPlacement::kReplicated;
    rows.push_back(whole ? Rows{stream.name, stream.tokens, 0, stream.tokens, stream.tokens}
                         : Rows{stream.name, stream.tokens, stream.shards[rank].begin,
                                stream.shards[rank].size(), stream.local_rows[rank]});
  }
  return std::shared_ptr<const StreamDropout>(new StreamDropout(dropout, std::move(rows)));
}

const StreamDropout::Rows& StreamDropout::rows_of(const std::string& stream) const {
  for (const Rows& rows : rows_) {
    if (rows.stream == stream) return rows;
  }
  internal_error("dropout: the attention plan has no stream '{}'", stream);
}

Tensor StreamDropout::apply(const std::string& site, const std::string& stream,
                            const Tensor& x) const {
  const Rows& rows = rows_of(stream);
  SP_CHECK(x.dim() == 3 && x.size(1) == rows.all, "{}: {} rows of stream '{}' for a tensor {}",
           site, rows.all, stream, c10::str(x.sizes()));
  const uint64_t seed = comm::derive_seed(dropout_.seed, site);
  Tensor kept = at::zeros(x.sizes(), x.options().dtype(at::kBool));
  for (int64_t b = 0; b < x.size(0); ++b) {
    at::Generator generator = comm::make_generator(
        comm::derive_seed(seed, static_cast<uint64_t>(dropout_.first_sample + b)), x.device());
    const Tensor random =
        at::rand({rows.tokens, x.size(2)}, generator, x.options().dtype(at::kFloat));
    kept[b]
        .narrow(0, 0, rows.own)
        .copy_(random.narrow(0, rows.begin, rows.own).ge(dropout_.probability));
  }
  return x * kept / (1 - dropout_.probability);
}

}  // namespace shardproof::models
