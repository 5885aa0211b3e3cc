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

// Reads a file. Returns NotFound or PermissionDenied where it cannot be opened; InvalidArgument
// where it is not a safetensors file, or a broken one; Unimplemented for an element type or a rank
// that this library does not have; ResourceExhausted where there is no memory.
absl::StatusOr<SafetensorsFile> ReadSafetensors(const std::string& path);
// Parses a safetensors file that is in memory; `name` stands for the path in messages.
absl::StatusOr<SafetensorsFile> ParseSafetensors(absl::string_view bytes, const std::string& name);

// The ranges of a file's tensors, for a reader that maps the file.
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
// Parses the header of a whole file's bytes and reads nothing else of them.
absl::StatusOr<SafetensorsLayout> ParseSafetensorsLayout(absl::string_view bytes,
                                                         const std::string& name);
// Returns the length and header of a file with this layout, padded up to the first tensor, for a
// writer that knows the sizes of its tensors last. Returns InvalidArgument where the header does
// not fit before them.
absl::StatusOr<std::string> SerializeSafetensorsLayout(const SafetensorsLayout& layout);

// Replaces `path` at once (a temporary file beside it is renamed), so that a reader finds the old
// file or the new one, whole. Metadata and tensors are in the order of their names, so equal
// contents give equal files.
absl::Status WriteSafetensors(const std::string& path, const NamedTensors& tensors,
                              const std::map<std::string, std::string>& metadata = {});
// Returns the bytes of such a file, or InvalidArgument for a name that is not UTF-8 or that the
// format reserves.
absl::StatusOr<std::string> SerializeSafetensors(
    const NamedTensors& tensors, const std::map<std::string, std::string>& metadata = {});

}  // namespace tfb

#endif  // TFB_CORE_SAFETENSORS_H_
