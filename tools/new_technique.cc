// Writes the folder of a new technique and its line in the family's list. The files, from
// tools/technique_template.cc, build and pass every test unchanged.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/command_line.h"
#include "core/status.h"
#include "tools/technique_template.h"

ABSL_FLAG(std::string, workspace, "",
          "The repository. Empty: the one that `bazel run` was called in, or the current folder.");

namespace tfb {
namespace {

namespace fs = std::filesystem;

constexpr char kProgram[] = "new_technique";
constexpr char kUsage[] =
    "new_technique FAMILY/NAME\n"
    "Writes a technique that works, for you to change: FAMILY/NAME/{BUILD,NAME.h,NAME.cc,\n"
    "NAME_test.cc} and its line in FAMILY/BUILD.\n\n"
    "Exit status: 0 written, 2 bad usage or nothing written.";

constexpr char kListBegin[] = "technique_family([";
constexpr size_t kLongestName = 40;

std::string Read(const fs::path& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

absl::Status Write(const fs::path& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", path.string()));
  return absl::OkStatus();
}

// Formats the text if clang-format is installed, since line breaks depend on the name's length.
void Format(const fs::path& folder) {
  std::vector<std::string> words = {"clang-format", "--style=file", "--fallback-style=none", "-i"};
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename() != "BUILD") words.push_back(entry.path().string());
  }
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t child;
  if (posix_spawnp(&child, arguments[0], nullptr, nullptr, arguments.data(), environ) != 0) return;
  waitpid(child, nullptr, 0);
}

// Returns the folders of the repository whose BUILD file has a list of techniques.
std::vector<std::string> Families(const fs::path& workspace) {
  std::vector<std::string> families;
  std::error_code error;
  for (fs::directory_iterator entry(workspace, error), end; !error && entry != end;
       entry.increment(error)) {
    const fs::path build = entry->path() / "BUILD";
    std::error_code ignored;
    if (fs::is_regular_file(build, ignored) && absl::StrContains(Read(build), kListBegin)) {
      families.push_back(entry->path().filename().string());
    }
  }
  std::sort(families.begin(), families.end());
  return families;
}

// Keywords of C++17, each between spaces, and namespaces that one in tfb would hide.
constexpr absl::string_view kWords =
    " alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t "
    "char32_t class compl const const_cast constexpr continue decltype default delete do double "
    "dynamic_cast else enum explicit export extern false float for friend goto if inline int long "
    "mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public "
    "register reinterpret_cast return short signed sizeof static static_assert static_cast struct "
    "switch template this thread_local throw true try typedef typeid typename union unsigned using "
    "virtual void volatile wchar_t while xor xor_eq std absl testing tfb ";

absl::Status CheckName(absl::string_view name) {
  if (absl::StrContains(kWords, absl::StrCat(" ", name, " "))) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", name,
                     "\" is a word or a namespace of C++ code; a technique's name is also that of "
                     "its namespace"));
  }
  const auto is_word = [](char c) {
    return absl::ascii_islower(static_cast<unsigned char>(c)) ||
           absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '_';
  };
  const bool good = !name.empty() && absl::ascii_islower(static_cast<unsigned char>(name[0])) &&
                    std::all_of(name.begin(), name.end(), is_word) &&
                    !absl::StrContains(name, "__") && name.back() != '_' &&
                    name.size() <= kLongestName;
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", name, "\" is not a technique's name: lower-case letters, digits and single ",
      "underscores between them, a letter first, at most ", kLongestName));
}

// Returns the family's BUILD file with the name in its list, which is in alphabetical order.
absl::StatusOr<std::string> WithName(const std::string& build, absl::string_view family,
                                     absl::string_view name) {
  const size_t begin = build.find(kListBegin);
  const size_t end = begin == std::string::npos ? begin : build.find("])", begin);
  if (end == std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat(family, "/BUILD has no list \"", kListBegin, "...])\" to add a line to"));
  }
  const size_t first = begin + sizeof(kListBegin) - 1;
  std::vector<std::string> lines;
  const std::string own = absl::StrCat("    \"", name, "\",");
  for (absl::string_view line : absl::StrSplit(build.substr(first, end - first), '\n')) {
    if (!absl::StripAsciiWhitespace(line).empty()) lines.emplace_back(line);
  }
  lines.insert(std::upper_bound(lines.begin(), lines.end(), own), own);
  return absl::StrCat(build.substr(0, first), "\n", absl::StrJoin(lines, "\n"), "\n",
                      build.substr(end));
}

// Writes the files to a temporary folder, which is renamed when complete; then writes the list.
absl::Status WriteTechnique(const fs::path& workspace, const std::string& family,
                            const std::string& name, const std::string& build) {
  const fs::path folder = workspace / family / name;
  const fs::path partial = workspace / family / absl::StrCat(".", name, ".", getpid());
  std::error_code error;
  fs::create_directory(partial, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("cannot make a folder in ", family, ": ", error.message()));
  }
  absl::Status status;
  for (const auto& [file, text] : TechniqueFiles(family, name)) {
    status.Update(Write(partial / file, text));
  }
  if (status.ok()) {
    Format(partial);
    fs::rename(partial, folder, error);
    if (error)
      status = absl::UnavailableError(absl::StrCat(folder.string(), ": ", error.message()));
  }
  if (status.ok()) {
    const fs::path list = workspace / family / "BUILD";
    const fs::path new_list = workspace / family / absl::StrCat(".BUILD.", getpid());
    status = Write(new_list, build);
    if (status.ok()) fs::rename(new_list, list, error);
    if (error) status = absl::UnavailableError(absl::StrCat(list.string(), ": ", error.message()));
    if (!status.ok()) {
      std::error_code ignored;
      fs::remove(new_list, ignored);
      fs::remove_all(folder, ignored);
    }
  }
  std::error_code ignored;
  fs::remove_all(partial, ignored);
  return status;
}

absl::StatusOr<int> MakeTechnique(const CommandLine& line) {
  const char* run_in = std::getenv("BUILD_WORKSPACE_DIRECTORY");
  std::string workspace = absl::GetFlag(FLAGS_workspace);
  if (workspace.empty()) workspace = run_in == nullptr ? "." : run_in;

  if (line.arguments.size() != 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "one FAMILY/NAME is wanted, such as attention/mine, not ", line.arguments.size()));
  }
  const std::vector<std::string> parts = absl::StrSplit(line.arguments[0], '/');
  if (parts.size() != 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", line.arguments[0], "\" is not FAMILY/NAME, such as attention/mine"));
  }
  const std::string& family = parts[0];
  const std::string& name = parts[1];
  const std::vector<std::string> families = Families(workspace);
  if (families.empty()) {
    return absl::NotFoundError(
        absl::StrCat("\"", workspace,
                     "\" is not this repository: no folder of it has a list of "
                     "techniques; call it by `bazel run`, or with --workspace"));
  }
  if (std::find(families.begin(), families.end(), family) == families.end()) {
    return absl::NotFoundError(absl::StrCat("there is no family \"", family, "\"; there are ",
                                            absl::StrJoin(families, ", ")));
  }
  TFB_RETURN_IF_ERROR(CheckName(name));
  for (const std::string& other : families) {
    if (fs::exists(fs::path(workspace) / other / name)) {
      return absl::AlreadyExistsError(
          absl::StrCat(other, "/", name, " is there already; names are unique in all families"));
    }
  }
  TFB_ASSIGN_OR_RETURN(const std::string build,
                       WithName(Read(fs::path(workspace) / family / "BUILD"), family, name));
  TFB_RETURN_IF_ERROR(WriteTechnique(workspace, family, name, build));
  std::printf(
      "%1$s/%2$s: BUILD, %2$s.h, %2$s.cc, %2$s_test.cc, and a line in %1$s/BUILD\n"
      "It is windowed attention so far. Write the formula and its source at the head of %2$s.h "
      "(FILL IN\n"
      "marks what is yours), then the definition, then the pattern.\n"
      "  bazel test //%1$s/%2$s/...\n"
      "  bazel run //harness:sweep -- --techniques=%2$s:window=*\n",
      family.c_str(), name.c_str());
  return kExitDone;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::kProgram, tfb::kUsage, {argv, argv + argc}, tfb::MakeTechnique);
}
