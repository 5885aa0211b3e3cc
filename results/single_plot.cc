#include "results/single_plot.h"

#include <errno.h>
#include <fnmatch.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/output_file.h"
#include "results/analysis.h"
#include "results/figures.h"
#include "results/plot.h"

extern char** environ;

namespace tfb {
namespace {

constexpr double kPixelsPerMillimetre = 96 / 25.4;
constexpr double kLeastWidth = 60, kMostWidth = 1000;  // mm
constexpr double kTwoColumnsFrom = 140;                // mm: narrower panels cannot be read

SeriesFilter FilterOf(const SinglePlotOptions& options) {
  std::vector<std::string> globs;
  if (!options.techniques.empty()) globs = absl::StrSplit(options.techniques, ',');
  const std::string family = options.family;
  return [globs, family](const Series& series) {
    const Case& first = series.first();
    if (!family.empty() && first.technique().family() != family) return false;
    if (globs.empty()) return true;
    return std::any_of(globs.begin(), globs.end(), [&](const std::string& glob) {
      return fnmatch(glob.c_str(), first.key().technique().c_str(), 0) == 0 ||
             fnmatch(glob.c_str(), series.name.c_str(), 0) == 0;
    });
  };
}

// Returns the panels in their size on paper, each with the title of its figure.
std::vector<plot::Plot> PanelsOf(std::vector<Figure> figures, double width_mm, int* columns) {
  std::vector<plot::Plot> panels;
  bool scattered = false;
  for (Figure& figure : figures) {
    for (plot::Plot& panel : figure.panels) {
      panel.subtitle =
          absl::StrCat(panel.subtitle, panel.subtitle.empty() ? "" : "; ", figure.title);
      scattered = figure.kind == FigureKind::kFrontier;
      panels.push_back(std::move(panel));
    }
  }
  *columns = panels.size() > 1 && width_mm >= kTwoColumnsFrom ? 2 : 1;
  for (plot::Plot& panel : panels) {
    panel.width = width_mm * kPixelsPerMillimetre / *columns;
    // Points need more height for their names than lines, whose names are beside the axes.
    const double ratio = scattered ? 0.8 : 0.68;
    panel.height = std::clamp(panel.width * ratio, 200.0, 480.0);
  }
  return panels;
}

}  // namespace

absl::StatusOr<std::string> RenderSinglePlot(const ResultSet& results,
                                             const SinglePlotOptions& options) {
  absl::StatusOr<FigureKind> kind = ParseFigureKind(options.kind);
  if (!kind.ok())
    return absl::InvalidArgumentError(absl::StrCat("--plot: ", kind.status().message()));
  if (!(options.width_mm >= kLeastWidth && options.width_mm <= kMostWidth)) {
    return absl::InvalidArgumentError(absl::StrCat("--width_mm=", options.width_mm, ": from ",
                                                   kLeastWidth, " to ", kMostWidth, " is wanted"));
  }
  const Analysis analysis(results);
  std::vector<Figure> figures = FiguresOf(*kind, analysis, FilterOf(options));
  std::vector<std::string> titles;
  for (const Figure& figure : figures) titles.push_back(absl::StrCat("\"", figure.title, "\""));
  for (Figure& figure : figures) {
    if (absl::StrContains(figure.title, options.group)) continue;
    figure.panels.erase(std::remove_if(figure.panels.begin(), figure.panels.end(),
                                       [&options](const plot::Plot& panel) {
                                         return !absl::StrContains(panel.title, options.group);
                                       }),
                        figure.panels.end());
  }
  int columns = 1;
  const std::vector<plot::Plot> panels = PanelsOf(std::move(figures), options.width_mm, &columns);
  if (panels.empty()) {
    return absl::NotFoundError(
        absl::StrCat("--plot=", options.kind, ": nothing to draw",
                     titles.empty() ? " with these techniques in these files"
                                    : absl::StrCat("; there are ", absl::StrJoin(titles, ", "))));
  }
  return plot::DrawFile(panels, columns, absl::StrCat(options.kind, " plot"));
}

namespace {

// A file that the destructor deletes.
class TemporaryFile {
 public:
  TemporaryFile() {
    const char* folder = getenv("TMPDIR");
    path_ = absl::StrCat(folder == nullptr || *folder == '\0' ? "/tmp" : folder, "/plotXXXXXX");
    fd_ = mkstemp(path_.data());
  }
  ~TemporaryFile() {
    if (fd_ < 0) return;
    close(fd_);
    unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  absl::Status Write(const std::string& text) {
    if (fd_ < 0) return absl::UnavailableError(absl::StrCat("cannot make ", path_));
    size_t written = 0;
    while (written < text.size()) {
      const ssize_t count = write(fd_, text.data() + written, text.size() - written);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return absl::UnavailableError(absl::StrCat("cannot write ", path_));
      written += static_cast<size_t>(count);
    }
    return absl::OkStatus();
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int fd_ = -1;
};

// Runs a program found in PATH. Returns its exit status, or -1 where it did not exit by itself.
absl::StatusOr<int> RunProgram(std::vector<std::string> arguments) {
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_t process = 0;
  const int error = posix_spawnp(&process, argv[0], nullptr, nullptr, argv.data(), environ);
  if (error != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "PNG needs ", arguments[0], " (", strerror(error),
        "): install Debian's librsvg2-bin, as tools/setup does, or take --format=svg"));
  }
  int status = 0;
  while (waitpid(process, &status, 0) < 0) {
    if (errno != EINTR) return absl::InternalError(absl::StrCat("lost ", arguments[0]));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

absl::Status WritePng(const std::string& svg, int dots_per_inch, const std::string& path) {
  if (dots_per_inch < 30 || dots_per_inch > 2400) {
    return absl::InvalidArgumentError(
        absl::StrCat("--dpi=", dots_per_inch, ": from 30 to 2400 is wanted"));
  }
  TemporaryFile source;
  const absl::Status written = source.Write(svg);
  if (!written.ok()) return written;
  TemporaryFile image;
  const std::string dpi = absl::StrCat(dots_per_inch);
  absl::StatusOr<int> exit_status =
      RunProgram({"rsvg-convert", "--format=png", "--dpi-x", dpi, "--dpi-y", dpi, "--output",
                  image.path(), source.path()});
  if (!exit_status.ok()) return exit_status.status();
  std::stringstream bytes;
  if (*exit_status != 0 || !(bytes << std::ifstream(image.path(), std::ios::binary).rdbuf())) {
    return absl::InternalError("rsvg-convert could not make the image");
  }
  return WriteFile(path, bytes.str());
}

}  // namespace tfb
