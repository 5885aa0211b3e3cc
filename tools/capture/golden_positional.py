"""Writes testdata of positional/sinusoidal, learned and universal: see golden.py, whose rules hold here too."""

import contextlib
import importlib
import pathlib
import sys

import numpy as np
import torch

import golden
from golden import (SOURCES, attention_formula, attention_parameters, case, draw, f32, f64, in_float64,
                    redraw_parameters, rounded)

FIRST = len(golden.CASES)
PORT = "universal_transformer_pytorch"
SOURCES[PORT] = "https://github.com/andreamad8/Universal-Transformer-Pytorch"
HEADS, HEAD_DIM = 2, 8
WIDTH = HEADS * HEAD_DIM


@contextlib.contextmanager
def tables_in_float64():
    """Tables are made with torch.FloatTensor, which in_float64 leaves alone."""
    was = torch.FloatTensor
    torch.FloatTensor = torch.DoubleTensor
    try:
        with in_float64():
            yield
    finally:
        torch.FloatTensor = was


# ---- positional/sinusoidal ----


def sinusoids(positions, width, layout, frequencies):
    p, sines = np.asarray(positions, np.float64)[:, None], -(-width // 2)
    j = np.arange(sines)
    w = 10000.0 ** (-2 * j / width if frequencies == "paper" else -j / (sines - 1))
    sine, cosine = np.sin(p * w), np.cos(p * w)[:, :width // 2]
    if layout == "concatenated":
        return np.concatenate([sine, cosine], 1)
    table = np.empty((len(p), width))
    table[:, 0::2], table[:, 1::2] = sine, cosine
    return table


FORMULA = "sin(p w_j), cos(p w_j), {}; w_j = 10000^(-{}); p = 0, 1, ..."
TEXT = {"interleaved": "in turn", "concatenated": "all sines first", "paper": "2 j / width",
        "inclusive": "j / (number of sines - 1)"}


def table_case(table, layout, frequencies):
    formula = FORMULA.format(TEXT[layout], TEXT[frequencies])
    return {"table": f64(table)}, {
        "layout": layout, "frequencies": frequencies, "formula": formula,
    }, lambda t: {"table": sinusoids(range(len(t["table"])), t["table"].shape[1], layout, frequencies)}


def distilbert_table(tokens, width):
    from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
    table = torch.empty(tokens, width)
    create_sinusoidal_embeddings(tokens, width, table)
    return table


@case("positional/sinusoidal/testdata/distilbert",
      "transformers.models.distilbert.modeling_distilbert.create_sinusoidal_embeddings", 121)
def distilbert():
    with tables_in_float64():
        return table_case(distilbert_table(40, 16), "interleaved", "paper")


def marian_case(width):
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
    with tables_in_float64():
        return table_case(MarianSinusoidalPositionalEmbedding(40, width).weight, "concatenated", "paper")


MARIAN = "transformers.models.marian.modeling_marian.MarianSinusoidalPositionalEmbedding"


@case("positional/sinusoidal/testdata/marian", MARIAN, 122)
def marian():
    return marian_case(16)


@case("positional/sinusoidal/testdata/marian_odd", MARIAN, 123)
def marian_odd():
    return marian_case(7)


@case("positional/sinusoidal/testdata/transformer_xl",
      "transformers.models.transfo_xl.modeling_transfo_xl.PositionalEmbedding", 124)
def transformer_xl():
    from transformers.models.transfo_xl.modeling_transfo_xl import PositionalEmbedding
    with tables_in_float64():
        return table_case(PositionalEmbedding(16)(torch.arange(40.0))[:, 0], "concatenated", "paper")


@case("positional/sinusoidal/testdata/speech_to_text",
      "transformers.models.speech_to_text.modeling_speech_to_text.Speech2TextSinusoidalPositionalEmbedding", 125)
def speech_to_text():
    from transformers.models.speech_to_text import modeling_speech_to_text as package
    with tables_in_float64():
        table = package.Speech2TextSinusoidalPositionalEmbedding.get_embedding(40, 16)
        return table_case(table, "concatenated", "inclusive")


def attention():
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    redraw_parameters(module, 0.3)
    return module


@case("positional/sinusoidal/testdata/attention",
      "transformers.models.distilbert.modeling_distilbert.create_sinusoidal_embeddings, "
      "torch.nn.MultiheadAttention", 126)
def sinusoidal_attention():
    x = rounded(draw(2, 21, WIDTH) / 4)
    with tables_in_float64():
        u = 4 * x + distilbert_table(21, WIDTH)
        module = attention()
        out, _ = module(u, u, u, need_weights=True)
    tensors = {"x": f32(x), "out": f64(out)}
    tensors.update({name: f32(p) for name, p in attention_parameters(module).items()})

    def formula(t):
        u = 4 * t["x"] + sinusoids(range(21), WIDTH, "interleaved", "paper")
        return {"out": attention_formula(t, u, u, HEADS)}

    return tensors, {"heads": HEADS, "head_dim": HEAD_DIM,
                     "formula": "attention as in multi_head's files on sqrt(width) x + the table of the paper",
                     }, formula


# ---- positional/learned ----


@case("positional/learned/testdata/opt",
      "transformers.models.opt.modeling_opt.OPTLearnedPositionalEmbedding, torch.nn.MultiheadAttention", 127)
def opt():
    from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding
    x = draw(2, 19, WIDTH)
    with in_float64():
        table = OPTLearnedPositionalEmbedding(30, WIDTH)
        redraw_parameters(table, 1.0)
        u = x + table(torch.ones(2, 19))
        module = attention()
        out, _ = module(u, u, u, need_weights=True)
    tensors = {"x": f32(x), "out": f64(out), "p": f32(table.weight)[None]}
    tensors.update({name: f32(p) for name, p in attention_parameters(module).items()})

    def formula(t):
        u = t["x"] + t["p"][0, 2:21]
        return {"out": attention_formula(t, u, u, HEADS)}

    return tensors, {"heads": HEADS, "head_dim": HEAD_DIM, "position_offset": 2,
                     "formula": "attention as in multi_head's files on x_t + p[0, 2 + t]"}, formula


# ---- positional/universal ----


class Shared(torch.nn.Module):
    """The port's repeated layer as attention alone."""

    def __init__(self):
        super().__init__()
        self.attention = attention()

    def forward(self, u):
        return self.attention(u, u, u, need_weights=True)[0]


def port():
    np.float = float  # which NumPy had when the port was written
    sys.path.insert(0, str(SOURCES[PORT]))
    try:
        return importlib.import_module("models.UTransformer")
    finally:
        sys.path.pop(0)


@case("positional/universal/testdata/encoder", f"{PORT}.models.UTransformer.Encoder", 128)
def encoder():
    steps = 3
    x = draw(2, 17, WIDTH)
    with tables_in_float64():
        module = port().Encoder(WIDTH, WIDTH, steps, HEADS, WIDTH, WIDTH, WIDTH).eval()
        module.enc = Shared()
        module.proj_flag = False  # it is on where sizes are equal
        out, _ = module(x.clone())
    tensors = {"x": f32(x), "out": f64(out)}
    tensors.update({name: f32(p) for name, p in attention_parameters(module.enc.attention).items()})

    def formula(t):
        h = t["x"]
        for n in range(steps):
            u = h + sinusoids(range(17), WIDTH, "concatenated", "inclusive")
            u = u + sinusoids([n], WIDTH, "concatenated", "inclusive")
            h = attention_formula(t, u, u, HEADS)
        return {"out": h}

    return tensors, {"heads": HEADS, "head_dim": HEAD_DIM, "steps": steps,
                     "formula": "h = x; for t = 0, 1, ...: h = attention(h_p + S[p] + S[t]), as in multi_head's files "
                                "and with one set of parameters; S are sines, then cosines, of tensor2tensor's frequencies",
                     }, formula


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
