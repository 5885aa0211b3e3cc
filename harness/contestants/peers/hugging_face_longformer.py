"""Hugging Face's LongformerSelfAttention and a linear layer behind it, with our weights, on hidden states.

Tried with transformers 5.23.0.
https://huggingface.co/docs/transformers/model_doc/longformer

It computes multi_head with longformer inside exactly: a window, and in `first_global` token 0 that is global with
projections of its own. It is not causal, tokens fill windows, and it has as many key-value heads as query heads.
Padding is left out: the layer gives 0 for padded queries, which ours does not. Weights are in float32 here.
"""

import torch
from tfb.contestant import definition
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

ABOUT = {'arrays': 'torch', 'packages': ('transformers', 'torch'), 'title': 'Hugging Face Longformer', 'causal': (False,)}
NAMES = {
    'q': 'query', 'k': 'key', 'v': 'value',
    'q_global': 'query_global', 'k_global': 'key_global', 'v_global': 'value_global'
}


@definition('multi_head:inner=longformer[window=256],bias=true', **ABOUT)
class window:
    window, globals = 256, []

    def __init__(self, problem, parameters):
        heads, tokens = problem.query_heads, problem.query_tokens
        if problem.kv_heads != heads or problem.value_dim != problem.head_dim or problem.dtype != 'f32' or tokens % self.window:
            raise NotImplementedError('kv_heads other than query_heads, value_dim other than head_dim, 16 bits, or tokens '
                                      'that do not fill windows of %d' % self.window)
        layer = LongformerSelfAttention(LongformerConfig(
            hidden_size=heads * problem.head_dim, num_attention_heads=heads, attention_window=[self.window]), 0).eval()
        for ours, theirs in NAMES.items():
            if 'w_' + ours in parameters:
                getattr(layer, theirs).weight.data.copy_(parameters['w_' + ours].T)
                getattr(layer, theirs).bias.data.copy_(parameters['b_' + ours])
        self.layer, self.w, self.b = layer, parameters['w_o'].T.contiguous(), parameters['b_o']
        self.mask = torch.zeros(problem.batch, tokens)
        self.mask[:, self.globals] = 10000  # the layer's code of a global token

    @torch.inference_mode()
    def __call__(self, x):
        heads = self.layer(x, attention_mask=self.mask, is_index_masked=self.mask < 0, is_index_global_attn=self.mask > 0,
                           is_global_attn=bool(self.globals))[0]
        return torch.nn.functional.linear(heads, self.w, self.b)


@definition('multi_head:inner=longformer[window=256,globals=0,projections=own],bias=true', **ABOUT)
class first_global(window):
    globals = [0]
