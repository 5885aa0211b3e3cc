"""Writes memory/gated_transformer_xl/testdata: see golden.py, whose rules hold here too."""

import importlib.util
import math
import pathlib
import sys
import types

import numpy as np
import torch

import golden
from golden import (SOURCES, attend, case, draw, f32, f64, in_float64, layer_norm, merge_heads,
                    redraw_parameters, split_heads)

FIRST = len(golden.CASES)
TRANSFORMERS_RL = "transformers_rl"
SOURCES[TRANSFORMERS_RL] = "https://github.com/dhruvramani/Transformers-RL"
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
    b_r, b_z, b_h = (p.get(f"{gate}.{name}", 0.0) for name in ("b_r", "b_z", "b_h"))
    z = logistic(y @ w_z + x @ u_z + b_z - p[f"{gate}.b_g"])
    reset = logistic(y @ w_r + x @ u_r + b_r) * x
    return (1 - z) * x + z * np.tanh(y @ w_g + reset @ u_g + b_h)


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


# ---- Transformers-RL ----

SMALL_HEADS, SMALL_HEAD_DIM, SMALL_INNER = 2, 4, 12
SMALL_WIDTH = SMALL_HEADS * SMALL_HEAD_DIM
SMALL_GATE_BIAS = 0.125


def sum_of(first, second):
    """Biases whose sum is a float32 too; `first` takes all of it."""
    first.copy_(golden.rounded(first + second))
    second.zero_()
    return first


def transformers_rl_parameters(model):
    parameters = {"u": model.u, "v": model.v}
    for n, layer in enumerate(model.layers):
        attention = layer.mha
        w_k, w_v = attention.linear_kv.weight.chunk(2)
        own = {"w_q": attention.linear_q.weight.T, "w_k": w_k.T, "w_v": w_v.T,
               "w_r": attention.linear_p.weight.T, "w_o": attention.lout.weight.T,
               "attention_norm.gamma": layer.norm1.weight, "attention_norm.beta": layer.norm1.bias,
               "ff_norm.gamma": layer.norm2.weight, "ff_norm.beta": layer.norm2.bias,
               "ff.w1": layer.ff.ff[0].weight.T, "ff.b1": layer.ff.ff[0].bias,
               "ff.w2": layer.ff.ff[3].weight.T, "ff.b2": layer.ff.ff[3].bias}
        for gate, theirs in zip(GATES, (layer.gate1, layer.gate2)):
            own.update({f"{gate}.{name}": getattr(theirs, name.replace("_", "").capitalize()).weight.T
                        for name in MATRICES})
            own.update({f"{gate}.b_r": theirs.Wr.bias, f"{gate}.b_z": theirs.Wz.bias,
                        f"{gate}.b_h": theirs.Wg.bias,
                        f"{gate}.b_g": torch.full((SMALL_WIDTH,), theirs.bg)})
        parameters.update({f"layer{n}.{name}": p for name, p in own.items()})
    return parameters


def transformers_rl_formula(t):
    """Segment by segment, with a memory of states as they are."""
    h = t["x"]
    angles = np.outer(np.arange(MEMORY + SEGMENT),
                      10000.0 ** (-np.arange(0, SMALL_WIDTH, 2) / SMALL_WIDTH))
    positions = np.concatenate((np.sin(angles), np.cos(angles)), -1)
    for n in range(LAYERS):
        p = {name.split(".", 1)[1]: a for name, a in t.items() if name.startswith(f"layer{n}.")}
        r = split_heads((positions @ p["w_r"])[None], SMALL_HEADS)[0]
        contexts = []
        for begin in range(0, h.shape[1], SEGMENT):
            own = layer_norm(h[:, begin:begin + SEGMENT], p["attention_norm.gamma"],
                             p["attention_norm.beta"], 1e-5)
            rows = np.concatenate((h[:, max(begin - MEMORY, 0):begin], own), 1)
            q = split_heads(own @ p["w_q"], SMALL_HEADS)
            k, v = (split_heads(rows @ p[name], SMALL_HEADS) for name in ("w_k", "w_v"))
            here = rows.shape[1] - SEGMENT + np.arange(SEGMENT)[:, None]
            distance = here - np.arange(rows.shape[1])[None]
            by_distance = np.einsum("bhid,hcd->bhic", q + t["v"][:, None], r)
            index = np.broadcast_to(np.maximum(distance, 0), q.shape[:3] + rows.shape[1:2])
            bias = np.take_along_axis(by_distance, index, -1) / math.sqrt(SMALL_HEAD_DIM)
            contexts.append(attend(q + t["u"][:, None], k, v, distance >= 0, bias))
        h = gate_formula(p, GATES[0], h, merge_heads(np.concatenate(contexts, 2)) @ p["w_o"])
        x = layer_norm(h, p["ff_norm.gamma"], p["ff_norm.beta"], 1e-5)
        y = np.maximum(x @ p["ff.w1"] + p["ff.b1"], 0) @ p["ff.w2"] + p["ff.b2"]
        h = gate_formula(p, GATES[1], h, y)
    return {"out": h}


@case("memory/gated_transformer_xl/testdata/transformers_rl",
      f"{TRANSFORMERS_RL}.layers.StableTransformerXL", 602)
def transformers_rl_network():
    spec = importlib.util.spec_from_file_location(
        "transformers_rl_layers", SOURCES[TRANSFORMERS_RL] / "layers.py")
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    x = draw(BATCH, SEGMENTS * SEGMENT, SMALL_WIDTH)
    with in_float64():
        model = package.StableTransformerXL(SMALL_WIDTH, LAYERS, SMALL_HEADS, SMALL_HEAD_DIM,
                                            SMALL_INNER).eval()
        redraw_parameters(model, 0.3)
        for layer in model.layers:
            for gate in (layer.gate1, layer.gate2):
                gate.bg = SMALL_GATE_BIAS
                for w, u in ((gate.Wr, gate.Ur), (gate.Wz, gate.Uz), (gate.Wg, gate.Ug)):
                    sum_of(w.bias, u.bias)
        # Its memories begin as zeros that are attended to; here they begin empty.
        memories = [torch.zeros(0, BATCH, SMALL_WIDTH) for _ in range(LAYERS + 1)]
        outs = []
        for s in range(SEGMENTS):
            states = []
            hooks = [layer.register_forward_pre_hook(lambda _, args: states.append(args[0]))
                     for layer in model.layers]
            h = x[:, s * SEGMENT:(s + 1) * SEGMENT].transpose(0, 1)
            outs.append(model(h, memories)["logits"].transpose(0, 1))
            for hook in hooks:
                hook.remove()
            memories = [torch.cat([old, new])[-MEMORY:]
                        for old, new in zip(memories, states + [memories[-1][:0]])]
            memories[-1] = memories[0]  # its length alone is read
    tensors = {"x": f32(x), "out": f64(torch.cat(outs, 1))}
    tensors.update({name: f32(p) for name, p in transformers_rl_parameters(model).items()})
    return tensors, {
        "layers": LAYERS, "heads": SMALL_HEADS, "head_dim": SMALL_HEAD_DIM,
        "model_dim": SMALL_WIDTH, "inner_dim": SMALL_INNER, "memory_tokens": MEMORY,
        "segment_tokens": SEGMENT,
        "formula": "as rllib, without the outer relus; b_r, b_z and b_h are added in r, z and tanh; "
                   "keys and values of the memory are of h, not of ln(h)",
        "biases": "those of the matrices U are 0: only sums of two appear",
        "mask": "start of the segment - memory_tokens <= j <= i",
    }, transformers_rl_formula


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
