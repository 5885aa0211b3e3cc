#include "memory/transformer_xl/transformer_xl.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/layers/feed_forward.h"
#include "core/layers/layer_norm.h"
#include "core/random.h"
#include "core/workspace.h"
#include "memory/transformer_xl/relative_attention.h"
#include "positional/transformer_xl_relative/relative_positions.h"

namespace tfb {
namespace {

const bool registered = RegisterTechnique<TransformerXl>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "transformer_xl";
  info.family = "memory";
  info.title = "Transformer-XL segment recurrence";
  info.citation = "Dai et al. 2019, arXiv:1901.02860v3, sections 3.2 and 3.3";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kExact;
  info.budget_option = "memory";
  info.growth = 1;
  info.supports_noncausal = false;
  info.devices = {Device::kCpu, Device::kCuda};
  return info;
}

absl::Status CheckProblem(const Problem& problem, const TransformerXlOptions& options) {
  const auto same = [](absl::string_view name, int64_t value, absl::string_view other,
                       int64_t allowed) {
    if (value == allowed) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("transformer_xl is self-attention: ", name,
                                                   " is ", value, "; allowed is ", other, ", ",
                                                   allowed));
  };
  TFB_RETURN_IF_ERROR(same("kv_tokens", problem.kv_tokens, "query_tokens", problem.query_tokens));
  TFB_RETURN_IF_ERROR(same("kv_heads", problem.kv_heads, "query_heads", problem.query_heads));
  TFB_RETURN_IF_ERROR(same("value_dim", problem.value_dim, "head_dim", problem.head_dim));
  if (options.same_length && options.memory == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "option memory is 0; allowed with same_length=true, where a token is one of the keys it "
        "sees, are 1 to ",
        TransformerXlOptions::kMaxMemory));
  }
  return absl::OkStatus();
}

// ---- Parameters ----

struct ParameterSpec {
  std::string name;
  Shape shape;
  double mean;
  double deviation;
};

std::string LayerPrefix(int64_t layer) { return absl::StrCat("layer", layer, "."); }
std::string BiasPrefix(const TransformerXlOptions& options, int64_t layer) {
  return options.share_biases ? "" : LayerPrefix(layer);
}

std::vector<ParameterSpec> ParameterSpecs(const Problem& problem,
                                          const TransformerXlOptions& options) {
  const int64_t width = problem.model_dim(), inner = options.feed_forward * width;
  std::vector<ParameterSpec> specs;
  const auto matrix = [&](const std::string& name, int64_t in, int64_t out) {
    specs.push_back({name, {in, out}, 0, 1 / std::sqrt(static_cast<double>(in))});
  };
  const auto biases = [&](const std::string& prefix) {
    for (const char* name : {"u", "v"}) {
      specs.push_back({prefix + name, {problem.query_heads, problem.head_dim}, 0, 0.5});
    }
  };
  const auto norm = [&](const std::string& name) {
    specs.push_back({name + ".gamma", {width}, 1, 0});
    specs.push_back({name + ".beta", {width}, 0, 0});
  };
  if (options.share_biases) biases("");
  for (int64_t n = 0; n < options.layers; ++n) {
    const std::string layer = LayerPrefix(n);
    for (const char* name : {"w_q", "w_k", "w_v", "w_r", "w_o"}) matrix(layer + name, width, width);
    if (!options.share_biases) biases(layer);
    norm(layer + "attention_norm");
    matrix(layer + "ff.w1", width, inner);
    specs.push_back({layer + "ff.b1", {inner}, 0, 0});
    matrix(layer + "ff.w2", inner, width);
    specs.push_back({layer + "ff.b2", {width}, 0, 0});
    norm(layer + "ff_norm");
  }
  return specs;
}

// ---- What a token sees, for costs and statistics ----

struct Context {
  double pairs = 0;   // query-key pairs of one head and batch row
  int64_t reach = 0;  // tokens before the last one that can change it, through all layers
};

Context ContextOf(int64_t tokens, const TransformerXlOptions& options) {
  const auto first_seen = [&](int64_t p) {
    const int64_t from = options.same_length ? p + 1 : p / options.segment * options.segment;
    return std::max<int64_t>(0, from - options.memory);
  };
  Context context;
  for (int64_t p = 0; p < tokens; ++p) context.pairs += static_cast<double>(p - first_seen(p) + 1);
  int64_t farthest = tokens - 1;
  for (int64_t n = 0; n < options.layers && tokens > 0; ++n) farthest = first_seen(farthest);
  context.reach = tokens == 0 ? 0 : tokens - 1 - farthest;
  return context;
}

// ---- The layer ----

class TransformerXlLayer : public StreamingLayer {
 public:
  static absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem,
                                                       const TransformerXlOptions& options,
                                                       Device device, uint64_t seed) {
    auto layer =
        std::unique_ptr<TransformerXlLayer>(new TransformerXlLayer(problem, options, device));
    for (const ParameterSpec& spec : ParameterSpecs(problem, options)) {
      TFB_ASSIGN_OR_RETURN(Tensor parameter, Tensor::Allocate(DType::kF32, spec.shape));
      FillNormal(&parameter, seed, spec.name, spec.mean, spec.deviation);
      layer->parameters_[spec.name] = std::move(parameter);
    }
    for (int64_t n = 0; n < options.layers; ++n) {
      TFB_ASSIGN_OR_RETURN(RelativeAttention attention,
                           RelativeAttention::Create(device, problem, layer->reach_));
      layer->blocks_.push_back({std::move(attention), {}, {}, {}});
    }
    return layer;
  }

  size_t workspace_bytes(int threads) const override {
    const int64_t rows = problem().batch * max_segment_tokens();
    const int64_t width = problem().model_dim();
    const size_t own =
        Workspace::Measure([&](Workspace& workspace) { LayOut(max_segment_tokens(), workspace); });
    return own + std::max({blocks_[0].attention.workspace_bytes(threads),
                           FeedForward::workspace_bytes(device_, rows, {width, inner_dim(), width},
                                                        threads),
                           LayerNorm::workspace_bytes(device_, width, threads)});
  }

  // The products of the definition: projections, the three of each kept pair (content, distance,
  // values), feed-forward.
  Cost cost() const override {
    const Problem& p = problem();
    const double width = static_cast<double>(p.model_dim());
    const double rows = static_cast<double>(p.batch * p.query_tokens);
    const double pairs = static_cast<double>(p.batch) * ContextOf(p.query_tokens, options_).pairs;
    Cost cost;
    cost.flops =
        2 * static_cast<double>(options_.layers) *
        (rows * width * (4 * width + 2 * static_cast<double>(inner_dim())) + pairs * 3 * width);
    cost.bytes = TensorBytes();
    return cost;
  }

  // reach_tokens: earlier tokens that can change the last one, through all layers. keys_per_token:
  // those that a token sees in one layer, on average, itself included. cache_bytes: the keys and
  // values of all layers. cublas: on a GPU, 1 where cuBLAS makes the products with matrices, else 0.
  std::map<std::string, double> statistics() const override {
    const int64_t tokens = problem().query_tokens;
    const Context context = ContextOf(tokens, options_);
    double cache_bytes = 0;
    for (const Block& block : blocks_) {
      cache_bytes += static_cast<double>(block.attention.cache_bytes());
    }
    std::map<std::string, double> statistics = {
        {"cache_bytes", cache_bytes},
        {"keys_per_token", context.pairs / static_cast<double>(std::max<int64_t>(tokens, 1))},
        {"reach_tokens", static_cast<double>(context.reach)}};
    if (device_ == Device::kCuda) statistics["cublas"] = MatMulUsesCublas(device_) ? 1 : 0;
    return statistics;
  }

  // Without same_length the segments decide the mask.
  int64_t split_tokens() const override { return options_.same_length ? 0 : max_segment_tokens(); }

  absl::Status Reset() override {
    for (Block& block : blocks_) block.attention.Reset();
    return absl::OkStatus();
  }

 protected:
  absl::Status DoSetup(const Inputs&, const Execution& execution) override {
    const DistanceRange range = {0, reach_.max_distance(), options_.clamp_length};
    const Tensor sinusoids = SinusoidsOf(range, problem().model_dim());
    for (int64_t n = 0; n < options_.layers; ++n) {
      Block& block = blocks_[n];
      const auto parameter = [&](const std::string& prefix, absl::string_view name) {
        return ConstTensorView(parameters_.at(absl::StrCat(prefix, name)).view());
      };
      const std::string layer = LayerPrefix(n), biases = BiasPrefix(options_, n);
      TFB_RETURN_IF_ERROR(block.attention.Setup(
          {parameter(layer, "w_q"),
           parameter(layer, "w_k"),
           parameter(layer, "w_v"),
           parameter(layer, "w_o"),
           {parameter(layer, "w_r"), parameter(biases, "u"), parameter(biases, "v")}},
          range, sinusoids.view(), execution));
      TFB_ASSIGN_OR_RETURN(
          PackedMatrix inner,
          PackedMatrix::Create(device_, parameter(layer, "ff.w1"), parameter(layer, "ff.b1")));
      TFB_ASSIGN_OR_RETURN(
          PackedMatrix outer,
          PackedMatrix::Create(device_, parameter(layer, "ff.w2"), parameter(layer, "ff.b2")));
      block.feed_forward = FeedForward(std::move(inner), std::move(outer), Activation::kRelu);
      const auto norm = [&](absl::string_view name) {
        return LayerNorm::Create(device_, parameter(layer, absl::StrCat(name, ".gamma")),
                                 parameter(layer, absl::StrCat(name, ".beta")));
      };
      TFB_ASSIGN_OR_RETURN(block.attention_norm, norm("attention_norm"));
      TFB_ASSIGN_OR_RETURN(block.feed_forward_norm, norm("ff_norm"));
    }
    return absl::OkStatus();
  }

  // Leaves the stream at the end of the sequence, as appending it would.
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    const ConstTensorView x = inputs.Get("x");
    const TensorView out = outputs.Get("out");
    TFB_RETURN_IF_ERROR(Reset());
    const int64_t total = problem().query_tokens;
    for (int64_t begin = 0; begin < total; begin += max_segment_tokens()) {
      const int64_t tokens = std::min(max_segment_tokens(), total - begin);
      TFB_RETURN_IF_ERROR(
          AppendSegment(Slice(x, 1, begin, tokens), Slice(out, 1, begin, tokens), execution));
    }
    return absl::OkStatus();
  }

  absl::Status DoAppend(int64_t, const Inputs& segment, const Outputs& outputs,
                        const Execution& execution) override {
    return AppendSegment(segment.Get("x"), outputs.Get("out"), execution);
  }

 private:
  struct Block {
    RelativeAttention attention;
    FeedForward feed_forward;
    LayerNorm attention_norm;
    LayerNorm feed_forward_norm;
  };
  struct Scratch {
    float* state;       // [batch, tokens, model_dim]: between sublayers
    float* normalized;  // the same size; null unless pre_norm
  };

  TransformerXlLayer(const Problem& problem, const TransformerXlOptions& options, Device device)
      : StreamingLayer(
            problem, HiddenInputs(problem), HiddenOutputs(problem),
            {{"x", {problem.batch, kSegmentTokens, problem.model_dim()}, problem.dtype}},
            {{"out", {problem.batch, kSegmentTokens, problem.model_dim()}, problem.dtype}},
            LongestSegment(problem, options)),
        options_(options),
        device_(device),
        reach_{options.memory, options.same_length, max_segment_tokens()},
        segment_(device, reach_) {}

  static int64_t LongestSegment(const Problem& problem, const TransformerXlOptions& options) {
    return std::min(options.segment, std::max<int64_t>(problem.query_tokens, 1));
  }
  int64_t inner_dim() const { return options_.feed_forward * problem().model_dim(); }

  Scratch LayOut(int64_t tokens, Workspace& workspace) const {
    const int64_t size = problem().batch * tokens * problem().model_dim();
    Scratch scratch;
    scratch.state = workspace.Take<float>(size);
    scratch.normalized = options_.pre_norm ? workspace.Take<float>(size) : nullptr;
    return scratch;
  }

  // x and out are [batch, tokens, model_dim] of any dtype.
  absl::Status AppendSegment(const ConstTensorView& x, const TensorView& out,
                             const Execution& execution) {
    segment_.Set(blocks_[0].attention.tokens(), x.dim(1));
    Workspace workspace(execution.workspace);
    const Scratch scratch = LayOut(x.dim(1), workspace);
    const TensorView state(scratch.state, DType::kF32, x.shape());
    const TensorView normalized(scratch.normalized, DType::kF32, x.shape());
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    ConstTensorView input = x;
    for (Block& block : blocks_) {
      const TensorView output = &block == &blocks_.back() ? out : state;
      TFB_RETURN_IF_ERROR(options_.pre_norm ? PreNorm(block, input, normalized, state, output, rest)
                                            : PostNorm(block, input, state, output, rest));
      input = state;
    }
    return absl::OkStatus();
  }

  absl::Status PostNorm(Block& block, const ConstTensorView& input, const TensorView& state,
                        const TensorView& output, const Execution& execution) {
    TFB_RETURN_IF_ERROR(block.attention.Append(segment_, input, input, state, execution));
    TFB_RETURN_IF_ERROR(block.attention_norm.Run(state, state, execution));
    TFB_RETURN_IF_ERROR(block.feed_forward.Run(state, state, state, execution));
    return block.feed_forward_norm.Run(state, output, execution);
  }

  absl::Status PreNorm(Block& block, const ConstTensorView& input, const TensorView& normalized,
                       const TensorView& state, const TensorView& output,
                       const Execution& execution) {
    TFB_RETURN_IF_ERROR(block.attention_norm.Run(input, normalized, execution));
    TFB_RETURN_IF_ERROR(block.attention.Append(segment_, normalized, input, state, execution));
    TFB_RETURN_IF_ERROR(block.feed_forward_norm.Run(state, normalized, execution));
    return block.feed_forward.Run(normalized, state, output, execution);
  }

  TransformerXlOptions options_;
  Device device_;
  MemoryReach reach_;
  SegmentView segment_;
  std::vector<Block> blocks_;
};

// ---- The definition ----

// Rows of float64, and the formulas of the header on them.
class Rows {
 public:
  Rows(int64_t rows, int64_t channels) : channels_(channels), values_(rows * channels) {}
  explicit Rows(const ConstTensorView& view) : Rows(view.dim(0), view.dim(1)) {
    CopyElements(view, TensorView(values_.data(), DType::kF64, view.shape()));
  }
  int64_t rows() const { return static_cast<int64_t>(values_.size()) / channels_; }
  int64_t channels() const { return channels_; }
  double* operator[](int64_t row) { return values_.data() + row * channels_; }
  const double* operator[](int64_t row) const { return values_.data() + row * channels_; }

  Rows Times(const Rows& matrix) const {
    Rows product(rows(), matrix.channels());
    for (int64_t r = 0; r < rows(); ++r) {
      for (int64_t k = 0; k < channels_; ++k) {
        const double value = (*this)[r][k];
        for (int64_t c = 0; c < matrix.channels(); ++c) product[r][c] += value * matrix[k][c];
      }
    }
    return product;
  }
  Rows Plus(const Rows& other) const {
    Rows sum = *this;
    for (size_t n = 0; n < values_.size(); ++n) sum.values_[n] += other.values_[n];
    return sum;
  }
  Rows PlusEach(const std::vector<double>& row) const {
    Rows sum = *this;
    for (int64_t r = 0; r < rows(); ++r) {
      for (int64_t c = 0; c < channels_; ++c) sum[r][c] += row[c];
    }
    return sum;
  }
  Rows Relu() const {
    Rows result = *this;
    for (double& value : result.values_) value = value < 0 ? 0 : value;
    return result;
  }
  Rows Normalized(const std::vector<double>& gamma, const std::vector<double>& beta) const {
    Rows result = *this;
    const double n = static_cast<double>(channels_);
    for (int64_t r = 0; r < rows(); ++r) {
      double* row = result[r];
      double mean = 0, variance = 0;
      for (int64_t c = 0; c < channels_; ++c) mean += row[c] / n;
      for (int64_t c = 0; c < channels_; ++c) variance += (row[c] - mean) * (row[c] - mean) / n;
      for (int64_t c = 0; c < channels_; ++c) {
        row[c] = gamma[c] * (row[c] - mean) / std::sqrt(variance + 1e-5) + beta[c];
      }
    }
    return result;
  }

 private:
  int64_t channels_;
  std::vector<double> values_;
};

class FullSequence {
 public:
  FullSequence(const Problem& problem, const TransformerXlOptions& options,
               const NamedTensors& parameters, absl::Span<const int64_t> begins)
      : problem_(problem), options_(options), parameters_(parameters) {
    for (int64_t p = 0; p < problem.query_tokens; ++p) {
      const auto next = std::upper_bound(begins.begin(), begins.end(), p);
      first_seen_.push_back(options.same_length ? p - options.memory + 1
                                                : *(next - 1) - options.memory);
      first_seen_.back() = std::max<int64_t>(first_seen_.back(), 0);
    }
  }

  // All layers on one sequence, [tokens, model_dim].
  Rows Forward(const Rows& x) const {
    Rows h = x;
    for (int64_t n = 0; n < options_.layers; ++n) {
      const std::string layer = LayerPrefix(n);
      const auto attention_norm = [&](const Rows& rows) {
        return Norm(rows, layer + "attention_norm");
      };
      const auto ff_norm = [&](const Rows& rows) { return Norm(rows, layer + "ff_norm"); };
      if (options_.pre_norm) {
        const Rows g = h.Plus(Attention(n, attention_norm(h)));
        h = g.Plus(FeedForward(n, ff_norm(g)));
      } else {
        const Rows g = attention_norm(h.Plus(Attention(n, h)));
        h = ff_norm(g.Plus(FeedForward(n, g)));
      }
    }
    return h;
  }

 private:
  Rows Matrix(const std::string& name) const { return Rows(parameters_.at(name).view()); }
  std::vector<double> Vector(const std::string& name) const {
    const Tensor& tensor = parameters_.at(name);
    std::vector<double> values(tensor.num_elements());
    for (size_t c = 0; c < values.size(); ++c)
      values[c] = tensor.view().Get(static_cast<int64_t>(c));
    return values;
  }
  Rows Norm(const Rows& rows, const std::string& name) const {
    return rows.Normalized(Vector(name + ".gamma"), Vector(name + ".beta"));
  }
  Rows FeedForward(int64_t n, const Rows& x) const {
    const std::string ff = LayerPrefix(n) + "ff.";
    return x.Times(Matrix(ff + "w1"))
        .PlusEach(Vector(ff + "b1"))
        .Relu()
        .Times(Matrix(ff + "w2"))
        .PlusEach(Vector(ff + "b2"));
  }

  // r_d for every distance d, [tokens, model_dim].
  Rows Sinusoids() const {
    const int64_t width = problem_.model_dim(), sines = (width + 1) / 2;
    Rows r(problem_.query_tokens, width);
    for (int64_t d = 0; d < r.rows(); ++d) {
      const double distance =
          static_cast<double>(options_.clamp_length == 0 ? d : std::min(d, options_.clamp_length));
      for (int64_t c = 0; c < width; ++c) {
        const double exponent = 2 * static_cast<double>(c % sines) / static_cast<double>(width);
        const double angle = distance / std::pow(10000, exponent);
        r[d][c] = c < sines ? std::sin(angle) : std::cos(angle);
      }
    }
    return r;
  }

  Rows Attention(int64_t n, const Rows& x) const {
    const std::string layer = LayerPrefix(n), biases = BiasPrefix(options_, n);
    const Rows q = x.Times(Matrix(layer + "w_q")), k = x.Times(Matrix(layer + "w_k"));
    const Rows v = x.Times(Matrix(layer + "w_v"));
    const Rows distances = Sinusoids().Times(Matrix(layer + "w_r"));
    const Rows content_bias = Matrix(biases + "u"), position_bias = Matrix(biases + "v");
    const int64_t e = problem_.head_dim;
    Rows context(x.rows(), x.channels());
    for (int64_t h = 0; h < problem_.query_heads; ++h) {
      for (int64_t p = 0; p < x.rows(); ++p) {
        std::vector<double> s(p + 1, kNotSeen);
        double max = kNotSeen, sum = 0;
        for (int64_t j = first_seen_[p]; j <= p; ++j) {
          double content = 0, position = 0;
          for (int64_t c = 0; c < e; ++c) {
            content += (q[p][h * e + c] + content_bias[h][c]) * k[j][h * e + c];
            position += (q[p][h * e + c] + position_bias[h][c]) * distances[p - j][h * e + c];
          }
          s[j] = (content + position) / std::sqrt(static_cast<double>(e));
          max = std::max(max, s[j]);
        }
        for (int64_t j = first_seen_[p]; j <= p; ++j) {
          const double weight = std::exp(s[j] - max);
          sum += weight;
          for (int64_t c = 0; c < e; ++c) context[p][h * e + c] += weight * v[j][h * e + c];
        }
        for (int64_t c = 0; c < e; ++c) context[p][h * e + c] /= sum;
      }
    }
    return context.Times(Matrix(layer + "w_o"));
  }

  const Problem& problem_;
  const TransformerXlOptions& options_;
  const NamedTensors& parameters_;
  std::vector<int64_t> first_seen_;
};

absl::Status CheckParameters(const Problem& problem, const TransformerXlOptions& options,
                             const NamedTensors& parameters) {
  for (const ParameterSpec& spec : ParameterSpecs(problem, options)) {
    const auto found = parameters.find(spec.name);
    if (found == parameters.end() || found->second.shape() != spec.shape) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", spec.name, " ", ShapeString(spec.shape), " is ",
                       found == parameters.end() ? "missing" : ShapeString(found->second.shape())));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Tensor> DefineTransformerXl(const Problem& problem,
                                           const TransformerXlOptions& options,
                                           const NamedTensors& parameters, const ConstTensorView& x,
                                           absl::Span<const int64_t> begins) {
  TFB_RETURN_IF_ERROR(CheckProblem(problem, options));
  TFB_RETURN_IF_ERROR(CheckParameters(problem, options, parameters));
  if (problem.query_tokens > 0 && (begins.empty() || begins[0] != 0)) {
    return absl::InvalidArgumentError("the first segment does not begin at token 0");
  }
  const FullSequence sequence(problem, options, parameters, begins);
  Tensor out(DType::kF64, {problem.batch, problem.query_tokens, problem.model_dim()});
  for (int64_t b = 0; b < problem.batch; ++b) {
    Rows rows(problem.query_tokens, problem.model_dim());
    for (int64_t t = 0; t < rows.rows(); ++t) {
      for (int64_t c = 0; c < rows.channels(); ++c) rows[t][c] = x.Get(x.Offset(b, t, c));
    }
    const Rows result = sequence.Forward(rows);
    for (int64_t t = 0; t < rows.rows(); ++t) {
      std::copy_n(result[t], rows.channels(), out.view().MutableAt<double>(b, t));
    }
  }
  return out;
}

TransformerXl::TransformerXl() : TechniqueOf(Info()) {}

absl::StatusOr<std::unique_ptr<Layer>> TransformerXl::MakeLayer(const Problem& problem,
                                                                const TransformerXlOptions& options,
                                                                Device device,
                                                                uint64_t seed) const {
  TFB_RETURN_IF_ERROR(CheckProblem(problem, options));
  return TransformerXlLayer::Create(problem, options, device, seed);
}

absl::Status TransformerXl::Definition(const Problem& problem, const TransformerXlOptions& options,
                                       const NamedTensors& parameters, const Inputs& inputs,
                                       const DefinitionRequest&, NamedTensors* outputs) const {
  std::vector<int64_t> begins;
  for (int64_t t = 0; t < problem.query_tokens; t += options.segment) begins.push_back(t);
  TFB_ASSIGN_OR_RETURN((*outputs)["out"],
                       DefineTransformerXl(problem, options, parameters, inputs.Get("x"), begins));
  return absl::OkStatus();
}

absl::StatusOr<TechniqueSpec> TransformerXl::Counterpart(const Problem& problem,
                                                         const Options& options) const {
  TFB_ASSIGN_OR_RETURN(Options whole_past, Canonical(options));
  const std::string tokens = absl::StrCat(std::max<int64_t>(problem.query_tokens, 1));
  whole_past["memory"] = tokens;
  whole_past["segment"] = tokens;
  whole_past["same_length"] = "false";
  return TechniqueSpec{info().name, std::move(whole_past)};
}

}  // namespace tfb
