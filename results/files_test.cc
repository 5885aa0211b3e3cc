#include "results/files.h"

#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;

TEST(CallerPath, IsRelativeToTheFolderThatBazelRunWasCalledIn) {
  unsetenv("BUILD_WORKING_DIRECTORY");
  EXPECT_EQ(CallerPath("a.pb"), "a.pb");
  setenv("BUILD_WORKING_DIRECTORY", "/home/somebody", 1);
  EXPECT_EQ(CallerPath("a.pb"), "/home/somebody/a.pb");
  EXPECT_EQ(CallerPath("../a.pb"), "/home/somebody/../a.pb");
  EXPECT_EQ(CallerPath("/tmp/a.pb"), "/tmp/a.pb");
  EXPECT_EQ(CallerPath(""), "");
  unsetenv("BUILD_WORKING_DIRECTORY");
}

TEST(DefaultRunsFolder, IsInTheRepositoryWhereBazelNamesIt) {
  setenv("BUILD_WORKSPACE_DIRECTORY", "/repository", 1);
  EXPECT_EQ(DefaultRunsFolder(), "/repository/results/runs");
  unsetenv("BUILD_WORKSPACE_DIRECTORY");
  EXPECT_EQ(DefaultRunsFolder(), "results/runs");
}

TEST(NewestResultFile, IsTheOneWrittenToLast) {
  const fs::path folder = fs::path(::testing::TempDir()) / "newest";
  fs::remove_all(folder);
  EXPECT_EQ(std::string(NewestResultFile(folder.string()).status().message()),
            "no result file (*.pb) in " + folder.string());
  fs::create_directories(folder / "folder.pb");
  for (const char* name : {"b.pb", "a.pb", "z.txt"}) std::ofstream(folder / name) << "x";
  const fs::file_time_type now = fs::file_time_type::clock::now();
  fs::last_write_time(folder / "a.pb", now);
  fs::last_write_time(folder / "b.pb", now - std::chrono::hours(1));
  EXPECT_EQ(*NewestResultFile(folder.string()), (folder / "a.pb").string());
  fs::last_write_time(folder / "b.pb", now);
  EXPECT_EQ(*NewestResultFile(folder.string()), (folder / "b.pb").string());
}

}  // namespace
}  // namespace tfb
