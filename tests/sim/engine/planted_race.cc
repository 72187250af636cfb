// Proof that ThreadSanitizer sees what it is asked to see: two ranks meet in one collective, and
// with PLANT_RACE rank 0's part writes into rank 1's output, past the rendezvous.
#include <atomic>
#include <cstdio>

#include "tests/sim/engine/plain_world.h"

namespace {

using shardproof::tests::Buffer;
using shardproof::tests::PlainPart;

// Both ranks are inside their deliver() before either goes on, so that the race does not depend on
// the scheduling. Relaxed: the meeting itself must not order the ranks' accesses.
void meet(std::atomic<int>& inside) {
  inside.fetch_add(1, std::memory_order_relaxed);
  while (inside.load(std::memory_order_relaxed) < 2) {
  }
}

// Many times: ThreadSanitizer can miss two accesses that happen at the very same moment.
constexpr int kTimes = 10000;

__attribute__((noinline)) void write_neighbours_buffer(Buffer& buffer) {
  double* const data = buffer.data();
  for (int i = 0; i < kTimes; ++i) {
    *const_cast<volatile double*>(data) = 1;
  }
}

class Careless final : public PlainPart {
 public:
  Careless(Buffer* output, Buffer* neighbours, std::atomic<int>& inside)
      : PlainPart(nullptr, output), neighbours_(neighbours), inside_(inside) {}
  void deliver(const std::vector<std::shared_ptr<shardproof::sim::Part>>&,
               shardproof::sim::SharedResult&) override {
    meet(inside_);
    if (neighbours_) {
      write_neighbours_buffer(*neighbours_);
    } else {
      double* const data = output_->data();
      for (int i = 0; i < kTimes; ++i) *const_cast<volatile double*>(data) = 2;
    }
  }

 private:
  Buffer* neighbours_;
  std::atomic<int>& inside_;
};

}  // namespace

int main() {
  std::vector<Buffer> outputs(2, Buffer(4));
  std::atomic<int> inside{0};
  shardproof::tests::PlainWorld world(2, 2);
  world.run([&](shardproof::tests::PlainRank& rank) {
    const auto me = static_cast<size_t>(rank.rank());
    Buffer* neighbours = nullptr;
#ifdef PLANT_RACE
    if (me == 0) neighbours = &outputs[1];
#endif
    const int64_t group = rank.join("world", {0, 1});
    shardproof::CollectiveCall barrier;
    rank.wait(
        rank.post(group, barrier, std::make_shared<Careless>(&outputs[me], neighbours, inside)));
  });
  std::puts("done");
  return 0;
}
