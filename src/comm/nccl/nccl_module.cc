// The module that holds what links CUDA: see comm/nccl_backend.h.
#include <algorithm>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <vector>

#include "comm/nccl_backend.h"

namespace {

// Tells which of its collectives have not ended. The host does not wait in one: the first thing
// that waits for the device does, and c10d's own watchdog takes a minute to end that.
class ObservedNccl final : public c10d::ProcessGroupNCCL {
 public:
  ObservedNccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
               const c10::intrusive_ptr<Options>& options)
      : c10d::ProcessGroupNCCL(store, rank, size, options) {
    const std::lock_guard lock(all_mutex());
    all().push_back(this);
  }
  ~ObservedNccl() override {
    const std::lock_guard lock(all_mutex());
    std::erase(all(), this);
  }

  static std::vector<std::string> unfinished() {
    std::vector<std::string> names;
    const std::lock_guard lock(all_mutex());
    for (ObservedNccl* group : all()) group->add_unfinished(names);
    return names;
  }

 private:
  static std::vector<ObservedNccl*>& all() {
    static std::vector<ObservedNccl*> groups;
    return groups;
  }
  static std::mutex& all_mutex() {
    static std::mutex mutex;
    return mutex;
  }

  void add_unfinished(std::vector<std::string>& names) {
    const std::lock_guard lock(workMetaListMutex_);
    for (WorkNCCL& work : workMetaList_) {
      names.push_back(c10::str(c10d::opTypeToString(work.retrieveOpType()), " ",
                               work.getSequencenumber(), " of group ", getUid()));
    }
  }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) c10::intrusive_ptr<c10d::Backend>
shardproof_make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                             std::chrono::milliseconds timeout, at::Device device) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  auto backend = c10::make_intrusive<ObservedNccl>(store, rank, size, options);
  backend->setBoundDeviceId(device);
  return backend;
}

extern "C" __attribute__((visibility("default"))) std::string shardproof_nccl_trace_json() {
  return c10d::dump_nccl_trace_json(/*includeCollectives=*/true, /*onlyActive=*/false);
}

extern "C" __attribute__((visibility("default"))) std::vector<std::string>
shardproof_nccl_unfinished() {
  return ObservedNccl::unfinished();
}
