"""Writes memory/reversible/testdata: see golden.py, whose rules hold here too."""

import importlib.util
import math
import pathlib

import numpy as np
import torch

import golden
from golden import (attention_formula, attention_parameters, case, draw, f32, f64, in_float64,
                    layer_norm, redraw_parameters)

FIRST = len(golden.CASES)
HEADS, HEAD_DIM, INNER = 2, 6, 24
WIDTH = HEADS * HEAD_DIM


def reversible_module():
    """The package's one file of reversible layers: the package itself imports much more."""
    folder = pathlib.Path(importlib.util.find_spec("reformer_pytorch").origin).parent
    spec = importlib.util.spec_from_file_location("reversible_layers", folder / "reversible.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Attention(torch.nn.Module):
    """F: attention of normalised inputs."""

    def __init__(self, hidden):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.hidden = hidden  # pairs that are not seen, or None

    def forward(self, x):
        x = self.norm(x)
        return self.attention(x, x, x, attn_mask=self.hidden, need_weights=True)[0]


class FeedForward(torch.nn.Module):
    """G: a feed-forward network of normalised inputs."""

    def __init__(self, activation):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.first = torch.nn.Linear(WIDTH, INNER)
        self.second = torch.nn.Linear(INNER, WIDTH)
        self.activation = activation

    def forward(self, x):
        return self.second(self.activation(self.first(self.norm(x))))


def parameters_of(blocks):
    parameters = {}
    for n, (f, g) in enumerate(blocks):
        own = {f"f.{name}": p for name, p in attention_parameters(f.attention).items()}
        own.update({"f_norm.gamma": f.norm.weight, "f_norm.beta": f.norm.bias,
                    "g_norm.gamma": g.norm.weight, "g_norm.beta": g.norm.bias,
                    "g.w1": g.first.weight.T, "g.b1": g.first.bias,
                    "g.w2": g.second.weight.T, "g.b2": g.second.bias})
        parameters.update({f"layer{n}.{name}": p for name, p in own.items()})
    return parameters


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def reversible_case(layers, tokens, activation, causal):
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1) if causal else None
    x, cotangent = draw(2, tokens, WIDTH), draw(2, tokens, 2 * WIDTH)
    with in_float64(), torch.enable_grad():
        function = {"relu": torch.nn.ReLU, "gelu": torch.nn.GELU}[activation]()
        blocks = torch.nn.ModuleList(
            torch.nn.ModuleList([Attention(hidden), FeedForward(function)]) for _ in range(layers))
        redraw_parameters(blocks, 0.3)
        sequence = reversible_module().ReversibleSequence(blocks).train()
        streams = torch.cat([x, x], -1).requires_grad_()
        out = sequence(streams)
        out.backward(cotangent)
    tensors = {"x": f32(x), "cotangent": f32(cotangent), "out": f64(out),
               "gradient": f64(streams.grad)}
    tensors.update({name: f32(p) for name, p in parameters_of(blocks).items()})

    def forward(t, first, second):
        activate = gelu if activation == "gelu" else lambda h: np.maximum(h, 0)
        allowed = None if hidden is None else ~hidden.numpy()
        for n in range(layers):
            own = {name.split(".", 1)[1]: a for name, a in t.items()
                   if name.startswith(f"layer{n}.")}
            f = {name[2:]: a for name, a in own.items() if name.startswith("f.")}
            h = layer_norm(second, own["f_norm.gamma"], own["f_norm.beta"], 1e-5)
            first = first + attention_formula(f, h, h, HEADS, allowed)
            h = layer_norm(first, own["g_norm.gamma"], own["g_norm.beta"], 1e-5)
            second = second + activate(h @ own["g.w1"] + own["g.b1"]) @ own["g.w2"] + own["g.b2"]
        return np.concatenate([first, second], -1)

    return tensors, {
        "heads": HEADS, "head_dim": HEAD_DIM, "layers": layers, "activation": activation,
        "causal": str(causal).lower(),
        "formula": "both streams begin as x; per block first += F(second), second += G(first), with F "
                   "attention as in multi_head's files and G = activation(h w1 + b1) w2 + b2 of layer-"
                   "normalised inputs, epsilon 1e-5; out is both side by side; gradient is the product "
                   "of cotangent with the Jacobian of out in both inputs, by the package's backward pass",
    }, lambda t: {"out": forward(t, t["x"], t["x"])}


PACKAGE = "reformer_pytorch.reversible.ReversibleSequence"


@case("memory/reversible/testdata/two_blocks", PACKAGE, 101)
def two_blocks():
    return reversible_case(2, 9, "gelu", causal=False)


@case("memory/reversible/testdata/three_causal_blocks", PACKAGE, 102)
def three_causal_blocks():
    return reversible_case(3, 7, "relu", causal=True)


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
