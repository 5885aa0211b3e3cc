#include "adaptive/decision_transformer/rollout.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/decoding/beam_search.h"
#include "core/options.h"
#include "core/problem.h"
#include "core/safetensors.h"
#include "core/status.h"

namespace tfb::decision_transformer {
namespace {

constexpr int64_t kBatch = 32;  // trajectories of one run

absl::Status Wrong(const std::string& path, absl::string_view what, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what, " ", why));
}

// Returns a tensor of whole numbers of that rank.
absl::StatusOr<ConstTensorView> Integers(const NamedTensors& tensors, const std::string& name,
                                         int rank, const std::string& path) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) return Wrong(path, name, "is not there");
  const ConstTensorView view = found->second.view();
  if (view.dtype == DType::kI32 && view.rank == rank) return view;
  return Wrong(path, name,
               absl::StrCat("is ", Name(view.dtype), " ", ShapeString(view.shape()),
                            "; expected is i32 of ", rank, " dimensions"));
}

// Puts a unit vector into row t of batch row b, or zeros where there is no index.
void SetUnit(const TensorView& rows, int64_t b, int64_t t, int64_t index) {
  float* row = rows.MutableAt<float>(b, t);
  std::fill_n(row, rows.dim(2), 0.0f);
  if (index >= 0) row[index] = 1;
}

int64_t ArgMax(const std::vector<double>& values) {
  return std::max_element(values.begin(), values.end()) - values.begin();
}

Outcome Begin(const WalkGraph& graph, int64_t start, double asked) {
  const bool reached = start == graph.goal;
  return {Trajectory::From(start, asked), reached,
          reached ? 0 : -static_cast<double>(graph.max_steps)};
}

// Returns [from][to].
std::vector<std::vector<bool>> MovesOfTheData(const WalkGraph& graph) {
  std::vector<std::vector<bool>> moves(graph.nodes(), std::vector<bool>(graph.nodes()));
  for (const auto& walk : graph.walks) {
    for (size_t t = 1; t < walk.size(); ++t) moves[walk[t - 1]][walk[t]] = true;
  }
  return moves;
}

void Move(const WalkGraph& graph, int64_t action, Outcome* outcome) {
  const int64_t from = outcome->trajectory.states.back();
  const int64_t to = graph.edges[from][action] ? action : from;
  outcome->trajectory.Step(action, -1, to);
  outcome->reached = to == graph.goal;
  if (outcome->reached) outcome->achieved = -static_cast<double>(outcome->trajectory.steps());
}

}  // namespace

std::vector<int64_t> DistancesToGoal(const WalkGraph& graph) {
  std::vector<int64_t> distances(graph.nodes(), -1), reached = {graph.goal};
  distances[graph.goal] = 0;
  for (size_t n = 0; n < reached.size(); ++n) {
    for (int64_t from = 0; from < graph.nodes(); ++from) {
      if (distances[from] >= 0 || !graph.edges[from][reached[n]]) continue;
      distances[from] = distances[reached[n]] + 1;
      reached.push_back(from);
    }
  }
  return distances;
}

std::optional<int64_t> FewestStepsInTheData(const WalkGraph& graph, int64_t start) {
  std::optional<int64_t> fewest;
  for (const auto& walk : graph.walks) {
    if (walk[0] != start || !graph.Reaches(walk)) continue;
    const int64_t steps = static_cast<int64_t>(walk.size()) - 1;
    fewest = std::min(fewest.value_or(steps), steps);
  }
  return fewest;
}

bool IsInTheData(const WalkGraph& graph, const std::vector<int64_t>& nodes) {
  return std::any_of(graph.walks.begin(), graph.walks.end(), [&](const auto& walk) {
    return std::search(walk.begin(), walk.end(), nodes.begin(), nodes.end()) != walk.end();
  });
}

void Trajectory::Step(int64_t action, double reward, int64_t state) {
  returns.push_back(returns.back() - reward);
  actions.push_back(action);
  states.push_back(state);
}

// ---- The model ----

absl::StatusOr<std::unique_ptr<WalkModel>> WalkModel::Read(const std::string& path, int64_t context,
                                                           int threads) {
  TFB_ASSIGN_OR_RETURN(SafetensorsFile file, ReadSafetensors(path));
  std::unique_ptr<WalkModel> model(new WalkModel(threads));
  TFB_RETURN_IF_ERROR(model->ReadGraph(file.tensors, path));
  const std::string spec = file.metadata["technique"];
  const absl::StatusOr<TechniqueSpec> technique = ParseTechniqueSpec(spec);
  int64_t heads;
  if (!technique.ok() || technique->technique != "decision_transformer") {
    return Wrong(path, "metadata \"technique\"",
                 absl::StrCat("is \"", spec, "\"; expected is decision_transformer:..."));
  }
  if (!absl::SimpleAtoi(file.metadata["heads"], &heads) || heads < 1) {
    return Wrong(path, "metadata \"heads\"", "is no number of heads");
  }
  if (!absl::SimpleAtod(file.metadata["return_scale"], &model->return_scale_)) {
    return Wrong(path, "metadata \"return_scale\"", "is no number");
  }
  TFB_RETURN_IF_ERROR(model->CreateLayer(file.tensors, technique->options, heads, context, path));
  return model;
}

absl::Status WalkModel::ReadGraph(const NamedTensors& tensors, const std::string& path) {
  TFB_ASSIGN_OR_RETURN(const ConstTensorView edges, Integers(tensors, "graph.edges", 2, path));
  TFB_ASSIGN_OR_RETURN(const ConstTensorView goal, Integers(tensors, "graph.goal", 1, path));
  TFB_ASSIGN_OR_RETURN(const ConstTensorView walks, Integers(tensors, "graph.walks", 2, path));
  const int64_t nodes = edges.dim(0);
  const auto is_node = [nodes](int64_t n) { return n >= 0 && n < nodes; };
  if (nodes < 1 || edges.dim(1) != nodes) return Wrong(path, "graph.edges", "is not square");
  if (goal.dim(0) != 1 || !is_node(*goal.At<int32_t>())) {
    return Wrong(path, "graph.goal", "is no node of the graph");
  }
  if (walks.dim(1) < 2) return Wrong(path, "graph.walks", "has walks without a step");
  graph_.goal = *goal.At<int32_t>();
  graph_.max_steps = walks.dim(1) - 1;
  graph_.edges.assign(nodes, std::vector<bool>(nodes));
  for (int64_t from = 0; from < nodes; ++from) {
    for (int64_t to = 0; to < nodes; ++to) {
      graph_.edges[from][to] = *edges.At<int32_t>(from, to) != 0;
    }
  }
  for (int64_t n = 0; n < walks.dim(0); ++n) {
    std::vector<int64_t>& walk = graph_.walks.emplace_back();
    for (int64_t t = 0; t < walks.dim(1) && *walks.At<int32_t>(n, t) != -1; ++t) {
      walk.push_back(*walks.At<int32_t>(n, t));
      if (!is_node(walk.back())) return Wrong(path, "graph.walks", "leaves the graph");
    }
    if (walk.empty()) return Wrong(path, "graph.walks", "has an empty walk");
  }
  return absl::OkStatus();
}

absl::Status WalkModel::CreateLayer(const NamedTensors& tensors, const Options& options,
                                    int64_t heads, int64_t context, const std::string& path) {
  TFB_ASSIGN_OR_RETURN(const Technique* technique, Registry::Global().Find("decision_transformer"));
  const auto bias = tensors.find("embed.return.b");
  if (bias == tensors.end()) return Wrong(path, "embed.return.b", "is not there");
  const int64_t width = bias->second.num_elements();
  if (width % heads != 0) {
    return Wrong(path, "embed.return.b",
                 absl::StrCat("has ", width, " channels, which ", heads, " heads do not divide"));
  }
  context_ = context == 0 ? graph_.max_steps : std::min(context, graph_.max_steps);
  const Problem problem = Problem::SelfAttention(kBatch, heads, 3 * context_ - 1, width / heads,
                                                 /*causal=*/true);
  TFB_ASSIGN_OR_RETURN(layer_, technique->Create(problem, options, Device::kCpu, /*seed=*/1));
  NamedTensors parameters;
  for (const auto& entry : layer_->parameters()) {
    const auto found = tensors.find(entry.first);
    if (found == tensors.end()) return Wrong(path, entry.first, "is not there");
    parameters[entry.first] = found->second.CloneAs(DType::kF32);
  }
  TFB_RETURN_IF_ERROR(layer_->SetParameters(std::move(parameters)));
  for (const TensorSpec& spec : layer_->inputs()) {
    Fill((inputs_[spec.name] = Tensor(spec.dtype, spec.shape)).view(), 0);
  }
  for (const TensorSpec& spec : layer_->outputs()) {
    outputs_[spec.name] = Tensor(spec.dtype, spec.shape);
  }
  TFB_RETURN_IF_ERROR(CheckSizes(path));
  const size_t bytes = layer_->workspace_bytes(pool_.threads());
  workspace_ = Tensor(DType::kU8, {static_cast<int64_t>(bytes)});
  execution_.pool = &pool_;
  execution_.workspace = absl::MakeSpan(static_cast<std::byte*>(workspace_.raw()), bytes);
  return layer_->Setup(ViewsOf(inputs_), execution_);
}

absl::Status WalkModel::CheckSizes(const std::string& path) const {
  for (const auto& [name, channels] : {std::pair("state_dim", inputs_.at("states").dim(2)),
                                       std::pair("action_dim", outputs_.at("action").dim(2))}) {
    if (channels == graph_.nodes()) continue;
    return Wrong(
        path, "metadata \"technique\"",
        absl::StrCat("has ", name, "=", channels, "; the graph has ", graph_.nodes(), " nodes"));
  }
  return absl::OkStatus();
}

// Places the trajectory's last steps, with padding before them that the mask hides.
void WalkModel::Place(const Trajectory& trajectory, int64_t b) {
  const int64_t steps = static_cast<int64_t>(trajectory.states.size());
  for (int64_t place = 0; place < context_; ++place) {
    const int64_t t = steps - context_ + place;
    const bool real = t >= 0;
    for (int64_t token = 3 * place; token < std::min(3 * place + 3, 3 * context_ - 1); ++token) {
      *inputs_.at("key_mask").view().MutableAt<uint8_t>(b, token) = real ? 1 : 0;
    }
    *inputs_.at("timesteps").view().MutableAt<int32_t>(b, place) =
        static_cast<int32_t>(real ? t : 0);
    *inputs_.at("returns").view().MutableAt<float>(b, place) =
        static_cast<float>(real ? return_scale_ * trajectory.returns[t] : 0);
    SetUnit(inputs_.at("states").view(), b, place, real ? trajectory.states[t] : -1);
    if (place + 1 == context_) continue;  // this action is to be predicted
    SetUnit(inputs_.at("actions").view(), b, place, real ? trajectory.actions[t] : -1);
  }
}

absl::StatusOr<std::vector<std::vector<double>>> WalkModel::NextActions(
    absl::Span<const Trajectory> trajectories) {
  std::vector<std::vector<double>> all;
  const int64_t count = static_cast<int64_t>(trajectories.size());
  for (int64_t first = 0; first < count; first += kBatch) {
    const int64_t rows = std::min(kBatch, count - first);
    for (int64_t b = 0; b < kBatch; ++b) Place(trajectories[first + std::min(b, rows - 1)], b);
    TFB_RETURN_IF_ERROR(layer_->Run(ViewsOf(inputs_), MutableViewsOf(outputs_), execution_));
    for (int64_t b = 0; b < rows; ++b) {
      const float* logits = outputs_.at("action").view().MutableAt<float>(b, context_ - 1);
      std::vector<double>& log_p = all.emplace_back(logits, logits + graph_.nodes());
      const double max = *std::max_element(log_p.begin(), log_p.end());
      double sum = 0;
      for (const double logit : log_p) sum += std::exp(logit - max);
      for (double& logit : log_p) logit -= max + std::log(sum);
    }
  }
  return all;
}

// ---- Walks ----

absl::StatusOr<std::vector<Outcome>> RollOut(WalkModel* model, absl::Span<const int64_t> starts,
                                             absl::Span<const double> asked) {
  const WalkGraph& graph = model->graph();
  std::vector<Outcome> outcomes;
  for (size_t n = 0; n < starts.size(); ++n) {
    outcomes.push_back(Begin(graph, starts[n], asked[n]));
  }
  for (int64_t t = 0; t < graph.max_steps; ++t) {
    std::vector<Outcome*> walking;
    std::vector<Trajectory> trajectories;
    for (Outcome& outcome : outcomes) {
      if (outcome.reached) continue;
      walking.push_back(&outcome);
      trajectories.push_back(outcome.trajectory);
    }
    TFB_ASSIGN_OR_RETURN(const auto actions, model->NextActions(trajectories));
    for (size_t n = 0; n < walking.size(); ++n) Move(graph, ArgMax(actions[n]), walking[n]);
  }
  return outcomes;
}

absl::StatusOr<Outcome> PlanAndWalk(WalkModel* model, int64_t start, double asked, int64_t beam,
                                    double length_penalty) {
  const WalkGraph& graph = model->graph();
  Outcome outcome = Begin(graph, start, asked);
  if (outcome.reached) return outcome;
  BeamSearchOptions options;
  options.beam = beam;
  options.length_penalty = length_penalty;
  options.max_length = graph.max_steps;
  options.end_symbol = graph.goal;
  const std::vector<std::vector<bool>> moves = MovesOfTheData(graph);
  const auto next = [&](absl::Span<const Hypothesis> alive,
                        absl::Span<double> log_p) -> absl::Status {
    std::vector<Trajectory> trajectories;
    for (const Hypothesis& hypothesis : alive) {
      trajectories.push_back(Trajectory::From(start, asked));
      for (const int64_t node : hypothesis.symbols) trajectories.back().Step(node, -1, node);
    }
    TFB_ASSIGN_OR_RETURN(const auto actions, model->NextActions(trajectories));
    for (size_t n = 0; n < alive.size(); ++n) {
      const std::vector<bool>& made = moves[trajectories[n].states.back()];
      for (size_t y = 0; y < made.size(); ++y) {
        if (made[y]) log_p[n * made.size() + y] = actions[n][y];
      }
    }
    return absl::OkStatus();
  };
  TFB_ASSIGN_OR_RETURN(const std::vector<Hypothesis> plans,
                       BeamSearch(options, graph.nodes(), next));
  if (plans.empty()) return outcome;  // no walk of the data goes on from here
  for (const int64_t action : plans[0].symbols) Move(graph, action, &outcome);
  return outcome;
}

}  // namespace tfb::decision_transformer
