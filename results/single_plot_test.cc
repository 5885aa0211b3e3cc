#include "results/single_plot.h"

#include <stdint.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
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
  EXPECT_TRUE(StrContains(status.message(), "librsvg2-bin")) << status;
  EXPECT_FALSE(fs::exists(folder_ / "plot.png"));
}

TEST_F(Png, SaysWhatCannotBeWrittenAndWhichDotsAreOutOfRange) {
  EXPECT_TRUE(StrContains(WritePng(svg_, 100, "/nowhere/plot.png").message(), "/nowhere/plot.png"));
  EXPECT_TRUE(StrContains(WritePng(svg_, 0, (folder_ / "p.png").string()).message(), "--dpi=0"));
}

}  // namespace
}  // namespace tfb
