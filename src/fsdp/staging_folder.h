// A folder that is complete or not there: it is filled under another name, <folder>.partial, and
// renamed when all is on the disk.
#pragma once
#include <filesystem>

namespace shardproof::fsdp {

// The folder without a trailing slash, and where it is filled.
std::filesystem::path plain_folder(const std::filesystem::path& folder);
std::filesystem::path partial_folder(const std::filesystem::path& folder);

// Many ranks may fill one folder; its owner makes, publishes and removes it, and for the others
// these calls do nothing. What is not published is removed with the object.
class StagingFolder {
 public:
  StagingFolder(const std::filesystem::path& folder, bool is_owner);
  ~StagingFolder() { remove(); }
  StagingFolder(const StagingFolder&) = delete;
  StagingFolder& operator=(const StagingFolder&) = delete;

  const std::filesystem::path& path() const { return partial_; }

  // Removes what a killed process left under the name; makes folders above it. `replace`: the
  // folder may be there, and keeps its content until publish() exchanges the two. Errors
  // (kBadInput): the folder is there already, or cannot be made.
  void create(bool replace = false);
  // Returns once the folder is on the disk under its name; the files in it must be before. Errors
  // (kBadInput): the system's; remove() then removes it whatever its name is.
  void publish();
  void remove() noexcept;

 private:
  [[noreturn]] void fail(const char* step, const std::error_code& error) const;

  std::filesystem::path folder_, partial_;
  std::filesystem::path to_remove_;  // empty: nothing made, or published
  bool is_owner_;
  bool replaces_ = false;
};

}  // namespace shardproof::fsdp
