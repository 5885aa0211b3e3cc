"""Transformer Family Bench: every technique of efficient attention on your own arrays.

    import tfb, torch
    q, k, v = torch.randn(3, 1, 8, 4096, 64)
    y = tfb.attention("longformer:window=256", q, k, v, causal=True)
    print(tfb.error("lsh:rounds=4", q, k, v))    # against its definition and dense attention; kept mass, recall
    grads = tfb.gradients("longformer:window=256", q, k, v, 2 * y, causal=True).inputs    # of |y|^2, in q, k and v
    tfb.sweep(["dense", "longformer:window=256"], lengths="1k:16k").html("report.html")

Arrays are those of NumPy, PyTorch, JAX or whatever else has __dlpack__; they are read in place, and results are of the
caller's kind. Errors are exceptions below tfb.Error.
"""

from tfb._layer import Gradients, Layer, TensorSpec, attention, error, gradients
from tfb._library import (CancelledError, Error, FailedPreconditionError, InternalError, InvalidArgumentError,
                          NotFoundError, ResourceExhaustedError, UnimplementedError, techniques)
from tfb._results import Results, read, sweep
from tfb.contestant import definition

__all__ = [
    'CancelledError', 'Error', 'FailedPreconditionError', 'Gradients', 'InternalError', 'InvalidArgumentError',
    'Layer', 'NotFoundError', 'ResourceExhaustedError', 'Results', 'TensorSpec', 'UnimplementedError', 'attention',
    'definition', 'error', 'gradients', 'read', 'sweep', 'techniques'
]
