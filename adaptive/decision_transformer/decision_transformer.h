// Decision Transformer: reinforcement learning as a causal Transformer over a trajectory. Given a
// desired return, it predicts the action that leads to it.
//
// A trajectory of steps t has a return-to-go R_t = sum of the rewards r_u of u >= t, undiscounted,
// a state s_t and an action a_t. They are tokens 3t, 3t + 1 and 3t + 2 of one sequence:
//
//   R_0 s_0 a_0 R_1 s_1 a_1 ...
//   token = LN(value W_m + b_m + T[timestep_t])      m: return, state or action; no LN without
//                                                    embed_norm
//   h     = GPT(tokens)                              attention/encoder_decoder, causal and pre_norm
//
//   action_t    = h_(3t+1) W + b,  its tanh with action_tanh    from s_t: sees R_t and s_t, not a_t
//   state_t+1   = h_(3t+2) W + b                                from a_t
//   return_t+1  = h_(3t+2) W + b
//
// The three tokens of a step have the row of T of the step's own timestep, and no other position:
// so padding before a trajectory, hidden by key_mask, changes nothing. A timestep outside of T
// counts as the nearest in it.
//
// query_tokens counts tokens, and the last triple need not be complete. With n tokens there are
// ceil(n / 3) returns, ceil((n - 1) / 3) states and floor(n / 3) actions: an agent that is to act
// reads n = 3t + 2 tokens, up to its state, and the last row of `action` is what it does. Then
// R_t+1 = R_t - r_t. It keeps the last few steps, as many as it was trained on, and encodes them
// again for each action.
//
// Source: Chen, Lu, Rajeswaran, Lee, Grover, Laskin, Abbeel, Srinivas, Mordatch 2021, "Decision
// Transformer: reinforcement learning via sequence modeling", arXiv:2106.01345v2, section 3 and
// algorithm 1; sizes, activation and which token each head reads as in the authors' code for Gym
// (github.com/kzl/decision-transformer, gym/decision_transformer/models/decision_transformer.py)
// and Hugging Face's. Not followed: the authors' code for Atari adds a learned position of the
// token and one timestep for the whole window, and takes tanh of the embeddings.
//
// Cost of a step: three tokens of encoder_decoder, so 9 times a Transformer's attention over steps;
// and for embeddings and heads 4 d (1 + state_dim + action_dim) FLOPs, d = model_dim.
//
// A Run that has a backward pass keeps what encoder_decoder keeps, with recompute one state a layer.
//
// The technique is causal self-attention: kv_tokens must equal query_tokens.
//
// It reads returns [batch, returns, 1], states [batch, states, state_dim], actions [batch, actions,
// action_dim] (a discrete state or action is a unit vector), timesteps i32 [batch, returns], and
// the optional key_mask [batch, tokens], in which padding hides all three tokens of its step. It
// writes out [batch, tokens, model_dim], the hidden states after the last norm, and the optional
// action [batch, states, action_dim], state [batch, actions, state_dim] and return [batch, actions,
// 1].
//
// The parameters, f32, y = x W, are embed.return, embed.state, embed.action, head.action,
// head.state and head.return, each with .w [in, out] and .b [out]; embed.timestep [max_timestep,
// model_dim]; embed.norm.gamma, .beta [model_dim]; and those of encoder_decoder. Matrices and
// biases are drawn N(0, 1 / rows), embed.timestep N(0, 1), gammas 1, betas 0.
//
// The counterpart is the technique itself: its attention is dense.
#ifndef TFB_ADAPTIVE_DECISION_TRANSFORMER_DECISION_TRANSFORMER_H_
#define TFB_ADAPTIVE_DECISION_TRANSFORMER_DECISION_TRANSFORMER_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "core/layers/activation.h"
#include "core/layers/feed_forward_dim.h"
#include "core/layers/recompute.h"
#include "core/technique.h"

namespace tfb::decision_transformer {

struct DecisionTransformerOptions {
  static constexpr int64_t kMaxChannels = int64_t{1} << 20;

  int64_t layers = 2;
  int64_t feed_forward_dim = 0;
  Activation activation = Activation::kRelu;
  int64_t state_dim = 17;
  int64_t action_dim = 6;
  int64_t max_timestep = 1000;
  bool embed_norm = true;
  bool action_tanh = true;
  bool recompute = false;

  void Describe(OptionBinder& bind) {
    bind.Int("layers", &layers, 1, 32, "of attention and a feed-forward network; Gym's code has 3");
    DescribeFeedForwardDim(bind, &feed_forward_dim);
    bind.Choice("activation", &activation,
                {{"relu", Activation::kRelu},
                 {"gelu", Activation::kGelu},
                 {"gelu_tanh", Activation::kGeluTanh}},
                "of the feed-forward networks; Atari's is gelu");
    bind.Int("state_dim", &state_dim, 1, kMaxChannels, "channels of a state");
    bind.Int("action_dim", &action_dim, 1, kMaxChannels, "channels of an action");
    bind.Int("max_timestep", &max_timestep, 1, kMaxChannels, "timesteps that have an embedding");
    bind.Bool("embed_norm", &embed_norm, "normalise the embedded tokens; Atari's code does not");
    bind.Bool("action_tanh", &action_tanh,
              "actions are numbers between -1 and 1; else logits, or unbounded");
    DescribeRecompute(bind, &recompute);
  }
};

// Return the numbers of returns, states and actions in a sequence of so many tokens.
constexpr int64_t ReturnTokens(int64_t tokens) { return (tokens + 2) / 3; }  // and steps
constexpr int64_t StateTokens(int64_t tokens) { return (tokens + 1) / 3; }
constexpr int64_t ActionTokens(int64_t tokens) { return tokens / 3; }

// Returns R_t of a trajectory's rewards: cumulative sums from the end.
std::vector<double> ReturnsToGo(absl::Span<const double> rewards);

}  // namespace tfb::decision_transformer

#endif  // TFB_ADAPTIVE_DECISION_TRANSFORMER_DECISION_TRANSFORMER_H_
