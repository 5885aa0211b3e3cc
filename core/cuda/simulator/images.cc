#include "core/cuda/simulator/images.h"

#include <cxxabi.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>

namespace cuda_simulator {
namespace {

using Visit = std::function<void(const dl_phdr_info&)>;
void ForEachImage(const Visit& visit) {
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* visit) {
        (*static_cast<const Visit*>(visit))(*info);
        return 0;
      },
      const_cast<Visit*>(&visit));
}

// A mapped file.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (file >= 0 && fstat(file, &status) == 0) {
      bytes_ = static_cast<size_t>(status.st_size);
      memory_ = mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, file, 0);
    }
    if (file >= 0) close(file);
  }
  ~MappedFile() {
    if (memory_ != MAP_FAILED) munmap(memory_, bytes_);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // Returns `count` of T at an offset, or null where the file does not have so many.
  template <class T>
  const T* At(size_t offset, size_t count) const {
    if (memory_ == MAP_FAILED || offset > bytes_ || count > (bytes_ - offset) / sizeof(T)) {
      return nullptr;
    }
    return reinterpret_cast<const T*>(static_cast<const char*>(memory_) + offset);
  }

 private:
  void* memory_ = MAP_FAILED;
  size_t bytes_ = 0;
};

// Returns "tile" for "_ZZN3tfb12_GLOBAL__N_18MultiplyEPKfE4tile".
std::string NameInSource(const char* symbol) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
  std::string name = status == 0 ? demangled : symbol;
  std::free(demangled);
  const size_t scope = name.rfind("::");
  return scope == std::string::npos ? name : name.substr(scope + 2);
}

}  // namespace

std::vector<Segment> LoadedSegments() {
  std::vector<Segment> segments;
  ForEachImage([&](const dl_phdr_info& info) {
    // Memory that the loader has written and then protected (tables of addresses) comes first.
    uintptr_t protected_end = 0;
    for (int i = 0; i < info.dlpi_phnum; ++i) {
      const auto& header = info.dlpi_phdr[i];
      if (header.p_type == PT_GNU_RELRO) {
        protected_end = info.dlpi_addr + header.p_vaddr + header.p_memsz;
      }
    }
    for (int i = 0; i < info.dlpi_phnum; ++i) {
      const auto& header = info.dlpi_phdr[i];
      if (header.p_type != PT_LOAD) continue;
      const uintptr_t begin = info.dlpi_addr + header.p_vaddr, end = begin + header.p_memsz;
      if ((header.p_flags & PF_W) == 0) {
        segments.push_back({begin, end, false});
        continue;
      }
      const uintptr_t variables = std::min(std::max(begin, protected_end), end);
      segments.push_back({begin, variables, false});
      segments.push_back({variables, end, true});
    }
  });
  return segments;
}

Image ImageOf(uintptr_t address) {
  Image image;
  ForEachImage([&](const dl_phdr_info& info) {
    for (int i = 0; i < info.dlpi_phnum; ++i) {
      const auto& header = info.dlpi_phdr[i];
      const uintptr_t begin = info.dlpi_addr + header.p_vaddr;
      if (header.p_type != PT_LOAD || address - begin >= header.p_memsz) continue;
      image = {info.dlpi_name == nullptr ? "" : info.dlpi_name, info.dlpi_addr};
      if (!image.path.empty()) continue;
      char path[4096];  // the program itself
      const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
      image.path.assign(path, length > 0 ? static_cast<size_t>(length) : 0);
    }
  });
  return image;
}

namespace {

struct Symbol {
  const char* name;  // in the program's form
  uintptr_t begin;
  size_t bytes;
  int type;
};

// Calls visit(symbol) for the symbols of an image until it returns true.
template <class VisitSymbol>
void VisitSymbols(const Image& image, const VisitSymbol& visit) {
  const MappedFile file(image.path);
  const auto* header = file.At<ElfW(Ehdr)>(0, 1);
  if (header == nullptr || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return;
  const auto* sections = file.At<ElfW(Shdr)>(header->e_shoff, header->e_shnum);
  for (int s = 0; sections != nullptr && s < header->e_shnum; ++s) {
    const auto& section = sections[s];
    if (section.sh_type != SHT_SYMTAB || section.sh_link >= header->e_shnum) continue;
    const auto& names = sections[section.sh_link];
    const size_t count = section.sh_size / sizeof(ElfW(Sym));
    const auto* symbols = file.At<ElfW(Sym)>(section.sh_offset, count);
    const char* text = file.At<char>(names.sh_offset, names.sh_size);
    for (size_t i = 0; symbols != nullptr && text != nullptr && i < count; ++i) {
      const auto& symbol = symbols[i];
      if (symbol.st_name >= names.sh_size) continue;
      if (visit(Symbol{text + symbol.st_name, image.base + symbol.st_value, symbol.st_size,
                       symbol.st_info & 0xf})) {
        return;
      }
    }
  }
}

}  // namespace

Variable StaticVariableAt(uintptr_t address) {
  Variable variable;
  VisitSymbols(ImageOf(address), [&](const Symbol& symbol) {
    if (symbol.type != STT_OBJECT || address - symbol.begin >= symbol.bytes) return false;
    variable = {NameInSource(symbol.name), symbol.begin, symbol.bytes};
    return true;
  });
  return variable;
}

size_t BytesOfStaticVariablesIn(uintptr_t function) {
  const Image image = ImageOf(function);
  std::string prefix;  // "_ZZN3tfb6ReduceEPKfE" for the function "_ZN3tfb6ReduceEPKf"
  VisitSymbols(image, [&](const Symbol& symbol) {
    const bool is_it = symbol.type == STT_FUNC && symbol.begin == function &&
                       std::strncmp(symbol.name, "_Z", 2) == 0;
    if (is_it) prefix = "_ZZ" + std::string(symbol.name + 2) + "E";
    return is_it;
  });
  size_t bytes = 0;
  if (prefix.empty()) return bytes;
  VisitSymbols(image, [&](const Symbol& symbol) {
    const bool is_one =
        symbol.type == STT_OBJECT && std::strncmp(symbol.name, prefix.c_str(), prefix.size()) == 0;
    if (is_one) bytes += symbol.bytes;
    return false;
  });
  return bytes;
}

}  // namespace cuda_simulator
