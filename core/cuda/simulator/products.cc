// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": fragments and matrix descriptors of
// wgmma.mma_async with 16-bit factors.
#include "core/cuda/simulator/products.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "core/cuda/simulator/device.h"
#include "core/cuda/simulator/machine.h"
#include "core/cuda/simulator/warp_matrix.h"

namespace cuda_simulator {
namespace {

constexpr int kGroupWarps = 4;

// The sums that a product has, which no thread may read yet: a NaN that no arithmetic gives.
constexpr uint32_t kTaken = 0x7fd1a5c3;

bool IsTaken(const float* sum) {
  uint32_t bits;
  std::memcpy(&bits, sum, sizeof(bits));
  return bits == kTaken;
}
bool AreTaken(const std::vector<float*>& sums) {
  return std::all_of(sums.begin(), sums.end(), &IsTaken);
}

void DoNothing(void* const*, unsigned) {}

}  // namespace

// That all warps of a group have issued their first products.
class Products::Issued : public Condition {
 public:
  Issued(const Products* products, int warp, size_t count)
      : products_(products), first_(warp / kGroupWarps * kGroupWarps), count_(count) {}
  bool Holds() const override { return Missing() == kGroupWarps; }
  std::string Text() const override {
    return Format("waits for a product that warp %d has not begun", first_ + Missing());
  }

 private:
  int Missing() const {
    int warp = 0;
    while (warp < kGroupWarps && products_->warps_[first_ + warp].issued >= count_) ++warp;
    return warp;
  }

  const Products* const products_;
  const int first_;
  const size_t count_;
};

void Products::StartBlock() {
  if (!is_used_) return;
  is_used_ = false;
  std::fill(warps_.begin(), warps_.end(), Warp{});
  std::fill(threads_.begin(), threads_.end(), Thread{});
  for (std::vector<Product>& products : products_) products.clear();
}

void Products::FinishThread() {
  const int thread = machine_->block.running();
  for (const Sums& sums : threads_[thread].sums) {
    if (sums.is_done) continue;
    const Warp& warp = warps_[thread / kWarp];
    const bool is_committed = !warp.groups.empty() && sums.last < warp.groups.back();
    machine_->Report(FindingKind::kUnfinishedWork, sums.site, [&] {
      return std::string("starts a product ") +
             (is_committed ? "for which it does not wait before it finishes"
                           : "that no wgmma.commit_group follows");
    });
  }
  threads_[thread].sums.clear();
}

void Products::Fence(const void* site) {
  is_used_ = true;
  MeetInWholeWarp("wgmma.fence", nullptr, &DoNothing, site);
  Thread& self = threads_[machine_->block.running()];
  self.has_fenced = true;
  const auto is_done = [](const Sums& sums) { return sums.is_done; };
  self.sums.erase(std::remove_if(self.sums.begin(), self.sums.end(), is_done), self.sums.end());
}

void Products::Commit(const void* site) {
  struct Meeting {
    static void Complete(void* const*, unsigned) {
      Products& products = running_machine->products;
      products.is_used_ = true;
      Warp& warp = products.warps_[running_machine->block.running() / kWarp];
      warp.groups.push_back(warp.issued);
    }
  };
  MeetInWholeWarp("wgmma.commit_group", nullptr, &Meeting::Complete, site);
}

void Products::Wait(int groups, const void* site) {
  char name[32];  // all lanes wait for the same
  std::snprintf(name, sizeof(name), "wgmma.wait_group %d", groups);
  MeetInWholeWarp(name, nullptr, &DoNothing, site);
  const int thread = machine_->block.running(), warp = thread / kWarp;
  const std::vector<size_t>& ends = warps_[warp].groups;
  if (static_cast<size_t>(groups) >= ends.size()) return;
  const size_t done = ends[ends.size() - 1 - static_cast<size_t>(groups)];
  if (done == 0) return;
  const Issued issued(this, warp, done);
  while (!machine_->block.WaitFor(issued, site)) {
  }
  const int group = warp / kGroupWarps;
  machine_->checker.order.EndOf(group, products_[group][done - 1].when);
  for (Sums& sums : threads_[thread].sums) {
    if (sums.is_done || sums.last >= done) continue;
    sums.is_done = true;
    if (!AreTaken(sums.registers)) {
      machine_->Report(FindingKind::kRace, site,
                       [] { return "waits for a product whose sums have changed meanwhile"; });
      continue;  // the registers may be others by now
    }
    for (size_t n = 0; n < sums.values.size(); ++n) *sums.registers[n] = sums.values[n];
  }
}

void Products::Start(const ProductOperands& operands) {
  MeetInWholeWarp(operands.opcode, const_cast<ProductOperands*>(&operands), &Products::Complete,
                  operands.site);
}

void Products::Complete(void* const lanes[kWarp], unsigned) {
  const ProductOperands* operands[kWarp];
  for (int lane = 0; lane < kWarp; ++lane) {
    operands[lane] = static_cast<const ProductOperands*>(lanes[lane]);
  }
  running_machine->products.is_used_ = true;
  running_machine->products.Multiply(operands);
}

// Returns the warp's next product, as the first warp of its group issued it.
const Products::Product& Products::Issue(int warp, const ProductOperands& operands) {
  const auto fail = [&](const char* why) {  // no string: an abandoned thread destroys nothing
    machine_->Report(FindingKind::kBadInstruction, operands.site, [&] {
      return std::string(operands.opcode) + Format(" in warp %d, ", warp) + why;
    });
    machine_->block.Abandon();
  };
  const int group = warp / kGroupWarps;
  if ((group + 1) * kGroupWarps * kWarp > machine_->block.count()) {
    fail("whose group of four the block has not");
  }
  std::vector<Product>& products = products_[group];
  const size_t number = warps_[warp].issued++;
  if (number == products.size()) {
    products.push_back({operands.shape, operands.a_matrix, operands.b_matrix, operands.adds,
                        machine_->checker.order.Next()});
  }
  const Product& product = products[number];
  if (product.shape != operands.shape || product.a_matrix != operands.a_matrix ||
      product.b_matrix != operands.b_matrix || product.adds != operands.adds) {
    fail("where another warp of its group issued another product");
  }
  return product;
}

// Takes a thread's sums for a product, and returns what it adds to in `values`.
Products::Sums* Products::Take(int thread, const ProductOperands& operands, float* values) {
  const size_t count = static_cast<size_t>(operands.shape->columns) / 2;
  Thread& self = threads_[thread];
  const auto report_fence = [&](const char* what) {
    machine_->ReportOf(thread, FindingKind::kMissingFence, operands.site,
                       [&] { return std::string(operands.opcode) + what; });
  };
  if (!self.has_fenced) report_fence(" with no wgmma.fence before it");
  self.has_fenced = true;
  auto sums = std::find_if(self.sums.begin(), self.sums.end(), [&](const Sums& other) {
    return other.registers[0] == operands.sums[0] && other.registers.size() == count;
  });
  if (sums == self.sums.end()) {
    self.sums.emplace_back();
    sums = self.sums.end() - 1;
    sums->registers.assign(operands.sums, operands.sums + count);
    sums->values.resize(count);
  } else if (!sums->is_done) {
    if (!AreTaken(sums->registers)) {
      machine_->ReportOf(thread, FindingKind::kRace, operands.site, [] {
        return "adds a product to sums that have changed since the product before";
      });
    }
  } else {
    for (size_t n = 0; n < count; ++n) {
      if (std::memcmp(operands.sums[n], &sums->values[n], sizeof(float)) == 0) continue;
      report_fence(" with sums that have changed since the last wgmma.fence");
      break;
    }
  }
  const bool goes_on = !sums->is_done && AreTaken(sums->registers);
  for (size_t n = 0; n < count; ++n) {
    values[n] = !operands.adds ? 0 : goes_on ? sums->values[n] : *operands.sums[n];
    std::memcpy(operands.sums[n], &kTaken, sizeof(kTaken));
  }
  sums->last = warps_[thread / kWarp].issued - 1;
  sums->site = operands.site;
  sums->is_done = false;
  return &*sums;
}

namespace {

// The fields of a matrix descriptor, in bytes.
struct Matrix {
  explicit Matrix(uint64_t descriptor)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4),
        others(descriptor & ~(uint64_t{0x3fff} | uint64_t{0x3fff} << 16 | uint64_t{0x3fff} << 32)) {
  }
  uint32_t start, leading, stride;
  uint64_t others;  // all other bits
};
constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;

}  // namespace

// Loads rows `first` on of a factor whose rows have 16 numbers of the summed dimension. Number k of
// row r goes to numbers[(r - first) * of_row + k * of_k].
void Products::Load(const ProductOperands& operands, uint64_t descriptor, bool transposed,
                    int first, int count, Stamp when, float* numbers, int of_row, int of_k) {
  const Matrix matrix(descriptor);
  const SharedShadow::Agent agent{kMaxThreads + machine_->block.running() / (kWarp * kGroupWarps),
                                  when};
  const auto fail = [&](FindingKind kind, const char* why) {
    machine_->Report(kind, operands.site, [&] {
      return operands.opcode +
             Format(" of the matrix %016llx, ", static_cast<unsigned long long>(descriptor)) + why;
    });
    machine_->block.Abandon();
  };
  if (matrix.others != kSwizzle128) {
    fail(FindingKind::kBadInstruction,
         "whose layout the simulator does not know: it knows 128-byte swizzle with base offset 0");
  }
  if ((matrix.start & 0x380) != 0) {
    fail(FindingKind::kMisaligned, "which does not begin in the first of 8 rows of 128 bytes");
  }
  // 8 numbers side by side are 16 bytes, which the swizzle moves together.
  for (int line = transposed ? 0 : first; line < (transposed ? 16 : first + count); ++line) {
    for (int n = transposed ? first : 0; n < (transposed ? first + count : 16); n += 8) {
      const int row = line % 8 * 128 + n % 64 * 2;
      const uint32_t panel = static_cast<uint32_t>(n / 64) * matrix.leading;
      uint32_t address = matrix.start + panel + static_cast<uint32_t>(line / 8) * matrix.stride +
                         static_cast<uint32_t>(row);
      address ^= (address >> 7 & 7) << 4;
      const auto* place = static_cast<const char*>(machine_->checker.SharedAt(address));
      if (place == nullptr) {
        fail(FindingKind::kOutOfBounds, "which is not all in the block's shared memory");
      }
      machine_->checker.Check({reinterpret_cast<uintptr_t>(place), 16, AccessKind::kProductRead,
                               operands.site, &agent});
      unsigned short halves[8];
      std::memcpy(halves, place, sizeof(halves));
      for (int i = 0; i < 8; ++i) {
        const int r = transposed ? n + i : line, k = transposed ? line : n + i;
        numbers[(r - first) * of_row + k * of_k] = WidenHalf(operands.shape->is_bf16, halves[i]);
      }
    }
  }
}

void Products::Multiply(const ProductOperands* const lanes[kWarp]) {
  const int warp = machine_->block.running() / kWarp;
  const ProductOperands& operands = *lanes[0];
  for (int lane = 1; lane < kWarp; ++lane) {
    if (lanes[lane]->a_matrix == operands.a_matrix && lanes[lane]->b_matrix == operands.b_matrix &&
        lanes[lane]->adds == operands.adds) {
      continue;
    }
    machine_->ReportOf(warp * kWarp + lane, FindingKind::kBadInstruction, operands.site, [&] {
      return operands.opcode + std::string(" with other operands than the warp's lane 0");
    });
    machine_->block.Abandon();
  }
  const ProductShape& shape = *operands.shape;
  const Product product = Issue(warp, operands);
  if (shape.a_in_registers) {
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int n = 0; n < 8; ++n) {  // as in mma.m16n8k16
        const int row = lane / 4 + n / 2 % 2 * 8, k = lane % 4 * 2 + n / 4 * 8 + n % 2;
        const unsigned pair = lanes[lane]->a[n / 2];
        a_[row][k] = WidenHalf(shape.is_bf16, static_cast<unsigned short>(pair >> 16 * (n % 2)));
      }
    }
  } else {
    Load(operands, operands.a_matrix, shape.a_transposed, warp % kGroupWarps * 16, 16, product.when,
         a_[0], 16, 1);
  }
  Load(operands, operands.b_matrix, shape.b_transposed, 0, shape.columns, product.when, b_[0], 1,
       kMostColumns);
  // Register 4 c + e of a lane is register e of mma.m16n8k16 in columns 8 c on.
  float of_lane[kMostColumns / 2];
  Sums* taken[kWarp];
  const auto for_each_sum = [&](int lane, auto&& call) {
    for (int n = 0; n < shape.columns / 2; ++n) {
      call(n, &product_[lane / 4 + n / 2 % 2 * 8][n / 4 * 8 + lane % 4 * 2 + n % 2]);
    }
  };
  for (int lane = 0; lane < kWarp; ++lane) {
    taken[lane] = Take(warp * kWarp + lane, *lanes[lane], of_lane);
    for_each_sum(lane, [&](int n, float* sum) { *sum = of_lane[n]; });
  }
  for (int row = 0; row < 16; ++row) {
    MultiplyRow(shape.is_bf16, a_[row], b_[0], kMostColumns, shape.columns, product_[row]);
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    for_each_sum(lane, [&](int n, const float* sum) { taken[lane]->values[n] = *sum; });
  }
  machine_->block.Wake();
}

}  // namespace cuda_simulator
