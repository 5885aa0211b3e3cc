// Self-attention on hidden states to which an encoding of positions has been added: the base of
// techniques that encode positions in this way.
//
//   h^0 = x
//   u_p = scale h^(n-1)_p + P^n_p + t^n,   h^n = multi_head(u)       n = 1 .. applications
//   y = h^applications
//
// P^n has a row for each token, t^n is one row for all tokens. multi_head is the technique of that
// name; each application has projections of its own, and may have an inner technique of its own, or
// all have the same. u and the h between applications are fp32; attention in 16-bit problems rounds
// as multi_head does. Inputs of the inner technique, such as masks, are the same in all
// applications, but for noise and choices to follow: where there are several applications, theirs
// are applicationN.NAME.
//
// A Run that has a backward pass keeps u^n and what multi_head keeps of each application; with
// recompute, u^n alone (core/layers/recompute.h).
#ifndef TFB_CORE_LAYERS_ATTENTION_ENCODED_ATTENTION_H_
#define TFB_CORE_LAYERS_ATTENTION_ENCODED_ATTENTION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/layers/attention/projected_attention.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::layers {

// The plan of all applications, without the numbers that Encodings holds.
struct EncodedAttentionPlan {
  TechniqueList inner = {
      {{"dense", {}}}};  // of all applications, or one for each that is not shared
  bool bias = false;
  bool recompute = false;  // core/layers/recompute.h
  double scale = 1;        // differs from 1 only with positions for every application
  int64_t applications = 1;
  bool shared = false;     // all applications have the same projections
  int64_t rows_added = 0;  // rows of the encodings' parameters that a Run adds
  // The parameters that the encodings are rows of, for the backward pass: P of [tables, any number
  // of rows, model_dim], of which the tokens have rows first_position on, and t [applications,
  // model_dim]. Empty where there is no such parameter.
  absl::string_view positions_parameter = "";
  int64_t first_position = 0;
  absl::string_view times_parameter = "";
};

// The encodings to add, f32, in host memory.
struct Encodings {
  // [tables, tokens, model_dim]: application n adds table n, or nothing where there is none.
  Tensor positions;
  bool repeat = false;  // the only table is added before every application
  Tensor times;         // [applications, model_dim], or empty
};
// Makes the encodings from a layer's parameters, at Setup.
using MakeEncodings = std::function<absl::StatusOr<Encodings>(const NamedTensors& parameters)>;

// Returns the specs of x, the optional key_mask, and the inner technique's further inputs.
std::vector<TensorSpec> EncodedAttentionInputs(const Problem& problem,
                                               const EncodedAttentionPlan& plan);

// Makes the layer. Its parameters are `own`, which are those of the encodings; those of
// ProjectionSpecs; and inner.NAME. The latter two begin with applicationN. where there are several
// applications with projections of their own. Returns InvalidArgument where there are other keys
// than the queries' tokens, and where the number of inner techniques is neither 1 nor that of
// applications. Statistics are those of multi_head, for the first application, and
// kept_bytes_per_block.
absl::StatusOr<std::unique_ptr<Layer>> CreateEncodedAttention(const Problem& problem,
                                                              const EncodedAttentionPlan& plan,
                                                              const std::vector<ParameterSpec>& own,
                                                              MakeEncodings make_encodings,
                                                              Device device, uint64_t seed);

// Returns channel c of P^n_p + t^n in float64, n from 0.
using DefineEncoding = absl::FunctionRef<double(int64_t n, int64_t p, int64_t c)>;

// Computes y in float64, and with request.weights also the weights of the last application. Where
// an inner technique chooses by the order of scores, a near tie before the last application may be
// decided otherwise than in a layer, whose y then differs: with several applications in 16 bits
// that is usual.
absl::Status DefineEncodedAttention(const Problem& problem, const EncodedAttentionPlan& plan,
                                    DefineEncoding encoding, const NamedTensors& parameters,
                                    const Inputs& inputs, const DefinitionRequest& request,
                                    NamedTensors* outputs);

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_ATTENTION_ENCODED_ATTENTION_H_
