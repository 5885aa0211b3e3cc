#include "core/gather/gather.h"

#include <algorithm>
#include <cmath>
#include <cstring>

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

// A thread's part of the workspace.
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

constexpr int64_t kNormChannels = 512;  // of a part of a row, on the stack

// Calls act(first, part, count) for the parts of a row of x as floats.
template <class Act>
void ForEachPart(const ConstTensorView& x, int64_t offset, const Act& act) {
  float part[kNormChannels];
  const int64_t channels = x.dim(3), stride = x.stride(3);
  for (int64_t first = 0; first < channels; first += kNormChannels) {
    const int64_t count = std::min(kNormChannels, channels - first);
    LoadRow(x, offset + first * stride, stride, count, part);
    act(first, part, count);
  }
}

// The sum of term(channel) over a row, sixteen sums side by side.
template <class Real, class Term>
Real SumOfRow(const ConstTensorView& x, int64_t offset, const Term& term) {
  constexpr int64_t kLanes = 16;
  Real sums[kLanes] = {};
  ForEachPart(x, offset, [&](int64_t, const float* part, int64_t count) {
    int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += term(Real{part[c + lane]});
    }
    for (; c < count; ++c) sums[c % kLanes] += term(Real{part[c]});
  });
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0];
}

// In Real arithmetic.
template <class Real>
void NormalizeRow(const RowNorm& norm, const ConstTensorView& x, int64_t from, const TensorView& y,
                  int64_t to) {
  const Real count = static_cast<Real>(x.dim(3));
  Real mean = 0;
  if (norm.centered) mean = SumOfRow<Real>(x, from, [](Real value) { return value; }) / count;
  Real squares =
      SumOfRow<Real>(x, from, [mean](Real value) { return (value - mean) * (value - mean); });
  if (norm.mean_square) squares /= count;
  const Real root = std::sqrt(squares + static_cast<Real>(norm.epsilon));
  const Real factor = root == 0 ? 0 : 1 / root;
  ForEachPart(x, from, [&](int64_t first, float* part, int64_t in_part) {
    for (int64_t c = 0; c < in_part; ++c) {
      part[c] = static_cast<float>((Real{part[c]} - mean) * factor);
    }
    StoreRow(part, in_part, y, to + first * y.stride(3), y.stride(3));
  });
}

}  // namespace

absl::Status NormalizeRows(Device device, const RowNorm& norm, const ConstTensorView& x,
                           const TensorView& y, const Execution& execution) {
  const int64_t batch = x.dim(0), heads = x.dim(1), tokens = x.dim(2);
  if (device != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(const GatherKernels* kernels, KernelsFor(device));
    NormalizeArguments a = {};
    a.x = ToDeviceView(x);
    a.y = ToDeviceView(y);
    a.batch = batch;
    a.heads = heads;
    a.tokens = tokens;
    a.channels = static_cast<int>(x.dim(3));
    a.centered = norm.centered;
    a.mean_square = norm.mean_square;
    a.epsilon = norm.epsilon;
    return ToStatus(kernels->normalize(a, execution.stream));
  }
  const int64_t tiles = CeilDiv(tokens, kTile);
  execution.pool->ParallelFor(batch * heads * tiles, [&](int64_t task, int) {
    const int64_t b = task / tiles / heads, h = task / tiles % heads, first = task % tiles * kTile;
    for (int64_t i = first; i < std::min(first + kTile, tokens); ++i) {
      const int64_t from = x.Offset(b, h, i), to = y.Offset(b, h, i);
      if (y.dtype == DType::kF32) {
        NormalizeRow<float>(norm, x, from, y, to);
      } else {
        NormalizeRow<double>(norm, x, from, y, to);
      }
    }
  });
  return absl::OkStatus();
}

// ---- Angular hashing ----

namespace {

struct HashScratch {
  float* rows;      // [64][head_dim rounded to 4]
  float* columns;   // [head_dim rounded to 4][64]
  float* products;  // [rounds * columns][64]
  int32_t* index;   // [64]
};
HashScratch HashLayout(int64_t head_dim, int64_t products, Workspace& workspace) {
  const int64_t depth = RoundUp(head_dim, 4);
  return {workspace.Take<float>(kTile * depth), workspace.Take<float>(depth * kTile),
          workspace.Take<float>(products * kTile), workspace.Take<int32_t>(kTile)};
}

}  // namespace

absl::StatusOr<AngularHash> AngularHash::Create(Device device, const ConstTensorView& rotations,
                                                const std::vector<int64_t>& columns_of_factors) {
  AngularHash hash;
  hash.head_dim_ = rotations.dim(0);
  hash.rounds_ = rotations.dim(1);
  hash.factors_ = columns_of_factors;
  int64_t columns = 0;
  for (const int64_t of_factor : columns_of_factors) columns += of_factor;
  if (columns != rotations.dim(2)) {
    return absl::InternalError(absl::StrCat("rotations ", ShapeString(rotations.shape()),
                                            " for factors of ", columns, " columns in all"));
  }
  std::vector<float> rows;
  for (int64_t round = 0; round < hash.rounds_; ++round) {
    for (int64_t n = 0; n < columns; ++n) {
      for (int64_t c = 0; c < hash.head_dim_; ++c) {
        rows.push_back(static_cast<float>(rotations.Get(rotations.Offset(c, round, n))));
      }
    }
  }
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
  a.columns = static_cast<int>(rotations_.size() / std::max<int64_t>(rounds_ * head_dim_, 1));
  a.factor_count = static_cast<int>(factors_.size());
  a.head_dim = static_cast<int>(head_dim_);
  return ToStatus(kernels->hash(a, execution.stream));
}

absl::Status AngularHash::RunCpu(const ConstTensorView& x, int32_t* buckets,
                                 const Execution& execution) const {
  const int64_t batch = x.dim(0), heads = x.dim(1), tokens = x.dim(2);
  const int64_t tiles = CeilDiv(tokens, kTile), depth = RoundUp(head_dim_, 4);
  const int64_t products = rotations_.size() / std::max<int64_t>(head_dim_, 1);
  const size_t bytes = WorkspaceBytes(Device::kCpu, head_dim_, rounds_, products / rounds_, 1);
  const CpuKernels& kernels = BestCpuKernels();
  execution.pool->ParallelFor(batch * heads * tiles, [&](int64_t task, int worker) {
    const int64_t row = task / tiles, first = task % tiles * kTile;
    const int64_t count = std::min(kTile, tokens - first);
    Workspace workspace(Of(execution, worker, bytes));
    const HashScratch scratch = HashLayout(head_dim_, products, workspace);
    std::memset(scratch.rows, 0, kTile * depth * sizeof(float));
    for (int64_t r = 0; r < count; ++r) {
      LoadRow(x, x.Offset(row / heads, row % heads, first + r), x.stride(3), head_dim_,
              scratch.rows + r * depth);
    }
    kernels.transpose64(scratch.rows, depth, depth, scratch.columns);
    kernels.gemm(products, kTile, head_dim_, rotations_.data(), head_dim_, 1, scratch.columns,
                 kTile, scratch.products, kTile, false);
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

// ---- Sorting ----

size_t SortWorkspaceBytes(Device device, int64_t rows, int64_t key_count, int threads) {
  const int64_t tables = device == Device::kCpu ? threads : rows;
  return static_cast<size_t>(tables) *
         Workspace::Measure([=](Workspace& workspace) { workspace.Take<int32_t>(key_count); });
}

absl::Status SortTokens(Device device, const SortCall& call, const Execution& execution) {
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

// Unsigned numbers in the order of the floats; NaN below all.
uint32_t Ordered(float x) {
  const float positive_zero = x + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &positive_zero, sizeof(bits));
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return x != x ? 0 : ordered;
}

int64_t CountFrom(const uint32_t* keys, int64_t tokens, uint32_t least) {
  int64_t count = 0;
  for (int64_t i = 0; i < tokens; ++i) count += keys[i] >= least;
  return count;
}

// Bisects for the largest bound that at least `count` keys reach; any bound that just so many reach
// does as well.
void SelectLargest(const float* scores, int64_t tokens, int64_t count, uint32_t* keys,
                   int32_t* members) {
  uint32_t low = ~uint32_t{0}, high = 0;  // all keys reach low, fewer than `count` reach high + 1
  for (int64_t i = 0; i < tokens; ++i) {
    keys[i] = Ordered(scores[i]);
    low = std::min(low, keys[i]);
    high = std::max(high, keys[i]);
  }
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
  // Where more reach the bound than are wanted, what is too much equals it.
  int64_t equals = 0;
  for (int64_t i = 0; reach != count && i < tokens; ++i) equals += keys[i] == low;
  int64_t left = equals - (reach - count), kept = 0;
  for (int64_t i = 0; i < tokens && kept < count; ++i) {
    const bool equal = keys[i] == low;
    const bool keep = keys[i] >= low && (!equal || reach == count || left-- > 0);
    members[kept] = static_cast<int32_t>(i);
    kept += keep;
  }
}

}  // namespace

size_t LargestWorkspaceBytes(Device device, int64_t tokens, int threads) {
  if (device != Device::kCpu) return 0;
  return threads *
         Workspace::Measure([=](Workspace& workspace) { workspace.Take<uint32_t>(tokens); });
}

absl::Status LargestTokens(Device device, int64_t rows, int64_t tokens, int64_t count,
                           const float* scores, int32_t* members, const Execution& execution) {
  if (count < 0 || count > tokens) {
    return absl::InternalError(absl::StrCat("the ", count, " largest of ", tokens, " tokens"));
  }
  if (device != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(const GatherKernels* kernels, KernelsFor(device));
    LargestArguments a = {};
    a.scores = scores;
    a.members = members;
    a.rows = rows;
    a.tokens = tokens;
    a.count = count;
    return ToStatus(kernels->largest(a, execution.stream));
  }
  const size_t bytes = LargestWorkspaceBytes(device, tokens, 1);
  execution.pool->ParallelFor(rows, [&](int64_t row, int worker) {
    Workspace workspace(Of(execution, worker, bytes));
    SelectLargest(scores + row * tokens, tokens, count, workspace.Take<uint32_t>(tokens),
                  members + row * count);
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

// Of tokens first to first + count - 1 of a head, whose groups and their rows are given.
void MeanOfTokens(const GroupMeanCall& call, const int32_t* members, const float* rows,
                  int64_t first, int64_t count, const MeanScratch& scratch) {
  const int64_t channels = call.rows.dim(3), stride = call.rows.stride(2);
  std::fill_n(scratch.sums, count * channels, 0.0f);
  std::fill_n(scratch.count, count, 0);
  for (int64_t n = 0; n < call.groups; ++n) {
    const int32_t* group = members + n * call.size;
    const int32_t* end = group + call.size;
    for (const int32_t* m = std::lower_bound(group, end, first); m < end && *m < first + count;
         ++m) {
      const float* row = rows + (m - members) * stride;
      float* sum = scratch.sums + (*m - first) * channels;
      for (int64_t c = 0; c < channels; ++c) sum[c] += row[c];
      ++scratch.count[*m - first];
    }
  }
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

absl::Status MeanOfGroups(Device device, const GroupMeanCall& call, const Execution& execution) {
  const int64_t batch = call.out.dim(0), heads = call.out.dim(1), tokens = call.out.dim(2);
  const int64_t channels = call.out.dim(3);
  if (device != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(const GatherKernels* kernels, KernelsFor(device));
    GroupMeanArguments a = {};
    a.members = call.members;
    a.rows = ToDeviceView(call.rows);
    a.out = ToDeviceView(call.out);
    a.batch = batch;
    a.heads = heads;
    a.tokens = tokens;
    a.groups = call.groups;
    a.size = call.size;
    a.channels = static_cast<int>(channels);
    return ToStatus(kernels->group_mean(a, execution.stream));
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

}  // namespace tfb
