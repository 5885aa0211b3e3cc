#include "harness/contestants/python_file.h"

#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/judge/evaluate.h"

namespace tfb {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kToy[] = "harness/contestants/toy_contestants.py";

PythonSettings System() {
  PythonSettings settings;
  settings.interpreter = "/usr/bin/python3";  // has NumPy by tools/setup
  settings.memory_limit = int64_t{1} << 30;
  return settings;
}

std::shared_ptr<PythonFile> Toy() {
  static const auto file = std::make_shared<PythonFile>(kToy, System());
  return file;
}

const Technique& Contestant(absl::string_view name) {
  static const bool added = [] {
    const auto list = Toy()->List();
    EXPECT_TRUE(list.ok()) << list.status();
    const absl::Status status = AddContestants(Toy(), *list, &Registry::Global());
    EXPECT_TRUE(status.ok()) << status;
    return true;
  }();
  EXPECT_TRUE(added);
  return **Registry::Global().Find(absl::StrCat(name, "@toy_contestants"));
}

absl::StatusOr<Accuracy> Judged(const std::string& name, const Problem& problem,
                                const Options& options = {}, int threads = 1) {
  const Technique& technique = Contestant(name);
  TFB_ASSIGN_OR_RETURN(const Options canonical, technique.Canonical(options));
  TFB_ASSIGN_OR_RETURN(const auto specs, technique.InputSpecs(problem, canonical));
  const NamedTensors inputs = RandomInputs(specs, 3);
  ThreadPool pool(threads);
  EvaluateRequest request;
  request.job.technique = &technique;
  request.job.options = canonical;
  request.job.problem = problem;
  request.inputs = &inputs;
  request.pool = &pool;
  return Evaluate(request);
}

TEST(PythonFile, AreHeldAgainstTheDefinitionThatTheyName) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 2, 50, 16, causal);
    for (const char* name : {"dense", "Window", "network", "two_results"}) {
      const auto judged = Judged(name, problem, {}, causal ? 2 : 1);
      ASSERT_TRUE(judged.ok()) << name << judged.status();
      EXPECT_TRUE(judged->passed) << name << ": " << judged->failure;
    }
  }
  const Problem problem = Problem::SelfAttention(1, 2, 50, 16);
  EXPECT_TRUE(Judged("two_results", problem)->log_sum_exp_error.has_value());
  const auto wrong = Judged("wrong", problem);
  ASSERT_TRUE(wrong.ok()) << wrong.status();
  EXPECT_THAT(wrong->failure, HasSubstr("bound"));
  // The sizes that a contestant is told are those of its inputs.
  Problem grouped = Problem::SelfAttention(3, 4, 50, 16);
  grouped.kv_heads = 2;
  grouped.value_dim = 24;
  const auto window = Judged("Window", grouped);
  ASSERT_TRUE(window.ok()) << window.status();
  EXPECT_TRUE(window->passed) << window->failure;
  // An option reaches both.
  const auto narrow = Judged("Window", problem, {{"window", "4"}});
  ASSERT_TRUE(narrow.ok()) << narrow.status();
  EXPECT_TRUE(narrow->passed) << narrow->failure;
  EXPECT_GT(narrow->against_dense->relative_frobenius, 0.1);
}

TEST(PythonFile, WhatApproximatesItsDefinitionHasNoBound) {
  const auto judged = Judged("uniform", Problem::SelfAttention(1, 2, 50, 16));
  ASSERT_TRUE(judged.ok()) << judged.status();
  EXPECT_TRUE(judged->passed) << judged->failure;
  EXPECT_GT(judged->against_definition.relative_frobenius, 0.1);
  EXPECT_TRUE(std::isinf(judged->definition_bound));
}

TEST(PythonFile, WhatALayerCannotDoIsItsStatus) {
  const Problem problem = Problem::SelfAttention(1, 2, 50, 16);
  const struct {
    const char* name;
    absl::StatusCode code;
    const char* message;
  } kCases[] = {
      {"refuses", absl::StatusCode::kUnimplemented, "not today"},
      {"writes_inputs", absl::StatusCode::kInternal, "it wrote into its input v"},
      {"GivesOneBuffer", absl::StatusCode::kInternal,
       "its result out of an earlier call changed with a later one"},
      {"another_shape", absl::StatusCode::kInternal,
       "its result out has shape [1, 2, 49, 16]; that of the definition is [1, 2, 50, 16]"},
      {"another_type", absl::StatusCode::kInternal,
       "its result out is of float64; that of the definition is float32"},
      {"no_array", absl::StatusCode::kInternal, "its result out is no array but a str"},
      {"lacks_a_result", absl::StatusCode::kInternal, "its result has no \"log_sum_exp\""},
      {"raises", absl::StatusCode::kInternal, "ValueError: matmul: "},
      {"crashes", absl::StatusCode::kInternal, "its process ended with signal 6 (Aborted)"},
      {"takes_all_memory", absl::StatusCode::kResourceExhausted, ""},
  };
  for (const auto& one : kCases) {
    const absl::Status status = Judged(one.name, problem).status();
    EXPECT_EQ(status.code(), one.code) << one.name << ": " << status;
    EXPECT_THAT(std::string(status.message()), StartsWith(one.message)) << one.name;
  }
  EXPECT_THAT(std::string(Judged("raises", problem).status().message()),
              HasSubstr("(toy_contestants.py:"));
  // The next layer has a new process.
  EXPECT_TRUE(Judged("dense", problem).ok());
}

// Returns the processes that this one has started.
std::vector<pid_t> Children() {
  std::vector<pid_t> children;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream status(entry.path() / "status");
    for (std::string word; status >> word;) {
      pid_t parent = 0;
      if (word != "PPid:" || !(status >> parent)) continue;
      if (parent == getpid()) children.push_back(std::stoi(entry.path().filename()));
      break;
    }
  }
  std::sort(children.begin(), children.end());
  return children;
}

// It keeps what it has taken: the toy holds it in a list.
TEST(PythonFile, WhatRunsOutOfMemoryLeavesTheNextOneANewProcess) {
  const Problem problem = Problem::SelfAttention(1, 2, 50, 16);
  ASSERT_TRUE(Judged("dense", problem).ok());
  const std::vector<pid_t> before = Children();
  EXPECT_EQ(Judged("takes_all_memory", problem).status().code(),
            absl::StatusCode::kResourceExhausted);
  const absl::Status next = Judged("dense", problem).status();
  EXPECT_TRUE(next.ok()) << next;
  EXPECT_NE(Children(), before);
}

TEST(PythonFile, AMaskThatIsNotReadIsNotIgnored) {
  const Problem problem = Problem::SelfAttention(1, 2, 50, 16);
  const Technique& dense = Contestant("dense");
  NamedTensors inputs = RandomInputs(*dense.InputSpecs(problem, {}), 3);
  inputs["key_mask"] = Tensor(DType::kU8, {1, 50});
  Fill(inputs["key_mask"].view(), 1);
  EXPECT_EQ(RunTechnique(dense, problem, ViewsOf(inputs), {}).status(),
            absl::UnimplementedError("it does not read key_mask"));
}

TEST(PythonFile, ALayerOutlivesAProcessThatAnotherOneEnded) {
  const Problem problem = Problem::SelfAttention(1, 1, 20, 8);
  const Technique& technique = Contestant("dense");
  const auto layer = technique.Create(problem, {}, Device::kCpu, 1);
  ASSERT_TRUE(layer.ok()) << layer.status();
  auto* contestant = dynamic_cast<ContestantLayer*>(layer->get());
  ASSERT_NE(contestant, nullptr);
  const NamedTensors inputs = RandomInputs(*technique.InputSpecs(problem, {}), 3);
  Tensor out(DType::kF32, {1, 1, 20, 8});
  Outputs outputs;
  outputs.Set("out", out.view());
  ThreadPool pool(1);
  Execution execution;
  execution.pool = &pool;
  ASSERT_EQ((*layer)->Setup(ViewsOf(inputs), execution), absl::OkStatus());
  ASSERT_EQ((*layer)->Run(ViewsOf(inputs), outputs, execution), absl::OkStatus());
  const Tensor before = out.Clone();
  EXPECT_FALSE(Judged("crashes", problem).ok());
  Fill(out.view(), 0);
  const auto seconds = contestant->RunSeconds(2, 1);
  ASSERT_TRUE(seconds.ok()) << seconds.status();
  EXPECT_EQ(std::memcmp(out.raw(), before.raw(), out.bytes()), 0);
  Fill(out.view(), 0);
  EXPECT_TRUE(contestant->ColdRunSeconds(1 << 20).ok());
  EXPECT_EQ(std::memcmp(out.raw(), before.raw(), out.bytes()), 0);
  EXPECT_TRUE(contestant->SetupSeconds().ok());
  EXPECT_EQ(contestant->about().count("numpy"), 1u);
  EXPECT_EQ(contestant->about().at("OMP_NUM_THREADS"), "1");
}

// The kernel sends both signals to the stopped processes of a group whose shell has ended.
TEST(PythonFile, AStoppedProcessOutlivesTheShellThatItsSweepWasStartedFrom) {
  const Problem problem = Problem::SelfAttention(1, 1, 20, 8);
  ASSERT_TRUE(Judged("dense", problem).ok());
  const std::vector<pid_t> before = Children();
  ASSERT_FALSE(before.empty());
  for (const pid_t child : before) {
    kill(child, SIGHUP);
    kill(child, SIGCONT);
  }
  const auto judged = Judged("dense", problem);
  ASSERT_TRUE(judged.ok()) << judged.status();
  EXPECT_EQ(Children(), before);
}

TEST(PythonFile, ThatCannotBeLoadedIsAnErrorOfItsName) {
  const auto list = [](const char* how, double seconds = 60) {
    setenv("TOY_LOAD", how, 1);
    const absl::Status status = PythonFile(kToy, System(), seconds).List().status();
    unsetenv("TOY_LOAD");
    return status;
  };
  EXPECT_EQ(list("raise"),
            absl::InvalidArgumentError(
                absl::StrCat(kToy, ": RuntimeError: no such accelerator (toy_contestants.py:12)")));
  EXPECT_EQ(list("exit"), absl::InvalidArgumentError(
                              absl::StrCat(kToy, ": its process ended with exit status 3")));
  EXPECT_EQ(list("hang", 1),
            absl::DeadlineExceededError(absl::StrCat(kToy, ": loading it took more than 1 s")));
  const auto status = [](const std::string& contestants, PythonSettings settings = System()) {
    return std::string(PythonFile(contestants, settings).List().status().message());
  };
  EXPECT_EQ(status(absl::StrCat(kToy, ":dens")),
            absl::StrCat(kToy, ":dens: AttributeError: ", kToy, " has no function dens"));
  EXPECT_EQ(status("nowhere.py:f"), "nowhere.py: there is no such file");
  EXPECT_THAT(status("no_module:f"), StartsWith("no_module:f: ModuleNotFoundError: "));
  PythonSettings none;
  none.interpreter = "/nowhere/python3";
  EXPECT_EQ(status(kToy, none), "there is no program \"/nowhere/python3\"; --python names one");
}

}  // namespace
}  // namespace tfb
