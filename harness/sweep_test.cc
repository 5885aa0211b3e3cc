// Starts the sweep program, over toys, as a shell would.
#include <fcntl.h>
#include <pty.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/sanitizers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "results/appender.h"
#include "results/reader.h"
#include "results/statistics.h"

namespace tfb {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::string Contents(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class SweepTest : public ::testing::Test {
 protected:
  SweepTest() {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = absl::StrCat(::testing::TempDir(), "/", test->name(), "_", getpid());
    EXPECT_EQ(system(absl::StrCat("mkdir -p ", folder_).c_str()), 0);
  }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }

  // Returns the path of another build of the sweep, which is this one by another name.
  std::string OtherBuild() const {
    char folder[4096];
    EXPECT_NE(getcwd(folder, sizeof(folder)), nullptr);
    const std::string other = Path("other_sweep");
    EXPECT_EQ(symlink(absl::StrCat(folder, "/harness/toy_sweep").c_str(), other.c_str()), 0);
    return other;
  }

  struct Finished {
    int exit_status = -1;  // 128 + signal where one ended it
    std::string out, err;
  };

  // A running sweep. Small ones unless `arguments` say otherwise.
  class Process {
   public:
    // A `gate` that is not empty names the file that toy_gate waits at.
    Process(const std::string& folder, const std::vector<std::string>& arguments, bool plain = true,
            const std::string& gate = "")
        : out_(folder + "/stdout"), err_(folder + "/stderr"), gate_(gate) {
      unlink((gate_ + ".reached").c_str());
      unlink(err_.c_str());
      int terminal = -1, end = -1;
      if (!plain) {
        EXPECT_EQ(openpty(&terminal_, &end, nullptr, nullptr, nullptr), 0);
      }
      terminal = end;
      pid_ = fork();
      if (pid_ != 0) {
        if (terminal >= 0) close(terminal);
        return;
      }
      const int out = open(out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
      const int err = plain ? open(err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666) : terminal;
      dup2(out, STDOUT_FILENO);
      dup2(err, STDERR_FILENO);
      setenv("BUILD_WORKING_DIRECTORY", folder.c_str(), 1);
      setenv("TERM", "xterm", 1);
      if (!gate.empty()) setenv("TFB_TOY_GATE", gate.c_str(), 1);
      unsetenv("BUILD_WORKSPACE_DIRECTORY");
      std::vector<std::string> words = {"harness/toy_sweep"};
      words.insert(words.end(), arguments.begin(), arguments.end());
      std::vector<char*> argv;
      for (std::string& word : words) argv.push_back(word.data());
      argv.push_back(nullptr);
      execv(argv[0], argv.data());
      _exit(99);
    }
    void Signal(int number) const { kill(pid_, number); }

    // Each waits, as long as the sweep runs, for an event that must happen.
    void AwaitCases(const std::string& path, int cases) const {
      Await([&] {
        const absl::StatusOr<ResultFile> file = ReadResultFile(path);
        return file.ok() && file->results.cases_size() >= cases;
      });
    }
    // Waits until toy_gate waits at the closed gate.
    void AwaitGate() const {
      Await([&] { return access((gate_ + ".reached").c_str(), F_OK) == 0; });
    }
    void AwaitError(const std::string& text) const {
      Await([&] { return absl::StrContains(Contents(err_), text); });
    }

    Finished Wait() {
      Finished finished;
      std::string typed;
      if (terminal_ >= 0) {
        char buffer[4096];
        for (ssize_t got; (got = read(terminal_, buffer, sizeof(buffer))) > 0;) {
          typed.append(buffer, static_cast<size_t>(got));
        }
        close(terminal_);
      }
      int status = 0;
      waitpid(pid_, &status, 0);
      finished.exit_status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      finished.out = Contents(out_);
      finished.err = terminal_ >= 0 ? typed : Contents(err_);
      return finished;
    }

   private:
    void Await(const std::function<bool()>& has_come) const {
      siginfo_t ended = {};
      while (!has_come()) {
        waitid(P_PID, static_cast<id_t>(pid_), &ended, WEXITED | WNOHANG | WNOWAIT);
        ASSERT_EQ(ended.si_pid, 0) << "the sweep ended before: " << Contents(err_);
        usleep(2000);
      }
    }

    std::string out_, err_, gate_;
    int terminal_ = -1;
    pid_t pid_ = -1;
  };

  // Without cold runs, as overwriting the caches takes most of the time of cases as short as these.
  static std::vector<std::string> Small(std::vector<std::string> arguments) {
    const std::vector<std::string> small = {
        "--input=gaussian", "--heads=2",       "--head_dims=8",       "--threads=1",
        "--min_time=1ms",   "--repetitions=3", "--memory_limit=1GiB", "--cold=false"};
    arguments.insert(arguments.begin(), small.begin(), small.end());
    return arguments;
  }
  Finished Run(const std::vector<std::string>& arguments) {
    return Process(folder_, Small(arguments)).Wait();
  }

  // Returns the status, by "technique tokens", of the records that count.
  std::map<std::string, Outcome> Outcomes(const std::string& name) {
    std::map<std::string, Outcome> outcomes;
    const absl::StatusOr<ResultFile> file = ReadResultFile(Path(name));
    EXPECT_TRUE(file.ok()) << file.status();
    if (!file.ok()) return outcomes;
    for (const auto& [key, record] : CasesByKey(file->results)) {
      outcomes[absl::StrCat(record->key().technique(), " ",
                            record->key().problem().query_tokens())] = record->outcome();
    }
    return outcomes;
  }
  std::set<std::string> Keys(const std::string& name) {
    std::set<std::string> keys;
    const absl::StatusOr<ResultFile> file = ReadResultFile(Path(name));
    EXPECT_TRUE(file.ok()) << file.status();
    if (!file.ok()) return keys;
    for (const auto& entry : CasesByKey(file->results)) keys.insert(entry.first);
    return keys;
  }
  std::set<std::string> FinishedKeys(const std::string& name) {
    std::set<std::string> keys;
    const absl::StatusOr<ResultFile> file = ReadResultFile(Path(name));
    EXPECT_TRUE(file.ok()) << file.status();
    if (!file.ok()) return keys;
    for (const auto& [key, result] : CasesByKey(file->results)) {
      if (!result->outcome().unfinished()) keys.insert(key);
    }
    return keys;
  }
  // Closes the gate, at which toy_gate waits, and returns the path of its file for the sweep.
  std::string CloseGate() {
    std::ofstream(Path("gate")) << "closed";
    return Path("gate");
  }
  void OpenGate() { unlink(Path("gate").c_str()); }

  std::string folder_;
};

TEST_F(SweepTest, SmallSweepWritesEveryCaseAndEndsWithTheFilesPath) {
  const Finished run =
      Run({"--techniques=toy_mean:rounds=*,toy_causal", "--lengths=16:32", "--output=new/a.pb"});
  EXPECT_EQ(run.exit_status, 0) << run.err;
  EXPECT_THAT(run.out, EndsWith("results: new/a.pb\n"));
  EXPECT_THAT(run.out, HasSubstr("toy_causal"));
  EXPECT_THAT(run.err, HasSubstr("[10/10] "));
  EXPECT_THAT(run.err, Not(HasSubstr("\033")));  // no terminal, no escape sequences
  EXPECT_EQ(Keys("new/a.pb").size(), 10u);       // five techniques, dense among them
  const ResultSet results = ReadResultFile(Path("new/a.pb"))->results;
  ASSERT_EQ(results.environments_size(), 1);
  EXPECT_GT(results.environments(0).peaks_size(), 0);
  EXPECT_GT(results.environments(0).command_line_size(), 3);
  for (const auto& [key, record] : CasesByKey(results)) {
    EXPECT_EQ(record->outcome().status(), Outcome::STATUS_OK) << record->outcome().reason();
    EXPECT_FALSE(record->outcome().unfinished()) << key;
    EXPECT_GT(record->outcome().timing().run_ns_size(), 0) << key;
    EXPECT_TRUE(record->outcome().against_definition().passed()) << key;
    EXPECT_EQ(record->environment_id(), results.environments(0).id());
  }
}

TEST_F(SweepTest, ColdRunsAreTimedWhereTheyAreWanted) {
  for (const bool wanted : {true, false}) {
    const Finished run = Run({"--techniques=toy_mean", "--lengths=16", "--output=a.pb",
                              absl::StrCat("--cold=", wanted ? "true" : "false")});
    EXPECT_EQ(run.exit_status, 0) << run.err;
    const std::map<std::string, Outcome> outcomes = Outcomes("a.pb");
    EXPECT_EQ(outcomes.size(), 2u);
    for (const auto& [name, outcome] : outcomes) {
      EXPECT_EQ(outcome.timing().cold_run_ns_size() > 0, wanted) << name;
    }
    unlink(Path("a.pb").c_str());
  }
}

TEST_F(SweepTest, RealTensorsAreThere) {
  const Finished run =
      Process(folder_, {"--techniques=toy_mean,toy_hidden", "--input=real", "--lengths=64",
                        "--threads=1", "--repetitions=1", "--output=a.pb"})
          .Wait();
  EXPECT_EQ(run.exit_status, 0) << run.err;
  // Four layers of q, k and v with dense beside, three of hidden states; the fourth file layer has
  // no x.
  const auto file = ReadResultFile(Path("a.pb"));
  ASSERT_TRUE(file.ok());
  int ok = 0, skipped = 0;
  for (const auto& [key, record] : CasesByKey(file->results)) {
    EXPECT_EQ(record->key().purpose(), Case::PURPOSE_ACCURACY) << key;
    ok += record->outcome().status() == Outcome::STATUS_OK;
    skipped += record->outcome().status() == Outcome::STATUS_SKIPPED;
  }
  EXPECT_EQ(ok, 4 + 4 + 3);
  EXPECT_LE(skipped, 1);
}

TEST_F(SweepTest, WhatGoesWrongIsARowAndTheNextCaseRuns) {
  const Finished run = Run(
      {"--techniques=toy_unable,toy_refuses,toy_crash,toy_wrong,toy_full,toy_cuda,toy_hungry:mib="
       "4000,toy_mean",
       "--lengths=16:32", "--causal=true", "--output=a.pb"});
  EXPECT_EQ(run.exit_status, 1) << run.err;
  auto outcomes = Outcomes("a.pb");
  for (const std::string tokens : {" 16", " 32"}) {
    EXPECT_EQ(outcomes["toy_mean" + tokens].status(), Outcome::STATUS_OK);
    EXPECT_EQ(outcomes["toy_unable" + tokens].status(), Outcome::STATUS_UNSUPPORTED);
    EXPECT_EQ(outcomes["toy_full" + tokens].reason(), "toy_full has no causal form");
    EXPECT_EQ(outcomes["toy_refuses" + tokens].status(), Outcome::STATUS_FAILED);
    EXPECT_EQ(outcomes["toy_wrong" + tokens].status(), Outcome::STATUS_FAILED);
    EXPECT_EQ(outcomes["toy_crash" + tokens].status(), Outcome::STATUS_FAILED);
    EXPECT_THAT(outcomes["toy_crash" + tokens].reason(),
                HasSubstr("\"first run\" ended the process"));
    EXPECT_EQ(outcomes["toy_hungry" + tokens].status(), Outcome::STATUS_OUT_OF_MEMORY);
    // Without a GPU it is not tried; with one it fails. It does not fall back to the CPU.
    EXPECT_NE(outcomes["toy_cuda" + tokens].status(), Outcome::STATUS_OK);
  }
  EXPECT_THAT(run.out, HasSubstr("FAILED"));
}

TEST_F(SweepTest, ASweepOfWhichNothingCouldRunIsAnError) {
  const Finished run =
      Run({"--techniques=toy_unable", "--counterparts=false", "--lengths=16:32", "--output=a.pb"});
  EXPECT_EQ(run.exit_status, 2) << run.err;
  EXPECT_THAT(run.err, HasSubstr("no case could run: "));
  EXPECT_EQ(Outcomes("a.pb").size(), 2u);  // they are in the file all the same
}

TEST_F(SweepTest, ASweepThatFoundNoMemoryForAnyCaseIsAnErrorAndMayRetry) {
  const std::vector<std::string> sweep = {"--techniques=toy_hungry:mib=64", "--counterparts=false",
                                          "--lengths=16", "--output=a.pb"};
  const auto with = [&sweep](const std::vector<std::string>& more) {
    std::vector<std::string> all = sweep;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const Finished run = Run(with({"--memory_limit=1MiB"}));
  EXPECT_EQ(run.exit_status, 2) << run.err;
  EXPECT_THAT(run.err, HasSubstr("no case could run: "));
  EXPECT_EQ(Outcomes("a.pb")["toy_hungry 16"].status(), Outcome::STATUS_OUT_OF_MEMORY);
  const Finished resumed = Run(with({"--memory_limit=1GiB", "--resume"}));
  EXPECT_THAT(resumed.out, HasSubstr("which 1 did not run; --retry runs it again"));
  EXPECT_EQ(Outcomes("a.pb")["toy_hungry 16"].status(), Outcome::STATUS_OUT_OF_MEMORY);
  const Finished retried = Run(with({"--memory_limit=1GiB", "--resume", "--retry"}));
  EXPECT_EQ(retried.exit_status, 0) << retried.err;
  EXPECT_EQ(Outcomes("a.pb")["toy_hungry 16"].status(), Outcome::STATUS_OK);
}

TEST_F(SweepTest, MemoryThatSetupTakesUnannouncedIsARow) {
  if (kIsSanitized) GTEST_SKIP() << "sanitizers have their own ideas of memory";
  const Finished run =
      Run({"--techniques=toy_hoarder:mib=6000,toy_mean", "--lengths=16", "--output=a.pb"});
  EXPECT_EQ(run.exit_status, 0) << run.err;
  auto outcomes = Outcomes("a.pb");
  EXPECT_EQ(outcomes["toy_hoarder 16"].status(), Outcome::STATUS_OUT_OF_MEMORY);
  EXPECT_EQ(outcomes["toy_mean 16"].status(), Outcome::STATUS_OK);
}

TEST_F(SweepTest, KilledAnywhereItResumesToTheSameCases) {
  const auto sweep = [](const std::string& from, std::vector<std::string> more) {
    more.insert(more.begin(), {"--techniques=toy_gate:from=" + from + ",toy_mean,toy_stream",
                               "--lengths=16:128", "--case_timeout=0"});
    return Small(more);
  };
  // The gate stops the sweep at the length that it stands before, until the file is taken away.
  const std::map<int, std::string> gates = {{0, "16"}, {4, "32"}, {12, "128"}};
  for (const auto& [cases, from] : gates) {
    const std::string name = absl::StrCat("killed", cases, ".pb");
    Process process(folder_, sweep(from, {"--output=" + name}), /*plain=*/true, CloseGate());
    process.AwaitGate();
    process.Signal(SIGKILL);
    EXPECT_EQ(process.Wait().exit_status, 128 + SIGKILL);
    EXPECT_EQ(FinishedKeys(name).size(), static_cast<size_t>(cases));
    OpenGate();
    const Finished resumed = Process(folder_, sweep(from, {"--output=" + name, "--resume"})).Wait();
    EXPECT_EQ(resumed.exit_status, 0) << resumed.err;
    EXPECT_EQ(FinishedKeys(name).size(), 16u);
  }
}

TEST_F(SweepTest, ACaseIsInTheFileWhenItIsCheckedAndIsNotCheckedAgain) {
  const auto sweep = [](std::vector<std::string> more) {
    more.insert(more.begin(), {"--techniques=toy_mean,toy_gate", "--lengths=16",
                               "--counterparts=false", "--case_timeout=0", "--output=a.pb"});
    return Small(more);
  };
  Process process(folder_, sweep({}), /*plain=*/true, CloseGate());
  process.AwaitGate();
  process.AwaitCases(Path("a.pb"), 1);
  process.Signal(SIGKILL);
  process.Wait();
  const absl::StatusOr<ResultFile> killed = ReadResultFile(Path("a.pb"));
  ASSERT_TRUE(killed.ok()) << killed.status();
  ASSERT_EQ(killed->results.cases_size(), 1);
  const Outcome& checked = killed->results.cases(0).outcome();
  EXPECT_TRUE(checked.unfinished());
  EXPECT_TRUE(checked.against_definition().passed());
  EXPECT_EQ(checked.timing().run_ns_size(), 0);

  // An error that no check would find stands for the check: it is still there at the end.
  ResultSet marked = killed->results;
  marked.mutable_cases(0)->mutable_outcome()->mutable_against_definition()->set_max_abs(0.125);
  ASSERT_TRUE(WriteResultFile(Path("a.pb"), marked).ok());
  OpenGate();
  const Finished resumed = Process(folder_, sweep({"--resume"})).Wait();
  EXPECT_EQ(resumed.exit_status, 0) << resumed.err;
  const std::map<std::string, Outcome> outcomes = Outcomes("a.pb");
  const Outcome& finished = outcomes.at("toy_mean 16");
  EXPECT_FALSE(finished.unfinished());
  // On a busy machine disturbed samples are taken again.
  EXPECT_GE(finished.timing().run_ns_size() + finished.timing().discarded_samples(), 3);
  EXPECT_EQ(finished.against_definition().max_abs(), 0.125);
  EXPECT_THAT(resumed.out, HasSubstr("2 cases: 2 ok"));
  EXPECT_THAT(resumed.out, Not(HasSubstr("repeated")));
}

TEST_F(SweepTest, ASweepThatMeasuredNothingLeavesNoEnvironment) {
  const std::vector<std::string> sweep =
      Small({"--techniques=toy_gate", "--lengths=16", "--counterparts=false", "--case_timeout=0",
             "--output=a.pb", "--resume"});
  for (int kill = 0; kill < 2; ++kill) {
    Process process(folder_, sweep, /*plain=*/true, CloseGate());
    process.AwaitGate();
    process.Signal(SIGKILL);
    process.Wait();
  }
  const absl::StatusOr<ResultFile> file = ReadResultFile(Path("a.pb"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->results.environments_size(), 0);
}

TEST_F(SweepTest, ResumeRefusesAnotherMachinesBuildsOrVersionsCases) {
  const std::vector<std::string> sweep = {"--techniques=toy_mean", "--lengths=16", "--output=a.pb",
                                          "--resume"};
  EXPECT_EQ(Run(sweep).exit_status, 0);
  const ResultSet own = ReadResultFile(Path("a.pb")).value().results;
  using Change = std::function<void(Environment*)>;
  const std::vector<std::pair<std::string, Change>> changes = {
      {"processor: Cray-1 / ", [](Environment* other) { other->set_cpu_model("Cray-1"); }},
      {"commit: 12ab / ", [](Environment* other) { other->set_git_commit("12ab"); }},
      {"program's checksum: 00000001 / ",
       [](Environment* other) { other->set_program_checksum(1); }},
      {"compiler flags: -O0 / ", [](Environment* other) { other->set_compile_flags("-O0"); }}};
  for (const auto& [what, change] : changes) {
    ResultSet other = own;
    change(other.mutable_environments(0));
    ASSERT_TRUE(WriteResultFile(Path("a.pb"), other).ok());
    const std::string before = Contents(Path("a.pb"));
    const Finished refused = Run(sweep);
    EXPECT_EQ(refused.exit_status, 2);
    EXPECT_THAT(refused.err, HasSubstr("has cases of another machine, build or version"));
    EXPECT_THAT(refused.err, HasSubstr(what));
    EXPECT_EQ(Contents(Path("a.pb")), before);
    std::vector<std::string> told = sweep;
    told.push_back("--allow_different_environment");
    EXPECT_EQ(Run(told).exit_status, 0);
    EXPECT_EQ(Contents(Path("a.pb")), before);
  }
}

TEST_F(SweepTest, AnUnfinishedCaseOfAnUnknownMachineIsMeasuredAnew) {
  const std::vector<std::string> sweep = {"--techniques=toy_mean", "--lengths=16",
                                          "--counterparts=false", "--output=a.pb", "--resume"};
  EXPECT_EQ(Run(sweep).exit_status, 0);
  ResultSet results = ReadResultFile(Path("a.pb")).value().results;
  results.clear_environments();
  for (Case& record : *results.mutable_cases()) {
    record.mutable_outcome()->set_unfinished(true);
    record.mutable_outcome()->mutable_against_definition()->set_max_abs(0.125);
  }
  ASSERT_TRUE(WriteResultFile(Path("a.pb"), results).ok());
  const Finished refused = Run(sweep);
  EXPECT_EQ(refused.exit_status, 2);
  EXPECT_THAT(refused.err, HasSubstr("(there / here: unknown)"));
  std::vector<std::string> told = sweep;
  told.push_back("--allow_different_environment");
  const Finished resumed = Run(told);
  EXPECT_EQ(resumed.exit_status, 0) << resumed.err;
  const std::map<std::string, Outcome> outcomes = Outcomes("a.pb");
  EXPECT_FALSE(outcomes.at("toy_mean 16").unfinished());
  EXPECT_NE(outcomes.at("toy_mean 16").against_definition().max_abs(), 0.125);
}

TEST_F(SweepTest, AFullFileEndsWithTheTableAndHowToGoOn) {
  // A file may grow to 16 blocks, of 512 or 1024 bytes by the shell; standard output and error go
  // through pipes.
  const std::string command =
      absl::StrCat("(ulimit -f 16; BUILD_WORKING_DIRECTORY=", folder_, " harness/toy_sweep ",
                   absl::StrJoin(Small({"--techniques=toy_mean,toy_causal:rounds=*,toy_stream",
                                        "--lengths=8:4096", "--output=a.pb"}),
                                 " "),
                   " 2>&1; echo exit status $?) | cat > ", Path("said"));
  ASSERT_EQ(system(command.c_str()), 0);
  const std::string said = Contents(Path("said"));
  EXPECT_THAT(said, HasSubstr("a.pb: cannot append: File too large; "));
  EXPECT_THAT(said, HasSubstr(" cases are in a.pb, --resume goes on"));
  EXPECT_THAT(said, HasSubstr("toy_causal"));
  EXPECT_THAT(said, HasSubstr("results: a.pb"));
  EXPECT_THAT(said, EndsWith("exit status 2\n"));
  EXPECT_FALSE(Keys("a.pb").empty());
}

// Twenty-five kills in five tests, as tests run beside each other. Each kill meets whatever the sweep is
// at: its start, the environment's record, a case, its record.
class KilledSweepTest : public SweepTest, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Seed, KilledSweepTest, ::testing::Range(20, 25));

TEST_P(KilledSweepTest, FiveKillsAtRandomInstantsLoseNothing) {
  const std::vector<std::string> sweep = Small({"--techniques=toy_slow:ms=3,toy_mean,toy_stream",
                                                "--lengths=16:2048", "--output=a.pb", "--resume"});
  std::mt19937 random(GetParam());
  std::uniform_real_distribution<double> instant(0, 1);
  std::set<std::string> kept;
  for (int kill = 0; kill < 5; ++kill) {
    Process process(folder_, sweep);
    usleep(static_cast<useconds_t>(1e6 * instant(random)));
    process.Signal(SIGKILL);
    process.Wait();
    if (access(Path("a.pb").c_str(), F_OK) != 0) continue;  // before it was made
    const std::set<std::string> keys = Keys("a.pb");
    EXPECT_TRUE(std::includes(keys.begin(), keys.end(), kept.begin(), kept.end())) << kill;
    kept = keys;
  }
  const Finished resumed = Process(folder_, sweep).Wait();
  EXPECT_EQ(resumed.exit_status, 0) << resumed.err;
  EXPECT_EQ(Run({"--techniques=toy_slow:ms=3,toy_mean,toy_stream", "--lengths=16:2048",
                 "--output=whole.pb"})
                .exit_status,
            0);
  EXPECT_EQ(Keys("a.pb"), Keys("whole.pb"));
}

TEST_F(SweepTest, TornFileIsCutAndResumed) {
  EXPECT_EQ(Run({"--techniques=toy_mean", "--lengths=16", "--output=a.pb"}).exit_status, 0);
  const std::set<std::string> whole = Keys("a.pb");
  const std::string bytes = Contents(Path("a.pb"));
  std::ofstream(Path("a.pb"), std::ios::binary) << bytes.substr(0, bytes.size() - 20);
  const Finished resumed =
      Run({"--techniques=toy_mean", "--lengths=16", "--output=a.pb", "--resume"});
  EXPECT_EQ(resumed.exit_status, 0) << resumed.err;
  EXPECT_THAT(resumed.err, HasSubstr("cut off a torn record"));
  EXPECT_EQ(Keys("a.pb"), whole);
}

TEST_F(SweepTest, ResumeOfAFinishedSweepMeasuresNothing) {
  const std::vector<std::string> sweep = {"--techniques=toy_mean", "--lengths=16", "--output=a.pb",
                                          "--resume"};
  EXPECT_EQ(Run(sweep).exit_status, 0);  // there is nothing to resume: it begins
  const std::string before = Contents(Path("a.pb"));
  const Finished again = Run(sweep);
  EXPECT_EQ(again.exit_status, 0);
  EXPECT_THAT(again.out, HasSubstr("nothing was left to measure"));
  EXPECT_EQ(Contents(Path("a.pb")), before);
}

TEST_F(SweepTest, InterruptLeavesAValidFileAndSaysHowToGoOn) {
  // A glob has to be quoted, and a value may be a word of its own.
  const std::vector<std::string> sweep = {"--techniques=toy_gate:from=64,toy_mea?",
                                          "--lengths=16:4096", "--case_timeout=0", "--output",
                                          "a.pb"};
  for (const int number : {SIGINT, SIGTERM}) {
    std::vector<std::string> arguments = Small(sweep);
    if (number == SIGTERM) arguments.push_back("--resume");
    // Two lengths are done, and the next waits at the gate.
    Process process(folder_, arguments, /*plain=*/true, CloseGate());
    process.AwaitGate();
    process.Signal(number);
    process.AwaitError("stopping when the samples at hand are taken");
    OpenGate();
    const Finished run = process.Wait();
    EXPECT_EQ(run.exit_status, 128 + number);
    EXPECT_THAT(run.err,
                HasSubstr(" of 27 cases left; to go on: harness/toy_sweep --input=gaussian "
                          "--heads=2 --head_dims=8 --threads=1 --min_time=1ms "
                          "--repetitions=3 --memory_limit=1GiB --cold=false "
                          "'--techniques=toy_gate:from=64,toy_mea?' --lengths=16:4096 "
                          "--case_timeout=0 --output=a.pb --resume\n"));
    EXPECT_THAT(run.out, EndsWith("results: a.pb\n"));
    EXPECT_LT(Keys("a.pb").size(), 27u);
  }
  std::vector<std::string> rest = sweep;
  rest.push_back("--resume");
  EXPECT_EQ(Run(rest).exit_status, 0);
  EXPECT_EQ(Keys("a.pb").size(), 27u);
}

// The case at hand never ends: if the sweep waited for it, this test would not end either.
TEST_F(SweepTest, SecondInterruptStopsAtOnce) {
  Process process(folder_,
                  Small({"--techniques=toy_gate,toy_mean", "--lengths=16", "--case_timeout=0",
                         "--output=a.pb"}),
                  /*plain=*/true, CloseGate());
  process.AwaitGate();
  process.Signal(SIGINT);
  process.AwaitError("once more to stop at once");
  process.Signal(SIGINT);
  EXPECT_EQ(process.Wait().exit_status, 130);
  EXPECT_TRUE(ReadResultFile(Path("a.pb")).ok());
}

TEST_F(SweepTest, ProgressIsRedrawnOnATerminal) {
  const Finished run =
      Process(folder_,
              Small({"--techniques=toy_slow:ms=50,toy_crash", "--lengths=16", "--output=a.pb"}),
              /*plain=*/false)
          .Wait();
  EXPECT_EQ(run.exit_status, 1);
  EXPECT_THAT(run.err, HasSubstr("\r["));
  EXPECT_THAT(run.err, HasSubstr("left: "));
  // Only cases that went wrong stay on the screen.
  EXPECT_THAT(run.err, HasSubstr("toy_crash, cpu, "));
  EXPECT_THAT(run.err, Not(HasSubstr("toy_slow ms=50, cpu, ")));
}

TEST_F(SweepTest, ShardsTogetherHaveTheCasesOfTheWholeAndEachItsCounterparts) {
  const std::vector<std::string> sweep = {
      "--techniques=dense,toy_mean,toy_causal:rounds=*,toy_stream", "--lengths=8:64",
      "--devices=cpu"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), sweep.begin(), sweep.end());
    return more;
  };
  EXPECT_EQ(Run(with({"--output=whole.pb"})).exit_status, 0);
  const std::set<std::string> whole = Keys("whole.pb");
  const absl::StatusOr<ResultFile> whole_file = ReadResultFile(Path("whole.pb"));
  ASSERT_TRUE(whole_file.ok());
  const DensePartners partners_of_whole(whole_file->results);
  const std::map<std::string, const Case*> cases_of_whole = CasesByKey(whole_file->results);
  std::set<std::string> together;
  for (const int shard : {1, 2, 3, 4}) {
    const std::string name = absl::StrCat(shard, ".pb");
    const Finished done = Run(with({"--output=" + name, absl::StrCat("--shard=", shard, "/4")}));
    EXPECT_EQ(done.exit_status, 0) << done.err;
    const std::set<std::string> part = Keys(name);
    EXPECT_FALSE(part.empty());
    EXPECT_LT(part.size(), whole.size());
    together.insert(part.begin(), part.end());
    // A case that has a dense partner in the whole has it in its part.
    const absl::StatusOr<ResultFile> file = ReadResultFile(Path(name));
    ASSERT_TRUE(file.ok());
    const DensePartners partners(file->results);
    for (const auto& [key, one] : CasesByKey(file->results)) {
      const bool has = partners_of_whole.Find(*cases_of_whole.at(key)) != nullptr;
      EXPECT_EQ(partners.Find(*one) != nullptr, has) << name << " " << key;
    }
  }
  EXPECT_EQ(together, whole);
  EXPECT_EQ(Run(with({"--shard=5/4"})).err,
            "sweep: --shard: \"5/4\"; wanted is a part of up to 10000, as in 2/4\n");
}

TEST_F(SweepTest, TwoBuildsTakeTurnsAndAreCompared) {
  const std::string other = OtherBuild();
  const Finished done =
      Run({"--techniques=toy_mean,toy_causal", "--lengths=8,16", "--repetitions=8", "--rounds=4",
           "--output=new.pb", absl::StrCat("--interleave_with=", other)});
  EXPECT_EQ(done.exit_status, 0) << done.err;
  EXPECT_THAT(done.out, HasSubstr(absl::StrCat("against ", other)));
  EXPECT_THAT(done.out, HasSubstr("0 missing, 0 new"));
  EXPECT_THAT(done.out, EndsWith("//tools:compare -- new-base.pb new.pb\n"));
  EXPECT_FALSE(Keys("new.pb").empty());
  EXPECT_EQ(Keys("new.pb"), Keys("new-base.pb"));
  const ResultSet base = ReadResultFile(Path("new-base.pb")).value().results;
  EXPECT_THAT(absl::StrJoin(base.environments(0).command_line(), " "),
              StartsWith(other +
                         " --input=gaussian --heads=2 --head_dims=8 --threads=1 "
                         "--min_time=1ms --repetitions=3 --memory_limit=1GiB --cold=false "
                         "--techniques=toy_mean,toy_causal --lengths=8,16 --repetitions=8 "
                         "--rounds=4 --output=" +
                         Path("new-base.pb") + " --turns="));
  // A file that the other would overwrite is in the way.
  EXPECT_EQ(
      Run({"--techniques=toy_mean", "--lengths=8", "--output=new", "--interleave_with=" + other})
          .err,
      "sweep: --interleave_with: " + Path("new-base.pb") +
          " is there already; --resume goes on with it\n");
  for (const char* name : {"new.pb", "new-base.pb"}) {
    for (const auto& [which, outcome] : Outcomes(name)) {
      EXPECT_EQ(outcome.status(), Outcome::STATUS_OK) << name << " " << which;
      // Four visits of two samples, checked at the first.
      const Timing& timing = outcome.timing();
      EXPECT_EQ(timing.run_ns_size() + timing.discarded_samples(), 8) << name << " " << which;
      EXPECT_EQ(timing.probe_ns_size(), timing.run_ns_size());
      EXPECT_TRUE(outcome.against_definition().passed());
    }
  }
  EXPECT_EQ(Run({"--techniques=toy_mean", "--output=other.pb", "--lengths=8",
                 "--interleave_with=" + other, "--rounds=9"})
                .err,
            "sweep: --rounds: 9; allowed are 0 to --repetitions, which is 3\n");
}

TEST_F(SweepTest, WithoutRoundsABuildVisitsACaseOnceAndOneThatTakesTurnsFourTimesAtMost) {
  const std::string other = OtherBuild();
  // Without a budget no samples are added where some were disturbed.
  const auto samples = [&](const std::string& repetitions, bool takes_turns) {
    const std::string name = absl::StrCat(repetitions, takes_turns ? "_turns.pb" : ".pb");
    std::vector<std::string> arguments = {"--techniques=toy_mean", "--lengths=8", "--time_budget=0",
                                          "--repetitions=" + repetitions, "--output=" + name};
    if (takes_turns) arguments.push_back("--interleave_with=" + other);
    const Finished done = Run(arguments);
    EXPECT_EQ(done.exit_status, 0) << done.err;
    const Timing timing = Outcomes(name).at("toy_mean 8").timing();
    return timing.run_ns_size() + timing.discarded_samples();
  };
  EXPECT_EQ(samples("7", false), 7);
  EXPECT_EQ(samples("7", true), 8);  // four visits of two
  EXPECT_EQ(samples("3", true), 3);  // three visits of one
}

TEST_F(SweepTest, WhatIsNoSweepCannotTakeTurns) {
  const auto run = [this](const std::string& other) {
    return Run({"--techniques=toy_mean", "--lengths=8", "--output=a.pb", "--resume",
                "--interleave_with=" + other});
  };
  Finished done = run("/none");
  EXPECT_EQ(done.exit_status, 2);
  EXPECT_EQ(done.err, "sweep: --interleave_with: /none: No such file or directory\n");
  done = run("/bin/false");
  EXPECT_EQ(done.exit_status, 2);
  EXPECT_THAT(done.err, HasSubstr("sweep: /bin/false ended with exit status 1; is it a sweep of a "
                                  "build that knows --turns?"));
  done = run("/bin/echo");
  EXPECT_EQ(done.exit_status, 2);
  EXPECT_THAT(Run({"--turns=7"}).err, HasSubstr("is set by a sweep with --interleave_with"));
}

TEST_F(SweepTest, ALeaderThatIsKilledTakesTheOtherAlong) {
  Process leader(folder_, Small({"--techniques=toy_slow:ms=20", "--lengths=8:1024",
                                 "--output=new.pb", "--interleave_with=" + OtherBuild()}));
  leader.AwaitCases(Path("new-base.pb"), 1);
  leader.Signal(SIGKILL);
  leader.Wait();
  // The other ends, sooner or later, and lets go of its file: it can be gone on with.
  Finished done;
  do {
    done = Run({"--techniques=toy_mean:ms=1", "--lengths=8", "--output=new-base.pb", "--resume"});
  } while (absl::StrContains(done.err, "another process is appending to it"));
  EXPECT_EQ(done.exit_status, 0) << done.err;
}

TEST_F(SweepTest, BadUsageIsOneLineThatNamesTheFlag) {
  const std::string duration = "; write a duration like 90s, 1.5m, 2h";
  const std::vector<std::pair<std::vector<std::string>, std::string>> usages = {
      {{"--techniques=toy_maen"},
       "--techniques: there is no technique \"toy_maen\"; nearest are toy_mean, toy_gate, toy_hang "
       "(sweep --list shows all)"},
      {{"--techniques=toy_mean:widow=1"},
       "--techniques: toy_mean: unknown option \"widow\"; known are rounds, shade, ms, mib, from"},
      {{"--lengths=0"}, "--lengths: 0; allowed are 1 to 1099511627776"},
      {{"--lengths=9:3"}, "--lengths: the range 9:3 is empty"},
      {{"--heads=0"}, "--heads: 0; allowed are 1 to 1099511627776"},
      {{"--heads=3", "--kv_heads=2"},
       "--kv_heads: query_heads is 3, which kv_heads (2) does not divide"},
      {{"--head_dims=257"}, "--head_dims: 257; allowed are 1 to 256"},
      {{"--batches=0"}, "--batches: 0; allowed are 1 to 1099511627776"},
      {{"--threads=4097"}, "--threads: 4097; allowed are 1 to 4096"},
      {{"--devices=gpu"}, "--devices: unknown device \"gpu\"; known are cpu, cuda, simulator"},
      {{"--dtypes=f8"}, "--dtypes: \"f8\"; allowed are f32, bf16, f16"},
      {{"--causal=yes"}, "--causal: \"yes\"; allowed are true, false, auto"},
      {{"--input=imaginary"},
       "--input: input \"imaginary\" is unknown; known are real, gaussian, peaked, needle, text "
       "and "
       "FILE.safetensors"},
      {{"--input=missing.safetensors"},
       "--input: " + Path("./missing.safetensors") + ": cannot open: No such file or directory"},
      {{"--input=real", "--lengths=1000000"},
       "--lengths: no case is left: no input of \"real\" has as many tokens as \"1000000\""},
      {{"--shard=0/4"}, "--shard: \"0/4\"; wanted is a part of up to 10000, as in 2/4"},
      {{"--contestants=mine.txt"},
       "--contestants: mine.txt is neither a shared library (FILE.so) nor Python (FILE.py, "
       "FILE.py:FUNCTION), nor a folder of these"},
      {{"--repetitions=0"}, "--repetitions: 0; allowed are 1 to 100000"},
      {{"--repetitions=100001"}, "--repetitions: 100001; allowed are 1 to 100000"},
      {{"--repetitions=few"},
       "--repetitions=few: Illegal value 'few' specified for flag 'repetitions'"},
      {{"--accuracy_rows=-1"}, "--accuracy_rows: -1; allowed are 0 and more"},
      {{"--rounds=-1"}, "--rounds: -1; allowed are 0 to --repetitions, which is 3"},
      {{"--rounds=4"}, "--rounds: 4; allowed are 0 to --repetitions, which is 3"},
      {{"--min_time=soon"}, "--min_time: \"soon\"" + duration},
      {{"--case_timeout=-1"}, "--case_timeout: \"-1\"" + duration},
      {{"--time_budget=x"}, "--time_budget: \"x\"" + duration},
      {{"--memory_limit=lots"}, "--memory_limit: \"lots\"; write a size like 512MiB, 16GiB"},
      {{"--memory_limit=16"},
       "--memory_limit: \"16\" has no unit; write a size like 512MiB, 16GiB"},
      {{"--resume"}, "--resume: name the file to go on with by --output=FILE"},
      {{"--retry"}, "--retry: goes with --resume"},
      {{"--output=/proc/no/a.pb"},
       "--output: /proc/no: cannot make this folder: No such file or directory"},
      {{"--turns=7"}, "--turns: \"7\" is set by a sweep with --interleave_with"},
      {{"--lenghts=16"}, "unknown flag --lenghts, did you mean --lengths?"},
      {{"longformer"}, "\"longformer\" is no flag; --help lists the flags"},
  };
  for (const auto& [arguments, message] : usages) {
    const Finished run = Run(arguments);
    EXPECT_EQ(run.exit_status, 2) << run.err;
    EXPECT_EQ(run.err, "sweep: " + message + "\n");
    EXPECT_EQ(run.out, "");
  }
}

TEST_F(SweepTest, FileThatIsThereIsNotOverwritten) {
  std::ofstream(Path("a.pb")) << "something else";
  const Finished fresh = Run({"--techniques=toy_mean", "--lengths=16", "--output=a.pb"});
  EXPECT_EQ(fresh.exit_status, 2);
  EXPECT_THAT(fresh.err, HasSubstr("a.pb is there already; --resume goes on with it"));
  const Finished resumed =
      Run({"--techniques=toy_mean", "--lengths=16", "--output=a.pb", "--resume"});
  EXPECT_EQ(resumed.exit_status, 2);  // it is no result file
  EXPECT_EQ(Contents(Path("a.pb")), "something else");
}

TEST_F(SweepTest, EveryFlagHasItsDefault) {
  const Finished help = Run({"--help"});
  EXPECT_EQ(help.exit_status, 0);
  std::string flags;
  for (const absl::string_view line : absl::StrSplit(help.out, '\n')) {
    if (absl::StartsWith(line, "  --")) absl::StrAppend(&flags, line.substr(2), "\n");
  }
  EXPECT_EQ(flags,
            "--accuracy  (default: true)\n"
            "--accuracy_rows  (default: 64)\n"
            "--allow_different_environment  (default: false)\n"
            "--batches  (default: 1)\n"
            "--case_timeout  (default: 60s)\n"
            "--causal  (default: auto)\n"
            "--cold  (default: true)\n"
            "--contestants  (default: none)\n"
            "--counterparts  (default: true)\n"
            "--devices  (default: none)\n"
            "--dry_run  (default: false)\n"
            "--dtypes  (default: f32)\n"
            "--graphs  (default: true)\n"
            "--head_dims  (default: 64)\n"
            "--heads  (default: 8)\n"
            "--input  (default: real,gaussian)\n"
            "--interleave_with  (default: none)\n"
            "--kv_heads  (default: none)\n"
            "--lengths  (default: none)\n"
            "--list  (default: false)\n"
            "--memory_limit  (default: none)\n"
            "--min_time  (default: 10ms)\n"
            "--output  (default: none)\n"
            "--pass  (default: forward)\n"
            "--python  (default: python3)\n"
            "--repetitions  (default: 33)\n"
            "--resume  (default: false)\n"
            "--retry  (default: false)\n"
            "--rounds  (default: 0)\n"
            "--seed  (default: 1)\n"
            "--shard  (default: none)\n"
            "--techniques  (default: *)\n"
            "--threads  (default: none)\n"
            "--time_budget  (default: 5m)\n"
            "--turns  (default: none)\n");
}

TEST_F(SweepTest, ListShowsEachChosenTechniqueOnce) {
  const Finished list = Run({"--list", "--techniques=toy_hidden,toy_causal:rounds=*"});
  EXPECT_EQ(list.exit_status, 0);
  std::string options;
  for (const char* option : {"rounds=1  (1 to 1000000) times that the work is done; * is 1, 2, 4",
                             "shade=0  (0 to 2) changes nothing; * is 0, 2",
                             "ms=0  (0 to 3600000) milliseconds that a Run waits",
                             "mib=0  (0 to 1099511627776) MiB that are taken",
                             "from=1  (1 to 1099511627776) query tokens from which a Run waits at "
                             "the gate"}) {
    absl::StrAppend(&options, "    :", option, "\n");
  }
  EXPECT_EQ(list.out,
            "toy_hidden  A toy\n    family toys, own, input hidden, devices cpu\n    none\n" +
                options +
                "toy_causal  A toy\n    family toys, own, input qkv, devices cpu, causal only\n"
                "    none\n" +
                options);
}

TEST_F(SweepTest, ADryRunShowsTheCasesThatTheFlagsMake) {
  const std::string plain = "cpu, batch 1, 2 heads of 8, 16 tokens, causal, f32, gaussian\n";
  EXPECT_EQ(Run({"--dry_run", "--techniques=toy_mean", "--lengths=16"}).out,
            "toy_mean, " + plain + "dense, " + plain + "2 cases\n");
  EXPECT_EQ(
      Run({"--dry_run", "--techniques=toy_mean:rounds=2", "--lengths=5", "--heads=4",
           "--kv_heads=2", "--head_dims=3", "--batches=7", "--causal=false", "--input=needle",
           "--dtypes=bf16", "--devices=cuda", "--counterparts=false"})
          .out,
      "toy_mean rounds=2, cuda, batch 7, 4 heads of 3 over 2 key-value heads, 5 tokens, bf16, "
      "needle\n1 cases\n");
  EXPECT_EQ(Run({"--dry_run", "--techniques=toy_mean", "--lengths=16", "--counterparts=false",
                 "--pass=forward,training"})
                .out,
            "toy_mean, " + plain +
                "toy_mean, cpu, batch 1, 2 heads of 8, 16 tokens, causal, f32, gaussian, training\n"
                "2 cases\n");
  const std::string text =
      "toy_hidden, cpu, batch 1, 6 heads of 32, 16 tokens, causal, f32, text\n";
  EXPECT_EQ(Run({"--dry_run", "--techniques=toy_hidden", "--input=text", "--lengths=16"}).out,
            text + text + "2 cases\n");
  EXPECT_EQ(Run({"--dry_run", "--techniques=toy_hidden", "--input=text", "--lengths=16",
                 "--accuracy=false"})
                .out,
            text + "1 cases\n");
  EXPECT_EQ(Run({"--dry_run", "--techniques=toy_mean,toy_slow", "--lengths=16", "--shard=2/2",
                 "--counterparts=false"})
                .out,
            "toy_slow, " + plain + "1 cases\n");
}

TEST_F(SweepTest, SeedThreadsRowsAndWordsOfTheCommandAreInTheFile) {
  const Finished run = Run({"--techniques=toy_mean", "--lengths=16", "--seed=5", "--threads=2",
                            "--counterparts=false", "--output=a.pb"});
  EXPECT_EQ(run.exit_status, 0) << run.err;
  const ResultSet results = ReadResultFile(Path("a.pb")).value().results;
  const Case& last = results.cases(results.cases_size() - 1);
  EXPECT_EQ(last.key().seed(), 5u);
  EXPECT_EQ(last.key().threads(), 2);
  EXPECT_EQ(results.environments(0).threads(), 2);
  EXPECT_EQ(absl::StrJoin(results.environments(0).command_line(), " "),
            "harness/toy_sweep --input=gaussian --heads=2 --head_dims=8 --threads=1 --min_time=1ms "
            "--repetitions=3 --memory_limit=1GiB --cold=false --techniques=toy_mean --lengths=16 "
            "--seed=5 "
            "--threads=2 --counterparts=false --output=a.pb");
}

TEST_F(SweepTest, DefaultFileIsBelowTheCallersFolder) {
  const Finished run = Run({"--techniques=toy_mean", "--lengths=16"});
  EXPECT_EQ(run.exit_status, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("results: results/runs/"));
}

}  // namespace
}  // namespace tfb
