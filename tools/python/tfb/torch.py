"""The techniques as an operator of PyTorch 2.4 or later, which torch.compile and torch.export take as they take its own.

    import tfb.torch, torch
    q, k, v = torch.randn(3, 1, 8, 4096, 64)

    @torch.compile(fullgraph=True)
    def layer(q, k, v):
        return tfb.torch.attention(q, k, v, "longformer:window=256", causal=True).relu()

The operator is torch.ops.tfb.attention, of tensors on the CPU. It has no gradient yet.
"""

from typing import Any

import torch

import tfb

if not hasattr(torch.library, 'custom_op'):
    raise ImportError('tfb.torch needs PyTorch 2.4 or later, which has torch.library.custom_op; this is %s' % torch.__version__)


@torch.library.custom_op('tfb::attention', mutates_args=(), device_types='cpu')
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, technique: str, causal: bool = False) -> torch.Tensor:
    """Returns the technique's attention of queries q to keys k and values v.

    Args:
      q: [batch, heads, tokens, head_dim], float32, float16 or bfloat16.
      k: [batch, kv_heads, kv_tokens, head_dim]; kv_heads divides heads.
      v: [batch, kv_heads, kv_tokens, value_dim].
      technique: a name with its options: "longformer:window=256". Its parameters are those of seed 1.
      causal: whether query i sees only keys j <= i + kv_tokens - tokens.

    Returns:
      [batch, heads, tokens, value_dim] of q's dtype, contiguous. torch.get_num_threads() threads share the work.

    Raises:
      tfb.Error: as tfb.attention, where the operator runs. RuntimeError in a backward pass.
    """
    return tfb.attention(technique, q.detach(), k.detach(), v.detach(), causal=causal, threads=torch.get_num_threads())


@attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, technique: str, causal: bool = False) -> torch.Tensor:
    for name, tensor in (('q', q), ('k', k), ('v', v)):
        if tensor.dim() != 4:
            raise tfb.InvalidArgumentError('%s has shape %s; it must be [batch, heads, tokens, channels]' %
                                           (name, list(tensor.shape)))
    return q.new_empty((q.shape[0], q.shape[1], q.shape[2], v.shape[3]))


def _no_gradient(context: Any, gradient: torch.Tensor) -> None:
    raise RuntimeError('tfb::attention has no gradient yet: call it in torch.no_grad(), or detach its inputs')


attention.register_autograd(_no_gradient)
