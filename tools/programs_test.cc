// Tests render, merge and compare as programs: exit statuses, messages, paths.

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"
#include "results/appender.h"
#include "results/reader.h"
#include "results/synthetic.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;

using ::tfb::synthetic::MakeSweep;

struct Ended {
  int exit_status = -1;
  std::string out;
  std::string err;
};

std::string Contents(const fs::path& path) {
  std::stringstream contents;
  contents << std::ifstream(path, std::ios::binary).rdbuf();
  return contents.str();
}

class Programs : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              ::testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    for (const char* name : {"BUILD_WORKING_DIRECTORY", "BUILD_WORKSPACE_DIRECTORY", "NO_COLOR"}) {
      unsetenv(name);
    }
    setenv("LC_ALL", "C.UTF-8", 1);
  }

  // Runs a program; the shell expands `arguments`.
  Ended Run(const std::string& program, const std::string& arguments) {
    const std::string command =
        absl::StrCat("tools/", program, " ", arguments, " >", (folder_ / "out").string(), " 2>",
                     (folder_ / "err").string());
    const int status = system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, Contents(folder_ / "out"),
            Contents(folder_ / "err")};
  }

  std::string Write(const std::string& name, const ResultSet& results) {
    const std::string path = (folder_ / name).string();
    EXPECT_TRUE(WriteResultFile(path, results).ok());
    return path;
  }

  fs::path folder_;
};

TEST_F(Programs, RenderPrintsAFileWithoutColourIntoAPipe) {
  const Ended outcome = Run("render", Write("a.pb", MakeSweep()));
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_TRUE(absl::StrContains(outcome.out, "near window=256")) << outcome.out;
  EXPECT_EQ(outcome.out.find('\x1b'), std::string::npos);
  EXPECT_TRUE(absl::EndsWith(outcome.out, "a.pb\n"));
  EXPECT_NE(Run("render", "--colour=always " + (folder_ / "a.pb").string()).out.find('\x1b'),
            std::string::npos);
}

TEST_F(Programs, RenderTakesPathsRelativeToTheCallersFolder) {
  Write("a.pb", MakeSweep());
  setenv("BUILD_WORKING_DIRECTORY", folder_.c_str(), 1);
  const Ended outcome = Run("render", "a.pb --format=csv --output=a.csv");
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_TRUE(absl::StartsWith(Contents(folder_ / "a.csv"), "environment,host,"));
}

TEST_F(Programs, RenderWithoutAFileTakesTheNewestRunOrSaysHowToGetOne) {
  setenv("BUILD_WORKSPACE_DIRECTORY", folder_.c_str(), 1);
  Ended outcome = Run("render", "");
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_EQ(outcome.err,
            absl::StrCat("render: no result file (*.pb) in ", (folder_ / "results/runs").string(),
                         "; name a file, or run a sweep first: bazel run "
                         "//harness:sweep\n"));
  fs::create_directories(folder_ / "results/runs");
  Write("results/runs/now.pb", MakeSweep());
  outcome = Run("render", "--format=json");
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_EQ(outcome.out[0], '{');
}

TEST_F(Programs, RenderShowsSeveralFilesAsOne) {
  ResultSet other = MakeSweep();
  other.mutable_environments(0)->set_id("other");
  other.mutable_environments(0)->set_host("bench-2");
  for (Case& result : *other.mutable_cases()) result.set_environment_id("other");
  const Ended outcome =
      Run("render", absl::StrCat(Write("a.pb", MakeSweep()), " ", Write("b.pb", other)));
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_TRUE(absl::StrContains(outcome.out, "bench-1 ")) << outcome.out;
  EXPECT_TRUE(absl::StrContains(outcome.out, "bench-2 ")) << outcome.out;
  EXPECT_TRUE(absl::StrContains(outcome.out, "36 cases")) << outcome.out;
}

TEST_F(Programs, RenderSaysWhatATornTailLost) {
  const std::string path = Write("torn.pb", MakeSweep());
  fs::resize_file(path, fs::file_size(path) - 100);
  const Ended outcome = Run("render", path);
  EXPECT_EQ(outcome.exit_status, 0);
  EXPECT_TRUE(absl::StrContains(outcome.err, "bytes of a torn last record"));
  EXPECT_TRUE(absl::StrContains(outcome.out, "17 cases")) << outcome.out;
}

TEST_F(Programs, ADamagedFileIsAnErrorUnlessWhatIsWholeIsAskedFor) {
  const std::string path = Write("flipped.pb", MakeSweep());
  std::string bytes = Contents(path);
  bytes[bytes.size() / 2] ^= 1;
  std::ofstream(path, std::ios::binary) << bytes;
  const Ended refused = Run("render", path);
  EXPECT_EQ(refused.exit_status, 2);
  EXPECT_TRUE(absl::StrContains(refused.err, "--salvage of //tools:render or //tools:merge"))
      << refused.err;
  const Ended salvaged = Run("render", path + " --salvage");
  EXPECT_EQ(salvaged.exit_status, 0) << salvaged.err;
  EXPECT_TRUE(absl::StrContains(salvaged.err, "bytes in 1 place are damaged")) << salvaged.err;
  EXPECT_TRUE(absl::StrContains(salvaged.out, "17 cases")) << salvaged.out;

  const std::string whole = (folder_ / "whole.pb").string();
  EXPECT_EQ(Run("merge", absl::StrCat(path, " --output=", whole)).exit_status, 2);
  const Ended merged = Run("merge", absl::StrCat(path, " --salvage --output=", whole));
  EXPECT_EQ(merged.exit_status, 0) << merged.err;
  const absl::StatusOr<ResultFile> file = ReadResultFile(whole);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->results.cases_size(), 17);
}

TEST_F(Programs, BadUsageIsTwoAndOneLineThatNamesWhatIsWrong) {
  const std::string path = Write("a.pb", MakeSweep());
  const struct {
    const char* program;
    std::string arguments;
    std::string message;
  } kCases[] = {
      {"render", "/nowhere/x.pb",
       "render: /nowhere/x.pb: cannot open: No such file or directory\n"},
      {"render", path + " --fromat=csv", "render: unknown flag --fromat, did you mean --format?\n"},
      {"render", path + " --format=pdf",
       "render: --format: \"pdf\" is none of terminal, markdown, csv, json, html, benchmark_json, "
       "svg, png\n"},
      {"render", path + " --width=3", "render: --width=3: 0, -1, or at least 40 is wanted\n"},
      {"render", path + " --width=39", "render: --width=39: 0, -1, or at least 40 is wanted\n"},
      {"render", path + " --width=1", "render: --width=1: 0, -1, or at least 40 is wanted\n"},
      {"render", path + " --width=-2", "render: --width=-2: 0, -1, or at least 40 is wanted\n"},
      {"render", path + " --colour=red",
       "render: --colour: \"red\" is none of auto, always, never\n"},
      {"render", path + " --output=/nowhere/x",
       "render: --output: /nowhere/x: cannot write: No such file or directory\n"},
      {"compare", path + " " + path + " " + path,
       "compare: two result files are wanted, BASE and NEW, not 3; see --help\n"},
      {"compare", path + " " + path + " --format=xml",
       "compare: --format: \"xml\" is none of terminal, markdown, comment, json\n"},
      {"compare", path, "compare: two result files are wanted, BASE and NEW, not 1; see --help\n"},
      {"compare", path + " /nowhere/x.pb",
       "compare: /nowhere/x.pb: cannot open: No such file or directory\n"},
      {"compare", path + " " + path + " --threshold=0.5",
       "compare: --threshold=0.5: a factor above 1 is wanted\n"},
      {"compare", path + " " + path + " --metric=speed",
       "compare: --metric: \"speed\" is none of relative_to_dense, absolute, instructions\n"},
  };
  for (const auto& bad : kCases) {
    const Ended outcome = Run(bad.program, bad.arguments);
    EXPECT_EQ(outcome.exit_status, 2) << bad.arguments;
    EXPECT_EQ(outcome.err, bad.message);
    EXPECT_EQ(outcome.out, "");
  }
}

TEST_F(Programs, OutputThatCannotBeWrittenIsAnError) {
  const std::string path = Write("a.pb", MakeSweep());
  for (const std::string& command :
       {"render " + path, "compare " + path + " " + path, std::string("render --help")}) {
    const std::string err = (folder_ / "err").string();
    const int status = system(absl::StrCat("tools/", command, " >/dev/full 2>", err).c_str());
    EXPECT_EQ(WEXITSTATUS(status), 2) << command;
    EXPECT_TRUE(absl::StrContains(Contents(err), "cannot write standard output")) << command;
  }
}

TEST_F(Programs, AFileDoesNotTakeThePlaceOfAClosedStream) {
  const std::string path = Write("a.pb", MakeSweep());
  const std::string merged = (folder_ / "merged.pb").string();
  const int status = system(
      absl::StrCat("tools/merge ", path, " ", path, " --output=", merged, " <&- >&- 2>&-").c_str());
  EXPECT_EQ(WEXITSTATUS(status), 0);
  const Ended shown = Run("render", merged);
  EXPECT_EQ(shown.exit_status, 0) << shown.err;
  EXPECT_TRUE(absl::StrContains(shown.out, "18 cases")) << shown.out;
}

TEST_F(Programs, WhatIsNoPlainFileIsWrittenThrough) {
  const std::string path = Write("a.pb", MakeSweep());
  ASSERT_EQ(Run("merge", path + " --output=/dev/null").exit_status, 0);
  ASSERT_EQ(Run("render", path + " --format=csv --output=/dev/null").exit_status, 0);
  ASSERT_EQ(Run("render", path + " --format=png --plot=scaling --output=/dev/null").exit_status, 0);
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  const Ended full = Run("render", path + " --format=html --output=/dev/full");
  EXPECT_EQ(full.exit_status, 2);
  EXPECT_EQ(full.err, "render: --output: /dev/full: cannot write: No space left on device\n");
  fs::create_symlink("target.html", folder_ / "link.html");
  const std::string link = (folder_ / "link.html").string();
  ASSERT_EQ(Run("render", path + " --format=html --output=" + link).exit_status, 0);
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_TRUE(absl::StartsWith(Contents(folder_ / "target.html"), "<!DOCTYPE html>"));
}

TEST_F(Programs, AFileThatIsRenderedIsNotReplacedByWhatIsRendered) {
  const std::string path = Write("a.pb", MakeSweep());
  const std::string bytes = Contents(path);
  fs::create_symlink(path, folder_ / "link.pb");
  const std::string link = (folder_ / "link.pb").string();
  for (const std::string& output : {path, link}) {
    const Ended ended = Run("render", path + " --format=csv --output=" + output);
    EXPECT_EQ(ended.exit_status, 2);
    EXPECT_EQ(ended.err,
              absl::StrCat("render: --output: ", output, " is one of the files that are read\n"));
    EXPECT_EQ(Contents(path), bytes);
  }
}

TEST_F(Programs, AFifoAsInputIsRefusedAndNotWaitedFor) {
  const std::string fifo = (folder_ / "fifo.pb").string();
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string& arguments : {fifo, fifo + " --output=" + fifo}) {
    const char* program = arguments == fifo ? "render" : "merge";
    const Ended ended = Run(program, arguments);
    EXPECT_EQ(ended.exit_status, 2);
    EXPECT_TRUE(absl::StrContains(ended.err, "is not a regular file")) << ended.err;
  }
}

TEST_F(Programs, AFileThatIsBeingAppendedToIsNotMergedOver) {
  const std::string path = Write("a.pb", MakeSweep());
  const std::string growing = Write("growing.pb", MakeSweep());
  AppenderOptions options;
  options.existing = AppenderOptions::Existing::kResume;
  const auto appender = ResultAppender::Open(growing, options);
  ASSERT_TRUE(appender.ok()) << appender.status();
  const Ended ended = Run("merge", path + " --output=" + growing);
  EXPECT_EQ(ended.exit_status, 2);
  EXPECT_TRUE(absl::StrContains(ended.err, "another process is appending to it")) << ended.err;
}

TEST_F(Programs, RenderWritesAPageAndPlots) {
  const std::string path = Write("a.pb", MakeSweep());
  const std::string out = (folder_ / "picture").string();
  ASSERT_EQ(Run("render", path + " --format=html --output=" + out).exit_status, 0);
  EXPECT_TRUE(absl::StartsWith(Contents(out), "<!DOCTYPE html>"));
  ASSERT_EQ(Run("render", path + " --format=svg --plot=scaling --output=" + out).exit_status, 0);
  EXPECT_TRUE(absl::StartsWith(Contents(out), "<?xml "));
  const Ended png = Run("render", path + " --format=png --plot=frontier --output=" + out);
  ASSERT_EQ(png.exit_status, 0) << png.err;
  EXPECT_TRUE(absl::StartsWith(Contents(out), "\x89PNG"));
  EXPECT_EQ(Run("render", path + " --format=benchmark_json").out.substr(0, 1), "{");

  EXPECT_EQ(Run("render", path + " --format=svg").err,
            "render: --plot: \"\" is none of scaling, frontier, memory, roofline\n");
  EXPECT_EQ(Run("render", path + " --plot=scaling").err,
            "render: --plot wants --format=svg or --format=png\n");
  EXPECT_EQ(Run("render", path + " --format=png --plot=scaling").err,
            "render: --format=png wants --output=FILE.png\n");
}

TEST_F(Programs, MergeJoinsFilesAndRefusesWhatItCannotRead) {
  ResultSet other = MakeSweep();
  other.mutable_environments(0)->set_id("other");
  other.mutable_environments(0)->set_host("bench-2");
  for (Case& result : *other.mutable_cases()) result.set_environment_id("other");
  const std::string a = Write("a.pb", MakeSweep()), b = Write("b.pb", other);
  setenv("BUILD_WORKING_DIRECTORY", folder_.c_str(), 1);
  const Ended merged = Run("merge", "a.pb b.pb --output=c.pb");
  EXPECT_EQ(merged.exit_status, 0) << merged.err;
  EXPECT_EQ(
      merged.out,
      absl::StrCat("36 cases of 2 environments from 2 files: ", (folder_ / "c.pb").string(), "\n"));
  EXPECT_TRUE(absl::StrContains(Run("render", "c.pb").out, "36 cases"));
  // Onto one of the files that are read.
  EXPECT_EQ(Run("merge", "a.pb b.pb --output=a.pb").exit_status, 0);
  EXPECT_EQ(Contents(folder_ / "a.pb"), Contents(folder_ / "c.pb"));

  std::ofstream(folder_ / "text.pb") << "not results";
  const Ended refused = Run("merge", "a.pb text.pb --output=d.pb");
  EXPECT_EQ(refused.exit_status, 2);
  EXPECT_TRUE(absl::StrContains(refused.err, "text.pb")) << refused.err;
  EXPECT_FALSE(fs::exists(folder_ / "d.pb"));
  EXPECT_EQ(Run("merge", "a.pb").err, "merge: --output=FILE is wanted\n");
  EXPECT_EQ(Run("merge", "--output=d.pb").err, "merge: name the files to merge\n");
  EXPECT_TRUE(absl::StrContains(Run("merge", "--help").out, "Exit status: 0"));
}

TEST_F(Programs, HelpIsExitZeroWithEveryFlag) {
  for (const char* program : {"render", "compare"}) {
    const Ended outcome = Run(program, "--help");
    EXPECT_EQ(outcome.exit_status, 0);
    EXPECT_TRUE(absl::StrContains(outcome.out, "--format  (default: terminal)")) << outcome.out;
    EXPECT_TRUE(absl::StrContains(outcome.out, "Exit status: 0")) << outcome.out;
  }
}

TEST_F(Programs, CompareIsZeroWithoutAndOneWithARegressionAndTwoForAnotherMachine) {
  const std::string base = Write("base.pb", MakeSweep());
  EXPECT_EQ(Run("compare", base + " " + base).exit_status, 0);

  ResultSet slow = MakeSweep();
  for (Case& result : *slow.mutable_cases()) {
    if (result.key().technique() != "near") continue;
    for (double& ns : *result.mutable_outcome()->mutable_timing()->mutable_run_ns()) ns *= 1.4;
  }
  const Ended red = Run("compare", base + " " + Write("slow.pb", slow));
  EXPECT_EQ(red.exit_status, 1);
  EXPECT_TRUE(absl::StrContains(red.out, "near window=256, cpu f32, 4096 tokens")) << red.out;
  EXPECT_TRUE(absl::EndsWith(red.out, "\nregressed\n"));
  EXPECT_EQ(
      Run("compare", base + " " + (folder_ / "slow.pb").string() + " --threshold 1.5").exit_status,
      0);

  ResultSet elsewhere = MakeSweep();
  elsewhere.mutable_environments(0)->set_cpu_model("Another");
  const std::string other = Write("elsewhere.pb", elsewhere);
  const Ended incomparable = Run("compare", base + " " + other);
  EXPECT_EQ(incomparable.exit_status, 2);
  EXPECT_TRUE(absl::StrContains(incomparable.err, "--allow_different_environment"));
  EXPECT_EQ(Run("compare", base + " " + other + " --allow_different_environment").exit_status, 0);
}

TEST_F(Programs, CompareIsTwoWhereNothingCouldBeJudged) {
  ResultSet skipped;
  *skipped.add_environments() = synthetic::MakeEnvironment();
  *skipped.add_cases() =
      synthetic::MakeUnmeasured(synthetic::CaseSpec(), Outcome::STATUS_SKIPPED, "no time");
  const std::string path = Write("skipped.pb", skipped);
  const std::string why =
      "cannot be judged: no number of the 1 case in both was measured on both sides and could be "
      "compared\n";
  for (const char* format : {"terminal", "markdown", "comment", "json"}) {
    const Ended ended = Run("compare", absl::StrCat(path, " ", path, " --format=", format));
    EXPECT_EQ(ended.exit_status, 2) << format;
    EXPECT_EQ(ended.err, "compare: " + why);
  }
  EXPECT_TRUE(absl::EndsWith(Run("compare", path + " " + path).out, "\n" + why));
}

TEST_F(Programs, RenderRefusesFlagsOfPlotsForTables) {
  const std::string path = Write("a.pb", MakeSweep());
  for (const char* flag : {"family", "techniques", "group"}) {
    for (const char* format : {"terminal", "markdown", "html", "csv"}) {
      const Ended ended =
          Run("render", absl::StrCat(path, " --format=", format, " --", flag, "=x"));
      EXPECT_EQ(ended.exit_status, 2) << flag;
      EXPECT_EQ(ended.out, "") << flag;
      EXPECT_EQ(ended.err,
                absl::StrCat("render: --", flag,
                             " wants --format=svg or --format=png and --plot: tables show "
                             "everything\n"));
    }
  }
}

TEST_F(Programs, CompareWritesACommentAlsoWhereTheTwoCannotBeCompared) {
  const std::string base = Write("base.pb", MakeSweep());
  const std::string marker = "<!-- transformer-family-bench -->\n";
  const Ended same = Run("compare", absl::StrCat(base, " ", base, " --format=comment"));
  EXPECT_EQ(same.exit_status, 0) << same.err;
  EXPECT_TRUE(absl::StartsWith(same.out, marker + "### Unchanged: 0 slower or worse")) << same.out;

  ResultSet elsewhere = MakeSweep();
  elsewhere.mutable_environments(0)->set_cpu_model("Another");
  const std::string why = marker + "### Cannot be judged: the two results cannot be compared\n\n";
  for (const std::string& other :
       {Write("elsewhere.pb", elsewhere), std::string("/nowhere/x.pb"), std::string("/dev/null")}) {
    const Ended ended = Run("compare", absl::StrCat(base, " ", other, " --format=comment"));
    EXPECT_EQ(ended.exit_status, 2) << other;
    // The comment has the line that standard error has.
    const std::string reason(absl::StripPrefix(absl::StripSuffix(ended.err, "\n"), "compare: "));
    EXPECT_FALSE(reason.empty()) << other;
    EXPECT_EQ(ended.out, absl::StrCat(why, "`", reason, "`\n"));
  }
  EXPECT_EQ(Run("compare", base + " --format=comment").out, "");
}

TEST_F(Programs, EveryFlagOfCompareCounts) {
  const std::string base = Write("base.pb", MakeSweep());
  const auto changed = [&](const std::string& name, void (*change)(Case*)) {
    ResultSet now = MakeSweep();
    for (Case& result : *now.mutable_cases()) change(&result);
    return absl::StrCat(base, " ", Write(name, now));
  };
  const std::string memory = changed("memory.pb", [](Case* result) {
    Outcome* outcome = result->mutable_outcome();
    outcome->set_peak_workspace_bytes(outcome->peak_workspace_bytes() * 3 / 2);
  });
  const std::string error = changed("error.pb", [](Case* result) {
    ErrorMeasure* dense = result->mutable_outcome()->mutable_against_dense();
    if (dense->has_relative_frobenius())
      dense->set_relative_frobenius(2 * dense->relative_frobenius());
  });
  const std::string bf16 =
      changed("bf16.pb", [](Case* result) { result->mutable_key()->set_dtype(ELEMENT_TYPE_BF16); });
  const std::string slower = changed("slower.pb", [](Case* result) {
    for (double& ns : *result->mutable_outcome()->mutable_timing()->mutable_run_ns()) ns *= 1.2;
    result->mutable_outcome()->set_flops(1.2 * result->outcome().flops());
  });
  ResultSet fewer = MakeSweep();
  fewer.mutable_cases()->RemoveLast();
  const std::string missing = absl::StrCat(base, " ", Write("fewer.pb", fewer));
  const struct {
    std::string arguments;
    int exit_status;
  } kRows[] = {{memory, 1},
               {memory + " --memory_threshold=2", 0},
               {error, 1},
               {error + " --error_threshold=3", 0},
               {error + " --error_floor=2", 0},
               {bf16, 2},
               {bf16 + " --allow_different_precision", 0},
               {missing, 1},
               {missing + " --allow_missing", 0},
               {slower, 0},
               {slower + " --metric=relative_to_dense", 0},
               {slower + " --metric=absolute", 1},
               {slower + " --metric=absolute --threshold=1.3", 0},
               {slower + " --metric=instructions", 2}};
  for (const auto& row : kRows) {
    const Ended ended = Run("compare", row.arguments);
    EXPECT_EQ(ended.exit_status, row.exit_status) << row.arguments << ended.out << ended.err;
    EXPECT_EQ(ended.err.empty(), row.exit_status != 2) << ended.err;
  }
  EXPECT_FALSE(absl::StrContains(Run("compare", missing).out, "Same, within"));
  EXPECT_TRUE(absl::StrContains(Run("compare", missing + " --all").out, "Same, within"));
  EXPECT_TRUE(absl::StartsWith(Run("compare", missing + " --format=json").out, "{\n"));
  EXPECT_TRUE(
      absl::StartsWith(Run("compare", missing + " --format=markdown").out, "### Regressions"));
}

TEST_F(Programs, EveryFlagOfRenderCounts) {
  const std::string path = Write("a.pb", MakeSweep());
  const auto widest = [&](const std::string& flags) {
    size_t length = 0;
    for (const absl::string_view line : absl::StrSplit(Run("render", path + flags).out, '\n')) {
      if (!absl::StartsWith(line, "results: ")) length = std::max(length, line.size());
    }
    return length;
  };
  EXPECT_GT(widest(" --width=0"), 150u);
  EXPECT_LT(widest(" --width=40"), 60u);
  EXPECT_EQ(widest(" --width=-1"), widest(""));
  EXPECT_EQ(Run("render", path + " --colour=never").out, Run("render", path).out);
  EXPECT_TRUE(absl::StrContains(Run("render", path + " --details").out, "Costs told apart"));
  EXPECT_FALSE(absl::StrContains(Run("render", path).out, "Costs told apart"));

  const std::string plot = path + " --format=svg --plot=scaling";
  EXPECT_TRUE(absl::StrContains(Run("render", plot).out, "width=\"180mm\""));
  EXPECT_TRUE(absl::StrContains(Run("render", plot + " --width_mm=90").out, "width=\"90mm\""));
  EXPECT_TRUE(absl::StrContains(Run("render", plot).out, "near"));
  EXPECT_FALSE(absl::StrContains(Run("render", plot + " --techniques=sk*").out, "near"));
  const std::string nothing = "render: --plot=scaling: nothing to draw";
  EXPECT_EQ(Run("render", plot + " --family=none").err,
            nothing + " with these techniques in these files\n");
  EXPECT_EQ(Run("render", plot + " --group=none").err,
            nothing + "; there are \"cpu f32, 8 heads of 64, causal, input gaussian\"\n");
  const std::string png =
      absl::StrCat(path, " --format=png --plot=scaling --output=", (folder_ / "p.png").string());
  for (const char* dpi : {"29", "2401"}) {
    EXPECT_EQ(Run("render", absl::StrCat(png, " --dpi=", dpi)).err,
              absl::StrCat("render: --dpi=", dpi, ": from 30 to 2400 is wanted\n"));
  }
  EXPECT_EQ(Run("render", png + " --dpi=30").exit_status, 0);
}

TEST_F(Programs, WhatIsLeftOutIsToldByEachProgram) {
  const std::string path = Write("a.pb", MakeSweep());
  const std::string merged = (folder_ / "merged.pb").string();
  EXPECT_EQ(
      Run("merge", absl::StrCat(path, " ", path, " --output=", merged)).out,
      absl::StrCat("18 cases of 1 environments from 2 files, 18 repeated cases left out for a "
                   "later one: ",
                   merged, "\n"));
  const std::string torn = Write("torn.pb", MakeSweep());
  fs::resize_file(torn, fs::file_size(torn) - 100);
  const Ended compared = Run("compare", absl::StrCat(path, " ", torn, " --allow_missing"));
  EXPECT_EQ(compared.exit_status, 0);
  const std::string left_out = compared.err.substr(0, compared.err.find(" bytes"));
  EXPECT_EQ(compared.err, absl::StrCat(left_out, " bytes of a torn last record were left out\n"));
  EXPECT_TRUE(absl::StartsWith(left_out, absl::StrCat("compare: ", torn, ": "))) << left_out;
  const Ended joined = Run("merge", absl::StrCat(torn, " --output=", merged));
  EXPECT_EQ(joined.out, absl::StrCat("17 cases of 1 environments from 1 files: ", merged, "\n"));
  EXPECT_TRUE(absl::StrContains(joined.err, "left out")) << joined.err;
}

}  // namespace
}  // namespace tfb
