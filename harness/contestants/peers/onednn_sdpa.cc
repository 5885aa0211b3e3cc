// oneDNN Graph's scaled dot-product attention: dense attention, also with grouped heads.
//
// Tried with onednn-devel 2026.1.0, tbb-devel 2023.2.0.
// https://uxlfoundation.github.io/oneDNN/dev_guide_graph_sdpa.html
//
// It computes dense attention exactly, as the graph
//   MatMul of q and k^T, Multiply by 1 / sqrt(head_dim), Add of the causal mask, SoftMax, MatMul
// of which oneDNN makes one partition; the page refuses a case for which it would make more. The
// mask is a tensor [query_tokens, kv_tokens] of 0 and -inf, which the setup writes: the graph could
// have it computed instead (GenIndex, GreaterEqual, Select), but on CPUs oneDNN takes several times
// as long for that as for all of the rest.
//
// One partition is not one kernel. oneDNN has a kernel for CPUs that keeps the scores of a few
// queries in the caches, but for OpenMP and thread pools only. The packages on PyPI run on SYCL and
// TBB; with ONEDNN_VERBOSE=all they say "sdp_decomp_kernel_t,supports OMP or Threadpool runtime
// only" and "sdpa is dispatched to larger_partition_kernel_t", which is a matmul with scale and
// mask as post-operations, a softmax and a matmul, between which all of the scores are in memory:
// in the workspace.
//
// It is for float32 alone: in bfloat16 oneDNN rounds the weights before it averages the values by
// them, and errors can be beyond the bound of the definition.
//
// This is a library, which `tools/setup --peers` compiles into the folder of libdnnl.so.

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "harness/c/tfb.h"
#include "oneapi/dnnl/dnnl_graph.hpp"
#include "tbb/global_control.h"
#include "tbb/task_arena.h"

#if DNNL_CPU_THREADING_RUNTIME != DNNL_RUNTIME_TBB
#error "This page sets the number of TBB's threads, and this oneDNN has another runtime"
#endif

namespace {

using dnnl::graph::logical_tensor;
using dnnl::graph::op;
using Dims = std::vector<int64_t>;
constexpr auto kF32 = logical_tensor::data_type::f32;

thread_local std::string error;

TfbStatus Fail(TfbStatus status, const std::string& message) {
  error = message;
  return status;
}

// Returns the status of a call that may throw what oneDNN throws.
template <class Function>
TfbStatus Guarded(const Function& function) {
  try {
    return function();
  } catch (const dnnl::error& e) {
    const std::string message = std::string("oneDNN: ") + e.what();
    if (e.status == dnnl_unimplemented) return Fail(TFB_UNIMPLEMENTED, message);
    if (e.status == dnnl_out_of_memory) return Fail(TFB_RESOURCE_EXHAUSTED, message);
    return Fail(TFB_INTERNAL, message + ", status " + std::to_string(e.status));
  } catch (const std::bad_alloc&) {
    return Fail(TFB_RESOURCE_EXHAUSTED, "no memory");
  } catch (const std::exception& e) {
    return Fail(TFB_INTERNAL, e.what());
  }
}

// Returns the engine of all layers. It is made in the first setup rather than when the library is
// loaded, because it starts threads and a process with threads cannot be forked.
const dnnl::engine& Engine() {
  static const dnnl::engine* engine = [] {
    // SYCL finds the processor by the driver that lies beside libdnnl.so.
    Dl_info self;
    if (dladdr(reinterpret_cast<void*>(&Engine), &self) != 0) {
      const std::string path = self.dli_fname;
      const std::string driver = path.substr(0, path.rfind('/') + 1) + "libintelocl.so";
      setenv("OCL_ICD_FILENAMES", driver.c_str(), /*overwrite=*/0);
    }
    // TBB has as many threads in all as there were processors for the first of them; layers that
    // come later may have more.
    static const tbb::global_control all_processors(
        tbb::global_control::max_allowed_parallelism,
        static_cast<size_t>(sysconf(_SC_NPROCESSORS_ONLN)));
    return new dnnl::engine(dnnl::engine::kind::cpu, 0);
  }();
  return *engine;
}

Dims ContiguousStrides(const Dims& dims) {
  Dims strides(dims.size(), 1);
  for (size_t d = dims.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * dims[d];
  return strides;
}

// The tensors of the graph, by their numbers in it.
enum TensorId : size_t { kQ, kK, kV, kOut, kScale, kMask, kScores, kScaled, kMasked, kWeights };

}  // namespace

struct TfbLayer {
  TfbProblem problem;
  // With grouped heads the graph has [batch, kv_heads, query_heads / kv_heads, tokens, channels]
  // of q and out and [batch, kv_heads, 1, tokens, channels] of k and v.
  int64_t group;
  std::optional<dnnl::graph::partition> partition;
  std::string description;
  tbb::task_arena arena;
  float scale;
  std::vector<float> mask;  // [query_tokens, kv_tokens]
  std::optional<dnnl::graph::compiled_partition> compiled;
  std::vector<Dims> compiled_strides;
  std::vector<logical_tensor> inputs;
  logical_tensor scratchpad;           // bytes
  std::optional<dnnl::stream> stream;  // since the setup

  TfbLayer(const TfbProblem& p, int32_t threads)
      : problem(p),
        group(p.query_heads / p.kv_heads),
        arena(threads > 0 ? threads : tbb::task_arena::automatic),
        scale(static_cast<float>(1 / std::sqrt(static_cast<double>(p.head_dim)))) {}

  // One query that sees all keys needs no mask.
  bool masked() const { return problem.causal != 0 && problem.query_tokens > 1; }

  Dims QueryDims(int64_t tokens, int64_t channels) const {
    if (group == 1) return {problem.batch, problem.query_heads, tokens, channels};
    return {problem.batch, problem.kv_heads, group, tokens, channels};
  }
  Dims KeyDims(int64_t tokens, int64_t channels) const {
    if (group == 1) return {problem.batch, problem.kv_heads, tokens, channels};
    return {problem.batch, problem.kv_heads, 1, tokens, channels};
  }
  // Returns the strides of a tensor [batch, heads, tokens, channels] in the graph.
  Dims GraphStrides(const DLTensor& tensor, bool of_queries) const {
    const Dims dims(tensor.shape, tensor.shape + tensor.ndim);
    Dims strides = ContiguousStrides(dims);
    if (tensor.strides != nullptr) strides.assign(tensor.strides, tensor.strides + tensor.ndim);
    if (group == 1) return strides;
    const int64_t kv_head = of_queries ? group * strides[1] : strides[1];
    return {strides[0], kv_head, strides[1], strides[2], strides[3]};
  }

  logical_tensor Tensor(TensorId id, const Dims& dims) const {
    return {id, kF32, dims, logical_tensor::layout_type::strided};
  }
  logical_tensor Tensor(TensorId id, const Dims& dims, const Dims& strides) const {
    return {id, kF32, dims, strides};
  }

  // Makes the graph's only partition and the description. Returns TFB_UNIMPLEMENTED where oneDNN
  // would need several partitions.
  TfbStatus Partition() {
    const TfbProblem& p = problem;
    const Dims score_dims = QueryDims(p.query_tokens, p.kv_tokens);
    const logical_tensor q = Tensor(kQ, QueryDims(p.query_tokens, p.head_dim)),
                         k = Tensor(kK, KeyDims(p.kv_tokens, p.head_dim)),
                         v = Tensor(kV, KeyDims(p.kv_tokens, p.value_dim)),
                         out = Tensor(kOut, QueryDims(p.query_tokens, p.value_dim)),
                         scores = Tensor(kScores, score_dims), scaled = Tensor(kScaled, score_dims),
                         masked_scores = Tensor(kMasked, score_dims),
                         weights = Tensor(kWeights, score_dims);
    op scoring(0, op::kind::MatMul, {q, k}, {scores}, "scores");
    scoring.set_attr<bool>(op::attr::transpose_b, true);
    const op scaling(1, op::kind::Multiply, {scores, ScaleTensor()}, {scaled}, "scale");
    const op masking(2, op::kind::Add, {scaled, MaskTensor()}, {masked_scores}, "mask");
    op softmax(3, op::kind::SoftMax, {masked() ? masked_scores : scaled}, {weights}, "softmax");
    softmax.set_attr<int64_t>(op::attr::axis, -1);
    // A query that sees no key has weights of 0.
    softmax.set_attr<std::string>(op::attr::mode, "inf_as_zero");
    const op averaging(4, op::kind::MatMul, {weights, v}, {out}, "values");

    dnnl::graph::graph graph(dnnl::engine::kind::cpu);
    graph.add_op(scoring);
    graph.add_op(scaling);
    if (masked()) graph.add_op(masking);
    graph.add_op(softmax);
    graph.add_op(averaging);
    graph.finalize();
    const std::vector<dnnl::graph::partition> partitions = graph.get_partitions();
    if (partitions.size() != 1 || !partitions[0].is_supported()) {
      return Fail(TFB_UNIMPLEMENTED, "oneDNN makes " + std::to_string(partitions.size()) +
                                         " partitions of this attention, not one");
    }
    partition = partitions[0];
    const dnnl_version_t* version = dnnl_version();
    description =
        "{\"inputs\": [{\"name\": \"q\"}, {\"name\": \"k\"}, {\"name\": \"v\"}], "
        "\"parameters\": [], \"about\": {\"oneDNN\": \"" +
        std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
        std::to_string(version->patch) + "\", \"runtime\": \"" +
        (version->cpu_runtime == DNNL_RUNTIME_SYCL ? "SYCL with TBB" : "TBB") +
        "\", \"threads\": " + std::to_string(arena.max_concurrency()) +
        ", \"partitions\": \"1, of " + std::to_string(partition->get_ops_num()) + " operations\"}}";
    return TFB_OK;
  }

  logical_tensor ScaleTensor() const { return Tensor(kScale, {1}); }
  logical_tensor MaskTensor() const {
    Dims dims(group == 1 ? 4 : 5, 1);
    dims[dims.size() - 2] = problem.query_tokens;
    dims[dims.size() - 1] = problem.kv_tokens;
    return Tensor(kMask, dims);
  }

  // Query i sees keys j <= i + kv_tokens - query_tokens.
  void WriteMask() {
    const int64_t queries = problem.query_tokens, keys = problem.kv_tokens;
    mask.assign(queries * keys, -std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t seen = std::max<int64_t>(0, i + keys - queries + 1);
      std::fill_n(mask.begin() + i * keys, seen, 0.0f);
    }
  }

  // Compiles the partition for these strides of q, k, v and out, unless that has been done. A
  // compiled partition has the threads of the arena that it is compiled in.
  void Compile(const std::vector<Dims>& strides) {
    if (compiled.has_value() && strides == compiled_strides) return;
    const TfbProblem& p = problem;
    inputs = {Tensor(kQ, QueryDims(p.query_tokens, p.head_dim), strides[0]),
              Tensor(kK, KeyDims(p.kv_tokens, p.head_dim), strides[1]),
              Tensor(kV, KeyDims(p.kv_tokens, p.value_dim), strides[2]), ScaleTensor()};
    if (masked()) inputs.push_back(MaskTensor());
    compiled = partition->compile(
        inputs, {Tensor(kOut, QueryDims(p.query_tokens, p.value_dim), strides[3])}, Engine());
    compiled_strides = strides;
    scratchpad = compiled->get_scratchpad_logical_tensor();
  }
  void CompileContiguous() {
    const TfbProblem& p = problem;
    arena.execute([&] {
      Compile({ContiguousStrides(QueryDims(p.query_tokens, p.head_dim)),
               ContiguousStrides(KeyDims(p.kv_tokens, p.head_dim)),
               ContiguousStrides(KeyDims(p.kv_tokens, p.value_dim)),
               ContiguousStrides(QueryDims(p.query_tokens, p.value_dim))});
    });
  }
};

namespace {

// Returns null where there is none of the name.
const DLTensor* Find(const TfbTensor* tensors, size_t count, const char* name) {
  for (size_t n = 0; n < count; ++n) {
    if (std::strcmp(tensors[n].name, name) == 0) return tensors[n].tensor;
  }
  return nullptr;
}

void* Data(const DLTensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

struct Inputs {
  const DLTensor *q, *k, *v;
};

TfbStatus FindInputs(const TfbTensor* tensors, size_t count, Inputs* found) {
  *found = {Find(tensors, count, "q"), Find(tensors, count, "k"), Find(tensors, count, "v")};
  if (count != 3 || found->q == nullptr || found->k == nullptr || found->v == nullptr) {
    return Fail(TFB_INVALID_ARGUMENT, "the inputs are q, k and v");
  }
  return TFB_OK;
}

}  // namespace

extern "C" {

int32_t tfb_interface_version(void) { return TFB_INTERFACE_VERSION; }

const char* tfb_last_error(void) { return error.c_str(); }

const char* tfb_techniques(void) {
  return "[{\"name\": \"sdpa\", \"title\": \"oneDNN Graph SDPA\", \"definition\": \"dense\"}]";
}

TfbStatus tfb_create(const char* technique, const TfbProblem* problem, const char* device,
                     uint64_t /*seed*/, int32_t threads, TfbLayer** layer) {
  const TfbProblem& p = *problem;
  if (std::strcmp(technique, "sdpa") != 0) {
    return Fail(TFB_NOT_FOUND, std::string(technique) + " is not sdpa, which has no options");
  }
  if (std::strcmp(device, "cpu") != 0) return Fail(TFB_UNIMPLEMENTED, "it is for the CPU");
  if (p.batch == 0 || p.query_tokens == 0 || p.kv_tokens == 0) {
    return Fail(TFB_UNIMPLEMENTED, "oneDNN has no graphs of empty tensors");
  }
  if (p.dtype.code != kDLFloat || p.dtype.bits != 32) {
    return Fail(TFB_UNIMPLEMENTED, "it computes in float32");
  }
  return Guarded([&] {
    auto made = std::make_unique<TfbLayer>(p, threads);
    const TfbStatus status = made->Partition();
    if (status == TFB_OK) *layer = made.release();
    return status;
  });
}

void tfb_destroy(TfbLayer* layer) { delete layer; }

TfbStatus tfb_describe(TfbLayer* layer, const char** json) {
  *json = layer->description.c_str();
  return TFB_OK;
}

TfbStatus tfb_workspace_bytes(TfbLayer* layer, size_t* bytes) {
  return Guarded([&] {
    if (!layer->compiled.has_value()) layer->CompileContiguous();
    *bytes = layer->scratchpad.get_mem_size();
    return TFB_OK;
  });
}

TfbStatus tfb_setup(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                    void* /*workspace*/, size_t /*workspace_bytes*/, void* /*stream*/) {
  return Guarded([&] {
    Inputs in;
    const TfbStatus status = FindInputs(inputs, input_count, &in);
    if (status != TFB_OK) return status;
    if (layer->masked()) layer->WriteMask();
    const Dims out_dims = layer->QueryDims(layer->problem.query_tokens, layer->problem.value_dim);
    layer->compiled.reset();
    layer->arena.execute([&] {
      layer->Compile({layer->GraphStrides(*in.q, true), layer->GraphStrides(*in.k, false),
                      layer->GraphStrides(*in.v, false), ContiguousStrides(out_dims)});
      layer->stream.emplace(Engine());
    });
    return TFB_OK;
  });
}

TfbStatus tfb_run(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                  const TfbTensor* outputs, size_t output_count, void* workspace,
                  size_t workspace_bytes, void* /*stream*/) {
  return Guarded([&] {
    Inputs in;
    const TfbStatus status = FindInputs(inputs, input_count, &in);
    if (status != TFB_OK) return status;
    const DLTensor* out = Find(outputs, output_count, "out");
    if (output_count != 1 || out == nullptr) {
      return Fail(TFB_INVALID_ARGUMENT, "the only output is out");
    }
    if (!layer->stream.has_value()) {
      return Fail(TFB_FAILED_PRECONDITION, "tfb_setup comes before tfb_run");
    }
    layer->arena.execute([&] {
      layer->Compile({layer->GraphStrides(*in.q, true), layer->GraphStrides(*in.k, false),
                      layer->GraphStrides(*in.v, false), layer->GraphStrides(*out, true)});
      std::vector<void*> data = {Data(*in.q), Data(*in.k), Data(*in.v), &layer->scale};
      if (layer->masked()) data.push_back(layer->mask.data());
      std::vector<dnnl::graph::tensor> tensors;
      for (size_t n = 0; n < data.size(); ++n) {
        tensors.emplace_back(layer->inputs[n], Engine(), data[n]);
      }
      const dnnl::graph::tensor result(layer->compiled->query_logical_tensor(kOut), Engine(),
                                       Data(*out));
      // Without a scratchpad oneDNN allocates one.
      dnnl::graph::tensor scratchpad;
      if (workspace != nullptr && layer->scratchpad.get_mem_size() <= workspace_bytes) {
        scratchpad = dnnl::graph::tensor(layer->scratchpad, Engine(), workspace);
      }
      layer->compiled->execute(*layer->stream, tensors, {result}, scratchpad);
      layer->stream->wait();
    });
    return TFB_OK;
  });
}

TfbStatus tfb_get_parameter(TfbLayer* /*layer*/, const char* /*name*/, DLTensor* /*tensor*/) {
  return Fail(TFB_NOT_FOUND, "there are no parameters");
}

TfbStatus tfb_set_parameters(TfbLayer* /*layer*/, const TfbTensor* /*parameters*/, size_t count) {
  return count == 0 ? TFB_OK : Fail(TFB_INVALID_ARGUMENT, "there are no parameters");
}

}  // extern "C"
