// Reads a small language model of bytes that was trained on text, and text that it has not seen.
// With drawn weights a memory has no effect on quality; with trained ones a technique is judged by
// how well it predicts text.
//
//   x_t = embedding[byte_t],   h = stack(x),   p(byte_t+1 | ...) = softmax(output LN(h_t))
//
// The stack is a technique, for which the model provides the parameters: a file names the technique
// it was trained with. Any technique on hidden states whose parameters the file has can replace the
// stack, and any on tokens (InputKind::kTokens) can follow it. A technique with early exits
// normalises the states itself, and has "final_norm.gamma" among its parameters.
//
//   bits per byte = mean over t of -log2 p(byte_t+1)
//
// A folder has
//
//   model.safetensors  "embedding" [vocabulary, model_dim], "output" the same, "final_norm.gamma",
//                      ".beta" [model_dim], and the parameters of techniques by their names;
//                      metadata "technique" (the stack and its options), "heads", "data"
//   exits.safetensors  more parameters of techniques, if there is such a file: classifiers of exits
//   held_out.txt       bytes that the model was not trained on
//   datastore.txt      bytes that it was trained on, for techniques that retrieve similar states
#ifndef TFB_HARNESS_INPUTS_LANGUAGE_MODEL_H_
#define TFB_HARNESS_INPUTS_LANGUAGE_MODEL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/options.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/thread_pool.h"

namespace tfb {

// The model's states for bytes: a row for each.
struct ModelStates {
  Tensor x;        // f32 [tokens, model_dim]: LN(h), from which the next byte is predicted
  Tensor context;  // f32 [tokens, model_dim]: the stack's output "context", the datastore's keys
};

class LanguageModel {
 public:
  // Returns NotFound where there is no such file, and InvalidArgument with what is wrong with it.
  static absl::StatusOr<std::shared_ptr<const LanguageModel>> Read(const std::string& folder);

  const TechniqueSpec& stack() const { return stack_; }
  const std::string& file() const { return path_; }
  const std::string& data() const { return data_; }  // the data it was trained on, in one line
  int64_t heads() const { return heads_; }
  int64_t model_dim() const { return embedding().dim(1); }
  int64_t vocabulary() const { return embedding().dim(0); }
  const NamedTensors& parameters() const { return parameters_; }  // f32
  uint64_t fingerprint() const { return fingerprint_; }

  // Returns the model's problem of the same batch and length.
  Problem Fit(const Problem& wanted) const;
  // Returns the given options, and the stack's for those that are not given, where the technique
  // has them.
  Options FitOptions(const TechniqueInfo& info, const Options& given) const;

  // Returns the held-out bytes that row b of a batch reads, and the next one. Returns
  // InvalidArgument where the text is too short.
  absl::StatusOr<absl::string_view> HeldOut(const Problem& problem, int64_t b) const;
  // Makes a tensor of held-out text for each spec: for techniques on hidden states, "x" is the
  // embedded bytes; for those on tokens, "x" and "context" are ModelStates. Returns Unimplemented
  // for a spec of another name.
  absl::StatusOr<NamedTensors> MakeInputs(const std::vector<TensorSpec>& specs,
                                          const Problem& problem) const;
  // Returns the model's tensors for all parameters of a layer. "datastore.keys" [entries,
  // model_dim] and "datastore.values" [entries] are the contexts of the last bytes of datastore.txt
  // and the byte that followed each; they are built once, and kept in
  // $XDG_CACHE_HOME/transformer-family-bench (core/search/datastore.h). Returns Unimplemented where
  // the layer has other parameters.
  absl::StatusOr<NamedTensors> ParametersOf(const Layer& layer) const;
  // Returns the bits per byte of a layer's output: hidden states, or logarithms of probabilities
  // for a technique on tokens. A layer that has the final norm among its parameters, `of_layer`,
  // has normalised its states itself.
  absl::StatusOr<double> BitsPerByte(InputKind kind, const Problem& problem,
                                     const ConstTensorView& out,
                                     const NamedTensors& of_layer = {}) const;

 private:
  LanguageModel() = default;

  const Tensor& embedding() const { return parameters_.at("embedding"); }
  absl::Status Check() const;
  void Embed(absl::string_view bytes, const TensorView& x) const;
  // Normalises in place, [tokens, model_dim].
  void Normalise(float* h, int64_t tokens) const;
  absl::StatusOr<ModelStates> StatesOf(absl::string_view bytes) const;
  absl::StatusOr<NamedTensors> DatastoreOf(int64_t entries) const;

  std::string path_;  // path of the model's file
  TechniqueSpec stack_;
  std::string data_;
  int64_t heads_ = 1;
  NamedTensors parameters_;
  uint64_t fingerprint_ = 0;
  std::string held_out_, datastore_text_;
};

// Returns the model in the repository, which is read once.
absl::StatusOr<std::shared_ptr<const LanguageModel>> ShippedLanguageModel();

}  // namespace tfb

#endif  // TFB_HARNESS_INPUTS_LANGUAGE_MODEL_H_
