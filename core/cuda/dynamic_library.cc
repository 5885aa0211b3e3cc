#include "core/cuda/dynamic_library.h"

#include <dlfcn.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace tfb {
namespace {

// The folder in which the toolkit's installer puts libraries, often without telling the linker.
constexpr char kToolkitFolder[] = "/usr/local/cuda/lib64/";

}  // namespace

absl::StatusOr<DynamicLibrary> DynamicLibrary::Open(absl::Span<const absl::string_view> names) {
  std::string reasons;
  for (const absl::string_view name : names) {
    const std::string plain(name);
    // RTLD_LOCAL: two versions of a library must not see each other's symbols.
    if (void* handle = dlopen(plain.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      return DynamicLibrary(plain, handle);
    }
    const char* reason = dlerror();  // the linker's text, which mostly begins with the name
    absl::StrAppend(&reasons, reasons.empty() ? "" : "; ",
                    reason == nullptr ? absl::StrCat(name, ": cannot be opened") : reason);
    const std::string in_toolkit = absl::StrCat(kToolkitFolder, name);
    if (void* handle = dlopen(in_toolkit.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      return DynamicLibrary(in_toolkit, handle);
    }
  }
  return absl::UnavailableError(reasons);
}

absl::Status DynamicLibrary::Find(const char* symbol, void** address) const {
  *address = dlsym(handle_, symbol);
  if (*address != nullptr) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(name_, " has no function ", symbol));
}

}  // namespace tfb
