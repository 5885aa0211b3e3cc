// The memory that stacks keep for their backward passes, against depth (core/layers/recompute.h).
#include "core/layers/recompute.h"

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/backward_testing.h"
#include "core/technique.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

// Two sequences of 64 tokens and two heads of 16: a state has a multiple of 64 bytes, to which parts of
// the kept memory are rounded up.
const Problem kProblem = Problem::SelfAttention(2, 2, 64, 16, /*causal=*/true);
const int64_t kState = 4 * kProblem.batch * kProblem.query_tokens * kProblem.model_dim();

std::unique_ptr<Layer> Make(const std::string& technique, Options options, const std::string& depth,
                            int64_t blocks) {
  options[depth] = absl::StrCat(blocks);
  return Registry::Global()
      .Find(technique)
      .value()
      ->Create(kProblem, options, Device::kCpu, /*seed=*/1)
      .value();
}

struct Stack {
  std::string technique;
  Options options;
  std::string depth;  // the option that is the number of blocks
  int64_t growth;     // bytes
};

// The stacks of which a Run keeps a state a block, or less, and what is kept beside it.
std::vector<Stack> Stacks() {
  // 8 tokens at a time leave a memory of 8, and become 2 rows: the last segment's are left.
  const Options compressive = {{"segment", "8"}, {"memory", "8"}, {"compression", "4"}};
  const int64_t compressed = 4 * kProblem.batch * (64 - 8) / 4 * kProblem.model_dim();
  const int64_t roles = kProblem.batch * kProblem.query_tokens;
  return {
      {"encoder_decoder", {{"recompute", "true"}}, "layers", kState},
      {"encoder_decoder", {{"recompute", "true"}, {"block", "pre_norm"}}, "layers", kState},
      {"encoder_decoder", {{"recompute", "true"}, {"part", "both"}}, "layers", 2 * kState},
      {"decision_transformer", {{"recompute", "true"}}, "layers", kState},
      {"learned", {{"recompute", "true"}}, "layers", kState},
      {"universal", {{"recompute", "true"}}, "steps", kState},
      {"transformer_xl", {{"segment", "16"}}, "layers", kState},
      {"transformer_xl", {{"pre_norm", "true"}, {"final_norm", "true"}}, "layers", kState},
      {"gated_transformer_xl", {}, "layers", kState},
      {"memorizing", {}, "layers", kState},
      {"compressive", compressive, "layers", kState + compressed},
      {"calm", {}, "layers", kState + roles},
      {"depth_adaptive", {}, "layers", kState + roles},
      {"universal_transformer", {}, "steps", kState},
      {"reversible", {}, "layers", 0},
  };
}

int64_t KeptBytes(const Stack& stack, int64_t blocks) {
  return static_cast<int64_t>(
      Make(stack.technique, stack.options, stack.depth, blocks)->kept_bytes());
}

// Returns the statistic behind a Run.
double KeptBytesPerBlock(const Stack& stack, int64_t blocks) {
  const auto layer = Make(stack.technique, stack.options, stack.depth, blocks);
  RunLayer(*layer, ViewsOf(RandomInputs(layer->inputs(), /*seed=*/2))).value();
  return layer->statistics().at(kKeptBytesPerBlock);
}

TEST(Recompute, KeptMemoryGrowsByOneStateABlockAndReversiblesDoesNotGrow) {
  for (const Stack& stack : Stacks()) {
    SCOPED_TRACE(ToString(TechniqueSpec{stack.technique, stack.options}));
    for (int64_t blocks = 2; blocks < 8; ++blocks) {
      EXPECT_EQ(KeptBytes(stack, blocks + 1) - KeptBytes(stack, blocks), stack.growth) << blocks;
    }
  }
}

TEST(Recompute, TheStatisticIsTheGrowthOfKeptMemory) {
  std::vector<Stack> stacks = Stacks();
  for (const char* block : {"post_norm", "pre_norm", "sparse"}) {
    stacks.push_back({"encoder_decoder", {{"block", block}}, "layers", 0});
    stacks.push_back({"encoder_decoder", {{"block", block}, {"part", "both"}}, "layers", 0});
  }
  stacks.push_back({"decision_transformer", {}, "layers", 0});
  stacks.push_back({"learned", {}, "layers", 0});
  stacks.push_back({"universal", {}, "steps", 0});
  for (const Stack& stack : stacks) {
    SCOPED_TRACE(ToString(TechniqueSpec{stack.technique, stack.options}));
    EXPECT_EQ(KeptBytesPerBlock(stack, 3), KeptBytes(stack, 4) - KeptBytes(stack, 3));
  }
}

// A network that has a depth and a backward pass is in the list above.
TEST(Recompute, EveryStackIsTested) {
  std::set<std::string> tested;
  for (const Stack& stack : Stacks()) tested.insert(stack.technique);
  for (const Technique* technique : Registry::Global().All()) {
    for (const OptionSpec& option : technique->info().options) {
      if (option.name != "layers" && option.name != "steps" && option.name != "recompute") continue;
      EXPECT_EQ(tested.count(technique->info().name), 1u) << technique->info().name;
    }
  }
}

TEST(Recompute, GradientsHaveTheSameBitsFromLessMemory) {
  const std::vector<Stack> stacks = {
      {"encoder_decoder", {{"inner", "longformer[window=8]/2*dense"}}, "layers", 0},
      {"encoder_decoder", {{"part", "both"}, {"block", "pre_norm"}}, "layers", 0},
      {"decision_transformer", {}, "layers", 0},
      {"learned", {{"per_layer", "true"}, {"inner", "rope/t5_bias/2*dense"}}, "layers", 0},
      {"learned", {{"bias", "true"}, {"inner", "performer"}}, "layers", 0},
      {"universal", {{"time", "learned"}}, "steps", 0},
      {"universal", {{"inner", "strided[stride=8]"}}, "steps", 0},
  };
  for (Stack stack : stacks) {
    const int64_t blocks = stack.options.count("per_layer") > 0 ? 4 : 3;
    SCOPED_TRACE(ToString(TechniqueSpec{stack.technique, stack.options}));
    const auto gradients = [&](const char* recompute, int threads) {
      stack.options["recompute"] = recompute;
      const auto layer = Make(stack.technique, stack.options, stack.depth, blocks);
      NamedTensors inputs = RandomInputs(layer->inputs(), /*seed=*/2);
      return RunBackward(*layer, ViewsOf(inputs), RandomOutputGradients(*layer, 3), threads)
          .value();
    };
    const LayerGradients kept = gradients("false", 1);
    for (const int threads : {1, 2}) {
      const LayerGradients again = gradients("true", threads);
      for (const auto& [one, other] :
           {std::pair(&kept.outputs, &again.outputs), std::pair(&kept.inputs, &again.inputs),
            std::pair(&kept.parameters, &again.parameters)}) {
        ASSERT_EQ(one->size(), other->size());
        for (const auto& [name, tensor] : *one) {
          EXPECT_EQ(MaxDifference(tensor.view(), other->at(name).view()), 0) << name;
        }
      }
    }
    const auto with = [&](const char* recompute) {
      stack.options["recompute"] = recompute;
      return Make(stack.technique, stack.options, stack.depth, blocks);
    };
    const auto whole = with("false"), again = with("true");
    EXPECT_LT(2 * again->kept_bytes(), whole->kept_bytes());
    // It is one more forward pass of the blocks, which are encoder_decoder's in decision_transformer.
    const Cost forward = stack.technique == "decision_transformer"
                             ? Make("encoder_decoder", {{"block", "pre_norm"}}, "layers", 3)->cost()
                             : whole->cost();
    EXPECT_EQ(*again->backward_cost().flops - *whole->backward_cost().flops, *forward.flops);
  }
}

}  // namespace
}  // namespace tfb
