"""Writes testdata of adaptive/universal_transformer: see golden.py, whose rules hold here too."""

import pathlib

import numpy as np
import torch

import golden
import golden_positional as positional
import tensor_file
import train_universal_transformer as train
import universal_transformer as model
from golden import (attention_formula, attention_parameters, case, draw, f32, f64, in_float64, layer_norm,
                    redraw_parameters)

FIRST = len(golden.CASES)
ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "adaptive/universal_transformer/model/model.safetensors"
HEADS, WIDTH = positional.HEADS, positional.WIDTH


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def block_formula(p, u, heads, hidden=None):
    """LN(a + FF(a)), a = LN(u + attention(u)), of parameters by the technique's names."""
    attention = {name: p.get("attention." + name, 0.0)
                 for name in ("w_q", "b_q", "w_k", "b_k", "w_v", "b_v", "w_o", "b_o")}
    allowed = None if hidden is None else ~hidden
    a = layer_norm(u + attention_formula(attention, u, u, heads, allowed), p["attention_norm.gamma"],
                   p["attention_norm.beta"], 1e-5)
    inner = np.maximum(a @ p["ff.w1"] + p["ff.b1"], 0)
    return layer_norm(a + inner @ p["ff.w2"] + p["ff.b2"], p["ff_norm.gamma"], p["ff_norm.beta"], 1e-5)


# ---- The port of tensor2tensor's halting ----

STEPS = 5


class Block(torch.nn.Module):
    """The paper's block of PyTorch's layers, in the place of the port's pre-norm one.

    The port goes on to compute tokens that have halted, and the others see them change. The paper
    copies them, so rows that have halted by the port's gate are put back after each call, unless
    the file is of the port as it is.
    """

    def __init__(self, gate, width, inner, puts_back):
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(width, HEADS, inner, batch_first=True)
        self.gate, self.total, self.state = [gate], 0.0, None  # a list, so that it is no child
        self.puts_back = puts_back

    def forward(self, u):
        a = self.layer.norm1(u + self.layer.self_attn(u, u, u, need_weights=True)[0])
        state, gate = self.layer.norm2(a + self.layer._ff_block(a)), self.gate[0]
        if self.state is not None and self.puts_back:
            halted = self.total > gate.threshold
            state = torch.where(halted[..., None], self.state, state)
        self.total = self.total + torch.sigmoid(gate.p(u)).squeeze(-1)
        self.state = state
        return state


def port_case(batch, tokens, width, inner, puts_back):
    x = draw(batch, tokens, width)
    was = torch.Tensor.cuda
    torch.Tensor.cuda = lambda tensor: tensor  # the port wants a GPU
    try:
        with positional.tables_in_float64():
            module = positional.port().Encoder(width, width, STEPS, HEADS, width, width, width, act=True).eval()
            module.enc = Block(module.act_fn, width, inner, puts_back).eval()
            module.proj_flag = False  # it is on where sizes are equal
            redraw_parameters(module.enc, 0.3)
            redraw_parameters(module.act_fn, 0.3)
            module.act_fn.p.bias.fill_(-2.5)
            out, (remainders, steps) = module(x.clone())
    finally:
        torch.Tensor.cuda = was
    layer, gate = module.enc.layer, module.act_fn
    parameters = {f"attention.{name}": p for name, p in attention_parameters(layer.self_attn).items()}
    parameters.update({
        "attention_norm.gamma": layer.norm1.weight, "attention_norm.beta": layer.norm1.bias,
        "ff.w1": layer.linear1.weight.T, "ff.b1": layer.linear1.bias,
        "ff.w2": layer.linear2.weight.T, "ff.b2": layer.linear2.bias,
        "ff_norm.gamma": layer.norm2.weight, "ff_norm.beta": layer.norm2.bias,
        "halting.w": gate.p.weight[0], "halting.b": gate.p.bias})
    tensors = {"x": f32(x), **{name: f32(p) for name, p in parameters.items()}, "out": f64(out),
               "ponder": f64(remainders + steps), "steps": steps.numpy().astype(np.int32)}

    def formula(t):
        h, y = t["x"], np.zeros_like(t["x"])
        total, ponder = np.zeros((batch, tokens)), np.zeros((batch, tokens))
        for n in range(STEPS):
            u = h + positional.sinusoids(range(tokens), width, "concatenated", "inclusive")
            u = u + positional.sinusoids([n], width, "concatenated", "inclusive")
            p = sigmoid(u @ t["halting.w"] + t["halting.b"])
            runs = total <= gate.threshold
            halts = runs & (total + p > gate.threshold)
            weight = np.where(halts, 1 - total, p) * runs
            h = np.where(runs[..., None] | (not puts_back), block_formula(t, u, HEADS), h)
            y = weight[..., None] * h + (1 - weight[..., None]) * y
            ponder += runs + halts * (1 - total)
            total = total + p * runs
        return {"out": y, "ponder": ponder}

    return tensors, {"heads": HEADS, "threshold": gate.threshold, "max_steps": STEPS,
                     "formula": "u = h_p + S[p] + S[n], n = 0, 1, ...; p = sigmoid(u . w + b); y = w h + (1 - w) y with "
                                "w = p, or 1 - the sum of the earlier p where the sum exceeds the threshold, which it "
                                "need not at the last step; h of tokens beyond it " +
                                ("stays, which the script sees to" if puts_back else "is computed further, w is 0"),
                     }, formula


@case("adaptive/universal_transformer/testdata/basic",
      f"{positional.PORT}.models.UTransformer.Encoder, ACT_basic", 141)
def basic():
    return port_case(3, 11, WIDTH, 4 * WIDTH, puts_back=True)


@case("adaptive/universal_transformer/testdata/recomputed",
      f"{positional.PORT}.models.UTransformer.Encoder, ACT_basic", 143)
def recomputed():
    return port_case(2, 9, 8, 16, puts_back=False)


# ---- The trained model ----


@case("adaptive/universal_transformer/testdata/trained",
      "torch.nn.functional, tools/capture/universal_transformer.py", 142)
def trained():
    arrays, _ = tensor_file.read(MODEL)
    generator = torch.Generator().manual_seed(142)
    numbers, sums, mask = train.problems(3, 8, 12, generator, nines=0.6)
    with in_float64():
        parameters = {name: torch.from_numpy(array.astype(np.float64)) for name, array in arrays.items()}
        x = model.embed(parameters, numbers)
        fixed = model.fixed_steps(parameters, numbers, mask)[-1]
        y, ponder, steps = model.adaptive_steps(parameters, numbers, mask)
    real = mask[..., None].double()
    tensors = {"numbers": numbers.numpy().astype(np.int32), "sums": sums.numpy().astype(np.int32),
               "key_mask": mask.numpy().astype(np.int32), "fixed": f64(fixed * real), "out": f64(y * real),
               "ponder": f64(ponder), "steps": steps.numpy().astype(np.int32)}

    def formula(t):
        weights = {name: p.numpy() for name, p in parameters.items()}
        tokens = x.shape[1]
        hidden = ~mask.numpy()[:, None, None]
        encoding = positional.sinusoids(range(tokens), model.WIDTH, "interleaved", "paper")
        h, states, inputs = x.numpy(), [], []
        runs, total = mask.numpy(), np.zeros(mask.shape)
        y, ponder = np.zeros_like(h), np.zeros(mask.shape)
        fixed = h
        for n in range(1, model.STEPS + 1):
            time = positional.sinusoids([n], model.WIDTH, "interleaved", "paper")
            fixed = block_formula(weights, fixed + encoding + time, model.HEADS, hidden)
            u = h + encoding + time
            p = sigmoid(u @ weights["halting.w"] + weights["halting.b"])
            halts = runs & ((total + p >= model.THRESHOLD) | (n == model.STEPS))
            weight = np.where(halts, 1 - total, p) * runs
            h = np.where(runs[..., None], block_formula(weights, u, model.HEADS, hidden), h)
            y = y + weight[..., None] * h
            ponder = ponder + runs + halts * (1 - total)
            total, runs = total + weight, runs & ~halts
        real = mask.numpy()[..., None]
        return {"fixed": fixed * real, "out": y * real, "ponder": ponder}

    return tensors, {"weights": "adaptive/universal_transformer/model/model.safetensors", "heads": model.HEADS,
                     "formula": f"{model.TECHNIQUE} of embedding.first + embedding.second of the numbers' digits; fixed "
                                "never halts; padding is 0",
                     }, formula


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
