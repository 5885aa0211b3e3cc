// Starts the program on a small repository of its own.
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/technique_template.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kBuild[] =
    "# The list.\n"
    "load(\"//tools:technique.bzl\", \"technique_family\")\n"
    "\n"
    "technique_family([\n"
    "    \"dense\",\n"
    "    \"shaw\",\n"
    "])\n";

class NewTechniqueTest : public ::testing::Test {
 protected:
  NewTechniqueTest() {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    root_ = fs::path(::testing::TempDir()) / absl::StrCat(test->name(), "_", getpid());
    fs::create_directories(root_ / "attention/dense");
    fs::create_directories(root_ / "memory");
    fs::create_directories(root_ / "core");
    std::ofstream(root_ / "attention/BUILD") << kBuild;
    std::ofstream(root_ / "memory/BUILD") << "technique_family([\n])\n";
    std::ofstream(root_ / "core/BUILD") << "cc_library(name = \"core\")\n";
  }

  std::string Read(const std::string& name) const {
    std::stringstream text;
    text << std::ifstream(root_ / name).rdbuf();
    return text.str();
  }
  std::vector<std::string> Files(const std::string& folder) const {
    std::vector<std::string> files;
    for (const auto& entry : fs::directory_iterator(root_ / folder)) {
      files.push_back(entry.path().filename().string());
    }
    std::sort(files.begin(), files.end());
    return files;
  }

  // Returns the exit status, and stores everything that was printed in `output_`.
  int Run(const std::string& arguments) {
    const std::string log = (root_ / "log").string();
    const int status = system(absl::StrCat("tools/new_technique --workspace=", root_.string(), " ",
                                           arguments, " > ", log, " 2>&1")
                                  .c_str());
    output_ = Read("log");
    return WEXITSTATUS(status);
  }

  fs::path root_;
  std::string output_;
};

TEST_F(NewTechniqueTest, WritesTheFolderAndTheLine) {
  EXPECT_EQ(Run("attention/my_window2"), 0) << output_;
  EXPECT_THAT(Files("attention/my_window2"),
              ElementsAre("BUILD", "my_window2.cc", "my_window2.h", "my_window2_test.cc"));
  EXPECT_EQ(Read("attention/BUILD"),
            "# The list.\n"
            "load(\"//tools:technique.bzl\", \"technique_family\")\n"
            "\n"
            "technique_family([\n"
            "    \"dense\",\n"
            "    \"my_window2\",\n"
            "    \"shaw\",\n"
            "])\n");
  EXPECT_THAT(Files("attention"), ElementsAre("BUILD", "dense", "my_window2"));
  const std::string header = Read("attention/my_window2/my_window2.h");
  EXPECT_THAT(header, HasSubstr("#ifndef TFB_ATTENTION_MY_WINDOW2_MY_WINDOW2_H_\n"));
  EXPECT_THAT(header, HasSubstr("struct MyWindow2Options {"));
  EXPECT_THAT(header, HasSubstr("Source: FILL IN"));
  const std::string source = Read("attention/my_window2/my_window2.cc");
  EXPECT_THAT(source, HasSubstr("#include \"attention/my_window2/my_window2.h\"\n"));
  EXPECT_THAT(source, HasSubstr("TechniqueInfo info = {\"my_window2\", \"attention\","));
  for (const std::string& file : Files("attention/my_window2")) {
    EXPECT_THAT(Read("attention/my_window2/" + file), Not(HasSubstr("@"))) << file;
  }
  EXPECT_THAT(output_, HasSubstr("bazel test //attention/my_window2/..."));
}

TEST_F(NewTechniqueTest, FirstAndLastLinesKeepTheOrder) {
  EXPECT_EQ(Run("memory/only"), 0) << output_;
  EXPECT_EQ(Read("memory/BUILD"), "technique_family([\n    \"only\",\n])\n");
  EXPECT_EQ(Run("attention/abc"), 0);
  EXPECT_EQ(Run("attention/zzz"), 0);
  EXPECT_THAT(Read("attention/BUILD"),
              HasSubstr("    \"abc\",\n    \"dense\",\n    \"shaw\",\n    \"zzz\",\n])\n"));
}

TEST_F(NewTechniqueTest, RefusalsAreOneLineAndWriteNothing) {
  const std::vector<std::pair<std::string, std::string>> refusals = {
      {"attention/dense", "attention/dense is there already; names are unique"},
      {"memory/dense", "attention/dense is there already; names are unique"},
      {"attentoin/mine", "there is no family \"attentoin\"; there are attention, memory\n"},
      {"core/mine", "there is no family \"core\"; there are attention, memory\n"},
      {"attention/Mine", "\"Mine\" is not a technique's name: lower-case letters"},
      {"attention/2mine", "\"2mine\" is not a technique's name"},
      {"attention/switch", "\"switch\" is a word or a namespace of C++"},
      {"attention/std", "\"std\" is a word or a namespace of C++"},
      {"attention/mi__ne", "\"mi__ne\" is not a technique's name"},
      {"attention/mine_", "\"mine_\" is not a technique's name"},
      {"attention/mi-ne", "\"mi-ne\" is not a technique's name"},
      {"attention/..", "\"..\" is not a technique's name"},
      {"attention/", "\"\" is not a technique's name"},
      {"attention/a123456789b123456789c123456789d123456789e", "at most 40"},
      {"mine", "\"mine\" is not FAMILY/NAME, such as attention/mine\n"},
      {"attention/mine/deep", "is not FAMILY/NAME"},
      {"", "one FAMILY/NAME is wanted, such as attention/mine, not 0\n"},
      {"attention/a attention/b", "one FAMILY/NAME is wanted, such as attention/mine, not 2\n"},
      {"--famly=attention", "unknown flag --famly"},
  };
  for (const auto& [arguments, message] : refusals) {
    EXPECT_EQ(Run(arguments), 2) << arguments;
    EXPECT_THAT(output_, HasSubstr(message));
    EXPECT_EQ(std::count(output_.begin(), output_.end(), '\n'), 1) << output_;
    EXPECT_THAT(output_, ::testing::StartsWith("new_technique: "));
  }
  EXPECT_THAT(Files("attention"), ElementsAre("BUILD", "dense"));
  EXPECT_THAT(Files("memory"), ElementsAre("BUILD"));
  EXPECT_EQ(Read("attention/BUILD"), kBuild);
}

TEST_F(NewTechniqueTest, AFolderThatIsNoRepositoryIsRefused) {
  const int status =
      system("tools/new_technique --workspace=/proc attention/mine > /dev/null 2>&1");
  EXPECT_EQ(WEXITSTATUS(status), 2);
}

TEST(TechniqueTemplate, ClassNamesAreCapitalised) {
  EXPECT_EQ(ClassName("rope"), "Rope");
  EXPECT_EQ(ClassName("transformer_xl_2"), "TransformerXl2");
}

TEST_F(NewTechniqueTest, TheLongestNameHasFortyCharacters) {
  const std::string longest = "a123456789b123456789c123456789d12345678";
  EXPECT_EQ(Run("memory/" + longest + "x"), 0) << output_;
  EXPECT_THAT(Files("memory"), ElementsAre("BUILD", longest + "x"));
  EXPECT_EQ(Run("memory/" + longest + "xy"), 2);
  EXPECT_EQ(output_, "new_technique: \"" + longest +
                         "xy\" is not a technique's name: lower-case letters, digits and single "
                         "underscores between them, a letter first, at most 40\n");
}

TEST_F(NewTechniqueTest, AListThatDoesNotEndIsRefused) {
  std::ofstream(root_ / "memory/BUILD") << "technique_family([\n";
  EXPECT_EQ(Run("memory/mine"), 2);
  EXPECT_EQ(
      output_,
      "new_technique: memory/BUILD has no list \"technique_family([...])\" to add a line to\n");
  EXPECT_THAT(Files("memory"), ElementsAre("BUILD"));
}

TEST_F(NewTechniqueTest, TheRepositoryIsTheOneOfBazelOrTheCurrentFolder) {
  const std::string program = fs::absolute("tools/new_technique").string();
  const auto run = [&](const std::string& before, const std::string& name) {
    return WEXITSTATUS(
        system(absl::StrCat(before, " ", program, " memory/", name, " > /dev/null 2>&1").c_str()));
  };
  EXPECT_EQ(run("cd / && BUILD_WORKSPACE_DIRECTORY=" + root_.string(), "one"), 0);
  EXPECT_EQ(run(absl::StrCat("cd ", root_.string(), " && env -u BUILD_WORKSPACE_DIRECTORY"), "two"),
            0);
  EXPECT_THAT(Files("memory"), ElementsAre("BUILD", "one", "two"));
}

}  // namespace
}  // namespace tfb
