#include "core/layers/stack/stack_definition.h"

#include <algorithm>
#include <cmath>

#include "core/definition.h"

namespace tfb::layers {

std::vector<double> StackDefinition::Vector(const std::string& name) const {
  const ConstTensorView view = parameters_.at(name).view();
  std::vector<double> values(view.num_elements());
  for (size_t c = 0; c < values.size(); ++c) values[c] = view.Get(static_cast<int64_t>(c));
  return values;
}

Rows StackDefinition::AttentionNorm(int64_t n, const Rows& x) const {
  const std::string norm = LayerPrefix(n) + "attention_norm";
  return x.Normalized(Vector(norm + ".gamma"), Vector(norm + ".beta"));
}

Rows StackDefinition::FeedForwardNorm(int64_t n, const Rows& x) const {
  const std::string norm = LayerPrefix(n) + "ff_norm";
  return x.Normalized(Vector(norm + ".gamma"), Vector(norm + ".beta"));
}

Rows StackDefinition::FinalNorm(const Rows& h) const {
  if (!sizes_.final_norm) return h;
  return h.Normalized(Vector("final_norm.gamma"), Vector("final_norm.beta"));
}

Rows StackDefinition::FeedForward(int64_t n, const Rows& x) const {
  const std::string ff = LayerPrefix(n) + "ff.";
  return x.Times(Matrix(ff + "w1"), pool_)
      .PlusEach(Vector(ff + "b1"))
      .Relu()
      .Times(Matrix(ff + "w2"), pool_)
      .PlusEach(Vector(ff + "b2"));
}

Rows StackDefinition::Sinusoids(int64_t distances) const {
  const int64_t width = sizes_.width(), sines = (width + 1) / 2;
  Rows r(distances, width);
  for (int64_t c = 0; c < width; ++c) {
    const double exponent = 2 * static_cast<double>(c % sines) / static_cast<double>(width);
    const double length = std::pow(10000, exponent);
    for (int64_t d = 0; d < distances; ++d) {
      const int64_t distance = max_distance_ == 0 ? d : std::min(d, max_distance_);
      const double angle = static_cast<double>(distance) / length;
      r[d][c] = c < sines ? std::sin(angle) : std::cos(angle);
    }
  }
  return r;
}

Rows StackDefinition::KeysOfDistances(int64_t n, int64_t distances) const {
  if (sizes_.learned_distances == 0) return Project(n, "w_r", Sinusoids(distances));
  const ConstTensorView table = parameters_.at(LayerPrefix(n) + "relative_keys").view();
  Rows keys(distances, sizes_.width());
  for (int64_t d = 0; d < distances; ++d) {
    // With a largest distance the table ends there.
    const int64_t row = std::min(d, sizes_.learned_distances - 1);
    for (int64_t h = 0; h < sizes_.heads; ++h) {
      for (int64_t c = 0; c < sizes_.head_dim; ++c) {
        keys[d][h * sizes_.head_dim + c] = table.Get(table.Offset(row, h, c));
      }
    }
  }
  return keys;
}

double StackDefinition::SpanWeight(int64_t n, int64_t h, int64_t distance) const {
  const double z = parameters_.at(LayerPrefix(n) + "span").view().Get(h), r = sizes_.span_ramp;
  return std::clamp((r + z - static_cast<double>(distance)) / r, 0.0, 1.0);
}

Rows StackDefinition::Context(int64_t n, const Rows& q, const Keys& keys,
                              std::vector<double>* received, Rows* log_sum_exp) const {
  const std::string biases = BiasPrefix(sizes_, n);
  const Rows distances = KeysOfDistances(n, keys.k.rows());
  const Rows content_bias = Matrix(biases + "u"), position_bias = Matrix(biases + "v");
  const int64_t e = sizes_.head_dim, first_query = keys.k.rows() - q.rows();
  // The entry of each query, where it is asked for.
  Rows weights(received == nullptr ? 0 : q.rows(), keys.k.rows());
  Rows context(q.rows(), q.channels());
  const auto attend = [&](int64_t h, int64_t p) {
    const int64_t here = first_query + p, first = keys.first_seen(p);
    std::vector<double> content(e), position(e), s(here + 1, kNotSeen);  // q + u, q + v
    for (int64_t c = 0; c < e; ++c) {
      content[c] = q[p][h * e + c] + content_bias[h][c];
      position[c] = q[p][h * e + c] + position_bias[h][c];
    }
    double max = kNotSeen, sum = 0;
    // The keys before this one are those that derivatives hold.
    const int64_t stopped_end = keys.stopped == nullptr ? 0 : keys.stopped_end(p);
    const auto of_key = [&](int64_t j) -> const Keys& {
      return j < stopped_end ? *keys.stopped : keys;
    };
    for (int64_t j = first; j <= here; ++j) {
      s[j] = (Dot(content.data(), of_key(j).k[j] + h * e, e) +
              Dot(position.data(), distances[here - j] + h * e, e)) /
             std::sqrt(static_cast<double>(e));
      if (sizes_.span_ramp > 0) s[j] += std::log(SpanWeight(n, h, here - j));
      max = std::max(max, s[j]);
    }
    if (max == kNotSeen) return;  // a span below 0
    for (int64_t j = first; j <= here; ++j) {
      s[j] = std::exp(s[j] - max);
      sum += s[j];
      AddTimes(s[j], of_key(j).v[j] + h * e, e, context[p] + h * e);
    }
    for (int64_t c = 0; c < e; ++c) context[p][h * e + c] /= sum;
    if (log_sum_exp != nullptr) (*log_sum_exp)[p][h] = max + std::log(sum);
    for (int64_t j = first; received != nullptr && j <= here; ++j) weights[p][j] += s[j] / sum;
  };
  ForEachOf(pool_, q.rows(), [&](int64_t p) {
    for (int64_t h = 0; h < sizes_.heads; ++h) attend(h, p);
  });
  if (received != nullptr) {
    received->assign(keys.k.rows(), 0);
    for (int64_t p = 0; p < q.rows(); ++p) {
      for (int64_t j = 0; j < keys.k.rows(); ++j) (*received)[j] += weights[p][j];
    }
  }
  return context;
}

Rows StackDefinition::Attention(int64_t n, const Rows& x,
                                const std::function<int64_t(int64_t p)>& first_seen,
                                const Rows& earlier, const Stopped* stopped) const {
  const auto keys_of = [&](const Rows& rows) -> Keys {
    return {Project(n, "w_k", rows), Project(n, "w_v", rows), first_seen};
  };
  Rows list = earlier;
  list.Append(x);
  Keys keys = keys_of(list), of_stopped = {Rows(0, 0), Rows(0, 0), nullptr};
  if (stopped != nullptr) {
    of_stopped = keys_of(stopped->rows);
    keys.stopped = &of_stopped;
    keys.stopped_end = stopped->end;
  }
  return Project(n, "w_o", Context(n, Project(n, "w_q", x), keys));
}

Rows StackDefinition::Forward(const Rows& x, bool pre_norm, const AttentionOf& attention,
                              Rows* context) const {
  Rows h = x;
  for (int64_t n = 0; n < sizes_.layers; ++n) {
    Rows g = h.Plus(attention(n, h, pre_norm ? AttentionNorm(n, h) : h));
    if (!pre_norm) g = AttentionNorm(n, g);
    const Rows input = pre_norm ? FeedForwardNorm(n, g) : g;
    h = g.Plus(FeedForward(n, input));
    if (!pre_norm) h = FeedForwardNorm(n, h);
    if (context != nullptr) *context = input;
  }
  return FinalNorm(h);
}

Rows Held(const DefinitionRequest& request, Rows rows) {
  if (request.stopped != nullptr) request.stopped->Hold(rows.values());
  return rows;
}

Rows SequenceMemories::Given(int64_t n, int64_t channels) const {
  Rows rows(given_.empty() ? 0 : given_.dim(2), channels);
  for (int64_t t = 0; t < rows.rows(); ++t) {
    for (int64_t c = 0; c < channels; ++c) rows[t][c] = given_.Get(given_.Offset(b_, n, t, c));
  }
  return rows;
}

void SequenceMemories::AddOutputs(const std::vector<TensorSpec>& specs, NamedTensors* outputs) {
  for (const TensorSpec& spec : specs) {
    (*outputs)[spec.name] = Tensor(DType::kF64, spec.shape);
    (*outputs)[spec.name + ".scale"] = Tensor(DType::kF64, spec.shape);
  }
}

void SequenceMemories::Keep(int64_t n, const Rows& h) const {
  const auto found = outputs_->find("memories");
  if (found == outputs_->end()) return;
  const TensorView kept = found->second.view();
  const TensorView scale = outputs_->at("memories.scale").view();
  Rows list = Given(n, h.channels());
  list.Append(h);
  const int64_t first = list.rows() - kept.dim(2);
  for (int64_t t = 0; t < kept.dim(2); ++t) {
    std::copy_n(list[first + t], h.channels(), kept.MutableAt<double>(b_, n, t));
    for (int64_t c = 0; c < h.channels(); ++c) {
      *scale.MutableAt<double>(b_, n, t, c) =
          std::sqrt(static_cast<double>(n)) * std::abs(list[first + t][c]);
    }
  }
}

Rows SequenceOf(const ConstTensorView& x, int64_t b) {
  Rows rows(x.dim(1), x.dim(2));
  for (int64_t t = 0; t < x.dim(1); ++t) {
    for (int64_t c = 0; c < x.dim(2); ++c) rows[t][c] = x.Get(x.Offset(b, t, c));
  }
  return rows;
}

void StoreSequence(const Rows& rows, int64_t b, const TensorView& to) {
  for (int64_t t = 0; t < rows.rows(); ++t) {
    std::copy_n(rows[t], rows.channels(), to.MutableAt<double>(b, t));
  }
}

}  // namespace tfb::layers
