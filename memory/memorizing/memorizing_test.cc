// Tests Memorizing against its definition, by hand, and at the limits of its gate, store and k.
//
// Tolerance. As in transformer_xl's test: each sublayer has the bound of fp32 attention, 2e-5 of
// the largest output, and sublayers add in quadrature. The result of reading the store is a mean of
// values, as that of attention is.
#include "memory/memorizing/memorizing.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "attention/dense/dense.h"
#include "core/backward_testing.h"
#include "core/random.h"
#include "core/testing.h"
#include "gtest/gtest.h"
#include "memory/memorizing/memory_store.h"
#include "memory/memorizing/store_reading.h"
#include "memory/transformer_xl/stack_testing.h"
#include "memory/transformer_xl/transformer_xl.h"

namespace tfb::memorizing {
namespace {

using transformer_xl::CausalProblem;
using transformer_xl::RandomHidden;

Tensor Normal(const Shape& shape, const char* name) {
  Tensor tensor(DType::kF32, shape);
  FillNormal(&tensor, 3, name);
  return tensor;
}

NamedTensors ParametersOf(const Technique& technique, const Problem& problem,
                          const Options& options) {
  const auto layer = technique.Create(problem, options, Device::kCpu, 1);
  EXPECT_TRUE(layer.ok()) << layer.status();
  NamedTensors parameters;
  for (const auto& [name, tensor] : (*layer)->parameters()) parameters[name] = tensor.Clone();
  return parameters;
}

NamedTensors Compute(const Technique& technique, const Problem& problem, const Options& options,
                     const NamedTensors& parameters, const Tensor& x,
                     Device device = Device::kCpu) {
  RunRequest request;
  request.options = options;
  request.parameters = &parameters;
  request.device = device;
  auto computed = RunTechnique(technique, problem, {{"x", x.view()}}, request);
  EXPECT_TRUE(computed.ok()) << computed.status();
  return *std::move(computed);
}

NamedTensors Define(const Problem& problem, const Options& options, const NamedTensors& parameters,
                    const Tensor& x, const NamedTensors* computed = nullptr) {
  RunRequest request;
  request.options = options;
  request.parameters = &parameters;
  DefinitionRequest definition;
  definition.computed = computed;
  auto defined = DefineTechnique(Memorizing(), problem, {{"x", x.view()}}, request, definition);
  EXPECT_TRUE(defined.ok()) << defined.status();
  return *std::move(defined);
}

void ExpectSame(const NamedTensors& a, const NamedTensors& b) {
  for (const char* output : {"out", "context"}) {
    EXPECT_EQ(MaxDifference(a.at(output).view(), b.at(output).view()), 0) << output;
  }
}

void ExpectAsDefined(const Problem& problem, const Options& options, Device device) {
  SCOPED_TRACE(ToString(options));
  const Tensor x = RandomHidden(problem);
  const NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
  const NamedTensors computed = Compute(Memorizing(), problem, options, parameters, x, device);
  const NamedTensors defined = Define(problem, options, parameters, x, &computed);
  for (const char* output : {"out", "context"}) {
    EXPECT_LE(MaxDifference(computed.at(output).view(), defined.at(output).view()),
              transformer_xl::StackBound(defined.at(output).view(), 3))
        << output;
  }
  EXPECT_EQ(MaxDifference(computed.at("retrieved").view(), defined.at("retrieved").view()), 0);
}

TEST(Memorizing, EveryOptionEqualsTheDefinition) {
  for (const Options& options : std::vector<Options>{
           {{"segment", "16"}, {"memory", "10"}, {"store", "40"}, {"k", "5"}},
           {{"segment", "7"}, {"memory", "0"}, {"store", "200"}, {"k", "200"}},
           {{"segment", "30"}, {"store", "20"}, {"k", "3"}, {"same_length", "true"}},
           {{"segment", "16"}, {"memory", "20"}, {"store", "30"}, {"beyond_memory", "true"}},
           {{"segment", "50"}, {"memory", "5"}, {"store", "10"}, {"beyond_memory", "true"}},
           {{"segment", "9"}, {"selection", "bucketed"}, {"store", "37"}, {"k", "4"}},
           {{"segment", "9"},
            {"selection", "bucketed"},
            {"store", "30"},
            {"k", "8"},
            {"memory", "11"},
            {"beyond_memory", "true"}},
           {{"segment", "1"}, {"store", "1"}, {"k", "32"}},
           {{"segment", "20"}, {"layers", "3"}, {"memory_layer", "0"}, {"pre_norm", "true"}},
           {{"segment", "20"}, {"pre_norm", "true"}, {"final_norm", "true"}},
           {{"segment", "16"}, {"store", "40"}, {"k", "5"}, {"softmax", "joint"}},
           {{"segment", "7"}, {"store", "200"}, {"k", "200"}, {"softmax", "joint"}},
           {{"segment", "16"}, {"store", "40"}, {"k", "5"}, {"null_key", "true"}},
           {{"segment", "7"}, {"store", "200"}, {"k", "200"}, {"null_key", "true"}},
           {{"segment", "16"}, {"store", "40"}, {"k", "5"}, {"one_key_value_head", "true"}},
           {{"segment", "9"},
            {"selection", "bucketed"},
            {"store", "30"},
            {"k", "8"},
            {"memory", "11"},
            {"beyond_memory", "true"},
            {"softmax", "joint"},
            {"null_key", "true"},
            {"one_key_value_head", "true"}},
           {{"segment", "20"}, {"share_biases", "false"}, {"max_distance", "9"}},
           {{"segment", "128"}}}) {
    ExpectAsDefined(CausalProblem(2, 3, 100, 8), options, Device::kCpu);
  }
}

TEST(Memorizing, OnDevicesItEqualsTheDefinition) {
  for (const Options& options : std::vector<Options>{
           {{"segment", "20"}, {"memory", "10"}, {"store", "40"}, {"k", "5"}},
           {{"segment", "16"}, {"memory", "9"}, {"store", "30"}, {"beyond_memory", "true"}},
           {{"segment", "20"}, {"selection", "bucketed"}, {"store", "37"}, {"k", "4"}},
           {{"segment", "20"}, {"store", "40"}, {"k", "5"}, {"softmax", "joint"}},
           {{"segment", "20"}, {"store", "90"}, {"k", "90"}, {"softmax", "joint"}},
           {{"segment", "20"}, {"store", "40"}, {"k", "5"}, {"null_key", "true"}},
           {{"segment", "20"},
            {"store", "90"},
            {"k", "90"},
            {"softmax", "joint"},
            {"null_key", "true"},
            {"one_key_value_head", "true"}},
           {{"segment", "50"}, {"store", "30"}, {"k", "40"}}}) {
    ExpectAsDefined(CausalProblem(2, 2, 70, 8), options, KernelDevice());
  }
}

// A warp reads 32 slots and 32 channels at a time.
TEST(Memorizing, OnDevicesMoreSlotsAndChannelsThanAWarpHasEqualTheDefinition) {
  for (const char* softmax : {"separate", "joint"}) {
    ExpectAsDefined(CausalProblem(1, 2, 90, 36),
                    {{"segment", "30"},
                     {"store", "50"},
                     {"k", "45"},
                     {"layers", "1"},
                     {"softmax", softmax},
                     {"null_key", "true"}},
                    KernelDevice());
  }
}

// With pre_norm a token of zeros has a key and a query of length 0: its scores are 0, and of equal
// scores the older token's comes first.
TEST(Memorizing, TokensOfZerosAreRetrievedInTheirOrder) {
  const Problem problem = CausalProblem(1, 2, 30, 8);
  const Options options = {
      {"segment", "6"}, {"store", "15"}, {"k", "4"}, {"layers", "1"}, {"pre_norm", "true"}};
  const NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
  Tensor x = RandomHidden(problem);
  Fill(x.view(), 0);
  for (const Device device : TestedDevices()) {
    const NamedTensors computed = Compute(Memorizing(), problem, options, parameters, x, device);
    const NamedTensors defined = Define(problem, options, parameters, x, &computed);
    EXPECT_EQ(MaxDifference(computed.at("retrieved").view(), defined.at("retrieved").view()), 0);
    EXPECT_LE(MaxDifference(computed.at("out").view(), defined.at("out").view()), 1e-6);
    for (int64_t n = 0; n < 4; ++n) {
      EXPECT_EQ(*computed.at("retrieved").view().At<int64_t>(0, 1, 25, n), 24 - 15 + n);
    }
  }
}

TEST(Memorizing, OneHeadOfKeysAndValuesIsEveryHeadsAlike) {
  const Problem problem = CausalProblem(2, 3, 60, 8);
  const Tensor x = RandomHidden(problem);
  for (const char* k : {"5", "100"}) {  // searched, and read as a whole
    const Options shared = {{"segment", "16"}, {"store", "40"}, {"k", k}, {"null_key", "true"}};
    Options one = shared;
    one["one_key_value_head"] = "true";
    const NamedTensors parameters = ParametersOf(Memorizing(), problem, one);
    NamedTensors copied;
    for (const auto& [name, tensor] : ParametersOf(Memorizing(), problem, shared)) {
      const Tensor& own = parameters.at(name);
      Tensor& copy = copied[name] = Tensor(DType::kF32, tensor.shape());
      const bool by_row = name.find("null") != std::string::npos;
      const int axis = by_row ? 0 : 1;
      if (own.shape() == tensor.shape()) {
        CopyElements(own.view(), copy.view());
        continue;
      }
      for (int64_t h = 0; h < 3; ++h) {
        CopyElements(own.view(), Slice(copy.view(), axis, h * own.dim(axis), own.dim(axis)));
      }
    }
    for (const Device device : TestedDevices()) {
      ExpectSame(Compute(Memorizing(), problem, one, parameters, x, device),
                 Compute(Memorizing(), problem, shared, copied, x, device));
    }
  }
  // Without a store it is the same in the layer's own attention.
  const Options one = {{"store", "0"}, {"one_key_value_head", "true"}};
  const NamedTensors parameters = ParametersOf(Memorizing(), problem, one);
  const NamedTensors defined = Define(problem, one, parameters, x);
  EXPECT_LE(MaxDifference(Compute(Memorizing(), problem, one, parameters, x).at("out").view(),
                          defined.at("out").view()),
            transformer_xl::StackBound(defined.at("out").view(), 2));
}

TEST(Memorizing, OneHeadOfKeysAndValuesIsOneInTheStore) {
  const Problem problem = CausalProblem(1, 4, 60, 8);
  const auto bytes = [&](const char* one) {
    const Options options = {{"store", "64"}, {"one_key_value_head", one}};
    const auto layer = Memorizing().Create(problem, options, Device::kCpu, 1).value();
    return layer->statistics().at("store_bytes");
  };
  EXPECT_EQ(bytes("false"), 2 * 64 * 4 * 8 * 4);
  EXPECT_EQ(bytes("true"), 2 * 64 * 8 * 4);
}

// ---- By hand ----

// There is one head of one layer, whose matrices are identities and whose feed-forward network
// gives 0. The tokens' channels have mean 0 and variance 1, so that LN x = x / sqrt(1 + 1e-5): a,
// b, a, with a and b orthogonal. A segment has one token, which sees only itself besides the store,
// so local = LN x.
TEST(Memorizing, ThreeTokensGiveWhatTheFormulaGivesByHand) {
  const Problem problem = CausalProblem(1, 1, 3, 4);
  const Options options = {{"layers", "1"}, {"pre_norm", "true"},      {"segment", "1"},
                           {"memory", "0"}, {"feed_forward_dim", "4"}, {"k", "2"}};
  NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
  for (const char* name : {"w_q", "w_k", "w_v", "w_o"}) {
    Tensor& matrix = parameters.at(std::string("layer0.") + name);
    Fill(matrix.view(), 0);
    for (int64_t c = 0; c < 4; ++c) matrix.span<float>()[5 * c] = 1;
  }
  Fill(parameters.at("layer0.ff.w2").view(), 0);
  Fill(parameters.at("layer0.memory.gate").view(), 0);  // g = 1/2
  Fill(parameters.at("layer0.memory.scale").view(), std::log(3.0));
  const double a[] = {1, 1, -1, -1}, b[] = {1, -1, 1, -1};
  Tensor x(DType::kF32, {1, 3, 4});
  for (int64_t c = 0; c < 4; ++c) {
    x.span<float>()[c] = x.span<float>()[8 + c] = static_cast<float>(a[c]);
    x.span<float>()[4 + c] = static_cast<float>(b[c]);
  }
  const NamedTensors defined = Define(problem, options, parameters, x);
  const double norm = std::sqrt(1 + 1e-5);
  for (const Device device : TestedDevices()) {
    const NamedTensors computed = Compute(Memorizing(), problem, options, parameters, x, device);
    for (int64_t c = 0; c < 4; ++c) {
      const double expected[] = {
          a[c] + a[c] / norm,                        // the store is empty
          b[c] + (a[c] + b[c]) / 2 / norm,           // a is
          a[c] + (7 * a[c] / 8 + b[c] / 8) / norm};  // a and b: scores ln 3 and 0
      for (int64_t p = 0; p < 3; ++p) {
        EXPECT_NEAR(defined.at("out").span<double>()[4 * p + c], expected[p], 1e-7);
        EXPECT_NEAR(computed.at("out").span<float>()[4 * p + c], expected[p], 1e-6);
      }
    }
    const std::vector<int64_t> retrieved = {-1, -1, 0, -1, 0, 1};
    for (size_t n = 0; n < retrieved.size(); ++n) {
      EXPECT_EQ(computed.at("retrieved").span<int64_t>()[n], retrieved[n]);
      EXPECT_EQ(defined.at("retrieved").span<int64_t>()[n], retrieved[n]);
    }
  }
}

// The same tokens in one softmax with the token's own score, |LN a|^2 / sqrt(4) = 2 / (1 + 1e-5),
// and with a null slot along a, of value w, half of what is mixed by the gate.
TEST(Memorizing, JoinedScoresAndANullSlotGiveWhatTheFormulaGivesByHand) {
  const Problem problem = CausalProblem(1, 1, 3, 4);
  const double a[] = {1, 1, -1, -1}, b[] = {1, -1, 1, -1}, w[] = {2, 3, 5, 7};
  Tensor x(DType::kF32, {1, 3, 4});
  for (int64_t c = 0; c < 4; ++c) {
    x.span<float>()[c] = x.span<float>()[8 + c] = static_cast<float>(a[c]);
    x.span<float>()[4 + c] = static_cast<float>(b[c]);
  }
  for (const bool joins : {false, true}) {
    Options options = {{"layers", "1"}, {"pre_norm", "true"},      {"segment", "1"},
                       {"memory", "0"}, {"feed_forward_dim", "4"}, {"k", "2"}};
    options[joins ? "softmax" : "null_key"] = joins ? "joint" : "true";
    NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
    EXPECT_EQ(parameters.count("layer0.memory.gate"), joins ? 0u : 1u);
    for (const char* name : {"w_q", "w_k", "w_v", "w_o"}) {
      Tensor& matrix = parameters.at(std::string("layer0.") + name);
      Fill(matrix.view(), 0);
      for (int64_t c = 0; c < 4; ++c) matrix.span<float>()[5 * c] = 1;
    }
    for (const char* name : {"u", "v", "layer0.w_r", "layer0.ff.w2"}) {
      Fill(parameters.at(name).view(), 0);
    }
    Fill(parameters.at("layer0.memory.scale").view(), std::log(3.0));
    if (!joins) {
      Fill(parameters.at("layer0.memory.gate").view(), 0);  // g = 1/2
      for (int64_t c = 0; c < 4; ++c) {
        parameters["layer0.memory.null_key"].span<float>()[c] = static_cast<float>(5 * a[c]);
        parameters["layer0.memory.null_value"].span<float>()[c] = static_cast<float>(w[c]);
      }
    }
    const NamedTensors defined = Define(problem, options, parameters, x);
    const double norm = std::sqrt(1 + 1e-5), own = std::exp(2 / (1 + 1e-5));
    for (int64_t c = 0; c < 4; ++c) {
      const double of_a = a[c] / norm, of_b = b[c] / norm;
      // Scores ln 3 of equal tokens and 0 of others: weights 3 and 1.
      const double expected[] = {
          a[c] + (joins ? of_a : (w[c] + of_a) / 2),
          b[c] + (joins ? (own * of_b + of_a) / (own + 1) : ((w[c] + of_a) / 2 + of_b) / 2),
          a[c] + (joins ? ((own + 3) * of_a + of_b) / (own + 4)
                        : ((3 * w[c] + 3 * of_a + of_b) / 7 + of_a) / 2)};
      for (int64_t p = 0; p < 3; ++p) {
        EXPECT_NEAR(defined.at("out").span<double>()[4 * p + c], expected[p], 1e-6) << p;
        for (const Device device : TestedDevices()) {
          const NamedTensors run = Compute(Memorizing(), problem, options, parameters, x, device);
          EXPECT_NEAR(run.at("out").span<float>()[4 * p + c], expected[p], 1e-5) << p;
        }
      }
    }
  }
}

// ---- The gate's limits ----

TEST(Memorizing, AClosedGateIsTransformerXlBitByBit) {
  const Problem problem = CausalProblem(2, 2, 90, 16);
  const Options shared = {{"segment", "32"}, {"memory", "40"}, {"layers", "3"}};
  const Tensor x = RandomHidden(problem);
  NamedTensors parameters = ParametersOf(transformer_xl::TransformerXl(), problem, shared);
  for (const Device device : TestedDevices()) {
    const NamedTensors plain =
        Compute(transformer_xl::TransformerXl(), problem, shared, parameters, x, device);
    NamedTensors with_gate = ParametersOf(Memorizing(), problem, shared);
    Fill(with_gate.at("layer2.memory.gate").view(), -INFINITY);
    ExpectSame(Compute(Memorizing(), problem, shared, with_gate, x, device), plain);
    Options without_store = shared;
    without_store["store"] = "0";
    ExpectSame(Compute(Memorizing(), problem, without_store, parameters, x, device), plain);
  }
}

TEST(Memorizing, AnOpenGateHidesLengthsOfKeys) {
  const Problem problem = CausalProblem(1, 2, 80, 8);
  const Options options = {{"segment", "16"}, {"k", "4"}};
  const Tensor x = RandomHidden(problem);
  NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
  const auto tail = [&] {  // the tokens that find something in the store
    const NamedTensors computed = Compute(Memorizing(), problem, options, parameters, x);
    Tensor rows(DType::kF32, {1, 64, problem.model_dim()});
    CopyElements(Slice(computed.at("out").view(), 1, 16, 64), rows.view());
    return rows;
  };
  const auto lengthen = [&](double factor) {
    for (float& w : parameters.at("layer1.w_k").span<float>()) w *= static_cast<float>(factor);
  };
  const Tensor half_open = tail();
  lengthen(4);
  EXPECT_GT(MaxDifference(half_open.view(), tail().view()), 1e-3);
  Fill(parameters.at("layer1.memory.gate").view(), 100);
  const Tensor open = tail();
  lengthen(0.0625);
  EXPECT_EQ(MaxDifference(open.view(), tail().view()), 0);  // powers of two round nothing
}

// ---- The store on its own ----

constexpr int64_t kHeads = 2, kHeadDim = 8;

struct StoreTensors {
  Tensor k, v, q, heads;
};
StoreTensors RandomTensors(int64_t tokens, int64_t queries) {
  return {Normal({1, kHeads, tokens, kHeadDim}, "k"), Normal({1, kHeads, tokens, kHeadDim}, "v"),
          Normal({1, kHeads, queries, kHeadDim}, "q"),
          Normal({1, kHeads, queries, kHeadDim}, "heads")};
}

// Returns the result of reading after the tokens were appended in two parts.
Tensor ReadAfter(const StoreTensors& tensors, const StoreShape& shape, double gate, double scale) {
  const Problem problem = CausalProblem(1, kHeads, tensors.q.dim(2), kHeadDim);
  MemoryStore store = MemoryStore::Create(Device::kCpu, problem, shape).value();
  Tensor gates(DType::kF32, {kHeads}), scales(DType::kF32, {kHeads});
  Fill(gates.view(), gate);
  Fill(scales.view(), scale);
  EXPECT_TRUE(store.Setup({gates.view(), scales.view()}).ok());
  ThreadPool pool(2);
  Tensor memory(DType::kU8, {static_cast<int64_t>(store.workspace_bytes(2))});
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(memory.raw()), memory.bytes());
  const int64_t tokens = tensors.k.dim(2), first = tokens / 3;
  for (const auto& [begin, count] : {std::make_pair(int64_t{0}, first), {first, tokens - first}}) {
    EXPECT_TRUE(store
                    .Append(Slice(tensors.k.view(), 2, begin, count),
                            Slice(tensors.v.view(), 2, begin, count), execution)
                    .ok());
  }
  Tensor heads = tensors.heads.Clone();
  EXPECT_TRUE(store.Read(tensors.q.view(), heads.view(), {}, {}, execution).ok());
  return heads;
}

StoreShape ShapeOf(int64_t capacity, int64_t k, int64_t queries) {
  StoreShape shape;
  shape.capacity = capacity;
  shape.k = k;
  shape.max_segment = queries;
  return shape;
}

TEST(Memorizing, ReadingTheWholeStoreIsDenseAttentionOverIt) {
  const double scale = 3;
  for (const int64_t kept : {50, 30}) {  // of 50 tokens
    const StoreTensors tensors = RandomTensors(50, 20);
    Problem problem = Problem::SelfAttention(1, kHeads, 20, kHeadDim);
    problem.kv_tokens = kept;
    NamedTensors inputs;
    inputs["q"] = tensors.q.Clone();
    inputs["k"] = Tensor(DType::kF32, {1, kHeads, kept, kHeadDim});
    inputs["v"] = Tensor(DType::kF32, {1, kHeads, kept, kHeadDim});
    CopyElements(Slice(tensors.k.view(), 2, 50 - kept, kept), inputs["k"].view());
    CopyElements(Slice(tensors.v.view(), 2, 50 - kept, kept), inputs["v"].view());
    for (const char* name : {"q", "k"}) {
      Tensor& rows = inputs[name];
      // Dense attention divides by it.
      const double length = *name == 'q' ? scale * std::sqrt(kHeadDim) : 1;
      for (int64_t r = 0; r < rows.num_elements(); r += kHeadDim) {
        float* row = &rows.span<float>()[r];
        double square = 0;
        for (int64_t c = 0; c < kHeadDim; ++c) square += row[c] * row[c];
        for (int64_t c = 0; c < kHeadDim; ++c) {
          row[c] = static_cast<float>(row[c] * length / std::sqrt(square));
        }
      }
    }
    const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
    const Tensor read = ReadAfter(tensors, ShapeOf(kept, kept, 20), /*gate=*/100, scale);
    EXPECT_LE(MaxDifference(read.view(), dense.at("out").view()), Fp32Bound(tensors.v.view()));
  }
}

TEST(Memorizing, AScaleOfZeroReadsTheMeanAndItsSignDoesNotCount) {
  const StoreTensors tensors = RandomTensors(40, 5);
  const Tensor mean = ReadAfter(tensors, ShapeOf(40, 40, 5), /*gate=*/100, 0);
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t c = 0; c < kHeadDim; ++c) {
      double sum = 0;
      for (int64_t j = 0; j < 40; ++j) sum += *tensors.v.view().At<float>(0, h, j, c);
      for (int64_t p = 0; p < 5; ++p) {
        EXPECT_NEAR(*mean.view().At<float>(0, h, p, c), sum / 40, 1e-6);
      }
    }
  }
  EXPECT_EQ(MaxDifference(ReadAfter(tensors, ShapeOf(40, 7, 5), 0, 4).view(),
                          ReadAfter(tensors, ShapeOf(40, 7, 5), 0, -4).view()),
            0);
}

// Scores lie between -|scale| and |scale|, so no weight is below e^(-2 |scale|) of another's.
TEST(Memorizing, ScoresAreAtMostTheScale) {
  StoreTensors tensors = RandomTensors(2, 1);
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t c = 0; c < kHeadDim; ++c) {
      const float q = 1e6f * *tensors.q.view().At<float>(0, h, 0, c);
      *tensors.q.view().MutableAt<float>(0, h, 0, c) = q;
      *tensors.k.view().MutableAt<float>(0, h, 0, c) = 100 * q;
      *tensors.k.view().MutableAt<float>(0, h, 1, c) = -q / 100;
    }
  }
  const Tensor read = ReadAfter(tensors, ShapeOf(2, 2, 1), /*gate=*/100, 1.5);
  const double first = 1 / (1 + std::exp(-3.0));
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t c = 0; c < kHeadDim; ++c) {
      const double expected = first * *tensors.v.view().At<float>(0, h, 0, c) +
                              (1 - first) * *tensors.v.view().At<float>(0, h, 1, c);
      EXPECT_NEAR(*read.view().At<float>(0, h, 0, c), expected, 1e-6);
    }
  }
}

TEST(Memorizing, ZeroVectorsAndNanVectorsThatNobodyRetrievesLeaveNoNan) {
  StoreTensors tensors = RandomTensors(6, 2);
  Fill(Slice(tensors.q.view(), 2, 0, 1), 0);
  Fill(Slice(tensors.k.view(), 2, 1, 1), 0);
  Fill(Slice(tensors.k.view(), 2, 4, 1), NAN);
  Fill(Slice(tensors.v.view(), 2, 4, 1), NAN);
  const Tensor read = ReadAfter(tensors, ShapeOf(6, 5, 2), 0, 2);
  for (const float value : read.span<float>()) EXPECT_TRUE(std::isfinite(value));
}

// Without a memory a segment has the earlier ones in the store alone.
TEST(Memorizing, TokensOfNanAreNotRetrievedWhereOthersMayBe) {
  const Problem problem = CausalProblem(1, 2, 40, 4);
  const Options options = {{"segment", "8"}, {"memory", "0"}, {"store", "40"}, {"k", "4"}};
  const NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
  Tensor x = RandomHidden(problem);
  Fill(Slice(x.view(), 1, 3, 1), NAN);  // and so are the keys of tokens 3 to 7
  for (const Device device : TestedDevices()) {
    const NamedTensors computed = Compute(Memorizing(), problem, options, parameters, x, device);
    const NamedTensors defined = Define(problem, options, parameters, x, &computed);
    for (const char* output : {"out", "context"}) {
      const ConstTensorView found = Slice(computed.at(output).view(), 1, 8, 32);
      const ConstTensorView expected = Slice(defined.at(output).view(), 1, 8, 32);
      EXPECT_TRUE(std::isfinite(MaxAbs(expected))) << output;
      EXPECT_LE(MaxDifference(found, expected), transformer_xl::StackBound(expected, 3)) << output;
    }
    const ConstTensorView retrieved = computed.at("retrieved").view();
    EXPECT_EQ(MaxDifference(retrieved, defined.at("retrieved").view()), 0);
    EXPECT_EQ(*retrieved.At<int64_t>(0, 0, 8, 2), 2);
    EXPECT_EQ(*retrieved.At<int64_t>(0, 0, 8, 3), -1);
  }
}

// ---- What is in the store ----

// Checks the tokens of a head that each token retrieves where k is the whole store.
void ExpectRetrieved(const Options& options, int64_t tokens, int64_t lag) {
  const Problem problem = CausalProblem(1, 2, tokens, 4);
  const NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
  const int64_t segment = std::stoll(options.at("segment")),
                store = std::stoll(options.at("store"));
  for (const Device device : TestedDevices()) {
    const NamedTensors computed =
        Compute(Memorizing(), problem, options, parameters, RandomHidden(problem), device);
    const ConstTensorView retrieved = computed.at("retrieved").view();
    for (int64_t p = 0; p < tokens; ++p) {
      std::vector<int64_t> expected;
      const int64_t end = std::max<int64_t>(p / segment * segment - lag, 0);
      for (int64_t j = std::max<int64_t>(end - store, 0); j < end; ++j) expected.push_back(j);
      std::vector<int64_t> found;
      for (int64_t n = 0; n < retrieved.dim(3); ++n) {
        const int64_t token = *retrieved.At<int64_t>(0, 1, p, n);
        if (token >= 0) found.push_back(token);
      }
      std::sort(found.begin(), found.end());
      EXPECT_EQ(found, expected) << "token " << p;
    }
  }
}

TEST(Memorizing, TheStoreHasTheNewestTokensBeforeTheSegment) {
  ExpectRetrieved({{"segment", "8"}, {"store", "20"}, {"k", "20"}, {"memory", "6"}}, 60, 0);
  ExpectRetrieved({{"segment", "20"}, {"store", "7"}, {"k", "50"}, {"memory", "6"}}, 60, 0);
}

TEST(Memorizing, BeyondTheMemoryItHasThoseThatLeftIt) {
  const Options options = {
      {"segment", "8"}, {"store", "20"}, {"k", "20"}, {"memory", "13"}, {"beyond_memory", "true"}};
  ExpectRetrieved(options, 60, 13);
}

TEST(Memorizing, TheBestOfOneBucketIsTheNearest) {
  const Problem problem = CausalProblem(2, 2, 60, 8);
  const Tensor x = RandomHidden(problem);
  Options options = {{"segment", "16"}, {"store", "30"}, {"k", "1"}};
  const NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
  const NamedTensors exact = Compute(Memorizing(), problem, options, parameters, x);
  options["selection"] = "bucketed";
  ExpectSame(exact, Compute(Memorizing(), problem, options, parameters, x));
}

// ---- Near ties ----

TEST(Memorizing, TheDefinitionTakesTheLayersWordForNearTiesAlone) {
  // Tokens 0 and 1 of the first layer, which the store contains, differ by 1e-7 or by 1.
  const Problem problem = CausalProblem(1, 1, 3, 16);
  const Options options = {{"layers", "1"}, {"segment", "2"}, {"k", "1"}};
  const NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
  for (const double difference : {1e-7, 1.0}) {
    Tensor x = RandomHidden(problem);
    CopyElements(Slice(x.view(), 1, 0, 1), Slice(x.view(), 1, 1, 1));
    x.span<float>()[16] += static_cast<float>(difference);
    const int64_t best = Define(problem, options, parameters, x).at("retrieved").span<int64_t>()[2];
    ASSERT_GE(best, 0);
    NamedTensors computed;
    computed["retrieved"] = Tensor(DType::kI64, {1, 1, 3, 1});
    Fill(computed["retrieved"].view(), -1);
    computed["retrieved"].span<int64_t>()[2] = 1 - best;
    const NamedTensors defined = Define(problem, options, parameters, x, &computed);
    EXPECT_EQ(defined.at("retrieved").span<int64_t>()[2], difference < 1 ? 1 - best : best);
    computed["retrieved"].span<int64_t>()[2] = 2;  // the token itself is not in the store
    EXPECT_EQ(Define(problem, options, parameters, x, &computed).at("retrieved").span<int64_t>()[2],
              best);
  }
}

TEST(Memorizing, TheDefinitionLeavesOutNoTokenThatIsClearlyBetter) {
  // Token 3 retrieves two of three, of which tokens 1 and 2 are a near tie; the layer claims them.
  const Problem problem = CausalProblem(1, 1, 4, 16);
  const Options options = {{"layers", "1"}, {"segment", "3"}, {"k", "2"}};
  const NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
  int refused = 0;
  for (const int64_t alone : {0, 1}) {
    const Tensor random = RandomHidden(problem);
    Tensor x = random.Clone();
    CopyElements(Slice(random.view(), 1, alone, 1), Slice(x.view(), 1, 0, 1));
    for (const int64_t t : {1, 2}) {
      CopyElements(Slice(random.view(), 1, 1 - alone, 1), Slice(x.view(), 1, t, 1));
    }
    x.span<float>()[16] += 1e-7f;
    const auto retrieves_0 = [&](const NamedTensors& defined) {
      const absl::Span<const int64_t> tokens = defined.at("retrieved").span<int64_t>();
      return tokens[6] == 0 || tokens[7] == 0;
    };
    if (!retrieves_0(Define(problem, options, parameters, x))) continue;  // 1 and 2 are better
    NamedTensors computed;
    computed["retrieved"] = Tensor(DType::kI64, {1, 1, 4, 2});
    Fill(computed["retrieved"].view(), -1);
    for (const int64_t n : {6, 7}) computed["retrieved"].span<int64_t>()[n] = n - 5;
    EXPECT_TRUE(retrieves_0(Define(problem, options, parameters, x, &computed)));
    ++refused;
  }
  EXPECT_EQ(refused, 1);
}

// Scores are proportional to small differences of the keys, and a tie in bfloat16 is as much wider
// than one in float32 as its errors are larger: 5 unit roundoffs to 2e-5.
TEST(Memorizing, NearTiesAreAsWideAsTheErrorsOfTheirType) {
  const Options options = {{"layers", "1"}, {"segment", "2"}, {"k", "1"}};
  const auto width = [&](DType dtype) {
    Problem problem = CausalProblem(1, 1, 3, 16);
    const NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
    problem.dtype = DType::kBF16;
    const Tensor random = RandomHidden(problem);
    problem.dtype = dtype;
    // Tells whether the definition takes the layer's word where tokens 0 and 1 differ so much.
    const auto ties = [&](double difference) {
      Tensor x(dtype, random.shape());
      for (int64_t c = 0; c < 16; ++c) {
        const double both = c == 2 ? 0 : random.view().Get(c);
        x.view().Set(c, both);
        x.view().Set(16 + c, both + (c == 2 ? difference : 0));
        x.view().Set(32 + c, random.view().Get(32 + c));
      }
      const int64_t best =
          Define(problem, options, parameters, x).at("retrieved").span<int64_t>()[2];
      NamedTensors computed;
      computed["retrieved"] = Tensor(DType::kI64, {1, 1, 3, 1});
      Fill(computed["retrieved"].view(), -1);
      computed["retrieved"].span<int64_t>()[2] = 1 - best;
      return Define(problem, options, parameters, x, &computed)
                 .at("retrieved")
                 .span<int64_t>()[2] != best;
    };
    double tie = 1e-6, no_tie = 4;
    EXPECT_TRUE(ties(tie) && !ties(no_tie)) << Name(dtype);
    while (no_tie > 1.001 * tie) {
      const double middle = std::sqrt(tie * no_tie);
      (ties(middle) ? tie : no_tie) = middle;
    }
    return tie;
  };
  const double expected = 5 * UnitRoundoff(DType::kBF16) / 2e-5;
  EXPECT_NEAR(width(DType::kBF16) / width(DType::kF32), expected, 0.08 * expected);
}

TEST(Memorizing, OfEqualKeysTheOlderIsRetrieved) {
  const Problem problem = CausalProblem(1, 2, 40, 8);
  const Options options = {{"layers", "1"}, {"segment", "10"}, {"k", "3"}, {"store", "20"}};
  Tensor x = RandomHidden(problem);
  for (int64_t t = 1; t < 40; ++t) {
    CopyElements(Slice(x.view(), 1, 0, 1), Slice(x.view(), 1, t, 1));
  }
  const NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
  for (const Device device : TestedDevices()) {
    const NamedTensors computed = Compute(Memorizing(), problem, options, parameters, x, device);
    for (const auto& [p, oldest] : {std::make_pair(15, 0), {29, 0}, {35, 10}}) {
      for (int64_t n = 0; n < 3; ++n) {
        EXPECT_EQ(*computed.at("retrieved").view().At<int64_t>(0, 1, p, n), oldest + n);
      }
    }
  }
}

// ---- Streams, costs, errors ----

TEST(Memorizing, SegmentsOfAStreamEqualARunAndResetEmptiesTheStore) {
  const Problem problem = CausalProblem(2, 2, 70, 8);
  const Options options = {{"segment", "16"}, {"store", "25"}, {"k", "6"}};
  const Tensor x = RandomHidden(problem);
  auto layer = Memorizing().Create(problem, options, Device::kCpu, 1).value();
  auto* stream = dynamic_cast<StreamingLayer*>(layer.get());
  ASSERT_NE(stream, nullptr);
  EXPECT_EQ(stream->split_tokens(), 16);
  const NamedTensors whole = RunLayer(*layer, {{"x", x.view()}}).value();
  EXPECT_EQ(layer->statistics().at("store_entries"), 25);
  EXPECT_EQ(layer->statistics().at("store_bytes"), 2 * 2 * 25 * 16 * 4);

  ThreadPool pool(1);
  Tensor memory(DType::kU8, {static_cast<int64_t>(layer->workspace_bytes(1))});
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(memory.raw()), memory.bytes());
  for (int again = 0; again < 2; ++again) {
    ASSERT_TRUE(stream->Reset().ok());
    EXPECT_EQ(layer->statistics().at("store_entries"), 0);
    NamedTensors streamed = NanOutputs(layer->outputs());
    for (int64_t begin = 0; begin < 70; begin += 16) {
      const int64_t tokens = std::min<int64_t>(16, 70 - begin);
      Outputs outputs;
      outputs.Set("out", Slice(streamed["out"].view(), 1, begin, tokens));
      outputs.Set("context", Slice(streamed["context"].view(), 1, begin, tokens));
      outputs.Set("retrieved", Slice(streamed["retrieved"].view(), 2, begin, tokens));
      ASSERT_TRUE(
          stream->Append({{"x", Slice(x.view(), 1, begin, tokens)}}, outputs, execution).ok());
    }
    ExpectSame(whole, streamed);
    EXPECT_EQ(MaxDifference(whole.at("retrieved").view(), streamed.at("retrieved").view()), 0);
  }
}

TEST(Memorizing, CostCountsTheScoresAndWhatIsRead) {
  const Problem problem = CausalProblem(3, 2, 11, 4);
  const Options shared = {{"segment", "4"}, {"memory", "2"}};
  const auto flops = [&](const Technique& technique, Options options) {
    for (const auto& [name, value] : shared) options[name] = value;
    return technique.Create(problem, options, Device::kCpu, 1).value()->cost().flops.value();
  };
  const double plain = flops(transformer_xl::TransformerXl(), {});
  const double token = 2.0 * 3 * 2 * 4;  // for both heads and all batch rows
  // Segments of 4, 4 and 3 tokens find 0, 4 and 6 tokens.
  EXPECT_EQ(flops(Memorizing(), {{"store", "6"}, {"k", "2"}}),
            plain + token * (4 * (4 + 2) + 3 * (6 + 2)));
  EXPECT_EQ(flops(Memorizing(), {{"store", "6"}, {"k", "5"}, {"beyond_memory", "true"}}),
            plain + token * (4 * (2 + 2) + 3 * (6 + 5)));
  EXPECT_EQ(flops(Memorizing(), {{"store", "0"}}), plain);
}

TEST(Memorizing, TheStoreIsReadThreeQuartersOfTheWayUp) {
  const Problem problem = CausalProblem(1, 2, 8, 4);
  for (const auto& [layers, expected] :
       {std::make_pair("1", "layer0"), {"2", "layer1"}, {"6", "layer4"}, {"12", "layer9"}}) {
    const NamedTensors parameters = ParametersOf(Memorizing(), problem, {{"layers", layers}});
    EXPECT_EQ(parameters.count(std::string(expected) + ".memory.gate"), 1u) << layers;
    EXPECT_EQ(parameters.count(std::string(expected) + ".memory.scale"), 1u) << layers;
  }
}

TEST(Memorizing, WhatItCannotDoIsSaidInOneLine) {
  const auto message = [](const Problem& problem, const Options& options) {
    const auto layer = Memorizing().Create(problem, options, Device::kCpu, 1);
    return layer.ok() ? "ok" : std::string(layer.status().ToString());
  };
  Problem problem = CausalProblem(1, 4, 64, 16);
  EXPECT_EQ(message(problem, {{"memory_layer", "2"}}),
            "INVALID_ARGUMENT: option memory_layer is 2; allowed with layers=2 are -1 to 1");
  EXPECT_EQ(message(problem, {{"store", "262145"}}),
            "INVALID_ARGUMENT: option store is \"262145\"; allowed are 0 to 262144");
  problem.kv_heads = 2;
  EXPECT_EQ(message(problem, {}),
            "INVALID_ARGUMENT: memorizing is self-attention: kv_heads is 2; allowed is "
            "query_heads, 4");
}

// ---- Memories and store of earlier runs ----

TEST(Memorizing, TwoRunsWithMemoriesAndStoreHandedOverAreOne) {
  for (const Options& more : std::vector<Options>{
           {{"memory", "10"}, {"store", "200"}, {"k", "5"}},
           {{"memory", "0"}, {"store", "200"}, {"k", "200"}, {"pre_norm", "true"}},
           {{"memory", "20"}, {"store", "21"}, {"k", "6"}, {"same_length", "true"}},
           {{"memory", "9"}, {"store", "12"}, {"k", "4"}, {"beyond_memory", "true"}},
           // A bucket's tokens depend on how many tokens there have been.
           {{"memory", "8"}, {"selection", "bucketed"}, {"store", "21"}, {"k", "5"}},
           {{"memory", "11"},
            {"selection", "bucketed"},
            {"store", "10"},
            {"k", "3"},
            {"beyond_memory", "true"},
            {"softmax", "joint"},
            {"null_key", "true"},
            {"one_key_value_head", "true"}},
           {{"memory", "8"}, {"store", "30"}, {"layers", "3"}, {"memory_layer", "0"}},
           {{"memory", "8"}, {"store", "0"}, {"given_store", "5"}},
           // The first of the two begins with what still earlier runs left.
           {{"memory", "9"}, {"store", "20"}, {"given_memory", "5"}, {"given_store", "7"}},
           {{"memory", "9"},
            {"selection", "bucketed"},
            {"store", "20"},
            {"k", "3"},
            {"given_store", "1000003"}}}) {
    Options options = more;
    options["segment"] = "8";
    SCOPED_TRACE(ToString(options));
    transformer_xl::ExpectTwoRunsAreOne(Memorizing(), CausalProblem(2, 2, 70, 8), options, 40);
    transformer_xl::ExpectTwoRunsAreOne(Memorizing(), CausalProblem(1, 2, 19, 8), options, 8);
  }
}

TEST(Memorizing, OnGpusAndInHalfPrecisionTooTwoRunsAreOne) {
  Options options = {{"segment", "8"},      {"memory", "9"},
                     {"store", "20"},       {"k", "4"},
                     {"given_store", "31"}, {"given_memory", "4"},
                     {"pre_norm", "true"},  {"one_key_value_head", "true"}};
  for (const char* selection : {"exact", "bucketed"}) {
    options["selection"] = selection;
    transformer_xl::ExpectTwoRunsAreOne(Memorizing(), CausalProblem(2, 2, 43, 8), options, 24,
                                        KernelDevice());
  }
  options["k"] = "20";  // in 16 bits a choice may be another
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    transformer_xl::ExpectTwoRunsAreOne(Memorizing(), CausalProblem(1, 2, 43, 16, dtype), options,
                                        24);
  }
}

TEST(Memorizing, TheStoreLeavesUnitKeysAndValuesOfTheNewestTokens) {
  // The layer reads x itself. Its keys and values are x W_k and x W_v.
  const Problem problem = CausalProblem(1, 1, 10, 4);
  const Options options = {{"layers", "1"}, {"segment", "4"}, {"memory", "2"}, {"store", "6"}};
  const NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
  const Tensor x = RandomHidden(problem);
  const NamedTensors outputs = Compute(Memorizing(), problem, options, parameters, x);
  ASSERT_EQ(outputs.at("store_keys").shape(), (Shape{1, 1, 6, 4}));
  ASSERT_EQ(outputs.at("memories").shape(), (Shape{1, 1, 2, 4}));
  for (int64_t t = 0; t < 6; ++t) {
    double k[4] = {}, v[4] = {}, square = 0;
    for (int64_t c = 0; c < 4; ++c) {
      for (int64_t i = 0; i < 4; ++i) {
        k[c] +=
            *x.view().At<float>(0, 4 + t, i) * *parameters.at("layer0.w_k").view().At<float>(i, c);
        v[c] +=
            *x.view().At<float>(0, 4 + t, i) * *parameters.at("layer0.w_v").view().At<float>(i, c);
      }
      square += k[c] * k[c];
    }
    for (int64_t c = 0; c < 4; ++c) {
      EXPECT_NEAR(*outputs.at("store_keys").view().At<float>(0, 0, t, c), k[c] / std::sqrt(square),
                  1e-6);
      EXPECT_NEAR(*outputs.at("store_values").view().At<float>(0, 0, t, c), v[c], 1e-6);
    }
  }
  const auto without = Memorizing().OutputSpecs(problem, {{"store", "0"}});
  for (const TensorSpec& spec : *without) EXPECT_NE(spec.name, "store_keys");
}

TEST(Memorizing, AStreamReadsTheStoreWithItsFirstSegment) {
  const Problem problem = CausalProblem(2, 2, 30, 8);
  const Options options = {{"segment", "8"}, {"memory", "10"},       {"store", "12"},
                           {"k", "4"},       {"given_memory", "10"}, {"given_store", "50"}};
  const auto layer = Memorizing().Create(problem, options, Device::kCpu, 1).value();
  auto& stream = dynamic_cast<StreamingLayer&>(*layer);
  const NamedTensors inputs = RandomInputs(Memorizing().InputSpecs(problem, options).value(), 5);
  ASSERT_EQ(inputs.at("store_keys").dim(2), 12);
  const auto run = RunLayer(*layer, ViewsOf(inputs), 1);
  ASSERT_TRUE(run.ok()) << run.status();
  ThreadPool pool(1);
  Tensor workspace(DType::kU8, {static_cast<int64_t>(layer->workspace_bytes(1))});
  const Execution execution = {
      &pool, absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes()), nullptr};
  ASSERT_TRUE(stream.Reset().ok());
  const ConstTensorView x = inputs.at("x").view();
  Tensor out(DType::kF32, x.shape());
  for (const int64_t begin : {0, 8, 16, 24}) {
    const int64_t count = std::min<int64_t>(8, 30 - begin);
    Inputs segment = {{"x", Slice(x, 1, begin, count)}};
    const Outputs written = {{"out", Slice(out.view(), 1, begin, count)}};
    for (const char* name : {"memories", "store_keys", "store_values"}) {
      if (begin > 0) break;
      EXPECT_EQ(stream.Append(segment, written, execution).message(),
                "input " + std::string(name) + " is missing; the first segment has need of it");
      segment.Set(name, inputs.at(name).view());
    }
    const absl::Status status = stream.Append(segment, written, execution);
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(MaxDifference(out.view(), run->at("out").view()), 0);
}

TEST(Memorizing, RetrievedCountsTokensFromTheFirstOfEarlierRuns) {
  const Problem problem = CausalProblem(1, 2, 4, 8);
  const Options options = {
      {"segment", "4"}, {"store", "3"}, {"k", "3"}, {"given_store", "1000"}, {"layers", "1"}};
  const NamedTensors inputs = RandomInputs(Memorizing().InputSpecs(problem, options).value(), 5);
  RunRequest request;
  request.options = options;
  const auto outputs = RunTechnique(Memorizing(), problem, ViewsOf(inputs), request);
  ASSERT_TRUE(outputs.ok()) << outputs.status();
  const ConstTensorView retrieved = outputs->at("retrieved").view();
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(*retrieved.At<int64_t>(0, 1, 2, i), 997 + i);
}

// ---- The backward pass ----

// The second segment finds the first one's tokens in the store, or those of an earlier run.
TEST(Memorizing, GradientsStopAtTheMemoryAndTheStore) {
  const auto expect = [&](Options options) {
    options.insert({{"layers", "2"}, {"segment", "20"}, {"memory", "13"}, {"store", "16"}});
    options.insert({"k", "5"});
    transformer_xl::ExpectGradientsStopAtTheMemory(Memorizing(), CausalProblem(2, 2, 2 * 20, 8),
                                                   options);
  };
  expect({});
  expect({{"k", "100"}, {"pre_norm", "true"}});
  expect({{"memory_layer", "0"}, {"softmax", "joint"}});
  expect({{"null_key", "true"}, {"selection", "bucketed"}});
  expect({{"null_key", "true"}, {"softmax", "joint"}, {"one_key_value_head", "true"}});
  expect({{"beyond_memory", "true"}, {"share_biases", "false"}});
}

// In one segment that reads what earlier runs left, no gradient stops but at what they left.
TEST(Memorizing, GradientsThroughWhatIsRetrievedAreTheDefinitions) {
  const Problem problem = CausalProblem(2, 2, 20, 8);
  const int64_t width = problem.model_dim(), inner = 4 * width, layers = 2;
  const double roundings =
      layers * (2 * AttentionRoundings(problem) + 4 * static_cast<double>(width + inner));
  const auto expect = [&](Options options) {
    options.insert({{"layers", "2"}, {"segment", "20"}, {"memory", "13"}, {"given_memory", "13"}});
    options.insert({{"store", "16"}, {"given_store", "16"}, {"k", "5"}});
    SCOPED_TRACE(ToString(TechniqueSpec{"memorizing", options}));
    ExpectGradientsOfDefinition(Memorizing(), problem, {options, roundings});
  };
  expect({});
  expect({{"k", "16"}, {"pre_norm", "true"}});
  expect({{"null_key", "true"}});
  expect({{"softmax", "joint"}, {"null_key", "true"}, {"one_key_value_head", "true"}});
}

// The same, and in segments, the first of which read what an earlier run left.
TEST(Memorizing, OnDevicesTheGradientsAreThoseOfTheCpu) {
  const auto expect = [](int64_t tokens, Options options) {
    options.insert({{"layers", "2"}, {"segment", "20"}, {"memory", "13"}, {"given_memory", "13"}});
    options.insert({{"store", "16"}, {"given_store", "16"}, {"k", "5"}});
    transformer_xl::ExpectTheCpusGradientsOnDevices(Memorizing(), CausalProblem(2, 2, tokens, 8),
                                                    options);
  };
  for (const int64_t tokens : {20, 50}) {
    expect(tokens, {});
    expect(tokens, {{"k", "16"}, {"pre_norm", "true"}});
    expect(tokens, {{"null_key", "true"}, {"given_store", "100"}});
    expect(tokens, {{"softmax", "joint"}, {"given_store", "3"}});
    expect(tokens, {{"softmax", "joint"}, {"null_key", "true"}, {"one_key_value_head", "true"}});
  }
  expect(50, {{"given_store", "0"}, {"memory_layer", "0"}, {"selection", "bucketed"}});
  expect(50, {{"given_store", "0"}, {"null_key", "true"}, {"one_key_value_head", "true"}});
  expect(50, {{"beyond_memory", "true"}, {"given_store", "29"}, {"share_biases", "false"}});
}

// A layer with scales of the other sign computes the same, so that what its scales' gradients have of
// the loss is of the other sign.
TEST(Memorizing, AScalesSignIsThatOfItsGradientAlone) {
  const Problem problem = CausalProblem(1, 2, 20, 8);
  for (const Device device : TestedDevices()) {
    const Options options = {{"segment", "10"}, {"k", "3"}, {"store", "8"}, {"null_key", "true"}};
    const auto layer = Memorizing().Create(problem, options, device, 1).value();
    NamedTensors parameters = transformer_xl::PerturbedParameters(*layer);
    const Tensor x = RandomHidden(problem);
    const NamedTensors g = RandomOutputGradients(*layer, 5);
    const RunRequest request = {options, device, /*seed=*/1, &parameters, /*threads=*/1};
    const auto pass = [&] {
      return BackwardOfTechnique(Memorizing(), problem, {{"x", x.view()}}, g, request).value();
    };
    const RunAndGradients positive = pass();
    const std::string scale = "layer1.memory.scale";
    for (float& number : parameters.at(scale).span<float>()) {
      ASSERT_GT(number, 0);
      number = -number;
    }
    RunAndGradients negative = pass();
    EXPECT_GT(MaxAbs(positive.parameters.at(scale).view()), 0);
    for (float& number : negative.parameters.at(scale).span<float>()) number = -number;
    EXPECT_EQ(MaxDifference(negative.inputs.at("x").view(), positive.inputs.at("x").view()), 0);
    for (const auto& [name, gradient] : positive.parameters) {
      EXPECT_EQ(MaxDifference(negative.parameters.at(name).view(), gradient.view()), 0) << name;
    }
  }
}

TEST(Memorizing, RetrievedTokensAreCopiedWhateverTheStrides) {
  Tensor from(DType::kI64, {2, 3, 5, 4}), to(DType::kI64, {4, 5, 3, 2});
  for (int64_t n = 0; n < from.num_elements(); ++n) from.span<int64_t>()[n] = n;
  ThreadPool pool(2);
  Execution execution;
  execution.pool = &pool;
  TensorView transposed = Transpose(Transpose(to.view(), 0, 3), 1, 2);
  ASSERT_EQ(StoreReading().CopyRetrieved(from.view(), transposed, execution), absl::OkStatus());
  EXPECT_EQ(MaxDifference(transposed, from.view()), 0);
}

TEST(Memorizing, ARunKeepsItsKeysItsValuesAndWhatItsQueriesRetrieved) {
  const Problem problem = CausalProblem(2, 4, 50, 8);
  const auto kept = [&](const Options& options) {
    return Memorizing().Create(problem, options, Device::kCpu, 1).value()->kept_bytes();
  };
  const size_t states = kept({{"store", "0"}});
  EXPECT_EQ(kept({{"store", "32"}, {"k", "8"}}),
            states + 2 * 50 * (2 * 32 * sizeof(float) + 4 * 8 * sizeof(int64_t)));
  EXPECT_EQ(kept({{"store", "32"}, {"k", "8"}, {"given_store", "1000"}}),
            states + 2 * (50 * (2 * 32 * sizeof(float) + 4 * 8 * sizeof(int64_t)) +
                          32 * 2 * 32 * sizeof(float)));
}

// ---- Golden files ----

// Expects two runs to compute what a package did, which hands its memories from each segment to the
// next.
void ExpectGoldenInTwoRuns(const Problem& problem, const Options& options,
                           const NamedTensors& parameters, const Tensor& x,
                           const ConstTensorView& out, int64_t first) {
  for (const Device device : TestedDevices()) {
    const transformer_xl::StackOutcome two = transformer_xl::EvaluateInTwoRuns(
        Memorizing(), problem, options, parameters, {{"x", x.view()}}, first, device);
    EXPECT_LE(MaxDifference(two.defined.at("out").view(), out), 1e-13);
    EXPECT_LE(MaxDifference(two.computed.at("out").view(), out),
              transformer_xl::StackBound(out, 2));
  }
}

// One pre-norm layer whose feed-forward network gives 0.
TEST(Memorizing, MemorizingTransformersPytorchJoinsScoresInTheSameWay) {
  for (const char* name : {"joint", "joint_null_key"}) {
    const SafetensorsFile golden =
        GoldenFile(std::string("memory/memorizing/testdata/") + name + ".safetensors");
    const auto number = [&](const char* of) { return std::stoll(golden.metadata.at(of)); };
    const Tensor& x = golden.tensors.at("x");
    const Problem problem = CausalProblem(x.dim(0), number("heads"), x.dim(1), number("head_dim"));
    const bool has_null = golden.tensors.count("layer0.memory.null_key") > 0;
    const Options options = {{"layers", "1"},
                             {"pre_norm", "true"},
                             {"segment", golden.metadata.at("segment_tokens")},
                             {"memory", "0"},
                             {"k", golden.metadata.at("neighbours")},
                             {"softmax", "joint"},
                             {"one_key_value_head", "true"},
                             {"null_key", has_null ? "true" : "false"}};
    NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
    for (auto& [parameter, tensor] : parameters) {
      if (parameter.find(".ff") != std::string::npos) {
        Fill(tensor.view(), 0);
      } else {
        tensor = golden.tensors.at(parameter).Clone();
      }
    }
    const ConstTensorView out = golden.tensors.at("out").view();
    EXPECT_LE(MaxDifference(Define(problem, options, parameters, x).at("out").view(), out), 1e-13);
    for (const Device device : TestedDevices()) {
      const NamedTensors computed = Compute(Memorizing(), problem, options, parameters, x, device);
      EXPECT_LE(MaxDifference(computed.at("out").view(), out), transformer_xl::StackBound(out, 1));
    }
    ExpectGoldenInTwoRuns(problem, options, parameters, x, out, 2 * number("segment_tokens"));
  }
}

// Hugging Face's Transformer-XL with the authors' store and their attention over it computed the
// file; its metadata say how.
TEST(Memorizing, TheAuthorsStoreInTransformerXlComputesTheSame) {
  const SafetensorsFile golden = GoldenFile("memory/memorizing/testdata/buckets.safetensors");
  const auto number = [&](const char* name) { return std::stoll(golden.metadata.at(name)); };
  const Tensor& x = golden.tensors.at("x");
  const Problem problem = CausalProblem(x.dim(0), number("heads"), x.dim(1), number("head_dim"));
  const Options options = {{"layers", golden.metadata.at("layers")},
                           {"segment", golden.metadata.at("segment_tokens")},
                           {"memory", golden.metadata.at("memory_tokens")},
                           {"feed_forward_dim", golden.metadata.at("inner_dim")},
                           {"memory_layer", golden.metadata.at("store_layer")},
                           {"store", golden.metadata.at("store_tokens")},
                           {"k", golden.metadata.at("neighbours")},
                           {"selection", "bucketed"}};
  NamedTensors parameters = ParametersOf(Memorizing(), problem, options);
  for (auto& [name, tensor] : parameters) tensor = golden.tensors.at(name).Clone();
  const ConstTensorView out = golden.tensors.at("out").view();
  EXPECT_LE(MaxDifference(Define(problem, options, parameters, x).at("out").view(), out), 1e-13);
  for (const Device device : TestedDevices()) {
    const NamedTensors computed = Compute(Memorizing(), problem, options, parameters, x, device);
    EXPECT_LE(MaxDifference(computed.at("out").view(), out), transformer_xl::StackBound(out, 2));
  }
  ExpectGoldenInTwoRuns(problem, options, parameters, x, out, 3 * number("segment_tokens"));
}

TEST(Memorizing, TheCounterpartKeepsTheOptionsThatHideNothing) {
  transformer_xl::ExpectCounterpartSeesAllTokens(
      Memorizing(), {{"same_length", "true"}, {"k", "3"}, {"layers", "2"}},
      {{"same_length", "false"}});
}

}  // namespace
}  // namespace tfb::memorizing
