"""The techniques as an operator of PyTorch 2.4 or later, which torch.compile and torch.export take as they take its own.

    import tfb.torch, torch
    q, k, v = (torch.randn(1, 8, 4096, 64, requires_grad=True) for _ in range(3))

    @torch.compile(fullgraph=True)
    def layer(q, k, v):
        return tfb.torch.attention(q, k, v, "longformer:window=256", causal=True).relu()

    layer(q, k, v).sum().backward()

The operators are torch.ops.tfb.attention and, for its gradients, torch.ops.tfb.attention_backward, of tensors on the CPU.
"""

from typing import Any, List, Optional, Sequence, Tuple

import torch

import tfb
from tfb import _layer

if not hasattr(torch.library, 'custom_op'):
    raise ImportError('tfb.torch needs PyTorch 2.4 or later, which has torch.library.custom_op; this is %s' % torch.__version__)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, technique: str, causal: bool = False) -> torch.Tensor:
    """Returns the technique's attention of queries q to keys k and values v, which autograd differentiates.

    Args:
      q: [batch, heads, tokens, head_dim], float32, float16 or bfloat16.
      k: [batch, kv_heads, kv_tokens, head_dim]; kv_heads divides heads.
      v: [batch, kv_heads, kv_tokens, value_dim].
      technique: a name with its options: "longformer:window=256". Its parameters are those of seed 1; redraw=true of
        performer and rfa draws nothing anew.
      causal: whether query i sees only keys j <= i + kv_tokens - tokens.

    Returns:
      [batch, heads, tokens, value_dim] of q's dtype, contiguous. torch.get_num_threads() threads share the work.

    Raises:
      tfb.Error: as tfb.attention, where the operator runs. A backward pass raises tfb.UnimplementedError, with the
        reason, for a technique that has none. Gradients have no gradients of their own.
    """
    keep = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return torch.ops.tfb.attention(q, k, v, technique, causal, keep)[0]


def _layer_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, technique: str, causal: bool) -> tfb.Layer:
    return _layer.layer_of(technique, q, k, v, causal, seed=1, threads=torch.get_num_threads(), user='torch')


def _has_backward(layer: tfb.Layer) -> bool:
    try:
        layer.check_backward()
    except tfb.UnimplementedError:
        return False
    return True


@torch.library.custom_op('tfb::attention', mutates_args=(), device_types='cpu')
def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, technique: str, causal: bool,
               keep: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns the result of `attention`, and the bytes that its backward pass needs.

    They are none unless `keep` is true and the technique has a backward pass.
    """
    q, k, v = q.detach(), k.detach(), v.detach()
    layer = _layer_of(q, k, v, technique, causal)
    inputs = layer.read_of(q=q, k=k, v=v)
    _layer.set_up_for_values(layer, False, inputs)  # a backward pass would need the draw of its own forward pass
    if not keep or not _has_backward(layer):
        return layer.run(**inputs), q.new_empty(0, dtype=torch.uint8)
    outputs, kept = layer.run_kept(**inputs)
    return outputs['out'], kept.clone()  # no view of larger memory


@_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, technique: str, causal: bool,
      keep: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    for name, tensor in (('q', q), ('k', k), ('v', v)):
        if tensor.dim() != 4:
            raise tfb.InvalidArgumentError('%s has shape %s; it must be [batch, heads, tokens, channels]' %
                                           (name, list(tensor.shape)))
    # What a technique keeps is no formula of the sizes, and compiled code, which PyTorch caches on disk, outlives a version
    # of the library.
    kept_bytes = torch.library.get_ctx().new_dynamic_size() if keep else 0
    return (q.new_empty((q.shape[0], q.shape[1], q.shape[2], v.shape[3])), q.new_empty(kept_bytes, dtype=torch.uint8))


@torch.library.custom_op('tfb::attention_backward', mutates_args=(), device_types='cpu')
def _attention_backward(grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                        kept: torch.Tensor, technique: str, causal: bool,
                        needed: Sequence[bool]) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of q, k and v, with no elements where they are not needed.

    That of an input that the technique does not read, or at which its gradient stops, is 0.
    """
    given = {'q': q.detach(), 'k': k.detach(), 'v': v.detach()}
    layer = _layer_of(**given, technique=technique, causal=causal)
    _layer.set_up_for_values(layer, False, layer.read_of(**given))
    there = [spec.name for spec in layer.describe_backward()['input_gradients']]
    wanted = [name for name, is_needed in zip(given, needed) if is_needed]
    found = layer.backward(kept, {'out': out.detach()}, {'out': grad_out.detach()},
                           [name for name in wanted if name in there], (), **layer.read_of(**given)).inputs
    return tuple(
        found[name] if name in found else given[name].new_zeros(given[name].shape if name in wanted else 0) for name in given)


@_attention_backward.register_fake
def _(grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, kept: torch.Tensor,
      technique: str, causal: bool, needed: Sequence[bool]) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(one.new_empty(one.shape if is_needed else 0) for one, is_needed in zip((q, k, v), needed))


def _keep_tensors(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, technique, causal, _ = inputs
    out, kept = output
    ctx.mark_non_differentiable(kept)
    ctx.save_for_backward(q, k, v, out, kept)
    ctx.technique, ctx.causal = technique, causal


def _gradients(ctx: Any, grad_out: torch.Tensor, _: Any) -> Tuple[Optional[torch.Tensor], ...]:
    needed: List[bool] = list(ctx.needs_input_grad[:3])
    gradients = torch.ops.tfb.attention_backward(grad_out, *ctx.saved_tensors, ctx.technique, ctx.causal,
                                                 needed)
    return (*(one if is_needed else None for one, is_needed in zip(gradients, needed)), None, None, None)


_attention.register_autograd(_gradients, setup_context=_keep_tensors)
