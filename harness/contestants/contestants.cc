#include "harness/contestants/contestants.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/status.h"
#include "harness/contestants/contestant.h"
#include "harness/contestants/python_file.h"
#include "harness/contestants/shared_library.h"
#include "results/files.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;

// Returns the files of a folder that may have contestants, by name. Tests of Python are none.
absl::StatusOr<std::vector<std::string>> FilesOf(const fs::path& folder) {
  std::vector<std::string> files;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string path = entry->path().string();
    const bool is_python = absl::EndsWith(path, ".py") && !absl::EndsWith(path, "_test.py");
    std::error_code ignored;
    if ((is_python || absl::EndsWith(path, ".so")) && !entry->is_directory(ignored)) {
      files.push_back(path);
    }
  }
  if (error) return absl::UnavailableError(absl::StrCat(folder.string(), ": ", error.message()));
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat(folder.string(), " has no FILE.py and no FILE.so"));
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Returns the elements, with those that name functions of one Python file joined: FILE.py:F,G.
std::vector<std::string> Joined(absl::string_view flag) {
  std::vector<std::string> files;
  for (const absl::string_view element : absl::StrSplit(flag, ',', absl::SkipEmpty())) {
    const size_t colon = element.rfind(':');
    const auto same_file = std::find_if(files.begin(), files.end(), [&](const std::string& file) {
      return colon != absl::string_view::npos &&
             absl::StartsWith(file, element.substr(0, colon + 1));
    });
    if (same_file != files.end()) {
      absl::StrAppend(&*same_file, ",", element.substr(colon + 1));
    } else {
      files.emplace_back(element);
    }
  }
  return files;
}

// Returns the files that the flag names, those of folders among them.
absl::StatusOr<std::vector<std::string>> Files(absl::string_view flag) {
  std::vector<std::string> files;
  for (const std::string& element : Joined(flag)) {
    std::error_code ignored;
    const std::string path = CallerPath(element);
    if (!fs::is_directory(path, ignored)) {
      files.push_back(element);
      continue;
    }
    TFB_ASSIGN_OR_RETURN(const std::vector<std::string> inside, FilesOf(path));
    files.insert(files.end(), inside.begin(), inside.end());
  }
  return files;
}

absl::StatusOr<std::shared_ptr<const ContestantFile>> ToFile(const std::string& element,
                                                             const PythonSettings& python) {
  if (absl::EndsWith(element, ".so")) {
    // A name without a folder would be looked for where the system keeps its libraries.
    const std::string path = CallerPath(element);
    return std::make_shared<const SharedLibrary>(
        absl::StrContains(path, '/') ? path : absl::StrCat("./", path));
  }
  if (absl::EndsWith(element, ".py") || absl::StrContains(element, ".py:")) {
    return std::make_shared<const PythonFile>(CallerPath(element), python);
  }
  if (absl::StrContains(element, ':')) return std::make_shared<const PythonFile>(element, python);
  return absl::InvalidArgumentError(
      absl::StrCat(element,
                   " is neither a shared library (FILE.so) nor Python (FILE.py, FILE.py:FUNCTION), "
                   "nor a folder of these"));
}

}  // namespace

absl::Status AddContestantFiles(absl::string_view files, const PythonSettings& python,
                                Registry* registry, std::string* techniques) {
  const bool named = absl::StrContains(*techniques, "@");
  TFB_ASSIGN_OR_RETURN(const std::vector<std::string> elements, Files(files));
  for (const std::string& element : elements) {
    TFB_ASSIGN_OR_RETURN(const auto file, ToFile(element, python));
    const absl::StatusOr<std::string> list = file->List();
    absl::Status status = list.status();
    if (status.ok()) status = AddContestants(file, *list, registry);
    if (!status.ok()) TFB_RETURN_IF_ERROR(AddUnusable(file, status, registry));
    if (!named) absl::StrAppend(techniques, ",*@", file->name());
  }
  return absl::OkStatus();
}

}  // namespace tfb
