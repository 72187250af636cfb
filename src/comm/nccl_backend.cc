#include "comm/nccl_backend.h"

#include <dlfcn.h>

#include <filesystem>

#include "base/error.h"
#include "base/json_file.h"

namespace shardproof::comm {
namespace {

template <class Function>
Function exported(const char* symbol) {
  const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const std::string module = (folder / "shardproof_nccl.so").string();
  static void* handle = dlopen(module.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!handle) {
    const char* why = dlerror();
    throw_error(ErrorKind::kMissing,
                "--transport nccl: cannot load {} ({}); it is built where the CUDA toolkit's and "
                "NCCL's headers are",
                module, why ? why : "no reason given");
  }
  void* address = dlsym(handle, symbol);
  SP_CHECK(address != nullptr, "{} has no {}", module, symbol);
  return reinterpret_cast<Function>(address);
}

// [[2,3],[4]] -> 10
int64_t elements(const JsonValue& shapes) {
  int64_t total = 0;
  for (const JsonValue& shape : shapes.elements()) {
    int64_t count = 1;
    for (const int64_t size : shape.as_integers()) count *= size;
    total += count;
  }
  return total;
}

}  // namespace

void require_nccl() { exported<MakeNcclBackend>(kMakeNcclBackend); }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout,
                                                    at::Device device) {
  return exported<MakeNcclBackend>(kMakeNcclBackend)(store, rank, size, timeout, device);
}

std::vector<FlightRecord> nccl_flight_records(int64_t after) {
  const JsonValue trace =
      parse_json(exported<NcclTraceJson>(kNcclTraceJson)(), "NCCL's flight recorder");
  std::vector<FlightRecord> records;
  const auto entries = trace.find("entries");
  if (!entries) return records;
  for (const JsonValue& entry : entries->elements()) {
    FlightRecord record;
    record.id = entry.at("record_id").as_integer();
    if (record.id <= after) continue;
    record.name = entry.at("profiling_name").as_string();
    if (record.name.starts_with("nccl:")) record.name = record.name.substr(5);
    record.input = elements(entry.at("input_sizes"));
    record.output = elements(entry.at("output_sizes"));
    records.push_back(record);
  }
  return records;
}

std::vector<std::string> nccl_unfinished() { return exported<NcclUnfinished>(kNcclUnfinished)(); }

}  // namespace shardproof::comm
