// Scratch memory that the caller provides.
#ifndef TFB_CORE_WORKSPACE_H_
#define TFB_CORE_WORKSPACE_H_

#include <cassert>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace tfb {

// Takes aligned pieces off a span, one after the other. Constructed without memory it only counts,
// so that the code which lays a workspace out also tells its size:
//
//   struct Scratch { float* scores; float* sums; };
//   Scratch Layout(Workspace& workspace) { return {workspace.Take<float>(n * m),
//   workspace.Take<float>(n)}; } size_t bytes = Workspace::Measure([](Workspace& w) { Layout(w);
//   });
class Workspace {
 public:
  static constexpr size_t kAlignment = 64;  // a cache line, and the widest vector

  Workspace() = default;
  explicit Workspace(absl::Span<std::byte> memory) : memory_(memory), counting_(false) {}

  // Returns `count` uninitialised elements, or null while counting.
  template <class T>
  T* Take(int64_t count) {
    const size_t begin = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    if (counting_) return nullptr;
    assert(used_ <= memory_.size());
    return reinterpret_cast<T*>(memory_.data() + begin);
  }

  // Returns the rest of the memory, as a workspace for a step whose scratch is dead when the next
  // step's is taken.
  absl::Span<std::byte> Rest() const { return memory_.subspan(used_); }
  size_t used() const { return used_; }

  template <class LayoutFunction>
  static size_t Measure(LayoutFunction layout) {
    Workspace counter;
    layout(counter);
    return counter.used();
  }

 private:
  absl::Span<std::byte> memory_;
  size_t used_ = 0;
  bool counting_ = true;
};

}  // namespace tfb

#endif  // TFB_CORE_WORKSPACE_H_
