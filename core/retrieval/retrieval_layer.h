// The base of techniques for language models that look their states up in a datastore.
//
// A model has read some text, and a datastore keeps its states: entry e is the key, a hidden state
// [model_dim], and the value, the token that followed. Where the model is to predict the next token
// now, the state `context` finds the k entries of the nearest keys, by |context - key|^2, and the
// technique makes a prediction from the tokens that followed them:
//
//   x          [batch, tokens, model_dim]  in: the model's last hidden states; logits are output x
//   context    [batch, tokens, model_dim]  in: states that are looked up, as keys are
//   neighbours [batch, tokens, k], i32     in or out, optional: entries, nearest first; -1 is none.
//                                          Given, they are used unchanged, unknown ones as none
//   out        [batch, tokens, vocabulary] out: log p(next token), natural logarithm
//
// Tokens are independent: a stream gives the same outputs as the whole. core/search/search.h says
// which entries are nearest, and how ties and numbers that are not finite are treated. The
// definition cannot know what an approximate search finds: it takes the layer's neighbours, as long
// as they are distinct and in the order of their distances.
//
// The backward pass is of the neighbours as they were found, which is all that a Run keeps: it makes
// the prediction again. No gradient goes into the datastore. On every device each sum has an order
// that depends on sizes and neighbours alone, so that every run gives the same bits.
#ifndef TFB_CORE_RETRIEVAL_RETRIEVAL_LAYER_H_
#define TFB_CORE_RETRIEVAL_RETRIEVAL_LAYER_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/cuda/device_array.h"
#include "core/cuda/runtime.h"
#include "core/layers/matmul.h"
#include "core/options.h"
#include "core/problem.h"
#include "core/search/inverted_lists.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb {

struct RetrievalOptions {
  static constexpr int64_t kMaxVocabulary = int64_t{1} << 20;
  static constexpr int64_t kMaxEntries = std::numeric_limits<int32_t>::max();
  static constexpr int64_t kMaxNeighbours = 1024;

  int64_t vocabulary = 256;
  int64_t entries = 384;  // a real datastore has many more
  int64_t k = 8;          // neighbours of a token
  // Where true, a search looks at all entries; else at those of some lists:
  // core/search/inverted_lists.h, on the CPU alone.
  bool exact = true;
  int64_t lists = 1024;
  int64_t probes = 32;

  // Returns u8 for a vocabulary of bytes; larger ones need i32.
  DType value_dtype() const { return vocabulary <= 256 ? DType::kU8 : DType::kI32; }

  void Describe(OptionBinder& bind) {
    bind.Int("vocabulary", &vocabulary, 2, kMaxVocabulary, "tokens that can be next");
    bind.Int("entries", &entries, 1, kMaxEntries, "of the datastore", {1024, 4096, 16384, 65536});
    bind.Int("k", &k, 0, kMaxNeighbours, "neighbours of a token; 0 is the model alone",
             {1, 2, 4, 8, 16, 32, 64, 128});
    bind.Choice("search", &exact, {{"exact", true}, {"approximate", false}},
                "among all entries, or those of the nearest clusters");
    bind.Int("lists", &lists, 1, kMaxEntries,
             "clusters of an approximate search, no more than entries");
    bind.Int("probes", &probes, 1, kMaxEntries, "clusters that a token looks at",
             {1, 2, 4, 8, 16, 32, 64});
  }
};

std::vector<TensorSpec> RetrievalInputs(const Problem& problem, const RetrievalOptions& options);
std::vector<TensorSpec> RetrievalOutputs(const Problem& problem, const RetrievalOptions& options);
// Returns the technique without neighbours, on the same parameters: its dense counterpart.
TechniqueSpec ModelAlone(const std::string& technique, const RetrievalOptions& options);
// Returns InvalidArgument where the problem's sizes are not self-attention's.
absl::Status CheckRetrievalProblem(absl::string_view technique, const Problem& problem);
// Returns Unimplemented for an approximate search on other devices than the CPU.
absl::Status CheckRetrievalDevice(absl::string_view technique, const RetrievalOptions& options,
                                  Device device);

// A layer with these parameters:
//   output            [vocabulary, model_dim], drawn N(0, 1 / model_dim)
//   datastore.keys    [entries, model_dim], drawn N(0, 1)
//   datastore.values  [entries], below the vocabulary, drawn uniformly
class RetrievalLayer : public StreamingLayer {
 public:
  size_t workspace_bytes(int threads) const override;
  absl::Status Reset() override { return absl::OkStatus(); }
  // Returns the cost of the search and of a product with `output`.
  Cost cost() const override;

  absl::Status CheckBackward() const override;
  size_t kept_bytes() const override;
  size_t backward_workspace_bytes(int threads) const override;
  // Returns the cost of the product with `output` again, and of two for its gradients.
  Cost backward_cost() const override;
  std::map<std::string, std::string> stopped_gradients() const override;

 protected:
  // The tokens of a call, in memory of the device.
  struct Tokens {
    ConstTensorView x;
    ConstTensorView context;
    const int32_t* neighbours;  // [batch * tokens][k]; below the number of entries, or -1
    TensorView out;
    const Inputs& inputs;  // of the call

    int64_t rows() const { return x.dim(0) * x.dim(1); }
  };

  // `inputs`: RetrievalInputs, and perhaps others, whose second dimension is of tokens.
  RetrievalLayer(const Problem& problem, const RetrievalOptions& options,
                 const std::vector<TensorSpec>& inputs, Device device);
  // Draws the parameters. Returns ResourceExhausted where there is no memory for them.
  absl::Status Initialize(uint64_t seed);

  virtual absl::Status Predict(const Tokens& tokens, const Execution& execution) = 0;
  virtual size_t predict_workspace_bytes(int64_t rows, int threads) const = 0;

  // The gradients of a prediction. Those that are asked for are written, as in BackwardCall.
  struct PredictionGradients {
    ConstTensorView out;  // of log p
    TensorView x;
    TensorView context;
    const Outputs& inputs;  // these, and others
    const Outputs& parameters;
  };
  // Computes the prediction again, and from that the gradients. `tokens` has a row at least, and no
  // `out`.
  virtual absl::Status PredictBackward(const Tokens& tokens, const PredictionGradients& gradients,
                                       const Execution& execution) = 0;
  virtual size_t predict_backward_workspace_bytes(int64_t rows, int threads) const = 0;
  // Of output() and the log softmax after it: the most that one of their products needs, forward or
  // backward, for `rows` tokens.
  size_t OutputBackwardWorkspaceBytes(int64_t rows, int threads) const;

  // Returns InvalidArgument where a value is no token of the vocabulary.
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override;
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override;
  absl::Status DoAppend(int64_t tokens, const Inputs& segment, const Outputs& outputs,
                        const Execution& execution) override;
  absl::Status DoSetUpBackward(const Inputs& inputs, const Execution& execution) override;
  absl::Status DoBackward(const BackwardCall& call, const Execution& execution) override;

  const RetrievalOptions& retrieval() const { return retrieval_; }
  Device device() const { return device_; }
  // These are on the device, and valid after Setup.
  const PackedMatrix& output() const { return output_; }  // [model_dim, vocabulary]
  // [vocabulary, model_dim], after SetUpBackward
  const PackedMatrix& output_transposed() const { return output_transposed_; }
  const float* keys() const { return keys_; }  // [entries][model_dim]
  const int32_t* values() const { return values_.data(); }

 private:
  struct Scratch {
    int32_t* neighbours;  // [rows][k]
    float* scores;        // likewise
    // [rows][model_dim]: a copy, where the search cannot read the input in place.
    float* context;
  };
  Scratch LayOut(int64_t rows, Workspace& workspace) const;
  int64_t rows() const { return problem().batch * max_segment_tokens(); }
  size_t search_workspace_bytes(int threads) const;
  ConstTensorView Zeros(const Shape& shape) const {
    return ConstTensorView(zero_.data(), DType::kF32, shape, {0, 0, 0});
  }
  absl::Status FindNeighbours(const ConstTensorView& context, const Scratch& scratch,
                              const Execution& execution) const;
  absl::Status CopyNeighbours(const ConstTensorView& from, const TensorView& to,
                              const Execution& execution) const;

  RetrievalOptions retrieval_;
  Device device_;
  PackedMatrix output_;
  PackedMatrix output_transposed_;
  DeviceBuffer device_keys_;  // empty on the CPU, where the parameter itself is read
  const float* keys_ = nullptr;
  DeviceArray<int32_t> values_;
  InvertedLists lists_;  // used where the search is approximate
  DeviceArray<float> zero_;
};

}  // namespace tfb

#endif  // TFB_CORE_RETRIEVAL_RETRIEVAL_LAYER_H_
