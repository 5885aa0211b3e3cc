#include "memory/compressive/compressive.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/layers/layer_parameters.h"
#include "core/layers/stack/decoder_block.h"
#include "core/layers/stack/segmented_layer.h"
#include "memory/compressive/compressive_attention.h"
#include "memory/compressive/memory_queues.h"

namespace tfb::compressive {
namespace {

using Function = CompressiveOptions::Function;
using layers::kMemories;

const bool registered = RegisterTechnique<Compressive>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "compressive";
  info.family = "memory";
  info.title = "Compressive Transformer";
  info.citation = "Rae et al. 2020, arXiv:1911.05507v1, section 3";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kOwn;
  info.budget_option = "compressed_memory";
  info.growth = 1;
  info.supports_noncausal = false;
  return info;
}

// Returns how many distances a token and a key can have, in a list as long as it gets. It is at least
// 2, so that a largest distance can limit a table of them.
int64_t DistancesOf(const CompressiveOptions& options) {
  return std::max<int64_t>(options.compressed_memory + options.memory + options.segment, 2);
}

// Returns the specs of queues that hold so many rows, those that there are.
std::vector<TensorSpec> QueueSpecs(const Problem& p, const CompressiveOptions& options,
                                   int64_t tokens, int64_t rows, int64_t waiting, bool optional) {
  std::vector<TensorSpec> specs;
  const auto add = [&](const char* name, const Shape& shape) {
    if (shape[2] > 0) specs.push_back({name, shape, p.dtype, optional});
  };
  add(kMemories, {p.batch, options.layers, tokens, p.model_dim()});
  add(kCompressed, {p.batch, options.layers, rows, p.model_dim()});
  if (options.function == Function::kMostUsed) add(kWaitingUse, {p.batch, options.layers, waiting});
  return specs;
}

std::vector<TensorSpec> GivenQueues(const Problem& problem, const CompressiveOptions& options) {
  return QueueSpecs(problem, options, options.given_memory, options.given_compressed,
                    options.given_waiting(), /*optional=*/false);
}

std::vector<TensorSpec> FinalQueues(const Problem& problem, const CompressiveOptions& options) {
  const MemoryQueues queues(options, layers::LongestSegment(problem, options.segment));
  const int64_t last = queues.first_token() + problem.query_tokens;
  return QueueSpecs(problem, options, queues.MemoryTokens(last) + queues.Waiting(last),
                    queues.MemoryRows(last), queues.Waiting(last), /*optional=*/true);
}

absl::Status CheckGiven(const CompressiveOptions& options) {
  const bool waits =
      options.eviction == CompressiveOptions::Eviction::kOverflow && options.compressed_memory > 0;
  const int64_t most = options.memory + (waits ? options.compression - 1 : 0);
  if (options.given_memory > most) {
    return absl::InvalidArgumentError(absl::StrCat(
        "option given_memory is ", options.given_memory, "; allowed with memory=", options.memory,
        waits ? absl::StrCat(" and up to ", options.compression - 1, " rows that wait") : "",
        " are 0 to ", most));
  }
  if (options.given_compressed <= options.compressed_memory) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "option given_compressed is ", options.given_compressed, "; allowed with compressed_memory=",
      options.compressed_memory, " are 0 to ", options.compressed_memory));
}

// The segment, and the numbers of all layers together.
class CompressiveState : public layers::StackState {
 public:
  explicit CompressiveState(CompressiveSegment segment) : segment_(std::move(segment)) {}

  layers::DistanceRange distances() const override {
    return {0, queues().max_distance(), options().max_distance};
  }
  void Reset() override { segment_.Reset(); }
  void Begin(const layers::Segment& segment) override { segment_.Begin(segment.tokens); }
  CompressiveSegment& segment() { return segment_; }

  // Count the products of the definition, but for those of the losses, and those of its gradients.
  std::optional<double> flops(const NamedTensors&) const override {
    const Walk walk = WalkSequence();
    const double batch = static_cast<double>(problem().batch);
    const double width = static_cast<double>(problem().model_dim());
    const double layers = static_cast<double>(options().layers);
    const double convolution =
        options().convolves() ? 2 * static_cast<double>(options().compression) * width * width : 0;
    double flops =
        layers::StackFlops(CompressiveSizes(problem(), options()),
                           batch * static_cast<double>(problem().query_tokens), batch * walk.pairs);
    flops += batch * layers * walk.rows * (4 * width * width + convolution);
    flops += batch * layers * walk.uses * 4 * width;
    return flops;
  }

  absl::Status CheckBackward() const override { return absl::OkStatus(); }
  void SetUpBackward() override { segment_.SetUpBackward(); }
  std::optional<double> backward_flops(const NamedTensors&) const override {
    const Walk walk = WalkSequence();
    const double batch = static_cast<double>(problem().batch);
    layers::StackBackwardWork work;
    work.rows = batch * static_cast<double>(problem().query_tokens);
    work.pairs = batch * walk.pairs;
    work.earlier = batch * walk.earlier;
    work.normalizes_earlier = options().pre_norm;
    work.distances = static_cast<double>(std::min(segment_.lists().longest(), distances().rows()));
    return layers::StackBackwardFlops(CompressiveSizes(problem(), options()), work);
  }

  // compressed_rows: the rows that a layer has at the end. reach_tokens: the number of tokens
  // before the last one whose rows can change it, through all layers (which of them most_used keeps
  // depends on still earlier ones). keys_per_token: the keys that a token sees in one layer, on
  // average, itself included.
  std::map<std::string, double> statistics(const NamedTensors&) const override {
    const int64_t tokens = std::max<int64_t>(problem().query_tokens, 1);
    return {{"compressed_rows", static_cast<double>(queues().MemoryRows(segment_.last_token()))},
            {"keys_per_token", WalkSequence().pairs / static_cast<double>(tokens)},
            {"reach_tokens", static_cast<double>(Reach())}};
  }

 private:
  const Problem& problem() const { return segment_.problem(); }
  const CompressiveOptions& options() const { return segment_.options(); }
  const MemoryQueues& queues() const { return segment_.queues(); }

  // Counts over one sequence and layer.
  struct Walk {
    double pairs = 0;    // pairs of queries and keys, for one head
    double rows = 0;     // pairs whose keys are compressed rows
    double uses = 0;     // pairs whose weight is computed once more, with most_used
    double earlier = 0;  // rows that the queues hold while segments are read
  };
  Walk WalkSequence() const {
    Walk walk;
    const int64_t first = queues().first_token(), end = first + problem().query_tokens;
    for (int64_t s = first; s < end; s += segment_.longest()) {
      const int64_t next = std::min(s + segment_.longest(), end);
      const double tokens = static_cast<double>(next - s);
      const double kept = static_cast<double>(queues().MemoryRows(s) + queues().MemoryTokens(s));
      walk.pairs += tokens * kept + tokens * (tokens + 1) / 2;
      walk.earlier += kept;
      walk.rows += static_cast<double>(queues().Rows(next) - queues().Rows(s));
      if (options().function != Function::kMostUsed || !queues().compresses()) continue;
      walk.uses += tokens * static_cast<double>(queues().Left(next) - queues().Left(s));
    }
    return walk;
  }

  int64_t Reach() const {
    const int64_t tokens = problem().query_tokens;
    if (tokens == 0) return 0;
    int64_t farthest = tokens - 1;
    for (int64_t n = 0; n < options().layers; ++n) farthest = FirstSeen(farthest);
    return tokens - 1 - farthest;
  }

  // Returns the first token of the sequence on which the attention at token p depends.
  int64_t FirstSeen(int64_t p) const {
    const int64_t longest = segment_.longest(), first = queues().first_token();
    const int64_t begin = first + p / longest * longest;
    int64_t seen = begin - queues().MemoryTokens(begin);
    if (queues().MemoryRows(begin) > 0) {
      const int64_t row = queues().Rows(begin) - queues().MemoryRows(begin) - queues().first_row();
      seen = row * options().compression;
      // A choice or a dilated convolution depends on all rows that one segment compresses.
      const bool whole = options().function == Function::kMostUsed ||
                         options().function == Function::kDilatedConvolution;
      for (int64_t s = first; whole && s < begin; s += longest) {
        if (seen < queues().Compressed(s + longest)) {
          seen = std::min(seen, queues().Compressed(s));
          break;
        }
      }
    }
    return std::max<int64_t>(seen - first, 0);
  }

  CompressiveSegment segment_;
};

}  // namespace

layers::StackSizes CompressiveSizes(const Problem& problem, const CompressiveOptions& options) {
  layers::StackSizes sizes;
  sizes.layers = options.layers;
  sizes.heads = problem.query_heads;
  sizes.head_dim = problem.head_dim;
  sizes.inner = FeedForwardDim(options.feed_forward_dim, problem.model_dim());
  sizes.share_biases = options.share_biases;
  sizes.final_norm = options.final_norm;
  if (options.learned_positions) {
    const int64_t all = DistancesOf(options);
    sizes.learned_distances =
        options.max_distance == 0 ? all : std::min(options.max_distance + 1, all);
  }
  return sizes;
}

std::string ConvolutionPrefix(const CompressiveOptions& options) {
  return options.function == Function::kConvolution ? "convolution." : "dilated_convolution.";
}

std::vector<layers::ParameterSpec> CompressiveParameters(const Problem& problem,
                                                         const CompressiveOptions& options) {
  const layers::StackSizes sizes = CompressiveSizes(problem, options);
  std::vector<layers::ParameterSpec> specs = layers::StackParameters(sizes);
  const int64_t width = sizes.width(), rate = options.compression;
  for (int64_t n = 0; n < sizes.layers && options.convolves(); ++n) {
    const std::string convolution = layers::LayerPrefix(n) + ConvolutionPrefix(options);
    const Shape matrices = {rate, width, width};
    specs.push_back(
        {convolution + "w", matrices, 0, 1 / std::sqrt(static_cast<double>(rate * width))});
    specs.push_back({convolution + "b", {width}});
  }
  return specs;
}

int64_t SegmentsOf(const Problem& problem, const CompressiveOptions& options) {
  const int64_t longest = layers::LongestSegment(problem, options.segment);
  return (problem.query_tokens + longest - 1) / longest;
}

int64_t MaxBlocksOf(int64_t segment, const CompressiveOptions& options) {
  return MemoryQueues(options, segment).max_blocks();
}

Compressive::Compressive() : TechniqueOf(Info()) {}

std::vector<TensorSpec> Compressive::ReadTensors(const Problem& problem,
                                                 const CompressiveOptions& options) const {
  std::vector<TensorSpec> inputs = HiddenInputs(problem);
  for (TensorSpec& spec : GivenQueues(problem, options)) inputs.push_back(std::move(spec));
  return inputs;
}

std::vector<TensorSpec> Compressive::WrittenTensors(const Problem& p,
                                                    const CompressiveOptions& options) const {
  std::vector<TensorSpec> outputs = layers::SegmentedOutputs(p);
  for (TensorSpec& spec : FinalQueues(p, options)) outputs.push_back(std::move(spec));
  if (options.compressed_memory == 0) return outputs;
  const int64_t segments = SegmentsOf(p, options);
  for (const char* name : {"attention_loss", "autoencoding_loss"}) {
    outputs.push_back({name, {p.batch, segments, options.layers}, p.dtype, true});
  }
  if (options.function == Function::kMostUsed) {
    const int64_t rows = MaxBlocksOf(layers::LongestSegment(p, options.segment), options);
    outputs.push_back({"kept", {p.batch, segments, options.layers, rows}, DType::kI32, true});
  }
  return outputs;
}

absl::Status Compressive::Check(const Problem& problem, const CompressiveOptions& options) const {
  TFB_RETURN_IF_ERROR(layers::CheckSelfAttention("compressive", problem));
  TFB_RETURN_IF_ERROR(CheckGiven(options));
  const bool whole_blocks = options.eviction == CompressiveOptions::Eviction::kWholeBlocks;
  if (!whole_blocks || options.memory >= options.compression - 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("option memory is ", options.memory,
                   "; allowed with eviction=whole_blocks, which takes up to ",
                   options.compression - 1, " tokens more than the overflow, are ",
                   options.compression - 1, " to ", CompressiveOptions::kMaxMemory));
}

absl::StatusOr<std::unique_ptr<Layer>> Compressive::MakeLayer(const Problem& problem,
                                                              const CompressiveOptions& options,
                                                              Device device, uint64_t seed) const {
  layers::SegmentedStack stack;
  stack.segment = options.segment;
  stack.final_norm = options.final_norm;
  stack.depends_on_split = true;
  stack.outputs = WrittenTensors(problem, options);
  stack.more_inputs = GivenQueues(problem, options);
  if (options.compressed_memory > 0 && options.convolves()) {
    stack.more_differentiable = {"attention_loss", "autoencoding_loss"};
  }
  TFB_RETURN_IF_ERROR(
      layers::DrawParameters(CompressiveParameters(problem, options), seed, &stack.parameters));
  TFB_ASSIGN_OR_RETURN(CompressiveSegment segment,
                       CompressiveSegment::Create(device, problem, options));
  auto state = std::make_unique<CompressiveState>(std::move(segment));
  const layers::StackSizes sizes = CompressiveSizes(problem, options);
  for (int64_t n = 0; n < options.layers; ++n) {
    TFB_ASSIGN_OR_RETURN(std::unique_ptr<CompressiveAttention> attention,
                         CompressiveAttention::Create(&state->segment(), n));
    stack.blocks.push_back(std::make_unique<layers::DecoderBlock>(
        layers::LayerOfStack{device, sizes, problem.batch, state->segment().longest(), n},
        options.pre_norm, std::move(attention)));
  }
  stack.state = std::move(state);
  return std::make_unique<layers::SegmentedLayer>(device, problem, std::move(stack));
}

absl::Status Compressive::Definition(const Problem& problem, const CompressiveOptions& options,
                                     const NamedTensors& parameters, const Inputs& inputs,
                                     const DefinitionRequest& request,
                                     NamedTensors* outputs) const {
  std::vector<int64_t> segments;
  for (int64_t t = 0; t < problem.query_tokens; t += options.segment) {
    segments.push_back(std::min(options.segment, problem.query_tokens - t));
  }
  TFB_ASSIGN_OR_RETURN(*outputs,
                       DefineCompressive(problem, options, parameters, inputs, segments, request));
  return absl::OkStatus();
}

absl::StatusOr<TechniqueSpec> Compressive::Counterpart(const Problem& problem,
                                                       const Options& options) const {
  TFB_ASSIGN_OR_RETURN(Options whole_past, Canonical(options));
  TFB_ASSIGN_OR_RETURN(const auto parsed, ParseOptions<CompressiveOptions>(options));
  const int64_t tokens = std::max<int64_t>(problem.query_tokens, 1);
  whole_past["memory"] = absl::StrCat(parsed.given_memory + tokens);
  whole_past["segment"] = absl::StrCat(tokens);
  whole_past["start_zero"] = "false";
  if (parsed.learned_positions) {
    // The counterpart has the same table, whose last vector stands for all distances beyond it.
    const int64_t learned = CompressiveSizes(problem, parsed).learned_distances;
    whole_past["memory"] =
        absl::StrCat(std::max(parsed.given_memory + problem.query_tokens, learned));
    whole_past["max_distance"] = absl::StrCat(learned - 1);
  }
  return TechniqueSpec{info().name, std::move(whole_past)};
}

}  // namespace tfb::compressive
