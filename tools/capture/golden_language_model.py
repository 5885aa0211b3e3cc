"""Writes memory/transformer_xl/testdata/language_model: what the reference language model computes.

The weights are those of harness/inputs/language_model, the network is language_model.py in float64,
segment by segment; before it writes, the whole sequence is computed again in NumPy under one mask.
"""

import math
import pathlib

import numpy as np
import torch

import golden
import language_model as model
import tensor_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = ROOT / "harness/inputs/language_model"
TARGET = ROOT / "memory/transformer_xl/testdata/language_model.safetensors"
TOKENS, SEGMENT, MEMORY, STORED = 160, 64, 128, 64


def network(weights, tokens):
    """h^6 of the tokens, read in segments."""
    parameters = {name: torch.from_numpy(array) for name, array in weights.items()}
    out, memories = [], None
    with golden.in_float64():
        for segment in torch.from_numpy(tokens.astype(np.int64))[None].split(SEGMENT, 1):
            hidden, memories, _ = model.forward(parameters, segment, memories, MEMORY)
            out.append(hidden[-1][0])
    return torch.cat(out).numpy()


def formula(weights, tokens):
    """The same as one pass: key j is seen by query i for max(0, s_i - MEMORY) <= j <= i."""
    positions = np.arange(len(tokens))
    first = np.maximum(0, positions // SEGMENT * SEGMENT - MEMORY)
    seen = (positions >= first[:, None]) & (positions <= positions[:, None])
    distance = np.maximum(0, positions[:, None] - positions)
    angles = positions[:, None] / 10000.0 ** (2 * np.arange(model.WIDTH // 2) / model.WIDTH)
    sinusoids = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    h = weights["embedding"][tokens][None]
    for n in range(model.LAYERS):
        p = {name.split(".", 1)[1]: a for name, a in weights.items() if name.startswith(f"layer{n}.")}
        x = golden.layer_norm(h, p["attention_norm.gamma"], p["attention_norm.beta"], 1e-5)
        q, k, v = (golden.split_heads(x @ p[name], model.HEADS) for name in ("w_q", "w_k", "w_v"))
        r = golden.split_heads((sinusoids @ p["w_r"])[None], model.HEADS)
        by_distance = (q + p["v"][:, None]) @ r.swapaxes(-1, -2) / math.sqrt(model.HEAD_DIM)
        bias = np.take_along_axis(by_distance, distance[None, None], -1)
        mixed = golden.attend(q + p["u"][:, None], k, v, seen, bias)
        g = h + golden.merge_heads(mixed) @ p["w_o"]
        x = golden.layer_norm(g, p["ff_norm.gamma"], p["ff_norm.beta"], 1e-5)
        h = g + np.maximum(x @ p["ff.w1"] + p["ff.b1"], 0) @ p["ff.w2"] + p["ff.b2"]
    return h[0]


def main():
    arrays, _ = tensor_file.read(SOURCE / "model.safetensors")
    weights = {name: array.astype(np.float64) for name, array in arrays.items()}
    tokens = np.frombuffer((SOURCE / "held_out.txt").read_bytes()[:TOKENS], np.uint8).astype(np.int32)
    out, expected = network(weights, tokens), formula(weights, tokens)
    worst = abs(out - expected).max() / abs(expected).max()
    if worst > golden.TOLERANCE:
        raise SystemExit(f"the network differs from the formula by {worst:.1e}")
    size = tensor_file.write(TARGET, {"out": out[None, -STORED:], "tokens": tokens[None]}, {
        "made_by": "tools/capture/language_model.py, forward(), torch in float64",
        "weights": "harness/inputs/language_model/model.safetensors",
        "tokens": f"the first {TOKENS} bytes of held_out.txt; x is their rows of \"embedding\"",
        "out": f"h^{model.LAYERS} of the last {STORED} tokens, before final_norm",
        "segment_tokens": SEGMENT,
        "memory_tokens": MEMORY,
        "command": "python3 tools/capture/golden_language_model.py",
        "versions": f"torch {torch.__version__}, numpy {np.__version__}",
    })
    print(f"{TARGET.relative_to(ROOT)}: {size} bytes, formula differs by {worst:.1e}")


if __name__ == "__main__":
    main()
