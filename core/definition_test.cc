#include "core/definition.h"

#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/random.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

std::vector<double> Drawn(uint64_t seed, int64_t size) {
  const RandomStream random(seed, "numbers");
  std::vector<double> numbers(size);
  for (int64_t n = 0; n < size; ++n) numbers[n] = random.Uniform(n) - 0.5;
  return numbers;
}

// Products of `size` terms below 1/4 have errors below this, in any order.
double Bound(int64_t size) {
  return static_cast<double>(size + 1) * 0x1p-53 * static_cast<double>(size) / 4;
}

TEST(Definition, DotIsTheSumOfProductsOfAnyLength) {
  for (int64_t size = 0; size <= 40; ++size) {
    const std::vector<double> a = Drawn(1, size), b = Drawn(2, size);
    long double sum = 0;
    for (int64_t c = 0; c < size; ++c) sum += static_cast<long double>(a[c]) * b[c];
    EXPECT_NEAR(Dot(a.data(), b.data(), size), static_cast<double>(sum), Bound(size)) << size;
  }
}

TEST(Definition, AddTimesAddsToEachElementAndNoOther) {
  for (int64_t size = 0; size <= 20; ++size) {
    const std::vector<double> x = Drawn(3, size + 1);
    std::vector<double> y = Drawn(4, size + 1);
    const std::vector<double> before = y;
    AddTimes(-0.75, x.data(), size, y.data());
    for (int64_t c = 0; c < size; ++c) EXPECT_NEAR(y[c], before[c] - 0.75 * x[c], 0x1p-52);
    EXPECT_EQ(y[size], before[size]);
  }
}

struct Sizes {
  int64_t rows, in, out;
};

// Around blocks of 64 rows, 32 terms and 128 channels, and without anything.
class Products : public ::testing::TestWithParam<Sizes> {};

TEST_P(Products, AreTheSumsWithTheBiasAndTheSameBitsOnAnyNumberOfThreads) {
  const auto [rows, in, out] = GetParam();
  const std::vector<double> x = Drawn(5, rows * in), w = Drawn(6, in * out), b = Drawn(7, out);
  const DoubleTensor matrix(ConstTensorView(w.data(), DType::kF64, {in, out}));
  const DoubleTensor bias(ConstTensorView(b.data(), DType::kF64, {out}));
  const std::vector<double> y = Affine(x.data(), rows, matrix, bias, nullptr);
  ASSERT_EQ(static_cast<int64_t>(y.size()), rows * out);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < out; ++c) {
      long double sum = b[c];
      for (int64_t k = 0; k < in; ++k)
        sum += static_cast<long double>(x[r * in + k]) * w[k * out + c];
      ASSERT_NEAR(y[r * out + c], static_cast<double>(sum), Bound(in + 4)) << r << ", " << c;
    }
  }
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    EXPECT_EQ(Affine(x.data(), rows, matrix, bias, &pool), y) << threads;
  }
  for (int64_t r = 0; r < rows; ++r) {
    const std::vector<double> row(y.begin() + r * out, y.begin() + (r + 1) * out);
    EXPECT_EQ(Affine(x.data() + r * in, 1, matrix, bias, nullptr), row) << "row " << r << " alone";
  }
  EXPECT_EQ(Affine(x.data(), rows, matrix, DoubleTensor(), nullptr).size(), y.size());
}

INSTANTIATE_TEST_SUITE_P(Sizes, Products,
                         ::testing::Values(Sizes{1, 1, 1}, Sizes{63, 31, 127}, Sizes{64, 32, 128},
                                           Sizes{65, 33, 129}, Sizes{130, 71, 260}, Sizes{0, 4, 8},
                                           Sizes{3, 0, 8}),
                         [](const auto& info) {
                           return std::to_string(info.param.rows) + "x" +
                                  std::to_string(info.param.in) + "x" +
                                  std::to_string(info.param.out);
                         });

TEST(Definition, EveryRowIsVisitedOnce) {
  for (const int threads : {0, 1, 3}) {
    const auto pool = threads == 0 ? nullptr : std::make_unique<ThreadPool>(threads);
    std::vector<std::atomic<int>> visits(2 * 3 * 5);
    ForEachRow(pool.get(), 2, 3, 5,
               [&](int64_t b, int64_t h, int64_t r) { ++visits[(b * 3 + h) * 5 + r]; });
    for (const auto& count : visits) EXPECT_EQ(count, 1);
    ForEachRow(pool.get(), 2, 0, 0, [](int64_t, int64_t, int64_t) { FAIL(); });
  }
}

// Memory runs out in a task of the pool as it does without one.
TEST(Definition, WhatATaskThrowsReachesTheCaller) {
  for (const int threads : {0, 1, 3}) {
    const auto pool = threads == 0 ? nullptr : std::make_unique<ThreadPool>(threads);
    const auto throws = [](int64_t n) {
      if (n == 7) throw std::bad_alloc();
    };
    EXPECT_THROW(ForEachOf(pool.get(), 20, throws), std::bad_alloc) << threads;
    std::atomic<int> calls(0);
    ForEachOf(pool.get(), 20, [&](int64_t) { ++calls; });
    EXPECT_EQ(calls, 20) << "after it";
  }
}

// Attention's inputs, of sizes that all differ, and what is computed of them.
struct AttentionCase {
  Problem problem = Problem::SelfAttention(2, 4, 3, 5);
  NamedTensors inputs, outputs;
  DefinitionRequest request;

  AttentionCase() {
    problem.kv_heads = 2;
    problem.kv_tokens = 6;
    problem.value_dim = 7;
    for (const TensorSpec& spec : QkvInputs(problem)) {
      Tensor& tensor = inputs[spec.name] = Tensor(spec.dtype, spec.shape);
      if (!spec.optional) FillNormal(&tensor, 1, spec.name);
    }
    for (int64_t n = 0; n < 12; ++n) inputs["key_mask"].view().Set(n, n % 5 == 1 ? 0 : 1);
    request.weights = true;
  }
};

using ScoreOfProduct =
    std::function<double(int64_t b, int64_t h, int64_t i, int64_t j, double product)>;

// Compares the outputs for the queries `rows` with loops over softmax(score) v, without the maximum.
void ExpectAttention(const AttentionCase& c, const std::vector<int64_t>& rows,
                     const ScoreOfProduct& score) {
  const Problem& p = c.problem;
  const int64_t count = static_cast<int64_t>(rows.size());
  const auto at = [&c](const char* name, int64_t b, int64_t h, int64_t i, int64_t n) {
    const ConstTensorView view = c.inputs.at(name).view();
    return view.Get(view.Offset(b, h, i, n));
  };
  ASSERT_EQ(c.outputs.at("out").shape(), Shape({2, 4, count, 7}));
  ASSERT_EQ(c.outputs.at("log_sum_exp").shape(), Shape({2, 4, count}));
  ASSERT_EQ(c.outputs.at("weights").shape(), Shape({2, 4, count, 6}));
  for (int64_t row = 0; row < 2 * 4 * count; ++row) {
    const int64_t b = row / count / 4, h = row / count % 4, i = rows[row % count];
    std::vector<double> weights, out(7);
    double sum = 0;
    for (int64_t j = 0; j < 6; ++j) {
      double product = 0;
      for (int64_t n = 0; n < 5; ++n) product += at("q", b, h, i, n) * at("k", b, h / 2, j, n);
      const bool seen = (b * 6 + j) % 5 != 1 && (!p.causal || j <= i + 3);
      weights.push_back(seen ? std::exp(score(b, h, i, j, product)) : 0);
      sum += weights[j];
    }
    for (int64_t j = 0; j < 6; ++j) {
      const double weight = sum == 0 ? 0 : weights[j] / sum;
      EXPECT_NEAR(c.outputs.at("weights").view().Get(row * 6 + j), weight, 1e-14);
      for (int64_t n = 0; n < 7; ++n) out[n] += weight * at("v", b, h / 2, j, n);
    }
    for (int64_t n = 0; n < 7; ++n) {
      EXPECT_NEAR(c.outputs.at("out").view().Get(row * 7 + n), out[n], 1e-13);
    }
    const double log_sum_exp = c.outputs.at("log_sum_exp").view().Get(row);
    if (sum == 0) {
      EXPECT_EQ(log_sum_exp, kNotSeen);
    } else {
      EXPECT_NEAR(log_sum_exp, std::log(sum), 1e-13);
    }
  }
}

TEST(Definition, MaskedAttentionIsTheSoftmaxOfTheScoresThatAreSeen) {
  const auto sees = [](int64_t h, int64_t i, int64_t j) { return (h + i + j) % 3 != 0 && i != 1; };
  const auto bias = [](int64_t b, int64_t h, int64_t i, int64_t j) {
    return j == 4 ? kNotSeen : 0.1 * static_cast<double>(b + 2 * h - i * j);
  };
  const double usual = 1 / std::sqrt(5.0);
  for (const bool causal : {false, true}) {
    AttentionCase c;
    c.problem.causal = causal;
    const Inputs inputs = ViewsOf(c.inputs);
    const std::vector<int64_t> all = {0, 1, 2}, two = {0, 2};
    const auto scaled = [](double scale) -> ScoreOfProduct {
      return [scale](int64_t, int64_t, int64_t, int64_t, double dot) { return scale * dot; };
    };
    DefineMaskedAttention(c.problem, inputs, c.request, PairScore{}, &c.outputs);
    ExpectAttention(c, all, scaled(usual));
    DefineMaskedAttention(c.problem, inputs, c.request, PairScore{2}, &c.outputs);
    ExpectAttention(c, all, scaled(2));
    c.request.rows = two;
    const ScoreOfProduct biased = [&](int64_t b, int64_t h, int64_t i, int64_t j, double dot) {
      return 0.5 * dot + bias(b, h, i, j);
    };
    DefineMaskedAttention(c.problem, inputs, c.request, PairScore::Bias(bias, 0.5), &c.outputs);
    ExpectAttention(c, two, biased);
    ThreadPool pool(2);
    c.request.pool = &pool;
    c.request.rows = {};
    DefineMaskedAttention(c.problem, inputs, c.request, PairScore::Sees(sees), &c.outputs);
    const auto seen_alone = [&](int64_t, int64_t h, int64_t i, int64_t j, double dot) {
      return sees(h, i, j) ? usual * dot : kNotSeen;
    };
    ExpectAttention(c, all, seen_alone);
    const ScoreOfProduct seen_and_biased = [&](int64_t b, int64_t h, int64_t i, int64_t j,
                                               double dot) {
      return sees(h, i, j) ? 0.25 * dot + bias(b, h, i, j) : kNotSeen;
    };
    DefineMaskedAttention(c.problem, inputs, c.request, 0.25, sees, bias, &c.outputs);
    ExpectAttention(c, all, seen_and_biased);
    PairScore own;
    own.of_product = [](int64_t h, int64_t i, int64_t j, double dot) {
      return std::tanh(dot) + 0.3 * static_cast<double>(h - i + j);
    };
    own.bias = bias;
    own.sees = sees;
    DefineMaskedAttention(c.problem, inputs, c.request, own, &c.outputs);
    ExpectAttention(c, all, [&](int64_t b, int64_t h, int64_t i, int64_t j, double dot) {
      return sees(h, i, j) ? own.of_product(h, i, j, dot) + bias(b, h, i, j) : kNotSeen;
    });
  }
}

TEST(Definition, RowsOfOthersReplaceThoseOfTheOutputs) {
  AttentionCase c;
  const auto filled = [](double value) {
    NamedTensors tensors;
    tensors["out"] = Tensor(DType::kF64, {2, 4, 2, 7});
    tensors["log_sum_exp"] = Tensor(DType::kF64, {2, 4, 2});
    for (auto& [name, tensor] : tensors) Fill(tensor.view(), value);
    return tensors;
  };
  const std::vector<int64_t> rows = {0, 2};
  c.request.rows = rows;
  c.outputs = filled(1);
  ReplaceRows(
      c.problem, c.request, [](int64_t b, int64_t i) { return b == 1 ? i == 2 : i == 0; },
      filled(2), &c.outputs);
  for (const auto& [name, channels] :
       std::vector<std::pair<std::string, int64_t>>{{"out", 7}, {"log_sum_exp", 1}}) {
    for (int64_t n = 0; n < 2 * 4 * 2 * channels; ++n) {
      const int64_t b = n / channels / 2 / 4, r = n / channels % 2;
      EXPECT_EQ(c.outputs[name].view().Get(n), b == r ? 2 : 1) << name << " " << n;
    }
  }
  EXPECT_EQ(RowsOf(c.request, 3), rows);
  EXPECT_EQ(RowsOf({}, 3), (std::vector<int64_t>{0, 1, 2}));
  Inputs inputs = ViewsOf(c.inputs);
  inputs.Set("q_own", inputs.Get("k"));
  const Inputs own = WithOwnTensors(inputs, {"q"}, "_own");
  EXPECT_EQ(own.Get("q").data, inputs.Get("k").data);
  EXPECT_EQ(own.Get("v").data, inputs.Get("v").data);
}

TEST(Definition, ACopyOfATensorHasItsRowsAsFloat64) {
  Tensor tensor(DType::kF32, {2, 3, 4, 5});
  FillNormal(&tensor, 1, "t");
  const ConstTensorView turned = Transpose(ConstTensorView(tensor.view()), 1, 3);
  const DoubleTensor copy(turned);
  EXPECT_EQ(copy.rows(), 4);
  EXPECT_EQ(copy.channels(), 3);
  EXPECT_EQ(copy.size(), 120);
  EXPECT_EQ(copy.Row(1, 2, 3)[1], turned.Get(turned.Offset(1, 2, 3, 1)));
  const DoubleTensor flat(Slice(Slice(turned, 0, 1, 1), 1, 0, 1));
  EXPECT_EQ(flat.Row(2)[1], turned.Get(turned.Offset(1, 0, 2, 1)));
  NamedTensors named;
  named["t"] = tensor.Clone();
  EXPECT_EQ(DoubleTensor(named, "t").size(), 120);
  EXPECT_EQ(DoubleTensor(named, "u").size(), 0);
}

}  // namespace
}  // namespace tfb
