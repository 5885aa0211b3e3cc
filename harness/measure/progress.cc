#include "harness/measure/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "harness/plan/quantities.h"
#include "results/table.h"

namespace tfb {
namespace {

bool IsTerminal(std::FILE* out) {
  if (isatty(fileno(out)) == 0) return false;
  const char* term = std::getenv("TERM");
  return term != nullptr && absl::string_view(term) != "dumb";
}

int WidthOf(std::FILE* out) {
  struct winsize size;
  if (ioctl(fileno(out), TIOCGWINSZ, &size) != 0 || size.ws_col < 20) return 80;
  return size.ws_col;
}

}  // namespace

Progress::Progress(std::FILE* out, size_t total)
    : out_(out), terminal_(IsTerminal(out)), width_(terminal_ ? WidthOf(out) : 0), total_(total) {}

void Progress::Show(absl::string_view activity, double elapsed_seconds, double left_seconds) {
  if (!terminal_) return;
  const std::string line =
      absl::StrFormat("[%d/%d] %s, about %s left: %s", finished_, total_,
                      FormatClock(elapsed_seconds), FormatClock(left_seconds), activity);
  // Erases what is left of a longer line; one column stays free, since some terminals wrap at the
  // last.
  std::fprintf(out_, "\r%s\033[K", CutToWidth(line, width_ - 1).c_str());
  std::fflush(out_);
  drawn_ = true;
}

void Progress::Finished(absl::string_view line, bool wrong) {
  ++finished_;
  if (!terminal_ || wrong) Say(absl::StrFormat("[%d/%d] %s", finished_, total_, line));
}

void Progress::Say(absl::string_view line) {
  Clear();
  absl::FPrintF(out_, "%s\n", line);
  std::fflush(out_);
}

void Progress::Clear() {
  if (!drawn_) return;
  std::fputs("\r\033[K", out_);
  std::fflush(out_);
  drawn_ = false;
}

}  // namespace tfb
