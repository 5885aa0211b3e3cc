// Reads and writes safetensors files: an 8-byte little-endian header length, a JSON header, and the
// tensors' bytes.
//
//   {"__metadata__": {"model": "..."}, "q": {"dtype": "F32", "shape": [1, 8, 512, 64],
//                                            "data_offsets": [0, 1048576]}, ...}
//
// Offsets count from the end of the header. As the format asks, the tensors' ranges cover the rest
// of the file exactly: overlaps, gaps and trailing bytes are errors. Files come from outside, so
// every error is a status of one line that names the file and, where there is one, the tensor.
//
// Of the format's element types F64, F32, F16, BF16, I64, I32, U8 and BOOL are read; BOOL becomes
// u8. A tensor without dimensions (a scalar) becomes one of shape [1]. Bytes are copied as they
// are, NaN payloads included.
#ifndef TFB_CORE_SAFETENSORS_H_
#define TFB_CORE_SAFETENSORS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/tensor.h"

namespace tfb {

// The reference implementation refuses longer headers.
constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct SafetensorsFile {
  NamedTensors tensors;
  std::map<std::string, std::string> metadata;
};

// NotFound or PermissionDenied: the file cannot be opened. InvalidArgument: it is not a safetensors
// file, or a broken one. Unimplemented: an element type or a rank that this library has not.
// ResourceExhausted: no memory.
absl::StatusOr<SafetensorsFile> ReadSafetensors(const std::string& path);
// The same of bytes in memory; `name` stands for the path in messages.
absl::StatusOr<SafetensorsFile> ParseSafetensors(absl::string_view bytes, const std::string& name);

// Where the tensors of a file lie, for a reader that maps it.
struct SafetensorsEntry {
  DType dtype = DType::kF32;
  Shape shape;
  int64_t begin = 0;  // bytes from the beginning of the file
  int64_t end = 0;
};
struct SafetensorsLayout {
  std::map<std::string, SafetensorsEntry, std::less<>> tensors;
  std::map<std::string, std::string> metadata;
};
// Of a whole file's bytes, of which only the header is read.
absl::StatusOr<SafetensorsLayout> ParseSafetensorsLayout(absl::string_view bytes,
                                                         const std::string& name);
// The length and header of a file whose tensors lie so, padded up to the first of them, for a writer
// that comes to know their sizes last. InvalidArgument where it does not fit before them.
absl::StatusOr<std::string> SerializeSafetensorsLayout(const SafetensorsLayout& layout);

// Replaces `path` at once (a temporary file beside it is renamed), so that a reader finds the old
// file or the new one, whole. Metadata and tensors are in the order of their names, so equal
// contents give equal files.
absl::Status WriteSafetensors(const std::string& path, const NamedTensors& tensors,
                              const std::map<std::string, std::string>& metadata = {});
// The bytes of such a file. InvalidArgument: a name that is not UTF-8 or that the format reserves.
absl::StatusOr<std::string> SerializeSafetensors(
    const NamedTensors& tensors, const std::map<std::string, std::string>& metadata = {});

}  // namespace tfb

#endif  // TFB_CORE_SAFETENSORS_H_
