"""sinkhorn-transformer's SinkhornAttention with SortCut, for scores of blocks that are given.

Tried with sinkhorn-transformer 0.11.4.
https://github.com/lucidrains/sinkhorn-transformer

It computes sinkhorn with given scores and SortCut exactly: its balance, its sums of sorted blocks and its attention. Its
sorting networks have no biases as ours have, so that their scores are not compared. Without SortCut the package takes
sorted keys for sorted values, which is another function; with it, blocks of queries are of another size than those of
keys here, since queries would see their own block too. Tokens fill pairs of blocks.
"""

import torch
from sinkhorn_transformer import sinkhorn_transformer as package
from tfb.contestant import definition


@definition('sinkhorn:scores=given,sorted_blocks=4', arrays='torch', packages=('sinkhorn-transformer', 'torch'),
            options=('block', 'sorted_blocks', 'iterations', 'temperature'), causal=(False,), title='sinkhorn-transformer')
class sortcut:

    def __init__(self, problem, options):
        block, cut = int(options['block']), int(options['sorted_blocks'])
        heads, tokens, channels = problem.query_heads, problem.query_tokens, problem.head_dim
        if problem.kv_heads != heads or problem.value_dim != channels or cut == 0 or tokens % (2 * block):
            raise NotImplementedError('kv_heads other than query_heads, value_dim other than head_dim, no SortCut, or tokens '
                                      'that do not fill pairs of blocks')
        self.attention = package.SinkhornAttention(2 * block, heads * channels, channels, heads, tokens,
                                                   n_sortcut=cut, kv_bucket_size=block).eval()
        self.attention.sort_net = Balance(float(options['temperature']), int(options['iterations']))

    @torch.inference_mode()
    def __call__(self, q, k, v, logits):
        self.attention.sort_net.logits = logits.flatten(0, 1)
        return self.attention(q, k, v)


class Balance(torch.nn.Module):

    def __init__(self, temperature, iterations):
        super().__init__()
        self.temperature, self.iterations = temperature, iterations

    def forward(self, q, k, topk):
        return package.sinkhorn_sorting_operator(self.logits / self.temperature, self.iterations)
