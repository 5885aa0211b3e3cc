#include "adaptive/depth_adaptive/text_reader.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "Eigen/Core"
#include "absl/time/time.h"
#include "core/status.h"
#include "results/statistics.h"

namespace tfb::depth_adaptive {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Eigen::Map<const Matrix> MapOf(const Tensor& tensor, int64_t columns) {
  return Eigen::Map<const Matrix>(static_cast<const float*>(tensor.raw()),
                                  tensor.num_elements() / columns, columns);
}

}  // namespace

double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return absl::ToDoubleSeconds(absl::DurationFromTimespec(now));
}

double TimeSaved(const std::vector<double>& decided, const std::vector<double>& never) {
  return 1 - MedianOf(decided)->median / MedianOf(never)->median;
}

double TextReading::BitsPerByte() const {
  return std::accumulate(bits.begin(), bits.end(), 0.0) / static_cast<double>(bits.size());
}

double TextReading::Agreement(const TextReading& other) const {
  const int64_t same =
      std::inner_product(best.begin(), best.end(), other.best.begin(), int64_t{0}, std::plus<>(),
                         [](uint8_t a, uint8_t b) { return a == b ? 1 : 0; });
  return static_cast<double>(same) / static_cast<double>(best.size());
}

absl::StatusOr<std::unique_ptr<TextReader>> TextReader::Create(const Technique& technique,
                                                               const Options& options,
                                                               const TextSample& sample,
                                                               int64_t at_a_time,
                                                               ThreadPool* pool) {
  std::unique_ptr<TextReader> reader(new TextReader());
  TFB_ASSIGN_OR_RETURN(reader->model_, ShippedLanguageModel());
  const LanguageModel& model = *reader->model_;
  reader->pool_ = pool;
  reader->sample_ = sample;
  reader->text_ = model.Fit(
      Problem::SelfAttention(sample.sequences, 1, sample.skip + sample.tokens, 1, /*causal=*/true));
  TFB_RETURN_IF_ERROR(model.HeldOut(reader->text_, 0).status());
  Problem batch = reader->text_;
  batch.query_tokens = batch.kv_tokens = sample.tokens;
  batch.batch = std::min(at_a_time, sample.sequences);
  TFB_ASSIGN_OR_RETURN(reader->layer_,
                       technique.Create(batch, model.FitOptions(technique.info(), options),
                                        Device::kCpu, /*seed=*/1));
  Layer& layer = *reader->layer_;
  TFB_ASSIGN_OR_RETURN(NamedTensors parameters, model.ParametersOf(layer));
  TFB_RETURN_IF_ERROR(layer.SetParameters(std::move(parameters)));
  TFB_ASSIGN_OR_RETURN(
      NamedTensors inputs,
      model.MakeInputs(
          {{"x", {sample.sequences, sample.skip + sample.tokens, model.model_dim()}, DType::kF32}},
          reader->text_));
  TFB_ASSIGN_OR_RETURN(reader->x_, Tensor::Allocate(DType::kF32, {sample.sequences, sample.tokens,
                                                                  model.model_dim()}));
  CopyElements(Slice(std::as_const(inputs.at("x")).view(), 1, sample.skip, sample.tokens),
               reader->x_.view());
  TFB_ASSIGN_OR_RETURN(
      reader->out_, Tensor::Allocate(DType::kF32, {batch.batch, sample.tokens, model.model_dim()}));
  reader->never_ = Tensor(DType::kI32, {batch.batch, sample.tokens});
  Fill(reader->never_.view(), std::numeric_limits<int32_t>::max());
  TFB_ASSIGN_OR_RETURN(
      reader->workspace_,
      Tensor::Allocate(DType::kU8, {static_cast<int64_t>(layer.workspace_bytes(pool->threads()))}));
  reader->execution_.pool = pool;
  reader->execution_.workspace =
      absl::MakeSpan(static_cast<std::byte*>(reader->workspace_.raw()), reader->workspace_.bytes());
  TFB_RETURN_IF_ERROR(
      layer.Setup({{"x", Slice(reader->x_.view(), 0, 0, batch.batch)}}, reader->execution_));
  return reader;
}

absl::Status TextReader::ReadBatch(int64_t first, const ConstTensorView& exits,
                                   const Execution& execution) {
  Inputs inputs = {{"x", Slice(std::as_const(x_).view(), 0, first, sequences_of_batch())}};
  if (!exits.empty()) inputs.Set("exits", exits);
  return layer_->Run(inputs, {{"out", out_.view()}}, execution);
}

absl::StatusOr<TextReading> TextReader::Read(const ConstTensorView& exits) {
  TextReading reading;
  reading.bits.resize(sample_.sequences * sample_.tokens);
  reading.best.resize(reading.bits.size());
  reading.sure.resize(reading.bits.size());
  reading.next.resize(reading.bits.size());
  double read = 0;
  for (int64_t next = 0; next < sample_.sequences; next += sequences_of_batch()) {
    // The last batch is as long as the others, and may begin among sequences that were read.
    const int64_t first = std::min(next, sample_.sequences - sequences_of_batch());
    const ConstTensorView of_batch =
        exits.empty() ? exits : Slice(exits, 0, first, sequences_of_batch());
    TFB_RETURN_IF_ERROR(ReadBatch(first, of_batch, execution_));
    Score(first, &reading);
    const std::map<std::string, double> statistics = layer_->statistics();
    reading.layers += statistics.at("mean_layers");
    reading.flops_saved += statistics.at("flops_saved");
    ++read;
  }
  reading.layers /= read;
  reading.flops_saved /= read;
  return reading;
}

void TextReader::Score(int64_t first, TextReading* reading) const {
  const Tensor& output = model_->parameters().at("output");
  const auto out = MapOf(out_, model_->model_dim());
  const auto matrix = MapOf(output, model_->model_dim());
  const int64_t tokens = sample_.tokens;
  pool_->ParallelFor(sequences_of_batch(), [&](int64_t b, int) {
    const absl::string_view bytes = model_->HeldOut(text_, first + b).value().substr(sample_.skip);
    const Matrix logits = out.middleRows(b * tokens, tokens) * matrix.transpose();
    for (int64_t t = 0; t < tokens; ++t) {
      int best;
      const float largest = logits.row(t).maxCoeff(&best);
      const double sum = (logits.row(t).array() - largest).exp().sum();
      const double nats = std::log(sum) - (logits(t, static_cast<uint8_t>(bytes[t + 1])) - largest);
      const int64_t place = (first + b) * tokens + t;
      reading->bits[place] = static_cast<float>(nats / std::log(2.0));
      reading->best[place] = static_cast<uint8_t>(best);
      reading->sure[place] = static_cast<float>(1 / sum);
      reading->next[place] = static_cast<uint8_t>(bytes[t + 1]);
    }
  });
}

absl::StatusOr<double> TextReader::TimeReading(Leave leave) {
  Execution execution = execution_;
  execution.pool = &single_;
  const double begin = ThreadSeconds();
  TFB_RETURN_IF_ERROR(ReadBatch(0, ExitsOf(leave), execution));
  return ThreadSeconds() - begin;
}

absl::StatusOr<double> TextReader::TimeDecoding(Leave leave) {
  auto* stream = static_cast<StreamingLayer*>(layer_.get());
  TFB_RETURN_IF_ERROR(stream->Reset());
  Execution execution = execution_;
  execution.pool = &single_;
  const ConstTensorView x = Slice(std::as_const(x_).view(), 0, 0, sequences_of_batch());
  const ConstTensorView exits = ExitsOf(leave);
  const double begin = ThreadSeconds();
  for (int64_t t = 0; t < sample_.tokens; ++t) {
    Inputs inputs = {{"x", Slice(x, 1, t, 1)}};
    if (!exits.empty()) inputs.Set("exits", Slice(exits, 1, t, 1));
    TFB_RETURN_IF_ERROR(stream->Append(inputs, {{"out", Slice(out_.view(), 1, t, 1)}}, execution));
  }
  return ThreadSeconds() - begin;
}

}  // namespace tfb::depth_adaptive
