#include "core/definition.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace tfb {
namespace {

// y += x_0 w_0 + x_1 w_1 + ..., one of the `in` terms after the other; row k of w begins at w + k stride.
void AddRowProduct(const double* x, const double* w, int64_t in, int64_t stride, int64_t channels,
                   double* __restrict y) {
  int64_t k = 0;
  for (; k + 4 <= in; k += 4) {
    const double *w0 = w + k * stride, *w1 = w0 + stride, *w2 = w1 + stride, *w3 = w2 + stride;
    for (int64_t c = 0; c < channels; ++c) {
      y[c] = y[c] + x[k] * w0[c] + x[k + 1] * w1[c] + x[k + 2] * w2[c] + x[k + 3] * w3[c];
    }
  }
  for (; k < in; ++k) {
    for (int64_t c = 0; c < channels; ++c) y[c] += x[k] * w[k * stride + c];
  }
}

}  // namespace

void AddProduct(const Product& product, ThreadPool* pool) {
  // 32 x 128 x 8 B = 32 KiB of w, copied side by side, stay in the first cache while they meet 64 rows.
  constexpr int64_t kRows = 64, kTerms = 32, kChannels = 128;
  const int64_t row_blocks = (product.rows + kRows - 1) / kRows;
  const int64_t channel_blocks = (product.out + kChannels - 1) / kChannels;
  ForEachOf(pool, row_blocks * channel_blocks, [&](int64_t n) {
    const int64_t first = n / channel_blocks * kRows, channel = n % channel_blocks * kChannels;
    const int64_t channels = std::min(kChannels, product.out - channel);
    std::array<double, kTerms * kChannels> block;
    for (int64_t term = 0; term < product.in; term += kTerms) {
      const int64_t terms = std::min(kTerms, product.in - term);
      for (int64_t k = 0; k < terms; ++k) {
        const double* w = product.w + (term + k) * product.out + channel;
        std::copy_n(w, channels, block.data() + k * kChannels);
      }
      for (int64_t r = first; r < std::min(first + kRows, product.rows); ++r) {
        AddRowProduct(product.x + r * product.in + term, block.data(), terms, kChannels, channels,
                      product.y + r * product.out + channel);
      }
    }
  });
}

std::vector<double> Affine(const double* x, int64_t rows, const DoubleTensor& w,
                           const DoubleTensor& b, ThreadPool* pool) {
  const int64_t in = w.rows(), out = w.channels();
  std::vector<double> y(rows * out);
  for (int64_t r = 0; r < rows && b.size() > 0; ++r) std::copy_n(b.data(), out, &y[r * out]);
  AddProduct({x, w.data(), y.data(), rows, in, out}, pool);
  return y;
}

void ForEachOf(ThreadPool* pool, int64_t count, absl::FunctionRef<void(int64_t)> body) {
  if (pool == nullptr) {
    for (int64_t n = 0; n < count; ++n) body(n);
    return;
  }
  std::mutex mutex;
  std::exception_ptr thrown;
  pool->ParallelFor(count, [&](int64_t n, int) {
    try {
      body(n);
    } catch (...) {  // no memory: it may not leave a thread of the pool
      const std::lock_guard<std::mutex> lock(mutex);
      thrown = std::current_exception();
    }
  });
  if (thrown != nullptr) std::rethrow_exception(thrown);
}

void ForEachRow(ThreadPool* pool, int64_t batch, int64_t heads, int64_t rows,
                absl::FunctionRef<void(int64_t, int64_t, int64_t)> body) {
  ForEachOf(pool, batch * heads * rows,
            [&](int64_t n) { body(n / rows / heads, n / rows % heads, n % rows); });
}

DoubleTensor::DoubleTensor(const ConstTensorView& view) {
  assert(view.rank <= 4);
  for (int axis = 0; axis < view.rank; ++axis) dims_[4 - view.rank + axis] = view.dim(axis);
  if (view.empty()) return;
  values_.resize(view.num_elements());
  CopyElements(view, TensorView(values_.data(), DType::kF64, view.shape()));
}

DoubleTensor::DoubleTensor(const NamedTensors& parameters, absl::string_view name) {
  const auto found = parameters.find(name);
  if (found != parameters.end()) *this = DoubleTensor(found->second.view());
}

std::vector<int64_t> RowsOf(const DefinitionRequest& request, int64_t tokens) {
  if (!request.rows.empty()) return {request.rows.begin(), request.rows.end()};
  std::vector<int64_t> rows(tokens);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

Inputs WithOwnTensors(Inputs inputs, const std::vector<std::string>& names,
                      absl::string_view suffix) {
  for (const std::string& name : names) inputs.Set(name, inputs.Get(absl::StrCat(name, suffix)));
  return inputs;
}

void ReplaceRows(const Problem& problem, const DefinitionRequest& request,
                 absl::FunctionRef<bool(int64_t b, int64_t i)> is_other, const NamedTensors& others,
                 NamedTensors* outputs) {
  const std::vector<int64_t> rows = RowsOf(request, problem.query_tokens);
  for (auto& [name, tensor] : *outputs) {
    for (int64_t b = 0; b < problem.batch; ++b) {
      for (size_t r = 0; r < rows.size(); ++r) {
        if (!is_other(b, rows[r])) continue;
        const auto row = [b, r](const auto& view) { return Slice(Slice(view, 0, b, 1), 2, r, 1); };
        CopyElements(row(others.at(name).view()), row(tensor.view()));
      }
    }
  }
}

void DefineMaskedAttention(const Problem& problem, const Inputs& inputs,
                           const DefinitionRequest& request, const PairScore& score,
                           NamedTensors* outputs) {
  const DoubleTensor q(inputs.Get("q")), k(inputs.Get("k"));
  const KeyMask is_token(inputs);
  const double scale =
      score.scale != 0 ? score.scale : 1 / std::sqrt(static_cast<double>(problem.head_dim));
  DefineAttention(
      problem, inputs, request,
      [&](int64_t b, int64_t h, int64_t i, int64_t j) {
        if (problem.causal && j > i + problem.causal_offset()) return kNotSeen;
        if (!is_token(b, j) || (score.sees && !score.sees(h, i, j))) return kNotSeen;
        const double bias = score.bias ? score.bias(b, h, i, j) : 0;
        if (bias == kNotSeen) return kNotSeen;  // whatever the key holds
        const double dot = Dot(q.Row(b, h, i), k.Row(b, h / problem.group(), j), problem.head_dim);
        return bias + (score.of_product ? score.of_product(h, i, j, dot) : scale * dot);
      },
      outputs);
}

}  // namespace tfb
