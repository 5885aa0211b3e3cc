#include "results/files.h"

#include <stdlib.h>

#include <filesystem>
#include <system_error>
#include <tuple>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;

std::string EnvironmentVariable(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

std::string CallerPath(absl::string_view path) {
  const fs::path given{std::string(path)};
  const std::string folder = EnvironmentVariable("BUILD_WORKING_DIRECTORY");
  if (folder.empty() || given.empty() || given.is_absolute()) return given.string();
  return (fs::path(folder) / given).string();
}

std::string DefaultRunsFolder() {
  const std::string repository = EnvironmentVariable("BUILD_WORKSPACE_DIRECTORY");
  if (repository.empty()) return CallerPath("results/runs");
  return (fs::path(repository) / "results" / "runs").string();
}

absl::StatusOr<std::string> NewestResultFile(const std::string& folder) {
  std::error_code error;
  std::tuple<fs::file_time_type, std::string> newest;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code ignored;
    if (entry->path().extension() != ".pb" || !entry->is_regular_file(ignored)) continue;
    const std::tuple<fs::file_time_type, std::string> candidate(entry->last_write_time(ignored),
                                                                entry->path().string());
    if (std::get<1>(newest).empty() || candidate > newest) newest = candidate;
  }
  if (std::get<1>(newest).empty()) {
    return absl::NotFoundError(absl::StrCat("no result file (*.pb) in ", folder));
  }
  return std::get<1>(newest);
}

}  // namespace tfb
