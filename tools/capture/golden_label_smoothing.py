"""Writes core/losses/testdata: see golden.py, whose rules hold here too.

PyTorch's loss is run; what fairseq, Tensor2Tensor and The Annotated Transformer compute is restated
from their text, with their log-probabilities and in their form.
"""

import math
import pathlib

import numpy as np
import torch

import golden
from golden import case, draw, f32, f64

FIRST = len(golden.CASES)
TOKENS, CLASSES, PADDING, SMOOTHING = 13, 11, 1, 0.1


def fairseq(log_p, labels):
    """label_smoothed_nll_loss: a share of the sum of all, and the rest of the label's."""
    share = SMOOTHING / (CLASSES - 1)
    of_label = -log_p.gather(-1, labels[:, None])[:, 0]
    losses = (1 - SMOOTHING - share) * of_label - share * log_p.sum(-1)
    return losses.masked_fill(labels == PADDING, 0.0)


def tensor2tensor(log_p, labels):
    """smoothing_cross_entropy, weighted by what is not padding."""
    confidence, low = 1 - SMOOTHING, SMOOTHING / (CLASSES - 1)
    normalizing = -(confidence * math.log(confidence)
                    + (CLASSES - 1) * low * math.log(low + 1e-20))
    soft = torch.full_like(log_p, low).scatter(-1, labels[:, None], confidence)
    return (-(soft * log_p).sum(-1) - normalizing) * (labels != PADDING)


def annotated_transformer(log_p, labels):
    """Its LabelSmoothing, as a cross-entropy: nothing for padding, in columns and rows."""
    soft = torch.full_like(log_p, SMOOTHING / (CLASSES - 2))
    soft.scatter_(-1, labels[:, None], 1 - SMOOTHING)
    soft[:, PADDING] = 0
    soft[labels == PADDING] = 0
    return -(soft * log_p).sum(-1)


def formula(t):
    z, labels = t["logits"], t["labels"].astype(int)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    counted = labels != PADDING

    def loss(of_label, of_others, of_padding):
        q = np.full_like(z, of_others)
        q[:, PADDING] = of_padding
        q[np.arange(TOKENS), labels] = of_label
        return -(q * log_p).sum(-1) * counted, -(q * np.log(np.maximum(q, 1e-300))).sum(-1)

    e, share = SMOOTHING, SMOOTHING / (CLASSES - 1)
    uniform, _ = loss(1 - e + e / CLASSES, e / CLASSES, e / CLASSES)
    wrong, entropy = loss(1 - e, share, share)
    without, _ = loss(1 - e, e / (CLASSES - 2), 0)
    return {"torch": uniform, "torch_mean": np.array([uniform.sum() / counted.sum()]),
            "fairseq": wrong, "tensor2tensor": wrong - entropy * counted,
            "annotated_transformer": without}


@case("core/losses/testdata/label_smoothing", "torch.nn.functional.cross_entropy", 811)
def label_smoothing():
    logits = draw(TOKENS, CLASSES, scale=3.0)
    labels = torch.randint(CLASSES, (TOKENS,))
    labels[[2, 9]] = PADDING
    log_p = logits.log_softmax(-1)
    of_torch = {reduction: torch.nn.functional.cross_entropy(
        logits, labels, ignore_index=PADDING, label_smoothing=SMOOTHING, reduction=reduction)
        for reduction in ("none", "mean")}
    return {"logits": f32(logits), "labels": labels.numpy().astype(np.int32),
            "torch": f64(of_torch["none"]), "torch_mean": f64(of_torch["mean"].reshape(1)),
            "fairseq": f64(fairseq(log_p, labels)),
            "tensor2tensor": f64(tensor2tensor(log_p, labels)),
            "annotated_transformer": f64(annotated_transformer(log_p, labels))}, {
        "smoothing": SMOOTHING, "padding": PADDING,
        "formula": "-sum_k q_k log p_k of each token, 0 where the label is padding; q is 1 - e + e / "
                   "K and e / K for torch, 1 - e and e / (K - 1) for fairseq and tensor2tensor, "
                   "which takes the entropy of q off, 1 - e, e / (K - 2) and 0 for padding for "
                   "annotated_transformer",
    }, formula


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
