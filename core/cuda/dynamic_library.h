// Shared libraries that are opened when the program runs, so that one binary starts without them
// and says what is missing: NVIDIA's cuBLAS and cuDNN.
#ifndef TFB_CORE_CUDA_DYNAMIC_LIBRARY_H_
#define TFB_CORE_CUDA_DYNAMIC_LIBRARY_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace tfb {

// Stays open as long as the program: what it has given out may be in use anywhere.
class DynamicLibrary {
 public:
  // The first of `names` that opens, each looked for where the dynamic linker looks, and then in
  // the toolkit's usual folder. Unavailable, with the linker's reason for each name, where none
  // does.
  static absl::StatusOr<DynamicLibrary> Open(absl::Span<const absl::string_view> names);

  const std::string& name() const { return name_; }

  // Sets *function. Unavailable, naming library and symbol, where the library has no such symbol.
  // That the symbol is of this type is the caller's promise.
  template <class Function>
  absl::Status Resolve(const char* symbol, Function** function) const {
    void* address = nullptr;
    absl::Status found = Find(symbol, &address);
    *function = reinterpret_cast<Function*>(address);
    return found;
  }

 private:
  DynamicLibrary(std::string name, void* handle) : name_(std::move(name)), handle_(handle) {}
  absl::Status Find(const char* symbol, void** address) const;

  std::string name_;
  void* handle_;
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_DYNAMIC_LIBRARY_H_
