#include "comm/random_streams.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

namespace shardproof::comm {
namespace {

uint64_t fnv1a(const uint8_t* bytes, size_t count) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (size_t i = 0; i < count; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3ull;
  return hash;
}

// Streams of replicas and ranks must not meet.
constexpr uint64_t kReplicaStreams = 0;
constexpr uint64_t kRankStreams = uint64_t{1} << 32;

}  // namespace

uint64_t derive_seed(uint64_t seed, uint64_t stream) {
  uint64_t x = seed + (stream + 1) * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

uint64_t derive_seed(uint64_t seed, std::string_view stream) {
  return derive_seed(seed, fnv1a(reinterpret_cast<const uint8_t*>(stream.data()), stream.size()));
}

at::Generator make_generator(uint64_t seed, at::Device device) {
  at::Generator generator = device.is_cpu() ? at::make_generator<at::CPUGeneratorImpl>(seed)
                                            : at::globalContext()
                                                  .getAcceleratorHooksInterface(device.type())
                                                  .getNewGenerator(device.index());
  generator.set_current_seed(seed);
  return generator;
}

RandomStreams::RandomStreams(uint64_t seed, const MeshShape& shape, int world_rank,
                             at::Device device)
    : replica_(make_generator(
          derive_seed(seed,
                      kReplicaStreams + static_cast<uint64_t>(coordinates(shape, world_rank).dp)),
          device)),
      rank_(make_generator(derive_seed(seed, kRankStreams + static_cast<uint64_t>(world_rank)),
                           device)) {}

uint64_t RandomStreams::replica_fingerprint() const {
  const at::Tensor state = replica_.get_state();
  return fnv1a(state.const_data_ptr<uint8_t>(), static_cast<size_t>(state.numel()));
}

}  // namespace shardproof::comm
