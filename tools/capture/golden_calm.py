"""Writes adaptive/calm/testdata/t5x and t5x_consistency: see golden.py, whose rules hold here too.

The confidences and the threshold are what CALM's authors decode with, and the loss is what they train
classifiers with. Their module imports a training framework, so the functions are compiled out of its
source, unchanged.
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


def authors_method(name):
    """The method of this name in the authors' model, as a function of self and its arguments."""
    file = SOURCES[T5X] / "t5x/contrib/calm/models.py"
    method, = (node for node in ast.walk(ast.parse(file.read_text()))
               if isinstance(node, ast.FunctionDef) and node.name == name)
    method.returns = None
    for argument in method.args.args:
        argument.annotation = None
    names = {"jax": jax, "jnp": jax.numpy, "nn": linen, "losses": authors_losses()}
    exec(compile(ast.Module([method], []), file, "exec"), names)
    return names[name]


def authors_losses():
    """t5x.losses, whose weights and normalization are those of the caller's batch."""
    names = {}
    file = SOURCES[T5X] / "t5x/losses.py"
    exec(compile(file.read_text(), file, "exec"), names)
    names["get_loss_normalizing_factor_and_weights"] = lambda factor, batch: (factor, batch["weights"])
    return types.SimpleNamespace(**names)


def authors_functions():
    """(get_pred_confidence(method, **what it reads), threshold(lambda, position))."""
    jax.config.update("jax_enable_x64", True)
    file = SOURCES[T5X] / "t5x/contrib/calm/models.py"
    method = authors_method("get_pred_confidence")
    names = {"jax": jax, "jnp": jax.numpy}
    tree = ast.parse(file.read_text())
    decay, = (node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)
              and getattr(node.targets[0], "id", "") == "correct_by_pos")
    decay = compile(ast.Expression(decay), file, "eval")

    def confidence(conf_method, **given):
        return np.array(method(types.SimpleNamespace(conf_method=conf_method), **given))

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


LOSS = "t5x.contrib.calm.models.EncoderDecoderModel.loss_fn_meta_cls"
LAYERS, WORDS, SENTENCES, TOKENS = 4, 5, 2, 14


def consistency_formula(t):
    best = t["logits"].argmax(-1)  # [batch, exits, tokens]
    y = np.moveaxis(best[:, :-1] == best[:, -1:], 1, -1).astype(np.float64)
    z, agreeing = t["confidence_logits"], y.mean((0, 1))
    weights = np.where(y == 1, 1 - agreeing, agreeing) / y.size
    return {"labels": y, "loss": np.array([(weights * np.logaddexp(0, np.where(y == 1, -z, z))).sum()]),
            "gradient": weights * (1 / (1 + np.exp(-z)) - y)}


@case("adaptive/calm/testdata/t5x_consistency", LOSS, 602)
def t5x_consistency():
    jax.config.update("jax_enable_x64", True)
    common = draw(SENTENCES, 1, TOKENS, WORDS)
    tensors = {
        "logits": f32(golden.rounded(common + draw(SENTENCES, LAYERS, TOKENS, WORDS, scale=0.7))),
        "confidence_logits": f32(draw(SENTENCES, TOKENS, LAYERS - 1, scale=2)),
    }
    t = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    weights = jax.numpy.ones((SENTENCES, TOKENS))
    labels = []

    def loss(z):
        def logits_of_all(*_):  # of exits, and of the classifiers' two classes for all exits
            exits = jax.numpy.moveaxis(jax.numpy.asarray(t["logits"]), 1, 0)
            of_z = jax.numpy.moveaxis(jax.numpy.pad(z, ((0, 0), (0, 0), (0, 1))), -1, 0)
            return exits, jax.numpy.stack([jax.numpy.zeros_like(of_z), of_z], -1)

        model = types.SimpleNamespace(
            _loss_normalizing_factor=float(SENTENCES * TOKENS), _label_smoothing=0.0, _z_loss=0.0,
            _compute_logits=logits_of_all, _compute_metrics=lambda **_: {})
        method = authors_method("loss_fn_meta_cls")
        method.__globals__["clu_metrics"] = types.SimpleNamespace(Accuracy=types.SimpleNamespace(
            from_model_output=lambda logits, labels, mask: all_labels.append(labels)))
        method.__globals__["metrics_lib"] = types.SimpleNamespace(AveragePerStep=lambda total: None)
        all_labels = []
        value, _ = method(model, None, {"weights": weights, "decoder_target_tokens": None}, None)
        labels[:] = all_labels
        return value

    value, gradient = jax.value_and_grad(loss)(jax.numpy.asarray(t["confidence_logits"]))
    outputs = {"labels": np.stack([np.array(of_exit) for of_exit in labels], -1).astype(np.float64),
               "loss": np.array([float(value)]), "gradient": np.array(gradient)}
    tensors.update({name: f64(torch.from_numpy(output)) for name, output in outputs.items()})
    return tensors, {
        "exits": LAYERS, "tokens": TOKENS, "batch": SENTENCES, "vocabulary": WORDS,
        "formula": "labels [batch, tokens, n] = 1 where exit n's largest of `logits` [batch, exits, tokens, "
                   "vocabulary] is the last exit's; loss = mean over n and tokens of weight (softplus(z) - "
                   "label z), z = confidence_logits, the authors' two classes having the logits 0 and z; "
                   "weight = the share of the other label among the layer's tokens; gradient = dloss/dz by jax",
    }, consistency_formula


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
