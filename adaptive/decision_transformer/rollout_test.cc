// Tests the model that ships, and the program that evaluates it.
#include "adaptive/decision_transformer/rollout.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "core/program_testing.h"
#include "core/safetensors.h"
#include "gtest/gtest.h"

namespace tfb::decision_transformer {
namespace {

constexpr char kModel[] = "adaptive/decision_transformer/model/model.safetensors";

// Returns the graph 0 -> 1 -> 2 -> 3, 0 -> 2, 3 -> 0, and 4 -> 4, from which nothing leads to the
// goal 3.
WalkGraph SmallGraph() {
  WalkGraph graph;
  graph.edges.assign(5, std::vector<bool>(5));
  for (const auto& [from, to] :
       std::vector<std::pair<int, int>>{{0, 1}, {1, 2}, {2, 3}, {0, 2}, {3, 0}, {4, 4}}) {
    graph.edges[from][to] = true;
  }
  graph.goal = 3;
  graph.max_steps = 4;
  graph.walks = {{0, 1, 2, 3}, {4, 4, 4, 4, 4}};
  return graph;
}

TEST(WalkGraph, DistancesAreThoseOfShortestPaths) {
  EXPECT_EQ(DistancesToGoal(SmallGraph()), (std::vector<int64_t>{2, 2, 1, 0, -1}));
}

TEST(WalkGraph, TheFewestStepsOfTheDataAreOfWalksThatBeginThereAndReachTheGoal) {
  WalkGraph graph = SmallGraph();
  graph.walks.push_back({0, 2, 3});
  EXPECT_EQ(FewestStepsInTheData(graph, 0), 2);
  EXPECT_EQ(FewestStepsInTheData(graph, 1), std::nullopt);
  EXPECT_EQ(FewestStepsInTheData(graph, 4), std::nullopt);
}

TEST(WalkGraph, APathIsInTheDataWhereAWalkPassesItsNodesOneAfterTheOther) {
  EXPECT_TRUE(IsInTheData(SmallGraph(), {1, 2, 3}));
  EXPECT_TRUE(IsInTheData(SmallGraph(), {4, 4}));
  EXPECT_FALSE(IsInTheData(SmallGraph(), {0, 2, 3}));
}

TEST(Trajectory, AStepAsksForItsRewardLess) {
  Trajectory trajectory = Trajectory::From(5, -3);
  trajectory.Step(7, -1, 7);
  trajectory.Step(2, 0.5, 7);
  EXPECT_EQ(trajectory.returns, (std::vector<double>{-3, -2, -2.5}));
  EXPECT_EQ(trajectory.states, (std::vector<int64_t>{5, 7, 7}));
  EXPECT_EQ(trajectory.actions, (std::vector<int64_t>{7, 2}));
  EXPECT_EQ(trajectory.steps(), 2);
}

class Walks : public ::testing::Test {
 protected:
  void SetUp() override {
    auto model = WalkModel::Read(kModel);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    distances_ = DistancesToGoal(model_->graph());
    for (int64_t node = 0; node < model_->graph().nodes(); ++node) {
      if (node != model_->graph().goal) starts_.push_back(node);
    }
  }
  std::vector<Outcome> Asking(const std::vector<double>& returns) {
    auto outcomes = RollOut(model_.get(), starts_, returns);
    EXPECT_TRUE(outcomes.ok()) << outcomes.status();
    return *std::move(outcomes);
  }
  std::vector<Outcome> AskingAll(double asked) {
    return Asking(std::vector<double>(starts_.size(), asked));
  }
  std::vector<double> ShortestReturns() const {
    std::vector<double> returns;
    for (const int64_t start : starts_) {
      returns.push_back(-static_cast<double>(distances_[start]));
    }
    return returns;
  }

  std::unique_ptr<WalkModel> model_;
  std::vector<int64_t> distances_, starts_;
};

TEST_F(Walks, ActionsHaveProbabilitiesThatSumTo1WhateverElseIsInTheBatch) {
  std::vector<Trajectory> many;
  for (int64_t n = 0; n < 40; ++n) {  // more than a run takes
    many.push_back(Trajectory::From(n % 20, -4));
    if (n % 3 == 0) many.back().Step(1, -1, 1);
  }
  const auto together = model_->NextActions(many);
  ASSERT_TRUE(together.ok()) << together.status();
  for (size_t n = 0; n < many.size(); ++n) {
    double sum = 0;
    for (const double log_p : (*together)[n]) sum += std::exp(log_p);
    EXPECT_NEAR(sum, 1, 1e-9);
    EXPECT_EQ(model_->NextActions({many[n]}).value()[0], (*together)[n]) << n;
  }
}

TEST_F(Walks, WalksMoveAlongEdgesAndEndAtTheGoal) {
  const WalkGraph& graph = model_->graph();
  for (const Outcome& outcome : AskingAll(-5)) {
    const Trajectory& walk = outcome.trajectory;
    ASSERT_LE(walk.steps(), graph.max_steps);
    for (int64_t t = 0; t < walk.steps(); ++t) {
      const int64_t from = walk.states[t], to = walk.states[t + 1];
      EXPECT_NE(from, graph.goal);
      EXPECT_TRUE(from == to || graph.edges[from][to]);
      EXPECT_EQ(walk.returns[t + 1], walk.returns[t] + 1);
    }
    EXPECT_EQ(outcome.reached, walk.states.back() == graph.goal);
  }
}

// The model was trained for this: it finds paths that its data does not have.
TEST_F(Walks, AskedForTheReturnOfAShortestPathItFindsOneFromEveryStart) {
  const std::vector<Outcome> outcomes = Asking(ShortestReturns());
  int64_t shorter = 0;  // shorter than every walk of the data from the same start
  for (const Outcome& outcome : outcomes) {
    EXPECT_TRUE(outcome.reached);
    EXPECT_EQ(outcome.trajectory.steps(), distances_[outcome.trajectory.states[0]]);
    const auto of_data = FewestStepsInTheData(model_->graph(), outcome.trajectory.states[0]);
    shorter += outcome.trajectory.steps() < of_data.value_or(100) ? 1 : 0;
  }
  EXPECT_GE(shorter, 1);
}

TEST_F(Walks, TheMoreIsAskedForTheMoreIsAchieved) {
  double before = -11;
  for (double asked = -8; asked <= -2; ++asked) {
    double sum = 0;
    for (const Outcome& outcome : AskingAll(asked)) {
      EXPECT_TRUE(outcome.reached) << "asked for " << asked;
      sum += outcome.achieved;
    }
    const double mean = sum / static_cast<double>(starts_.size());
    EXPECT_GE(mean, before) << "asked for " << asked;
    before = mean;
  }
}

TEST_F(Walks, APlanOfABeamOfOneIsTheRollOutAndAWiderOneIsNoLessLikely) {
  const std::vector<double> asked = ShortestReturns();
  const std::vector<Outcome> outcomes = Asking(asked);
  for (size_t n = 0; n < starts_.size(); ++n) {
    const auto greedy = PlanAndWalk(model_.get(), starts_[n], asked[n], 1, 0.6);
    ASSERT_TRUE(greedy.ok()) << greedy.status();
    EXPECT_EQ(greedy->trajectory.actions, outcomes[n].trajectory.actions);
    const auto wide = PlanAndWalk(model_.get(), starts_[n], asked[n], 4, 0);
    ASSERT_TRUE(wide.ok()) << wide.status();
    EXPECT_TRUE(wide->reached);
  }
}

TEST_F(Walks, AShorterContextStillWalks) {
  const auto model = WalkModel::Read(kModel, /*context=*/2, /*threads=*/2);
  ASSERT_TRUE(model.ok()) << model.status();
  // Steps that fit into the context give the same result, to rounding.
  const Trajectory start = Trajectory::From(starts_[0], -4);
  const auto a = (*model)->NextActions({start}).value()[0];
  const auto b = model_->NextActions({start}).value()[0];
  for (size_t y = 0; y < a.size(); ++y) EXPECT_NEAR(a[y], b[y], 1e-4);
  Trajectory longer = start;
  for (int n = 0; n < 3; ++n) longer.Step(1, -1, 1);
  EXPECT_NE((*model)->NextActions({longer}).value()[0], model_->NextActions({longer}).value()[0]);
}

// ---- Files ----

Tensor Integers(const Shape& shape, const std::vector<int32_t>& values) {
  Tensor tensor(DType::kI32, shape);
  std::copy(values.begin(), values.end(), tensor.span<int32_t>().begin());
  return tensor;
}

// A model of a graph of two nodes, with one layer of one channel.
SafetensorsFile TinyModel() {
  SafetensorsFile file;
  file.metadata = {{"technique",
                    "decision_transformer:layers=1,state_dim=2,action_dim=2,max_timestep=3,"
                    "feed_forward_dim=1"},
                   {"heads", "1"},
                   {"return_scale", "0.5"}};
  file.tensors["graph.edges"] = Integers({2, 2}, {0, 1, 1, 0});
  file.tensors["graph.goal"] = Integers({1}, {1});
  file.tensors["graph.walks"] = Integers({2, 3}, {0, 1, -1, 1, 0, 1});
  const Technique* technique = Registry::Global().Find("decision_transformer").value();
  const auto layer = technique->Create(Problem::SelfAttention(1, 1, 5, 1, /*causal=*/true),
                                       ParseTechniqueSpec(file.metadata["technique"])->options,
                                       Device::kCpu, /*seed=*/1);
  for (const auto& [name, tensor] : (*layer)->parameters()) file.tensors[name] = tensor.Clone();
  return file;
}

std::string Answer(const SafetensorsFile& file) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/tiny.", getpid());
  EXPECT_TRUE(WriteSafetensors(path, file.tensors, file.metadata).ok());
  const auto model = WalkModel::Read(path);
  unlink(path.c_str());
  return model.ok() ? "read" : absl::StrReplaceAll(model.status().message(), {{path + ": ", ""}});
}

TEST(WalkModel, WhatIsWrongWithAFileIsSaidByName) {
  EXPECT_EQ(Answer(TinyModel()), "read");
  using File = SafetensorsFile;
  const std::string technique = "metadata \"technique\" ", expected = "; expected is i32 of ";
  struct Case {
    std::function<void(File*)> change;
    std::string answer;
  };
  for (const Case& c : std::vector<Case>{
           {[](File* f) { f->tensors.erase("graph.walks"); }, "graph.walks is not there"},
           {[](File* f) { f->tensors.erase("head.action.w"); }, "head.action.w is not there"},
           {[](File* f) { f->tensors.erase("embed.return.b"); }, "embed.return.b is not there"},
           {[](File* f) { f->tensors["graph.goal"] = Tensor(DType::kF32, {1}); },
            "graph.goal is f32 [1]" + expected + "1 dimensions"},
           {[](File* f) {
              f->tensors["graph.edges"] = Integers({4}, {0, 1, 1, 0});
            },
            "graph.edges is i32 [4]" + expected + "2 dimensions"},
           {[](File* f) {
              f->tensors["graph.edges"] = Integers({1, 2}, {0, 1});
            },
            "graph.edges is not square"},
           {[](File* f) {
              f->tensors["graph.edges"] = Tensor(DType::kI32, {0, 0});
            },
            "graph.edges is not square"},
           {[](File* f) { f->tensors["graph.goal"] = Integers({1}, {2}); },
            "graph.goal is no node of the graph"},
           {[](File* f) { f->tensors["graph.goal"] = Integers({1}, {-1}); },
            "graph.goal is no node of the graph"},
           {[](File* f) {
              f->tensors["graph.goal"] = Integers({2}, {0, 1});
            },
            "graph.goal is no node of the graph"},
           {[](File* f) {
              f->tensors["graph.walks"] = Integers({2, 1}, {0, 1});
            },
            "graph.walks has walks without a step"},
           {[](File* f) {
              f->tensors["graph.walks"] = Integers({1, 2}, {0, 2});
            },
            "graph.walks leaves the graph"},
           {[](File* f) {
              f->tensors["graph.walks"] = Integers({1, 2}, {-2, 0});
            },
            "graph.walks leaves the graph"},
           {[](File* f) {
              f->tensors["graph.walks"] = Integers({1, 2}, {-1, 0});
            },
            "graph.walks has an empty walk"},
           {[](File* f) { f->metadata["technique"] = "dense"; },
            technique + "is \"dense\"; expected is decision_transformer:..."},
           {[](File* f) { f->metadata["technique"] = ":"; },
            technique + "is \":\"; expected is decision_transformer:..."},
           {[](File* f) { f->metadata["heads"] = "none"; },
            "metadata \"heads\" is no number of heads"},
           {[](File* f) { f->metadata["heads"] = "0"; },
            "metadata \"heads\" is no number of heads"},
           {[](File* f) { f->metadata["heads"] = "2"; },
            "embed.return.b has 1 channels, which 2 heads do not divide"},
           {[](File* f) { f->metadata["return_scale"] = "much"; },
            "metadata \"return_scale\" is no number"},
           {[](File* f) {
              f->tensors["graph.edges"] = Integers({1, 1}, {1});
              f->tensors["graph.goal"] = Integers({1}, {0});
              f->tensors["graph.walks"] = Integers({1, 3}, {0, 0, 0});
            },
            technique + "has state_dim=2; the graph has 1 nodes"}}) {
    File file = TinyModel();
    c.change(&file);
    EXPECT_EQ(Answer(file), c.answer);
  }
  EXPECT_EQ(WalkModel::Read("no/such/file").status().message(),
            "no/such/file: cannot open: No such file or directory");
}

TEST(WalkModel, AStartAtTheGoalIsAWalkWithoutSteps) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/goal.", getpid());
  SafetensorsFile file = TinyModel();
  ASSERT_TRUE(WriteSafetensors(path, file.tensors, file.metadata).ok());
  const auto model = WalkModel::Read(path).value();
  unlink(path.c_str());
  EXPECT_EQ(model->graph().max_steps, 2);
  for (const Outcome& outcome : {RollOut(model.get(), {1}, {-2}).value()[0],
                                 PlanAndWalk(model.get(), 1, -2, 2, 0).value()}) {
    EXPECT_TRUE(outcome.reached);
    EXPECT_EQ(outcome.achieved, 0);
    EXPECT_EQ(outcome.trajectory.steps(), 0);
  }
}

// ---- The program ----

constexpr char kEvaluate[] = "adaptive/decision_transformer/evaluate";

ProgramRun Evaluate(const std::string& arguments) {
  return RunProgram(absl::StrCat(kEvaluate, " ", arguments));
}

TEST(EvaluateProgram, PrintsATableOfWalksStepByStepAndOfPlans) {
  for (const auto& [arguments, golden] :
       {std::pair("", "evaluate"), std::pair("--threads=2", "evaluate"),
        std::pair("--asked=-3,2.5, --context=3 --paths", "evaluate_paths"),
        std::pair("--asked=-4.0 --beam=3 --length_penalty=0.6 --context=1", "evaluate_beam")}) {
    const ProgramRun run = Evaluate(arguments);
    EXPECT_EQ(run.exit_status, 0);
    EXPECT_EQ(run.err, "");
    const std::string expected =
        GoldenText(absl::StrCat("adaptive/decision_transformer/testdata/", golden, ".txt"));
    EXPECT_EQ(TextDifference(run.out, expected), "") << arguments;
  }
}

TEST(EvaluateProgram, TellsWhatTheWalksOfTheDataAchieve) {
  const auto model = WalkModel::Read(kModel);
  ASSERT_TRUE(model.ok()) << model.status();
  const WalkGraph& graph = (*model)->graph();
  const int64_t goal = graph.goal;
  int reached = 0, starts = 0, starts_reached = 0, shortest = 0;
  double steps = 0, share = 0, mean = 0, best_sum = 0;
  const std::vector<int64_t> distances = DistancesToGoal(graph);
  for (int64_t start = 0; start < graph.nodes(); ++start) {
    if (start == goal || distances[start] < 0) continue;
    ++starts;
    double walks = 0, ended = 0, all_steps = 0, best = static_cast<double>(graph.max_steps);
    bool any = false;
    for (const std::vector<int64_t>& walk : graph.walks) {
      if (walk.front() != start) continue;
      const double length = static_cast<double>(walk.size()) - 1;
      ++walks;
      all_steps += length;
      if (walk.back() != goal) continue;
      ++ended;
      ++reached;
      steps += length;
      best = any ? std::min(best, length) : length;
      any = true;
    }
    ASSERT_GT(walks, 0) << start;
    share += ended / walks;
    mean -= all_steps / walks;
    best_sum -= best;
    starts_reached += any ? 1 : 0;
    shortest += best == static_cast<double>(distances[start]) ? 1 : 0;
  }
  EXPECT_GT(reached, 0);
  EXPECT_LT(reached, static_cast<int>(graph.walks.size()));
  const ProgramRun ended = Evaluate("--asked=-4");
  for (const std::string& part :
       {absl::StrFormat("%d nodes, goal %d; learned from %d random walks of at most %d steps,\n"
                        "of which %d reach the goal, in %.2f steps on average\n",
                        graph.nodes(), goal, graph.walks.size(), graph.max_steps, reached,
                        steps / reached),
        absl::StrFormat("\nrandom walks of the data   %9.0f%% %12.2f\n", 100 * share / starts,
                        mean / starts),
        absl::StrFormat("\nthe best of them           %7d/%-2d %12.2f %9s %9d\n", starts_reached,
                        starts, best_sum / starts, "", shortest)}) {
    EXPECT_TRUE(absl::StrContains(ended.out, part)) << part << " is not in\n" << ended.out;
  }
}

// The only start is node 0, whose one walk of the data takes a step. The model always stays there.
TEST(EvaluateProgram, AWalkThatMissesTheGoalHasTheReturnOfTheLongestOne) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/stays.", getpid());
  SafetensorsFile file = TinyModel();
  file.tensors["head.action.b"].view().Set(0, 1000);
  ASSERT_TRUE(WriteSafetensors(path, file.tensors, file.metadata).ok());
  const ProgramRun run = Evaluate(absl::StrCat("--asked=-1 --paths --model=", path));
  EXPECT_EQ(run.err, "");
  const std::string missed = "       0/1         -2.00         0         0         0         0\n";
  EXPECT_EQ(run.out,
            absl::StrCat(
                "2 nodes, goal 1; learned from 2 random walks of at most 2 steps,\n"
                "of which 2 reach the goal, in 1.50 steps on average\n\n"
                "asked return                  reached  mean return  as asked  shortest   shorter"
                "       new\n",
                "-1                        ", missed, "the best of the data      ", missed,
                "that of a shortest path   ", missed,
                "  0 -> 0 -> 0 (the goal is not reached)\n\n"
                "random walks of the data         100%        -1.00\n"
                "the best of them                 1/1         -1.00                   1\n"
                "shortest paths                   1/1         -1.00                   1\n"));
  Fill(file.tensors["graph.edges"].view(), 0);
  ASSERT_TRUE(WriteSafetensors(path, file.tensors, file.metadata).ok());
  EXPECT_EQ(Evaluate(absl::StrCat("--model=", path)).err,
            absl::StrCat("evaluate: ", path, ": no node has a path to the goal\n"));
  unlink(path.c_str());
}

TEST(EvaluateProgram, BadUsageIsRefusedWithTheReason) {
  const std::string no_number = " is no number; expected are returns such as -3,-4";
  EXPECT_EQ(RefusalDifference(
                kEvaluate,
                {{"--asked=-2,soon", "--asked: \"soon\"" + no_number},
                 {"--asked=nan", "--asked: \"nan\"" + no_number},
                 {"--asked=inf", "--asked: \"inf\"" + no_number},
                 {"--beam=-1", "--beam is -1; allowed is 0 or more"},
                 {"--context=-2", "--context is -2; allowed is 0 or more"},
                 {"--threads=0", "--threads is 0; allowed is 1 or more"},
                 {"--model=no_such_file", "no_such_file: cannot open: No such file or directory"},
                 {"--nonsense", "unknown flag --nonsense; --help lists all"}}),
            "");
  const ProgramRun run = Evaluate("--length_penalty=-1 --beam=2");  // after the table's head
  EXPECT_EQ(run.exit_status, 2);
  EXPECT_EQ(run.err, "evaluate: beam search: length_penalty is -1; allowed is 0 or more\n");
}

}  // namespace
}  // namespace tfb::decision_transformer
