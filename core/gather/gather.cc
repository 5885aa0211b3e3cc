#include "core/gather/gather.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "core/cpu/kernels.h"
#include "core/cuda/runtime.h"
#include "core/flash/rows.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kTile = 64;  // tokens of a task

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns worker's own part of the workspace.
absl::Span<std::byte> Of(const Execution& execution, int worker, size_t bytes) {
  return execution.workspace.subspan(worker * bytes, bytes);
}

absl::StatusOr<const GatherKernels*> KernelsFor(Device device) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  return &KernelsOn<GatherKernels>(runtime->target());
}

}  // namespace

// ---- Normalised rows ----

namespace {

// Returns the sum of term(channel) over a row, by sixteen sums side by side.
template <class Term>
double SumOfRow(const float* row, int64_t channels, const Term& term) {
  constexpr int64_t kLanes = 16;
  double sums[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += term(double{row[c + lane]});
  }
  for (; c < channels; ++c) sums[c % kLanes] += term(double{row[c]});
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0];
}

// What normalises a row: y = (x - mean) * factor.
struct Normalizer {
  double mean = 0;
  double factor = 0;
};
// It computes in float64, so that no square overflows.
Normalizer NormalizerOf(const RowNorm& norm, int64_t channels, const float* row) {
  const double count = static_cast<double>(channels);
  Normalizer of;
  if (norm.centered) {
    of.mean = SumOfRow(row, channels, [](double value) { return value; }) / count;
  }
  double squares = SumOfRow(
      row, channels, [mean = of.mean](double value) { return (value - mean) * (value - mean); });
  if (norm.mean_square) squares /= count;
  const double root = std::sqrt(squares + norm.epsilon);
  of.factor = root == 0 ? 0 : 1 / root;
  return of;
}

void NormalizeRow(const RowNorm& norm, int64_t channels, float* row) {
  const Normalizer of = NormalizerOf(norm, channels, row);
  for (int64_t c = 0; c < channels; ++c) {
    row[c] = static_cast<float>((double{row[c]} - of.mean) * of.factor);
  }
}

// Turns the gradient u of a normalised row into that of the row x, in place.
void NormalizedGradient(const RowNorm& norm, int64_t channels, const float* x, float* u) {
  const Normalizer of = NormalizerOf(norm, channels, x);
  const double share = 1 / static_cast<double>(channels);
  const auto y = [&](int64_t c) { return (double{x[c]} - of.mean) * of.factor; };
  double along = 0, mean = 0;
  for (int64_t c = 0; c < channels; ++c) along += double{u[c]} * y(c);
  if (norm.mean_square) along *= share;
  for (int64_t c = 0; norm.centered && c < channels; ++c) mean += share * (u[c] - along * y(c));
  for (int64_t c = 0; c < channels; ++c) {
    u[c] = static_cast<float>((u[c] - along * y(c) - mean) * of.factor);
  }
}

}  // namespace

namespace {

NormalizeArguments ArgumentsOf(const RowNorm& norm, const ConstTensorView& x,
                               const ConstTensorView& y) {
  NormalizeArguments a = {};
  a.x = ToDeviceView(x);
  a.y = ToDeviceView(y);
  a.batch = x.dim(0);
  a.heads = x.dim(1);
  a.tokens = x.dim(2);
  a.channels = static_cast<int>(x.dim(3));
  a.centered = norm.centered;
  a.mean_square = norm.mean_square;
  a.epsilon = norm.epsilon;
  return a;
}

}  // namespace

absl::Status NormalizeRows(Device device, const RowNorm& norm, const ConstTensorView& x,
                           const TensorView& y, const Execution& execution) {
  const int64_t batch = x.dim(0), heads = x.dim(1), tokens = x.dim(2), channels = x.dim(3);
  if (channels > kMaxHeadDim) {
    return absl::InternalError(absl::StrCat("rows of ", channels, " channels to normalize"));
  }
  if (device != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(const GatherKernels* kernels, KernelsFor(device));
    return ToStatus(kernels->normalize(ArgumentsOf(norm, x, y), execution.stream));
  }
  const int64_t tiles = CeilDiv(tokens, kTile);
  execution.pool->ParallelFor(batch * heads * tiles, [&](int64_t task, int) {
    const int64_t b = task / tiles / heads, h = task / tiles % heads, first = task % tiles * kTile;
    for (int64_t i = first; i < std::min(first + kTile, tokens); ++i) {
      float row[kMaxHeadDim];
      LoadRow(x, x.Offset(b, h, i), x.stride(3), channels, row);
      NormalizeRow(norm, channels, row);
      StoreRow(row, channels, y, y.Offset(b, h, i), y.stride(3));
    }
  });
  return absl::OkStatus();
}

absl::Status AddNormalizedGradients(Device device, const RowNorm& norm, const ConstTensorView& x,
                                    const ConstTensorView& y_gradient, const TensorView& x_gradient,
                                    const Execution& execution) {
  if (device != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(const GatherKernels* kernels, KernelsFor(device));
    const NormalizeGradientArguments a = {ArgumentsOf(norm, x, y_gradient),
                                          ToDeviceView(x_gradient)};
    return ToStatus(kernels->normalize_gradient(a, execution.stream));
  }
  const int64_t heads = x.dim(1), tokens = x.dim(2), channels = x.dim(3);
  const int64_t tiles = CeilDiv(tokens, kTile);
  execution.pool->ParallelFor(x.dim(0) * heads * tiles, [&](int64_t task, int) {
    const int64_t b = task / tiles / heads, h = task / tiles % heads, first = task % tiles * kTile;
    for (int64_t i = first; i < std::min(first + kTile, tokens); ++i) {
      float row[kMaxHeadDim], gradient[kMaxHeadDim];
      LoadRow(y_gradient, y_gradient.Offset(b, h, i), y_gradient.stride(3), channels, gradient);
      if (std::all_of(gradient, gradient + channels, [](float u) { return u == 0; })) continue;
      LoadRow(x, x.Offset(b, h, i), x.stride(3), channels, row);
      NormalizedGradient(norm, channels, row, gradient);
      float* to = x_gradient.MutableAt<float>(b, h, i);
      for (int64_t c = 0; c < channels; ++c) to[c * x_gradient.stride(3)] += gradient[c];
    }
  });
  return absl::OkStatus();
}

// ---- Angular hashing ----

namespace {

// The vectors of 64 tokens, by channel.
struct Columns {
  float* rows;     // [64][head_dim rounded to 4]
  float* columns;  // [head_dim rounded to 4][64]
};
Columns ColumnsLayout(int64_t head_dim, Workspace& workspace) {
  const int64_t depth = RoundUp(head_dim, 4);
  return {workspace.Take<float>(kTile * depth), workspace.Take<float>(depth * kTile)};
}
// Loads 64 tokens; columns beyond the last token are zero.
void LoadColumns(const ConstTensorView& x, int64_t b, int64_t h, int64_t first,
                 const Columns& columns) {
  const int64_t depth = RoundUp(x.dim(3), 4);
  std::memset(columns.rows, 0, kTile * depth * sizeof(float));
  for (int64_t r = 0; r < std::min(kTile, x.dim(2) - first); ++r) {
    LoadRow(x, x.Offset(b, h, first + r), x.stride(3), x.dim(3), columns.rows + r * depth);
  }
  BestCpuKernels().transpose64(columns.rows, depth, depth, columns.columns);
}

struct HashScratch {
  Columns columns;
  float* products;  // [rounds * columns][64]
  int32_t* index;   // [64]
};
HashScratch HashLayout(int64_t head_dim, int64_t products, Workspace& workspace) {
  return {ColumnsLayout(head_dim, workspace), workspace.Take<float>(products * kTile),
          workspace.Take<int32_t>(kTile)};
}

}  // namespace

absl::StatusOr<AngularHash> AngularHash::Create(Device device, const ConstTensorView& rotations,
                                                const std::vector<int64_t>& columns_of_factors) {
  AngularHash hash;
  const bool per_head = rotations.rank == 4;
  const ConstTensorView heads = per_head ? rotations : SplitAxis(rotations, 0, 1);
  hash.head_dim_ = heads.dim(1);
  hash.rounds_ = heads.dim(2);
  hash.columns_ = heads.dim(3);
  hash.factors_ = columns_of_factors;
  int64_t columns = 0;
  for (const int64_t of_factor : columns_of_factors) columns += of_factor;
  if (columns != hash.columns_) {
    return absl::InternalError(absl::StrCat("rotations ", ShapeString(rotations.shape()),
                                            " for factors of ", columns, " columns in all"));
  }
  std::vector<float> rows;
  for (int64_t h = 0; h < heads.dim(0); ++h) {
    for (int64_t round = 0; round < hash.rounds_; ++round) {
      for (int64_t n = 0; n < columns; ++n) {
        for (int64_t c = 0; c < hash.head_dim_; ++c) {
          rows.push_back(static_cast<float>(heads.Get(heads.Offset(h, c, round, n))));
        }
      }
    }
  }
  if (per_head) hash.head_stride_ = hash.rounds_ * columns * hash.head_dim_;
  TFB_ASSIGN_OR_RETURN(hash.rotations_, DeviceArray<float>::Create(device, rows));
  if (device != Device::kCpu) {
    const std::vector<int32_t> factors(columns_of_factors.begin(), columns_of_factors.end());
    TFB_ASSIGN_OR_RETURN(hash.on_device_, DeviceArray<int32_t>::Create(device, factors));
  }
  return hash;
}

size_t AngularHash::WorkspaceBytes(Device device, int64_t head_dim, int64_t rounds, int64_t columns,
                                   int threads) {
  if (device != Device::kCpu) return 0;
  return threads * Workspace::Measure([&](Workspace& workspace) {
           HashLayout(head_dim, rounds * columns, workspace);
         });
}

absl::Status AngularHash::Run(const ConstTensorView& x, int32_t* buckets,
                              const Execution& execution) const {
  const Device device = rotations_.device();
  if (device == Device::kCpu) return RunCpu(x, buckets, execution);
  TFB_ASSIGN_OR_RETURN(const GatherKernels* kernels, KernelsFor(device));
  HashArguments a = {};
  a.x = ToDeviceView(x);
  a.rotations = rotations_.data();
  a.factors = on_device_.data();
  a.buckets = buckets;
  a.batch = x.dim(0);
  a.heads = x.dim(1);
  a.tokens = x.dim(2);
  a.rounds = rounds_;
  a.head_stride = head_stride_;
  a.columns = static_cast<int>(columns_);
  a.factor_count = static_cast<int>(factors_.size());
  a.head_dim = static_cast<int>(head_dim_);
  return ToStatus(kernels->hash(a, execution.stream));
}

absl::Status AngularHash::RunCpu(const ConstTensorView& x, int32_t* buckets,
                                 const Execution& execution) const {
  const int64_t batch = x.dim(0), heads = x.dim(1), tokens = x.dim(2);
  const int64_t tiles = CeilDiv(tokens, kTile);
  const int64_t products = rounds_ * columns_;
  const size_t bytes = WorkspaceBytes(Device::kCpu, head_dim_, rounds_, columns_, 1);
  const CpuKernels& kernels = BestCpuKernels();
  execution.pool->ParallelFor(batch * heads * tiles, [&](int64_t task, int worker) {
    const int64_t row = task / tiles, first = task % tiles * kTile;
    const int64_t count = std::min(kTile, tokens - first);
    Workspace workspace(Of(execution, worker, bytes));
    const HashScratch scratch = HashLayout(head_dim_, products, workspace);
    LoadColumns(x, row / heads, row % heads, first, scratch.columns);
    kernels.gemm(products, kTile, head_dim_, rotations_.data() + row % heads * head_stride_,
                 head_dim_, 1, scratch.columns.columns, kTile, scratch.products, kTile, false);
    const float* of_factor = scratch.products;
    for (int64_t round = 0; round < rounds_; ++round) {
      int32_t* to = buckets + (row * rounds_ + round) * tokens + first;
      std::fill_n(to, count, 0);
      int32_t step = 1;
      for (const int64_t columns : factors_) {
        kernels.signed_argmax(columns, of_factor, scratch.index);
        for (int64_t r = 0; r < count; ++r) to[r] += step * scratch.index[r];
        step *= static_cast<int32_t>(2 * columns);
        of_factor += columns * kTile;
      }
    }
  });
  return absl::OkStatus();
}

// ---- Scores against vectors ----

int64_t ScoreStride(int64_t tokens) { return RoundUp(tokens, kTile); }

size_t VectorScoreWorkspaceBytes(Device device, int64_t head_dim, int threads) {
  if (device != Device::kCpu) return 0;
  return threads *
         Workspace::Measure([=](Workspace& workspace) { ColumnsLayout(head_dim, workspace); });
}

absl::Status ScoreVectors(Device device, const VectorScoreCall& call, const Execution& execution) {
  const int64_t batch = call.x.dim(0), heads = call.x.dim(1), tokens = call.x.dim(2);
  const int64_t head_dim = call.x.dim(3);
  if (device != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(const GatherKernels* kernels, KernelsFor(device));
    VectorScoreArguments a = {};
    a.x = ToDeviceView(call.x);
    a.vectors = call.vectors;
    if (!call.key_mask.empty()) {
      a.key_mask = static_cast<const uint8_t*>(call.key_mask.data);
      std::copy_n(call.key_mask.strides.data(), 2, a.key_mask_strides);
    }
    a.scores = call.scores;
    a.batch = batch;
    a.heads = heads;
    a.tokens = tokens;
    a.count = call.count;
    a.stride = call.stride;
    a.head_dim = static_cast<int>(head_dim);
    return ToStatus(kernels->score(a, execution.stream));
  }
  const int64_t tiles = CeilDiv(tokens, kTile);
  const size_t bytes = VectorScoreWorkspaceBytes(device, head_dim, 1);
  const CpuKernels& kernels = BestCpuKernels();
  execution.pool->ParallelFor(batch * heads * tiles, [&](int64_t task, int worker) {
    const int64_t head = task / tiles, b = head / heads, first = task % tiles * kTile;
    Workspace workspace(Of(execution, worker, bytes));
    const Columns columns = ColumnsLayout(head_dim, workspace);
    LoadColumns(call.x, b, head % heads, first, columns);
    float* scores = call.scores + head * call.count * call.stride + first;
    kernels.gemm(call.count, kTile, head_dim, call.vectors + head % heads * call.count * head_dim,
                 head_dim, 1, columns.columns, kTile, scores, call.stride, false);
    for (int64_t i = first; !call.key_mask.empty() && i < std::min(first + kTile, tokens); ++i) {
      if (*call.key_mask.At<uint8_t>(b, i) != 0) continue;
      for (int64_t n = 0; n < call.count; ++n) {
        scores[n * call.stride + i - first] = -std::numeric_limits<float>::infinity();
      }
    }
  });
  return absl::OkStatus();
}

// ---- Sorting ----

size_t SortWorkspaceBytes(Device device, int64_t rows, int64_t key_count, int threads) {
  const int64_t tables = device == Device::kCpu ? threads : rows;
  return static_cast<size_t>(tables) *
         Workspace::Measure([=](Workspace& workspace) { workspace.Take<int32_t>(key_count); });
}

absl::Status SortTokens(Device device, const TokenSortCall& call, const Execution& execution) {
  if (device != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(const GatherKernels* kernels, KernelsFor(device));
    Workspace workspace(execution.workspace);
    SortArguments a = {};
    a.keys = call.keys;
    a.counts = workspace.Take<int32_t>(call.rows * call.key_count);
    a.order = call.order;
    a.places = call.places;
    a.rows = call.rows;
    a.tokens = call.tokens;
    a.key_count = call.key_count;
    a.order_stride = call.order_stride;
    return ToStatus(kernels->sort(a, execution.stream));
  }
  const size_t bytes = SortWorkspaceBytes(device, 1, call.key_count, 1);
  execution.pool->ParallelFor(call.rows, [&](int64_t row, int worker) {
    Workspace workspace(Of(execution, worker, bytes));
    int32_t* next = workspace.Take<int32_t>(call.key_count);  // place of each key's next token
    const int32_t* keys = call.keys + row * call.tokens;
    std::fill_n(next, call.key_count, 0);
    for (int64_t i = 0; i < call.tokens; ++i) ++next[keys[i]];
    int32_t begin = 0;
    for (int64_t k = 0; k < call.key_count; ++k) {
      const int32_t count = next[k];
      next[k] = begin;
      begin += count;
    }
    int32_t* order = call.order + row * call.order_stride;
    for (int64_t i = 0; i < call.tokens; ++i) {
      const int32_t place = next[keys[i]]++;
      order[place] = static_cast<int32_t>(i);
      if (call.places != nullptr) call.places[row * call.tokens + i] = place;
    }
  });
  return absl::OkStatus();
}

// ---- The largest ----

namespace {

// Maps floats to unsigned numbers in the same order; -0 maps like 0, and NaN below all others.
void OrderedKeys(const float* scores, int64_t tokens, uint32_t* keys) {
  std::memcpy(keys, scores, tokens * sizeof(float));
  for (int64_t i = 0; i < tokens; ++i) {
    const uint32_t bits = keys[i], magnitude = bits & 0x7FFFFFFF, negative = 0u - (bits >> 31);
    const uint32_t ordered = magnitude == 0 ? 0x80000000u : bits ^ (negative | 0x80000000u);
    keys[i] = magnitude > 0x7F800000 ? 0 : ordered;
  }
}

int64_t CountFrom(const uint32_t* keys, int64_t tokens, uint32_t least) {
  int64_t count = 0;
  constexpr int64_t kBlock = 1024;
  for (int64_t first = 0; first < tokens; first += kBlock) {
    uint32_t in_block = 0;  // an unsigned of the keys' width, so that the loop vectorizes
    for (int64_t i = first; i < std::min(first + kBlock, tokens); ++i) in_block += keys[i] >= least;
    count += in_block;
  }
  return count;
}

// Bisects for the largest bound that at least `count` keys reach; any bound that exactly as many
// keys reach serves as well.
void SelectLargest(const float* scores, int64_t tokens, int64_t count, uint32_t* keys,
                   int32_t* members) {
  OrderedKeys(scores, tokens, keys);
  uint32_t low = ~uint32_t{0}, high = 0;  // all keys reach low, fewer than `count` reach high + 1
  for (int64_t i = 0; i < tokens; ++i) low = std::min(low, keys[i]);
  for (int64_t i = 0; i < tokens; ++i) high = std::max(high, keys[i]);
  int64_t reach = tokens;  // low
  while (low < high && reach != count) {
    const uint32_t middle = low + (high - low) / 2 + 1;
    const int64_t reach_middle = CountFrom(keys, tokens, middle);
    if (reach_middle >= count) {
      low = middle;
      reach = reach_middle;
    } else {
      high = middle - 1;
    }
  }
  // Where more keys reach the bound than are wanted, the surplus keys equal the bound.
  int64_t equals = std::numeric_limits<int64_t>::max();
  if (reach != count) equals = count - CountFrom(keys, tokens, low + 1);
  int64_t kept = 0;
  constexpr int64_t kBlock = 16;  // most blocks have no member
  for (int64_t first = 0; first < tokens; first += kBlock) {
    const int64_t size = std::min(kBlock, tokens - first);
    if (CountFrom(keys + first, size, low) == 0) continue;
    for (int64_t i = first; i < first + size; ++i) {
      if (keys[i] < low || (keys[i] == low && equals-- <= 0)) continue;
      members[kept++] = static_cast<int32_t>(i);
    }
  }
}

}  // namespace

size_t LargestWorkspaceBytes(Device device, int64_t tokens, int threads) {
  if (device != Device::kCpu) return 0;
  return threads *
         Workspace::Measure([=](Workspace& workspace) { workspace.Take<uint32_t>(tokens); });
}

absl::Status LargestTokens(Device device, const LargestCall& call, const Execution& execution) {
  if (call.count < 0 || call.count > call.tokens) {
    return absl::InternalError(
        absl::StrCat("the ", call.count, " largest of ", call.tokens, " tokens"));
  }
  if (device != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(const GatherKernels* kernels, KernelsFor(device));
    LargestArguments a = {};
    a.scores = call.scores;
    a.members = call.members;
    a.rows = call.rows;
    a.tokens = call.tokens;
    a.stride = call.stride;
    a.count = call.count;
    return ToStatus(kernels->largest(a, execution.stream));
  }
  const size_t bytes = LargestWorkspaceBytes(device, call.tokens, 1);
  execution.pool->ParallelFor(call.rows, [&](int64_t row, int worker) {
    Workspace workspace(Of(execution, worker, bytes));
    SelectLargest(call.scores + row * call.stride, call.tokens, call.count,
                  workspace.Take<uint32_t>(call.tokens), call.members + row * call.count);
  });
  return absl::OkStatus();
}

// ---- Means over groups ----

namespace {

struct MeanScratch {
  float* sums;     // [64][channels]
  int32_t* count;  // [64]
};
MeanScratch MeanLayout(int64_t channels, Workspace& workspace) {
  return {workspace.Take<float>(kTile * channels), workspace.Take<int32_t>(kTile)};
}

// Calls body(place, token) for the members from `first` to end - 1 of a head's groups.
template <class Body>
void ForEachMember(const GroupMeanCall& call, const int32_t* members, int64_t first, int64_t end,
                   const Body& body) {
  for (int64_t n = 0; n < call.groups; ++n) {
    const int32_t* group = members + n * call.size;
    const int32_t* group_end = group + call.size;
    for (const int32_t* m = std::lower_bound(group, group_end, first); m < group_end && *m < end;
         ++m) {
      body(m - members, *m);
    }
  }
}

// Averages the rows of tokens first to first + count - 1 of a head, whose groups and rows are
// given.
void MeanOfTokens(const GroupMeanCall& call, const int32_t* members, const float* rows,
                  int64_t first, int64_t count, const MeanScratch& scratch) {
  const int64_t channels = call.rows.dim(3), stride = call.rows.stride(2);
  std::fill_n(scratch.sums, count * channels, 0.0f);
  std::fill_n(scratch.count, count, 0);
  ForEachMember(call, members, first, first + count, [&](int64_t place, int64_t token) {
    const float* row = rows + place * stride;
    float* sum = scratch.sums + (token - first) * channels;
    for (int64_t c = 0; c < channels; ++c) sum[c] += row[c];
    ++scratch.count[token - first];
  });
  for (int64_t r = 0; r < count; ++r) {
    const float times = static_cast<float>(std::max(scratch.count[r], 1));
    float* sum = scratch.sums + r * channels;
    for (int64_t c = 0; c < channels; ++c) sum[c] /= times;
  }
}

}  // namespace

size_t GroupMeanWorkspaceBytes(Device device, int64_t channels, int threads) {
  if (device != Device::kCpu) return 0;
  return threads *
         Workspace::Measure([=](Workspace& workspace) { MeanLayout(channels, workspace); });
}

namespace {

GroupMeanArguments ArgumentsOf(const GroupMeanCall& call, const ConstTensorView& rows,
                               const ConstTensorView& out) {
  GroupMeanArguments a = {};
  a.members = call.members;
  a.rows = ToDeviceView(rows);
  a.out = ToDeviceView(out);
  a.batch = out.dim(0);
  a.heads = out.dim(1);
  a.tokens = out.dim(2);
  a.groups = call.groups;
  a.size = call.size;
  a.channels = static_cast<int>(out.dim(3));
  return a;
}

}  // namespace

absl::Status MeanOfGroups(Device device, const GroupMeanCall& call, const Execution& execution) {
  const int64_t batch = call.out.dim(0), heads = call.out.dim(1), tokens = call.out.dim(2);
  const int64_t channels = call.out.dim(3);
  if (device != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(const GatherKernels* kernels, KernelsFor(device));
    return ToStatus(kernels->group_mean(ArgumentsOf(call, call.rows, call.out), execution.stream));
  }
  const int64_t tiles = CeilDiv(tokens, kTile);
  const size_t bytes = GroupMeanWorkspaceBytes(device, channels, 1);
  execution.pool->ParallelFor(batch * heads * tiles, [&](int64_t task, int worker) {
    const int64_t row = task / tiles, first = task % tiles * kTile;
    const int64_t count = std::min(kTile, tokens - first);
    Workspace workspace(Of(execution, worker, bytes));
    const MeanScratch scratch = MeanLayout(channels, workspace);
    MeanOfTokens(call, call.members + row * call.groups * call.size,
                 call.rows.At<float>(row / heads, row % heads), first, count, scratch);
    for (int64_t r = 0; r < count; ++r) {
      StoreRow(scratch.sums + r * channels, channels, call.out,
               call.out.Offset(row / heads, row % heads, first + r), call.out.stride(3));
    }
  });
  return absl::OkStatus();
}

absl::Status AddGroupGradients(Device device, const GroupMeanCall& call,
                               const ConstTensorView& out_gradient, const TensorView& rows_gradient,
                               const Execution& execution) {
  if (device != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(const GatherKernels* kernels, KernelsFor(device));
    const GroupGradientArguments a = {ArgumentsOf(call, rows_gradient, out_gradient)};
    return ToStatus(kernels->group_gradient(a, execution.stream));
  }
  const int64_t heads = out_gradient.dim(1), tokens = out_gradient.dim(2);
  const int64_t channels = out_gradient.dim(3), tiles = CeilDiv(tokens, kTile);
  execution.pool->ParallelFor(out_gradient.dim(0) * heads * tiles, [&](int64_t task, int) {
    const int64_t row = task / tiles, first = task % tiles * kTile;
    const int64_t end = std::min(first + kTile, tokens);
    const int32_t* members = call.members + row * call.groups * call.size;
    int32_t counts[kTile] = {};
    ForEachMember(call, members, first, end,
                  [&](int64_t /*place*/, int64_t token) { ++counts[token - first]; });
    ForEachMember(call, members, first, end, [&](int64_t place, int64_t token) {
      const float share = 1 / static_cast<float>(counts[token - first]);
      float gradient[kMaxHeadDim];
      LoadRow(out_gradient, out_gradient.Offset(row / heads, row % heads, token),
              out_gradient.stride(3), channels, gradient);
      float* to = rows_gradient.MutableAt<float>(row / heads, row % heads, place);
      for (int64_t c = 0; c < channels; ++c) to[c] += share * gradient[c];
    });
  });
  return absl::OkStatus();
}

}  // namespace tfb
