// The options of all techniques that are a stack of layers with Transformer-XL's attention and
// memory.
#ifndef TFB_CORE_LAYERS_STACK_STACK_OPTIONS_H_
#define TFB_CORE_LAYERS_STACK_STACK_OPTIONS_H_

#include <cstdint>

#include "core/layers/feed_forward_dim.h"
#include "core/options.h"

namespace tfb::layers {

struct RelativeStackOptions {
  static constexpr int64_t kMaxMemory = int64_t{1} << 20;

  int64_t layers = 2;
  int64_t segment = 128;
  int64_t memory = 128;
  bool same_length = false;
  int64_t max_distance = 0;
  int64_t feed_forward_dim = 0;
  bool share_biases = true;
  // Techniques whose layers may do without a norm behind the last one describe it (final_norm.h).
  bool final_norm = false;
  int64_t given_memory = 0;

  void DescribeStack(OptionBinder& bind, int64_t max_layers) {
    bind.Int("layers", &layers, 1, max_layers, "attention and feed-forward layers");
    bind.Int("segment", &segment, 1, kMaxMemory, "tokens that are processed at a time");
    bind.Int("memory", &memory, 0, kMaxMemory, "earlier tokens that a layer keeps",
             {0, 64, 128, 256, 512, 1024});
    bind.Bool("same_length", &same_length,
              "every token sees `memory` keys, its own among them; else all of the memory and the "
              "segment up to itself");
    bind.Int("max_distance", &max_distance, 0, kMaxMemory,
             "larger distances count as this one; 0 means none do");
    DescribeFeedForwardDim(bind, &feed_forward_dim);
    // In the equations of section 3.3 u and v have no layer's index, where W_r has one; the code's
    // untie_r is off by default (its scripts for WikiText-103 and One Billion Word turn it on).
    bind.Bool("share_biases", &share_biases, "one u and one v for all layers");
  }
  // Describes the option of stacks that can go on from the memories of an earlier run.
  void DescribeGivenMemory(OptionBinder& bind) {
    bind.Int("given_memory", &given_memory, 0, kMaxMemory,
             "tokens of an earlier run that the input `memories` holds; 0: there is none");
  }
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_STACK_STACK_OPTIONS_H_
