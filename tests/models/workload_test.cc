#include "models/workload.h"

#include <ATen/ATen.h>

#include "attention/sequence_parallel.h"
#include "models/work_sharing.h"
#include "sim/world.h"
#include "tests/file_support.h"

namespace shardproof::models {
namespace {

using tests::contains;
using tests::error_text;

std::unique_ptr<Transformer> model_of(const std::string& json) {
  return make_transformer(parse_json(json, "config.json"));
}

// One block of 2 heads x 6, 4 channels in, 4 out, text of 5.
std::string small_qwen(bool zero_cond_t = false) {
  return fmt::format(
      R"({{"_class_name":"QwenImageTransformer2DModel","num_layers":1,"num_attention_heads":2,
           "attention_head_dim":6,"axes_dims_rope":[2,2,2],"in_channels":4,"out_channels":1,
           "joint_attention_dim":5,"zero_cond_t":{}}})",
      zero_cond_t);
}

const std::string kSmallWan = R"({"_class_name":"WanTransformer3DModel","num_layers":2,
  "num_attention_heads":1,"attention_head_dim":12,"in_channels":1,"out_channels":1,"text_dim":3,
  "freq_dim":4,"ffn_dim":5})";

const std::string kSmallFlux = R"({"_class_name":"FluxTransformer2DModel","num_layers":1,
  "num_single_layers":2,"num_attention_heads":1,"attention_head_dim":6,"axes_dims_rope":[2,2,2],
  "in_channels":4,"joint_attention_dim":5,"pooled_projection_dim":3})";

const std::string kSmallSd3 = R"({"_class_name":"SD3Transformer2DModel","num_layers":2,
  "num_attention_heads":1,"attention_head_dim":6,"caption_projection_dim":6,"in_channels":1,
  "out_channels":1,"joint_attention_dim":5,"pooled_projection_dim":3,"pos_embed_max_size":4,
  "dual_attention_layers":[0],"qk_norm":"rms_norm"})";

double part(const Workload& work, const std::string& name) {
  for (const WorkPart& p : work.forward) {
    if (p.name == name) return p.flops;
  }
  FAIL("no part " << name);
  return 0;
}

TEST_CASE("configurations have the parameters that diffusers counts") {
  const auto [json, count] = GENERATE(table<std::string, int64_t>({
      {R"({"_class_name":"QwenImageTransformer2DModel"})", 20'430'401'088},
      {R"({"_class_name":"FluxTransformer2DModel","guidance_embeds":true})", 11'901'408'320},
      {R"({"_class_name":"FluxTransformer2DModel"})", 11'891'178'560},
      {R"({"_class_name":"WanTransformer3DModel","num_attention_heads":12,"ffn_dim":8960,
           "num_layers":30})",
       1'418'996'800},
      {R"({"_class_name":"WanTransformer3DModel"})", 14'288'491'584},
      {R"({"_class_name":"SD3Transformer2DModel","num_layers":24,"num_attention_heads":24,
           "caption_projection_dim":1536,"pos_embed_max_size":384,"qk_norm":"rms_norm",
           "dual_attention_layers":[0,1,2,3,4,5,6,7,8,9,10,11,12],"sample_size":128,
           "in_channels":16,"out_channels":16})",
       2'243'171'520},
  }));
  INFO(json);
  const auto model = model_of(json);
  ParameterSet parameters(model->parameter_specs());
  CHECK(parameters.count() == count);

  parameters.allocate(at::TensorOptions(at::kMeta));
  int64_t elements = 0;
  for (const ParameterSpec& spec : parameters.specs()) {
    const at::Tensor& tensor = parameters[spec.name];
    REQUIRE(tensor.sizes() == at::IntArrayRef(spec.shape));
    if (!spec.buffer) elements += tensor.numel();
  }
  CHECK(elements == count);
}

TEST_CASE("every linear layer belongs to a stream of its model") {
  for (const std::string& json : {small_qwen(), kSmallWan, kSmallFlux, kSmallSd3}) {
    const auto model = model_of(json);
    INFO(model->class_name());
    const auto streams = stream_tokens(*model, {32, 32, 1, 3});
    double all = 0, expected = 0;
    for (const LinearWork& linear : linear_work(*model)) {
      if (!linear.stream.empty()) CHECK(tokens_of(streams, linear.stream) > 0);
      all += linear.flops_per_row;
    }
    for (const ParameterSpec& spec : model->parameter_specs()) {
      if (spec.buffer || spec.shape.size() < 2 || contains(spec.name, "scale_shift")) continue;
      expected += 2 * static_cast<double>(c10::multiply_integers(spec.shape));
    }
    CHECK(all == expected);
  }
}

TEST_CASE("QwenImage's work, counted by hand") {
  const Workload work = count_work(*model_of(small_qwen()), {32, 32, 1, 3}, 2);
  REQUIRE(work.streams.size() == 2);
  CHECK(tokens_of(work.streams, "image") == 4);
  CHECK(tokens_of(work.streams, "joint") == 7);
  const double square = 12 * 12, mlp = 2 * 4 * square;
  // Embedding, q, k, v, out, MLP; the image's output as well.
  CHECK(part(work, "linear image") == 2 * 4 * 2 * (4 * 12 + 4 * square + mlp + 12 * 4));
  CHECK(part(work, "linear text") == 2 * 3 * 2 * (5 * 12 + 4 * square + mlp));
  CHECK(part(work, "conditioning") ==
        2 * 2 * (256 * 12 + square + 6 * square + 6 * square + 2 * square));
  CHECK(part(work, "attention joint") == 2 * 4 * 7 * 7 * 12);
  CHECK(work.forward.size() == 4);
  CHECK(work.step_flops(false) == 3 * work.forward_flops());
  CHECK(work.step_flops(true) == 4 * work.forward_flops());

  // The second timestep goes through the embedding and the image's modulation.
  const Workload edit = count_work(*model_of(small_qwen(true)), {32, 32, 1, 3}, 1);
  CHECK(part(edit, "conditioning") ==
        part(work, "conditioning") / 2 + 2 * (256 * 12 + square + 6 * square));
}

TEST_CASE("Flux's work, counted by hand: single blocks see both streams") {
  const Workload work = count_work(*model_of(kSmallFlux), {32, 16, 1, 3}, 1);
  const double square = 6 * 6, block = 4 * square + 8 * square;
  CHECK(part(work, "linear image") == 2 * 2 * (4 * 6 + block + 6 * 4));
  CHECK(part(work, "linear text") == 3 * 2 * (5 * 6 + block));
  CHECK(part(work, "linear joint") == 5 * 2 * 2 * (3 + 4 + 5) * square);
  // Timestep, pooled text, 2 x 6 modulations of the double block, 3 of each single one, 2 last.
  CHECK(part(work, "conditioning") ==
        2 * (256 * 6 + square + 3 * 6 + square + (12 + 2 * 3 + 2) * square));
  CHECK(part(work, "attention joint") == 3 * 4 * 5 * 5 * 6);
}

TEST_CASE("SD3's work, counted by hand: dual attention, a last block without text") {
  const Workload work = count_work(*model_of(kSmallSd3), {32, 16, 1, 3}, 1);
  const double square = 6 * 6, mlp = 8 * square;
  CHECK(part(work, "linear image") ==
        2 * 2 * (4 * 6 + (4 + 4) * square + mlp + 4 * square + mlp + 6 * 4));
  CHECK(part(work, "linear text") == 3 * 2 * (5 * 6 + 4 * square + mlp + 3 * square));
  CHECK(part(work, "conditioning") ==
        2 * (256 * 6 + square + 3 * 6 + square + (9 + 6 + 6 + 2 + 2) * square));
  CHECK(part(work, "attention joint") == 2 * 4 * 5 * 5 * 6);
  CHECK(part(work, "attention image") == 4 * 2 * 2 * 6);
}

TEST_CASE("Wan's work, counted by hand: text is read by cross-attention") {
  const Workload work = count_work(*model_of(kSmallWan), {16, 32, 5, 3}, 1);
  CHECK(tokens_of(work.streams, "video") == 4);  // 2 frames of 1 x 2
  const double square = 12 * 12;
  CHECK(part(work, "linear video") ==
        4 * 2 * (4 * 12 + 2 * (4 * square + 2 * square + 2 * 12 * 5) + 12 * 4));
  CHECK(part(work, "linear text") == 3 * 2 * (3 * 12 + square + 2 * 2 * square));
  CHECK(part(work, "conditioning") == 2 * (4 * 12 + square + 6 * square));
  CHECK(part(work, "attention self") == 2 * 4 * 4 * 4 * 12);
  CHECK(part(work, "attention cross") == 2 * 4 * 4 * 3 * 12);
}

TEST_CASE("sizes that do not fit are refused") {
  const auto refusal = [](const std::string& json, SampleSize size, int64_t samples = 1) {
    return error_text([&] { count_work(*model_of(json), size, samples); });
  };
  CHECK(
      contains(refusal(small_qwen(), {40, 32, 1, 3}), "height of 40 pixels: expected a multiple"));
  CHECK(contains(refusal(small_qwen(), {32, -16, 1, 3}), "width of -16 pixels"));
  CHECK(contains(refusal(small_qwen(), {32, 32, 5, 3}), "makes single images"));
  CHECK(contains(refusal(small_qwen(), {32, 32, 1, 0}), "0 text"));
  CHECK(contains(refusal(small_qwen(), {1 << 20, 1 << 20, 1, 3}), "expected at least 1"));
  CHECK(contains(refusal(small_qwen(), {32, 32, 1, 3}, 0), "0 samples"));
  CHECK(contains(refusal(kSmallWan, {32, 32, 6, 3}), "6 frames: expected 1 more than a multiple"));
  CHECK(contains(refusal(kSmallSd3, {32, 80, 1, 3}), "the model's position table has 4"));
}

TEST_CASE("ranks share the work: tokens, heads, FLOPs, bytes by hand") {
  const auto model = model_of(small_qwen());
  const WorkSharing s = share_work(*model, {32, 32, 1, 3}, 1, {1, 2, 2}, {});
  REQUIRE(s.ranks.size() == 4);
  CHECK(s.ranks[0].tokens == std::vector<int64_t>{1, 1});
  CHECK(s.ranks[3].tokens == std::vector<int64_t>{0, 1});
  CHECK(s.ranks[1].heads == plan::Interval{1, 2});
  const double image = part(s.work, "linear image") / 4, text = part(s.work, "linear text") / 3;
  const double conditioning = part(s.work, "conditioning");
  // Blocks of 4 and 3 rows, 7 keys, one head.
  CHECK(s.ranks[0].flops == image + text + conditioning + 4 * 4 * 7 * 6);
  CHECK(s.ranks[3].flops == image + conditioning + 4 * 3 * 7 * 6);
  CHECK(s.slowest() == s.ranks[0].flops);
  // Elements: q, k, v there 6, out 2, K and V of the own block 8; back 2 and 6 and 8, and in fp32
  // the gradients of both blocks, 14. Each x 6 channels.
  CHECK(s.ranks[0].traffic.forward == (6 + 2 + 8) * 2 * 6);
  CHECK(s.ranks[0].traffic.backward == (2 + 6 + 8) * 2 * 6 + 14 * 4 * 6);
}

TEST_CASE("even shares add up to the whole") {
  const auto model = model_of(kSmallSd3);
  const WorkSharing s = share_work(*model, {64, 64, 1, 8}, 3, {2, 4, 1}, {});
  const double conditioning = part(s.work, "conditioning");
  for (const RankShare& rank : s.ranks) {
    CHECK(rank.flops - conditioning == (s.work.forward_flops() - conditioning) / 4);
  }
}

TEST_CASE("Wan's text is whole on every rank") {
  const WorkSharing s = share_work(*model_of(kSmallWan), {32, 32, 5, 3}, 1, {1, 2, 1}, {});
  REQUIRE(s.plan.streams.size() == 1);
  const double whole = part(s.work, "conditioning") + part(s.work, "linear text");
  CHECK(s.ranks[0].flops == whole + (s.work.forward_flops() - whole) / 2);
}

bool warns(const WorkSharing& s, const std::string& text) {
  return std::any_of(s.warnings.begin(), s.warnings.end(),
                     [&](const std::string& warning) { return contains(warning, text); });
}

TEST_CASE("pads and replicated text are work") {
  const auto model = model_of(small_qwen());
  ParallelOptions o;
  o.head_split = plan::HeadSplit::kPadded;
  o.token_split = plan::TokenSplit::kPadded;
  const WorkSharing padded = share_work(*model, {32, 32, 1, 4}, 1, {1, 1, 3}, o);
  const double conditioning = part(padded.work, "conditioning");
  const double image = part(padded.work, "linear image") / 4;
  const double text = part(padded.work, "linear text") / 4;
  const double attention = 4 * 8 * 8 * 6;  // of one head
  CHECK(padded.ranks[2].tokens == std::vector<int64_t>{0, 0});
  CHECK(padded.ranks[2].flops == conditioning + 2 * image + 2 * text + attention);

  o.text_placement = plan::StreamPlacement::kReplicated;
  const WorkSharing replicated = share_work(*model, {32, 32, 1, 4}, 1, {1, 1, 2}, o);
  CHECK(replicated.ranks[1].flops == conditioning + 2 * image + 4 * text + attention);
}

TEST_CASE("waste is said") {
  const auto qwen = model_of(small_qwen());
  ParallelOptions o;
  CHECK(share_work(*qwen, {32, 32, 1, 4}, 1, {1, 1, 1}, o).warnings.empty());

  const WorkSharing ring = share_work(*qwen, {32, 32, 1, 3}, 1, {1, 2, 2}, o);
  CHECK(warns(ring, "few tokens: 3 text tokens over sp 4 leave 1 rank without"));
  CHECK(warns(ring, "sp 4 is larger than the 2 heads"));
  CHECK(warns(ring, "short ring blocks: 3 tokens"));
  CHECK(warns(ring, "communication: attention computes"));
  CHECK(warns(ring, "uneven shards"));
  CHECK_FALSE(warns(ring, "pad"));

  o.head_split = plan::HeadSplit::kPadded;
  o.token_split = plan::TokenSplit::kPadded;
  const WorkSharing padded = share_work(*qwen, {32, 32, 1, 4}, 1, {1, 1, 3}, o);
  CHECK(warns(padded, "padded heads: 2 heads over ulysses3 become 3, 33.3 %"));
  CHECK(warns(padded, "padded tokens: 4 rows of pads beside 8 tokens, 33.3 %"));
  CHECK(padded.pad_rows(2) == 4);
  CHECK(padded.padded_heads(2) == 1);
  CHECK(padded.padded_heads(0) == 0);

  o.text_placement = plan::StreamPlacement::kReplicated;
  const WorkSharing replicated = share_work(*qwen, {32, 32, 1, 4}, 1, {1, 1, 2}, o);
  CHECK(warns(replicated, "replicated text: every rank computes the linear layers of all 4"));
  CHECK(replicated.ranks[0].rows == std::vector<int64_t>{4, 2});
  CHECK(replicated.ranks[0].tokens == std::vector<int64_t>{2, 2});

  CHECK(contains(error_text([&] {
                   share_work(*qwen, {32, 32, 1, 3}, 1, {1, 1, 4}, {});
                 }),
                 "2 heads cannot be split evenly over ulysses=4"));
}

// Bytes to others that the rank's recorded calls sent; those of the backward end in '.
AttentionTraffic recorded(const std::vector<CollectiveCall>& calls, int ulysses_rank, int sp_rank,
                          int ring_rank) {
  AttentionTraffic sent;
  for (const CollectiveCall& call : calls) {
    const int me = call.group == "ulysses" ? ulysses_rank
                   : call.group == "ring"  ? ring_rank
                                           : sp_rank;
    int64_t elements = 0;
    for (const int64_t n : call.send) elements += n;
    if (call.kind == CallKind::kAllGather) {
      elements *= static_cast<int64_t>(call.receive.size()) - 1;
    } else if (call.kind != CallKind::kSend && !call.send.empty()) {
      elements -= call.send[static_cast<size_t>(me)];
    }
    const int64_t bytes = elements * (call.dtype == "Float" ? 4 : 2);
    (call.tag.ends_with('\'') ? sent.backward : sent.forward) += bytes;
  }
  return sent;
}

TEST_CASE("traffic is what attention sends") {
  const auto mode = GENERATE(plan::RingMode::kRotate, plan::RingMode::kAllGather);
  const auto mesh = GENERATE(comm::MeshShape{1, 1, 3}, comm::MeshShape{1, 3, 1},
                             comm::MeshShape{1, 2, 2}, comm::MeshShape{1, 1, 1});
  const auto placement =
      GENERATE(plan::StreamPlacement::kSharded, plan::StreamPlacement::kReplicated);
  const auto heads = GENERATE(plan::HeadSplit::kUneven, plan::HeadSplit::kPadded);
  plan::AttentionPlanOptions o;
  o.mesh = mesh, o.q_heads = o.kv_heads = 5;
  o.streams = {{"text", 7, placement}, {"image", 13}};
  o.head_split = heads, o.ring_mode = mode;
  const plan::AttentionPlan plan = plan::make_attention_plan(o);
  INFO(to_table(plan));

  sim::World world(plan.sp());
  world.run([&](sim::RankContext& rank) {
    const comm::Mesh group(rank, plan.mesh);
    const attention::SequenceParallelAttention attend(
        plan, group, attention::make_local_attention("auto", at::kCPU, at::kBFloat16, false));
    std::vector<attention::StreamQkv> streams;
    for (const plan::StreamPlan& stream : plan.streams) {
      const int64_t rows = stream.local_rows[static_cast<size_t>(group.sp_rank())];
      const auto leaf = [&] {
        return at::ones({2, rows, 5, 8}, at::kBFloat16).requires_grad_(true);
      };
      streams.push_back({leaf(), leaf(), leaf()});
    }
    const auto result = attend(streams);
    (result.streams[0].sum() + result.streams[1].sum()).backward();
  });
  for (int r = 0; r < plan.sp(); ++r) {
    INFO("SP rank " << r);
    const AttentionTraffic sent = recorded(world.calls(r), r % mesh.ulysses, r, r / mesh.ulysses);
    const AttentionTraffic counted = attention_traffic(plan, r, 2, 8);
    CHECK(counted.forward == sent.forward);
    CHECK(counted.backward == sent.backward);
  }
}

}  // namespace
}  // namespace shardproof::models
