// A trained Decision Transformer that walks through a graph to a goal: Chen et al. 2021,
// arXiv:2106.01345v2, appendix A.3. A state is a node and an action the node to move to; a move
// without an edge stays where it is. The reward is -1 a step until the goal, so that the requested
// return-to-go is minus the number of steps. In the paper the model generates the returns too, the
// largest possible ones.
#ifndef TFB_ADAPTIVE_DECISION_TRANSFORMER_ROLLOUT_H_
#define TFB_ADAPTIVE_DECISION_TRANSFORMER_ROLLOUT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/thread_pool.h"

namespace tfb::decision_transformer {

struct WalkGraph {
  std::vector<std::vector<bool>> edges;  // [from][to]
  int64_t goal = 0;
  int64_t max_steps = 0;                    // of a walk
  std::vector<std::vector<int64_t>> walks;  // nodes of each walk that the model learned from

  int64_t nodes() const { return static_cast<int64_t>(edges.size()); }
  bool Reaches(const std::vector<int64_t>& walk) const { return walk.back() == goal; }
};

// Returns the steps of the shortest path from each node to the goal; -1 where there is none.
std::vector<int64_t> DistancesToGoal(const WalkGraph& graph);
// Returns the fewest steps of the data's walks from the start to the goal, where it has such a
// walk.
std::optional<int64_t> FewestStepsInTheData(const WalkGraph& graph, int64_t start);
// Tells whether some walk of the data passes these nodes one after the other.
bool IsInTheData(const WalkGraph& graph, const std::vector<int64_t>& nodes);

// The history that an agent knows when it has to act: R_0, s_0, a_0, ..., R_t, s_t.
struct Trajectory {
  std::vector<double> returns;
  std::vector<int64_t> states;   // as many as returns
  std::vector<int64_t> actions;  // one less

  static Trajectory From(int64_t start, double asked) { return {{asked}, {start}, {}}; }
  // Takes the action, arrives at the state, and lowers the requested return: R_t+1 = R_t - r_t.
  void Step(int64_t action, double reward, int64_t state);
  int64_t steps() const { return static_cast<int64_t>(actions.size()); }
};

class WalkModel {
 public:
  // Reads a file of tools/capture/train_decision_transformer.py. The model keeps `context` steps; 0
  // means as many as a walk has. Returns NotFound, or InvalidArgument with the name of what is
  // wrong.
  static absl::StatusOr<std::unique_ptr<WalkModel>> Read(const std::string& path,
                                                         int64_t context = 0, int threads = 1);

  const WalkGraph& graph() const { return graph_; }

  // Returns log p of each node as the next action, [trajectories][nodes].
  absl::StatusOr<std::vector<std::vector<double>>> NextActions(
      absl::Span<const Trajectory> trajectories);

 private:
  explicit WalkModel(int threads) : pool_(threads) {}
  absl::Status ReadGraph(const NamedTensors& tensors, const std::string& path);
  absl::Status CreateLayer(const NamedTensors& tensors, const Options& options, int64_t heads,
                           int64_t context, const std::string& path);
  absl::Status CheckSizes(const std::string& path) const;
  void Place(const Trajectory& trajectory, int64_t b);

  WalkGraph graph_;
  int64_t context_ = 0;
  double return_scale_ = 1;
  ThreadPool pool_;
  std::unique_ptr<Layer> layer_;
  NamedTensors inputs_, outputs_;
  Tensor workspace_;
  Execution execution_;
};

// The outcome of a walk.
struct Outcome {
  Trajectory trajectory;
  bool reached = false;
  double achieved = 0;  // the return: minus its steps, or minus max_steps where it missed the goal
};

// Walks from each start, asking for the return of the same place in `asked`, always taking the
// likeliest action, until the goal or max_steps.
absl::StatusOr<std::vector<Outcome>> RollOut(WalkModel* model, absl::Span<const int64_t> starts,
                                             absl::Span<const double> asked);

// Plans the whole path by beam search (core/decoding/beam_search.h), and walks it: each action's
// node is the plan's next one. A plan has no moves that no walk of the data made.
absl::StatusOr<Outcome> PlanAndWalk(WalkModel* model, int64_t start, double asked, int64_t beam,
                                    double length_penalty);

}  // namespace tfb::decision_transformer

#endif  // TFB_ADAPTIVE_DECISION_TRANSFORMER_ROLLOUT_H_
