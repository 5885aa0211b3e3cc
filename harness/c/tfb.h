/* The C interface of the Transformer Family Bench: every technique as a layer over DLPack tensors,
 * for any language that can load a shared library (libtfb.so).
 *
 *   TfbProblem problem = {1, 8, 8, 4096, 4096, 64, 64, 1, {kDLFloat, 32, 1}};
 *   TfbLayer* layer;
 *   tfb_create("longformer:window=256", &problem, "cpu", 1, 0, &layer);
 *   TfbTensor inputs[] = {{"q", &q}, {"k", &k}, {"v", &v}}, outputs[] = {{"out", &out}};
 *   tfb_setup(layer, inputs, 3, NULL, 0, NULL);
 *   tfb_run(layer, inputs, 3, outputs, 1, NULL, 0, NULL);
 *   tfb_destroy(layer);
 *
 * Errors. A function that can fail returns a TfbStatus; the message of the calling thread's last
 * failure is tfb_last_error. No C++ exception leaves the library. A failed call changes nothing but
 * the contents of outputs and workspace.
 *
 * Tensors. A DLTensor is read and written in place, whatever its strides (null: contiguous, last
 * dimension fastest), and must live until the call returns; a GPU layer's until its stream has done
 * the work. It has 1 to 5 dimensions, and the dtype and shape that tfb_describe names; booleans
 * count as u8. Its device is the layer's: kDLCPU for "cpu", kDLCUDA or kDLCUDAManaged, number 0,
 * for "cuda". An output must not overlap another tensor of the call.
 *
 * Threads. Functions without a layer may be called from any thread at any time, and so may
 * functions of different layers. A layer serves one call at a time: a second one that comes while
 * the first runs is refused with TFB_FAILED_PRECONDITION. What a layer returns a pointer to is the
 * layer's, and stays until the next call of the same function with it, or tfb_destroy.
 *
 * Version. A program built with this header runs with every later library of the same
 * TFB_INTERFACE_VERSION: within a version no function and no struct changes. Functions are added at
 * the end, and JSON may gain members; TFB_INTERFACE_REVISION counts the additions, and each says
 * since which revision it is there. The preprocessor tells the revision of a header, and
 * tfb_interface_revision that of a library; one that lacks this function is of revision 1. A shared
 * library that exports the functions of any revision for techniques of its own can be loaded where
 * libtfb.so can.
 */
#ifndef TFB_HARNESS_C_TFB_H_
#define TFB_HARNESS_C_TFB_H_

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TFB_INTERFACE_VERSION 1
#define TFB_INTERFACE_REVISION 2
#define TFB_EXPORT __attribute__((visibility("default")))

/* The numbers are those of absl::StatusCode. */
typedef enum TfbStatus {
  TFB_OK = 0,
  TFB_CANCELLED = 1,           /* the caller's TfbInterrupted said so */
  TFB_INVALID_ARGUMENT = 3,    /* no such option, size, tensor, ... : the message names it */
  TFB_NOT_FOUND = 5,           /* no such technique or parameter */
  TFB_RESOURCE_EXHAUSTED = 8,  /* no memory */
  TFB_FAILED_PRECONDITION = 9, /* called before tfb_setup, or while another call runs */
  TFB_UNIMPLEMENTED = 12,      /* the technique does not have this combination, or no such device */
  TFB_INTERNAL = 13            /* a kernel failed, or a defect of the library */
} TfbStatus;

/* What is asked of a technique. Query i of a causal problem sees keys j <= i + kv_tokens -
 * query_tokens. Hidden states have query_heads * head_dim channels. */
typedef struct TfbProblem {
  int64_t batch;       /* sequences, 0 or more */
  int64_t query_heads; /* 1 or more, a multiple of kv_heads */
  int64_t kv_heads;
  int64_t query_tokens; /* 0 or more */
  int64_t kv_tokens;
  int64_t head_dim;  /* channels of queries and keys, 1 to 256 */
  int64_t value_dim; /* channels of values and outputs, 1 to 256 */
  int32_t causal;    /* 1 or 0 */
  DLDataType dtype;  /* of inputs and outputs: float32, float16 or bfloat16; sums are float32 */
} TfbProblem;

/* A tensor of a call, by the name that tfb_describe gives. */
typedef struct TfbTensor {
  const char* name;
  const DLTensor* tensor;
} TfbTensor;

/* A technique with its options on one problem and one device. */
typedef struct TfbLayer TfbLayer;

/* Returns TFB_INTERFACE_VERSION as the library was built with. */
TFB_EXPORT int32_t tfb_interface_version(void);

/* Returns the message of the last call of this thread that failed, in UTF-8, without a line's end.
 * It stays until the thread's next failure. */
TFB_EXPORT const char* tfb_last_error(void);

/* Returns a JSON array of all techniques by name:
 *   [{"name", "family", "title", "citation", "definition",
 *     "input_kind": "qkv" | "hidden" | "tokens", "exactness": "exact" | "approximate" | "own",
 *     "causal": [false, true], "devices": ["cpu", ...],
 *     "options": [{"name", "type", "default", "range", "help"}, ...]}, ...]
 * `definition` is the technique of this suite, with options where they are not the technique's own
 * of the same names, whose float64 definition it computes: for libtfb.so its own name. A library of
 * contestants may add "outputs", names of the definition's outputs beside "out" that it writes. */
TFB_EXPORT const char* tfb_techniques(void);

/* Creates a layer. `technique` is a name with its options, "longformer:window=256,dilation=2".
 * `device` is "cpu" or "cuda". Parameters are drawn from `seed`; inputs that are noise are the
 * caller's. `threads` share the work on a CPU, and what Setup does on the host for a GPU; 0 means
 * one for each processor that the program may use. Fails with TFB_NOT_FOUND for an unknown
 * technique, with TFB_INVALID_ARGUMENT for an option or a size that cannot be, with
 * TFB_UNIMPLEMENTED, and the reason, for a combination that the technique does not have, and, as any
 * call here, with TFB_RESOURCE_EXHAUSTED where there is not enough memory. */
TFB_EXPORT TfbStatus tfb_create(const char* technique, const TfbProblem* problem,
                                const char* device, uint64_t seed, int32_t threads,
                                TfbLayer** layer);

/* Frees a layer; null is none. No call with it may be running. */
TFB_EXPORT void tfb_destroy(TfbLayer* layer);

/* Writes a JSON object that tells what the layer is and reads and writes:
 *   {"technique", "problem", "device", "threads", "workspace_bytes": number of bytes,
 *    "inputs": [{"name", "dtype", "shape", "optional", "noise"}, ...], "outputs", "parameters",
 *    "streaming": {"max_segment_tokens", "split_tokens", "inputs", "outputs"} | null,
 *    "flops", "bytes": numbers | null, "counterpart": "dense" | ..., "statistics": {...},
 *    "about": {...}}
 * A shape's -1 is the number of tokens of a segment. `noise` tells the distribution of an input
 * that is noise, or is null. `statistics` are of the last run. `about` may be left out: a library's
 * versions and settings, texts by name, which a sweep of contestants records. */
TFB_EXPORT TfbStatus tfb_describe(TfbLayer* layer, const char** json);

/* Writes the bytes of workspace that setup, run and append need, in the memory of the device. */
TFB_EXPORT TfbStatus tfb_workspace_bytes(TfbLayer* layer, size_t* bytes);

/* Does the work that need not be repeated while the inputs' sizes and the parameters stay:
 * schedules, tables, clustering. It must come before the first run, and again after
 * tfb_set_parameters. Every input that is not optional must be given, and no other.
 *
 * `workspace` has at least tfb_workspace_bytes bytes at an address that 64 divides, of the device's
 * memory. Null, with 0 bytes, lets the layer keep one of its own, which it allocates here, or in
 * the first call that has none. `stream` is the cudaStream_t to work on; null is the default
 * stream. */
TFB_EXPORT TfbStatus tfb_setup(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                               void* workspace, size_t workspace_bytes, void* stream);

/* Computes the outputs. Optional inputs and outputs may be left out. It allocates nothing where a
 * workspace has been given or kept; on a GPU it only enqueues its work. */
TFB_EXPORT TfbStatus tfb_run(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                             const TfbTensor* outputs, size_t output_count, void* workspace,
                             size_t workspace_bytes, void* stream);

/* Takes the next segment of a sequence, which tfb_reset begins, of 1 to max_segment_tokens tokens,
 * and writes the outputs of its tokens. TFB_UNIMPLEMENTED where "streaming" is null. */
TFB_EXPORT TfbStatus tfb_append(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                                const TfbTensor* outputs, size_t output_count, void* workspace,
                                size_t workspace_bytes, void* stream);

/* Begins a new sequence: forgets what has been appended or run. */
TFB_EXPORT TfbStatus tfb_reset(TfbLayer* layer);

/* Makes `tensor` a view of a parameter's memory, which is the host's on every device. The view is
 * valid until tfb_set_parameters or tfb_destroy; do not write through it. */
TFB_EXPORT TfbStatus tfb_get_parameter(TfbLayer* layer, const char* name, DLTensor* tensor);

/* Replaces the parameters that are given by copies of these tensors, which are in the memory of the
 * host and have the parameters' shapes; another dtype is converted where nothing is lost by it but
 * precision. Call tfb_setup afterwards. */
TFB_EXPORT TfbStatus tfb_set_parameters(TfbLayer* layer, const TfbTensor* parameters, size_t count);

/* Evaluates the technique's float64 definition with the layer's parameters. Inputs and outputs are
 * in the memory of the host. The outputs are float64 with the shapes of the layer's; of "weights"
 * [batch, query_heads, query_tokens, kv_tokens], the attention weights, too, where the technique
 * has them. TFB_NOT_FOUND for an output that the definition does not have. It takes time and memory
 * of its own: tokens squared, for most. */
TFB_EXPORT TfbStatus tfb_define(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                                const TfbTensor* outputs, size_t output_count);

/* Judges outputs that were computed from these inputs, or, where there are none, those of a run of
 * the layer itself, against the technique's float64 definition and against dense attention. All
 * tensors are in the memory of the host. `rows` query tokens are checked, evenly spread; 0 means
 * all. Writes a JSON object:
 *   {"definition": {"relative_frobenius": |y - r| / |r|, "max_abs": max |y - r|,
 *                   "max_abs_over_max_value": max |y - r| / max |v|, "mean_cosine",
 *                   "bound": of max_abs_over_max_value, "rows_checked", "not_finite"},
 *    "dense": the same without a bound | null, "no_dense_reason",
 *    "kept_mass": of dense attention's weights, "recall": of its 32 largest weights of a row,
 *    "kl_divergence": nats; numbers | null,
 *    "passed": false where an error is beyond its bound, "failure": which one, "counterpart"}
 * A number that is not finite is the string "inf", "-inf" or "nan". */
TFB_EXPORT TfbStatus tfb_evaluate(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                                  const TfbTensor* outputs, size_t output_count, int64_t rows,
                                  const char** json);

/* Tells whether the call should be given up: not 0. `context` is that of tfb_set_interrupt. */
typedef int32_t (*TfbInterrupted)(void* context);

/* Lets calls of the layer ask `interrupted` some ten times a second, on the thread that made the
 * call. Where it says so, the call returns TFB_CANCELLED soon, and tfb_setup must be the next one
 * with the layer. Null asks nobody. */
TFB_EXPORT TfbStatus tfb_set_interrupt(TfbLayer* layer, TfbInterrupted interrupted, void* context);

/* ---- Revision 2: the backward pass ----
 *
 * With the loss L as a function of the outputs, the backward pass computes dL/d(input) and
 * dL/d(parameter) from dL/d(output). After tfb_setup and tfb_setup_backward, a step of training is
 *
 *   tfb_run_kept(layer, inputs, 3, outputs, 1, NULL, 0, kept, kept_bytes, NULL);
 *   TfbBackwardCall call = {{inputs, 3}, {outputs, 1}, {&out_gradient, 1}, {input_gradients, 3}};
 *   tfb_backward(layer, &call, NULL, 0, kept, kept_bytes, NULL);
 *
 * with any number of other runs between the two, each with kept memory of its own. Gradients are
 * summed in float32, and their bits do not depend on the number of threads. Choices that the run
 * made, such as buckets, stay as they were found. */

/* Returns TFB_INTERFACE_REVISION as the library was built with. */
TFB_EXPORT int32_t tfb_interface_revision(void);

/* Returns TFB_OK where the layer has a backward pass, and otherwise TFB_UNIMPLEMENTED with the
 * reason. Every function below that takes a layer fails with the same reason. */
TFB_EXPORT TfbStatus tfb_check_backward(TfbLayer* layer);

/* Writes a JSON object that tells what tfb_backward takes and writes:
 *   {"kept_bytes", "workspace_bytes": numbers of bytes,
 *    "output_gradients": [{"name", "dtype", "shape", "optional", "noise"}, ...],
 *    "input_gradients", "parameter_gradients": the same,
 *    "stopped": {name: reason, ...}, "flops", "bytes": numbers | null}
 * A gradient has the name and the shape of what it is the gradient of. Those of outputs and inputs
 * have their dtypes, and those of parameters are float32. All are optional. `stopped` are inputs
 * and parameters of floating dtype that have no gradient, such as a memory at which the paper stops
 * it. `flops` and `bytes` are of a call that writes all gradients, and null where tfb_setup has to
 * come before they are known. */
TFB_EXPORT TfbStatus tfb_describe_backward(TfbLayer* layer, const char** json);

/* Writes the bytes that tfb_run_kept keeps for tfb_backward, beside inputs and outputs, in the
 * memory of the device. */
TFB_EXPORT TfbStatus tfb_kept_bytes(TfbLayer* layer, size_t* bytes);

/* Writes the bytes of workspace that tfb_setup_backward and tfb_backward need, in the memory of the
 * device. */
TFB_EXPORT TfbStatus tfb_backward_workspace_bytes(TfbLayer* layer, size_t* bytes);

/* Does the work of tfb_backward that need not be repeated while the inputs' sizes and the
 * parameters stay. It must come behind each tfb_setup, before the first tfb_backward that follows.
 * Inputs and stream are as for tfb_setup; `workspace` has at least tfb_backward_workspace_bytes
 * bytes, or is null as there. */
TFB_EXPORT TfbStatus tfb_setup_backward(TfbLayer* layer, const TfbTensor* inputs,
                                        size_t input_count, void* workspace, size_t workspace_bytes,
                                        void* stream);

/* Computes the outputs as tfb_run does, with the same bits, and keeps in `kept`, at an address that
 * 64 divides, what tfb_backward needs. TFB_INVALID_ARGUMENT where `kept` has fewer than
 * tfb_kept_bytes bytes. */
TFB_EXPORT TfbStatus tfb_run_kept(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                                  const TfbTensor* outputs, size_t output_count, void* workspace,
                                  size_t workspace_bytes, void* kept, size_t kept_bytes,
                                  void* stream);

/* Tensors of a call. */
typedef struct TfbTensors {
  const TfbTensor* tensors;
  size_t count;
} TfbTensors;

/* The tensors of a backward pass, by the names that tfb_describe_backward gives. */
typedef struct TfbBackwardCall {
  TfbTensors inputs;           /* as tfb_run_kept read them */
  TfbTensors outputs;          /* as it wrote them: "out", and others may be there */
  TfbTensors output_gradients; /* dL/d(output); one that is left out is 0 */
  /* Written. One that is left out is not computed. They overlap no other tensor. */
  TfbTensors input_gradients;     /* dL/d(input) */
  TfbTensors parameter_gradients; /* dL/d(parameter), in the memory of the device */
} TfbBackwardCall;

/* Writes the gradients, from what tfb_run_kept of these inputs wrote to `kept`, which stays as it
 * is. The workspace is as for tfb_setup_backward. It allocates nothing where a workspace has been
 * given or kept; on a GPU it only enqueues its work. Fails with TFB_FAILED_PRECONDITION before
 * tfb_setup_backward, and with TFB_INVALID_ARGUMENT for a tensor that is missing, has another shape
 * or dtype, or is none of the layer's. */
TFB_EXPORT TfbStatus tfb_backward(TfbLayer* layer, const TfbBackwardCall* call, void* workspace,
                                  size_t workspace_bytes, void* kept, size_t kept_bytes,
                                  void* stream);

#ifdef __cplusplus
}
#endif

#endif /* TFB_HARNESS_C_TFB_H_ */
