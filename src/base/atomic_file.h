// Files that are either the old or the new one, never half of the new one: a killed run, a full
// disk or a power cut must not leave a report or a checkpoint that a later reader takes for whole.
#pragma once
#include <filesystem>
#include <string_view>

namespace shardproof {

// Streams bytes into a temporary file beside the target; commit() puts it in the target's place.
// - The temporary file is named .shardproof-<pid>-<n>.tmp. It is removed by the destructor and on
//   any failure; only a killed process leaves it behind.
// - A replaced file hands on its permissions; a new one gets those of the process's umask.
// - A symbolic link stays a link: the file that it points to is replaced.
// - A device or a pipe (/dev/stdout, /dev/null) cannot be replaced and is written directly.
// Errors: Error of kind kBadInput with the path and the system's reason; the old file is then
// untouched. The folder is not created. One object belongs to one thread.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& target);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // One system call or more for each call: gather small pieces before.
  void append(std::string_view bytes);
  // Returns once the new file is on the disk under its name. Nothing may be appended after it.
  void commit();

 private:
  void open_temporary(unsigned mode, bool replaces);
  void open_directly();
  void sync_and_rename();
  void abandon() noexcept;
  void require_open(const char* call) const;
  [[noreturn]] void fail(const char* step, int error);

  std::filesystem::path target_;
  std::filesystem::path temporary_;  // empty: the target is written directly
  int descriptor_ = -1;              // -1: committed or failed
};

// The whole file at once; the same promises and errors.
void write_file_atomically(const std::filesystem::path& target, std::string_view bytes);

}  // namespace shardproof
