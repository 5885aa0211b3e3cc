"""Writes core/training/testdata and attention/encoder_decoder/testdata/training_*: see golden.py, whose
rules hold here too."""

import math
import pathlib

import numpy as np
import torch

import golden
from golden import case, draw, f32, f64, rounded

FIRST = len(golden.CASES)
STEPS, WARM_UP, WIDTH, FACTOR, MOST = 12, 4, 16, 0.05, 1.95
BETAS, EPSILON, DECAY = (0.9, 0.98), 1e-9, 0.1
SHAPES = {"w": (5, 7), "b": (7,)}


def rate(step):
    return FACTOR * WIDTH**-0.5 * min(step**-0.5, step * WARM_UP**-1.5)


def formula(t):
    outputs = {}
    norms = []
    moments = {name: (0.0, 0.0) for name in SHAPES}
    weights = {name: t[name] for name in SHAPES}
    for step in range(1, STEPS + 1):
        gradients = {name: t[f"{name}_gradients"][step - 1] for name in SHAPES}
        norms.append(math.sqrt(sum((g**2).sum() for g in gradients.values())))
        for name, g in gradients.items():
            g = g * min(1.0, MOST / (norms[-1] + 1e-6))
            m = BETAS[0] * moments[name][0] + (1 - BETAS[0]) * g
            v = BETAS[1] * moments[name][1] + (1 - BETAS[1]) * g**2
            moments[name] = m, v
            change = m / (1 - BETAS[0]**step) / (np.sqrt(v / (1 - BETAS[1]**step)) + EPSILON)
            weights[name] = weights[name] * (1 - rate(step) * DECAY) - rate(step) * change
    for name in SHAPES:
        outputs[f"{name}_after"] = weights[name]
        outputs[f"{name}_first"], outputs[f"{name}_second"] = moments[name]
    return {**outputs, "norms": np.array(norms),
            "rates": np.array([rate(step) for step in range(1, STEPS + 1)])}


@case("core/training/testdata/adamw", "torch.optim.AdamW, torch.nn.utils.clip_grad_norm_", 821)
def adamw():
    start = {name: draw(*shape) for name, shape in SHAPES.items()}
    gradients = {name: draw(STEPS, *shape, scale=0.3) for name, shape in SHAPES.items()}
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1.0, betas=BETAS, eps=EPSILON,
                                  weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda before: rate(before + 1))
    norms, rates = [], []
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = gradients[name][step].clone()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), MOST))
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    tensors = {name: f32(value) for name, value in start.items()}
    tensors.update({f"{name}_gradients": f32(value) for name, value in gradients.items()})
    for name, parameter in parameters.items():
        tensors[f"{name}_after"] = f64(parameter)
        tensors[f"{name}_first"] = f64(optimizer.state[parameter]["exp_avg"])
        tensors[f"{name}_second"] = f64(optimizer.state[parameter]["exp_avg_sq"])
    tensors["norms"] = f64(torch.stack(norms))
    tensors["rates"] = np.array(rates)
    return tensors, {
        "beta1": BETAS[0], "beta2": BETAS[1], "epsilon": EPSILON, "decay": DECAY, "most": MOST,
        "width": WIDTH, "warmup": WARM_UP, "factor": FACTOR,
        "formula": "steps of AdamW with the gradients of each step, clipped to the norm `most`, and "
                   "the rate factor width^-0.5 min(t^-0.5, t warmup^-1.5)",
    }, formula


# ---- Networks of six layers ----

LAYERS, HEADS, HEAD_DIM, INNER, TOKENS, NETWORK_STEPS = 6, 2, 4, 16, 11, 10
# Larger than the default, as the keys' biases have a gradient of 0, and AdamW divides by its size: what
# rounding makes of the 0 must be small beside it.
NETWORK = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}


def sparse_network(x, p, hidden):
    """The residual blocks of arXiv:1904.10509v1, section 5.2, as in golden.py."""
    from torch.nn import functional
    batch, tokens, width = x.shape

    def norm(h, name):
        return functional.layer_norm(h, (width,), p[f"{name}.gamma"], p[f"{name}.beta"], 1e-5)

    def attention(h, name):
        q, k, v = ((h @ p[f"{name}.w_{n}"] + p[f"{name}.b_{n}"])
                   .reshape(batch, tokens, HEADS, HEAD_DIM).transpose(1, 2) for n in "qkv")
        scores = (q @ k.transpose(2, 3) / math.sqrt(HEAD_DIM)).masked_fill(hidden, -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width)
        return mixed @ p[f"{name}.w_o"] + p[f"{name}.b_o"]

    for n in range(LAYERS):
        a = attention(norm(x, f"encoder{n}.attention_norm"), f"encoder{n}.attention")
        f = norm(x + a, f"encoder{n}.ff_norm") @ p[f"encoder{n}.ff.w1"] + p[f"encoder{n}.ff.b1"]
        x = x + a + f * torch.sigmoid(1.702 * f) @ p[f"encoder{n}.ff.w2"] + p[f"encoder{n}.ff.b2"]
    return norm(x, "encoder_norm")


def sparse_parameters():
    width = HEADS * HEAD_DIM
    shapes = {}
    for n in range(LAYERS):
        for name in "qkvo":
            shapes[f"encoder{n}.attention.w_{name}"] = width, width
            shapes[f"encoder{n}.attention.b_{name}"] = width,
        shapes.update({f"encoder{n}.ff.w1": (width, INNER), f"encoder{n}.ff.b1": (INNER,),
                       f"encoder{n}.ff.w2": (INNER, width), f"encoder{n}.ff.b2": (width,)})
    norms = [f"encoder{n}.{part}_norm" for n in range(LAYERS) for part in ("attention", "ff")]
    p = {name: draw(*shape, scale=0.2) for name, shape in shapes.items()}
    for name in norms + ["encoder_norm"]:
        p[f"{name}.gamma"], p[f"{name}.beta"] = rounded(1 + draw(width, scale=0.2)), draw(width, scale=0.2)
    return p


def network_case(block):
    """Ten steps of AdamW towards drawn outputs, by the mean of the squares of the differences."""
    width = HEADS * HEAD_DIM
    x, target = draw(2, TOKENS, width), draw(2, TOKENS, width)
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    with golden.in_float64():
        if block == "sparse":
            leaves = sparse_parameters()
            views = lambda: leaves
            run = lambda: sparse_network(x, leaves, hidden)
        else:
            layer = torch.nn.TransformerEncoderLayer(
                width, HEADS, INNER, dropout=0.0, activation="relu", batch_first=True,
                norm_first=block == "pre_norm")
            last = torch.nn.LayerNorm(width) if block == "pre_norm" else None
            module = torch.nn.TransformerEncoder(layer, LAYERS, norm=last, enable_nested_tensor=False)
            golden.redraw_parameters(module, 0.2)
            leaves = dict(module.named_parameters())
            views = lambda: golden.stack_parameters("encoder", module, golden.ENCODER_NAMES)
            run = lambda: module(x, mask=hidden)
        before = {name: f32(value) for name, value in views().items()}
        losses = []
        with torch.enable_grad():
            for leaf in leaves.values():
                leaf.requires_grad_()
            optimizer = torch.optim.AdamW(leaves.values(), **NETWORK)
            for _ in range(NETWORK_STEPS):
                optimizer.zero_grad()
                loss = ((run() - target) ** 2).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        after = {name: value.detach().clone() for name, value in views().items()}
        losses.append(((run() - target) ** 2).mean())
    tensors = {"x": f32(x), "target": f32(target), **before,
               **{f"after/{name}": f64(value) for name, value in after.items()},
               "losses": f64(torch.stack(losses)), "ends": f64(torch.stack([losses[0], losses[-1]]))}
    activation = "gelu_sigmoid" if block == "sparse" else "relu"

    def formula(t):
        ends = []
        for prefix in ("", "after/"):
            p = {name: t[prefix + name] for name in before}
            out = golden.stack_formula(p, "encoder", t["x"], HEADS, LAYERS, block != "post_norm",
                                       activation, ~hidden.numpy())
            ends.append(((out - t["target"]) ** 2).mean())
        return {"ends": np.array(ends)}

    return tensors, {
        **golden.stack_metadata("encoder", block, block != "post_norm", activation, HEADS, HEAD_DIM,
                                INNER, LAYERS, True),
        "rate": NETWORK["lr"], "beta1": NETWORK["betas"][0], "beta2": NETWORK["betas"][1],
        "epsilon": NETWORK["eps"], "decay": NETWORK["weight_decay"],
        "loss": "the mean of (out - target)^2, before each step and after the last; ends: the first "
                "and the last of them",
    }, formula


@case("attention/encoder_decoder/testdata/training_post_norm",
      "torch.nn.TransformerEncoder, torch.optim.AdamW", 831)
def training_post_norm():
    return network_case("post_norm")


@case("attention/encoder_decoder/testdata/training_pre_norm",
      "torch.nn.TransformerEncoder, torch.optim.AdamW", 832)
def training_pre_norm():
    return network_case("pre_norm")


@case("attention/encoder_decoder/testdata/training_sparse",
      "torch.autograd, torch.optim.AdamW (of the formulas of arXiv:1904.10509v1, section 5.2)", 833)
def training_sparse():
    return network_case("sparse")


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
