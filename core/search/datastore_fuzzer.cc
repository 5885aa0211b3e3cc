// libFuzzer's entry to the datastore reader. See tools/fuzz/fuzz.bzl.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "absl/strings/string_view.h"
#include "core/search/datastore.h"

namespace {

// Reads the bytes from aligned memory, as in a mapped file.
void Read(const std::string& bytes) {
  tfb::DatastoreFormat expected;
  expected.dim = 2;
  const absl::StatusOr<tfb::Datastore> store = tfb::Datastore::Parse(bytes, "fuzzed", expected);
  if (!store.ok()) return;
  // Every element that is read can be accessed.
  double sum = 0;
  for (int64_t n = 0; n < store->entries(); ++n) {
    sum += store->keys().Get(2 * n) + store->keys().Get(2 * n + 1) + store->values().Get(n);
  }
  volatile double unused = sum;
  (void)unused;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  Read(bytes);
  if (size < 2) return 0;
  // Reads the same bytes as a file whose header length is right, so that the fuzzer gets past that
  // check.
  const size_t header = std::min<size_t>(data[0] + 256 * size_t{data[1]}, size - 2);
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i) file[i] = static_cast<char>(uint64_t{header} >> (8 * i));
  Read(file + bytes.substr(2));
  return 0;
}
