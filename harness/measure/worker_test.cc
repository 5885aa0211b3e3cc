#include "harness/measure/worker.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/sanitizers.h"
#include "gtest/gtest.h"
#include "harness/testing/simulated_clock.h"

namespace tfb {
namespace {

// Waits for the next message or the worker's end, and returns the message or how the worker ended.
std::string Next(Worker& worker) {
  std::string message;
  for (;;) {
    switch (worker.Wait(/*seconds=*/3600, &message)) {
      case Worker::Event::kMessage:
        return message;
      case Worker::Event::kEnded:
        return absl::StrCat("ended: ", worker.HowItEnded());
      case Worker::Event::kNothing:
        break;
    }
  }
}

std::unique_ptr<Worker> Started(const std::function<void(WorkerSide&)>& body,
                                int64_t memory_limit = 0) {
  return Worker::Start(body, memory_limit).value();
}

TEST(Worker, MessagesOfAnySizeComeBack) {
  auto worker = Started([](WorkerSide& side) {
    while (const auto message = side.Receive()) side.Send(absl::StrCat(*message, "!"));
  });
  const std::string large(3 << 20, 'x');
  for (const std::string& text :
       {std::string("a"), std::string(), std::string("\n\0b", 3), large}) {
    ASSERT_TRUE(worker->Send(text).ok());
    EXPECT_EQ(Next(*worker), text + "!");
  }
}

TEST(Worker, SeveralMessagesKeepTheirOrder) {
  auto worker = Started([](WorkerSide& side) {
    for (int i = 0; i < 100; ++i) side.Send(absl::StrCat(i));
  });
  for (int i = 0; i < 100; ++i) EXPECT_EQ(Next(*worker), absl::StrCat(i));
  EXPECT_EQ(Next(*worker), "ended: exit status 0");
}

TEST(Worker, CrashIsToldWithWhatItWasAt) {
  auto worker = Started([](WorkerSide& side) {
    side.Announce(7, "a rather long description of some activity");
    side.Send("before");
    signal(SIGSEGV, SIG_DFL);  // sanitizers catch it
    raise(SIGSEGV);
  });
  EXPECT_EQ(Next(*worker), "before");
  EXPECT_EQ(Next(*worker), "ended: signal 11 (Segmentation fault)");
  EXPECT_EQ(worker->activity().index, 7);
  EXPECT_EQ(worker->activity().what, "a rather long description of so");
  EXPECT_EQ(worker->end(), Worker::End::kOther);
  EXPECT_FALSE(worker->Send("after").ok());
}

TEST(Worker, AnAllocationThatFailsInAnyThreadIsToldAsThat) {
  for (const bool in_thread : {false, true}) {
    auto worker = Started([in_thread](WorkerSide&) {
      const auto fail = [] { throw std::bad_alloc(); };
      if (in_thread) std::thread(fail).join();
      fail();
    });
    EXPECT_EQ(Next(*worker), "ended: an allocation failed");
    EXPECT_EQ(worker->end(), Worker::End::kNoMemory);
  }
}

TEST(Worker, TheLimitOfCpuTimeIsToldAsThat) {
  const auto spin = [](WorkerSide&) {
    for (volatile int64_t i = 0;; i = i + 1) {
    }
  };
  // A process with the limits has the worker, so that this one keeps its own.
  const auto run_under_limit = [&spin](rlim_t hard) {
    struct rlimit limit;
    limit.rlim_cur = 1;
    limit.rlim_max = hard;
    setrlimit(RLIMIT_CPU, &limit);
    auto worker = Started(spin);
    std::fputs(Next(*worker).c_str(), stderr);
    _exit(worker->end() == Worker::End::kCpuTime ? 0 : 1);
  };
  EXPECT_EXIT(run_under_limit(1), ::testing::ExitedWithCode(0), "the limit of CPU time");
  EXPECT_EXIT(run_under_limit(100), ::testing::ExitedWithCode(0), "the limit of CPU time");
}

TEST(Worker, HangingWorkerIsSeenAndKilled) {
  SimulatedClock clock;
  const auto hang = [](WorkerSide& side) {
    side.Announce(1, "hang");
    side.Send("announced");
    for (;;) pause();
  };
  auto worker = Worker::Start(hang, /*memory_limit=*/0, &clock).value();
  EXPECT_EQ(Next(*worker), "announced");
  std::string message;
  EXPECT_EQ(worker->Wait(0, &message), Worker::Event::kNothing);
  EXPECT_EQ(worker->activity().seconds, 0);
  clock.Advance(100);
  EXPECT_EQ(worker->activity().seconds, 100);
  EXPECT_EQ(worker->activity().index, 1);
  worker->Kill();
  EXPECT_EQ(Next(*worker), "ended: signal 9 (Killed)");
  EXPECT_EQ(worker->end(), Worker::End::kKilled);
}

TEST(Worker, StopAndDeadlineAreSeen) {
  SimulatedClock clock;
  const auto answer = [](WorkerSide& side) {
    while (side.Receive().has_value()) {
      side.Send(absl::StrCat(side.stopped() ? "stopped, " : "running, ", side.SecondsLeft()));
    }
  };
  const auto ask = [](Worker& worker) {
    EXPECT_TRUE(worker.Send("?").ok());
    return Next(worker);
  };
  auto worker = Worker::Start(answer, /*memory_limit=*/0, &clock).value();
  EXPECT_EQ(ask(*worker), "running, inf");
  worker->Stop();
  EXPECT_EQ(ask(*worker), "stopped, inf");
  worker = Worker::Start(answer, /*memory_limit=*/0, &clock).value();
  worker->SetDeadline(clock.Seconds() + 10);
  EXPECT_EQ(ask(*worker), "running, 10");
  clock.Advance(10);
  EXPECT_EQ(ask(*worker), "running, 0");
  clock.Advance(0.5);
  EXPECT_EQ(ask(*worker), "stopped, -0.5");
}

TEST(Worker, InterruptsAreTheParentsAffair) {
  auto worker = Started([](WorkerSide& side) {
    raise(SIGINT);
    raise(SIGTERM);
    side.Send("alive");
  });
  EXPECT_EQ(Next(*worker), "alive");
}

TEST(Worker, OpenFilesOfTheParentAreClosed) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  auto worker = Started([&](WorkerSide& side) {
    const char byte = 0;
    side.Send(write(ends[1], &byte, 1) < 0 ? "closed" : "open");
  });
  EXPECT_EQ(Next(*worker), "closed");
  close(ends[0]);
  close(ends[1]);
}

int CountOpenFiles() {
  int count = 0;
  DIR* const folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

TEST(Worker, NothingOfAWorkerIsLeftAndSignalsAreAsTheyWere) {
  const int open_before = CountOpenFiles();
  {
    auto hangs = Started([](WorkerSide&) {
      for (;;) pause();
    });
    auto ends = Started([](WorkerSide&) { exit(3); });
    EXPECT_EQ(Next(*ends), "ended: exit status 3");
    EXPECT_EQ(ends->Send("after").message(), "the worker does not take messages");
  }
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
  EXPECT_EQ(CountOpenFiles(), open_before);
  struct sigaction after = {};
  ASSERT_EQ(sigaction(SIGPIPE, nullptr, &after), 0);
  EXPECT_EQ(after.sa_handler, SIG_DFL);
}

TEST(Worker, HasItsOwnFilesAndTheStandardOnesAlone) {
  // Those of the folder itself, ".", "..", the folder's and three standard ones, are counted too.
  auto worker = Started([](WorkerSide& side) { side.Send(absl::StrCat(CountOpenFiles())); });
  EXPECT_EQ(Next(*worker), absl::StrCat(2 + 1 + 3 + 2));
}

TEST(Worker, AMessageThatIsTornIsNone) {
  auto worker = Started([](WorkerSide& side) {
    side.Send("whole");
    // The length of a message, and a part of it.
    std::vector<int> pipes;
    for (int fd = STDERR_FILENO + 1; fd < 1000; ++fd) {
      struct stat what;
      const int mode = fcntl(fd, F_GETFL) & O_ACCMODE;
      if (fstat(fd, &what) == 0 && S_ISFIFO(what.st_mode) && mode == O_WRONLY) pipes.push_back(fd);
    }
    const char torn[] = {8, 0, 0, 0, 'p', 'a', 'r', 't'};
    if (pipes.size() != 1 || write(pipes[0], torn, sizeof(torn)) != 8) exit(1);
    exit(4);
  });
  EXPECT_EQ(Next(*worker), "whole");
  EXPECT_EQ(Next(*worker), "ended: exit status 4");
  EXPECT_EQ(worker->end(), Worker::End::kOther);
}

TEST(Worker, MayTakeTheLimitAndAGibibyteMoreThanItHas) {
  if (kIsSanitized) GTEST_SKIP() << "sanitizers have their own ideas of memory";
  struct rlimit own;
  ASSERT_EQ(getrlimit(RLIMIT_DATA, &own), 0);
  const auto tell = [](WorkerSide& side) {
    struct rlimit limit;
    getrlimit(RLIMIT_DATA, &limit);
    std::ifstream status("/proc/self/status");
    std::string line;
    while (std::getline(status, line) && line.rfind("VmData:", 0) != 0) {
    }
    side.Send(absl::StrCat(limit.rlim_cur));
    side.Send(absl::StrCat(1024 * std::atoll(line.c_str() + 7)));
  };
  for (const int64_t limit : {int64_t{0}, int64_t{1}, int64_t{3} << 30}) {
    auto worker = Started(tell, limit);
    const double allowed = std::atof(Next(*worker).c_str());
    const double taken = std::atof(Next(*worker).c_str());
    if (limit == 0) {
      EXPECT_EQ(allowed, static_cast<double>(own.rlim_cur));
    } else {
      const double more = static_cast<double>(limit + (int64_t{1} << 30));
      EXPECT_NEAR(allowed, taken + more, 1 << 20);
    }
  }
}

TEST(Worker, AllocationsBeyondTheLimitFail) {
  if (kIsSanitized) GTEST_SKIP() << "sanitizers have their own ideas of memory";
  auto worker = Started(
      [](WorkerSide& side) {
        [[maybe_unused]] const char* volatile seen;  // or the compiler may leave out an allocation
        try {
          std::vector<char> fits(64 << 20, 1);
          seen = fits.data();
          side.Send(absl::StrCat("took ", fits.size()));
          std::vector<char> does_not(size_t{8} << 30, 1);
          seen = does_not.data();
          side.Send(absl::StrCat("took ", does_not.size()));
        } catch (const std::bad_alloc&) {
          side.Send("no memory");
        }
      },
      /*memory_limit=*/int64_t{1} << 30);
  EXPECT_EQ(Next(*worker), "took 67108864");
  EXPECT_EQ(Next(*worker), "no memory");
}

}  // namespace
}  // namespace tfb
