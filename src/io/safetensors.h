// Tensors in files of the safetensors format: https://github.com/huggingface/safetensors#format
// (8 bytes header length, JSON header, data). Reads what the reference implementation reads, and
// writes the bytes that it writes (compared with its release 0.8.0).
#pragma once
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace shardproof {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;           // as the format spells it: "F32", "BF16", ...
  std::vector<int64_t> shape;  // [] is a scalar
  uint64_t begin, end;         // bytes, half open, from the start of the data (not of the file)
};

// Which data a tensor shares with the mapped file; other data is copied.
enum class Alignment {
  // At multiples of 64 bytes of memory: kernels give other bits for operands off such a line.
  kLine,
  // At multiples of the element's size, less than which C++ does not allow. For tensors that are
  // copied before anything is computed with them. The reference writer aligns its data to 8 bytes
  // and no more: kLine may copy a whole file of it, kElement nothing.
  kElement,
};

// As the format spells it: "F32". Errors (kBadInput): a dtype that save_safetensors cannot write.
std::string safetensors_dtype(at::ScalarType type);
// Its inverse. Errors (kBadInput): a dtype that is not among those that SafetensorsFile::tensor
// reads.
at::ScalarType safetensors_scalar_type(std::string_view dtype);

// A file that is open for reading; a cheap copy.
//
// The file is mapped into memory (privately), not read, and each tensor keeps the mapping alive:
// the object may go before its tensors. Treat tensors as read-only. Writing to one never changes
// the file, but may show in what later calls of tensor() return; clone() first, or open the file
// again.
//
// The file must not change while it is mapped. Replacing it by rename (write_file_atomically,
// save_safetensors) is safe: the old file lives on until the last tensor goes. Shortening it in
// place is not: the next access beyond its end kills the process (SIGBUS), as with every mapping.
class SafetensorsFile {
 public:
  // Checks everything but the values before it returns. Errors, of kind kBadInput, name the file
  // and the tensor: no regular file; too short; header oversize (> 100 MB) or longer than the file;
  // header no strict JSON; unknown dtype; negative or overflowing shape; offsets that overlap,
  // leave holes, leave the file or do not hold shape x dtype; bytes after the last tensor.
  static SafetensorsFile open(const std::filesystem::path& path);

  const std::vector<SafetensorsEntry>& entries() const;  // in the order of their data
  bool contains(std::string_view name) const;
  const SafetensorsEntry& entry(std::string_view name) const;  // kBadInput where there is none
  const std::map<std::string, std::string>& metadata() const;
  std::string_view bytes() const;  // the whole file, header included: for checksums

  // A contiguous CPU tensor of the entry's shape, shared with the mapping where its data is
  // aligned, else a copy. Errors, of kind kBadInput: no such tensor; a dtype of the format that is
  // not among F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL; a BOOL that is neither 0 nor 1 (undefined
  // behaviour as a C++ bool).
  at::Tensor tensor(std::string_view name, Alignment alignment = Alignment::kLine) const;

 private:
  struct State;
  explicit SafetensorsFile(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  std::shared_ptr<const State> state_;
};

// Writes the tensors (any device and strides; copied to contiguous CPU memory one at a time) in the
// reference writer's order: by dtype (I64 F64 F32 I32 BF16 F16 I16 I8 U8 BOOL), then by name; the
// header is padded with spaces so that the data starts at a multiple of 8. Metadata is written by
// key (the reference's order of several keys is random). Atomic: see base/atomic_file.h. Errors:
// kBadInput for a dtype, name or layout that the format lacks, and where writing fails; kInternal
// for an undefined tensor.
void save_safetensors(const std::filesystem::path& path,
                      const std::map<std::string, at::Tensor>& tensors,
                      const std::map<std::string, std::string>& metadata = {});

// A tensor that is made when it is written.
struct SafetensorsSource {
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  // A tensor of this dtype and shape (any device and strides); called once.
  std::function<at::Tensor()> make;
};
// The same file from tensors that need not be in memory together: each is made, written and dropped
// before the next. Errors: as above, and what `make` throws, with nothing left behind; kInternal
// for one that makes another dtype or shape.
void stream_safetensors(const std::filesystem::path& path,
                        const std::map<std::string, SafetensorsSource>& sources,
                        const std::map<std::string, std::string>& metadata = {});

}  // namespace shardproof
