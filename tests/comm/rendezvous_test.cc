// Who a process is, from what launchers set.
#include "comm/rendezvous.h"

#include <cstdlib>
#include <map>

#include "tests/file_support.h"

namespace shardproof::comm {
namespace {

using tests::contains;
using tests::error_text;

// Sets variables for its lifetime; all that launchers set are gone meanwhile.
class Environment {
 public:
  explicit Environment(const std::map<std::string, std::string>& set) {
    for (const char* name :
         {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
          "TORCHELASTIC_USE_AGENT_STORE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
          "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_PROCID",
          "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_NODELIST"}) {
      if (const char* value = std::getenv(name)) before_[name] = value;
      unsetenv(name);
    }
    for (const auto& [name, value] : set)
      setenv(name.c_str(), value.c_str(), 1), set_[name] = value;
  }
  ~Environment() {
    for (const auto& [name, value] : set_) unsetenv(name.c_str());
    for (const auto& [name, value] : before_) setenv(name.c_str(), value.c_str(), 1);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  std::map<std::string, std::string> before_, set_;
};

TEST_CASE("rendezvous: torchrun's variables", "[rendezvous]") {
  const Environment set({{"RANK", "5"},
                         {"WORLD_SIZE", "8"},
                         {"LOCAL_RANK", "1"},
                         {"LOCAL_WORLD_SIZE", "4"},
                         {"MASTER_ADDR", "node0"},
                         {"MASTER_PORT", "1234"},
                         {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  const Rendezvous r = rendezvous_from_environment();
  CHECK(r.rank == 5);
  CHECK(r.world_size == 8);
  CHECK(r.local_rank == 1);
  CHECK(r.local_size == 4);
  CHECK(r.host == "node0");
  CHECK(r.port == 1234);
  CHECK(r.store_is_there);
}

TEST_CASE("rendezvous: mpirun's variables, one host", "[rendezvous]") {
  const Environment set({{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  const Rendezvous r = rendezvous_from_environment();
  CHECK(r.rank == 1);
  CHECK(r.host == "127.0.0.1");
  CHECK(r.port == 29500);
  CHECK(!r.store_is_there);
  CHECK(r.source == "mpirun");
}

TEST_CASE("rendezvous: several hosts need an address", "[rendezvous]") {
  const Environment set({{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  CHECK(contains(error_text([] { rendezvous_from_environment(); }), "set MASTER_ADDR"));
}

TEST_CASE("rendezvous: srun's variables, the first host of the step", "[rendezvous]") {
  const Environment set({{"SLURM_PROCID", "3"},
                         {"SLURM_NTASKS", "4"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_NTASKS_PER_NODE", "2"},
                         {"SLURM_STEP_NODELIST", "gpu[07-08]"}});
  const Rendezvous r = rendezvous_from_environment();
  CHECK(r.rank == 3);
  CHECK(r.local_rank == 1);
  CHECK(r.host == "gpu07");
}

TEST_CASE("rendezvous: Slurm's lists of hosts", "[rendezvous]") {
  CHECK(first_slurm_host("node") == "node");
  CHECK(first_slurm_host("a,b") == "a");
  CHECK(first_slurm_host("node[03-07,11],login") == "node03");
  CHECK(first_slurm_host("node[3,5]") == "node3");
  CHECK(contains(error_text([] { first_slurm_host("node[3"); }), "no list of hosts"));
}

TEST_CASE("rendezvous: what makes no sense is named", "[rendezvous]") {
  const auto problem = [](const std::map<std::string, std::string>& set) {
    const Environment environment(set);
    return error_text([] { rendezvous_from_environment(); });
  };
  CHECK(contains(problem({}), "no world of processes"));
  CHECK(contains(problem({{"RANK", "0"}}), "WORLD_SIZE is not set"));
  CHECK(contains(problem({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
                 "RANK='2': expected a number from 0 to 1"));
  CHECK(contains(problem({{"RANK", "x"}, {"WORLD_SIZE", "2"}}), "RANK='x'"));
  CHECK(contains(problem({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), "WORLD_SIZE='0'"));
  CHECK(contains(problem({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "70000"}}),
                 "MASTER_PORT='70000'"));
}

}  // namespace
}  // namespace shardproof::comm
