// Makes the inputs that techniques are run on: drawn ones, and tensors from files.
//
//   gaussian   every element is N(0, 1)
//   peaked     each query has three keys that hold about 80% of its softmax mass
//   needle     each query has one distant key that holds about 99% of it
//   real       tensors captured from a model, shipped with the repository
//   (harness/inputs/README.md)
//   text       hidden states of a language model on text, for techniques with its parameters
//              (harness/inputs/language_model.h)
//   FILE       a safetensors file of the caller's own
//
// Drawn inputs. Everything is a function of (seed, tensor name, element). For peaked and needle
// keys are N(0, 1) scaled to length sqrt(d), and
//
//   q_i = c / sqrt(d) * sum of k_j over j in J_i
//
// for a set J_i of m keys that query i may see. The scores s_ij = q_i . k_j / sqrt(d) of these keys
// are about c, and those of the other n - m about N(0, c^2 m / d), whose mean exponential is
// exp(c^2 m / 2d). So the keys of J_i hold r times the mass of all others where
//
//   c - c^2 m / 2d = log(r n / m).
//
// c is the smaller root; where there is none (few channels, many keys) it is d / m, which maximises
// the left side, and the peaks are lower than stated.
//   peaked: m = 3, r = 4; one key drawn from each third of the keys that i may see.
//   needle: m = 1, r = 99; drawn from those at least n / 4 tokens away from i, where there are any.
// Where queries are the keys (there is no k), tokens n / (m + 1) apart have one direction, and the
// length c with c - c^2 / 2d = log(r n / m): by scores q_i . q_j / |q_j| the m others then hold r
// times the mass of all further ones, i itself not counted. A causal query sees those before it.
//
// Files. Names are q, k, v [batch, heads, tokens, channels], x [batch, tokens, model_dim] and the
// other inputs that a technique declares, each bare or as "layer<N>.name". Sizes are the file's;
// batch and tokens may be cut to a prefix; elements are converted to the requested dtype. A missing
// tensor is NotFound, and is not drawn; only noise is drawn, which no file needs to have.
#ifndef TFB_HARNESS_INPUTS_INPUTS_H_
#define TFB_HARNESS_INPUTS_INPUTS_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/problem.h"
#include "core/safetensors.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "harness/inputs/language_model.h"

namespace tfb {

// The tensors of one layer of a file, or those of a file without layers. Sizes are 0 where the
// tensors that would give them do not exist.
struct CapturedLayer {
  std::string path;   // the path in messages
  std::string file;   // base name of the path
  std::string layer;  // "layer2"; empty where the names have no layer
  std::shared_ptr<const SafetensorsFile> contents;

  int64_t batch = 0;
  int64_t query_heads = 0, query_tokens = 0, head_dim = 0;  // of q
  // The tokens of k and v. Where one is absent they are those of the other, and else those of q.
  int64_t kv_heads = 0, kv_tokens = 0, value_dim = 0;
  int64_t hidden_tokens = 0, model_dim = 0;  // of x
  // Returns how many rows it has for the tokens of a problem.
  int64_t tokens() const { return std::max(query_tokens, hidden_tokens); }

  bool has_queries() const { return head_dim > 0; }
  bool has_hidden() const { return model_dim > 0; }
  // Returns the tensor of that name of this layer, else of the file; null where there is none.
  const Tensor* Find(absl::string_view name) const;
  std::vector<std::string> names() const;  // names that Find knows
  std::string model() const;               // from the metadata; may be empty
};

struct InputSource {
  // "gaussian", "peaked", "needle", "real", "text", "file"
  std::string profile = "gaussian";
  std::shared_ptr<const CapturedLayer> captured;        // set for "real" and "file"
  std::shared_ptr<const LanguageModel> text = nullptr;  // of "text"

  std::string ToString() const;  // "gaussian", "real minilm_512.safetensors layer2"
};

// Returns the sources that one word of --input names: a profile, or a path that ends in
// .safetensors, taken relative to `folder`. A file gives a source for each of its layers, "real"
// one for each layer of each shipped file, the files with fewer tokens first.
absl::StatusOr<std::vector<InputSource>> ParseInputSources(absl::string_view word,
                                                           absl::string_view folder = "");
// Returns the layers of a file that have q or x, in the order of their numbers, or all of its
// layers where none has. Returns NotFound where it has no tensors; InvalidArgument where the sizes
// of q, k, v and x contradict one another.
absl::StatusOr<std::vector<CapturedLayer>> ReadCapturedLayers(const std::string& path);

// Returns the problem nearest to `wanted` that the source can serve: `wanted` itself for a drawn
// source, a problem with the model's heads for text, else the file's sizes with at most the wanted
// batch and tokens. Hidden states are split into the heads that the layer's q has, where it has
// one, else into `wanted`'s. Returns NotFound where the file lacks q or x, whichever such an input
// kind has.
absl::StatusOr<Problem> FitProblem(const InputSource& source, InputKind kind,
                                   const Problem& wanted);

// Returns the same for a technique with its options, for which the file needs only the tensors that
// the technique reads. Where it attends from x to the rows of a tensor `memory`, the number of
// these rows is the problem's kv_tokens; where it reads neither q nor x, the problem has as many
// tokens as all of its tensors have rows for, and `wanted`'s heads. Returns NotFound, with the
// names of the tensors that the technique reads, where the file lacks some of them; InvalidArgument
// where two tensors of the file, cut or not, disagree in a size.
absl::StatusOr<Problem> FitProblem(const InputSource& source, const Technique& technique,
                                   const Options& options, const Problem& wanted);

// Returns NotFound where the source is a file that lacks a tensor of the specs. Optional tensors
// and noise, which is drawn, may be missing.
absl::Status CheckTensorsAreThere(const InputSource& source, const std::vector<TensorSpec>& specs);

// Returns the specs of the tensors that MakeInputs draws.
std::vector<TensorSpec> DrawnInputs(const InputSource& source,
                                    const std::vector<TensorSpec>& specs);

// Returns InvalidArgument where the source is a file with a tensor that is not among the specs. q, k, v and x may be there for techniques of another input kind, and `tokens`,
// which captures have: the text that their tensors are of.
absl::Status CheckTensorsAreRead(const InputSource& source, const std::vector<TensorSpec>& specs);

// Makes a tensor for each spec, and for optional ones only where a file has them. Integers are
// drawn uniformly from 0 to kDrawnIds - 1. Errors:
//   NotFound: the file has no such tensor.
//   InvalidArgument: it has another size, or numbers that the dtype cannot hold.
//   Unimplemented: peaked and needle need q and k, which the specs do not have.
//   ResourceExhausted: no memory.
constexpr int64_t kDrawnIds = 256;
absl::StatusOr<NamedTensors> MakeInputs(const InputSource& source,
                                        const std::vector<TensorSpec>& specs,
                                        const Problem& problem, uint64_t seed);

}  // namespace tfb

#endif  // TFB_HARNESS_INPUTS_INPUTS_H_
