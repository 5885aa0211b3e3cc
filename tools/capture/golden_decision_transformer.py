"""Writes adaptive/decision_transformer/testdata: see golden.py, whose rules hold here too."""

import math
import pathlib

import numpy as np
import torch

import golden
from golden import case, draw, f32, f64, in_float64, layer_norm, redraw_parameters, stack_formula

FIRST = len(golden.CASES)
BATCH, STEPS, HEADS, HEAD_DIM, LAYERS = 2, 6, 3, 8, 2
WIDTH, STATE_DIM, ACTION_DIM, MAX_TIMESTEP = HEADS * HEAD_DIM, 5, 3, 40
INNER = 2 * WIDTH
MADE_BY = "transformers.DecisionTransformerModel"
HIDDEN_STEPS = 2  # padding before the second sequence

golden.ACTIVATIONS["gelu_tanh"] = lambda x: x * (1 + np.tanh(
    math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def parameters_of(model):
    """By our names; GPT-2 keeps its matrices [in, out], PyTorch's layers theirs [out, in]."""
    def linear(name, module):
        return {f"{name}.w": module.weight.T, f"{name}.b": module.bias}

    def norm(name, module):
        return {f"{name}.gamma": module.weight, f"{name}.beta": module.bias}

    parameters = {"embed.timestep": model.embed_timestep.weight,
                  **norm("embed.norm", model.embed_ln),
                  **linear("head.action", model.predict_action[0])}
    for name in ("return", "state", "action"):
        parameters.update(linear(f"embed.{name}", getattr(model, f"embed_{name}")))
    for name in ("return", "state"):
        parameters.update(linear(f"head.{name}", getattr(model, f"predict_{name}")))
    for n, block in enumerate(model.encoder.h):
        attention, ff = f"encoder{n}.attention", f"encoder{n}.ff"
        for part, w, b in zip("qkv", block.attn.c_attn.weight.chunk(3, 1),
                              block.attn.c_attn.bias.chunk(3)):
            parameters.update({f"{attention}.w_{part}": w, f"{attention}.b_{part}": b})
        parameters.update({f"{attention}.w_o": block.attn.c_proj.weight,
                           f"{attention}.b_o": block.attn.c_proj.bias,
                           f"{ff}.w1": block.mlp.c_fc.weight, f"{ff}.b1": block.mlp.c_fc.bias,
                           f"{ff}.w2": block.mlp.c_proj.weight, f"{ff}.b2": block.mlp.c_proj.bias})
        parameters.update(norm(f"{attention}_norm", block.ln_1))
        parameters.update(norm(f"{ff}_norm", block.ln_2))
    return {**parameters, **norm("encoder_norm", model.encoder.ln_f)}


def formula_of(activation, action_tanh, real):
    """`real` [BATCH, STEPS]: which steps are no padding. Rows of padding are 0."""
    def affine(t, name, x):
        return x @ t[f"{name}.w"] + t[f"{name}.b"]

    def formula(t):
        time = t["embed.timestep"][t["timesteps"].astype(int)]
        tokens = np.stack([affine(t, f"embed.{name}", t[f"{name}s"]) + time
                           for name in ("return", "state", "action")], 2)
        x = layer_norm(tokens.reshape(BATCH, 3 * STEPS, WIDTH), t["embed.norm.gamma"],
                       t["embed.norm.beta"], 1e-5)
        keys = np.repeat(real, 3, 1)[:, None, None, :]
        before = np.tri(3 * STEPS, dtype=bool)
        own = np.eye(3 * STEPS, dtype=bool)  # padding, whose rows are dropped, sees itself
        h = stack_formula(t, "encoder", x, HEADS, LAYERS, True, activation, before & (keys | own))
        h = h.reshape(BATCH, STEPS, 3, WIDTH) * real[..., None, None]
        action = affine(t, "head.action", h[:, :, 1])
        predictions = {"action": np.tanh(action) if action_tanh else action,
                       "state": affine(t, "head.state", h[:, :, 2]),
                       "return": affine(t, "head.return", h[:, :, 2])}
        return {"out": h.reshape(BATCH, 3 * STEPS, WIDTH),
                **{name: y * real[..., None] for name, y in predictions.items()}}

    return formula


def decision_transformer_case(activation, action_tanh, padded):
    from transformers import DecisionTransformerConfig, DecisionTransformerModel
    returns, states = draw(BATCH, STEPS, 1, scale=2), draw(BATCH, STEPS, STATE_DIM)
    actions = draw(BATCH, STEPS, ACTION_DIM)
    timesteps = torch.arange(STEPS) + torch.tensor([[3], [MAX_TIMESTEP - STEPS]])
    real = torch.ones(BATCH, STEPS, dtype=torch.bool)
    if padded:
        real[1, :HIDDEN_STEPS] = False
    config = DecisionTransformerConfig(
        state_dim=STATE_DIM, act_dim=ACTION_DIM, hidden_size=WIDTH, max_ep_len=MAX_TIMESTEP,
        action_tanh=action_tanh, vocab_size=1, n_positions=3 * STEPS, n_layer=LAYERS, n_head=HEADS,
        n_inner=INNER, activation_function={"gelu_tanh": "gelu_new"}.get(activation, activation))
    with in_float64():
        model = DecisionTransformerModel(config).eval()
        redraw_parameters(model, 0.3)
        for norm in [model.embed_ln, model.encoder.ln_f] + [
                norm for block in model.encoder.h for norm in (block.ln_1, block.ln_2)]:
            norm.weight.copy_(golden.rounded(1 + draw(WIDTH, scale=0.3)))
        # GPT-2's positions, which the authors' model has not; in converted checkpoints they are 0.
        model.encoder.wpe.weight.zero_()
        theirs = model(returns_to_go=returns, states=states, actions=actions, timesteps=timesteps,
                       attention_mask=real.long(), return_dict=True)
        rows = real[..., None].double()
        outputs = {"out": theirs.last_hidden_state * rows.repeat_interleave(3, 1),
                   "action": theirs.action_preds * rows, "state": theirs.state_preds * rows,
                   "return": theirs.return_preds * rows}
    tensors = {"returns": f32(returns), "states": f32(states), "actions": f32(actions),
               "timesteps": timesteps.numpy().astype(np.int32),
               "real_steps": real.numpy().astype(np.int32)}
    tensors.update({name: f32(p) for name, p in parameters_of(model).items()})
    tensors.update({name: f64(y) for name, y in outputs.items()})
    return tensors, {
        "layers": LAYERS, "heads": HEADS, "head_dim": HEAD_DIM, "inner_dim": INNER,
        "state_dim": STATE_DIM, "action_dim": ACTION_DIM, "max_timestep": MAX_TIMESTEP,
        "activation": activation, "action_tanh": str(action_tanh).lower(),
        "formula": "tokens (return, state, action) of each step: norm(value w + b + embed.timestep "
                   "[timestep]); pre-norm causal stack as in encoder_decoder's files; action from "
                   "the state's token, state and return from the action's: h w + b, the action's "
                   "tanh with action_tanh",
        "mask": "real_steps [batch, steps]: 0 is padding, which no token sees; outputs of its rows "
                "are set to 0",
        "changed": "encoder.wpe, a position that is added to the tokens, is set to 0",
    }, formula_of(activation, action_tanh, real.numpy())


@case("adaptive/decision_transformer/testdata/continuous", MADE_BY, 801)
def continuous():
    return decision_transformer_case("relu", True, padded=True)


@case("adaptive/decision_transformer/testdata/logits", MADE_BY, 802)
def logits():
    return decision_transformer_case("gelu_tanh", False, padded=False)


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
