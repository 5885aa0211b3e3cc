// Tests the model that ships, and the program that evaluates it.
#include "adaptive/decision_transformer/rollout.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
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

std::string Broken(const std::string& tensor, const std::string& key, const std::string& value) {
  SafetensorsFile file = ReadSafetensors(kModel).value();
  file.tensors.erase(tensor);
  if (!key.empty()) file.metadata[key] = value;
  const std::string path = absl::StrCat(::testing::TempDir(), "/broken.", getpid());
  EXPECT_TRUE(WriteSafetensors(path, file.tensors, file.metadata).ok());
  const auto model = WalkModel::Read(path);
  unlink(path.c_str());
  return model.ok() ? "it was read" : std::string(model.status().message());
}

TEST(WalkModel, WhatIsWrongWithAFileIsSaidByName) {
  const auto says = [](const std::string& message, const std::string& part) {
    EXPECT_TRUE(absl::StrContains(message, part)) << message;
  };
  says(Broken("graph.walks", "", ""), "graph.walks is not there");
  says(Broken("head.action.w", "", ""), "head.action.w is not there");
  says(Broken("", "technique", "dense"), "metadata \"technique\" is \"dense\"");
  says(Broken("", "heads", "none"), "metadata \"heads\" is no number of heads");
  says(Broken("", "heads", "7"), "64 channels, which 7 heads do not divide");
  says(Broken("", "return_scale", ""), "return_scale");
  // The graph has other nodes than the model has states.
  SafetensorsFile file = ReadSafetensors(kModel).value();
  Fill((file.tensors["graph.edges"] = Tensor(DType::kI32, {7, 7})).view(), 1);
  Fill((file.tensors["graph.walks"] = Tensor(DType::kI32, {1, 3})).view(), 4);
  const std::string path = absl::StrCat(::testing::TempDir(), "/seven.", getpid());
  ASSERT_TRUE(WriteSafetensors(path, file.tensors, file.metadata).ok());
  says(std::string(WalkModel::Read(path).status().message()), "has state_dim=20; the graph has 7");
  Fill(file.tensors["graph.walks"].view(), 7);
  ASSERT_TRUE(WriteSafetensors(path, file.tensors, file.metadata).ok());
  says(std::string(WalkModel::Read(path).status().message()), "graph.walks leaves the graph");
  unlink(path.c_str());
  says(std::string(WalkModel::Read("no/such/file").status().message()), "no/such/file");
}

// ---- The program ----

struct Ended {
  int exit_status;
  std::string text;  // of both streams
};

Ended Evaluate(const std::string& arguments) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/evaluate.", getpid());
  const int status = system(
      absl::StrCat("adaptive/decision_transformer/evaluate ", arguments, " > ", path, " 2>&1")
          .c_str());
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  unlink(path.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text.str()};
}

TEST(EvaluateProgram, PrintsATableThatIsTheSameEveryTime) {
  const Ended first = Evaluate("--asked=-2,-6");
  EXPECT_EQ(first.exit_status, 0) << first.text;
  for (const char* part : {"20 nodes", "\n-2 ", "\n-6 ", "that of a shortest path", "19/19",
                           "random walks of the data", "the best of them"}) {
    EXPECT_TRUE(absl::StrContains(first.text, part)) << part << " is not in\n" << first.text;
  }
  EXPECT_EQ(Evaluate("--asked=-2,-6 --threads=2").text, first.text);
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
  const Ended ended = Evaluate("--asked=-4");
  for (const std::string& part :
       {absl::StrFormat("%d nodes, goal %d; learned from %d random walks of at most %d steps,\n"
                        "of which %d reach the goal, in %.2f steps on average\n",
                        graph.nodes(), goal, graph.walks.size(), graph.max_steps, reached,
                        steps / reached),
        absl::StrFormat("\nrandom walks of the data   %9.0f%% %12.2f\n", 100 * share / starts,
                        mean / starts),
        absl::StrFormat("\nthe best of them           %7d/%-2d %12.2f %9s %9d\n", starts_reached,
                        starts, best_sum / starts, "", shortest)}) {
    EXPECT_TRUE(absl::StrContains(ended.text, part)) << part << " is not in\n" << ended.text;
  }
}

TEST(EvaluateProgram, PlansWithABeam) {
  const Ended planned = Evaluate("--asked=-4 --beam=3 --length_penalty=0.6 --paths");
  EXPECT_EQ(planned.exit_status, 0) << planned.text;
  EXPECT_TRUE(absl::StrContains(planned.text, " -> ")) << planned.text;
}

TEST(EvaluateProgram, BadUsageNamesTheFlag) {
  for (const char* flag :
       {"--asked=soon", "--asked=nan", "--beam=-1", "--context=-2", "--threads=0",
        "--model=no_such_file", "--length_penalty=-1 --beam=2", "--nonsense"}) {
    const Ended ended = Evaluate(flag);
    EXPECT_EQ(ended.exit_status, 2) << flag << ": " << ended.text;
    EXPECT_TRUE(absl::StartsWith(ended.text, "evaluate: ")) << ended.text;
  }
  EXPECT_EQ(Evaluate("--help").exit_status, 0);
}

}  // namespace
}  // namespace tfb::decision_transformer
