// Shared libraries that are opened when the program runs (NVIDIA's cuBLAS and cuDNN), so that one
// binary starts without them and says which is missing.
#ifndef TFB_CORE_CUDA_DYNAMIC_LIBRARY_H_
#define TFB_CORE_CUDA_DYNAMIC_LIBRARY_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace tfb {

// An open library. It stays open as long as the program, since its functions may be in use
// anywhere.
class DynamicLibrary {
 public:
  // Opens the first of `names` that can be opened. Each is searched for first by the dynamic
  // linker, and then in the toolkit's usual folder. Returns Unavailable, with the linker's reason
  // for each name, where none can be opened.
  static absl::StatusOr<DynamicLibrary> Open(absl::Span<const absl::string_view> names);

  const std::string& name() const { return name_; }

  // Sets *function to a symbol. Returns Unavailable, naming library and symbol, where the library
  // has no such symbol. The caller must know that the symbol has this type.
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
