// Measures the return that a Decision Transformer achieves when it is asked for one: roll-outs from
// every node of the graph whose random walks it learned from.
//
//   bazel run //adaptive/decision_transformer:evaluate
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "adaptive/decision_transformer/rollout.h"
#include "core/command_line.h"
#include "core/runfiles.h"
#include "core/status.h"
#include "results/files.h"

ABSL_FLAG(std::string, model, "",
          "A file of tools/capture/train_decision_transformer.py. Empty: the repository's.");
ABSL_FLAG(std::string, asked, "",
          "Returns to ask for, such as -3,-4.5. Empty: one for each length of a walk.");
ABSL_FLAG(int64_t, context, 0, "Steps that the model sees. 0: all of a walk.");
ABSL_FLAG(int64_t, beam, 0,
          "Plan each walk by a beam search with so many hypotheses. 0: choose the likeliest action "
          "at every step instead.");
ABSL_FLAG(double, length_penalty, 0,
          "Of the beam search: log-probabilities are divided by ((5 + steps) / 6) to this power.");
ABSL_FLAG(bool, paths, false, "Print the paths of the line \"that of a shortest path\".");
ABSL_FLAG(int, threads, 1, "Threads.");

namespace tfb::decision_transformer {
namespace {

constexpr char kProgram[] = "evaluate";
constexpr char kUsage[] =
    "evaluate [flags]\n"
    "Asks a Decision Transformer for returns, from every node of the graph but the goal, and\n"
    "prints what it achieves: -1 a step until the goal.\n\n"
    "  reached      starts from which it reaches the goal\n"
    "  mean return  over all starts; a walk that misses the goal has that of the longest walk\n"
    "  as asked     starts from which the return is just what was asked for\n"
    "  shortest     paths that are shortest paths\n"
    "  shorter      paths shorter than every random walk of the training data from the same start\n"
    "  new          paths that no random walk of the training data contains\n\n"
    "Exit status: 0 done, 2 bad usage or a file that cannot be read.";
constexpr char kModel[] = "adaptive/decision_transformer/model/model.safetensors";

// One line of the table.
struct Row {
  int64_t starts = 0, reached = 0, as_asked = 0, shortest = 0, shorter = 0, unseen = 0;
  double sum = 0;
};

class Evaluation {
 public:
  explicit Evaluation(WalkModel* model)
      : model_(model), graph_(model->graph()), distances_(DistancesToGoal(graph_)) {
    for (int64_t node = 0; node < graph_.nodes(); ++node) {
      if (node != graph_.goal && distances_[node] > 0) starts_.push_back(node);
    }
  }

  size_t starts() const { return starts_.size(); }

  void PrintHead() const {
    int64_t reached = 0, steps = 0;
    for (const auto& walk : graph_.walks) {
      if (!graph_.Reaches(walk)) continue;
      ++reached;
      steps += static_cast<int64_t>(walk.size()) - 1;
    }
    absl::PrintF("%d nodes, goal %d; learned from %d random walks of at most %d steps,\n",
                 graph_.nodes(), graph_.goal, graph_.walks.size(), graph_.max_steps);
    absl::PrintF("of which %d reach the goal, in %.2f steps on average\n\n", reached,
                 static_cast<double>(steps) / static_cast<double>(std::max<int64_t>(reached, 1)));
    absl::PrintF("%-26s %10s %12s %9s %9s %9s %9s\n", "asked return", "reached", "mean return",
                 "as asked", "shortest", "shorter", "new");
  }

  absl::Status PrintAsked(const std::string& label, const std::function<double(int64_t)>& asked,
                          bool paths) {
    std::vector<double> returns;
    for (const int64_t start : starts_) returns.push_back(asked(start));
    TFB_ASSIGN_OR_RETURN(const std::vector<Outcome> outcomes, Walk(returns));
    Row row;
    for (size_t n = 0; n < outcomes.size(); ++n) Count(outcomes[n], returns[n], &row);
    Print(label, row);
    for (const Outcome& outcome : outcomes) {
      if (paths) PrintPath(outcome);
    }
    return absl::OkStatus();
  }

  // Prints the walks of the data that begin at each start: the best of them, and their mean.
  void PrintData() const {
    Row best;
    double mean = 0, share = 0;
    for (const int64_t start : starts_) {
      ++best.starts;
      best.sum += BestOfData(start);
      best.reached += FewestStepsInTheData(graph_, start).has_value() ? 1 : 0;
      best.shortest += BestOfData(start) == Shortest(start) ? 1 : 0;
      double sum = 0, reached = 0, walks = 0;
      for (const auto& walk : graph_.walks) {
        if (walk[0] != start) continue;
        ++walks;
        sum -= static_cast<double>(walk.size() - 1);
        reached += graph_.Reaches(walk) ? 1 : 0;
      }
      mean += walks > 0 ? sum / walks : 0;
      share += walks > 0 ? reached / walks : 0;
    }
    const double starts = static_cast<double>(starts_.size());
    absl::PrintF("%-26s %9.0f%% %12.2f\n", "random walks of the data", 100 * share / starts,
                 mean / starts);
    absl::PrintF("%-26s %7d/%-2d %12.2f %9s %9d\n", "the best of them", best.reached, best.starts,
                 best.sum / starts, "", best.shortest);
    double shortest = 0;
    for (const int64_t start : starts_) shortest -= static_cast<double>(distances_[start]);
    absl::PrintF("%-26s %7d/%-2d %12.2f %9s %9d\n", "shortest paths", starts_.size(),
                 starts_.size(), shortest / starts, "", starts_.size());
  }

  // Returns the best return of the data's walks from the start.
  double BestOfData(int64_t start) const {
    return -static_cast<double>(FewestStepsInTheData(graph_, start).value_or(graph_.max_steps));
  }
  double Shortest(int64_t start) const { return -static_cast<double>(distances_[start]); }

 private:
  absl::StatusOr<std::vector<Outcome>> Walk(const std::vector<double>& asked) {
    const int64_t beam = absl::GetFlag(FLAGS_beam);
    if (beam == 0) return RollOut(model_, starts_, asked);
    std::vector<Outcome> outcomes;
    for (size_t n = 0; n < starts_.size(); ++n) {
      TFB_ASSIGN_OR_RETURN(
          outcomes.emplace_back(),
          PlanAndWalk(model_, starts_[n], asked[n], beam, absl::GetFlag(FLAGS_length_penalty)));
    }
    return outcomes;
  }

  void Count(const Outcome& outcome, double asked, Row* row) const {
    ++row->starts;
    row->sum += outcome.achieved;
    if (!outcome.reached) return;
    ++row->reached;
    const std::vector<int64_t>& path = outcome.trajectory.states;
    row->as_asked += outcome.achieved == asked ? 1 : 0;
    row->shortest += outcome.achieved == Shortest(path[0]) ? 1 : 0;
    row->shorter += outcome.achieved > BestOfData(path[0]) ? 1 : 0;
    row->unseen += IsInTheData(graph_, path) ? 0 : 1;
  }

  static void Print(const std::string& label, const Row& row) {
    absl::PrintF("%-26s %7d/%-2d %12.2f %9d %9d %9d %9d\n", label, row.reached, row.starts,
                 row.sum / static_cast<double>(std::max<int64_t>(row.starts, 1)), row.as_asked,
                 row.shortest, row.shorter, row.unseen);
  }
  static void PrintPath(const Outcome& outcome) {
    absl::PrintF("  %s%s\n", absl::StrJoin(outcome.trajectory.states, " -> "),
                 outcome.reached ? "" : " (the goal is not reached)");
  }

  WalkModel* model_;
  const WalkGraph& graph_;
  std::vector<int64_t> distances_;
  std::vector<int64_t> starts_;
};

absl::StatusOr<std::vector<double>> AskedReturns(const WalkGraph& graph) {
  std::vector<double> returns;
  const std::string text = absl::GetFlag(FLAGS_asked);
  for (int64_t steps = 1; text.empty() && steps <= graph.max_steps; ++steps) {
    returns.push_back(-static_cast<double>(steps));
  }
  for (const absl::string_view word : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    double& number = returns.emplace_back();
    if (absl::SimpleAtod(word, &number) && std::isfinite(number)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--asked: \"", word, "\" is no number; expected are returns such as -3,-4"));
  }
  return returns;
}

absl::Status CheckFlags() {
  const auto wrong = [](absl::string_view flag, int64_t value, absl::string_view range) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, " is ", value, "; allowed is ", range));
  };
  if (absl::GetFlag(FLAGS_context) < 0) {
    return wrong("context", absl::GetFlag(FLAGS_context), "0 or more");
  }
  if (absl::GetFlag(FLAGS_beam) < 0) return wrong("beam", absl::GetFlag(FLAGS_beam), "0 or more");
  if (absl::GetFlag(FLAGS_threads) < 1) {
    return wrong("threads", absl::GetFlag(FLAGS_threads), "1 or more");
  }
  return absl::OkStatus();
}

absl::StatusOr<int> Evaluate() {
  TFB_RETURN_IF_ERROR(CheckFlags());
  std::string path = CallerPath(absl::GetFlag(FLAGS_model));
  if (path.empty()) {
    TFB_ASSIGN_OR_RETURN(path, RunfilePath(kModel));
  }
  TFB_ASSIGN_OR_RETURN(
      const std::unique_ptr<WalkModel> model,
      WalkModel::Read(path, absl::GetFlag(FLAGS_context), absl::GetFlag(FLAGS_threads)));
  TFB_ASSIGN_OR_RETURN(const std::vector<double> returns, AskedReturns(model->graph()));
  Evaluation evaluation(model.get());
  if (evaluation.starts() == 0) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": no node has a path to the goal"));
  }
  evaluation.PrintHead();
  for (const double asked : returns) {
    TFB_RETURN_IF_ERROR(evaluation.PrintAsked(
        absl::StrCat(asked), [asked](int64_t) { return asked; }, /*paths=*/false));
  }
  TFB_RETURN_IF_ERROR(evaluation.PrintAsked(
      "the best of the data", [&](int64_t start) { return evaluation.BestOfData(start); }, false));
  TFB_RETURN_IF_ERROR(evaluation.PrintAsked(
      "that of a shortest path", [&](int64_t start) { return evaluation.Shortest(start); },
      absl::GetFlag(FLAGS_paths)));
  std::puts("");
  evaluation.PrintData();
  return kExitDone;
}

}  // namespace
}  // namespace tfb::decision_transformer

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::decision_transformer::kProgram, tfb::decision_transformer::kUsage,
                      {argv, argv + argc}, tfb::decision_transformer::Evaluate);
}
