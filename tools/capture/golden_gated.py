"""Writes memory/gated_transformer_xl/testdata: see golden.py, whose rules hold here too."""

import importlib.util
import math
import pathlib
import sys
import types

import numpy as np
import torch

import golden
from golden import (attend, case, draw, f32, f64, in_float64, layer_norm, merge_heads,
                    redraw_parameters, split_heads)

FIRST = len(golden.CASES)
LAYERS, HEADS, HEAD_DIM, INNER = 2, 2, 6, 24
WIDTH = HEADS * HEAD_DIM
SEGMENT, MEMORY, SEGMENTS, BATCH = 6, 9, 4, 2
GATE_BIAS = 2.0
GATES = ("attention_gate", "ff_gate")
MATRICES = ("w_r", "w_z", "w_g", "u_r", "u_z", "u_g")


def rllib():
    """Files of the package's networks; what they import of the rest of it is a name or two."""
    def same(x=None, **_):
        return x if callable(x) else same

    def sequence_mask(lengths, dtype=None):
        return torch.arange(int(lengths.max()))[None] < lengths[:, None]

    stubs = {
        "utils.framework": {"try_import_torch": lambda: (torch, torch.nn),
                            "TensorType": torch.Tensor},
        "utils.annotations": {name: same for name in ("DeveloperAPI", "OldAPIStack", "PublicAPI")},
        "utils.typing": {"TensorType": torch.Tensor},
        "utils.torch_utils": {"sequence_mask": sequence_mask},
        "models.utils": {"get_activation_fn": None},
    }
    for name, values in stubs.items():
        module = types.ModuleType(f"ray.rllib.{name}")
        vars(module).update(values)
        sys.modules[module.__name__] = module
    folder = pathlib.Path(importlib.util.find_spec("ray").origin).parent / "rllib/models/torch"
    modules = {}
    for path in ("misc", "modules/gru_gate", "modules/skip_connection",
                 "modules/relative_multi_head_attention"):
        name = "ray.rllib.models.torch." + path.replace("/", ".")
        spec = importlib.util.spec_from_file_location(name, folder / f"{path}.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        modules.update(vars(module))
    return types.SimpleNamespace(**modules)


def network(package):
    """The transformer units of GTrXLNet (attention_net.py), whose constructor wants an environment."""
    units = torch.nn.ModuleList()
    for _ in range(LAYERS):
        attention = package.RelativeMultiHeadAttention(
            in_dim=WIDTH, out_dim=WIDTH, num_heads=HEADS, head_dim=HEAD_DIM, input_layernorm=True,
            output_activation=torch.nn.ReLU)
        feed_forward = torch.nn.Sequential(
            torch.nn.LayerNorm(WIDTH),
            package.SlimFC(WIDTH, INNER, use_bias=False, activation_fn=torch.nn.ReLU),
            package.SlimFC(INNER, WIDTH, use_bias=False, activation_fn=torch.nn.ReLU))
        units.extend(package.SkipConnection(sublayer, package.GRUGate(WIDTH, GATE_BIAS))
                     for sublayer in (attention, feed_forward))
    return units


def parameters_of(units):
    parameters = {}
    for n in range(LAYERS):
        attention, feed_forward = units[2 * n]._layer, units[2 * n + 1]._layer
        w_q, w_k, w_v = attention._qkv_layer._model[0].weight.chunk(3)
        own = {"w_q": w_q.T, "w_k": w_k.T, "w_v": w_v.T,
               "w_r": attention._pos_proj._model[0].weight.T,
               "w_o": attention._linear_layer._model[0].weight.T,
               "u": attention._uvar, "v": attention._vvar,
               "attention_norm.gamma": attention._input_layernorm.weight,
               "attention_norm.beta": attention._input_layernorm.bias,
               "ff_norm.gamma": feed_forward[0].weight, "ff_norm.beta": feed_forward[0].bias,
               "ff.w1": feed_forward[1]._model[0].weight.T,
               "ff.w2": feed_forward[2]._model[0].weight.T}
        for unit, gate in zip((units[2 * n], units[2 * n + 1]), GATES):
            theirs = unit._fan_in_layer
            for name in MATRICES:
                own[f"{gate}.{name}"] = getattr(theirs, "_" + name.replace("_g", "_h"))
            own[f"{gate}.b_g"] = theirs._bias_z
        parameters.update({f"layer{n}.{name}": p for name, p in own.items()})
    return parameters


def logistic(x):
    return 1 / (1 + np.exp(-x))


def gate_formula(p, gate, x, y):
    w_r, w_z, w_g, u_r, u_z, u_g = (p[f"{gate}.{name}"] for name in MATRICES)
    z = logistic(y @ w_z + x @ u_z - p[f"{gate}.b_g"])
    reset = logistic(y @ w_r + x @ u_r) * x
    return (1 - z) * x + z * np.tanh(y @ w_g + reset @ u_g)


def formula(t):
    """The whole sequence at once, under a mask: what the segments must equal."""
    total = SEGMENTS * SEGMENT
    i, j = np.mgrid[:total, :total]
    allowed = (j <= i) & (j >= i // SEGMENT * SEGMENT - MEMORY)
    angles = np.outer(np.arange(total), 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH))
    positions = np.concatenate((np.sin(angles), np.cos(angles)), -1)
    h = t["x"]
    for n in range(LAYERS):
        p = {name.split(".", 1)[1]: a for name, a in t.items() if name.startswith(f"layer{n}.")}
        x = layer_norm(h, p["attention_norm.gamma"], p["attention_norm.beta"], 1e-5)
        q, k, v = (split_heads(x @ p[name], HEADS) for name in ("w_q", "w_k", "w_v"))
        r = split_heads((positions @ p["w_r"])[None], HEADS)[0]  # [heads, distance, head_dim]
        by_distance = np.einsum("bhid,hcd->bhic", q + p["v"][:, None], r)
        bias = np.take_along_axis(
            by_distance, np.broadcast_to(np.maximum(i - j, 0), by_distance.shape), -1)
        context = attend(q + p["u"][:, None], k, v, allowed, bias / math.sqrt(HEAD_DIM))
        h = gate_formula(p, GATES[0], h, np.maximum(merge_heads(context) @ p["w_o"], 0))
        x = layer_norm(h, p["ff_norm.gamma"], p["ff_norm.beta"], 1e-5)
        y = np.maximum(np.maximum(x @ p["ff.w1"], 0) @ p["ff.w2"], 0)
        h = gate_formula(p, GATES[1], h, y)
    return {"out": h}


@case("memory/gated_transformer_xl/testdata/rllib", "ray.rllib.models.torch.attention_net.GTrXLNet",
      601)
def rllib_network():
    x = draw(BATCH, SEGMENTS * SEGMENT, WIDTH)
    with in_float64():
        units = network(rllib()).eval()
        redraw_parameters(units, 0.3)
        for unit in units:
            unit._fan_in_layer._bias_z.add_(GATE_BIAS)
            unit._fan_in_layer._bias_z.copy_(golden.rounded(unit._fan_in_layer._bias_z))
        # As GTrXLNet.forward: the memory of an attention unit is what the unit below it gave.
        memories = [torch.zeros(BATCH, 0, WIDTH) for _ in range(LAYERS)]
        outs = []
        for s in range(SEGMENTS):
            h = x[:, s * SEGMENT:(s + 1) * SEGMENT]
            for n in range(LAYERS):
                memory = memories[n]
                memories[n] = torch.cat([memory, h], 1)[:, -MEMORY:]
                h = units[2 * n + 1](units[2 * n](h, memory=memory))
            outs.append(h)
    tensors = {"x": f32(x), "out": f64(torch.cat(outs, 1))}
    tensors.update({name: f32(p) for name, p in parameters_of(units).items()})
    return tensors, {
        "layers": LAYERS, "heads": HEADS, "head_dim": HEAD_DIM, "model_dim": WIDTH,
        "inner_dim": INNER, "memory_tokens": MEMORY, "segment_tokens": SEGMENT,
        "formula": "x' = ln(h); h <- gate(h, relu(attention(x') w_o)) with scores as in "
                   "transformer_xl's files; h <- gate(h, relu(relu(ln(h) ff.w1) ff.w2)); gate(x, y) = "
                   "(1 - z) x + z tanh(y w_g + (r x) u_g), r = s(y w_r + x u_r), z = s(y w_z + x u_z "
                   "- b_g), s the logistic function",
        "mask": "start of the segment - memory_tokens <= j <= i",
    }, formula


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
