// Tests Transformer-XL against its definition, streamed in every way, and against the outputs of
// the authors' model in Hugging Face's port.
//
// Tolerance. A sublayer (attention or feed-forward, with its normalisation) has the bound of fp32
// attention, 2e-5 of the largest output: a convex combination of values, or products of up to a few
// hundred terms. Each passes errors of its input on, multiplied by about 1 (post-norm divides by
// the deviation of a sum of two states of deviation 1, pre-norm adds to the state), and roundings
// are independent, so the 2 layers' sublayers add in quadrature. Measured at widths 32 and 128 and
// 1 to 6 layers: 0.7e-6 to 4.4e-6 for outputs up to 10, growing as the square root of the layers.
#include "memory/transformer_xl/transformer_xl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "core/allocations.h"
#include "core/backward_testing.h"
#include "core/cuda/mirror.h"
#include "core/cuda/runtime.h"
#include "core/layers/attention/relative_attention.h"
#include "core/layers/stack/segmented_layer.h"
#include "core/layers/stack/stack_definition.h"
#include "core/random.h"
#include "core/testing.h"
#include "gtest/gtest.h"
#include "memory/transformer_xl/stack_testing.h"

namespace tfb::transformer_xl {
namespace {

std::unique_ptr<StreamingLayer> MakeLayer(const Problem& problem, const Options& options,
                                          Device device = Device::kCpu) {
  auto layer = TransformerXl().Create(problem, options, device, 1);
  EXPECT_TRUE(layer.ok()) << layer.status();
  return std::unique_ptr<StreamingLayer>(static_cast<StreamingLayer*>(layer->release()));
}

// Provides threads and a workspace of exactly the size that the layer asks for, full of NaN.
class Machine {
 public:
  Machine(const Layer& layer, int threads)
      : pool_(threads),
        workspace_(DType::kU8, {static_cast<int64_t>(layer.workspace_bytes(threads)) + 64}) {
    std::memset(workspace_.raw(), 0xFF, workspace_.bytes());
    execution_.pool = &pool_;
    execution_.workspace =
        absl::MakeSpan(static_cast<std::byte*>(workspace_.raw()), workspace_.bytes() - 64);
  }
  const Execution& execution() const { return execution_; }
  bool guard_intact() const {
    const absl::Span<const uint8_t> bytes = workspace_.span<uint8_t>();
    return std::all_of(bytes.end() - 64, bytes.end(), [](uint8_t byte) { return byte == 0xFF; });
  }

 private:
  ThreadPool pool_;
  Tensor workspace_;
  Execution execution_;
};

std::vector<int64_t> Repeat(int64_t segment, int64_t tokens) {
  std::vector<int64_t> split(tokens / segment, segment);
  if (tokens % segment != 0) split.push_back(tokens % segment);
  return split;
}
std::vector<int64_t> Begins(const std::vector<int64_t>& split) {
  std::vector<int64_t> begins(split.size());
  std::exclusive_scan(split.begin(), split.end(), begins.begin(), int64_t{0});
  return begins;
}

// Everything that a case needs: one layer, its parameters, one input.
class Case {
 public:
  Case(const Problem& problem, const Options& options, Device device = Device::kCpu)
      : problem_(problem),
        options_(ParseOptions<TransformerXlOptions>(options).value()),
        device_(device),
        layer_(MakeLayer(problem, options, device)),
        parameters_(PerturbedParameters(*layer_)),
        x_(RandomHidden(problem)) {
    EXPECT_TRUE(layer_->SetParameters(parameters_).ok());
  }

  StreamingLayer& layer() { return *layer_; }
  NamedTensors& parameters() { return parameters_; }
  Tensor& x() { return x_; }
  const TransformerXlOptions& options() const { return options_; }

  Tensor Run(int threads = 1, const char* output = "out") {
    auto outputs = device_ == Device::kCpu ? RunLayer(*layer_, {{"x", x_.view()}}, threads)
                                           : RunCudaLayer(*layer_, device_, {{"x", x_.view()}});
    EXPECT_TRUE(outputs.ok()) << outputs.status();
    return std::move((*outputs)[output]);
  }
  // Returns the output of the sequence appended in segments of the given lengths.
  Tensor Stream(const std::vector<int64_t>& split, int threads = 1, const char* output = "out") {
    NamedTensors written;
    for (const char* name : {"out", "context"}) {
      written[name] = Tensor(problem_.dtype, x_.shape());
      Fill(written[name].view(), NAN);
    }
    if (device_ != Device::kCpu) {
      StreamOnDevice(split, &written);
    } else {
      Machine machine(*layer_, threads);
      Append(split, x_.view(), MutableViewsOf(written), machine.execution());
      EXPECT_TRUE(machine.guard_intact());
    }
    return std::move(written[output]);
  }
  Tensor Define(const std::vector<int64_t>& split, const char* output = "out") const {
    auto out = DefineTransformerXl(problem_, options_, parameters_, x_.view(), Begins(split));
    EXPECT_TRUE(out.ok()) << out.status();
    return std::move(out->at(output));
  }
  void ExpectStreamIsDefined(const std::vector<int64_t>& split, int threads = 1) {
    const Tensor expected = Define(split);
    EXPECT_LE(MaxDifference(Stream(split, threads).view(), expected.view()),
              StackBound(expected.view(), options_.layers));
  }

 private:
  void Append(const std::vector<int64_t>& split, const ConstTensorView& x, const Outputs& whole,
              const Execution& execution) {
    const absl::Status setup = layer_->Setup({{"x", x}}, execution);
    EXPECT_TRUE(setup.ok()) << setup;
    int64_t begin = 0;
    for (const int64_t tokens : split) {
      Outputs outputs;
      for (const auto& [name, view] : whole) outputs.Set(name, Slice(view, 1, begin, tokens));
      const absl::Status status =
          layer_->Append({{"x", Slice(x, 1, begin, tokens)}}, outputs, execution);
      EXPECT_TRUE(status.ok()) << status;
      begin += tokens;
    }
  }
  void StreamOnDevice(const std::vector<int64_t>& split, NamedTensors* written) {
    CudaRuntime* runtime = CudaRuntime::For(device_).value();
    DeviceMirror mirror(runtime);
    const DeviceBuffer workspace = runtime->Allocate(layer_->workspace_bytes(1)).value();
    ThreadPool pool(1);
    Execution execution;
    execution.pool = &pool;
    execution.workspace = absl::MakeSpan(workspace.As<std::byte>(), workspace.bytes());
    Outputs outputs;
    for (auto& [name, tensor] : *written) {
      outputs.Set(name, mirror.CopyForWriting(tensor.view()).value());
    }
    Append(split, mirror.Copy(x_.view()).value(), outputs, execution);
    EXPECT_TRUE(mirror.CopyBack().ok());
  }

  Problem problem_;
  TransformerXlOptions options_;
  Device device_;
  std::unique_ptr<StreamingLayer> layer_;
  NamedTensors parameters_;
  Tensor x_;
};

// ---- Streaming and the definition ----

TEST(TransformerXl, RunEqualsTheDefinitionWithEveryOption) {
  const Problem problem = CausalProblem(2, 3, 150, 8);
  for (const Options& options :
       std::vector<Options>{{},
                            {{"layers", "3"}, {"segment", "32"}, {"memory", "50"}},
                            {{"segment", "32"}, {"memory", "50"}, {"same_length", "true"}},
                            {{"segment", "40"}, {"memory", "100"}, {"max_distance", "30"}},
                            {{"segment", "40"}, {"memory", "100"}, {"max_distance", "1000"}},
                            {{"segment", "64"}, {"memory", "64"}, {"feed_forward_dim", "37"}},
                            {{"segment", "64"}, {"memory", "64"}, {"pre_norm", "true"}},
                            {{"segment", "64"}, {"memory", "64"}, {"final_norm", "true"}},
                            {{"segment", "64"}, {"pre_norm", "true"}, {"final_norm", "true"}},
                            {{"segment", "64"}, {"memory", "64"}, {"share_biases", "false"}},
                            {{"segment", "100"}, {"memory", "0"}},
                            {{"segment", "32"}, {"memory", "90"}, {"span_ramp", "20"}},
                            {{"segment", "7"}, {"memory", "1"}, {"same_length", "true"}},
                            {{"segment", "1"}, {"memory", "20"}},
                            {{"segment", "1000"}, {"memory", "1000"}}}) {
    Case test(problem, options);
    SCOPED_TRACE(ToString(options));
    const Tensor expected = test.Define(Repeat(test.options().segment, 150));
    EXPECT_LE(MaxDifference(test.Run(2).view(), expected.view()),
              StackBound(expected.view(), test.options().layers));
  }
}

// The cases cover the options, and the edges of tiles and of the ring. They are few and small,
// since the simulator is slow and the conformance test runs it too.
TEST(TransformerXl, OnDevicesRunAndStreamsEqualTheDefinition) {
  const Problem problem = CausalProblem(2, 2, 100, 8);
  for (const Options& options :
       std::vector<Options>{{{"segment", "70"}, {"memory", "50"}},
                            {{"segment", "70"}, {"memory", "50"}, {"same_length", "true"}},
                            {{"segment", "40"}, {"memory", "100"}, {"max_distance", "30"}},
                            {{"segment", "40"}, {"memory", "90"}, {"span_ramp", "9.5"}},
                            {{"segment", "66"}, {"memory", "0"}, {"pre_norm", "true"}}}) {
    SCOPED_TRACE(ToString(options));
    Case test(problem, options, KernelDevice());
    const std::vector<int64_t> segments = Repeat(test.options().segment, 100);
    const Tensor expected = test.Define(segments);
    EXPECT_LE(MaxDifference(test.Run().view(), expected.view()), StackBound(expected.view(), 2));
    const std::vector<int64_t> odd = {1, test.options().segment - 1, 26,
                                      74 - test.options().segment};
    test.ExpectStreamIsDefined(odd);
  }
}

TEST(TransformerXl, EverySplitOfAStreamEqualsTheDefinitionWithSameLength) {
  const Problem problem = CausalProblem(1, 2, 200, 16);
  for (const char* memory : {"1", "5", "64", "100", "150"}) {
    Case test(problem, {{"memory", memory}, {"same_length", "true"}, {"segment", "130"}});
    SCOPED_TRACE(memory);
    const Tensor expected = test.Define({200});
    for (const std::vector<int64_t>& split :
         std::vector<std::vector<int64_t>>{Repeat(1, 200),
                                           Repeat(7, 200),
                                           Repeat(64, 200),
                                           Repeat(128, 200),
                                           {1, 63, 65, 64, 2, 5},
                                           {130, 70},
                                           {3, 130, 67}}) {
      EXPECT_LE(MaxDifference(test.Stream(split).view(), expected.view()),
                StackBound(expected.view(), 2));
    }
  }
}

TEST(TransformerXl, WithoutSameLengthTheSegmentsThatWereAppendedDecideTheMask) {
  const Problem problem = CausalProblem(1, 2, 200, 16);
  for (const char* memory : {"0", "1", "40", "64", "100", "300"}) {
    Case test(problem, {{"memory", memory}, {"segment", "130"}});
    SCOPED_TRACE(memory);
    for (const std::vector<int64_t>& split :
         std::vector<std::vector<int64_t>>{Repeat(1, 200),
                                           Repeat(7, 200),
                                           Repeat(64, 200),
                                           Repeat(128, 200),
                                           {1, 63, 65, 64, 2, 5},
                                           {130, 70},
                                           {3, 130, 67}}) {
      test.ExpectStreamIsDefined(split);
    }
  }
}

TEST(TransformerXl, WideModelsAndBatchesEqualTheDefinition) {
  struct Shape {
    int64_t batch, heads, head_dim;
  };
  for (const Shape& shape :
       std::vector<Shape>{{3, 1, 16}, {1, 6, 16}, {3, 1, 64}, {1, 6, 64}, {1, 1, 7}}) {
    Case test(CausalProblem(shape.batch, shape.heads, 90, shape.head_dim),
              {{"segment", "32"}, {"memory", "40"}});
    SCOPED_TRACE(testing::Message() << "batch " << shape.batch << ", " << shape.heads
                                    << " heads of " << shape.head_dim);
    test.ExpectStreamIsDefined(Repeat(32, 90), 2);
  }
}

TEST(TransformerXl, AnySegmentLengthGivesTheSameWithSameLength) {
  const Problem problem = CausalProblem(1, 2, 150, 16);
  Case reference(problem, {{"memory", "40"}, {"same_length", "true"}, {"segment", "150"}});
  const Tensor expected = reference.Run();
  for (const char* segment : {"1", "10", "64", "100"}) {
    Case test(problem, {{"memory", "40"}, {"same_length", "true"}, {"segment", segment}});
    EXPECT_LE(MaxDifference(test.Run().view(), expected.view()),
              2 * StackBound(expected.view(), 2));
  }
}

TEST(TransformerXl, WithoutMemoryEverySegmentIsASequenceOfItsOwn) {
  Case all(CausalProblem(2, 2, 96, 16), {{"memory", "0"}, {"segment", "32"}});
  const Tensor out = all.Run();
  for (int64_t begin = 0; begin < 96; begin += 32) {
    Case one(CausalProblem(2, 2, 32, 16), {{"memory", "0"}, {"segment", "32"}});
    CopyElements(Slice(all.x().view(), 1, begin, 32), one.x().view());
    EXPECT_EQ(MaxDifference(one.Run().view(), Slice(out.view(), 1, begin, 32)), 0) << begin;
  }
}

TEST(TransformerXl, TheCounterpartSeesTheWholePastWithTheSameParameters) {
  const Problem problem = CausalProblem(1, 2, 100, 16);
  const TransformerXl technique;
  const Options options = {
      {"memory", "16"}, {"segment", "16"}, {"same_length", "true"}, {"layers", "3"}};
  const TechniqueSpec counterpart = technique.Counterpart(problem, options).value();
  EXPECT_EQ(ToString(counterpart),
            "transformer_xl:feed_forward_dim=0,final_norm=false,given_memory=0,layers=3,"
            "max_distance=0,memory=100,pre_norm=false,same_length=false,segment=100,"
            "share_biases=true,span_ramp=0");
  Case small(problem, options), whole(problem, counterpart.options);
  ASSERT_TRUE(whole.layer().SetParameters(small.parameters()).ok());
  // With as much memory as tokens the network is the same, whatever the segments.
  Case enough(problem, {{"memory", "100"}, {"segment", "16"}, {"layers", "3"}});
  const Tensor expected = whole.Run();
  EXPECT_LE(MaxDifference(enough.Run().view(), expected.view()),
            2 * StackBound(expected.view(), 3));
}

TEST(TransformerXl, TheCounterpartKeepsTheOptionsThatHideNothing) {
  ExpectCounterpartSeesAllTokens(TransformerXl(),
                                 {{"same_length", "true"}, {"span_ramp", "8"}, {"layers", "3"}},
                                 {{"same_length", "false"}, {"span_ramp", "0"}});
}

TEST(TransformerXl, SpansBeyondTheMemoryChangeNothingAndOneOfNoKeysLeavesTheHeadOut) {
  const Problem problem = CausalProblem(1, 2, 100, 16);
  const Options options = {{"memory", "30"}, {"segment", "20"}, {"layers", "1"}};
  Options spans = options;
  spans["span_ramp"] = "8";
  Case plain(problem, options), spanned(problem, spans);
  NamedTensors& parameters = spanned.parameters();
  for (auto& [name, tensor] : plain.parameters()) parameters[name] = tensor.Clone();
  Fill(parameters.at("layer0.span").view(), 50);
  ASSERT_TRUE(spanned.layer().SetParameters(parameters).ok());
  const Tensor expected = plain.Run();
  EXPECT_LE(MaxDifference(spanned.Run().view(), expected.view()), StackBound(expected.view(), 1));

  // The ramp of head 1 ends at the token itself: its rows of W_o do not matter.
  parameters.at("layer0.span").span<float>()[1] = -8;
  ASSERT_TRUE(spanned.layer().SetParameters(parameters).ok());
  const Tensor without = spanned.Run();
  const auto w_o = parameters.at("layer0.w_o").span<float>();
  std::fill(w_o.begin() + 16 * 32, w_o.end(), 7.0f);
  ASSERT_TRUE(spanned.layer().SetParameters(parameters).ok());
  EXPECT_EQ(MaxDifference(spanned.Run().view(), without.view()), 0);
  EXPECT_GT(MaxDifference(without.view(), expected.view()), 0.1);
}

TEST(TransformerXl, AStreamMayBeLongerThanTheProblemAndLeaveOldTokensBehind) {
  // Two streams differ up to tokens that are out of reach: layers * (memory - 1) = 126.
  Case test(CausalProblem(1, 2, 64, 16),
            {{"memory", "64"}, {"same_length", "true"}, {"segment", "50"}});
  const Problem longer = CausalProblem(1, 2, 700, 16);
  Tensor a = RandomHidden(longer, 4), b = RandomHidden(longer, 5);
  CopyElements(Slice(a.view(), 1, 500, 200), Slice(b.view(), 1, 500, 200));
  Machine machine(test.layer(), 1);
  const auto stream = [&](const Tensor& x) {
    EXPECT_TRUE(test.layer().Setup({{"x", test.x().view()}}, machine.execution()).ok());
    Tensor out(DType::kF32, x.shape());
    for (int64_t t = 0; t < 700; t += 50) {
      EXPECT_TRUE(test.layer()
                      .Append({{"x", Slice(x.view(), 1, t, 50)}},
                              {{"out", Slice(out.view(), 1, t, 50)}}, machine.execution())
                      .ok());
    }
    return out;
  };
  const Tensor from_a = stream(a), from_b = stream(b);
  EXPECT_EQ(MaxDifference(Slice(from_a.view(), 1, 626, 74), Slice(from_b.view(), 1, 626, 74)), 0);
  EXPECT_GT(MaxDifference(Slice(from_a.view(), 1, 560, 1), Slice(from_b.view(), 1, 560, 1)), 1e-3);
}

TEST(TransformerXl, ACommonOffsetOfAllPositionsChangesNothing) {
  // The same 60 tokens come at the start of a stream, and after 1, 64 and 101 others that are out
  // of reach because memory begins anew: with memory 0 a segment sees only itself.
  Case test(CausalProblem(1, 2, 60, 16), {{"memory", "0"}, {"segment", "60"}});
  const Tensor first = test.Stream({60});
  for (const std::vector<int64_t>& prefix :
       std::vector<std::vector<int64_t>>{{1}, {60, 4}, {60, 41}}) {
    Machine machine(test.layer(), 1);
    EXPECT_TRUE(test.layer().Setup({{"x", test.x().view()}}, machine.execution()).ok());
    Tensor out(DType::kF32, test.x().shape());
    for (const int64_t tokens : prefix) {
      EXPECT_TRUE(test.layer()
                      .Append({{"x", Slice(test.x().view(), 1, 0, tokens)}},
                              {{"out", Slice(out.view(), 1, 0, tokens)}}, machine.execution())
                      .ok());
    }
    EXPECT_TRUE(test.layer()
                    .Append({{"x", test.x().view()}}, {{"out", out.view()}}, machine.execution())
                    .ok());
    EXPECT_LE(MaxDifference(out.view(), first.view()), 2 * StackBound(first.view(), 2));
  }
}

TEST(TransformerXl, ResetBeginsAnew) {
  Case test(CausalProblem(1, 2, 80, 16), {{"memory", "32"}, {"segment", "32"}});
  const Tensor first = test.Run();
  Machine machine(test.layer(), 1);
  Tensor again(DType::kF32, first.shape());
  ASSERT_TRUE(test.layer().Reset().ok());
  for (int64_t t = 0; t < 80; t += 32) {
    const int64_t tokens = std::min<int64_t>(32, 80 - t);
    ASSERT_TRUE(test.layer()
                    .Append({{"x", Slice(test.x().view(), 1, t, tokens)}},
                            {{"out", Slice(again.view(), 1, t, tokens)}}, machine.execution())
                    .ok());
  }
  EXPECT_EQ(MaxDifference(first.view(), again.view()), 0);
}

// ---- Memories of an earlier run ----

TEST(TransformerXl, TwoRunsWithTheMemoriesHandedOverAreOne) {
  for (const Device device : TestedDevices()) {
    for (const Options& more :
         std::vector<Options>{{{"memory", "20"}},
                              {{"memory", "37"}, {"pre_norm", "true"}},
                              {{"memory", "200"}, {"pre_norm", "true"}, {"share_biases", "false"}},
                              {{"memory", "20"}, {"same_length", "true"}, {"max_distance", "9"}},
                              {{"memory", "30"}, {"span_ramp", "8"}, {"layers", "3"}}}) {
      Options options = more;
      options["segment"] = "16";
      options.insert({"layers", "2"});
      SCOPED_TRACE(ToString(options));
      for (const int64_t first : {16, 48}) {
        ExpectTwoRunsAreOne(TransformerXl(), CausalProblem(2, 2, 75, 8), options, first, device);
      }
      // The second run leaves memories that are partly given.
      ExpectTwoRunsAreOne(TransformerXl(), CausalProblem(1, 2, 51, 8), options, 48, device);
    }
  }
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    ExpectTwoRunsAreOne(TransformerXl(), CausalProblem(1, 2, 75, 16, dtype),
                        {{"memory", "20"}, {"segment", "16"}, {"layers", "2"}}, 32);
  }
}

TEST(TransformerXl, MemoriesAreWhatWentIntoEachLayerForTheLastTokens) {
  const Problem problem = CausalProblem(2, 2, 40, 8);
  for (const int64_t memory : {1, 7, 16, 40, 100}) {
    Case xl(problem, {{"memory", std::to_string(memory)}, {"segment", "16"}, {"layers", "1"}});
    const Tensor memories = xl.Run(1, "memories");
    const int64_t kept = std::min<int64_t>(memory, 40);
    ASSERT_EQ(memories.shape(), (Shape{2, 1, kept, 16}));
    EXPECT_EQ(MaxDifference(layers::OfLayer(ConstTensorView(memories.view()), 0),
                            Slice(xl.x().view(), 1, 40 - kept, kept)),
              0);
  }
  const auto outputs = TransformerXl().OutputSpecs(problem, {{"memory", "0"}});
  for (const TensorSpec& spec : *outputs) EXPECT_NE(spec.name, "memories");
}

TEST(TransformerXl, AStreamReadsTheMemoriesWithItsFirstSegment) {
  const Problem problem = CausalProblem(2, 2, 40, 8);
  const Options options = {{"memory", "30"}, {"given_memory", "25"}, {"segment", "16"}};
  Case xl(problem, options);
  Tensor memories(DType::kF32, {2, 2, 25, 16});
  FillNormal(&memories, 9, "memories");
  const auto run = RunLayer(xl.layer(), {{"x", xl.x().view()}, {"memories", memories.view()}}, 1);
  ASSERT_TRUE(run.ok()) << run.status();
  const Tensor final_memories = run->at("memories").Clone();
  Machine machine(xl.layer(), 1);
  for (int repeat = 0; repeat < 2; ++repeat) {
    ASSERT_TRUE(xl.layer().Reset().ok());
    Tensor out(DType::kF32, xl.x().shape());
    for (const int64_t begin : {0, 16, 32}) {
      const int64_t count = std::min<int64_t>(16, 40 - begin);
      Inputs segment = {{"x", Slice(xl.x().view(), 1, begin, count)}};
      const Outputs written = {{"out", Slice(out.view(), 1, begin, count)}};
      if (begin == 0) {
        const absl::Status without = xl.layer().Append(segment, written, machine.execution());
        EXPECT_EQ(without.message(), "input memories is missing; the first segment has need of it");
        segment.Set("memories", memories.view());
      }
      const absl::Status status = xl.layer().Append(segment, written, machine.execution());
      ASSERT_TRUE(status.ok()) << status;
    }
    EXPECT_EQ(MaxDifference(out.view(), run->at("out").view()), 0);
  }
  EXPECT_TRUE(machine.guard_intact());
  // A stream leaves the outputs of the Run before it alone.
  EXPECT_EQ(MaxDifference(run->at("memories").view(), final_memories.view()), 0);
}

TEST(TransformerXl, CostsCountTheGivenKeys) {
  // Tokens of the first segment see 3 given ones and 1, ..., 4 of the segment; those of the second,
  // after 4 tokens, 3 and 1, 2.
  const Problem problem = CausalProblem(1, 2, 6, 4);
  const auto layer = MakeLayer(
      problem, {{"segment", "4"}, {"memory", "3"}, {"given_memory", "3"}, {"layers", "1"}});
  EXPECT_EQ(layer->statistics().at("keys_per_token"), (4 + 5 + 6 + 7 + 4 + 5) / 6.0);
  EXPECT_EQ(layer->statistics().at("reach_tokens"),
            4);  // tokens 1, 2, 3 and the one before the last
}

TEST(TransformerXl, TheContextIsWhatTheLastFeedForwardNetworkReads) {
  // Without its feed-forward network the last layer gives LN(context), or g with pre_norm, whose
  // normalisation is the context.
  for (const Device device : TestedDevices()) {
    for (const char* pre_norm : {"false", "true"}) {
      SCOPED_TRACE(testing::Message() << Name(device) << ", pre_norm=" << pre_norm);
      Case test(CausalProblem(2, 2, 70, 8),
                {{"memory", "20"}, {"segment", "32"}, {"pre_norm", pre_norm}}, device);
      for (const char* name : {"layer1.ff.w2", "layer1.ff.b2"}) {
        Fill(test.parameters()[name].view(), 0);
      }
      for (const char* name : {"layer1.ff_norm.gamma", "layer1.ff_norm.beta"}) {
        Fill(test.parameters()[name].view(), std::strstr(name, "gamma") != nullptr ? 1 : 0);
      }
      ASSERT_TRUE(test.layer().SetParameters(test.parameters()).ok());
      const Tensor out = test.Run(), context = test.Run(1, "context");
      const bool pre = std::strcmp(pre_norm, "true") == 0;
      const ConstTensorView from = pre ? out.view() : context.view();
      const ConstTensorView normalized = pre ? context.view() : out.view();
      for (int64_t b = 0; b < 2; ++b) {
        const layers::Rows expected = layers::SequenceOf(from, b).Normalized(
            std::vector<double>(16, 1), std::vector<double>(16, 0));
        for (int64_t t = 0; t < 70; ++t) {
          for (int64_t c = 0; c < 16; ++c) {
            ASSERT_NEAR(*normalized.At<float>(b, t, c), expected[t][c], 2e-5) << t;
          }
        }
      }
      const Tensor defined = test.Define(Repeat(32, 70), "context");
      EXPECT_LE(MaxDifference(context.view(), defined.view()), StackBound(defined.view(), 2));
      EXPECT_EQ(MaxDifference(test.Stream(Repeat(32, 70), 1, "context").view(), context.view()), 0);
    }
  }
}

// ---- Properties ----

TEST(TransformerXl, TheFinalNormIsANormOfWhatTheStackWritesWithoutIt) {
  for (const Device device : TestedDevices()) {
    for (const char* pre_norm : {"false", "true"}) {
      SCOPED_TRACE(testing::Message() << Name(device) << ", pre_norm=" << pre_norm);
      const Problem problem = CausalProblem(2, 2, 70, 8);
      Options options = {{"memory", "20"}, {"segment", "32"}, {"pre_norm", pre_norm}};
      Case without(problem, options, device);
      options["final_norm"] = "true";
      Case with(problem, options, device);
      const Tensor h = without.Run(), out = with.Run();
      const Tensor& gamma = with.parameters().at("final_norm.gamma");
      const Tensor& beta = with.parameters().at("final_norm.beta");
      const std::vector<double> scale(gamma.span<float>().begin(), gamma.span<float>().end());
      const std::vector<double> shift(beta.span<float>().begin(), beta.span<float>().end());
      for (int64_t b = 0; b < 2; ++b) {
        const layers::Rows expected = layers::SequenceOf(h.view(), b).Normalized(scale, shift);
        for (int64_t t = 0; t < 70; ++t) {
          for (int64_t c = 0; c < 16; ++c) {
            ASSERT_NEAR(*out.view().At<float>(b, t, c), expected[t][c], 2e-5) << t;
          }
        }
      }
      EXPECT_EQ(MaxDifference(with.Stream(Repeat(32, 70)).view(), out.view()), 0);
      EXPECT_EQ(MaxDifference(with.Run(1, "context").view(), without.Run(1, "context").view()), 0);
    }
  }
}

TEST(TransformerXl, LaterTokensDoNotChangeEarlierOutputs) {
  Case test(CausalProblem(1, 2, 150, 16), {{"memory", "40"}, {"segment", "50"}, {"layers", "3"}});
  const Tensor before = test.Run();
  for (const int64_t changed : {1, 49, 50, 64, 149}) {
    Case other(CausalProblem(1, 2, 150, 16),
               {{"memory", "40"}, {"segment", "50"}, {"layers", "3"}});
    Fill(Slice(other.x().view(), 1, changed, 150 - changed), -3);
    const Tensor after = other.Run();
    EXPECT_EQ(
        MaxDifference(Slice(before.view(), 1, 0, changed), Slice(after.view(), 1, 0, changed)), 0);
    EXPECT_GT(
        MaxDifference(Slice(before.view(), 1, changed, 1), Slice(after.view(), 1, changed, 1)), 0);
  }
}

TEST(TransformerXl, ANanReachesTheTokensThatSeeItAndNoOthers) {
  // Through two layers of 20 keys, token 30 is seen by tokens 30 to 30 + 2 * 19.
  Case test(CausalProblem(1, 2, 150, 16),
            {{"memory", "20"}, {"segment", "64"}, {"same_length", "true"}});
  test.x().view().Set(test.x().view().Offset(0, 30, 5), NAN);
  const Tensor out = test.Run();
  for (int64_t t = 0; t < 150; ++t) {
    EXPECT_EQ(std::isnan(*out.view().At<float>(0, t, 0)), t >= 30 && t <= 68) << t;
  }
}

TEST(TransformerXl, OneThreadAndTwoGiveTheSameBits) {
  for (const char* pre_norm : {"false", "true"}) {
    Case test(CausalProblem(2, 3, 150, 16),
              {{"memory", "70"}, {"segment", "60"}, {"pre_norm", pre_norm}});
    EXPECT_EQ(MaxDifference(test.Run(1).view(), test.Run(2).view()), 0);
    EXPECT_EQ(
        MaxDifference(test.Stream(Repeat(1, 150), 1).view(), test.Stream(Repeat(1, 150), 2).view()),
        0);
  }
}

TEST(TransformerXl, HalfPrecisionIsRoundedAtTheEndsOnly) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Case test(CausalProblem(1, 2, 100, 16, dtype),
              {{"memory", "32"}, {"segment", "32"}, {"layers", "3"}});
    const Tensor expected = test.Define(Repeat(32, 100));
    EXPECT_LE(MaxDifference(test.Run().view(), expected.view()),
              StackBound(expected.view(), 3) + UnitRoundoff(dtype) * MaxAbs(expected.view()));
  }
}

TEST(TransformerXl, NothingIsAllocatedInRunAppendAndReset) {
  for (const char* same_length : {"false", "true"}) {
    Case test(CausalProblem(2, 3, 150, 16),
              {{"memory", "70"}, {"segment", "60"}, {"same_length", same_length}});
    StreamingLayer& layer = test.layer();
    Machine machine(layer, 2);
    Tensor out(DType::kF32, test.x().shape());
    const Inputs inputs = {{"x", test.x().view()}};
    const Outputs outputs = {{"out", out.view()}};
    ASSERT_TRUE(layer.Setup(inputs, machine.execution()).ok());
    std::vector<Inputs> segments;
    std::vector<Outputs> segment_outputs;
    for (const int64_t tokens : {1, 60, 33, 1}) {
      segments.push_back({{"x", Slice(test.x().view(), 1, 0, tokens)}});
      segment_outputs.push_back({{"out", Slice(out.view(), 1, 0, tokens)}});
    }
    const int64_t before = AllocationCount();
    bool ok = layer.Run(inputs, outputs, machine.execution()).ok() && layer.Reset().ok();
    for (size_t n = 0; n < segments.size(); ++n) {
      ok = ok && layer.Append(segments[n], segment_outputs[n], machine.execution()).ok();
    }
    EXPECT_EQ(AllocationCount() - before, 0);
    EXPECT_TRUE(ok);
  }
}

TEST(TransformerXl, NoTokensAndNoBatchAreNoWork) {
  for (const Problem& problem : {CausalProblem(1, 2, 0, 16), CausalProblem(0, 2, 40, 16)}) {
    Case test(problem, {{"memory", "16"}, {"segment", "16"}});
    EXPECT_EQ(test.Run().num_elements(), 0);
    EXPECT_EQ(test.layer().cost().flops, 0);
  }
}

// ---- The terms of the score, seen through one attention layer whose output is its weights ----

// A model with one head of 64 channels reads unit vectors with W_v = W_o = 1: row p of the output
// is the weights of token p.
class Weights {
 public:
  Weights() {
    for (Tensor* matrix : {&w_q, &w_k, &w_r}) FillNormal(matrix, 1 + ++seed_, "w", 0, 0.3);
    for (Tensor* bias : {&u, &v}) FillNormal(bias, 1 + ++seed_, "bias");
    for (Tensor* matrix : {&identity_, &x_}) {
      Fill(matrix->view(), 0);
      for (int64_t n = 0; n < 64; ++n) matrix->span<float>()[n * 64 + n] = 1;
    }
  }
  // Returns the logarithms of the weights, [64][64], appended in segments of 16.
  std::vector<double> Logarithms() {
    const Problem problem = CausalProblem(1, 1, 64, 64);
    const layers::MemoryReach reach{64, false, 16};
    layers::RelativeAttention attention =
        layers::RelativeAttention::Create(Device::kCpu, problem, reach).value();
    Tensor workspace(DType::kU8, {static_cast<int64_t>(attention.workspace_bytes(1))});
    ThreadPool pool(1);
    Execution execution;
    execution.pool = &pool;
    execution.workspace =
        absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
    const layers::DistanceRange range = {0, reach.max_distance(), 0};
    EXPECT_TRUE(attention
                    .Setup({w_q.view(),
                            w_k.view(),
                            identity_.view(),
                            identity_.view(),
                            {w_r.view(), u.view(), v.view()}},
                           range, layers::SinusoidsOf(range, 64).view(), execution)
                    .ok());
    Tensor out(DType::kF32, x_.shape());
    layers::SegmentView segment(Device::kCpu, reach);
    for (int64_t t = 0; t < 64; t += 16) {
      segment.Set(t, 16);
      EXPECT_TRUE(attention
                      .Append(segment, Slice(x_.view(), 1, t, 16), {}, Slice(out.view(), 1, t, 16),
                              execution)
                      .ok());
    }
    std::vector<double> logarithms;
    for (const float weight : out.span<float>()) logarithms.push_back(std::log(weight));
    return logarithms;
  }

  Tensor w_q{DType::kF32, {64, 64}}, w_k{DType::kF32, {64, 64}}, w_r{DType::kF32, {64, 64}};
  Tensor u{DType::kF32, {1, 64}}, v{DType::kF32, {1, 64}};

 private:
  uint64_t seed_ = 0;
  Tensor identity_{DType::kF32, {64, 64}};
  Tensor x_{DType::kF32, {1, 64, 64}};
};
// Returns the difference of two scores of one row: their common log-sum-exp cancels.
double Gap(const std::vector<double>& logarithms, int64_t p, int64_t j) {
  return logarithms[p * 64 + j] - logarithms[p * 64 + p];
}
// Scores are of order 1, and the errors of logarithms are absolute.
constexpr double kGapBound = 2e-5;

TEST(TransformerXlScores, AreContentAloneWithoutDistancesAndBiases) {
  Weights weights;
  for (Tensor* tensor : {&weights.w_r, &weights.u, &weights.v}) Fill(tensor->view(), 0);
  const std::vector<double> logarithms = weights.Logarithms();
  for (int64_t p = 0; p < 64; ++p) {
    for (int64_t j = 0; j <= p; ++j) {
      double gap = 0;  // q_p . (k_j - k_p), where the projections of unit vectors are rows
      for (int64_t c = 0; c < 64; ++c) {
        gap += *weights.w_q.view().At<float>(p, c) *
               (*weights.w_k.view().At<float>(j, c) - *weights.w_k.view().At<float>(p, c));
      }
      ASSERT_NEAR(Gap(logarithms, p, j), gap / 8, kGapBound) << p << " " << j;
    }
  }
}

TEST(TransformerXlScores, OfThePositionBiasDependOnDistanceAlone) {
  Weights weights;
  for (Tensor* tensor : {&weights.w_q, &weights.u}) Fill(tensor->view(), 0);
  const std::vector<double> logarithms = weights.Logarithms();
  for (int64_t p = 1; p < 64; ++p) {
    for (int64_t j = 0; j <= p; ++j) {
      ASSERT_NEAR(Gap(logarithms, p, j), Gap(logarithms, 63, 63 - (p - j)), kGapBound);
    }
  }
  EXPECT_GT(std::abs(Gap(logarithms, 63, 0)), 0.01);
}

TEST(TransformerXlScores, OfTheContentBiasDependOnTheKeyAlone) {
  Weights weights;
  for (Tensor* tensor : {&weights.w_q, &weights.v}) Fill(tensor->view(), 0);
  const std::vector<double> logarithms = weights.Logarithms();
  for (int64_t p = 1; p < 64; ++p) {
    for (int64_t j = 0; j <= p; ++j) {
      const double of_last_row = logarithms[63 * 64 + j] - logarithms[63 * 64 + p];
      ASSERT_NEAR(Gap(logarithms, p, j), of_last_row, kGapBound);
    }
  }
}

TEST(TransformerXlScores, OfDistancesEqualTheAuthorsShiftOfAPaddedProduct) {
  // The authors' rel-shift in closed form is BD[i', j] = X[i', L - 1 - i' + j], X = (q + v) R^T
  // with R's row c the distance T - 1 - c. This is the last segment: L = 16 queries, T = 64 keys.
  Weights weights;
  for (Tensor* tensor : {&weights.w_k, &weights.u}) Fill(tensor->view(), 0);
  const std::vector<double> logarithms = weights.Logarithms();
  const auto product = [&](int64_t row, int64_t c) {  // X[i', c]
    double sum = 0;
    for (int64_t out = 0; out < 64; ++out) {
      double key = 0;
      for (int64_t in = 0; in < 64; ++in) {
        const double angle =
            static_cast<double>(63 - c) / std::pow(10000, 2 * static_cast<double>(in % 32) / 64);
        key +=
            (in < 32 ? std::sin(angle) : std::cos(angle)) * *weights.w_r.view().At<float>(in, out);
      }
      sum += (*weights.w_q.view().At<float>(48 + row, out) + weights.v.span<float>()[out]) * key;
    }
    return sum / 8;
  };
  for (int64_t row : {0, 7, 15}) {
    for (int64_t j = 0; j <= 48 + row; j += 5) {
      const double shifted = product(row, 15 - row + j), own = product(row, 63);
      ASSERT_NEAR(Gap(logarithms, 48 + row, j), shifted - own, kGapBound) << row << " " << j;
    }
  }
}

// ---- Costs, parameters, errors ----

TEST(TransformerXl, CostCountsTheProductsOfTheDefinition) {
  // There are 2 layers of width 4 and inner width 8, and 5 tokens in segments of 2 with memory 1:
  // keys seen per token are 1, 2; 2, 3; 2.
  const auto layer = MakeLayer(CausalProblem(3, 2, 5, 2),
                               {{"segment", "2"}, {"memory", "1"}, {"feed_forward_dim", "8"}});
  const double projections = 5 * 4 * 4 * 4, feed_forward = 5 * 2 * 4 * 8;
  const double pairs = 10 * 2 /* heads */, scores_and_values = pairs * (2 + 2 + 2);
  EXPECT_EQ(layer->cost().flops, 2.0 * 3 * 2 * (projections + feed_forward + scores_and_values));
  double parameters = 0;
  for (const auto& [name, tensor] : layer->parameters()) {
    parameters += static_cast<double>(tensor.num_elements());
  }
  EXPECT_EQ(layer->cost().bytes, 4 * (2 * 3 * 5 * 4 + parameters));
  const auto statistics = layer->statistics();
  EXPECT_EQ(statistics.at("keys_per_token"), 2);
  EXPECT_EQ(statistics.at("reach_tokens"), 3);  // token 4 sees token 3, which sees token 1
}

TEST(TransformerXl, CostCountsTheKeysWithinSpans) {
  // The keys seen are 1, 2; 2, 3; 2, of which a head with ceil(1.5 + z) = 2 keys sees 2 at most.
  const Problem problem = CausalProblem(1, 2, 5, 2);
  const Options options = {
      {"segment", "2"}, {"memory", "1"}, {"feed_forward_dim", "8"}, {"layers", "1"}};
  Options spans = options;
  spans["span_ramp"] = "1.5";
  const auto plain = MakeLayer(problem, options), spanned = MakeLayer(problem, spans);
  Tensor span(DType::kF32, {2});
  span.span<float>()[0] = 0.25f;
  span.span<float>()[1] = 100;
  NamedTensors parameters;
  parameters["layer0.span"] = std::move(span);
  ASSERT_TRUE(spanned->SetParameters(parameters).ok());
  const double of_pair = 2 * (2 + 2 + 2);
  EXPECT_EQ(*plain->cost().flops - *spanned->cost().flops, of_pair);
  EXPECT_EQ(spanned->statistics().at("keys_per_token"), (9 + 10) / 2.0 / 5);
  EXPECT_EQ(spanned->statistics().at("mean_span"), 100.25 / 2);
}

// Counts what core/layers/attention/list_attention.h does, product by product: forwards again and
// backwards. Every layer has heads of 2 channels, width 4 and inner width 8.
TEST(TransformerXl, CostOfABackwardPassCountsItsProducts) {
  constexpr int64_t kTokens = 11, kBatch = 3;
  struct Case {
    Options options;
    int64_t segment, memory, given = 0, clamp = 1000;
    bool same_length = false, pre_norm = false;
  };
  for (const Case& of : std::vector<Case>{
           {{{"segment", "4"}, {"memory", "0"}}, 4, 0},
           {{{"segment", "4"}, {"memory", "3"}}, 4, 3},
           {{{"segment", "4"}, {"memory", "3"}, {"pre_norm", "true"}}, 4, 3, 0, 1000, false, true},
           {{{"segment", "4"}, {"memory", "100"}, {"layers", "3"}}, 4, 100},
           {{{"segment", "100"}, {"memory", "5"}, {"max_distance", "2"}}, 100, 5, 0, 2},
           {{{"segment", "4"}, {"memory", "6"}, {"given_memory", "2"}}, 4, 6, 2},
           {{{"segment", "4"}, {"memory", "5"}, {"same_length", "true"}}, 4, 5, 0, 1000, true},
           {{{"segment", "4"}, {"memory", "50"}, {"same_length", "true"}}, 4, 50, 0, 1000, true}}) {
    SCOPED_TRACE(ToString(TechniqueSpec{"transformer_xl", of.options}));
    Options options = of.options;
    options["feed_forward_dim"] = "8";
    const auto layer = MakeLayer(CausalProblem(kBatch, 2, kTokens, 2), options);
    int64_t multiply_adds = 0;  // of a layer and batch row
    std::set<int64_t> distances;
    for (int64_t begin = 0; begin < kTokens; begin += of.segment) {
      const int64_t end = std::min(begin + of.segment, kTokens);
      const auto first_seen = [&](int64_t p) {
        return std::max(-of.given, of.same_length ? p - of.memory + 1 : begin - of.memory);
      };
      for (int64_t p = begin; p < end; ++p) {
        const int64_t of_matrices = 4 * 4 * 4 + 2 * 4 * 8;
        multiply_adds += 3 * of_matrices;  // y, dx and dW
        for (int64_t j = first_seen(p); j <= p; ++j) {
          const int64_t forward = 3, probabilities = 2;        // q.k and q.r twice, p v once
          const int64_t dv_and_dp = 2, to_q = 2, to_keys = 2;  // by k and by r each
          multiply_adds += 2 * 2 * (forward + probabilities + dv_and_dp + to_q + to_keys);
          distances.insert(std::min(p - j, of.clamp));
        }
      }
      // Keys and values of the rows before the segment, and gradients of their matrices; and of the
      // rows where the norm's parameters have a gradient by them.
      const int64_t earlier = begin - first_seen(begin);
      multiply_adds += earlier * 2 * (4 * 4) * (of.pre_norm ? 3 : 2);
    }
    // dW_r = sum_d r_d^T dr_d is one product of all batch rows.
    const int64_t dw_r = static_cast<int64_t>(distances.size()) * 4 * 4;
    const int64_t layers = options.count("layers") > 0 ? 3 : 2;
    EXPECT_EQ(layer->backward_cost().flops,
              static_cast<double>(2 * layers * (kBatch * multiply_adds + dw_r)));
  }
}

// A head with ceil(1.5 + z) = 2 keys sees distances 0 and 1; the layer's other head sees all 3.
TEST(TransformerXl, CostOfABackwardPassCountsTheDistancesWithinSpans) {
  const auto flops = [](float first, float second) {
    const auto layer = MakeLayer(CausalProblem(1, 2, 5, 2), {{"segment", "2"},
                                                             {"memory", "1"},
                                                             {"feed_forward_dim", "8"},
                                                             {"layers", "1"},
                                                             {"span_ramp", "1.5"}});
    NamedTensors parameters;
    Tensor& span = parameters["layer0.span"] = Tensor(DType::kF32, {2});
    span.span<float>()[0] = first;
    span.span<float>()[1] = second;
    EXPECT_TRUE(layer->SetParameters(parameters).ok());
    return *layer->backward_cost().flops;
  };
  // One of the 10 pairs of a head is beyond 2 keys, and has 11 products of 2 channels.
  const double of_pair = 2 * 11 * 2, of_distance = 2 * 4 * 4;
  EXPECT_EQ(flops(100, 100) - flops(0.25f, 100), of_pair);
  EXPECT_EQ(flops(0.25f, 100) - flops(0.25f, 0.25f), of_pair + of_distance);
}

TEST(TransformerXl, StatisticsKnowTheReachThroughAllLayers) {
  const auto reach = [](const Options& options) {
    return MakeLayer(CausalProblem(1, 1, 1000, 4), options)->statistics().at("reach_tokens");
  };
  EXPECT_EQ(reach({{"layers", "3"}, {"memory", "100"}, {"same_length", "true"}}), 3 * 99);
  EXPECT_EQ(reach({{"layers", "3"}, {"memory", "100"}, {"segment", "100"}}), 99 + 3 * 100);
  EXPECT_EQ(reach({{"layers", "3"}, {"memory", "0"}, {"segment", "100"}}), 99);
  EXPECT_EQ(reach({{"layers", "3"}, {"memory", "900"}}), 999);
}

TEST(TransformerXl, ParametersDoNotDependOnMemoryAndSegment) {
  const auto small = MakeLayer(CausalProblem(1, 2, 10, 4), {{"memory", "0"}, {"segment", "1"}});
  const auto large = MakeLayer(CausalProblem(2, 2, 90, 4), {{"memory", "64"}, {"segment", "64"}});
  ASSERT_EQ(small->parameters().size(), 2 + 2 * 13u);
  for (const auto& [name, tensor] : small->parameters()) {
    ASSERT_EQ(MaxDifference(tensor.view(), large->parameters().at(name).view()), 0) << name;
  }
  EXPECT_EQ(small->parameters().at("u").shape(), (Shape{2, 4}));
  const auto own = MakeLayer(CausalProblem(1, 2, 10, 4), {{"share_biases", "false"}});
  EXPECT_EQ(own->parameters().count("u"), 0u);
  EXPECT_EQ(own->parameters().at("layer1.v").shape(), (Shape{2, 4}));
}

TEST(TransformerXl, WhatItCannotDoIsSaidInOneLine) {
  const auto message = [](const Problem& problem, const Options& options) {
    const auto layer = TransformerXl().Create(problem, options, Device::kCpu, 1);
    return layer.ok() ? "ok" : std::string(layer.status().ToString());
  };
  Problem problem = CausalProblem(1, 4, 64, 16);
  EXPECT_EQ(
      message(problem, {{"same_length", "true"}, {"memory", "0"}}),
      "INVALID_ARGUMENT: option memory is 0; allowed with same_length=true, where a token is one "
      "of the keys it sees, are 1 to 1048576");
  EXPECT_EQ(message(problem, {{"segment", "0"}}),
            "INVALID_ARGUMENT: option segment is \"0\"; allowed are 1 to 1048576");
  problem.kv_heads = 2;
  EXPECT_EQ(message(problem, {}),
            "INVALID_ARGUMENT: transformer_xl is self-attention: kv_heads is 2; allowed is "
            "query_heads, 4");
  problem = CausalProblem(1, 4, 64, 16);
  problem.value_dim = 8;
  EXPECT_EQ(message(problem, {}),
            "INVALID_ARGUMENT: transformer_xl is self-attention: value_dim is 8; allowed is "
            "head_dim, 16");
  problem = CausalProblem(1, 4, 64, 16);
  problem.kv_tokens = 65;
  EXPECT_EQ(message(problem, {}),
            "INVALID_ARGUMENT: transformer_xl is self-attention: kv_tokens is 65; allowed is "
            "query_tokens, 64");
  problem = CausalProblem(1, 4, 64, 16);
  problem.causal = false;
  EXPECT_EQ(message(problem, {}), "UNIMPLEMENTED: transformer_xl is causal only");
}

TEST(TransformerXl, MoreThanTheMemoryCannotBeGiven) {
  EXPECT_EQ(TransformerXl()
                .Create(CausalProblem(1, 2, 8, 4), {{"memory", "5"}, {"given_memory", "6"}},
                        Device::kCpu, 1)
                .status()
                .message(),
            "option given_memory is 6; allowed with memory=5 are 0 to 5");
}

TEST(TransformerXl, ASegmentThatIsTooLongIsAnError) {
  Case test(CausalProblem(1, 2, 64, 16), {{"segment", "16"}});
  Machine machine(test.layer(), 1);
  ASSERT_TRUE(test.layer().Setup({{"x", test.x().view()}}, machine.execution()).ok());
  const absl::Status status = test.layer().Append({{"x", test.x().view()}},
                                                  {{"out", test.x().view()}}, machine.execution());
  EXPECT_EQ(status.message(), "segment has 64 tokens; allowed are 1 to 16");
}

TEST(TransformerXl, TheDefinitionRefusesSegmentsThatLeaveOutTheFirstToken) {
  const Problem problem = CausalProblem(1, 2, 8, 4);
  Case test(problem, {});
  for (const std::vector<int64_t>& begins : std::vector<std::vector<int64_t>>{{}, {1, 4}}) {
    EXPECT_EQ(
        DefineTransformerXl(problem, test.options(), test.parameters(), test.x().view(), begins)
            .status()
            .message(),
        "the first segment does not begin at token 0");
  }
}

TEST(TransformerXl, TheDefinitionNamesAParameterThatDoesNotFit) {
  Case test(CausalProblem(1, 2, 8, 4), {});
  test.parameters().erase("layer1.ff.b1");
  const auto out = DefineTransformerXl(CausalProblem(1, 2, 8, 4), test.options(), test.parameters(),
                                       test.x().view(), {0});
  EXPECT_EQ(out.status().message(), "parameter layer1.ff.b1 [32] is missing");
}

// ---- Golden files ----

class TransformerXlGolden : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Files, TransformerXlGolden,
                         testing::Values("segments", "segments_same_length"));

TEST_P(TransformerXlGolden, HuggingFacesTransfoXlModelComputesTheSame) {
  SafetensorsFile golden =
      GoldenFile(std::string("memory/transformer_xl/testdata/") + GetParam() + ".safetensors");
  const auto number = [&](const char* name) { return std::stoll(golden.metadata.at(name)); };
  const Problem problem = CausalProblem(golden.tensors.at("x").dim(0), number("heads"),
                                        golden.tensors.at("x").dim(1), number("head_dim"));
  const Options options = {{"layers", golden.metadata.at("layers")},
                           {"segment", golden.metadata.at("segment_tokens")},
                           {"memory", golden.metadata.at("memory_tokens")},
                           {"same_length", golden.metadata.at("same_length")},
                           {"feed_forward_dim", golden.metadata.at("inner_dim")}};
  for (const Device device : TestedDevices()) {
    SCOPED_TRACE(Name(device));
    Case test(problem, options, device);
    for (auto& [name, tensor] : test.parameters()) {
      std::string theirs = name;
      for (const auto& [ours, other] :
           {std::pair("attention_norm", "ln1"), std::pair("ff_norm", "ln2")}) {
        const size_t at = theirs.find(ours);
        if (at != std::string::npos) theirs.replace(at, std::strlen(ours), other);
      }
      tensor = golden.tensors.at(theirs).Clone();
    }
    ASSERT_TRUE(test.layer().SetParameters(test.parameters()).ok());
    CopyElements(golden.tensors.at("x").view(), test.x().view());

    const ConstTensorView out = golden.tensors.at("out").view();
    const std::vector<int64_t> split = Repeat(number("segment_tokens"), problem.query_tokens);
    EXPECT_LE(MaxDifference(test.Define(split).view(), out), 1e-13);
    EXPECT_LE(MaxDifference(test.Run().view(), out), StackBound(out, 2));
    EXPECT_LE(MaxDifference(test.Stream(split).view(), out), StackBound(out, 2));
  }
}

// ---- The backward pass ----

// A segment that no memory precedes has no path at which a gradient stops, so that differences of
// the plain definition are its derivatives.
TEST(TransformerXl, OneSegmentHasTheGradientsOfTheDefinitionWithAllItsPaths) {
  const Problem problem = CausalProblem(2, 2, 40, 8);
  for (const Options& options :
       std::vector<Options>{{{"segment", "40"}, {"memory", "0"}},
                            {{"segment", "64"}, {"memory", "9"}, {"same_length", "true"}},
                            {{"segment", "40"}, {"pre_norm", "true"}, {"final_norm", "true"}},
                            {{"layers", "1"}, {"segment", "40"}, {"span_ramp", "16"}}}) {
    SCOPED_TRACE(ToString(TechniqueSpec{"transformer_xl", options}));
    // Two layers of attention, and of networks of four times the width.
    const GradientRequest request{
        options, 2 * (AttentionRoundings(problem) + 16 * static_cast<double>(problem.model_dim()))};
    ExpectGradientsOfDefinition(TransformerXl(), problem, request);
  }
}

TEST(TransformerXl, GradientsStopAtTheMemory) {
  const Problem problem = CausalProblem(2, 2, 2 * 35, 8);
  const auto expect = [&](Options options) {
    options.insert({{"layers", "2"}, {"segment", "35"}});
    ExpectGradientsStopAtTheMemory(TransformerXl(), problem, options);
  };
  for (const char* memory : {"1", "35", "20", "100"}) {
    expect({{"memory", memory}});
    expect({{"memory", memory}, {"pre_norm", "true"}, {"final_norm", "true"}});
  }
  expect({{"memory", "20"}, {"same_length", "true"}, {"layers", "3"}});
  expect({{"memory", "20"}, {"share_biases", "false"}, {"max_distance", "30"}});
}

TEST(TransformerXl, ARunKeepsOneStateForEachLayerButTheFirstWhateverTheSegment) {
  const Problem problem = CausalProblem(2, 2, 100, 8);
  const size_t state = sizeof(float) * 2 * 100 * 16;
  const auto kept = [&](const Options& options) {
    return TransformerXl().Create(problem, options, Device::kCpu, 1).value()->kept_bytes();
  };
  EXPECT_EQ(kept({{"layers", "1"}}), 0u);
  EXPECT_EQ(kept({{"layers", "6"}}), 5 * state);
  EXPECT_EQ(kept({{"layers", "6"}, {"segment", "7"}, {"memory", "50"}}), 5 * state);
  EXPECT_EQ(kept({{"layers", "6"}, {"final_norm", "true"}}), 6 * state);
}

TEST(TransformerXl, TheBackwardPassIsOnEveryDevice) {
  for (const Device device : TestedDevices()) {
    const auto layer = TransformerXl().Create(CausalProblem(1, 2, 8, 8), {}, device, 1).value();
    EXPECT_EQ(layer->CheckBackward(), absl::OkStatus());
  }
}

TEST(TransformerXlGolden, LabmlsPreNormNetworkWithItsFinalNormComputesTheSame) {
  SafetensorsFile golden = GoldenFile("memory/transformer_xl/testdata/labml.safetensors");
  const auto number = [&](const char* name) { return std::stoll(golden.metadata.at(name)); };
  const Tensor& x = golden.tensors.at("x");
  const Problem problem = CausalProblem(x.dim(0), number("heads"), x.dim(1), number("head_dim"));
  const Options options = {{"layers", golden.metadata.at("layers")},
                           {"segment", golden.metadata.at("segment_tokens")},
                           {"memory", golden.metadata.at("memory_tokens")},
                           {"feed_forward_dim", golden.metadata.at("inner_dim")},
                           {"pre_norm", "true"},
                           {"final_norm", "true"}};
  NamedTensors parameters = PerturbedParameters(TransformerXl(), problem, options);
  for (auto& [name, tensor] : parameters) tensor = golden.tensors.at(name).Clone();
  const ConstTensorView out = golden.tensors.at("out").view();
  for (const Device device : TestedDevices()) {
    const StackOutcome outcome =
        EvaluateStack(TransformerXl(), problem, options, parameters, x, device);
    EXPECT_LE(MaxDifference(outcome.defined.at("out").view(), out), 1e-13);
    EXPECT_LE(MaxDifference(outcome.computed.at("out").view(), out), StackBound(out, 2));
  }
}

// The reference model's float16 weights, applied to the first bytes of its held-out text.
TEST(TransformerXlGolden, TheTrainedLanguageModelComputesWhatPyTorchDoes) {
  const SafetensorsFile golden =
      GoldenFile("memory/transformer_xl/testdata/language_model.safetensors");
  const SafetensorsFile model = GoldenFile("harness/inputs/language_model/model.safetensors");
  const Tensor& tokens = golden.tensors.at("tokens");
  const Tensor& embedding = model.tensors.at("embedding");
  const ConstTensorView out = golden.tensors.at("out").view();
  const std::string segment = golden.metadata.at("segment_tokens");
  Case test(CausalProblem(1, 6, tokens.dim(1), embedding.dim(1) / 6),
            {{"layers", "6"},
             {"segment", segment},
             {"memory", golden.metadata.at("memory_tokens")},
             {"pre_norm", "true"},
             {"share_biases", "false"}});
  for (auto& [name, tensor] : test.parameters()) tensor = model.tensors.at(name).Clone();
  ASSERT_TRUE(test.layer().SetParameters(test.parameters()).ok());
  for (int64_t t = 0; t < tokens.dim(1); ++t) {
    for (int64_t c = 0; c < embedding.dim(1); ++c) {
      const ConstTensorView row = embedding.view();
      const TensorView x = test.x().view();
      x.Set(x.Offset(0, t, c), row.Get(row.Offset(tokens.span<int32_t>()[t], c)));
    }
  }

  const std::vector<int64_t> split = Repeat(std::stoll(segment), tokens.dim(1));
  const auto last = [&](const Tensor& rows) {
    return Slice(rows.view(), 1, rows.dim(1) - out.dim(1), out.dim(1));
  };
  const Tensor defined = test.Define(split), run = test.Run(), streamed = test.Stream(split);
  EXPECT_LE(MaxDifference(last(defined), out), 1e-12 * MaxAbs(out));
  EXPECT_LE(MaxDifference(last(run), out), StackBound(out, 6));
  EXPECT_LE(MaxDifference(last(streamed), out), StackBound(out, 6));
}

}  // namespace
}  // namespace tfb::transformer_xl
