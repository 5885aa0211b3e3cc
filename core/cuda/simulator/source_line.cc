#include "core/cuda/simulator/source_line.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <map>

#include "core/cuda/simulator/images.h"

namespace cuda_simulator {
namespace {

// Runs a program found on PATH and returns its output; empty where it cannot be run.
std::string OutputOf(std::vector<std::string> arguments) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return "";
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(&argument[0]);
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t child = 0;
  const int error = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  std::string output;
  char piece[4096];
  for (ssize_t got; error == 0 && (got = read(ends[0], piece, sizeof(piece))) > 0;) {
    output.append(piece, static_cast<size_t>(got));
  }
  close(ends[0]);
  if (error == 0) waitpid(child, nullptr, 0);
  return output;
}

// Returns "flash.cu:88" for "/a/b/flash.cu:88 (discriminator 2)"; empty for "??:0" and for lines of
// the simulator's own headers, which are not a kernel's.
std::string ShortLine(const std::string& line) {
  const size_t slash = line.rfind('/');
  std::string text = slash == std::string::npos ? line : line.substr(slash + 1);
  text = text.substr(0, text.find(' '));
  if (text[0] == '?' || text.find(":?") != std::string::npos) return "";
  const bool is_own = text.rfind("cuda_runtime.h:", 0) == 0 || text.rfind("ptx.cuh:", 0) == 0;
  return is_own ? "" : text;
}

// The lines of a call and of the inlined calls around it, innermost first.
using Chain = std::vector<std::string>;

// Parses addr2line's output: "0x00001234", followed by a line for each function inlined there,
// innermost first.
std::vector<Chain> ParseChains(const std::string& output, size_t count) {
  std::vector<Chain> chains(count);
  size_t address = 0;  // counted from 1
  for (size_t begin = 0, end; begin < output.size(); begin = end + 1) {
    end = output.find('\n', begin);
    if (end == std::string::npos) end = output.size();
    const std::string line = output.substr(begin, end - begin);
    if (line.rfind("0x", 0) == 0) {
      if (++address > count) break;
      continue;
    }
    const std::string text = ShortLine(line);
    if (address > 0 && !text.empty()) chains[address - 1].push_back(text);
  }
  return chains;
}

// Returns the chain of each return address; it is empty where it is not known. A chain is looked up
// once.
std::vector<Chain> ChainsOf(const std::vector<const void*>& return_addresses) {
  static auto* known = new std::map<uintptr_t, Chain>;
  std::map<std::string, std::vector<uintptr_t>> unknown;  // addresses by image
  for (const void* place : return_addresses) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(place);
    if (address == 0 || !known->emplace(address, Chain()).second) continue;
    unknown[ImageOf(address).path].push_back(address);
  }
  for (const auto& [path, addresses] : unknown) {
    if (path.empty()) continue;
    std::vector<std::string> arguments = {"addr2line", "--addresses", "--inlines", "--exe=" + path};
    for (const uintptr_t address : addresses) {
      char text[32];
      // The byte before a return address belongs to the call.
      std::snprintf(text, sizeof(text), "0x%zx", address - ImageOf(address).base - 1);
      arguments.push_back(text);
    }
    const std::vector<Chain> chains = ParseChains(OutputOf(arguments), addresses.size());
    for (size_t i = 0; i < addresses.size(); ++i) (*known)[addresses[i]] = chains[i];
  }
  std::vector<Chain> result;
  for (const void* place : return_addresses) {
    const auto chain = known->find(reinterpret_cast<uintptr_t>(place));
    result.push_back(chain == known->end() ? Chain() : chain->second);
  }
  return result;
}

}  // namespace

std::vector<std::string> SourceLines(const std::vector<const void*>& return_addresses) {
  const auto file = [](const std::string& line) { return line.substr(0, line.find(':')); };
  std::vector<std::string> lines;
  for (const Chain& chain : ChainsOf(return_addresses)) {
    std::string line = chain.empty() ? "" : chain.front();
    if (!chain.empty() && file(line) != file(chain.back())) line += " from " + chain.back();
    lines.push_back(line);
  }
  return lines;
}

std::string CallChain(const void* return_address) {
  std::string text;
  const std::vector<Chain> chains = ChainsOf({return_address});
  for (const std::string& line : chains[0]) {
    text += (text.empty() ? "" : " from ") + line;
  }
  return text;
}

}  // namespace cuda_simulator
