#include "core/linear/linear_testing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/random.h"
#include "core/testing.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb {

GuardedMemory::GuardedMemory(size_t bytes)
    : bytes_(bytes), tensor_(DType::kU8, {static_cast<int64_t>(bytes) + kGuard}) {
  std::memset(tensor_.raw(), 0xFF, bytes + kGuard);
}
GuardedMemory::~GuardedMemory() {
  for (int64_t n = 0; n < kGuard; ++n) EXPECT_EQ(tensor_.span<uint8_t>()[bytes_ + n], 0xFF);
}

Problem LinearProblem(int64_t query_tokens, int64_t kv_tokens, bool causal, int64_t heads,
                      int64_t head_dim) {
  Problem problem = Problem::SelfAttention(1, heads, query_tokens, head_dim, causal);
  problem.kv_tokens = kv_tokens;
  return problem;
}

FeatureMap LinearMap(Feature feature, int64_t projections, int64_t head_dim, double epsilon) {
  FeatureMap map;
  map.feature = feature;
  map.projections = projections;
  map.input_scale = static_cast<float>(std::pow(static_cast<double>(head_dim), -0.25));
  map.constant = 1 / std::sqrt(static_cast<double>(map.features()));
  map.epsilon = epsilon;
  return map;
}

FeatureMap DirectionMap(Feature feature, int64_t projections, bool gated) {
  FeatureMap map;
  map.feature = feature;
  map.projections = projections;
  map.stabiliser = KeyStabiliser::kNone;
  map.unit = true;
  map.input_scale = 1.25;
  map.gated = gated;
  map.constant = 1 / std::sqrt(static_cast<double>(projections));
  map.denominator_floor = 1e-6;
  return map;
}

std::string Describe(const LinearCase& c) {
  return absl::StrCat(c.problem.ToString(), ", feature ", static_cast<int>(c.map.feature), ", ",
                      c.map.projections, " projections, epsilon ", c.map.epsilon,
                      c.masked ? ", masked" : "", c.map.gated ? ", gated" : "", ", magnitude ",
                      c.magnitude);
}

LinearTensors::LinearTensors(const LinearCase& c) {
  const Problem& p = c.problem;
  const auto draw = [&](const char* name, std::initializer_list<int64_t> shape, double deviation) {
    Tensor tensor(DType::kF32, shape);
    FillNormal(&tensor, c.seed, name, 0, deviation);
    return tensor.CloneAs(p.dtype);
  };
  q = draw("q", {p.batch, p.query_heads, p.query_tokens, p.head_dim}, c.magnitude);
  k = draw("k", {p.batch, p.kv_heads, p.kv_tokens, p.head_dim}, c.magnitude);
  v = draw("v", {p.batch, p.kv_heads, p.kv_tokens, p.value_dim}, 1);
  w = Tensor(DType::kF32, {c.map.per_head ? p.kv_heads : 1, c.map.projections, p.head_dim});
  FillNormal(&w, c.seed, "w");
  if (c.map.gated) {
    gate = Tensor(DType::kF32, {p.kv_heads, p.head_dim + 1});
    FillNormal(&gate, c.seed, "gate", 0, 1 / (c.magnitude * std::sqrt(double(p.head_dim))));
    for (int64_t h = 0; h < p.kv_heads; ++h) *gate.view().MutableAt<float>(h, p.head_dim) += 1.5f;
  }
  if (!c.masked) return;
  key_mask = Tensor(DType::kU8, {p.batch, p.kv_tokens});
  const RandomStream stream(c.seed, "mask");
  for (int64_t n = 0; n < p.batch * p.kv_tokens; ++n) {
    key_mask.span<uint8_t>()[n] = stream.Uniform(n) < 0.7;
  }
}
LinearCall LinearTensors::Call(const LinearCase& c) const {
  LinearCall call;
  call.q = q.view();
  call.k = k.view();
  call.v = v.view();
  call.key_mask = key_mask.view();
  call.w = c.map.per_head
               ? ConstTensorView(w.view())
               : ConstTensorView(w.raw(), DType::kF32, {c.map.projections, c.problem.head_dim});
  call.gate = gate.view();
  call.map = c.map;
  return call;
}
LinearResults EmptyResults(const Problem& p) {
  LinearResults results{Tensor(p.dtype, {p.batch, p.query_heads, p.query_tokens, p.value_dim}),
                        Tensor(DType::kF32, {p.batch, p.query_heads, p.query_tokens})};
  Fill(results.out.view(), std::nan(""));
  Fill(results.log_sum_exp.view(), std::nan(""));
  return results;
}

LinearResults DefineLinear(const LinearCase& c, const LinearTensors& tensors) {
  const Problem& p = c.problem;
  const FeatureMap& map = c.map;
  const DoubleTensor q(tensors.q.view()), k(tensors.k.view()), v(tensors.v.view()),
      w(tensors.w.view());
  const bool exponential = IsExponential(map.feature);
  // Returns what makes a row of inputs x.
  const auto scale_of = [&](const double* input) {
    const double length =
        map.unit ? std::sqrt(Dot(input, input, p.head_dim)) + map.length_epsilon : 1;
    return map.input_scale / length;
  };
  const auto half_square_of = [&](const double* input) {
    return scale_of(input) * scale_of(input) * Dot(input, input, p.head_dim) / 2;
  };
  const auto project = [&](const double* x, int64_t head, std::vector<double>* projections) {
    const double scale = scale_of(x);
    projections->clear();
    for (int64_t r = 0; r < map.projections; ++r) {
      projections->push_back(scale * Dot(w.Row(map.per_head ? head : 0, r), x, p.head_dim));
    }
    for (int64_t r = 0; map.feature == Feature::kSinCos && r < map.projections; ++r) {
      projections->push_back(std::cos((*projections)[r]));
      (*projections)[r] = std::sin((*projections)[r]);
    }
    for (int64_t r = 0; map.feature == Feature::kExpPair && r < map.projections; ++r) {
      projections->push_back(-(*projections)[r]);
    }
  };
  const auto feature = [&](double projection, double half_square, double s) {
    const double value = exponential                     ? std::exp(projection - half_square - s)
                         : map.feature == Feature::kRelu ? std::max(projection, 0.0)
                                                         : projection;
    return map.constant * (value + map.epsilon);
  };
  // Returns the features of a row of projections.
  const auto features_of = [&](std::vector<double> row, double half_square, double s) {
    for (double& f : row) f = feature(f, half_square, s);
    return row;
  };
  // With `sign` 1 returns g_j; with -1, 1 - g_j.
  const auto gate_of = [&](int64_t b, int64_t head, int64_t j, int sign) {
    const float* gate = tensors.gate.view().At<float>(head);
    double logit = gate[p.head_dim];
    for (int64_t n = 0; n < p.head_dim; ++n) logit += gate[n] * k.Row(b, head, j)[n];
    return 1 / (1 + std::exp(-sign * logit));
  };
  LinearResults results{Tensor(DType::kF64, {p.batch, p.query_heads, p.query_tokens, p.value_dim}),
                        Tensor(DType::kF64, {p.batch, p.query_heads, p.query_tokens})};
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.query_heads; ++h) {
      const int64_t kv_head = h / p.group();
      std::vector<std::vector<double>> keys(p.kv_tokens);
      std::vector<double> half_squares(p.kv_tokens), maxima(p.kv_tokens);
      std::vector<double> keeps(p.kv_tokens), takes(p.kv_tokens);  // of gates
      // Features of the keys, with the stabiliser of the last row that saw them.
      std::vector<std::vector<double>> features(p.kv_tokens);
      std::vector<double> stabilisers(p.kv_tokens);
      const auto seen = [&](int64_t i, int64_t j) {
        return (tensors.key_mask.empty() ||
                tensors.key_mask.span<uint8_t>()[b * p.kv_tokens + j] != 0) &&
               (!p.causal || j <= i + p.causal_offset());
      };
      for (int64_t j = 0; j < p.kv_tokens; ++j) {
        const double* x = k.Row(b, kv_head, j);
        project(x, kv_head, &keys[j]);
        half_squares[j] = half_square_of(x);
        maxima[j] = *std::max_element(keys[j].begin(), keys[j].end());
        if (!map.gated) continue;
        keeps[j] = gate_of(b, kv_head, j, 1);
        takes[j] = gate_of(b, kv_head, j, -1);
      }
      for (int64_t i = 0; i < p.query_tokens; ++i) {
        std::vector<double> query;
        const double* x = q.Row(b, h, i);
        project(x, kv_head, &query);
        const bool stabilised = exponential && map.stabiliser != KeyStabiliser::kNone;
        const double query_s = stabilised ? *std::max_element(query.begin(), query.end()) : 0;
        double key_s = 0;
        if (stabilised) {
          key_s = -kInfinity;
          for (int64_t j = 0; j < p.kv_tokens; ++j) {
            const bool counts = map.stabiliser == KeyStabiliser::kSequence
                                    ? seen(p.query_tokens - 1, j)
                                    : seen(i, j);
            if (counts) key_s = std::max(key_s, maxima[j]);
          }
        }
        query = features_of(query, half_square_of(x), query_s);
        double* y = results.out.view().MutableAt<double>(b, h, i);
        std::fill_n(y, p.value_dim, 0.0);
        double sum = 0;
        bool any = false;
        for (int64_t j = 0; j < p.kv_tokens; ++j) {
          if (!seen(i, j)) continue;
          any = true;
          for (int64_t n = 0; map.gated && n < p.value_dim; ++n) y[n] *= keeps[j];
          if (map.gated) sum *= keeps[j];
          if (features[j].empty() || stabilisers[j] != key_s) {
            features[j] = features_of(keys[j], half_squares[j], key_s);
            stabilisers[j] = key_s;
          }
          double weight = 0;
          for (size_t r = 0; r < query.size(); ++r) weight += query[r] * features[j][r];
          if (map.gated) weight *= takes[j];
          sum += weight;
          for (int64_t n = 0; n < p.value_dim; ++n) y[n] += weight * v.Row(b, kv_head, j)[n];
        }
        for (double f : query) sum += any ? map.denominator_epsilon * f : 0;
        if (any && std::abs(sum) < map.denominator_floor) {
          sum = sum < 0 ? -map.denominator_floor : map.denominator_floor;
        }
        for (int64_t n = 0; n < p.value_dim; ++n) y[n] = sum == 0 ? 0 : y[n] / sum;
        *results.log_sum_exp.view().MutableAt<double>(b, h, i) =
            any ? std::log(std::abs(sum)) + query_s + key_s : -kInfinity;
      }
    }
  }
  return results;
}

namespace {

std::vector<FeatureMap> MapsOfEachKind(bool causal) {
  std::vector<FeatureMap> maps = {LinearMap(Feature::kRelu, 12, 8, 1e-4)};
  for (const Feature feature : {Feature::kExp, Feature::kExpPair}) {
    maps.push_back(LinearMap(feature, IsPair(feature) ? 45 : 70, 8));  // features of two tiles
    for (const KeyStabiliser stabiliser : {KeyStabiliser::kSequence, KeyStabiliser::kNone}) {
      maps.push_back(LinearMap(feature, 12, 8, 1e-4));
      maps.back().stabiliser = stabiliser;
    }
    maps.push_back(LinearMap(feature, 12, 8, 1e-2));
    maps.back().unit = true;
    maps.back().denominator_epsilon = 1e-3;
  }
  for (const Feature feature : {Feature::kSinCos, Feature::kRelu}) {
    for (const bool gated : {false, true}) {
      if (causal || !gated) maps.push_back(DirectionMap(feature, 12, gated));
    }
  }
  return maps;
}

// Keys [first, last) of the first head are special; all others before `usual` are masked.
struct KeyShape {
  bool causal;
  int64_t queries, keys, first, last, usual;
};

// Calls body(shape, case) for causal calls and others, with each of maps(causal). Rows see special keys
// alone, or before all others. So many keys as `many` are cut into groups.
template <class Maps, class Body>
void ForEachSpecialKeys(int64_t many, DType dtype, const Maps& maps, const Body& body) {
  const KeyShape shapes[] = {
      {true, 70, 70, 0, 1, 0},                 // each row sees it
      {true, 20, 10, 0, 1, 0},                 // the first 10 rows see no key
      {true, 20, 20, 2, 3, 12},                // masked keys around it
      {true, 150, 150, 40, 41, 130},           // behind it a chunk without keys
      {true, 20, 140, 0, 70, 128},             // the rows begin behind a chunk of them
      {true, 20, many, 3, 4, many - 10},       // the rows are in a later group
      {false, 5, 70, 0, 70, 0},                // all keys
      {false, 5, 130, 70, 71, 130},            // the only key
      {false, 5, many, 70, 71, many * 2 / 3},  // the only key of a group
  };
  for (const KeyShape& shape : shapes) {
    for (const FeatureMap& map : maps(shape.causal)) {
      LinearCase c{LinearProblem(shape.queries, shape.keys, shape.causal, 2, 8), map};
      c.problem.dtype = dtype;
      c.masked = shape.usual > 0;
      body(shape, c);
    }
  }
}

// Returns the tensors of such a call. Channel n of a special key becomes channel(n, its value).
template <class Channel>
LinearTensors TensorsWith(const KeyShape& shape, const LinearCase& c, const Channel& channel) {
  LinearTensors tensors(c);
  for (int64_t j = 0; j < shape.keys && c.masked; ++j) {
    tensors.key_mask.span<uint8_t>()[j] = j >= shape.usual || (j >= shape.first && j < shape.last);
  }
  const TensorView k = tensors.k.view();
  for (int64_t j = shape.first; j < shape.last; ++j) {
    for (int64_t n = 0; n < c.problem.head_dim; ++n) {
      const int64_t at = k.Offset(0, 0, j, n);
      k.Set(at, channel(n, k.Get(at)));
    }
  }
  return tensors;
}
LinearTensors NaNTensors(const KeyShape& shape, const LinearCase& c) {
  return TensorsWith(shape, c, [](int64_t n, double x) { return n == 3 ? std::nan("") : x; });
}

// Calls body(segments) where the call's keys can be appended.
template <class Body>
void WithSegments(const LinearCase& c, const Body& body) {
  const Problem& p = c.problem;
  if (!p.causal || p.query_tokens != p.kv_tokens || c.map.stabiliser == KeyStabiliser::kSequence) {
    return;
  }
  body(p.kv_tokens < 64 ? std::vector<int64_t>{1} : std::vector<int64_t>{1, 64, 2});
}

}  // namespace

void ForEachNaNKeys(int64_t many, const std::function<void(const NaNKeys&)>& body) {
  ForEachSpecialKeys(
      many, DType::kF32, MapsOfEachKind, [&](const KeyShape& shape, const LinearCase& c) {
        body({c, NaNTensors(shape, c), TensorsWith(shape, c, [](int64_t, double x) { return x; })});
      });
}

void ForEachAppendedNaNKeys(
    const std::function<void(const NaNKeys&, const std::vector<int64_t>& segments)>& body) {
  ForEachNaNKeys(kKeysOfGroups, [&](const NaNKeys& keys) {
    WithSegments(keys.c, [&](const std::vector<int64_t>& segments) { body(keys, segments); });
  });
}

void ExpectNaNOfFormula(const NaNKeys& keys, const LinearResults& results,
                        const LinearResults& clean) {
  const LinearResults expected = DefineLinear(keys.c, keys.tensors);
  const auto expect = [&](const Tensor& e, const Tensor& y, const Tensor& of_clean) {
    for (int64_t n = 0; n < e.num_elements(); ++n) {
      const float found = y.span<float>()[n];
      if (std::isnan(e.view().Get(n))) {
        ASSERT_TRUE(std::isnan(found)) << Describe(keys.c) << ", element " << n << ": " << found;
      } else {
        ASSERT_EQ(found, of_clean.span<float>()[n]) << Describe(keys.c) << ", element " << n;
      }
    }
  };
  expect(expected.out, results.out, clean.out);
  expect(expected.log_sum_exp, results.log_sum_exp, clean.log_sum_exp);
}

void ForEachLongKeys(int64_t many, const std::function<void(const LongKeys&)>& body, DType dtype) {
  const auto maps_of = [](bool causal) {
    std::vector<FeatureMap> maps = MapsOfEachKind(causal);
    for (const Feature feature : {Feature::kExp, Feature::kExpPair}) {
      maps.push_back(LinearMap(feature, 12, 8));
      maps.push_back(LinearMap(feature, 12, 8, 1e-4));
      maps.push_back(maps.back());
      maps.back().denominator_epsilon = 1e-3;
    }
    return maps;
  };
  ForEachSpecialKeys(many, dtype, maps_of, [&](const KeyShape& shape, const LinearCase& c) {
    // With one channel, projections are those of shorter keys but for a power of 2.
    const auto with = [&](double length) {
      return TensorsWith(
          shape, c, [&](int64_t n, double x) { return n == 3 ? std::copysign(length, x) : 0; });
    };
    LongKeys keys{c, with(0x1p70), with(0x1p12), shape.first, shape.last, {}};
    LinearCase defined = c;
    if (c.map.epsilon == 0 && c.map.denominator_epsilon == 0) {
      defined.map.stabiliser = KeyStabiliser::kNone;  // it cancels, and exp(-S) is 0
    }
    keys.expected = DefineLinear(defined, c.map.unit ? NaNTensors(shape, c) : with(0x1p70));
    body(keys);
  });
}

void ForEachAppendedLongKeys(
    const std::function<void(const LongKeys&, const std::vector<int64_t>& segments)>& body) {
  ForEachLongKeys(kKeysOfGroups, [&](const LongKeys& keys) {
    WithSegments(keys.c, [&](const std::vector<int64_t>& segments) { body(keys, segments); });
  });
}

void ExpectLongKeysOfFormula(const LongKeys& keys, const LinearResults& results, double unit) {
  const Tensor& log_sum_exp = keys.expected.log_sum_exp;
  LinearResults found{results.out.Clone(), results.log_sum_exp.Clone()},
      expected{keys.expected.out.Clone(), log_sum_exp.Clone()};
  for (int64_t row = 0; row < log_sum_exp.num_elements(); ++row) {
    const double e = log_sum_exp.view().Get(row), y = results.log_sum_exp.view().Get(row);
    if (keys.c.map.unit) {
      ASSERT_EQ(std::isnan(y), std::isnan(e)) << Describe(keys.c) << ", row " << row;
      ASSERT_EQ(std::isnan(results.out.view().Get(row * keys.c.problem.value_dim)), std::isnan(e))
          << Describe(keys.c) << ", row " << row;
    } else if (std::isfinite(e) && std::abs(e) > 0x1p60) {
      // W is scaled, its product with the key rounded, and so is the sum with the query's stabiliser.
      ASSERT_NEAR(y, e, 4 * std::max(unit, UnitRoundoff(DType::kF32)) * std::abs(e))
          << Describe(keys.c) << ", row " << row;
      found.log_sum_exp.view().Set(row, 0);
      expected.log_sum_exp.view().Set(row, 0);
    }
  }
  if (!keys.c.map.unit) ExpectClose(keys.c, found, expected, unit);
}

LinearCall SegmentOf(LinearCall call, LinearResults& results, int64_t begin, int64_t tokens) {
  call.q = Slice(call.q, 2, begin, tokens);
  call.k = Slice(call.k, 2, begin, tokens);
  call.v = Slice(call.v, 2, begin, tokens);
  if (!call.key_mask.empty()) call.key_mask = Slice(call.key_mask, 1, begin, tokens);
  call.out = Slice(results.out.view(), 2, begin, tokens);
  call.log_sum_exp = Slice(results.log_sum_exp.view(), 2, begin, tokens);
  return call;
}

bool SameBits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

void ExpectClose(const LinearCase& c, const LinearResults& results, const LinearResults& expected,
                 double unit) {
  const double head_dim = static_cast<double>(c.problem.head_dim);
  const double of_gates = c.map.gated ? 0.5 * static_cast<double>(kLinearChunk) : 0;
  const double exponent = std::pow(head_dim, 0.75) * c.magnitude +
                          std::sqrt(head_dim) * c.magnitude * c.magnitude + of_gates;
  const double relative = std::max(unit, UnitRoundoff(DType::kF32)) * (10 + 2 * exponent);
  const double rounding = c.problem.dtype == DType::kF32 ? 0 : UnitRoundoff(c.problem.dtype);
  const auto size = [&](double e) {
    return c.map.feature == Feature::kSinCos ? 5 * std::max(1.0, std::abs(e)) : 5;
  };
  for (int64_t n = 0; n < expected.out.num_elements(); ++n) {
    const double e = expected.out.view().Get(n), y = results.out.view().Get(n);
    ASSERT_NEAR(y, e, size(e) * relative + rounding * std::abs(e))
        << Describe(c) << ", element " << n;
  }
  for (int64_t n = 0; n < expected.log_sum_exp.num_elements(); ++n) {
    const double e = expected.log_sum_exp.view().Get(n), y = results.log_sum_exp.view().Get(n);
    if (std::isinf(e)) {
      ASSERT_EQ(y, e) << Describe(c) << ", row " << n;
    } else {
      const double small = c.map.feature == Feature::kSinCos ? std::max(1.0, std::exp(-e)) : 1;
      ASSERT_NEAR(y, e, 2 * small * relative + UnitRoundoff(DType::kF32) * std::abs(e))
          << Describe(c) << ", row " << n;
    }
  }
}

namespace {

// Returns the gradients of a layer's inputs and parameters, which have names of their own.
NamedTensors RunBackward(Layer& layer, const Inputs& inputs, const Inputs& output_gradients,
                         int threads) {
  ThreadPool pool(threads);
  GuardedMemory kept(layer.kept_bytes()), workspace(layer.workspace_bytes(threads)),
      backward_workspace(layer.backward_workspace_bytes(threads));
  Execution execution;
  execution.pool = &pool;
  execution.workspace = workspace.span();
  execution.kept = kept.span();
  const auto check = [](const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; };
  check(layer.Setup(inputs, execution));
  NamedTensors outputs = NanOutputs(layer.outputs());
  check(layer.Run(inputs, MutableViewsOf(outputs), execution));
  execution.workspace = backward_workspace.span();
  check(layer.SetUpBackward(inputs, execution));
  NamedTensors of_inputs = NanOutputs(layer.input_gradients()),
               of_parameters = NanOutputs(layer.parameter_gradients());
  BackwardCall call;
  call.inputs = inputs;
  call.outputs = ViewsOf(outputs);
  call.output_gradients = output_gradients;
  call.input_gradients = MutableViewsOf(of_inputs);
  call.parameter_gradients = MutableViewsOf(of_parameters);
  check(layer.Backward(call, execution));
  of_inputs.merge(of_parameters);
  return of_inputs;
}

double Norm(const Tensor& x) {
  double square = 0;
  for (int64_t n = 0; n < x.num_elements(); ++n) square += x.view().Get(n) * x.view().Get(n);
  return std::sqrt(square);
}

}  // namespace

// A forward row's error is 2e-5 of its largest value (Fp32Bound), for weights that sum to 1. A
// derivative has that error for each unit by which the row's weights change along the direction, or
// by which the values that they weigh do.
void ExpectGradientsOfDefinition(const Technique& technique, const Problem& problem,
                                 const NamedTensors& inputs, const RunRequest& request,
                                 double bounds) {
  const std::unique_ptr<Layer> layer =
      technique.Create(problem, request.options, Device::kCpu, request.seed).value();
  if (request.parameters != nullptr) {
    ASSERT_TRUE(layer->SetParameters(*request.parameters).ok());
  }
  NamedTensors of_outputs;
  for (const TensorSpec& spec : layer->output_gradients()) {
    FillNormal(&(of_outputs[spec.name] = Tensor(spec.dtype, spec.shape)), request.seed, spec.name);
  }
  const NamedTensors gradients =
      RunBackward(*layer, ViewsOf(inputs), ViewsOf(of_outputs), request.threads);
  const NamedTensors others =
      RunBackward(*layer, ViewsOf(inputs), ViewsOf(of_outputs), request.threads + 1);

  NamedTensors exact_inputs, exact_parameters;  // float64, but for masks
  for (const auto& [name, tensor] : inputs) {
    exact_inputs[name] = tensor.CloneAs(IsFloating(tensor.dtype()) ? DType::kF64 : tensor.dtype());
  }
  for (const auto& [name, tensor] : layer->parameters()) {
    exact_parameters[name] = tensor.CloneAs(DType::kF64);
  }
  const auto define = [&] {
    DefinitionRequest definition;
    definition.weights = true;
    NamedTensors outputs;
    const absl::Status status = technique.Define(problem, request.options, exact_parameters,
                                                 ViewsOf(exact_inputs), definition, &outputs);
    EXPECT_TRUE(status.ok()) << status;
    return outputs;
  };
  double largest_gradient = 0, largest_value = MaxAbs(inputs.at("v").view());
  for (const auto& entry : of_outputs) {
    largest_gradient = std::max(largest_gradient, MaxAbs(entry.second.view()));
  }
  for (const auto& [name, gradient] : gradients) {
    EXPECT_TRUE(SameBits(gradient, others.at(name))) << name;
    const bool is_input = exact_inputs.count(name) > 0;
    Tensor& x = is_input ? exact_inputs[name] : exact_parameters[name];
    Tensor direction(DType::kF64, x.shape());
    FillNormal(&direction, request.seed, absl::StrCat("direction of ", name));
    const double norm = Norm(direction);
    for (double& d : direction.span<double>()) d /= norm;
    // A step across the corner of a ReLU would count as an error; it is more likely the longer it
    // is.
    const double step = 1e-6 * Norm(x);
    const Tensor at = x.Clone();
    const auto moved = [&](double by) {
      for (int64_t n = 0; n < x.num_elements(); ++n) {
        x.span<double>()[n] = at.span<double>()[n] + by * direction.span<double>()[n];
      }
      return define();
    };
    const NamedTensors above = moved(step), below = moved(-step);
    CopyElements(at.view(), x.view());
    double difference = 0, changes = 0, product = 0;
    for (const auto& [output, of_output] : of_outputs) {
      const ConstTensorView a = above.at(output).view(), b = below.at(output).view();
      for (int64_t n = 0; n < a.num_elements(); ++n) {
        if (a.Get(n) == b.Get(n)) continue;  // -inf without keys
        const double change = (a.Get(n) - b.Get(n)) / (2 * step);
        difference += of_output.view().Get(n) * change;
        changes += std::abs(change);
      }
    }
    const ConstTensorView a = above.at("weights").view(), b = below.at("weights").view();
    for (int64_t n = 0; n < a.num_elements(); ++n) {
      changes += largest_value * std::abs(a.Get(n) - b.Get(n)) / (2 * step);
    }
    for (int64_t n = 0; n < x.num_elements(); ++n) {
      product += gradient.view().Get(n) * direction.span<double>()[n];
    }
    EXPECT_NEAR(product, difference, bounds * 2e-5 * largest_gradient * changes)
        << name << ", " << ToString(request.options) << ", " << problem.ToString();
  }
}

}  // namespace tfb
