// Threads that run one program side by side and put together, at meeting points, what none of them
// can compute alone. In shared memory, without collectives: the reference of a parallel run must
// not use what it is to judge.
#pragma once
#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace shardproof::verify {

class Lockstep {
 public:
  using Values = std::vector<at::Tensor>;
  // The values of all members, in order -> what each of them gets.
  using Compute = std::function<std::vector<Values>(const std::vector<Values>&)>;

  Lockstep(int members, at::Device device);
  int members() const { return members_; }
  at::Device device() const { return device_; }

  // program(member) on a thread each, as threads of ranks compute (sim/rank_thread.h). Throws what
  // the first member that failed has thrown.
  void run(const std::function<void(int member)>& program);

  // Inside run(): waits until all members have come to the meeting `what`, lets the last of them
  // compute for all, and returns this member's part. Errors (kInternal): members meet in different
  // places.
  Values meet(int member, const std::string& what, Values mine, const Compute& compute);

 private:
  struct Abandoned {};  // another member has failed
  void fail(std::exception_ptr error);

  int members_;
  at::Device device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr error_;
  std::string what_;
  int arrived_ = 0;
  int64_t meeting_ = 0;
  std::vector<Values> given_, results_;
};

}  // namespace shardproof::verify
