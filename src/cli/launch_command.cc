#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "cli/launch_options.h"

namespace shardproof::cli {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<int> caught_signal = 0;
void note_signal(int number) { caught_signal = number; }

// A port that nobody listens on now; another process can take it before rank 0 does, which rank 0
// then reports.
int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  const bool found = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  if (fd >= 0) close(fd);
  if (!found) throw_error(ErrorKind::kMissing, "no free port on 127.0.0.1: {}", strerror(errno));
  return ntohs(address.sin_port);
}

struct Address {
  std::string host;
  int port;
};

Address store_address(const LaunchOptions& o) {
  if (o.rendezvous.empty()) {
    if (o.nodes > 1)
      bad_input("launch --nodes {}: name the store of node 0 with --rdzv HOST:PORT", o.nodes);
    return {"127.0.0.1", free_port()};
  }
  const size_t colon = o.rendezvous.rfind(':');
  const std::string port = colon == std::string::npos ? "" : o.rendezvous.substr(colon + 1);
  char* end = nullptr;
  const long number = std::strtol(port.c_str(), &end, 10);
  if (colon == 0 || port.empty() || *end != 0 || number < 1 || number > 65535) {
    bad_input("--rdzv '{}': expected HOST:PORT", o.rendezvous);
  }
  return {o.rendezvous.substr(0, colon), static_cast<int>(number)};
}

// One started rank and the pipe that its output comes through.
struct Child {
  int rank = 0;
  pid_t pid = -1;
  int output = -1;
  std::string line;  // begun, not ended
  bool ended = false;
};

void print_line(const Child& child, const std::string& line) {
  fmt::print("[{}] {}\n", child.rank, line);
}

// False at the end of the output.
bool read_output(Child& child) {
  char buffer[4096];
  const ssize_t got = read(child.output, buffer, sizeof(buffer));
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (got <= 0) {
    if (!child.line.empty()) print_line(child, child.line);
    child.line.clear();
    close(child.output);
    child.output = -1;
    return false;
  }
  child.line.append(buffer, static_cast<size_t>(got));
  for (size_t end = child.line.find('\n'); end != std::string::npos; end = child.line.find('\n')) {
    print_line(child, child.line.substr(0, end));
    child.line.erase(0, end + 1);
  }
  return true;
}

std::vector<std::pair<std::string, std::string>> environment(const LaunchOptions& o, int local,
                                                             const Address& store) {
  const int rank = o.node_rank * o.ranks + local;
  std::vector<std::pair<std::string, std::string>> set = {
      {"RANK", std::to_string(rank)},        {"WORLD_SIZE", std::to_string(o.nodes * o.ranks)},
      {"LOCAL_RANK", std::to_string(local)}, {"LOCAL_WORLD_SIZE", std::to_string(o.ranks)},
      {"MASTER_ADDR", store.host},           {"MASTER_PORT", std::to_string(store.port)}};
  if (o.share_gpu) {
    // NCCL refuses two ranks of one host on one GPU: each says that it is a host of its own, and
    // they talk over the loopback.
    set.insert(set.end(), {{"SHARDPROOF_SHARE_GPU", "1"},
                           {"NCCL_HOSTID", fmt::format("shardproof-rank-{}", rank)},
                           {"NCCL_SOCKET_IFNAME", "lo"},
                           {"NCCL_IB_DISABLE", "1"},
                           {"NCCL_NVLS_ENABLE", "0"}});
  }
  return set;
}

Child start(const LaunchOptions& o, int local, const Address& store,
            const std::vector<std::string>& words) {
  int pipe_ends[2];
  if (pipe2(pipe_ends, O_CLOEXEC) != 0) internal_error("pipe: {}", strerror(errno));
  // Everything that allocates comes before the fork.
  const auto set = environment(o, local, store);
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) internal_error("fork: {}", strerror(errno));
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // no orphans, however the launcher ends
    if (getppid() != parent) _exit(4);
    setpgid(0, 0);  // a terminal's Ctrl-C goes to the launcher, which passes it on
    dup2(pipe_ends[1], STDOUT_FILENO);
    dup2(pipe_ends[1], STDERR_FILENO);
    for (const auto& [name, value] : set) setenv(name.c_str(), value.c_str(), 1);
    execvp(argv[0], argv.data());
    dprintf(STDERR_FILENO, "shardproof: cannot run '%s': %s\n", argv[0], strerror(errno));
    _exit(static_cast<int>(ErrorKind::kMissing));
  }
  close(pipe_ends[1]);
  fcntl(pipe_ends[0], F_SETFL, O_NONBLOCK);
  return {o.node_rank * o.ranks + local, pid, pipe_ends[0], {}, false};
}

class Launch {
 public:
  explicit Launch(std::vector<Child> children) : children_(std::move(children)) {}

  int watch() {
    while (!over()) {
      pass_output();
      reap();
      if (const int number = caught_signal.exchange(0)) {
        failed(128 + number, {});
        end_all(number);
      }
      if (!ending_ && exit_code_ != 0 && Clock::now() > act_at_) {
        if (!others_.empty())
          fmt::print(stderr, "shardproof launch: {}; ending the others\n", others_);
        end_all(SIGTERM);
      }
      if (ending_ && Clock::now() > kill_at_) signal_all(SIGKILL);
    }
    return exit_code_;
  }

 private:
  static constexpr std::chrono::seconds kSettle{2};  // for ranks to end by themselves
  static constexpr std::chrono::seconds kGrace{5};   // from the polite signal to the other

  bool over() const {
    for (const Child& child : children_) {
      if (!child.ended || child.output >= 0) return false;
    }
    return true;
  }

  void pass_output() {
    std::vector<pollfd> polled;
    std::vector<Child*> of;
    for (Child& child : children_) {
      if (child.output < 0) continue;
      polled.push_back({child.output, POLLIN, 0});
      of.push_back(&child);
    }
    poll(polled.data(), polled.size(), 50);
    for (size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].revents != 0) read_output(*of[i]);
    }
    std::fflush(stdout);
  }

  void reap() {
    int status = 0;
    for (Child& child : children_) {
      if (child.ended || waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
      child.ended = true;
      if (WIFSIGNALED(status)) {
        failed(static_cast<int>(ErrorKind::kInternal),
               fmt::format("rank {} was killed by signal {} ({})", child.rank, WTERMSIG(status),
                           strsignal(WTERMSIG(status))));
        act_at_ = Clock::now();
      } else if (WEXITSTATUS(status) != 0) {
        failed(WEXITSTATUS(status),
               fmt::format("rank {} ended with exit code {}", child.rank, WEXITSTATUS(status)));
      }
    }
  }

  // The first failure is the launch's. Ranks that all end with the same code, as those of a verdict
  // do, get the time to do so.
  void failed(int exit_code, const std::string& what) {
    if (exit_code_ != 0) return;
    exit_code_ = exit_code;
    others_ = what;
    act_at_ = Clock::now() + kSettle;
  }

  void end_all(int number) {
    ending_ = true;
    kill_at_ = Clock::now() + kGrace;
    signal_all(number);
  }

  void signal_all(int number) {
    for (const Child& child : children_) {
      if (!child.ended) kill(-child.pid, number);
    }
  }

  std::vector<Child> children_;
  bool ending_ = false;
  int exit_code_ = 0;
  std::string others_;  // why the others are ended
  Clock::time_point act_at_, kill_at_;
};

}  // namespace

int run_launch(const LaunchOptions& o) {
  if (o.command.empty()) bad_input("launch: name the command behind --, such as -- verify --quick");
  if (o.ranks < 1 || o.ranks > 512) bad_input("launch -n {}: expected 1 to 512 ranks", o.ranks);
  if (o.nodes < 1 || o.node_rank < 0 || o.node_rank >= o.nodes) {
    bad_input("launch --node-rank {} of --nodes {}: expected 0 to nodes - 1", o.node_rank, o.nodes);
  }
  std::vector<std::string> words = o.command;
  if (words[0] == "verify") {
    words.insert(words.begin(), std::filesystem::read_symlink("/proc/self/exe").string());
  }
  const Address store = store_address(o);
  struct sigaction action {};
  action.sa_handler = note_signal;
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) sigaction(number, &action, nullptr);
  std::fflush(nullptr);  // or each child would print what is buffered again
  std::vector<Child> children;
  for (int local = 0; local < o.ranks; ++local) children.push_back(start(o, local, store, words));
  return Launch(std::move(children)).watch();
}

}  // namespace shardproof::cli
