"""Writes harness/golden_gradients: what PyTorch's autograd makes of the formulas of other golden files.

Each case reads a golden file that golden.py or one of its kind made, and computes its `out` again with the formula that its
metadata states, in PyTorch and float64; a difference above 1e-12 of the largest value stops the script. So what is
differentiated is what the other implementation computes. Then the inputs are rounded to float32, and autograd
differentiates L = sum(out * g), for a drawn g, with respect to all inputs and parameters.

A file has the tensors of one call: input.NAME, parameter.NAME, out, output_gradient, and input_gradient.NAME and
parameter_gradient.NAME, by the names of the technique that its metadata states. It needs PyTorch and NumPy alone.
"""

import argparse
import math
import pathlib
import platform

import numpy as np
import torch

import tensor_file

TOLERANCE = 1e-12
CASES = []


def case(source, technique, causal, seed, name=None):
    """Registers a function of a file's arrays that returns (inputs, parameters, constants, formula).

    `name` is that of the output, where it is not `out`. The first two results are {name: array}; the formula makes the
    output of tensors by these names. Constants are arrays of integers that the technique reads.
    """

    def register(function):
        CASES.append((source, technique, causal, seed, name, function))
        return function

    return register


def attend(q, k, v, allowed=None, bias=0.0, scale=None):
    """softmax(scale q k^T + bias) v over the allowed pairs; query heads share heads of keys in turn."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale) + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    return torch.softmax(scores, -1) @ v


def earlier(queries, keys):
    """Which pairs of a causal problem are seen."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def key_mask(tensors):
    return {"key_mask": tensors["key_padding"].astype(np.uint8)}


def qkv(tensors):
    return {name: tensors[name] for name in ("q", "k", "v")}


@case("attention/dense/testdata/grouped_heads_causal", "dense", True, 1)
def dense_grouped(tensors):
    tokens = tensors["q"].shape[2]
    return qkv(tensors), {}, {}, lambda i, p: attend(**i, allowed=earlier(tokens, tokens))


@case("attention/dense/testdata/key_padding", "dense", False, 2)
def dense_padded(tensors):
    allowed = torch.from_numpy(tensors["key_padding"] > 0)[:, None, None, :]
    return qkv(tensors), {}, key_mask(tensors), lambda i, p: attend(**i, allowed=allowed)


@case("attention/longformer/testdata/global", "longformer:window=16,globals=-1/0/1/50,projections=own", False, 4)
def longformer_global(tensors):
    names = ("q", "k", "v", "q_global", "k_global", "v_global")
    tokens = torch.arange(tensors["q"].shape[2])
    is_global = torch.from_numpy(np.isin(tokens.numpy(), tensors["global_tokens"]))
    near = (tokens[:, None] - tokens).abs() <= 8

    def formula(i, _):
        local = attend(i["q"], i["k"], i["v"], near | is_global)
        wide = attend(i["q_global"], i["k_global"], i["v_global"])
        return torch.where(is_global[:, None], wide, local)

    return {name: tensors[name] for name in names}, {}, {}, formula


@case("attention/bigbird/testdata/block_sparse", "bigbird:block=8,random=2", False, 5)
def bigbird(tensors):
    random = tensors["random_blocks"]
    heads, inner, _ = random.shape
    blocks = inner + 2
    seen = np.zeros((heads, blocks, blocks), bool)
    seen[:, [0, -1], :] = True
    for u in range(1, blocks - 1):
        seen[:, u, [0, blocks - 1, u - 1, u, u + 1]] = True
        for h in range(heads):
            seen[h, u, random[h, u - 1]] = True
    real = torch.from_numpy(tensors["key_padding"] > 0)
    allowed = torch.from_numpy(seen.repeat(8, 1).repeat(8, 2)) & real[:, None, None, :]
    table = np.full((heads, blocks, random.shape[2]), -1, np.int32)  # no rows of the first and the last block
    table[:, 1:-1] = random

    def formula(i, _):  # rows of padded queries, which their code zeroes, are not in the loss
        return attend(**i, allowed=allowed) * real[:, None, :, None]

    return qkv(tensors), {}, {**key_mask(tensors), "random": table}, formula


@case("positional/alibi/testdata/attention_6_heads", "alibi", True, 6)
def alibi(tensors):
    tokens = torch.arange(tensors["q"].shape[2])
    bias = -torch.tensor(tensors["slopes"])[:, None, None] * (tokens[:, None] - tokens)
    return qkv(tensors), {}, {}, lambda i, p: attend(**i, allowed=tokens <= tokens[:, None], bias=bias)


@case("positional/t5_bias/testdata/causal_after_cache", "t5_bias", True, 7)
def t5_bias(tensors):
    queries, keys = tensors["q"].shape[2], tensors["k"].shape[2]
    distance = (torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)).clamp(min=0).numpy()
    # Of 32 buckets, 16 are of single distances, and those behind them of equal ratios up to 128.
    starts = [*range(16), *(next(n for n in range(16, 129) if n**16 >= 128**r * 16**(16 - r)) for r in range(16))]
    bucket = torch.from_numpy(np.searchsorted(starts, distance, side="right") - 1)

    def formula(i, p):
        return attend(**i, allowed=earlier(queries, keys), bias=p["beta"][bucket].permute(2, 0, 1), scale=1)

    return qkv(tensors), {"beta": tensors["beta"]}, {}, formula


def performer(causal):

    def read(tensors):
        """Gradients pass through the maxima, as in the definition; performer-pytorch 1.1.4 detaches them."""

        def features(x, w, axes):
            x = x * x.shape[-1]**-0.25
            dots = x @ w.T
            norms = (x**2).sum(-1, keepdim=True) / 2
            return torch.exp(dots - norms - dots.amax(axes, keepdim=True)) + 1e-4

        def formula(i, p):
            products = features(i["q"], p["w"], -1) @ features(i["k"], p["w"], (-1, -2)).transpose(2, 3)
            weights = products.tril() if causal else products
            return weights @ i["v"] / weights.sum(-1, keepdim=True)

        return qkv(tensors), {"w": tensors["projection"]}, {}, formula

    return read


PERFORMER = "performer:features=20,epsilon=1e-4,key_maximum=sequence"
case("attention/performer/testdata/softmax", PERFORMER, False, 8)(performer(False))
case("attention/performer/testdata/softmax", PERFORMER, True, 9, "causal_out")(performer(True))


@case("attention/multi_head/testdata/self_causal_padded", "multi_head:bias=true", True, 10)
def multi_head(tensors):
    heads = 3
    allowed = torch.from_numpy(tensors["key_padding"] > 0)[:, None, None, :] & earlier(21, 21)

    def formula(i, p):
        q, k, v = ((i["x"] @ p[f"w_{n}"] + p[f"b_{n}"]).unflatten(2, (heads, -1)).transpose(1, 2) for n in "qkv")
        return attend(q, k, v, allowed).transpose(1, 2).flatten(2) @ p["w_o"] + p["b_o"]

    parameters = {name: tensor for name, tensor in tensors.items() if name[:2] in ("w_", "b_")}
    return {"x": tensors["x"]}, parameters, key_mask(tensors), formula


def norm(x, p, name):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], p[f"{name}.gamma"], p[f"{name}.beta"])


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def relative_attention(list_, queries, p, layer, heads):
    """Transformer-XL's attention of the last rows of a list to all of it."""
    q, k, v = (split(list_ @ p[f"{layer}.{name}"], heads) for name in ("w_q", "w_k", "w_v"))
    q = q[:, :, -queries:]
    keys, width = list_.shape[1:]
    angles = np.outer(np.arange(keys), 10000.0**(-np.arange(0, width, 2) / width))
    r = torch.from_numpy(np.concatenate((np.sin(angles), np.cos(angles)), -1)) @ p[f"{layer}.w_r"]
    u, of_distance = (p[name] if name in p else p[f"{layer}.{name}"] for name in ("u", "v"))
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    by_distance = (q + of_distance[:, None]) @ split(r[None], heads).transpose(2, 3)
    bias = by_distance.gather(-1, distance.clamp(min=0).expand(*by_distance.shape[:2], -1, -1))
    context = attend(q + u[:, None], k, v, distance >= 0, bias / math.sqrt(q.shape[-1]))
    return context.transpose(1, 2).flatten(2) @ p[f"{layer}.w_o"]


def in_segments(tensors, segment, memory, layers, block):
    """A network segment by segment: block(p, layer, h, seen) has a layer's h from its input h and all that it sees.

    A segment's gradients stop at the states of the segments before it, which are detached, as the authors of
    Transformer-XL do.
    """
    parameters = {name: tensor for name, tensor in tensors.items() if name not in ("x", "out")}

    def formula(i, p):
        outs, memories = [], [i["x"][:, :0]] * layers
        for h in i["x"].split(segment, dim=1):
            for n in range(layers):
                seen = torch.cat((memories[n], h), 1)
                memories[n] = seen[:, -memory:].detach()
                h = block(p, f"layer{n}", h, seen)
            outs.append(norm(h, p, "final_norm") if "final_norm.gamma" in p else h)
        return torch.cat(outs, 1)

    return {"x": tensors["x"]}, parameters, {}, formula


@case("memory/transformer_xl/testdata/labml",
      "transformer_xl:layers=2,segment=6,memory=9,feed_forward_dim=24,pre_norm=true,final_norm=true", True, 11)
def transformer_xl(tensors):

    def block(p, layer, h, seen):
        g = h + relative_attention(norm(seen, p, f"{layer}.attention_norm"), 6, p, layer, 2)
        inner = norm(g, p, f"{layer}.ff_norm") @ p[f"{layer}.ff.w1"] + p[f"{layer}.ff.b1"]
        return g + torch.relu(inner) @ p[f"{layer}.ff.w2"] + p[f"{layer}.ff.b2"]

    return in_segments(tensors, 6, 9, 2, block)


@case("memory/gated_transformer_xl/testdata/rllib",
      "gated_transformer_xl:layers=2,segment=6,memory=9,feed_forward_dim=24,share_biases=false", True, 12)
def gated_transformer_xl(tensors):

    def gate(p, name, x, y):
        w, u = ({r: p[f"{name}.{kind}_{r}"] for r in "rzg"} for kind in "wu")
        reset = torch.sigmoid(y @ w["r"] + x @ u["r"])
        z = torch.sigmoid(y @ w["z"] + x @ u["z"] - p[f"{name}.b_g"])
        return (1 - z) * x + z * torch.tanh(y @ w["g"] + (reset * x) @ u["g"])

    def block(p, layer, h, seen):
        attended = relative_attention(norm(seen, p, f"{layer}.attention_norm"), 6, p, layer, 2)
        g = gate(p, f"{layer}.attention_gate", h, torch.relu(attended))
        inner = torch.relu(norm(g, p, f"{layer}.ff_norm") @ p[f"{layer}.ff.w1"])
        return gate(p, f"{layer}.ff_gate", g, torch.relu(inner @ p[f"{layer}.ff.w2"]))

    return in_segments(tensors, 6, 9, 2, block)


def leaves(arrays):
    return {name: torch.tensor(np.asarray(array, np.float64), requires_grad=True) for name, array in arrays.items()}


def f32(tensor):
    return tensor.detach().numpy().astype(np.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, required=True, help="the repository's root")
    root = parser.parse_args().output
    torch.set_num_threads(1)
    for source, technique, causal, seed, out_name, function in CASES:
        tensors, metadata = tensor_file.read(root / f"{source}.safetensors")
        inputs, parameters, constants, formula = function(tensors)
        theirs = torch.from_numpy(np.array(tensors[out_name or "out"]))
        ours = formula(leaves(inputs), leaves(parameters))
        worst = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        if not worst <= TOLERANCE:
            raise SystemExit(f"{source}: its output differs from the formula by {worst:.1e}")

        inputs, parameters = (leaves({name: np.float32(array) for name, array in arrays.items()})
                              for arrays in (inputs, parameters))
        torch.manual_seed(seed)
        g = torch.randn(theirs.shape, dtype=torch.float64).float().double()
        if "key_mask" in constants and technique.startswith("bigbird"):
            g *= torch.from_numpy(constants["key_mask"])[:, None, :, None]
        out = formula(inputs, parameters)
        gradients = torch.autograd.grad(out, [*inputs.values(), *parameters.values()], g)
        written = {"output_gradient": f32(g), "out": f32(out)}
        written.update({f"{'parameter' if name == 'random' else 'input'}.{name}": array.astype(np.int32)
                        for name, array in constants.items()})
        for name, tensor, gradient in zip([*(f"input.{n}" for n in inputs), *(f"parameter.{n}" for n in parameters)],
                                          [*inputs.values(), *parameters.values()], gradients):
            written[name] = f32(tensor)
            written[name.replace(".", "_gradient.", 1)] = f32(gradient)
        _, of, _, file = source.split("/")
        target = root / "harness/golden_gradients" / f"{of}_{file}{'_causal' if out_name else ''}.safetensors"
        size = tensor_file.write(target, written, {
            "technique": technique,
            "causal": str(causal).lower(),
            **{key: metadata[key] for key in ("heads",) if key in metadata},
            "inputs_of": source,
            "formula": metadata["formula"],
            "loss": "sum(out * output_gradient); *_gradient.NAME is its gradient with respect to NAME",
            "seed": seed,
            "command": "python3 tools/capture/golden_gradients.py --output=.",
            "versions": f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}",
            "precision": "inputs and parameters are float32; computed in float64, written in float32",
        })
        print(f"{target.name:<48} {size:7d} bytes, out differs by {worst:.1e}")


if __name__ == "__main__":
    main()
