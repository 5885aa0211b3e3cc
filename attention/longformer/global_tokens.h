// The global tokens of each sequence, where an input names them. The step works on the device, and
// the host does not learn their number.
#ifndef TFB_ATTENTION_LONGFORMER_GLOBAL_TOKENS_H_
#define TFB_ATTENTION_LONGFORMER_GLOBAL_TOKENS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "attention/longformer/longformer_cuda.h"
#include "core/cuda/device_array.h"
#include "core/flash/plan.h"
#include "core/technique.h"
#include "core/workspace.h"

namespace tfb::longformer {

// Makes the tensors is_global, local_keys and global_keys, u8 [batch, tokens], and global_tokens,
// i32 [batch, 1, most]: see GlobalLists. The tokens of `positions` are global in every sequence; of
// those that the input global_mask marks besides, the first `most_marked` are.
class GlobalTokens : public FlashStep {
 public:
  GlobalTokens(const Problem& problem, std::vector<int64_t> positions, int64_t most_marked);

  MarkedQueries queries() const {
    return {"is_global", static_cast<int64_t>(positions_.size()), arguments_.most};
  }

  absl::Status Setup(Device device, const Inputs&, const Execution&) override;
  void LayOut(Workspace* workspace, Inputs* tensors) override;
  absl::Status Run(const Inputs& tensors, const Outputs&, const Execution& execution) override;
  absl::Status CheckBackward(Device) const override { return absl::OkStatus(); }

 private:
  void FindOnCpu(int64_t b) const;

  std::vector<int64_t> positions_;
  Device device_ = Device::kCpu;
  DeviceArray<uint8_t> is_position_;
  FindGlobalsArguments arguments_ = {};
};

}  // namespace tfb::longformer

#endif  // TFB_ATTENTION_LONGFORMER_GLOBAL_TOKENS_H_
