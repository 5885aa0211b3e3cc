#include "harness/measure/progress.h"

#include <fcntl.h>
#include <pty.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "gtest/gtest.h"

namespace tfb {
namespace {

// Returns what is written to a terminal of so many columns, or, with 0 columns, to a pipe.
std::string Written(int columns, const std::function<void(std::FILE*)>& write) {
  int ends[2] = {-1, -1};
  if (columns > 0) {
    struct winsize size = {};
    size.ws_row = 24;
    size.ws_col = static_cast<unsigned short>(columns);
    EXPECT_EQ(openpty(&ends[0], &ends[1], nullptr, nullptr, &size), 0);
  } else {
    EXPECT_EQ(pipe(ends), 0);
  }
  std::FILE* const out = fdopen(ends[1], "w");
  write(out);  // what is shown is there at once
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  // The system moves what is written to a terminal in parts. A read that finds none waits for those
  // under way, so that only then there are no more.
  std::string written;
  char buffer[4096];
  for (ssize_t got; (got = read(ends[0], buffer, sizeof(buffer))) > 0;) {
    written.append(buffer, static_cast<size_t>(got));
  }
  std::fclose(out);
  close(ends[0]);
  return written;
}

void Go(std::FILE* out) {
  Progress progress(out, 3);
  progress.Show("measuring the machine", 1.4, 65);
  progress.Clear();
  progress.Clear();
  progress.Finished("first", false);
  progress.Count();
  progress.Show("third", 61, 0);
  progress.Finished("third", true);
  progress.Say("done");
  EXPECT_EQ(progress.finished(), 3u);
}

TEST(Progress, IsALineACaseWhereNobodyWatches) {
  EXPECT_EQ(Written(0, &Go), "[1/3] first\n[3/3] third\ndone\n");
}

TEST(Progress, IsOneLineThatIsRedrawnOnATerminal) {
  setenv("TERM", "xterm", 1);
  const std::string erase = "\r\033[K";
  EXPECT_EQ(Written(80, &Go), "\r[0/3] 1 s, about 1:05 left: measuring the machine\033[K" + erase +
                                  "\r[2/3] 1:01, about 0 s left: third\033[K" + erase +
                                  "[3/3] third\r\ndone\r\n");
  setenv("TERM", "dumb", 1);
  EXPECT_EQ(Written(80, &Go), "[1/3] first\r\n[3/3] third\r\ndone\r\n");
  unsetenv("TERM");
  EXPECT_EQ(Written(80, &Go), "[1/3] first\r\n[3/3] third\r\ndone\r\n");
}

TEST(Progress, IsErasedAtOnce) {
  setenv("TERM", "xterm", 1);
  EXPECT_EQ(Written(80,
                    [](std::FILE* out) {
                      Progress progress(out, 1);
                      progress.Show("x", 0, 0);
                      progress.Clear();
                    }),
            "\r[0/1] 0 s, about 0 s left: x\033[K\r\033[K");
}

// One column stays free; a terminal that tells no plausible width is taken to have 80 columns.
TEST(Progress, IsCutToTheWidthOfTheTerminal) {
  setenv("TERM", "xterm", 1);
  const auto characters = [](int columns) {
    const std::string text = Written(
        columns, [](std::FILE* out) { Progress(out, 1).Show(std::string(200, 'x'), 0, 0); });
    return text.size() - 1 - 3 - 2;  // without \r and \033[K; an ellipsis has three bytes
  };
  EXPECT_EQ(characters(100), 99u);
  EXPECT_EQ(characters(20), 19u);
  EXPECT_EQ(characters(19), 79u);
  EXPECT_EQ(characters(1), 79u);
}

}  // namespace
}  // namespace tfb
