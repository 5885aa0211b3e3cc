#include "memory/compressive/compressive.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/layers/copy_rows.h"
#include "core/layers/stack/decoder_layer.h"
#include "core/layers/stack/segmented_layer.h"
#include "memory/compressive/compressive_attention.h"
#include "memory/compressive/memory_queues.h"

namespace tfb::compressive {
namespace {

using Function = CompressiveOptions::Function;
using layers::kMemories;
using layers::OfLayer;

constexpr char kCompressed[] = "compressed";
constexpr char kWaitingUse[] = "waiting_use";

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

int64_t LongestSegment(const Problem& problem, const CompressiveOptions& options) {
  return std::min(options.segment, std::max<int64_t>(problem.query_tokens, 1));
}

// Returns how many distances a token and a key can have, in a list as long as it gets. It is at least
// 2, so that a largest distance can limit a table of them.
int64_t DistancesOf(const CompressiveOptions& options) {
  return std::max<int64_t>(options.compressed_memory + options.memory + options.segment, 2);
}

// Returns layer n of [batch, layers, tokens] as [batch, tokens, 1].
template <class View>
View UseOfLayer(const View& view, int64_t n) {
  return Transpose(Slice(view, 1, n, 1), 1, 2);
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
  const MemoryQueues queues(options, LongestSegment(problem, options));
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

class CompressiveLayer : public layers::SegmentedLayer {
 public:
  static absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem,
                                                       const CompressiveOptions& options,
                                                       std::vector<TensorSpec> outputs,
                                                       Device device, uint64_t seed) {
    auto layer = std::unique_ptr<CompressiveLayer>(
        new CompressiveLayer(problem, options, std::move(outputs), device));
    TFB_RETURN_IF_ERROR(
        layers::DrawParameters(CompressiveParameters(problem, options), seed, &layer->parameters_));
    const int64_t longest = layer->max_segment_tokens();
    for (int64_t n = 0; n < options.layers; ++n) {
      TFB_ASSIGN_OR_RETURN(CompressiveAttention attention,
                           CompressiveAttention::Create(device, problem, options, longest));
      layer->attentions_.push_back(std::move(attention));
    }
    if (!layer->queues_.compresses()) return layer;
    TFB_ASSIGN_OR_RETURN(
        ContentAttention content,
        ContentAttention::Create(device, problem, longest,
                                 layer->queues_.max_blocks() * options.compression));
    layer->content_.emplace(std::move(content));
    return layer;
  }

  // Counts the products of the definition, but for those of the losses.
  Cost cost() const override {
    const Walk walk = WalkSequence();
    const double batch = static_cast<double>(problem().batch);
    const double width = static_cast<double>(problem().model_dim());
    const double layers = static_cast<double>(options_.layers);
    const double convolution =
        options_.convolves() ? 2 * static_cast<double>(options_.compression) * width * width : 0;
    Cost cost;
    cost.flops = layers::StackFlops(sizes_, batch * static_cast<double>(problem().query_tokens),
                                    batch * walk.pairs);
    *cost.flops += batch * layers * walk.rows * (4 * width * width + convolution);
    *cost.flops += batch * layers * walk.uses * 4 * width;
    cost.bytes = TensorBytes();
    return cost;
  }

  // compressed_rows: the rows that a layer has at the end. reach_tokens: the number of tokens
  // before the last one whose rows can change it, through all layers (which of them most_used keeps
  // depends on still earlier ones). keys_per_token: the keys that a token sees in one layer, on
  // average, itself included. cache_bytes: keys, values and rows of all layers. cublas: on a GPU, 1
  // where cuBLAS computes the products with matrices, else 0.
  std::map<std::string, double> statistics() const override {
    const int64_t tokens = problem().query_tokens;
    double cache_bytes = 0;
    for (const CompressiveAttention& attention : attentions_) {
      cache_bytes += static_cast<double>(attention.cache_bytes());
    }
    std::map<std::string, double> statistics = {
        {"cache_bytes", cache_bytes},
        {"compressed_rows",
         static_cast<double>(queues_.MemoryRows(queues_.first_token() + tokens))},
        {"keys_per_token",
         WalkSequence().pairs / static_cast<double>(std::max<int64_t>(tokens, 1))},
        {"reach_tokens", static_cast<double>(Reach())}};
    if (device() == Device::kCuda) statistics["cublas"] = MatMulUsesCublas(device()) ? 1 : 0;
    return statistics;
  }

 protected:
  void Forget() override {
    for (CompressiveAttention& attention : attentions_) attention.Reset();
    next_token_ = queues_.first_token();
    next_segment_ = 0;
  }

  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    const layers::DistanceRange range = {0, queues_.max_distance(), options_.max_distance};
    const Tensor sinusoids = layers::SinusoidsOf(range, problem().model_dim());
    layers_.clear();
    for (int64_t n = 0; n < options_.layers; ++n) {
      TFB_RETURN_IF_ERROR(attentions_[n].Setup(parameters_, n, range, sinusoids.view(), execution));
      TFB_ASSIGN_OR_RETURN(layers::DecoderLayer layer,
                           layers::DecoderLayer::Create(device(), parameters_, n));
      layers_.push_back(std::move(layer));
    }
    return layers::SegmentedLayer::DoSetup(inputs, execution);
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    TFB_RETURN_IF_ERROR(KeepEarlier(inputs, outputs, execution));
    run_outputs_ = &outputs;
    const absl::Status status = layers::SegmentedLayer::DoRun(inputs, outputs, execution);
    run_outputs_ = nullptr;
    TFB_RETURN_IF_ERROR(status);
    const TensorView use = outputs.Get(kWaitingUse);
    for (int64_t n = 0; n < options_.layers && !use.empty(); ++n) {
      TFB_RETURN_IF_ERROR(attentions_[n].KeepUse(last_token(), UseOfLayer(use, n), execution));
    }
    return absl::OkStatus();
  }

  absl::Status Recall(int64_t n, const ConstTensorView& rows, const Execution& execution) override {
    return attentions_[n].RecallTokens(norm(n), rows, execution);
  }

  absl::Status RecallMore(const Inputs& inputs, const Execution& execution) override {
    const ConstTensorView compressed = inputs.Get(kCompressed), use = inputs.Get(kWaitingUse);
    for (int64_t n = 0; n < options_.layers; ++n) {
      for (int64_t begin = 0; begin < options_.given_compressed; begin += max_segment_tokens()) {
        const int64_t count = std::min(max_segment_tokens(), options_.given_compressed - begin);
        const ConstTensorView rows = OfLayer(compressed, n);
        TFB_RETURN_IF_ERROR(
            attentions_[n].RecallCompressed(norm(n), Slice(rows, 1, begin, count), execution));
      }
      if (use.empty()) continue;
      TFB_RETURN_IF_ERROR(attentions_[n].RecallUse(UseOfLayer(use, n), execution));
    }
    return absl::OkStatus();
  }

  void BeginSegment(const Segment& segment) override {
    segment_.Set(next_token_, segment.tokens);
    next_token_ += segment.tokens;
    ++next_segment_;
  }

  absl::Status RunLayer(int64_t n, const layers::DecoderLayer::Call& call,
                        const Execution& execution) override {
    return layers_[n].Run(
        options_.pre_norm, call,
        [&](const ConstTensorView& x, const ConstTensorView& residual, const TensorView& y,
            const Execution& rest) {
          return attentions_[n].Append({segment_, call.input, x, residual, y, norm(n), OutputsOf(n),
                                        content_.has_value() ? &*content_ : nullptr},
                                       rest);
        },
        execution);
  }

  size_t layer_workspace_bytes(int threads) const override {
    const size_t content = content_.has_value() ? content_->workspace_bytes(threads) : 0;
    return layers::DecoderLayer::workspace_bytes(
        device(), sizes_, problem().batch * max_segment_tokens(), options_.pre_norm,
        attentions_[0].workspace_bytes(content, threads), threads);
  }

 private:
  CompressiveLayer(const Problem& problem, const CompressiveOptions& options,
                   std::vector<TensorSpec> outputs, Device device)
      : layers::SegmentedLayer(device, problem,
                               {options.layers,
                                options.segment,
                                options.final_norm,
                                std::move(outputs),
                                {},
                                GivenQueues(problem, options)}),
        options_(options),
        sizes_(CompressiveSizes(problem, options)),
        queues_(options, max_segment_tokens()),
        segment_(device, queues_, options.memory, max_segment_tokens()) {}

  // Returns the outputs of layer n for the segment that has begun, in a Run.
  CompressionOutputs OutputsOf(int64_t n) const {
    CompressionOutputs outputs;
    if (run_outputs_ == nullptr) return outputs;
    const auto part = [&](const char* name) {
      TensorView view = run_outputs_->Get(name);
      if (view.empty()) return view;
      view.data = static_cast<const std::byte*>(view.data) +
                  SizeOf(view.dtype) * view.Offset(0, next_segment_ - 1, n);
      view.dims = {view.dim(0), view.dim(3)};
      view.strides = {view.stride(0), view.stride(3)};
      view.rank -= 2;
      return view;
    };
    outputs.attention_loss = part("attention_loss");
    outputs.autoencoding_loss = part("autoencoding_loss");
    outputs.kept = part("kept");
    outputs.compressed = run_outputs_->Get(kCompressed);
    if (outputs.compressed.empty()) return outputs;
    outputs.compressed = OfLayer(outputs.compressed, n);
    outputs.first_compressed = first_compressed();
    return outputs;
  }

  // Returns the norm of the rows that layer n reads; null where it reads them as they are.
  const LayerNorm* norm(int64_t n) const {
    return options_.pre_norm ? &layers_[n].attention_norm : nullptr;
  }
  // Return the number of tokens after a Run, and the number of the first compressed row then.
  int64_t last_token() const { return queues_.first_token() + problem().query_tokens; }
  int64_t first_compressed() const {
    return queues_.Rows(last_token()) - queues_.MemoryRows(last_token());
  }

  // Copies those of the rows before a Run's first token that are in the final queues: given ones,
  // but for the memories, which the stack copies; or zeros.
  absl::Status KeepEarlier(const Inputs& inputs, const Outputs& outputs,
                           const Execution& execution) const {
    const TensorView memories = outputs.Get(kMemories), compressed = outputs.Get(kCompressed);
    for (int64_t n = 0; n < options_.layers; ++n) {
      if (!memories.empty() && queues_.starts_full()) {
        const int64_t count = memories.dim(2) - problem().query_tokens;
        TFB_RETURN_IF_ERROR(KeepRows(attentions_[n].Zeros(std::max<int64_t>(count, 0)),
                                     OfLayer(memories, n), execution));
      }
      if (compressed.empty()) continue;
      const int64_t count = std::max<int64_t>(queues_.first_row() - first_compressed(), 0);
      const ConstTensorView given = inputs.Get(kCompressed);
      TFB_RETURN_IF_ERROR(KeepRows(given.empty()
                                       ? attentions_[n].Zeros(count)
                                       : Slice(OfLayer(given, n), 1, given.dim(2) - count, count),
                                   OfLayer(compressed, n), execution));
    }
    return absl::OkStatus();
  }
  // Copies rows to the first ones of `to`.
  absl::Status KeepRows(const ConstTensorView& rows, const TensorView& to,
                        const Execution& execution) const {
    if (rows.dim(1) == 0) return absl::OkStatus();
    CopyRowsCall copy;
    copy.from = rows;
    copy.to = to;
    copy.rows = rows.dim(1);
    return CopyRows(device(), copy, execution);
  }

  // Counts over one sequence and layer.
  struct Walk {
    double pairs = 0;  // pairs of queries and keys, for one head
    double rows = 0;   // pairs whose keys are compressed rows
    double uses = 0;   // pairs whose weight is computed once more, with most_used
  };
  Walk WalkSequence() const {
    Walk walk;
    const int64_t first = queues_.first_token(), end = first + problem().query_tokens;
    for (int64_t s = first; s < end; s += max_segment_tokens()) {
      const int64_t next = std::min(s + max_segment_tokens(), end);
      const double tokens = static_cast<double>(next - s);
      const double kept = static_cast<double>(queues_.MemoryRows(s) + queues_.MemoryTokens(s));
      walk.pairs += tokens * kept + tokens * (tokens + 1) / 2;
      walk.rows += static_cast<double>(queues_.Rows(next) - queues_.Rows(s));
      if (options_.function != Function::kMostUsed || !queues_.compresses()) continue;
      walk.uses += tokens * static_cast<double>(queues_.Left(next) - queues_.Left(s));
    }
    return walk;
  }

  int64_t Reach() const {
    const int64_t tokens = problem().query_tokens;
    if (tokens == 0) return 0;
    int64_t farthest = tokens - 1;
    for (int64_t n = 0; n < options_.layers; ++n) farthest = FirstSeen(farthest);
    return tokens - 1 - farthest;
  }
  // Returns the first token of the sequence on which the attention at token p depends.
  int64_t FirstSeen(int64_t p) const {
    const int64_t longest = max_segment_tokens(), first = queues_.first_token();
    const int64_t begin = first + p / longest * longest;
    int64_t seen = begin - queues_.MemoryTokens(begin);
    if (queues_.MemoryRows(begin) > 0) {
      const int64_t row = queues_.Rows(begin) - queues_.MemoryRows(begin) - queues_.first_row();
      seen = row * options_.compression;
      // A choice or a dilated convolution depends on all rows that one segment compresses.
      const bool whole = options_.function == Function::kMostUsed ||
                         options_.function == Function::kDilatedConvolution;
      for (int64_t s = first; whole && s < begin; s += longest) {
        if (seen < queues_.Compressed(s + longest)) {
          seen = std::min(seen, queues_.Compressed(s));
          break;
        }
      }
    }
    return std::max<int64_t>(seen - first, 0);
  }

  CompressiveOptions options_;
  layers::StackSizes sizes_;
  MemoryQueues queues_;
  CompressiveSegment segment_;
  std::vector<CompressiveAttention> attentions_;
  std::optional<ContentAttention> content_;  // used where rows are compressed
  std::vector<layers::DecoderLayer> layers_;
  const Outputs* run_outputs_ = nullptr;  // set during a Run
  int64_t next_token_ = 0;                // token number, as the queues count
  int64_t next_segment_ = 0;
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
  const int64_t longest = LongestSegment(problem, options);
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
    const int64_t rows = MaxBlocksOf(LongestSegment(p, options), options);
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
  return CompressiveLayer::Create(problem, options, WrittenTensors(problem, options), device, seed);
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
