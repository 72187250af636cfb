#include "base/atomic_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/file_support.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using tests::contains;
using tests::error_text;
using tests::read_bytes;
using tests::TempFolder;
using tests::write_bytes;

unsigned mode_of(const fs::path& file) {
  struct stat status {};
  REQUIRE(::stat(file.c_str(), &status) == 0);
  return status.st_mode & 07777;
}

// Runs `action` in a child process, which the exit status leaves without destructors; for limits
// and deaths that the test program must not suffer itself.
template <class Action>
int exit_status_of_child(Action action) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) ::_exit(action());
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

TEST_CASE("a file is written whole and nothing else stays in the folder", "[atomic_file]") {
  const TempFolder folder;
  const std::string bytes = std::string("a\0b\n", 4) + std::string(100'000, 'x');
  write_file_atomically(folder / "f", bytes);
  CHECK(read_bytes(folder / "f") == bytes);
  write_file_atomically(folder / "f", "");
  CHECK(read_bytes(folder / "f").empty());
  CHECK(folder.file_count() == 1);
}

TEST_CASE("a file is written in pieces and shows only after commit", "[atomic_file]") {
  const TempFolder folder;
  write_bytes(folder / "f", "old");
  AtomicFile file(folder / "f");
  file.append("one ");
  file.append("");
  file.append("two");
  CHECK(read_bytes(folder / "f") == "old");
  file.commit();
  CHECK(read_bytes(folder / "f") == "one two");
  CHECK(folder.file_count() == 1);
  CHECK(contains(error_text([&] { file.append("x"); }, ErrorKind::kInternal), "committed before"));
  CHECK(contains(error_text([&] { file.commit(); }, ErrorKind::kInternal), "committed before"));
  CHECK(read_bytes(folder / "f") == "one two");
}

TEST_CASE("without commit the old file stays and the temporary one goes", "[atomic_file]") {
  const TempFolder folder;
  write_bytes(folder / "f", "old");
  {
    AtomicFile file(folder / "f");
    file.append("half of the n");
    CHECK(folder.file_count() == 2);
  }
  CHECK(read_bytes(folder / "f") == "old");
  CHECK(folder.file_count() == 1);
}

TEST_CASE("a killed writer leaves the old file", "[atomic_file]") {
  const TempFolder folder;
  write_bytes(folder / "f", "old");
  const int status = exit_status_of_child([&] {
    AtomicFile file(folder / "f");
    file.append("half of the n");
    ::_exit(7);
    return 0;
  });
  CHECK(status == 7);
  CHECK(read_bytes(folder / "f") == "old");
  write_file_atomically(folder / "f", "new");  // what the dead writer left is no obstacle
  CHECK(read_bytes(folder / "f") == "new");
}

TEST_CASE("a failed write names the reason, leaves the old file and no temporary one",
          "[atomic_file]") {
  const TempFolder folder;
  write_bytes(folder / "f", "old");
  const int status = exit_status_of_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);  // the write then fails with EFBIG, after a first part of it
    const rlimit limit{1000, 1000};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    try {
      write_file_atomically(folder / "f", std::string(5000, 'x'));
    } catch (const Error& error) {
      const bool told = contains(error.what(), (folder / "f").string()) &&
                        contains(error.what(), "File too large");
      return told && error.kind() == ErrorKind::kBadInput ? 0 : 2;
    }
    return 3;
  });
  CHECK(status == 0);
  CHECK(read_bytes(folder / "f") == "old");
  CHECK(folder.file_count() == 1);
}

TEST_CASE("a file that has failed cannot be committed", "[atomic_file]") {
  if (!fs::is_character_file("/dev/full")) return;
  AtomicFile file("/dev/full");
  CHECK(contains(error_text([&] { file.append("x"); }), "No space left on device"));
  CHECK(contains(error_text([&] { file.commit(); }, ErrorKind::kInternal), "has failed"));
  CHECK(fs::is_character_file("/dev/full"));
}

TEST_CASE("devices and pipes are written directly, not replaced", "[atomic_file]") {
  write_file_atomically("/dev/null", "x");
  CHECK(fs::is_character_file("/dev/null"));

  const TempFolder folder;
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  const int reader = ::open((folder / "pipe").c_str(), O_RDONLY | O_NONBLOCK);
  REQUIRE(reader >= 0);
  write_file_atomically(folder / "pipe", "through");
  char bytes[16] = {};
  CHECK(::read(reader, bytes, sizeof(bytes)) == 7);
  CHECK(std::string(bytes) == "through");
  ::close(reader);
  CHECK(fs::is_fifo(folder / "pipe"));
  CHECK(folder.file_count() == 1);
}

TEST_CASE("targets that cannot be are errors with path and reason", "[atomic_file]") {
  const TempFolder folder;
  const auto text = [](const fs::path& target) {
    return error_text([&] { write_file_atomically(target, "x"); });
  };
  CHECK(contains(text(folder / "no/such/folder/f"), "No such file or directory"));
  CHECK(contains(text(folder / "no/such/folder/f"), (folder / "no/such/folder/f").string()));
  CHECK(contains(text(folder.path()), "Is a directory"));
  CHECK(contains(text(folder / "new/"), "Is a directory"));
  CHECK(contains(text(""), "No such file or directory"));
  write_bytes(folder / "f", "old");
  CHECK(contains(text(folder / "f/g"), "Not a directory"));
  CHECK(contains(text(folder / std::string(300, 'n')), "File name too long"));
  CHECK(folder.file_count() == 1);
}

TEST_CASE("permissions: a replaced file hands its own on, a new one follows the umask",
          "[atomic_file]") {
  const TempFolder folder;
  write_bytes(folder / "f", "old");
  for (const unsigned mode : {0600u, 0666u, 0755u}) {
    REQUIRE(::chmod((folder / "f").c_str(), mode) == 0);
    write_file_atomically(folder / "f", "new");
    CHECK(mode_of(folder / "f") == mode);
  }
  write_bytes(folder / "plain", "");
  write_file_atomically(folder / "atomic", "");
  CHECK(mode_of(folder / "atomic") == mode_of(folder / "plain"));
}

TEST_CASE("a symbolic link stays and its target is written", "[atomic_file]") {
  const TempFolder folder;
  fs::create_directory(folder / "run");
  fs::create_symlink("run/report", folder / "middle");  // relative to the folder of the link
  fs::create_symlink("middle", folder / "latest");
  for (const char* bytes : {"first", "second"}) {  // the target is missing at first
    write_file_atomically(folder / "latest", bytes);
    CHECK(fs::is_symlink(folder / "latest"));
    CHECK(fs::is_symlink(folder / "middle"));
    CHECK(read_bytes(folder / "run/report") == bytes);
  }
  fs::create_symlink("circle", folder / "circle");
  CHECK(contains(error_text([&] { write_file_atomically(folder / "circle", "x"); }),
                 "Too many levels of symbolic links"));
}

TEST_CASE("two writers of one file: the last commit wins, neither file is mixed", "[atomic_file]") {
  const TempFolder folder;
  AtomicFile a(folder / "f");
  AtomicFile b(folder / "f");
  a.append("aaaa");
  b.append("bb");
  b.commit();
  CHECK(read_bytes(folder / "f") == "bb");
  a.commit();
  CHECK(read_bytes(folder / "f") == "aaaa");
  CHECK(folder.file_count() == 1);
}

}  // namespace
}  // namespace shardproof
