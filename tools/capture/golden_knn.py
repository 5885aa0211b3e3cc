"""Writes memory/knn_lm/testdata: see golden.py, whose rules hold here too."""

import ast
import contextlib
import importlib.util
import pathlib
import sys
import types

import numpy as np
import torch

import golden
from golden import SOURCES, case, draw, f32, f64, in_float64

FIRST = len(golden.CASES)
SOURCES["knnlm"] = "https://github.com/urvashik/knnlm"
BATCH, TOKENS, HEADS, HEAD_DIM = 2, 9, 3, 4
WIDTH = HEADS * HEAD_DIM
VOCABULARY, ENTRIES, NEIGHBOURS, SHARE = 20, 60, 8, 0.25
NO_TOKEN = -1  # what the authors leave out


class ExactIndex:
    """What the authors ask FAISS for."""

    def __init__(self, keys):
        self.keys = keys

    def search(self, queries, k):
        distances = ((queries[:, None] - self.keys[None]) ** 2).sum(-1)
        nearest = distances.argsort(-1, kind="stable")[:, :k]
        return np.take_along_axis(distances, nearest, -1), nearest


def datastore_class():
    """KNN_Dstore, whose module imports FAISS, and of fairseq a softmax and a name."""
    softmax = torch.nn.functional.log_softmax
    utils = types.SimpleNamespace(log_softmax=lambda x, dim: softmax(x, dim, dtype=torch.float32))
    sys.modules["faiss"] = types.ModuleType("faiss")
    sys.modules["fairseq"] = types.ModuleType("fairseq")
    sys.modules["fairseq"].utils = utils
    sys.modules["fairseq.data"] = types.ModuleType("fairseq.data")
    sys.modules["fairseq.data"].Dictionary = None
    spec = importlib.util.spec_from_file_location("knnlm", SOURCES["knnlm"] / "fairseq/knnlm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.KNN_Dstore


def interpolation():
    """combine_knn_and_vocab_probs, which is defined inside a method."""
    source = (SOURCES["knnlm"] / "fairseq/sequence_scorer.py").read_text()
    found = [node for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.FunctionDef) and node.name == "combine_knn_and_vocab_probs"]
    names = {"torch": torch, "np": np}
    exec(compile(ast.Module(found, []), "sequence_scorer.py", "exec"), names)
    return names["combine_knn_and_vocab_probs"]


@contextlib.contextmanager
def on_the_cpu():
    """Tensors that are sent to the GPU stay; torch.full of a whole number makes floats, as in their torch."""
    full = torch.full
    torch.Tensor.cuda = lambda tensor: tensor
    torch.full = lambda shape, value: full(shape, float(value))
    try:
        yield
    finally:
        torch.full = full
        del torch.Tensor.cuda


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def formula(t):
    out = np.exp(log_softmax(t["x"] @ t["output"].T)) * (1 - SHARE)
    for row in np.ndindex(BATCH, TOKENS):
        distances = ((t["context"][row] - t["datastore.keys"]) ** 2).sum(-1)
        nearest = distances.argsort(kind="stable")[:NEIGHBOURS]
        weights = np.exp(-distances[nearest])
        tokens = t["datastore.values"][nearest].astype(int)
        np.add.at(out[row], tokens, SHARE * weights / weights.sum())
    return {"out": np.log(out)}


@case("memory/knn_lm/testdata/knnlm", "knnlm.fairseq.knnlm.KNN_Dstore", 701)
def knnlm():
    x = draw(BATCH, TOKENS, WIDTH)
    output = draw(VOCABULARY, WIDTH, scale=0.5)
    keys, context = draw(ENTRIES, WIDTH, scale=0.4), draw(BATCH, TOKENS, WIDTH, scale=0.4)
    values = torch.randint(VOCABULARY, (ENTRIES,)).int()
    with in_float64(), on_the_cpu():
        store = object.__new__(datastore_class())
        vars(store).update(
            half=False, k=NEIGHBOURS, metric_type="l2", sim_func=None,
            index=ExactIndex(keys.numpy()), keys=keys.numpy(), vals=values.numpy()[:, None])
        of_model = torch.nn.functional.log_softmax(x @ output.T, -1)
        queries = context.transpose(0, 1).contiguous()  # [tokens, batch, channels]
        columns = []
        for y in range(VOCABULARY):  # they have the gold token alone
            gold = torch.full((TOKENS, BATCH), y).long()
            of_neighbours = store.get_knn_log_prob(queries, gold, NO_TOKEN)[..., 0].T
            columns.append(interpolation()(of_neighbours, of_model[..., y], SHARE))
    return {
        "x": f32(x), "context": f32(context), "output": f32(output), "datastore.keys": f32(keys),
        "datastore.values": values.numpy(), "out": f64(torch.stack(columns, -1)),
    }, {
        "heads": HEADS, "head_dim": HEAD_DIM, "vocabulary": VOCABULARY, "entries": ENTRIES,
        "k": NEIGHBOURS, "lambda": SHARE,
        "formula": "out = log((1 - lambda) softmax(x output^T) + lambda p_kNN), p_kNN(y) = sum over the "
                   "k nearest entries e with value y of exp(-|context - key_e|^2), over that of all k",
    }, formula


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
