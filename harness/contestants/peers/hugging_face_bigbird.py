"""Hugging Face's BigBirdBlockSparseAttention and a linear layer behind it, with our weights and random blocks.

Tried with transformers 5.23.0.
https://huggingface.co/docs/transformers/model_doc/big_bird

The layer draws its random blocks in each call, when training, and takes block 0 for all of them otherwise. Here both
functions that would draw give our table, so that it computes multi_head with bigbird inside exactly. Tokens fill blocks,
of which there are enough for a full table. Padding is left out: the layer gives 0 for padded queries, which ours does not.
Weights are in float32 here.
"""

import torch
from tfb.contestant import definition
from transformers import BigBirdConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

BLOCK = 64


class OurBlocks(BigBirdBlockSparseAttention):
    """For the lengths 1024, 3072 and 4096 the layer asks for one head after the other, else for all heads."""

    def _bigbird_block_rand_mask(self, *_, **__):
        self.head = (self.head + 1) % len(self.blocks)
        return self.blocks[self.head]

    def _bigbird_block_rand_mask_with_head(self, *_, **__):
        return self.blocks


@definition('multi_head:inner=bigbird[block=64,random=3],bias=true', arrays='torch', packages=('transformers', 'torch'),
            title='Hugging Face BigBird', causal=(False,))
class attention:

    def __init__(self, problem, parameters):
        heads, random = problem.query_heads, parameters['inner.random']
        if (problem.kv_heads != heads or problem.value_dim != problem.head_dim or problem.dtype != 'f32'
                or problem.query_tokens % BLOCK):
            raise NotImplementedError('kv_heads other than query_heads, value_dim other than head_dim, 16 bits, or tokens '
                                      'that do not fill blocks of %d' % BLOCK)
        if (random[:, 1:-1] < 0).any() or random.shape[1] < 5:
            raise NotImplementedError('too few blocks to draw from')
        self.layer = OurBlocks(BigBirdConfig(hidden_size=heads * problem.head_dim, num_attention_heads=heads, block_size=BLOCK,
                                             num_random_blocks=random.shape[2]), seed=0).eval()
        self.layer.load_state_dict({
            name + kind: value
            for one, name in (('q', 'query.'), ('k', 'key.'), ('v', 'value.'))
            for kind, value in (('weight', parameters['w_' + one].T), ('bias', parameters['b_' + one]))
        })
        self.layer.blocks, self.layer.head = random[:, 1:-1].long().numpy(), -1
        blocks, band, queries, keys = BigBirdModel.create_masks_for_block_sparse_attn(
            torch.ones(problem.batch, problem.query_tokens), BLOCK)
        self.masks = (band, queries, keys, blocks, blocks)
        self.w, self.b = parameters['w_o'].T.contiguous(), parameters['b_o']

    @torch.inference_mode()
    def __call__(self, x):
        return torch.nn.functional.linear(self.layer(x, *self.masks)[0], self.w, self.b)
