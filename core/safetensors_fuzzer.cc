// libFuzzer's entry to the safetensors reader. Needs clang:
//
//   CC=clang bazel run --config=asan //core:safetensors_fuzzer -- -max_total_time=60
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "absl/strings/string_view.h"
#include "core/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<tfb::SafetensorsFile> file = tfb::ParseSafetensors(bytes, "fuzzed");
  // What can be read can be written.
  if (file.ok() && !tfb::SerializeSafetensors(file->tensors, file->metadata).ok()) std::abort();
  return 0;
}
