// Implements the products of warp groups: PTX's wgmma.
#ifndef TFB_CORE_CUDA_SIMULATOR_PRODUCTS_H_
#define TFB_CORE_CUDA_SIMULATOR_PRODUCTS_H_

#include <cstdint>
#include <vector>

#include "core/cuda/simulator/order.h"

namespace cuda_simulator {

struct Machine;

// A product as its instruction's text has it: sums[64][columns] (+)= a[64][16] b[16][columns].
struct ProductShape {
  int columns;
  bool is_bf16;
  bool a_in_registers;
  bool a_transposed;  // rows of shared memory are of the summed dimension
  bool b_transposed;
};
constexpr int kMostColumns = 128;

// The operands of a thread.
struct ProductOperands {
  const char* opcode;
  const void* site;
  const ProductShape* shape;
  float* sums[kMostColumns / 2];
  unsigned a[4];      // where a is in registers
  uint64_t a_matrix;  // descriptors
  uint64_t b_matrix;
  bool adds;
};

// A warp multiplies its 16 rows when it issues a product. Its sums are NaN until the thread waits for
// them. A product is done when all four warps of its group have issued it, and each of them waits
// for that; the reads of shared memory are those of an agent of the group.
//
// Members are for the running thread, which meets its warp.
class Products {
 public:
  explicit Products(Machine* machine)
      : machine_(machine), warps_(kMaxThreads / kWarp), threads_(kMaxThreads) {}

  void StartBlock();
  // Finds products of the thread that it has not waited for.
  void FinishThread();

  void Fence(const void* site);
  void Start(const ProductOperands& operands);
  void Commit(const void* site);
  // Waits until at most `groups` groups are not done.
  void Wait(int groups, const void* site);

 private:
  class Issued;
  // Sums of a thread that a product has, or gave back since the last fence.
  struct Sums {
    std::vector<float*> registers;
    std::vector<float> values;
    size_t last;  // the product that changes them last
    const void* site;
    bool is_done = false;
  };
  struct Thread {
    std::vector<Sums> sums;
    bool has_fenced = false;
  };
  // A product that some warp of a group has issued: all must issue the same.
  struct Product {
    const ProductShape* shape;
    uint64_t a_matrix;
    uint64_t b_matrix;
    bool adds;
    Stamp when;
  };
  struct Warp {
    size_t issued = 0;           // products
    std::vector<size_t> groups;  // the products issued before each commit
  };

  static void Complete(void* const lanes[kWarp], unsigned);
  void Multiply(const ProductOperands* const lanes[kWarp]);
  const Product& Issue(int warp, const ProductOperands& operands);
  Sums* Take(int thread, const ProductOperands& operands, float* sums);
  void Load(const ProductOperands& operands, uint64_t matrix, bool transposed, int first, int count,
            Stamp when, float* numbers, int of_row, int of_k);

  Machine* const machine_;
  bool is_used_ = false;  // since StartBlock
  std::vector<Warp> warps_;
  std::vector<Thread> threads_;
  std::vector<Product> products_[kProductAgents];  // of each warp group
  // The factors and sums of a warp's product, which would fill much of a thread's stack.
  float a_[16][16];
  float b_[16][kMostColumns];
  float product_[16][kMostColumns];
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_PRODUCTS_H_
