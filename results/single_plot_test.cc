#include "results/single_plot.h"

#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "results/synthetic.h"
#include "results/well_formed.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;
using ::absl::StrContains;
using ::tfb::synthetic::MakeSweep;

SinglePlotOptions PlotOf(const std::string& kind) {
  SinglePlotOptions options;
  options.kind = kind;
  return options;
}

TEST(SinglePlot, IsAWellFormedFileOfTheGivenWidth) {
  for (const char* kind : {"scaling", "memory", "roofline", "frontier"}) {
    SinglePlotOptions options = PlotOf(kind);
    options.width_mm = 90;
    absl::StatusOr<std::string> svg = RenderSinglePlot(MakeSweep(), options);
    ASSERT_TRUE(svg.ok()) << kind << ": " << svg.status();
    EXPECT_EQ(MarkupProblem(*svg, false), "") << kind;
    EXPECT_TRUE(StrContains(*svg, "width=\"90mm\"")) << kind;
    EXPECT_TRUE(StrContains(*svg, ">near window=256</text>")) << kind;
  }
}

TEST(SinglePlot, ShowsOnlyWhatIsAskedFor) {
  SinglePlotOptions options = PlotOf("scaling");
  options.techniques = "sk*,other";
  absl::StatusOr<std::string> svg = RenderSinglePlot(MakeSweep(), options);
  ASSERT_TRUE(svg.ok()) << svg.status();
  EXPECT_TRUE(StrContains(*svg, ">sketch features=128</text>"));
  EXPECT_TRUE(StrContains(*svg, ">plain</text>"));  // the counterpart
  EXPECT_FALSE(StrContains(*svg, "near"));
  options.techniques = "near window=256";  // as the tables name it
  EXPECT_TRUE(StrContains(*RenderSinglePlot(MakeSweep(), options), "near"));
  options = PlotOf("scaling");
  options.family = "synthetic";
  EXPECT_TRUE(RenderSinglePlot(MakeSweep(), options).ok());
}

TEST(SinglePlot, SaysWhatThereIsWhereNothingIsLeft) {
  SinglePlotOptions options = PlotOf("scaling");
  options.family = "attention";
  EXPECT_EQ(RenderSinglePlot(MakeSweep(), options).status().code(), absl::StatusCode::kNotFound);
  options = PlotOf("scaling");
  options.group = "bf16";
  const absl::Status status = RenderSinglePlot(MakeSweep(), options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(StrContains(status.message(), "cpu f32, 8 heads of 64, causal")) << status;
  for (const char* group : {"causal", "synthetic"}) {  // of the figure, and of its panel
    options.group = group;
    EXPECT_TRUE(RenderSinglePlot(MakeSweep(), options).ok()) << group;
  }
}

TEST(SinglePlot, NamesTheFlagThatIsWrong) {
  EXPECT_EQ(RenderSinglePlot(MakeSweep(), PlotOf("")).status().message(),
            "--plot: \"\" is none of scaling, frontier, memory, roofline");
  for (const double width : {0.0, -1.0, 59.0, 1e9}) {
    SinglePlotOptions options = PlotOf("scaling");
    options.width_mm = width;
    EXPECT_TRUE(
        StrContains(RenderSinglePlot(MakeSweep(), options).status().message(), "--width_mm"));
  }
}

class Png : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              ::testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    SinglePlotOptions options = PlotOf("scaling");
    options.width_mm = 127;  // 5 inches
    svg_ = *RenderSinglePlot(MakeSweep(), options);
  }
  std::string Read(const fs::path& path) {
    std::stringstream contents;
    contents << std::ifstream(path, std::ios::binary).rdbuf();
    return contents.str();
  }
  fs::path folder_;
  std::string svg_;
};

// Returns width and height from the image's header: https://www.w3.org/TR/png/#11IHDR
uint32_t BigEndian(const std::string& bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(bytes[at + i]);
  return value;
}

TEST_F(Png, HasTheDotsOfItsWidth) {
  const fs::path path = folder_ / "plot.png";
  const absl::Status status = WritePng(svg_, 100, path.string());
  ASSERT_TRUE(status.ok()) << status;
  const std::string png = Read(path);
  ASSERT_GT(png.size(), 1000u);
  EXPECT_EQ(png.substr(0, 8), "\x89PNG\r\n\x1a\n");
  EXPECT_NEAR(BigEndian(png, 16), 500, 1);
  EXPECT_FALSE(fs::exists(folder_ / "plot.png.part"));
}

TEST_F(Png, SaysWhatIsMissing) {
  const std::string path = getenv("PATH");
  setenv("PATH", folder_.c_str(), 1);
  const absl::Status status = WritePng(svg_, 100, (folder_ / "plot.png").string());
  setenv("PATH", path.c_str(), 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(StrContains(status.message(),
                          "PNG needs rsvg-convert (No such file or directory): install Debian's "
                          "librsvg2-bin"))
      << status;
  EXPECT_FALSE(fs::exists(folder_ / "plot.png"));
}

// Has a shell script in place of rsvg-convert, and a folder for temporary files, while it lives. The
// script's arguments 7 and 8 are the image and the source; it has no programs but the shell's own.
class StandInProgram {
 public:
  StandInProgram(const fs::path& folder, const std::string& script) : temporary_(folder / "tmp") {
    fs::create_directories(temporary_);
    std::ofstream(folder / "rsvg-convert") << "#!/bin/sh\n" << script << "\n";
    fs::permissions(folder / "rsvg-convert", fs::perms::owner_all);
    setenv("PATH", folder.c_str(), 1);
    setenv("TMPDIR", temporary_.c_str(), 1);
  }
  ~StandInProgram() {
    setenv("PATH", path_.c_str(), 1);
    unsetenv("TMPDIR");
    EXPECT_TRUE(fs::is_empty(temporary_)) << "temporary files are left";
  }
  StandInProgram(const StandInProgram&) = delete;

 private:
  const std::string path_ = getenv("PATH");
  const fs::path temporary_;
};

constexpr char kCopy[] = "while IFS= read -r l || [ -n \"$l\" ]; do echo \"$l\"; done < $8 > $7";

TEST_F(Png, IsWhatTheProgramMakesOfTheWholePlot) {
  const size_t open = std::distance(fs::directory_iterator("/proc/self/fd"), {});
  for (const int dots : {30, 100, 2400}) {
    const StandInProgram program(folder_, std::string(kCopy) + "; echo \"$*\" >> $7");
    const fs::path path = folder_ / "plot.png";
    const absl::Status status = WritePng(svg_, dots, path.string());
    ASSERT_TRUE(status.ok()) << status;
    std::string made = Read(path);
    ASSERT_GT(made.size(), svg_.size());
    EXPECT_EQ(made.substr(0, svg_.size()), svg_);
    made.erase(0, svg_.size());
    EXPECT_TRUE(StrContains(made, absl::StrCat("--format=png --dpi-x ", dots, " --dpi-y ", dots,
                                               " --output ", (folder_ / "tmp/plot").string())))
        << made;
  }
  EXPECT_EQ(std::distance(fs::directory_iterator("/proc/self/fd"), {}), open);
}

TEST_F(Png, OfOneByteIsNoFailedWrite) {
  const StandInProgram program(
      folder_, "while IFS= read -r l || [ -n \"$l\" ]; do printf %s \"$l\"; done < $8 > $7");
  const absl::Status status = WritePng("x", 100, (folder_ / "plot.png").string());
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(Read(folder_ / "plot.png"), "x");
}

TEST_F(Png, TemporaryFilesAreInTmpWhereNoFolderIsNamed) {
  for (const char* folder : {"", static_cast<const char*>(nullptr)}) {
    const StandInProgram program(folder_, "echo \"$*\" > $7");
    if (folder == nullptr) {
      unsetenv("TMPDIR");
    } else {
      setenv("TMPDIR", folder, 1);
    }
    const absl::Status status = WritePng(svg_, 100, (folder_ / "plot.png").string());
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(StrContains(Read(folder_ / "plot.png"), "--output /tmp/plot"));
  }
}

TEST_F(Png, AProgramThatFailsOrMakesNothingLeavesNoImage) {
  for (const char* script : {"echo half > $7; exit 1", "echo half > $7; exit 3",
                             "echo half > $7; kill -9 $$", "exit 0"}) {
    const StandInProgram program(folder_, script);
    EXPECT_EQ(WritePng(svg_, 100, (folder_ / "plot.png").string()),
              absl::InternalError("rsvg-convert could not make the image"))
        << script;
    EXPECT_FALSE(fs::exists(folder_ / "plot.png")) << script;
  }
}

TEST_F(Png, SaysWhereTemporaryFilesCannotBeMadeOrWritten) {
  const StandInProgram program(folder_, kCopy);
  const std::string path = (folder_ / "plot.png").string();
  setenv("TMPDIR", "/nowhere", 1);
  const absl::Status unmade = WritePng(svg_, 100, path);
  EXPECT_EQ(unmade.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(StrContains(unmade.message(), "cannot make /nowhere/plot")) << unmade;

  // A full disk: no file may have more than 100 bytes.
  setenv("TMPDIR", (folder_ / "tmp").c_str(), 1);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 100;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status unwritten = WritePng(svg_, 100, path);
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
  EXPECT_EQ(unwritten.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(StrContains(unwritten.message(), "cannot write " + (folder_ / "tmp/plot").string()))
      << unwritten;
}

TEST_F(Png, AProgramIsWaitedForThroughSignalsAndMissedWhereItIsGone) {
  const StandInProgram program(folder_, std::string("kill -USR1 $PPID; ") + kCopy);
  struct sigaction interrupt = {}, before;
  interrupt.sa_handler = [](int) {};  // without SA_RESTART
  ASSERT_EQ(sigaction(SIGUSR1, &interrupt, &before), 0);
  const absl::Status status = WritePng(svg_, 100, (folder_ / "plot.png").string());
  EXPECT_TRUE(status.ok()) << status;
  // Nobody can wait for a program where the signal of its end is ignored.
  const auto handler = signal(SIGCHLD, SIG_IGN);
  EXPECT_EQ(WritePng(svg_, 100, (folder_ / "gone.png").string()),
            absl::InternalError("lost rsvg-convert"));
  signal(SIGCHLD, handler);
  sigaction(SIGUSR1, &before, nullptr);
}

TEST_F(Png, SaysWhatCannotBeWrittenAndWhichDotsAreOutOfRange) {
  EXPECT_TRUE(StrContains(WritePng(svg_, 100, "/nowhere/plot.png").message(), "/nowhere/plot.png"));
  for (const int dots : {0, 29, 2401}) {
    EXPECT_EQ(
        WritePng(svg_, dots, (folder_ / "p.png").string()),
        absl::InvalidArgumentError(absl::StrCat("--dpi=", dots, ": from 30 to 2400 is wanted")));
  }
}

}  // namespace
}  // namespace tfb
