"""Writes memory/compressive/testdata: see golden.py, whose rules hold here too."""

import ast
import functools
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


@functools.lru_cache(None)
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


def set_positions(attention, r, u, v):
    """Its learned vector of distance d is row P - d, and its learned bias of it v with that."""
    place = attention.P - torch.arange(r.shape[0])
    attention.key_pos_embeddings[place] = r
    attention.key_pos_bias[place] = (r * v).sum(-1)
    attention.query_pos_bias.copy_(u)


def parameters_of(model, by_distance, u, v):
    parameters = {"u": u, "v": v}
    for n, layer in enumerate(model.layers):
        attention, feed_forward = layer.self_attn, layer.feed_forward
        own = {"w_q": attention.query.linear.weight.T, "w_k": attention.key.linear.weight.T,
               "w_v": attention.value.linear.weight.T,
               **{name: tensors[n] for name, tensors in by_distance.items()},
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


class Setup(types.SimpleNamespace):
    """A case: `segment`, `memory` and `compressed` in rows, and what the implementations differ in."""
    segment, memory, compressed = SEGMENT, MEMORY, COMPRESSED
    pre_norm, learned, whole_blocks, mean_square, start_zero = True, False, False, False, False

    @property
    def tokens(self):
        return SEGMENTS * self.segment

    @property
    def distances(self):
        return self.compressed + self.memory + self.segment

    def loss(self, difference):
        squares = (difference**2).sum((1, 2, 3))
        return squares / (self.segment * WIDTH) if self.mean_square else np.sqrt(squares)


def formula(t, setup):
    """Queues of rows, layer by layer."""
    h = t["x"]
    losses = np.zeros((BATCH, SEGMENTS, LAYERS))
    queues = {"memories": [], "compressed": []}
    for n in range(LAYERS):
        p = {name.split(".", 1)[1]: a for name, a in t.items() if name.startswith(f"layer{n}.")}

        def norm(rows, name):
            return layer_norm(rows, p[name + ".gamma"], p[name + ".beta"], 1e-5)

        def project(rows, name):
            rows = norm(rows, "attention_norm") if setup.pre_norm else rows
            return split_heads(rows @ p[name], HEADS)

        r = (p["relative_keys"].swapaxes(0, 1) if setup.learned else
             split_heads((positions(setup.distances) @ p["w_r"])[None], HEADS)[0])
        compressed, memory = (np.zeros((BATCH, rows if setup.start_zero else 0, WIDTH))
                              for rows in (setup.compressed, setup.memory))
        contexts = []
        for s in range(SEGMENTS):
            x = h[:, s * setup.segment:(s + 1) * setup.segment]
            rows = np.concatenate([compressed, memory, x], 1)
            here = rows.shape[1] - setup.segment + np.arange(setup.segment)[:, None]
            distance = here - np.arange(rows.shape[1])[None]
            q = project(x, "w_q")
            by_distance = np.einsum("bhid,hcd->bhic", q + t["v"][:, None], r)
            index = np.broadcast_to(np.maximum(distance, 0), q.shape[:3] + rows.shape[1:2])
            bias = np.take_along_axis(by_distance, index, -1) / math.sqrt(HEAD_DIM)
            contexts.append(attend(q + t["u"][:, None], project(rows, "w_k"),
                                   project(rows, "w_v"), distance >= 0, bias))
            memory = np.concatenate([memory, x], 1)
            leaving = max(memory.shape[1] - setup.memory, 0)
            if setup.whole_blocks:
                leaving = -(-leaving // RATE) * RATE
            old, memory = memory[:, :leaving], memory[:, leaving:]
            if leaving == 0:
                continue
            blocks = old.reshape(BATCH, -1, RATE, WIDTH)
            new = np.einsum("btid,ido->bto", blocks, p["convolution.w"]) + p["convolution.b"]
            losses[:, s, n] = setup.loss(attend(q, project(old, "w_k"), project(old, "w_v"))
                                         - attend(q, project(new, "w_k"), project(new, "w_v")))
            compressed = np.concatenate([compressed, new], 1)[:, -setup.compressed:]
        queues["memories"].append(memory)
        queues["compressed"].append(compressed)
        g = h + merge_heads(np.concatenate(contexts, 2)) @ p["w_o"]
        g = g if setup.pre_norm else norm(g, "attention_norm")
        inner = (norm(g, "ff_norm") if setup.pre_norm else g) @ p["ff.w1"]
        h = g + np.maximum(inner + p["ff.b1"], 0) @ p["ff.w2"] + p["ff.b2"]
        h = h if setup.pre_norm else norm(h, "ff_norm")
    return {"out": h, "attention_loss": losses,
            **{name: np.stack(rows, 1) for name, rows in queues.items()}}


def describe(setup):
    return {
        "layers": LAYERS, "heads": HEADS, "head_dim": HEAD_DIM, "model_dim": WIDTH,
        "inner_dim": INNER, "memory_tokens": setup.memory, "compressed_rows": setup.compressed,
        "compression": RATE, "segment_tokens": setup.segment,
        "eviction": "whole_blocks" if setup.whole_blocks else "overflow",
        "loss": "mean_square" if setup.mean_square else "norm",
        "pre_norm": str(setup.pre_norm).lower(), "start_zero": str(setup.start_zero).lower(),
        "learned_positions": str(setup.learned).lower(),
        "formula": "keys and values from [compressed; memory; segment], scores as in "
                   "transformer_xl's files with distances of places in that list; the rows that "
                   "leave the memory become y_t = b + sum_i x_(c t + i) w_i; attention_loss "
                   "measures what attention of content alone, before w_o, loses; memories and "
                   "compressed are what the queues hold behind the last segment"}


# ---- labml ----


def labml_case(setup):
    x = draw(BATCH, setup.tokens, WIDTH)
    u, v = (draw(HEADS, HEAD_DIM, scale=0.5) for _ in range(2))
    package = labml()
    with in_float64():
        if setup.learned:
            tables = [draw(setup.distances, HEADS, HEAD_DIM, scale=0.7) for _ in range(LAYERS)]
            by_distance = {"relative_keys": tables}
        else:
            w_r = [draw(WIDTH, WIDTH, scale=WIDTH**-0.5) for _ in range(LAYERS)]
            tables = [(torch.from_numpy(positions(setup.distances)) @ matrix)
                      .reshape(-1, HEADS, HEAD_DIM) for matrix in w_r]
            by_distance = {"w_r": w_r}
        model = network(package)
        redraw_parameters(model, 0.3)
        for layer, table in zip(model.layers, tables):
            set_positions(layer.self_attn, table, u, v)
            layer.self_attn.value.linear.bias.zero_()  # ours have no biases there
            layer.self_attn.output.bias.zero_()
            layer.compress.conv.weight.copy_(rounded(layer.compress.conv.weight))
        out, losses, queues = run_labml(package, model, setup, x)
    tensors = {"x": f32(x), "out": f64(out), "attention_loss": f64(losses),
               **{name: f64(rows) for name, rows in queues.items()}}
    tensors.update({name: f32(p)
                    for name, p in parameters_of(model, by_distance, u, v).items()})
    return tensors, {
        **describe(setup),
        "positions": "the package's learned key_pos_embeddings hold the vectors of distances, its "
                     "key_pos_bias v of them, its query_pos_bias u; its biases of values and "
                     "outputs are zero",
    }, lambda t: formula(t, setup)


def run_labml(package, model, setup, x):
    # The script's class, as far as its queues know it.
    queues = types.SimpleNamespace(
        mem_len=setup.memory, c_mem_len=setup.compressed, compression_rate=RATE,
        model=types.SimpleNamespace(transformer=model))
    loss = package.AttentionReconstructionLoss(model.layers)
    losses = torch.zeros(BATCH, SEGMENTS, LAYERS)
    memories, outs = None, []
    for s in range(SEGMENTS):
        segment = x[:, s * setup.segment:(s + 1) * setup.segment].transpose(0, 1)
        kept = [] if memories is None else memories
        past = sum(m[0].shape[0] for m in kept if m)
        visible = torch.ones(setup.segment, past + setup.segment).tril(past)[:, :, None]
        mem, c_mem = (kept.mem, kept.c_mem) if kept else ([], [])
        out, inputs = model(segment, mem, c_mem, visible)
        outs.append(out.transpose(0, 1))
        memories, old = package.merge_compress_memory(queues, memories, inputs)
        for n in range(LAYERS if old else 0):
            for b in range(BATCH):
                mean = loss.calc_loss(model.layers[n], inputs[n][:, b:b + 1], old[n][:, b:b + 1])
                losses[b, s, n] = (mean if setup.mean_square else
                                   torch.sqrt(mean * setup.segment * WIDTH))
    queues = {name: torch.stack([rows.transpose(0, 1) for rows in of_layers], 1)
              for name, of_layers in (("memories", memories.mem), ("compressed", memories.c_mem))}
    return torch.cat(outs, 1), losses, queues


MADE_BY = "labml_nn.transformers.compressive.CompressiveTransformer"


@case("memory/compressive/testdata/labml", MADE_BY, 701)
def labml_network():
    return labml_case(Setup())


@case("memory/compressive/testdata/labml_whole_blocks", MADE_BY, 702)
def labml_whole_blocks():
    return labml_case(Setup(segment=7, memory=8, learned=True, whole_blocks=True,
                            mean_square=True))


# ---- compressive-transformer-pytorch ----


def lucidrains_parameters(attention, norms, feed_forward, table):
    keys, values = attention.to_kv.weight.T.split(WIDTH, 1)
    return {"w_q": attention.to_q.weight.T, "w_k": keys, "w_v": values,
            "w_o": attention.to_out.weight.T, "relative_keys": table,
            "attention_norm.gamma": norms[0].weight, "attention_norm.beta": norms[0].bias,
            "ff_norm.gamma": norms[1].weight, "ff_norm.beta": norms[1].bias,
            "ff.w1": feed_forward.w1.weight.T, "ff.b1": feed_forward.w1.bias,
            "ff.w2": feed_forward.w2.weight.T, "ff.b2": feed_forward.w2.bias,
            "convolution.w": attention.compress_mem_fn.conv.weight.permute(2, 1, 0),
            "convolution.b": attention.compress_mem_fn.conv.bias}


@case("memory/compressive/testdata/lucidrains",
      "compressive_transformer_pytorch.compressive_transformer_pytorch.SelfAttention", 703)
def lucidrains_network():
    """Its attention and feed-forward layers with norms after them. Memories begin full: while they
    fill, its table's rows move. The memory is a segment's, which is what its loss compares with."""
    from compressive_transformer_pytorch.compressive_transformer_pytorch import (FeedForward,
                                                                                 SelfAttention)
    setup = Setup(segment=6, memory=6, pre_norm=False, learned=True, mean_square=True,
                  start_zero=True)
    h = x = draw(BATCH, setup.tokens, WIDTH)
    table = draw(setup.distances, HEADS, HEAD_DIM, scale=0.7)
    losses = torch.zeros(BATCH, SEGMENTS, LAYERS, dtype=torch.float64)
    queues = []
    parameters = {"u": torch.zeros(HEADS, HEAD_DIM), "v": torch.zeros(HEADS, HEAD_DIM)}
    with in_float64():
        for n in range(LAYERS):
            attention = SelfAttention(WIDTH, setup.segment, setup.memory, setup.compressed, RATE,
                                      HEADS)
            feed_forward = FeedForward(WIDTH, INNER // WIDTH, activation=torch.nn.ReLU)
            norms = [torch.nn.LayerNorm(WIDTH) for _ in range(2)]
            for module in [attention, feed_forward]:
                redraw_parameters(module, 0.3)
            for norm in norms:
                norm.weight.data.copy_(rounded(1 + draw(WIDTH, scale=0.3)))
                norm.bias.data.copy_(rounded(draw(WIDTH, scale=0.3)))
            attention.to_out.bias.data.zero_()  # ours has none
            attended, losses[:, :, n], of_layer = run_lucidrains(attention, setup, h, table)
            queues.append(of_layer)
            g = norms[0](h + attended)
            h = norms[1](g + feed_forward(g)).detach()
            own = lucidrains_parameters(attention, norms, feed_forward, table)
            parameters.update({f"layer{n}.{name}": p for name, p in own.items()})
    memories, compressed = (torch.stack(rows, 1) for rows in zip(*queues))
    tensors = {"x": f32(x), "out": f64(h), "attention_loss": f64(losses),
               "memories": f64(memories), "compressed": f64(compressed)}
    tensors.update({name: f32(p) for name, p in parameters.items()})
    return tensors, {
        **describe(setup),
        "positions": "the package's table, of all layers and with the last row for distance 0, is "
                     "each layer's relative_keys from distance 0 on; u and v are zero",
    }, lambda t: formula(t, setup)


def run_lucidrains(attention, setup, h, table):
    losses = torch.zeros(BATCH, SEGMENTS)
    pos_emb = table.flip(0).transpose(0, 1)
    outs, queues = [], []
    for b in range(BATCH):  # its loss is a mean over the batch
        memories = tuple(torch.zeros(1, rows, WIDTH) for rows in (setup.memory, setup.compressed))
        of_sequence = []
        for s in range(SEGMENTS):
            segment = h[b:b + 1, s * setup.segment:(s + 1) * setup.segment]
            out, memories, loss = attention(segment, memories, pos_emb)
            of_sequence.append(out)
            losses[b, s] = loss.item()
        outs.append(torch.cat(of_sequence, 1))
        queues.append(memories)
    return torch.cat(outs).detach(), losses, [torch.cat(rows).detach() for rows in zip(*queues)]


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
