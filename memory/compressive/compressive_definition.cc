// The definition: two queues of rows for each layer and sequence, and the formulas of the header.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/layers/stack/stack_definition.h"
#include "memory/compressive/compressive.h"

namespace tfb::compressive {
namespace {

using layers::Rows;

using Eviction = CompressiveOptions::Eviction;
using Function = CompressiveOptions::Function;

double SquareOfDifference(const Rows& a, const Rows& b) {
  double sum = 0;
  for (int64_t r = 0; r < a.rows(); ++r) {
    for (int64_t c = 0; c < a.channels(); ++c) sum += (a[r][c] - b[r][c]) * (a[r][c] - b[r][c]);
  }
  return sum;
}

double Norm(const Rows& a) {
  return std::sqrt(SquareOfDifference(a, Rows(a.rows(), a.channels())));
}

// A loss, and what it would be if its two sides were opposite: the unit of its error.
struct Loss {
  double loss = 0, size = 0;
};
Loss LossOf(const Rows& a, const Rows& b, bool mean_square) {
  const double square = SquareOfDifference(a, b), size = Norm(a) + Norm(b);
  const double elements = static_cast<double>(a.rows() * a.channels());
  if (mean_square) return {square / elements, size * size / elements};
  return {std::sqrt(square), size};
}

// The outputs of the compression after a segment.
struct Report {
  Loss attention, autoencoding;
  std::vector<int64_t> kept;
};

// What the queues of one layer of one sequence hold, the oldest row first.
struct Queues {
  Rows compressed;
  Rows memory;
  Rows waiting;                  // rows that left the memory and are not yet compressed
  std::vector<double> use = {};  // use of those rows
};

// Returns the rows of layer n of [batch, layers, rows, channels], none where there is no tensor.
Rows GivenRows(const ConstTensorView& given, int64_t b, int64_t n, int64_t channels) {
  Rows rows(given.empty() ? 0 : given.dim(2), channels);
  for (int64_t t = 0; t < rows.rows(); ++t) {
    for (int64_t c = 0; c < channels; ++c) rows[t][c] = given.Get(given.Offset(b, n, t, c));
  }
  return rows;
}

// Returns the queues with which layer n begins.
Queues FirstQueues(const CompressiveOptions& options, const Inputs& inputs, int64_t b, int64_t n,
                   int64_t channels) {
  if (options.start_zero && !options.is_given()) {
    return {Rows(options.compressed_memory, channels), Rows(options.memory, channels),
            Rows(0, channels)};
  }
  const Rows tokens = GivenRows(inputs.Get("memories"), b, n, channels);
  const int64_t waiting = options.given_waiting();
  Queues queues = {GivenRows(inputs.Get("compressed"), b, n, channels),
                   tokens.Sub(waiting, tokens.rows() - waiting), tokens.Sub(0, waiting)};
  const ConstTensorView use = inputs.Get("waiting_use");
  for (int64_t t = 0; t < waiting; ++t) {
    queues.use.push_back(use.empty() ? 0 : use.Get(use.Offset(b, n, t)));
  }
  return queues;
}

// One layer of one sequence.
class LayerMemory {
 public:
  LayerMemory(const layers::StackDefinition& stack, const CompressiveOptions& options, int64_t n,
              double tolerance, const DefinitionRequest& request, Queues queues)
      : stack_(stack),
        options_(options),
        n_(n),
        tolerance_(tolerance),
        request_(request),
        queues_(std::move(queues)) {}

  const Queues& queues() const { return queues_; }

  // Computes the attention of a segment, with its W_o. `kept` are the rows that a layer chose, or
  // null.
  Rows Attend(const Rows& segment, const std::vector<int64_t>* kept, Report* report) {
    Rows list = queues_.compressed;
    list.Append(queues_.memory);
    list.Append(segment);
    const Rows keys = Normalized(list);
    const Rows queries = Normalized(segment);
    std::vector<double> received;
    const Rows context =
        stack_.Context(n_, stack_.Project(n_, "w_q", queries),
                       {stack_.Project(n_, "w_k", keys), stack_.Project(n_, "w_v", keys),
                        [](int64_t) { return 0; }},
                       &received);
    for (double& weight : received) {
      weight /= static_cast<double>(stack_.sizes().heads * segment.rows());
      if (std::isnan(weight)) weight = std::numeric_limits<double>::infinity();
    }
    received.erase(received.begin(), received.begin() + queues_.compressed.rows());
    queues_.memory.Append(layers::Held(request_, segment));
    Evict(received, queries, kept, report);
    return stack_.Project(n_, "w_o", context);
  }

 private:
  Rows Normalized(const Rows& rows) const {
    return options_.pre_norm ? stack_.AttentionNorm(n_, rows) : rows;
  }
  // Does the same for the losses, whose gradients stop at the layer's parameters.
  Rows NormalizedWithHeld(const Rows& rows) const {
    if (!options_.pre_norm) return rows;
    const std::string norm = layers::LayerPrefix(n_) + "attention_norm.";
    const auto held = [&](const std::string& name) {
      std::vector<double> values = stack_.Vector(norm + name);
      if (request_.stopped != nullptr) request_.stopped->Hold(absl::MakeSpan(values));
      return values;
    };
    const std::vector<double> gamma = held("gamma");
    return rows.Normalized(gamma, held("beta"));
  }
  Rows ProjectWithHeld(const std::string& matrix, const Rows& rows) const {
    const Rows w = layers::Held(request_, stack_.Matrix(layers::LayerPrefix(n_) + matrix));
    return rows.Times(w, stack_.pool());
  }

  void Evict(const std::vector<double>& received, const Rows& queries,
             const std::vector<int64_t>* kept, Report* report) {
    int64_t overflow = std::max<int64_t>(queues_.memory.rows() - options_.memory, 0);
    while (options_.eviction == Eviction::kWholeBlocks && overflow % options_.compression > 0) {
      ++overflow;
    }
    if (options_.compressed_memory > 0) {
      queues_.waiting.Append(queues_.memory.Sub(0, overflow));
      queues_.use.insert(queues_.use.end(), received.begin(), received.begin() + overflow);
    }
    queues_.memory = queues_.memory.Sub(overflow, queues_.memory.rows() - overflow);
    const int64_t blocks = queues_.waiting.rows() / options_.compression;
    if (blocks == 0) return;
    const Rows old = queues_.waiting.Sub(0, blocks * options_.compression);
    const Rows compressed = Compress(old, kept, report);
    const Rows q = layers::Held(request_, stack_.Project(n_, "w_q", queries));
    const Rows of_old = ContentAttention(q, NormalizedWithHeld(old));
    const Rows of_compressed = ContentAttention(q, NormalizedWithHeld(compressed));
    report->attention = LossOf(of_old, of_compressed, options_.mean_square());
    report->autoencoding = LossOf(old, Decode(compressed), options_.mean_square());
    queues_.waiting = queues_.waiting.Sub(old.rows(), queues_.waiting.rows() - old.rows());
    queues_.use.erase(queues_.use.begin(), queues_.use.begin() + old.rows());
    queues_.compressed.Append(layers::Held(request_, compressed));
    const int64_t dropped =
        std::max<int64_t>(queues_.compressed.rows() - options_.compressed_memory, 0);
    queues_.compressed = queues_.compressed.Sub(dropped, queues_.compressed.rows() - dropped);
  }

  Rows Compress(const Rows& old, const std::vector<int64_t>* kept, Report* report) const {
    const int64_t c = options_.compression;
    Rows y(old.rows() / c, old.channels());
    if (options_.function == Function::kMostUsed) {
      report->kept = Choose(y.rows(), old.rows(), kept);
      if (request_.stopped != nullptr) {
        std::vector<double> choice(report->kept.begin(), report->kept.end());
        request_.stopped->Choose(absl::MakeSpan(choice));
        std::copy(choice.begin(), choice.end(), report->kept.begin());
      }
      for (int64_t t = 0; t < y.rows(); ++t) {
        std::copy_n(old[report->kept[t]], old.channels(), y[t]);
      }
      return y;
    }
    if (options_.convolves()) return Convolve(old);
    for (int64_t t = 0; t < y.rows(); ++t) {
      for (int64_t k = 0; k < old.channels(); ++k) {
        double sum = 0, max = kNotSeen;
        for (int64_t i = 0; i < c; ++i) {
          sum += old[c * t + i][k];
          if (!(old[c * t + i][k] <= max)) max = old[c * t + i][k];  // a NaN stays
        }
        y[t][k] = options_.function == Function::kMean ? sum / static_cast<double>(c) : max;
      }
    }
    return y;
  }

  Rows Convolve(const Rows& old) const {
    const std::string prefix = layers::LayerPrefix(n_) + ConvolutionPrefix(options_);
    const int64_t c = options_.compression, d = old.channels();
    const std::vector<double> w = stack_.Vector(prefix + "w"), b = stack_.Vector(prefix + "b");
    Rows y = Rows(old.rows() / c, d).PlusEach(b);
    ForEachOf(stack_.pool(), y.rows(), [&](int64_t t) {
      for (int64_t i = 0; i < c; ++i) {
        const bool dilated = options_.function == Function::kDilatedConvolution;
        const int64_t j = dilated ? c * t + c - 1 - 2 * i : c * t + i;
        for (int64_t in = 0; j >= 0 && in < d; ++in) {
          AddTimes(old[j][in], &w[(i * d + in) * d], d, y[t]);
        }
      }
    });
    return y;
  }

  // Returns the most used of the first `candidates` waiting rows, or those that a layer chose,
  // where they are as good within the tolerance.
  std::vector<int64_t> Choose(int64_t count, int64_t candidates,
                              const std::vector<int64_t>* computed) const {
    std::vector<int64_t> rows(candidates);
    std::iota(rows.begin(), rows.end(), 0);
    std::stable_sort(rows.begin(), rows.end(),
                     [&](int64_t a, int64_t b) { return queues_.use[a] > queues_.use[b]; });
    rows.resize(count);
    std::sort(rows.begin(), rows.end());
    return computed != nullptr && MayKeep(*computed, count, candidates) ? *computed : rows;
  }

  bool MayKeep(const std::vector<int64_t>& kept, int64_t count, int64_t candidates) const {
    if (static_cast<int64_t>(kept.size()) != count) return false;
    std::vector<bool> stays(candidates);
    int64_t previous = -1;
    for (const int64_t row : kept) {
      if (row <= previous || row >= candidates) return false;
      stays[row] = true;
      previous = row;
    }
    double least_kept = std::numeric_limits<double>::infinity(), most_dropped = 0;
    for (int64_t row = 0; row < candidates; ++row) {
      (stays[row] ? least_kept : most_dropped) = stays[row]
                                                     ? std::min(least_kept, queues_.use[row])
                                                     : std::max(most_dropped, queues_.use[row]);
    }
    return least_kept * (1 + tolerance_) >= most_dropped * (1 - tolerance_);
  }

  Rows Decode(const Rows& compressed) const {
    const int64_t c = options_.compression, d = compressed.channels();
    Rows rows(compressed.rows() * c, d);
    if (!options_.convolves()) {
      for (int64_t j = 0; j < rows.rows(); ++j) std::copy_n(compressed[j / c], d, rows[j]);
      return rows;
    }
    const std::vector<double> w =
        stack_.Vector(layers::LayerPrefix(n_) + ConvolutionPrefix(options_) + "w");
    ForEachOf(stack_.pool(), rows.rows(), [&](int64_t j) {
      for (int64_t out = 0; out < d; ++out) {
        rows[j][out] = Dot(compressed[j / c], &w[(j % c * d + out) * d], d);
      }
    });
    return rows;
  }

  Rows ContentAttention(const Rows& q, const Rows& m) const {
    const Rows k = ProjectWithHeld("w_k", m), v = ProjectWithHeld("w_v", m);
    const int64_t e = stack_.sizes().head_dim;
    Rows context(q.rows(), q.channels());
    ForEachRow(stack_.pool(), 1, stack_.sizes().heads, q.rows(),
               [&](int64_t, int64_t h, int64_t p) {
                 std::vector<double> s(k.rows());
                 for (int64_t j = 0; j < k.rows(); ++j) {
                   s[j] = Dot(q[p] + h * e, k[j] + h * e, e) / std::sqrt(static_cast<double>(e));
                 }
                 const double max = *std::max_element(s.begin(), s.end());
                 double sum = 0;
                 for (int64_t j = 0; j < k.rows(); ++j) {
                   const double weight = std::exp(s[j] - max);
                   sum += weight;
                   AddTimes(weight, v[j] + h * e, e, context[p] + h * e);
                 }
                 for (int64_t c = 0; c < e; ++c) context[p][h * e + c] /= sum;
               });
    return context;
  }

  const layers::StackDefinition& stack_;
  const CompressiveOptions& options_;
  int64_t n_;
  double tolerance_;
  const DefinitionRequest& request_;
  Queues queues_;
};

// Returns by how much the attention that a layer computes may differ, as a share of itself. Scores
// are of order 10, and carry the rounding of queries and keys, which the scores' exponentials
// multiply by as much again: 32 roundings in 16 bits. In fp32 those are 2e-6; earlier layers add a
// few times 1e-5, see transformer_xl's test.
double UseTolerance(DType dtype) { return dtype == DType::kF32 ? 1e-4 : 32 * UnitRoundoff(dtype); }

// Returns the `kept` of a layer's run, for one batch row, segment and layer.
std::vector<int64_t> KeptBy(const Tensor& kept, int64_t b, int64_t s, int64_t n) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < kept.dim(3); ++i) {
    const int64_t row = *kept.view().At<int32_t>(b, s, n, i);
    if (row >= 0) rows.push_back(row);
  }
  return rows;
}

// Stores what a layer leaves in its queues, and the units of errors. The input of layer n, from 0,
// has passed n layers, whose errors add in quadrature, and a compression counts as one more; the
// bound of errors is that of one. The error of an attention weight is up to 8 times that bound: see
// UseTolerance.
void StoreQueues(const Queues& queues, const Problem& problem, int64_t layers, int64_t b, int64_t n,
                 NamedTensors* outputs) {
  const auto store = [&](const std::string& name, const Rows& rows, Shape shape, double size) {
    if (rows.rows() == 0) return;
    const std::string of_scale = name + ".scale";
    if (outputs->count(name) == 0) {
      (*outputs)[name] = Tensor(DType::kF64, shape);
      (*outputs)[of_scale] = Tensor(DType::kF64, shape);
    }
    for (int64_t t = 0; t < rows.rows(); ++t) {
      double* values = outputs->at(name).view().MutableAt<double>(b, n, t);
      double* scale = outputs->at(of_scale).view().MutableAt<double>(b, n, t);
      for (int64_t c = 0; c < rows.channels(); ++c) {
        values[c] = rows[t][c];
        scale[c] = size * std::abs(rows[t][c]);
      }
    }
  };
  const double below = static_cast<double>(n);
  const auto store_rows = [&](const char* name, const Rows& rows, double size) {
    store(name, rows, {problem.batch, layers, rows.rows(), rows.channels()}, size);
  };
  Rows tokens = queues.waiting;
  tokens.Append(queues.memory);
  store_rows("memories", tokens, std::sqrt(below));
  store_rows("compressed", queues.compressed, std::sqrt(below + 1));
  Rows use(static_cast<int64_t>(queues.use.size()), 1);
  std::copy(queues.use.begin(), queues.use.end(), use[0]);
  store("waiting_use", use, {problem.batch, layers, use.rows()}, 8 * std::sqrt(below + 1));
}

}  // namespace

absl::StatusOr<NamedTensors> DefineCompressive(const Problem& problem,
                                               const CompressiveOptions& options,
                                               const NamedTensors& parameters, const Inputs& inputs,
                                               absl::Span<const int64_t> segments,
                                               const DefinitionRequest& request) {
  TFB_RETURN_IF_ERROR(layers::CheckParameters(CompressiveParameters(problem, options), parameters));
  const int64_t tokens = std::accumulate(segments.begin(), segments.end(), int64_t{0});
  if (tokens != problem.query_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("segments have ", tokens, " tokens; allowed are ", problem.query_tokens));
  }
  const layers::StackDefinition stack(CompressiveSizes(problem, options), parameters,
                                      options.max_distance, request.pool);
  const int64_t count = static_cast<int64_t>(segments.size());
  const int64_t longest =
      segments.empty() ? 0 : *std::max_element(segments.begin(), segments.end());
  const ConstTensorView x = inputs.Get("x");
  const Tensor* computed_kept = nullptr;
  if (request.computed != nullptr && request.computed->count("kept") > 0) {
    computed_kept = &request.computed->at("kept");
  }

  NamedTensors outputs;
  for (const char* name : {"out", "context"}) outputs[name] = Tensor(DType::kF64, x.shape());
  const Shape of_losses = {problem.batch, count, options.layers};
  for (const char* name :
       {"attention_loss", "attention_loss.scale", "autoencoding_loss", "autoencoding_loss.scale"}) {
    outputs[name] = Tensor(DType::kF64, of_losses);
  }
  const bool chooses = options.function == Function::kMostUsed;
  if (chooses) {
    outputs["kept"] = Tensor(DType::kF64, {problem.batch, count, options.layers,
                                           MaxBlocksOf(std::max<int64_t>(longest, 1), options)});
    Fill(outputs["kept"].view(), -1);
  }
  for (int64_t b = 0; b < problem.batch; ++b) {
    // The loop goes layer by layer: a memory holds the output of the layer below in earlier
    // segments.
    const auto attention = [&](int64_t n, const Rows& h, const Rows&) {
      LayerMemory memory(stack, options, n, UseTolerance(problem.dtype), request,
                         FirstQueues(options, inputs, b, n, h.channels()));
      Rows result(0, h.channels());
      int64_t begin = 0;
      for (int64_t s = 0; s < count; ++s) {
        Report report;
        std::vector<int64_t> kept;
        if (computed_kept != nullptr) kept = KeptBy(*computed_kept, b, s, n);
        result.Append(memory.Attend(h.Sub(begin, segments[s]),
                                    computed_kept != nullptr ? &kept : nullptr, &report));
        begin += segments[s];
        const auto set = [&](const char* name, double value) {
          *outputs[name].view().MutableAt<double>(b, s, n) = value;
        };
        set("attention_loss", report.attention.loss);
        set("attention_loss.scale", report.attention.size);
        set("autoencoding_loss", report.autoencoding.loss);
        set("autoencoding_loss.scale", report.autoencoding.size);
        for (size_t i = 0; i < report.kept.size(); ++i) {
          *outputs["kept"].view().MutableAt<double>(b, s, n, i) =
              static_cast<double>(report.kept[i]);
        }
      }
      StoreQueues(memory.queues(), problem, options.layers, b, n, &outputs);
      return result;
    };
    Rows context(0, problem.model_dim());
    const Rows out = stack.Forward(layers::SequenceOf(x, b), options.pre_norm, attention, &context);
    layers::StoreSequence(out, b, outputs["out"].view());
    layers::StoreSequence(context, b, outputs["context"].view());
  }
  return outputs;
}

}  // namespace tfb::compressive
