#include "fsdp/staging_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

#include "base/error.h"

namespace shardproof::fsdp {
namespace {

namespace fs = std::filesystem;

// A rename is durable once the folder above is. Some file systems cannot flush a folder (EINVAL)
// and some folders may be written but not read: the new name is in place all the same.
std::error_code flush_folder(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return {};
  const int error = ::fsync(descriptor) == 0 ? 0 : errno;
  ::close(descriptor);
  return {error == EINVAL ? 0 : error, std::generic_category()};
}

// In one step, so that there is always a whole folder under each name.
std::error_code exchange(const fs::path& a, const fs::path& b) {
  const int failed = ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE);
  return {failed ? errno : 0, std::generic_category()};
}

}  // namespace

fs::path plain_folder(const fs::path& folder) {
  return folder.has_filename() ? folder : folder.parent_path();
}

fs::path partial_folder(const fs::path& folder) { return plain_folder(folder) += ".partial"; }

StagingFolder::StagingFolder(const fs::path& folder, bool is_owner)
    : folder_(plain_folder(folder)), partial_(partial_folder(folder)), is_owner_(is_owner) {}

void StagingFolder::create(bool replace) {
  if (!is_owner_) return;
  std::error_code error;
  replaces_ = replace && fs::is_directory(fs::symlink_status(folder_, error));
  if (!replaces_ && fs::exists(fs::symlink_status(folder_, error))) {
    bad_input("{} is there already; save under another name or remove it", folder_.string());
  }
  const fs::file_status left = fs::symlink_status(partial_, error);
  if (fs::exists(left) && !fs::is_directory(left)) {
    bad_input("{} is in the way of a save; remove it", partial_.string());
  }
  fs::remove_all(partial_, error);
  if (error) fail("remove what a broken-off save has left", error);
  fs::create_directories(partial_, error);
  if (error) fail("make its folder", error);
  to_remove_ = partial_;
}

void StagingFolder::publish() {
  if (!is_owner_) return;
  std::error_code error;
  if (replaces_) {
    error = exchange(partial_, folder_);  // `to_remove_` is the old one from here on
  } else {
    fs::rename(partial_, folder_, error);  // refused where a folder with content has come up since
  }
  if (error) fail("give it its name", error);
  if (!replaces_) to_remove_ = folder_;
  error = flush_folder(folder_.has_parent_path() ? folder_.parent_path() : fs::path("."));
  if (error) fail("flush the folder above it", error);
  if (replaces_) return remove();
  to_remove_.clear();
}

void StagingFolder::remove() noexcept {
  std::error_code ignored;
  if (!to_remove_.empty()) fs::remove_all(to_remove_, ignored);
  to_remove_.clear();
}

void StagingFolder::fail(const char* step, const std::error_code& error) const {
  bad_input("cannot save {}: could not {}: {}. Check the path, its permissions and the free space",
            partial_.string(), step, error.message());
}

}  // namespace shardproof::fsdp
