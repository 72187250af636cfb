#include "verify/models/model_golden.h"

#include <ATen/ATen.h>

#include <cmath>

#include "base/json_file.h"
#include "io/safetensors.h"
#include "models/checkpoint.h"
#include "verify/golden.h"
#include "verify/golden_problems.h"

namespace shardproof::verify {
namespace {

namespace fs = std::filesystem;
using at::Tensor;

constexpr double kLossTolerance = 1e-9;

void read_inputs(ModelGolden& golden, const JsonValue& record, GoldenProblems& problems) {
  const auto file = SafetensorsFile::open(golden.folder / "inputs.safetensors");
  for (const SafetensorsEntry& entry : file.entries()) {
    problems.attempt([&] {
      const Tensor x = file.tensor(entry.name);
      if (!at::isfinite(x).all().item<bool>()) {
        bad_input("inputs.safetensors: tensor \"{}\" has values that are not finite", entry.name);
      }
      (entry.name == "cotangent" ? golden.cotangent : golden.inputs[entry.name]) = x;
    });
  }
  problems.attempt([&] {
    const auto shapes = record.at("forward_arguments").find("img_shapes");
    if (!shapes) return;
    for (const JsonValue& sample : shapes->elements()) {
      auto& images = golden.inputs.img_shapes.emplace_back();
      for (const JsonValue& image : sample.elements()) {
        const auto sizes = image.as_integers();
        if (sizes.size() != 3) image.fail("expected (frames, rows, columns)");
        images.push_back({sizes[0], sizes[1], sizes[2]});
      }
    }
  });
}

void read_record(ModelGolden& golden, const JsonValue& record) {
  const JsonValue counts = record.at("token_counts");
  const auto image = counts.find("image");
  golden.image_tokens = (image ? *image : counts.at("video")).as_integer();
  golden.text_tokens = counts.at("text").as_integer();
  golden.heads = record.at("heads").as_integer();
  const JsonValue errors = record.at("float32_vs_float64");
  golden.fp32_output = errors.at("output_rel_l2").as_number();
  golden.fp32_parameter_grad = errors.at("worst_param_grad_rel_l2").as_number();
  golden.fp32_input_grad = errors.at("worst_input_grad_rel_l2").as_number();
}

void read_expected(ModelGolden& golden, GoldenProblems& problems) {
  const auto file = SafetensorsFile::open(golden.folder / "expected.safetensors");
  for (const SafetensorsEntry& entry : file.entries()) {
    problems.attempt([&] {
      const Tensor x = file.tensor(entry.name);
      if (entry.dtype != "F64" || !at::isfinite(x).all().item<bool>()) {
        bad_input("expected.safetensors: tensor \"{}\": expected finite F64 values", entry.name);
      }
      golden.expected[entry.name] = x;
    });
  }
}

// A tensor that `expected` must hold, with the shape of `like`.
void require(const ModelGolden& golden, const std::string& name, const Tensor& like,
             GoldenProblems& problems) {
  const auto it = golden.expected.find(name);
  if (it == golden.expected.end()) {
    problems.add(fmt::format("expected.safetensors: tensor \"{}\" is missing", name));
  } else if (it->second.sizes() != like.sizes()) {
    problems.add(fmt::format("expected.safetensors: tensor \"{}\" has shape {}; expected {}", name,
                             c10::str(it->second.sizes()), c10::str(like.sizes())));
  }
}

void check_whole(const ModelGolden& golden, GoldenProblems& problems) {
  if (!golden.cotangent.defined()) {
    problems.add("inputs.safetensors: tensor \"cotangent\" is missing");
    return;
  }
  require(golden, "output", golden.cotangent, problems);
  for (const models::ParameterSpec& spec : golden.parameters.specs()) {
    if (!spec.buffer) {
      require(golden, "grad.param." + spec.name, golden.parameters[spec.name], problems);
    }
  }
  for (const auto& [name, x] : golden.inputs.tensors()) {
    if (x.is_floating_point()) require(golden, "grad.input." + name, x, problems);
  }
  const auto loss = golden.expected.find("loss");
  if (loss == golden.expected.end() || loss->second.numel() != 1) {
    problems.add("expected.safetensors: tensor \"loss\" is missing or no scalar");
  }
  if (!problems.empty()) return;
  const double sum =
      (golden.expected.at("output") * golden.cotangent.to(at::kDouble)).sum().item<double>();
  const double stored = loss->second.item<double>();
  if (std::abs(sum - stored) > kLossTolerance * std::max(1.0, std::abs(sum))) {
    problems.add(fmt::format("expected.safetensors: loss is {}, but sum(output * cotangent) is {}",
                             stored, sum));
  }
}

}  // namespace

ModelGolden load_model_golden(const fs::path& folder) {
  if (!is_golden_folder(folder)) {
    bad_input(
        "{} is not a golden: expected a folder with case.json, inputs.safetensors and "
        "expected.safetensors",
        folder.string());
  }
  const JsonValue record = read_json_file(folder / "case.json");
  if (golden_kind(folder) != "model") {
    bad_input("golden {} is of kind \"{}\"; expected \"model\"", folder.string(),
              golden_kind(folder));
  }
  models::LoadedModel loaded = models::load_model(folder);
  ModelGolden golden{.name = {},
                     .folder = fs::canonical(folder),
                     .model = std::move(loaded.model),
                     .parameters = std::move(loaded.parameters)};
  golden.name = golden.folder.filename().string();
  GoldenProblems problems;
  problems.attempt([&] { read_record(golden, record); });
  problems.attempt([&] { read_inputs(golden, record, problems); });
  problems.attempt([&] { read_expected(golden, problems); });
  if (problems.empty()) check_whole(golden, problems);
  problems.raise_if_any(golden.folder);
  return golden;
}

}  // namespace shardproof::verify
