"""Writes memory/compressive/testdata: see golden.py, whose rules hold here too."""

import ast
import importlib.util
import math
import pathlib
import sys
import types
import typing

import numpy as np
import torch

import golden
from golden import (attend, case, draw, f32, f64, in_float64, layer_norm, merge_heads,
                    redraw_parameters, rounded, split_heads)

FIRST = len(golden.CASES)
LAYERS, HEADS, HEAD_DIM, INNER = 2, 2, 6, 24
WIDTH = HEADS * HEAD_DIM
SEGMENT, SEGMENTS, BATCH = 6, 6, 2
MEMORY, COMPRESSED, RATE = 9, 4, 3


def labml():
    """Files of the package, and one function of its training script."""
    stubs = {"labml": {"tracker": types.SimpleNamespace(debug=lambda *_: None)},
             "labml.logger": {"inspect": None}}
    for name, values in stubs.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    folder = pathlib.Path(importlib.util.find_spec("labml_nn").origin).parent
    for package in ("labml_nn", "labml_nn.transformers", "labml_nn.transformers.xl"):
        sys.modules[package] = types.ModuleType(package)
    modules = {}
    for path in ("utils/__init__", "transformers/feed_forward", "transformers/mha",
                 "transformers/xl/relative_mha", "transformers/compressive/__init__"):
        name = "labml_nn." + path.replace("/__init__", "").replace("/", ".")
        spec = importlib.util.spec_from_file_location(name, folder / f"{path}.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        modules.update(vars(module))
    script = ast.parse((folder / "transformers/compressive/experiment.py").read_text())
    function = next(node for node in ast.walk(script) if isinstance(node, ast.FunctionDef)
                    and node.name == "merge_compress_memory")
    modules["CompressedMemory"] = typing.NamedTuple("CompressedMemory",
                                                    [("mem", list), ("c_mem", list)])
    scope = {**vars(typing), **modules, "torch": torch}
    exec(compile(ast.Module([function], []), "experiment.py", "exec"), scope)
    return types.SimpleNamespace(**modules, merge_compress_memory=scope["merge_compress_memory"])


def network(package):
    layer = package.CompressiveTransformerLayer(
        d_model=WIDTH, self_attn=package.RelativeMultiHeadAttention(HEADS, WIDTH, 0.0),
        feed_forward=package.FeedForward(WIDTH, INNER, 0.0), dropout_prob=0.0,
        compress=package.Conv1dCompression(RATE, WIDTH))
    model = package.CompressiveTransformer(layer, LAYERS).eval()
    model.norm = torch.nn.Identity()  # ours ends with the last layer
    return model


def positions(distances):
    angles = np.outer(np.arange(distances), 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH))
    return np.concatenate((np.sin(angles), np.cos(angles)), -1)


def set_positions(attention, w_r, u, v):
    """Its learned vector of distance d is row P - d: Transformer-XL's r_d W_r, and v with it."""
    r = torch.from_numpy(positions(COMPRESSED + MEMORY + SEGMENT)) @ w_r
    r = r.reshape(-1, HEADS, HEAD_DIM)
    place = attention.P - torch.arange(r.shape[0])
    attention.key_pos_embeddings[place] = r
    attention.key_pos_bias[place] = (r * v).sum(-1)
    attention.query_pos_bias.copy_(u)


def parameters_of(model, w_r, u, v):
    parameters = {"u": u, "v": v}
    for n, layer in enumerate(model.layers):
        attention, feed_forward = layer.self_attn, layer.feed_forward
        own = {"w_q": attention.query.linear.weight.T, "w_k": attention.key.linear.weight.T,
               "w_v": attention.value.linear.weight.T, "w_r": w_r[n],
               "w_o": attention.output.weight.T,
               "attention_norm.gamma": layer.norm_self_attn.weight,
               "attention_norm.beta": layer.norm_self_attn.bias,
               "ff_norm.gamma": layer.norm_ff.weight, "ff_norm.beta": layer.norm_ff.bias,
               "ff.w1": feed_forward.layer1.weight.T, "ff.b1": feed_forward.layer1.bias,
               "ff.w2": feed_forward.layer2.weight.T, "ff.b2": feed_forward.layer2.bias,
               "convolution.w": layer.compress.conv.weight.permute(2, 1, 0),
               "convolution.b": layer.compress.conv.bias}
        parameters.update({f"layer{n}.{name}": p for name, p in own.items()})
    return parameters


def formula(t):
    """Queues of rows, layer by layer."""
    h = t["x"]
    losses = np.zeros((BATCH, SEGMENTS, LAYERS))
    for n in range(LAYERS):
        p = {name.split(".", 1)[1]: a for name, a in t.items() if name.startswith(f"layer{n}.")}

        def norm(rows):
            return layer_norm(rows, p["attention_norm.gamma"], p["attention_norm.beta"], 1e-5)

        def project(rows, name):
            return split_heads(norm(rows) @ p[name], HEADS)

        r = split_heads((positions(COMPRESSED + MEMORY + SEGMENT) @ p["w_r"])[None], HEADS)[0]
        compressed = memory = np.zeros((BATCH, 0, WIDTH))
        contexts = []
        for s in range(SEGMENTS):
            x = h[:, s * SEGMENT:(s + 1) * SEGMENT]
            rows = np.concatenate([compressed, memory, x], 1)
            here = rows.shape[1] - SEGMENT + np.arange(SEGMENT)[:, None]
            distance = here - np.arange(rows.shape[1])[None]
            q = project(x, "w_q")
            by_distance = np.einsum("bhid,hcd->bhic", q + t["v"][:, None], r)
            index = np.broadcast_to(np.maximum(distance, 0), q.shape[:3] + rows.shape[1:2])
            bias = np.take_along_axis(by_distance, index, -1) / math.sqrt(HEAD_DIM)
            contexts.append(attend(q + t["u"][:, None], project(rows, "w_k"),
                                   project(rows, "w_v"), distance >= 0, bias))
            memory = np.concatenate([memory, x], 1)
            old = memory[:, :max(memory.shape[1] - MEMORY, 0)]
            memory = memory[:, old.shape[1]:]
            if old.shape[1] == 0:
                continue
            blocks = old.reshape(BATCH, -1, RATE, WIDTH)
            new = np.einsum("btid,ido->bto", blocks, p["convolution.w"]) + p["convolution.b"]
            lost = (attend(q, project(old, "w_k"), project(old, "w_v"))
                    - attend(q, project(new, "w_k"), project(new, "w_v")))
            losses[:, s, n] = np.sqrt((lost**2).sum((1, 2, 3)))
            compressed = np.concatenate([compressed, new], 1)[:, -COMPRESSED:]
        g = h + merge_heads(np.concatenate(contexts, 2)) @ p["w_o"]
        inner = layer_norm(g, p["ff_norm.gamma"], p["ff_norm.beta"], 1e-5) @ p["ff.w1"]
        h = g + np.maximum(inner + p["ff.b1"], 0) @ p["ff.w2"] + p["ff.b2"]
    return {"out": h, "attention_loss": losses}


@case("memory/compressive/testdata/labml",
      "labml_nn.transformers.compressive.CompressiveTransformer", 701)
def labml_network():
    x = draw(BATCH, SEGMENTS * SEGMENT, WIDTH)
    u, v = (draw(HEADS, HEAD_DIM, scale=0.5) for _ in range(2))
    w_r = [draw(WIDTH, WIDTH, scale=WIDTH**-0.5) for _ in range(LAYERS)]
    package = labml()
    with in_float64():
        model = network(package)
        redraw_parameters(model, 0.3)
        for layer, matrix in zip(model.layers, w_r):
            set_positions(layer.self_attn, matrix, u, v)
            layer.self_attn.value.linear.bias.zero_()  # ours have no biases there
            layer.self_attn.output.bias.zero_()
            layer.compress.conv.weight.copy_(rounded(layer.compress.conv.weight))
        # The script's class, as far as its queues know it. It evicts whole blocks; here the overflow
        # is such.
        queues = types.SimpleNamespace(
            mem_len=MEMORY, c_mem_len=COMPRESSED, compression_rate=RATE,
            model=types.SimpleNamespace(transformer=model))
        loss = package.AttentionReconstructionLoss(model.layers)
        losses = torch.zeros(BATCH, SEGMENTS, LAYERS)
        memories, outs = None, []
        for s in range(SEGMENTS):
            segment = x[:, s * SEGMENT:(s + 1) * SEGMENT].transpose(0, 1)
            kept = [] if memories is None else memories
            past = sum(m[0].shape[0] for m in kept if m)
            visible = torch.ones(SEGMENT, past + SEGMENT).tril(past)[:, :, None]
            mem, c_mem = (kept.mem, kept.c_mem) if kept else ([], [])
            out, inputs = model(segment, mem, c_mem, visible)
            outs.append(out.transpose(0, 1))
            memories, old = package.merge_compress_memory(queues, memories, inputs)
            for n in range(LAYERS if old else 0):
                for b in range(BATCH):  # a mean of squares of as many
                    mean = loss.calc_loss(model.layers[n], inputs[n][:, b:b + 1],
                                          old[n][:, b:b + 1])
                    losses[b, s, n] = torch.sqrt(mean * SEGMENT * WIDTH)
    tensors = {"x": f32(x), "out": f64(torch.cat(outs, 1)), "attention_loss": f64(losses)}
    tensors.update({name: f32(p) for name, p in parameters_of(model, w_r, u, v).items()})
    return tensors, {
        "layers": LAYERS, "heads": HEADS, "head_dim": HEAD_DIM, "model_dim": WIDTH,
        "inner_dim": INNER, "memory_tokens": MEMORY, "compressed_rows": COMPRESSED,
        "compression": RATE, "segment_tokens": SEGMENT,
        "formula": "pre-norm; keys and values from [compressed; memory; segment], layer-normalised, "
                   "scores as in transformer_xl's files with distances of places in that list; the "
                   "oldest rows beyond memory_tokens become y_t = b + sum_i x_(c t + i) w_i; "
                   "attention_loss is the norm of what attention of content alone, before w_o, loses",
        "positions": "the package's learned key_pos_embeddings hold r_d w_r, its key_pos_bias v of "
                     "them, its query_pos_bias u; its biases of values and outputs are zero",
    }, formula


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
