#include "tools/cuda/kernel_resources.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <regex>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace tfb {
namespace {

constexpr int64_t kMaxStaticSharedBytes = 48 << 10;  // of every GPU; more must be dynamic

using KernelKey = std::pair<std::string, std::string>;  // mangled name, architecture

// What the PTX says of a kernel.
struct LaunchBounds {
  int64_t block_threads = 1024;
  int64_t blocks = 1;
  int64_t dynamic_shared_bytes = 0;
};

// What a BUILD file accepts of a kernel.
struct Accepted {
  int64_t bytes = 0;
  bool is_used = false;
};
using AcceptedOfKernels = std::map<std::string, Accepted>;

// A kernel as ptxas prints it; the lines come in this order.
struct Compiled {
  bool has_properties = false;
  bool has_registers = false;
  KernelResources resources;
};

// Returns the number in front of `unit` in a line such as "Used 10 registers, 128 bytes smem"; 0
// where the line has none.
int64_t NumberBefore(const std::string& unit, const std::string& line) {
  std::smatch match;
  if (!std::regex_search(line, match, std::regex("([0-9]+) " + unit))) return 0;
  int64_t number = 0;
  return absl::SimpleAtoi(match[1].str(), &number) ? number : 0;
}

// Returns the product of ".maxntid 128, 1, 1"'s numbers, or ".minnctapersm 2"'s number.
int64_t Product(absl::string_view numbers) {
  int64_t product = 1;
  for (const absl::string_view text : absl::StrSplit(numbers, ',')) {
    int64_t number = 0;
    product *= absl::SimpleAtoi(text, &number) ? number : 0;
  }
  return product;
}

// Returns the demangled name without return type, namespaces and parameters, behind the name of its
// source, which nvcc puts into the name of the anonymous namespace.
std::string ReadableName(const std::string& mangled) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> demangled(
      abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status), &std::free);
  if (status != 0) return mangled;
  std::smatch match;
  std::string source;
  if (std::regex_search(mangled, match, std::regex("_GLOBAL__N__[0-9a-f]+_[0-9]+_(\\w+?)_cu_"))) {
    source = absl::StrCat(match[1].str(), ": ");
  }
  std::string name = demangled.get();
  name = std::regex_replace(name, std::regex("\\(anonymous namespace\\)::"), "");
  name = std::regex_replace(name, std::regex("\\b(?:\\w+::)+(?=\\w)"), "");
  name = std::regex_replace(name, std::regex("^void "), "");
  // The parameters begin at the parenthesis outside angle brackets.
  int depth = 0;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0) return source + name.substr(0, i);
  }
  return source + name;
}

class Reader {
 public:
  void Read(const std::string& line) {
    std::smatch match;
    absl::string_view known = line;
    if (absl::ConsumePrefix(&known, "known spill: ")) return ReadKnown(known, &accepted_);
    if (absl::ConsumePrefix(&known, "known shared: ")) return ReadKnown(known, &accepted_shared_);
    static const auto* entry = new std::regex("\\.entry (\\w+)");
    static const auto* compiling = new std::regex("Compiling entry function '(\\w+)' for '(\\w+)'");
    if (std::regex_search(line, match, *compiling)) {
      kernel_ = &compiled_[{match[1], match[2]}];
    } else if (absl::StrContains(line, "bytes stack frame") && kernel_ != nullptr) {
      ReadProperties(line);
    } else if (absl::StrContains(line, "Used ") && kernel_ != nullptr) {
      kernel_->has_registers = true;
      kernel_->resources.registers = NumberBefore("registers", line);
      kernel_->resources.static_shared_bytes = NumberBefore("bytes smem", line);
    } else {
      ReadPtx(line);
    }
    if (std::regex_search(line, match, *entry)) bounds_of_ = &bounds_[{match[1], target_}];
  }

  absl::StatusOr<std::vector<KernelResources>> Finish() && {
    std::vector<KernelResources> kernels;
    for (auto& [key, compiled] : compiled_) {
      const auto bounds = bounds_.find(key);
      if (!compiled.has_properties || !compiled.has_registers || bounds == bounds_.end()) {
        return absl::InvalidArgumentError(
            absl::StrCat(key.first, " for ", key.second, ": ",
                         bounds == bounds_.end() ? "no PTX" : "ptxas does not tell all of it"));
      }
      KernelResources& kernel = compiled.resources;
      kernel.kernel = ReadableName(key.first);
      kernel.architecture = key.second;
      kernel.block_threads = bounds->second.block_threads;
      kernel.blocks = bounds->second.blocks;
      kernel.dynamic_shared_bytes = bounds->second.dynamic_shared_bytes;
      kernel.accepted_spill_bytes = BytesFor(kernel.kernel, &accepted_);
      kernel.accepted_shared_bytes = BytesFor(kernel.kernel, &accepted_shared_);
      kernels.push_back(std::move(kernel));
    }
    for (const auto& [known, what] : {std::pair(&accepted_, "spilt bytes"),
                                      std::pair(&accepted_shared_, "bytes of shared memory")}) {
      for (const auto& [kernel, accepted] : *known) {
        if (accepted.is_used) continue;
        return absl::InvalidArgumentError(absl::StrCat("a BUILD file accepts ", accepted.bytes, " ",
                                                       what,
                                                       " of a kernel that is not there: ", kernel));
      }
    }
    std::sort(kernels.begin(), kernels.end(),
              [](const KernelResources& a, const KernelResources& b) {
                return std::tie(a.kernel, a.architecture) < std::tie(b.kernel, b.architecture);
              });
    return kernels;
  }

 private:
  // "SOURCE: KERNEL: BYTES reason".
  static void ReadKnown(absl::string_view line, AcceptedOfKernels* known) {
    const std::string text(line);
    std::smatch match;
    int64_t bytes = 0;
    if (std::regex_match(text, match, std::regex("(.*): ([0-9]+) .*")) &&
        absl::SimpleAtoi(match[2].str(), &bytes)) {
      (*known)[match[1]].bytes = bytes;
    } else {
      (*known)[text].bytes = 0;  // of no kernel, as Finish says
    }
  }
  static int64_t BytesFor(const std::string& kernel, AcceptedOfKernels* known) {
    const auto accepted = known->find(kernel);
    if (accepted == known->end()) return 0;
    accepted->second.is_used = true;
    return accepted->second.bytes;
  }

  void ReadProperties(const std::string& line) {
    kernel_->has_properties = true;
    // Functions that the kernel calls have a line each, too.
    kernel_->resources.stack_bytes += NumberBefore("bytes stack frame", line);
    kernel_->resources.spill_store_bytes += NumberBefore("bytes spill stores", line);
    kernel_->resources.spill_load_bytes += NumberBefore("bytes spill loads", line);
  }

  void ReadPtx(absl::string_view line) {
    if (absl::ConsumePrefix(&line, ".target ")) {
      target_ = std::string(line.substr(0, line.find(',')));
    } else if (bounds_of_ != nullptr && (absl::ConsumePrefix(&line, ".maxntid ") ||
                                         absl::ConsumePrefix(&line, ".reqntid "))) {
      bounds_of_->block_threads = Product(line);
    } else if (bounds_of_ != nullptr && absl::ConsumePrefix(&line, ".minnctapersm ")) {
      bounds_of_->blocks = Product(line);
    } else if (bounds_of_ != nullptr && absl::StrContains(line, "// dynamic shared ")) {
      bounds_of_->dynamic_shared_bytes =
          std::max(bounds_of_->dynamic_shared_bytes, Product(line.substr(line.rfind(' ') + 1)));
    } else if (absl::StrContains(line, ".func ")) {
      bounds_of_ = nullptr;
    }
  }

  std::map<KernelKey, Compiled> compiled_;
  std::map<KernelKey, LaunchBounds> bounds_;
  AcceptedOfKernels accepted_;         // spilt bytes
  AcceptedOfKernels accepted_shared_;  // bytes of shared memory
  Compiled* kernel_ = nullptr;         // whose lines follow
  LaunchBounds* bounds_of_ = nullptr;  // of the entry whose lines follow
  std::string target_;
};

}  // namespace

absl::StatusOr<std::vector<KernelResources>> ReadKernelResources(absl::string_view text) {
  Reader reader;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) reader.Read(std::string(line));
  return std::move(reader).Finish();
}

int64_t BlocksByRegisters(int64_t registers, int64_t block_threads) {
  constexpr int64_t kWarp = 32, kPartitions = 4, kPartitionRegisters = 65536 / kPartitions;
  constexpr int64_t kUnit = 256;
  const int64_t of_warp = std::max<int64_t>((registers * kWarp + kUnit - 1) / kUnit * kUnit, kUnit);
  const int64_t warps = kPartitionRegisters / of_warp * kPartitions;
  return warps / ((block_threads + kWarp - 1) / kWarp);
}

std::vector<std::string> Findings(const KernelResources& kernel) {
  std::vector<std::string> findings;
  const std::string whose = absl::StrCat(kernel.kernel, " for ", kernel.architecture);
  if (kernel.spill_store_bytes + kernel.spill_load_bytes > kernel.accepted_spill_bytes) {
    findings.push_back(absl::StrFormat(
        "%s spills registers: %d bytes of stores, %d of loads; "
        "accepted are %d bytes",
        whose, kernel.spill_store_bytes, kernel.spill_load_bytes, kernel.accepted_spill_bytes));
  }
  const int64_t fitting = BlocksByRegisters(kernel.registers, kernel.block_threads);
  if (fitting < kernel.blocks) {
    findings.push_back(
        absl::StrFormat("%s: its launch bounds allow blocks of %d threads, %d at a time; %d "
                        "registers a thread leave "
                        "room for %d",
                        whose, kernel.block_threads, kernel.blocks, kernel.registers, fitting));
  }
  for (const GpuShared& gpu : kGpuShared) {
    if (kernel.shared_bytes() <= std::max(gpu.of_block, kernel.accepted_shared_bytes)) continue;
    findings.push_back(absl::StrFormat(
        "%s has up to %d bytes of shared memory a block; %s allows %d, accepted are %d", whose,
        kernel.shared_bytes(), gpu.architecture, gpu.of_block, kernel.accepted_shared_bytes));
    break;  // the next would say the same
  }
  if (kernel.static_shared_bytes > kMaxStaticSharedBytes) {
    findings.push_back(absl::StrFormat("%s has %d bytes of static shared memory; at most are %d",
                                       whose, kernel.static_shared_bytes, kMaxStaticSharedBytes));
  }
  return findings;
}

std::string KernelResourcesTable(const std::vector<KernelResources>& kernels) {
  size_t width = 6;
  for (const KernelResources& kernel : kernels) width = std::max(width, kernel.kernel.size());
  std::string table = absl::StrFormat(
      "%-*s %-9s registers threads x blocks  fit  spilled  stack  static dynamic shared", width,
      "kernel", "for");
  for (const GpuShared& gpu : kGpuShared) absl::StrAppend(&table, "  ", gpu.architecture);
  absl::StrAppend(&table, "\n");
  for (const KernelResources& k : kernels) {
    const int64_t by_registers = BlocksByRegisters(k.registers, k.block_threads);
    absl::StrAppendFormat(&table, "%-*s %-9s %9d %7d x %-6d %4d %8d %6d %7d %14d", width, k.kernel,
                          k.architecture, k.registers, k.block_threads, k.blocks, by_registers,
                          k.spill_store_bytes + k.spill_load_bytes, k.stack_bytes,
                          k.static_shared_bytes, k.dynamic_shared_bytes);
    for (const GpuShared& gpu : kGpuShared) {
      absl::StrAppendFormat(&table, "  %5d", std::min(by_registers, gpu.Blocks(k.shared_bytes())));
    }
    absl::StrAppend(&table, "\n");
  }
  return table;
}

}  // namespace tfb
