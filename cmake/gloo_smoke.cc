// Two ranks of c10d's Gloo backend in two threads: exit code 0 if sums and transfers are right.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <atomic>
#include <thread>

int main() {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int> right = 0;
  const auto rank = [&](int r) {
    auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(20));
    options->devices = {c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
    c10d::ProcessGroupGloo gloo(store, r, 2, options);
    std::vector<at::Tensor> sum = {at::full({5}, r + 1.0, at::kDouble)};
    gloo.allreduce(sum)->wait();
    at::Tensor in = at::arange(2, at::kFloat) + 10 * r, out = at::zeros({2}, at::kFloat);
    std::vector<int64_t> one = {1, 1};
    gloo.alltoall_base(out, in, one, one)->wait();
    right += sum[0][4].item<double>() == 3 && out[1].item<float>() == 10 + r;
  };
  std::thread other(rank, 1);
  rank(0);
  other.join();
  return right == 2 ? 0 : 1;
}
