// What onednn_sdpa.cc uses of oneDNN's Graph API, for its test: a graph is evaluated in plain loops
// in float64. It is as strict as oneDNN where a wrong graph would be computed wrongly: shapes are
// inferred and compared, a partition is compiled for exactly its inputs and outputs, and what is
// executed has the strides and the threads that it was compiled for.
#ifndef TFB_HARNESS_CONTESTANTS_PEERS_STAND_IN_ONEAPI_DNNL_DNNL_GRAPH_HPP_
#define TFB_HARNESS_CONTESTANTS_PEERS_STAND_IN_ONEAPI_DNNL_DNNL_GRAPH_HPP_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tbb/task_arena.h"

#define DNNL_RUNTIME_TBB 4u
#define DNNL_RUNTIME_SYCL 512u
#define DNNL_CPU_THREADING_RUNTIME DNNL_RUNTIME_TBB

enum dnnl_status_t {
  dnnl_success,
  dnnl_out_of_memory,
  dnnl_invalid_arguments,
  dnnl_unimplemented,
};

struct dnnl_version_t {
  int major, minor, patch;
  unsigned cpu_runtime;
};
inline const dnnl_version_t* dnnl_version() {
  static const dnnl_version_t version = {3, 13, 2, DNNL_RUNTIME_SYCL};
  return &version;
}

namespace dnnl {

struct error : std::exception {
  error(dnnl_status_t wrong, const char* text) : status(wrong), message(text) {}
  const char* what() const noexcept override { return message; }
  dnnl_status_t status;
  const char* message;
};

struct engine {
  enum class kind { cpu };
  engine(kind, size_t) {}
};

struct stream {
  explicit stream(const engine&) {}
  void wait() {}
};

namespace graph {

inline void Require(bool holds, const char* message) {
  if (!holds) throw error(dnnl_invalid_arguments, message);
}

struct logical_tensor {
  using dims = std::vector<int64_t>;
  enum class data_type { f32, u8 };
  enum class layout_type { strided };

  logical_tensor() = default;
  logical_tensor(size_t tid, data_type dtype, const dims& adims, const dims& astrides)
      : id(tid), type(dtype), shape(adims), strides(astrides) {
    Require(shape.size() == strides.size() && !shape.empty(), "dims and strides");
  }
  logical_tensor(size_t tid, data_type dtype, const dims& adims, layout_type)
      : logical_tensor(tid, dtype, adims, dims(adims.size(), 1)) {
    for (size_t d = shape.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * shape[d];
  }

  size_t get_mem_size() const {
    size_t size = type == data_type::f32 ? sizeof(float) : 1;
    for (const int64_t n : shape) size *= static_cast<size_t>(n);
    return size;
  }

  size_t id = 0;
  data_type type = data_type::f32;
  dims shape, strides;
};
using dims = logical_tensor::dims;

struct op {
  enum class kind { MatMul, Multiply, Add, SoftMax };
  enum class attr { transpose_b, axis, mode };

  op(size_t, kind what, const std::vector<logical_tensor>& from,
     const std::vector<logical_tensor>& to, const std::string&)
      : does(what), inputs(from), output(to.at(0)) {}
  template <class T>
  void set_attr(attr which, const T& value) {
    if constexpr (std::is_same_v<T, std::string>) {
      texts[which] = value;
    } else {
      numbers[which] = static_cast<int64_t>(value);
    }
  }

  kind does;
  std::vector<logical_tensor> inputs;
  logical_tensor output;
  std::map<attr, int64_t> numbers;
  std::map<attr, std::string> texts;
};

struct tensor {
  tensor() = default;
  tensor(const logical_tensor& said, const engine&, void* handle) : lt(said), data(handle) {}
  logical_tensor lt;
  void* data = nullptr;
};

// Elements in row-major order.
struct Array {
  explicit Array(const dims& d) : shape(d), values(1) {
    for (const int64_t n : shape) values.resize(values.size() * static_cast<size_t>(n));
  }
  // Returns the element at an index, whose dimensions of size 1 are broadcast.
  double& At(const dims& index) {
    Require(index.size() == shape.size(), "ranks differ");
    int64_t offset = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      Require(shape[d] == 1 || index[d] < shape[d], "shapes cannot be broadcast");
      offset = offset * shape[d] + (shape[d] == 1 ? 0 : index[d]);
    }
    return values[static_cast<size_t>(offset)];
  }
  void ForEach(const std::function<void(const dims&)>& visit) const {
    dims index(shape.size(), 0);
    for (size_t n = 0; n < values.size(); ++n) {
      size_t rest = n;
      for (size_t d = shape.size(); d-- > 0; rest /= static_cast<size_t>(shape[d])) {
        index[d] = static_cast<int64_t>(rest % static_cast<size_t>(shape[d]));
      }
      visit(index);
    }
  }

  dims shape;
  std::vector<double> values;
};

inline int64_t OffsetOf(const logical_tensor& lt, const dims& index) {
  int64_t offset = 0;
  for (size_t d = 0; d < index.size(); ++d) offset += index[d] * lt.strides[d];
  return offset;
}

inline Array Read(const tensor& t) {
  Array array(t.lt.shape);
  array.ForEach([&](const dims& index) {
    array.At(index) = static_cast<const float*>(t.data)[OffsetOf(t.lt, index)];
  });
  return array;
}

inline void Write(Array array, const tensor& t) {
  array.ForEach([&](const dims& index) {
    static_cast<float*>(t.data)[OffsetOf(t.lt, index)] = static_cast<float>(array.At(index));
  });
}

inline Array MatMul(const op& o, Array a, Array b) {
  const bool transposed =
      o.numbers.count(op::attr::transpose_b) != 0 && o.numbers.at(op::attr::transpose_b) != 0;
  const size_t rank = a.shape.size();
  Require(rank >= 2 && b.shape.size() == rank, "ranks differ");
  if (transposed) {
    Array turned = b;
    std::swap(turned.shape[rank - 2], turned.shape[rank - 1]);
    b.ForEach([&](const dims& index) {
      dims other = index;
      std::swap(other[rank - 2], other[rank - 1]);
      turned.At(other) = b.At(index);
    });
    b = turned;
  }
  Require(a.shape[rank - 1] == b.shape[rank - 2], "rows and columns differ");
  dims shape = a.shape;
  shape[rank - 1] = b.shape[rank - 1];
  Array product(shape);
  product.ForEach([&](const dims& index) {
    dims of_a = index, of_b = index;
    double sum = 0;
    for (int64_t n = 0; n < a.shape[rank - 1]; ++n) {
      of_a[rank - 1] = of_b[rank - 2] = n;
      sum += a.At(of_a) * b.At(of_b);
    }
    product.At(index) = sum;
  });
  return product;
}

inline Array ElementWise(const op& o, Array a, Array b) {
  // A tensor of one number has any rank.
  if (b.values.size() == 1) b.shape.assign(a.shape.size(), 1);
  Array result(a.shape);
  result.ForEach([&](const dims& index) {
    result.At(index) =
        o.does == op::kind::Add ? a.At(index) + b.At(index) : a.At(index) * b.At(index);
  });
  return result;
}

inline Array SoftMax(const op& o, Array a) {
  Require(o.numbers.count(op::attr::axis) != 0 && o.numbers.at(op::attr::axis) == -1, "axis");
  const bool inf_as_zero =
      o.texts.count(op::attr::mode) != 0 && o.texts.at(op::attr::mode) == "inf_as_zero";
  const size_t columns = static_cast<size_t>(a.shape.back());
  for (auto row = a.values.begin(); row != a.values.end(); row += static_cast<long>(columns)) {
    const auto end = row + static_cast<long>(columns);
    const double largest = *std::max_element(row, end);
    const bool none = inf_as_zero && std::isinf(largest);
    double sum = 0;
    for (auto x = row; x != end; ++x) sum += * x = none ? 0 : std::exp(*x - largest);
    for (auto x = row; x != end && !none; ++x) *x /= sum;
  }
  return a;
}

class compiled_partition {
 public:
  compiled_partition(const std::vector<op>& ops, const std::vector<logical_tensor>& inputs,
                     const std::vector<logical_tensor>& outputs)
      : ops_(ops), inputs_(inputs), output_(outputs.at(0)), threads_(tbb::task_arena::current) {
    std::map<size_t, logical_tensor> given, made;
    for (const logical_tensor& lt : inputs) given[lt.id] = lt;
    size_t used = 0;
    for (const op& one : ops_) {
      for (const logical_tensor& lt : one.inputs) {
        if (made.count(lt.id) != 0) continue;
        Require(given.count(lt.id) != 0 && given[lt.id].shape == lt.shape &&
                    given[lt.id].type == lt.type,
                "an input was not given");
        ++used;
      }
      made[one.output.id] = one.output;
    }
    Require(used == inputs.size() && outputs.size() == 1 && output_.id == ops_.back().output.id &&
                output_.shape == ops_.back().output.shape,
            "other inputs or outputs were given");
  }

  logical_tensor query_logical_tensor(size_t id) const {
    Require(id == output_.id, "no such output");
    return output_;
  }

  // Returns a tensor of the size of the scores.
  logical_tensor get_scratchpad_logical_tensor() const {
    const auto bytes = static_cast<int64_t>(ops_.at(0).output.get_mem_size());
    return {0, logical_tensor::data_type::u8, {bytes}, dims{1}};
  }

  void execute(stream&, const std::vector<tensor>& inputs, const std::vector<tensor>& outputs,
               const tensor& scratchpad = tensor()) const {
    Require(threads_ > 0 && threads_ == tbb::task_arena::current, "other threads");
    Require(inputs.size() == inputs_.size() && outputs.size() == 1, "other tensors");
    if (scratchpad.data != nullptr) {
      std::memset(scratchpad.data, 0xff, scratchpad.lt.get_mem_size());
    }
    std::map<size_t, Array> arrays;
    for (size_t n = 0; n < inputs.size(); ++n) {
      Require(inputs[n].lt.id == inputs_[n].id && inputs[n].lt.strides == inputs_[n].strides,
              "an input is not as it was compiled");
      arrays.emplace(inputs[n].lt.id, Read(inputs[n]));
    }
    for (const op& one : ops_) {
      const Array& first = arrays.at(one.inputs.at(0).id);
      Array result = one.does == op::kind::SoftMax ? SoftMax(one, first)
                     : one.does == op::kind::MatMul
                         ? MatMul(one, first, arrays.at(one.inputs.at(1).id))
                         : ElementWise(one, first, arrays.at(one.inputs.at(1).id));
      Require(result.shape == one.output.shape, "the result has another shape");
      arrays.emplace(one.output.id, std::move(result));
    }
    Write(arrays.at(output_.id), outputs[0]);
  }

 private:
  std::vector<op> ops_;
  std::vector<logical_tensor> inputs_;
  logical_tensor output_;
  int threads_;
};

class partition {
 public:
  partition(std::vector<op> ops, bool supported) : ops_(std::move(ops)), supported_(supported) {}
  bool is_supported() const { return supported_; }
  size_t get_ops_num() const { return ops_.size(); }
  compiled_partition compile(const std::vector<logical_tensor>& inputs,
                             const std::vector<logical_tensor>& outputs, const engine&) const {
    return {ops_, inputs, outputs};
  }

 private:
  std::vector<op> ops_;
  bool supported_;
};

class graph {
 public:
  explicit graph(engine::kind) {}
  void add_op(const op& one) { ops_.push_back(one); }
  void finalize() {}

  // Returns one partition for the chain of operations that oneDNN fuses, and else, or for heads of
  // more than 128 channels, so that a test can have several, one for each operation.
  std::vector<partition> get_partitions() const {
    using Kinds = std::vector<op::kind>;
    Kinds kinds;
    bool one = true;
    for (size_t n = 0; n < ops_.size(); ++n) {
      kinds.push_back(ops_[n].does);
      one = one && (n == 0 || ops_[n].inputs.at(0).id == ops_[n - 1].output.id);
    }
    using Kind = op::kind;
    one = one && ops_.at(0).inputs.at(0).shape.back() <= 128 &&
          (kinds == Kinds{Kind::MatMul, Kind::Multiply, Kind::SoftMax, Kind::MatMul} ||
           kinds == Kinds{Kind::MatMul, Kind::Multiply, Kind::Add, Kind::SoftMax, Kind::MatMul});
    if (one) return {partition(ops_, true)};
    std::vector<partition> each;
    for (const op& alone : ops_) each.push_back(partition({alone}, true));
    return each;
  }

 private:
  std::vector<op> ops_;
};

}  // namespace graph
}  // namespace dnnl

#endif  // TFB_HARNESS_CONTESTANTS_PEERS_STAND_IN_ONEAPI_DNNL_DNNL_GRAPH_HPP_
