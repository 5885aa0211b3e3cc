// libFuzzer's entry to the safetensors reader. See tools/fuzz/fuzz.bzl.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/safetensors.h"

namespace {

void Read(absl::string_view bytes) {
  const absl::StatusOr<tfb::SafetensorsFile> file = tfb::ParseSafetensors(bytes, "fuzzed");
  // A file that can be read can be written.
  if (file.ok() && !tfb::SerializeSafetensors(file->tensors, file->metadata).ok()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  Read(bytes);
  if (size < 2) return 0;
  // Parses the same bytes as a file whose header length is right, so that the fuzzer gets past that
  // check.
  const size_t header = std::min<size_t>(data[0] + 256 * size_t{data[1]}, size - 2);
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i) file[i] = static_cast<char>(uint64_t{header} >> (8 * i));
  absl::StrAppend(&file, bytes.substr(2));
  Read(file);
  return 0;
}
