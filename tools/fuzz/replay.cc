// Runs a fuzz target on the files of a corpus, on each truncation of the small ones, and on
// mutations of them all, the same ones every time, so that a failure repeats. The last line but one
// prints the input that crashes or aborts, in hexadecimal.
//
//   FUZZER CORPUS_FOLDER
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

constexpr int kMutations = 20000;
constexpr size_t kTruncatedBytes = 2048;

const std::string* current = nullptr;

extern "C" void PrintInput(int signal_number) {
  static const char kDigits[] = "0123456789abcdef";
  char line[2 * 4096 + 1];
  size_t length = 0;
  if (current != nullptr) {
    for (size_t i = 0; i < std::min<size_t>(current->size(), 4096); ++i) {
      line[length++] = kDigits[static_cast<unsigned char>((*current)[i]) >> 4];
      line[length++] = kDigits[static_cast<unsigned char>((*current)[i]) & 15];
    }
  }
  line[length++] = '\n';
  const ssize_t written = write(STDERR_FILENO, line, length);
  (void)written;
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

void Try(const std::string& input) {
  current = &input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

std::string Mutated(const std::vector<std::string>& corpus, std::mt19937_64* random) {
  const auto below = [&](size_t bound) { return static_cast<size_t>((*random)() % bound); };
  std::string input = corpus[below(corpus.size())];
  for (size_t changes = 1 + below(4); changes > 0; --changes) {
    const size_t at = below(input.size() + 1);
    switch (below(5)) {
      case 0:  // a bit
        if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
        break;
      case 1:  // a byte at the border of what numbers can be
        if (at < input.size()) input[at] = "\x00\x01\x7f\x80\xff\"{,:=*["[below(12)];
        break;
      case 2:
        input.insert(at, 1 + below(8), static_cast<char>(below(256)));
        break;
      case 3:
        input.erase(at, 1 + below(8));
        break;
      default: {  // a piece of another input
        const std::string& other = corpus[below(corpus.size())];
        const size_t begin = below(other.size() + 1);
        input.insert(at, other.substr(begin, below(64)));
      }
    }
  }
  return input;
}

std::vector<std::string> ReadFolder(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (!entry.is_directory()) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CORPUS_FOLDER\n", argv[0]);
    return 2;
  }
  for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) signal(number, PrintInput);
  const std::vector<std::string> corpus = ReadFolder(argv[1]);
  if (corpus.empty()) {
    std::fprintf(stderr, "%s has no files\n", argv[1]);
    return 1;
  }
  Try("");
  size_t truncations = 0;
  for (const std::string& input : corpus) {
    Try(input);
    if (input.size() > kTruncatedBytes) continue;
    for (size_t length = 0; length < input.size(); ++length, ++truncations) {
      Try(input.substr(0, length));
    }
  }
  std::mt19937_64 random(1);
  for (int mutations = 0; mutations < kMutations; ++mutations) Try(Mutated(corpus, &random));
  std::printf("%zu files, %zu truncations and %d mutations of them\n", corpus.size(), truncations,
              kMutations);
  return 0;
}
