"""Writes adaptive/calm/testdata/t5x: see golden.py, whose rules hold here too.

The confidences and the threshold are what CALM's authors decode with. Their module imports a training
framework, so the two functions are compiled out of its source, unchanged.
"""

import ast
import pathlib
import types

import jax
import numpy as np
import torch
from flax import linen

import golden
from golden import SOURCES, case, draw, f32, f64, layer_norm

FIRST = len(golden.CASES)
T5X = "t5x"
SOURCES[T5X] = "https://github.com/google-research/t5x"
METHOD = "t5x.contrib.calm.models.EncoderDecoderModel.get_pred_confidence"
ROWS, WIDTH, VOCABULARY, EPSILON = 48, 12, 30, 1e-5
LAMBDAS, TEMPERATURE = (0.25, 0.5, 0.9), 4


def authors_functions():
    """(get_pred_confidence(method, **what it reads), threshold(lambda, position))."""
    jax.config.update("jax_enable_x64", True)
    file = SOURCES[T5X] / "t5x/contrib/calm/models.py"
    names = {"jax": jax, "jnp": jax.numpy, "nn": linen}
    tree = ast.parse(file.read_text())
    method, = (node for node in ast.walk(tree)
               if isinstance(node, ast.FunctionDef) and node.name == "get_pred_confidence")
    exec(compile(ast.Module([method], []), file, "exec"), names)
    decay, = (node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)
              and getattr(node.targets[0], "id", "") == "correct_by_pos")
    decay = compile(ast.Expression(decay), file, "eval")

    def confidence(conf_method, **given):
        return np.array(names["get_pred_confidence"](
            types.SimpleNamespace(conf_method=conf_method), **given))

    def threshold(conf_threshold, position):
        return float(eval(decay, {**names, "conf_threshold": conf_threshold,
                                  "max_decode_length": ROWS,
                                  "self": types.SimpleNamespace(position_temp=TEMPERATURE)})(position))
    return confidence, threshold


def softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def logits_of(t):
    normalized = layer_norm(t["state"], t["exit1.norm.gamma"], t["exit1.norm.beta"], EPSILON)
    return normalized @ t["output"].T


def meta_logits_of(t):
    """Of two classes, of which the second is that the prediction will do."""
    z = t["state"] @ t["exit1.confidence.w"] + t["exit1.confidence.b"]
    return np.stack([np.zeros(ROWS), z], -1)


def formula(t):
    p = np.sort(softmax(logits_of(t)), -1)
    lengths = np.linalg.norm(t["state"], axis=-1) * np.linalg.norm(t["before"], axis=-1)
    decayed = np.exp(-TEMPERATURE * np.arange(ROWS) / ROWS)
    return {
        "softmax_diff": p[:, -1] - p[:, -2],
        "softmax_max": p[:, -1],
        "saturation": (t["state"] * t["before"]).sum(-1) / lengths,
        "classifier": 1 / (1 + np.exp(-meta_logits_of(t)[:, 1])),
        "thresholds": np.outer(t["lambda"], 0.9 + 0.1 * decayed),
    }


@case("adaptive/calm/testdata/t5x", METHOD, 601)
def t5x():
    confidence, threshold = authors_functions()
    state = draw(ROWS, WIDTH)
    drawn = {
        "state": state,
        "before": golden.rounded(state + draw(ROWS, WIDTH, scale=0.7)),
        "output": draw(VOCABULARY, WIDTH),
        "exit1.norm.gamma": golden.rounded(1 + draw(WIDTH, scale=0.2)),
        "exit1.norm.beta": draw(WIDTH, scale=0.2),
        "exit1.confidence.w": draw(WIDTH, scale=0.5),
        "exit1.confidence.b": draw(1),
        "lambda": golden.rounded(torch.tensor(LAMBDAS, dtype=torch.float64)),
    }
    tensors = {name: f32(tensor) for name, tensor in drawn.items()}
    t = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    logits = logits_of(t)
    meta = np.array(linen.softmax(meta_logits_of(t), axis=-1)[..., 1])
    outputs = {
        "softmax_diff": confidence("softmax_diff", logits=logits),
        "softmax_max": confidence("softmax_max", logits=logits),
        # A token at a time: of several, the authors take the norms of all of them together.
        "saturation": np.array([confidence("state", prev_state=before[None], new_state=after[None])
                                for before, after in zip(t["before"], t["state"])]),
        "classifier": confidence("meta", meta_score=meta),
        "thresholds": np.array([[threshold(a, i) for i in range(ROWS)] for a in t["lambda"]]),
    }
    tensors.update({name: f64(torch.from_numpy(value)) for name, value in outputs.items()})
    return tensors, {
        "tokens": ROWS, "model_dim": WIDTH, "vocabulary": VOCABULARY, "epsilon": EPSILON,
        "temperature": TEMPERATURE, "layer": "2, of whose exit the norm and the classifier are",
        "formula": "p = softmax(LN(state) output^T): softmax_diff its largest minus the next, softmax_max "
                   "the largest; saturation = cos(state, before); classifier = sigmoid(w . state + b), the "
                   "authors' softmax over two classes with logits 0 and that; thresholds [lambda, position "
                   "i of `tokens`] = lambda (0.9 + 0.1 exp(-temperature i / tokens)), correct_by_pos",
        "deviations": "the paper's threshold is 0.9 lambda + 0.1 exp(...), its score softmax_diff; the "
                      "authors' default is softmax_max; in a batch they wait for the least confident, and "
                      "take the saturation's norms over all of it; a saturation after the first exit is 0, "
                      "which reaches a threshold of 0",
    }, formula


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
