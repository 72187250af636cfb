#include <cstdio>
#include <optional>

#include "cli/choose.h"
#include "cli/export_options.h"
#include "fsdp/export.h"

namespace shardproof::cli {
namespace {

fsdp::ExportOptions export_options(const ExportOptions& o) {
  using Dtype = std::optional<c10::ScalarType>;
  fsdp::ExportOptions options;
  options.config = o.config;
  options.base = o.base;
  options.dtype = choose<Dtype>("--dtype", o.dtype,
                                {{"bf16", c10::ScalarType::BFloat16},
                                 {"fp16", c10::ScalarType::Half},
                                 {"fp32", c10::ScalarType::Float},
                                 {"fp64", c10::ScalarType::Double},
                                 {"as-saved", std::nullopt}});
  options.average = o.ema;
  options.overwrite = o.overwrite;
  return options;
}

int run_export(const ExportOptions& o) {
  const fsdp::ExportReport report = fsdp::export_model(o.checkpoint, o.output, export_options(o));
  fmt::print(
      "{}: {} {} of step {} ({} numbers){}\n", o.output, report.tensors,
      report.adapters ? "adapter tensors" : "tensors", report.step, report.elements,
      report.from_base > 0 ? fmt::format(", {} of them from {}", report.from_base, o.base) : "");
  if (!report.adapters && !report.checked) {
    fmt::print(
        "no config.json: the checkpoint does not say which model it is of, so that frozen "
        "parameters and buffers may be missing; --config or --base would check it\n");
  }
  return 0;
}

}  // namespace
}  // namespace shardproof::cli

extern "C" int shardproof_run_export(const shardproof::cli::ExportOptions& options) {
  return shardproof::cli::run_export(options);
}
