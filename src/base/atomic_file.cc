#include "base/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace shardproof {
namespace {

namespace fs = std::filesystem;

fs::path folder_of(const fs::path& file) {
  return file.has_parent_path() ? file.parent_path() : fs::path(".");
}

// The file that a chain of symbolic links ends at, which need not exist. At most 40 links, as the
// kernel does; a longer chain is left to fail at the next system call.
fs::path follow_links(fs::path file) {
  std::error_code ignored;
  for (int links = 0; links < 40 && fs::is_symlink(file, ignored); ++links) {
    const fs::path next = fs::read_symlink(file, ignored);
    if (ignored) break;
    file = next.is_absolute() ? next : folder_of(file) / next;
  }
  return file;
}

fs::path temporary_name(const fs::path& folder) {
  // Not made from the target's name, which may already be as long as a name can be.
  static std::atomic<unsigned> counter{0};
  return folder / fmt::format(".shardproof-{}-{}.tmp", ::getpid(), counter++);
}

}  // namespace

AtomicFile::AtomicFile(const fs::path& target) : target_(target) {
  struct stat status {};
  const bool exists = ::stat(target.c_str(), &status) == 0;
  if (!exists && errno != ENOENT) fail("look at it", errno);
  if (exists && S_ISDIR(status.st_mode)) fail("open it", EISDIR);
  if (!target.has_filename()) {  // "" or "new_folder/"
    fail("open it", target.empty() ? ENOENT : EISDIR);
  }
  if (exists && !S_ISREG(status.st_mode)) {
    open_directly();
  } else {
    target_ = follow_links(target);
    open_temporary(exists ? status.st_mode & 07777 : 0666, exists);
  }
}

AtomicFile::~AtomicFile() { abandon(); }

void AtomicFile::open_directly() {
  descriptor_ = ::open(target_.c_str(), O_WRONLY | O_CLOEXEC);
  if (descriptor_ < 0) fail("open it", errno);
}

void AtomicFile::open_temporary(unsigned mode, bool replaces) {
  do {  // a process of the same number on another host, or a killed one, may have left its file
    temporary_ = temporary_name(folder_of(target_));
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  } while (descriptor_ < 0 && (errno == EEXIST || errno == EINTR));
  if (descriptor_ < 0) {
    const int error = errno;
    temporary_.clear();
    fail("create a temporary file beside it", error);
  }
  // open() has applied the umask, which the old file's permissions need not respect. File systems
  // without permissions refuse; then there is nothing to hand on.
  if (replaces) ::fchmod(descriptor_, mode);
}

void AtomicFile::append(std::string_view bytes) {
  require_open("append");
  constexpr size_t kLargestWrite = size_t{1} << 30;  // Linux writes at most 2 GiB a call
  while (!bytes.empty()) {
    const ssize_t written =
        ::write(descriptor_, bytes.data(), std::min(bytes.size(), kLargestWrite));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write to it", errno);
    if (written == 0) fail("write to it", ENOSPC);
    bytes.remove_prefix(static_cast<size_t>(written));
  }
}

void AtomicFile::commit() {
  require_open("commit");
  if (!temporary_.empty()) {
    sync_and_rename();
  } else {
    const int closed = ::close(descriptor_);
    descriptor_ = -1;
    if (closed != 0 && errno != EINTR) fail("close it", errno);
  }
}

void AtomicFile::sync_and_rename() {
  // Without this fsync a crash may leave the new name on an empty file: the rename can reach the
  // disk before the data.
  if (::fsync(descriptor_) != 0) fail("flush it to the disk", errno);
  const int closed = ::close(descriptor_);
  descriptor_ = -1;
  if (closed != 0 && errno != EINTR) fail("close it", errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("put the new file there", errno);
  temporary_.clear();
  // The rename itself is durable once the folder is. Some file systems cannot flush a folder
  // (EINVAL) and some folders may be written but not read (EACCES): the file is in place all the
  // same.
  const int folder = ::open(folder_of(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  const int error = ::fsync(folder) == 0 ? 0 : errno;
  ::close(folder);
  if (error != 0 && error != EINVAL) fail("flush its folder (the new file is in place)", error);
}

void AtomicFile::abandon() noexcept {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
}

void AtomicFile::require_open(const char* call) const {
  SP_CHECK(descriptor_ >= 0, "{} on {}, which was committed before or has failed", call,
           target_.string());
}

void AtomicFile::fail(const char* step, int error) {
  abandon();
  bad_input(
      "cannot write {}: could not {}: {}. Check the folder, its permissions and its free space",
      target_.string(), step, std::strerror(error));
}

void write_file_atomically(const fs::path& target, std::string_view bytes) {
  AtomicFile file(target);
  file.append(bytes);
  file.commit();
}

}  // namespace shardproof
