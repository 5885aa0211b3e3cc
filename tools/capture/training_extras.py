"""What training scripts here share: a smoothed loss, and the mean of checkpoints."""

import torch


def smoothed_cross_entropy(logits, targets, smoothing):
    """Cross-entropy with label smoothing: Szegedy et al., arXiv:1512.00567v3, section 7.

    The target is (1 - e) of the label and e / V of every one of the V classes, so that the loss is
    (1 - e) (lse - z_y) + e (lse - mean z), from one pass over the logits z. [rows, V] to [rows].
    """
    lse = logits.logsumexp(-1)
    label = logits.gather(-1, targets[..., None])[..., 0]
    return lse - (1 - smoothing) * label - smoothing * logits.mean(-1)


def average_checkpoints(checkpoints):
    """The mean of each parameter over checkpoints, in float64: Vaswani et al., arXiv:1706.03762v7,
    section 6.1. //tools:average_checkpoints does the same to safetensors files."""
    return {name: torch.stack([c[name].double() for c in checkpoints]).mean(0).to(value.dtype)
            for name, value in checkpoints[-1].items()}
