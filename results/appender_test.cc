#include "results/appender.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "results/reader.h"
#include "results/synthetic.h"

namespace tfb {
namespace {

using ::tfb::synthetic::CaseSpec;
using ::tfb::synthetic::MakeCase;
using ::tfb::synthetic::MakeEnvironment;
using ::tfb::synthetic::MakeUnmeasured;

std::string Path(const std::string& name) {
  const std::string path = ::testing::TempDir() + "/" + name;
  unlink(path.c_str());
  return path;
}

std::string ReadBytes(const std::string& path) {
  std::stringstream bytes;
  bytes << std::ifstream(path, std::ios::binary).rdbuf();
  return bytes.str();
}

AppenderOptions Resume() {
  AppenderOptions options;
  options.existing = AppenderOptions::Existing::kResume;
  return options;
}

Case CaseOfTokens(int64_t tokens) {
  CaseSpec spec;
  spec.tokens = tokens;
  spec.environment_id = "";
  return MakeCase(spec);
}

TEST(ResultAppender, TheFileParsesAfterEveryAppend) {
  const std::string path = Path("append.pb");
  absl::StatusOr<std::unique_ptr<ResultAppender>> appender = ResultAppender::Open(path);
  ASSERT_TRUE(appender.ok()) << appender.status();
  EXPECT_TRUE(ReadResultFile(path).ok());
  ASSERT_TRUE((*appender)->Append(MakeEnvironment("now")).ok());
  for (int count = 1; count <= 4; ++count) {
    ASSERT_TRUE((*appender)->Append(CaseOfTokens(count)).ok());
    const absl::StatusOr<ResultFile> file = ReadResultFile(path);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_EQ(file->results.cases_size(), count);
    EXPECT_EQ(file->results.cases(count - 1).environment_id(), "now");
    EXPECT_EQ(file->torn_bytes, 0);
    ResultSet whole;
    EXPECT_TRUE(whole.ParseFromString(ReadBytes(path)));
    EXPECT_EQ(whole.cases_size(), count);
  }
}

TEST(SerializeResults, EqualResultsAreEqualBytesInWhateverOrderTheirOptionsWereSet) {
  const auto bytes_of = [](bool forwards) {
    ResultSet results;
    Case& result = *results.add_cases() = CaseOfTokens(1);
    for (int i = 0; i < 40; ++i) {
      const std::string name = "option" + std::to_string(forwards ? i : 39 - i);
      (*result.mutable_key()->mutable_options())[name] = "1";
    }
    return SerializeResults(results);
  };
  EXPECT_EQ(bytes_of(true), bytes_of(false));
}

TEST(ResultAppender, MakesUpAnEnvironmentIdAndTheFoldersOnTheWay) {
  const std::string path = Path("runs_" + std::to_string(getpid()) + "/deep/a.pb");
  absl::StatusOr<std::unique_ptr<ResultAppender>> appender = ResultAppender::Open(path);
  ASSERT_TRUE(appender.ok()) << appender.status();
  ASSERT_TRUE((*appender)->Append(MakeEnvironment("")).ok());
  ASSERT_TRUE((*appender)->Append(CaseOfTokens(1)).ok());
  const absl::StatusOr<ResultFile> file = ReadResultFile(path);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->results.environments(0).id(),
            "20231114T221320Z-bench-1-" + std::to_string(getpid()));
  EXPECT_EQ(file->results.cases(0).environment_id(), file->results.environments(0).id());
}

TEST(ResultAppender, RefusesAFileThatHoldsSomethingUnlessItIsToBeResumed) {
  const std::string path = Path("there.pb");
  {
    auto appender = ResultAppender::Open(path);
    ASSERT_TRUE(appender.ok());
    ASSERT_TRUE((*appender)->Append(MakeEnvironment()).ok());
  }
  const absl::Status refused = ResultAppender::Open(path).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_NE(refused.message().find(path), absl::string_view::npos);
  auto resumed = ResultAppender::Open(path, Resume());
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ((*resumed)->existing().environments_size(), 1);
}

TEST(ResultAppender, ResumingCutsTheTornTailAndTheUnionIsTheUninterruptedFile) {
  const std::string path = Path("torn.pb");
  {
    auto appender = ResultAppender::Open(path);
    ASSERT_TRUE(appender.ok());
    ASSERT_TRUE((*appender)->Append(MakeEnvironment()).ok());
    for (int tokens = 1; tokens <= 3; ++tokens) {
      ASSERT_TRUE((*appender)->Append(CaseOfTokens(tokens)).ok());
    }
  }
  const std::string uninterrupted = ReadBytes(path);
  for (size_t cut = 0; cut < uninterrupted.size(); ++cut) {
    std::ofstream(path, std::ios::binary) << uninterrupted.substr(0, cut);
    AppenderOptions options = Resume();
    options.sync = false;
    auto appender = ResultAppender::Open(path, options);
    ASSERT_TRUE(appender.ok()) << cut << ": " << appender.status();
    EXPECT_EQ((*appender)->size_bytes() + (*appender)->cut_bytes(), static_cast<int64_t>(cut));
    const int done = (*appender)->existing().cases_size();
    if ((*appender)->existing().environments_size() == 0) {
      ASSERT_TRUE((*appender)->Append(MakeEnvironment()).ok());
    }
    for (int tokens = done + 1; tokens <= 3; ++tokens) {
      Case result = CaseOfTokens(tokens);
      result.set_environment_id("env");
      ASSERT_TRUE((*appender)->Append(result).ok());
    }
    const absl::StatusOr<ResultFile> file = ReadResultFile(path);
    ASSERT_TRUE(file.ok()) << cut << ": " << file.status();
    EXPECT_EQ(file->torn_bytes, 0);
    EXPECT_EQ(SerializeResults(file->results), uninterrupted) << cut;
  }
}

TEST(ResultAppender, LeavesADamagedFileAndAForeignFileAsTheyAre) {
  const std::string path = Path("foreign.txt");
  const std::string text = "not a result file\n";
  std::ofstream(path) << text;
  EXPECT_EQ(ResultAppender::Open(path, Resume()).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadBytes(path), text);
}

TEST(ResultAppender, ASecondAppenderIsTurnedAway) {
  const std::string path = Path("locked.pb");
  auto first = ResultAppender::Open(path);
  ASSERT_TRUE(first.ok());
  const absl::Status second = ResultAppender::Open(path, Resume()).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(std::string(second.message()),
            path + ": another process is appending to it; name another file");
  first->reset();
  EXPECT_TRUE(ResultAppender::Open(path, Resume()).ok());
}

TEST(ResultAppender, RefusesToGrowBeyondTheLargestFileAndLeavesTheFileWhole) {
  const std::string path = Path("full.pb");
  AppenderOptions options;
  options.max_file_bytes = 2000;
  auto appender = ResultAppender::Open(path, options);
  ASSERT_TRUE(appender.ok());
  ASSERT_TRUE((*appender)->Append(MakeEnvironment()).ok());
  absl::Status status;
  int appended = 0;
  while ((status = (*appender)->Append(CaseOfTokens(appended + 1))).ok()) ++appended;
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_GT(appended, 0);
  const absl::StatusOr<ResultFile> file = ReadResultFile(path);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->results.cases_size(), appended);
  EXPECT_EQ(file->torn_bytes, 0);
}

TEST(ResultAppender, AWriteThatTheSystemCutsShortLeavesTheFileWhole) {
  const std::string path = Path("quota.pb");
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    auto appender = ResultAppender::Open(path);
    if (!appender.ok() || !(*appender)->Append(MakeEnvironment()).ok()) _exit(1);
    // Room for a part of the next record: the write is short.
    const rlim_t room = (*appender)->size_bytes() + 100;
    const rlimit limit = {room, room};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(2);
    const absl::Status status = (*appender)->Append(CaseOfTokens(1));
    _exit(status.code() == absl::StatusCode::kResourceExhausted ? 0 : 3);
  }
  int exit_status = 0;
  ASSERT_EQ(waitpid(child, &exit_status, 0), child);
  EXPECT_EQ(exit_status, 0);
  const absl::StatusOr<ResultFile> file = ReadResultFile(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->results.cases_size(), 0);
  EXPECT_EQ(file->torn_bytes, 0);
}

TEST(ResultAppender, AKilledProcessLosesAtMostTheRecordBeingWritten) {
  const std::string path = Path("killed.pb");
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    AppenderOptions options;
    options.sync = false;
    auto appender = ResultAppender::Open(path, options);
    if (!appender.ok() || !(*appender)->Append(MakeEnvironment()).ok()) _exit(1);
    for (int tokens = 1;; ++tokens) {
      if (!(*appender)->Append(CaseOfTokens(tokens)).ok()) _exit(1);
      if (tokens == 50 && write(ready[1], "x", 1) != 1) _exit(1);
    }
  }
  char byte;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  ASSERT_EQ(kill(child, SIGKILL), 0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  auto appender = ResultAppender::Open(path, Resume());
  ASSERT_TRUE(appender.ok()) << appender.status();
  const ResultSet& existing = (*appender)->existing();
  EXPECT_GE(existing.cases_size(), 50);
  for (int i = 0; i < existing.cases_size(); ++i) {
    ASSERT_EQ(existing.cases(i).key().problem().query_tokens(), i + 1);
  }
}

TEST(ResultAppender, WantsAStatusAndForWhatDidNotRunAReason) {
  const std::string path = Path("reason.pb");
  auto appender = ResultAppender::Open(path);
  ASSERT_TRUE(appender.ok());
  EXPECT_EQ((*appender)->Append(CaseOfTokens(1)).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE((*appender)->Append(MakeEnvironment()).ok());
  const CaseSpec spec;
  EXPECT_EQ((*appender)->Append(MakeUnmeasured(spec, Outcome::STATUS_SKIPPED, "")).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*appender)->Append(MakeUnmeasured(spec, Outcome::STATUS_UNSPECIFIED, "x")).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(
      (*appender)->Append(MakeUnmeasured(spec, Outcome::STATUS_SKIPPED, "cuda: no device")).ok());
}

TEST(ResultAppender, RefusesTextThatNoReaderWouldTake) {
  const std::string path = Path("latin1.pb");
  auto appender = ResultAppender::Open(path);
  ASSERT_TRUE(appender.ok());
  Environment environment = MakeEnvironment();
  environment.set_host("b\xfcro");
  EXPECT_EQ((*appender)->Append(environment).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*appender)->size_bytes(), 0);
}

TEST(ResultAppender, AFolderThatCannotBeWrittenToIsAClearError) {
  const absl::Status status = ResultAppender::Open("/proc/nowhere/a.pb").status();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("/proc/nowhere"), absl::string_view::npos) << status;
}

TEST(ResultAppender, AFileMayGrowToItsLimitAndNoFurther) {
  const auto append = [](int64_t limit) {
    const std::string path = Path("limited.pb");
    AppenderOptions options;
    options.max_file_bytes = limit;
    options.sync = false;
    auto appender = ResultAppender::Open(path, options);
    EXPECT_TRUE(appender.ok()) << appender.status();
    const absl::Status status = (*appender)->Append(MakeEnvironment());
    EXPECT_EQ((*appender)->size_bytes(), static_cast<int64_t>(ReadBytes(path).size()));
    return std::make_pair(status, (*appender)->size_bytes());
  };
  const int64_t size = append(1 << 20).second;
  EXPECT_TRUE(append(size).first.ok());
  const auto [refused, left] = append(size - 1);
  EXPECT_EQ(left, 0);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(std::string(refused.message()), ::testing::TempDir() + "/limited.pb: would grow to " +
                                                std::to_string(size) + " bytes; at most " +
                                                std::to_string(size - 1) +
                                                " are allowed; go on in another file");
}

TEST(ResultAppender, RefusalsSayWhatIsWrong) {
  const std::string path = Path("refusals.pb");
  auto appender = ResultAppender::Open(path);
  ASSERT_TRUE(appender.ok());
  const auto message = [&](const auto& record) {
    return std::string((*appender)->Append(record).message());
  };
  const Case result = CaseOfTokens(1);
  EXPECT_EQ(message(result), path + ": append an environment before the first case");
  Environment environment = MakeEnvironment();
  environment.set_host("b\xfcro");
  EXPECT_EQ(message(environment), path + ": a tfb.Environment with text that is not UTF-8");
  environment.set_host(std::string((64 << 20) + 1, 'x'));
  const std::string too_long = message(environment);
  EXPECT_EQ(too_long.substr(too_long.find("; at most")), "; at most 67108864 are allowed")
      << too_long.substr(0, 200);
  EXPECT_EQ((*appender)->size_bytes(), 0);
  ASSERT_TRUE((*appender)->Append(MakeEnvironment()).ok());
  Case without_status = result;
  without_status.mutable_outcome()->clear_status();
  without_status.set_environment_id("env");
  EXPECT_EQ(message(without_status),
            path + ": a case without a status: " + CaseKey(without_status));
  without_status.mutable_outcome()->set_status(Outcome::STATUS_TIMEOUT);
  EXPECT_EQ(message(without_status),
            path + ": a case that is timeout without a reason: " + CaseKey(without_status));
  const auto size = std::to_string((*appender)->size_bytes());
  appender->reset();
  EXPECT_EQ(std::string(ResultAppender::Open(path).status().message()),
            path + ": holds " + size + " bytes already; resume it or name another file");
}

TEST(ResultAppender, ACasesOptionsAreWrittenAsTextUnlessTheyAre) {
  const std::string path = Path("options.pb");
  auto appender = ResultAppender::Open(path);
  ASSERT_TRUE(appender.ok());
  ASSERT_TRUE((*appender)->Append(MakeEnvironment()).ok());
  Case result = CaseOfTokens(1);
  (*result.mutable_key()->mutable_options())["window"] = "64";
  ASSERT_TRUE((*appender)->Append(result).ok());
  result.mutable_key()->set_options_text("as it was");
  ASSERT_TRUE((*appender)->Append(result).ok());
  const absl::StatusOr<ResultFile> file = ReadResultFile(path);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->results.cases(0).key().options_text(), "window=64");
  EXPECT_EQ(file->results.cases(1).key().options_text(), "as it was");
}

}  // namespace
}  // namespace tfb
