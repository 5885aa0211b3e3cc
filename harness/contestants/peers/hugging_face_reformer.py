"""Hugging Face's LSHSelfAttention and a linear layer behind it, with our weights and rotations, on hidden states.

Tried with transformers 5.23.0.
https://huggingface.co/docs/transformers/model_doc/reformer

The layer draws its rotations in each call; here the drawing gives ours, each head its own. It computes multi_head with
lsh inside exactly, for its own buckets, which it returns, with the options stated: no mask of buckets, the first chunk
sees the last one of the round before, and keys count as often as they are found; but for one number: it puts -1e5 in the
place of a token's score with itself. Sums of rounds are then rounded to 0.008, which makes the result of a token that
sees nothing else wrong by some 3e-3; so -200 stands here, which hides a token beside others as well. Tokens fill two or
more chunks. Weights are in float32 here.
"""

import unittest.mock

import torch
from tfb.contestant import definition
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

CHUNK, ROUNDS = 64, 4


@definition('multi_head:inner=lsh[rounds=4,chunk=64,factorize=false,bucket_mask=false,dedup=false,wrap=true,'
            'key_norm=epsilon,per_head=true]', arrays='torch', packages=('transformers', 'torch'),
            title='Hugging Face Reformer', outputs=('buckets',))
class attention:

    def __init__(self, problem, parameters):
        heads, tokens, rotations = problem.query_heads, problem.query_tokens, parameters['inner.rotations']
        if problem.value_dim != problem.head_dim or problem.dtype != 'f32' or tokens % CHUNK or tokens == CHUNK:
            raise NotImplementedError('value_dim other than head_dim, 16 bits, or tokens that do not fill two chunks of %d' %
                                      CHUNK)
        self.layer = LSHSelfAttention(ReformerConfig(
            hidden_size=heads * problem.head_dim, num_attention_heads=heads, attention_head_size=problem.head_dim,
            lsh_attn_chunk_length=CHUNK, lsh_num_chunks_before=1, lsh_num_chunks_after=0, num_hashes=ROUNDS,
            num_buckets=2 * rotations.shape[3], is_decoder=problem.causal, hash_seed=None)).eval()
        self.layer.load_state_dict({'query_key.weight': parameters['w_q'].T, 'value.weight': parameters['w_v'].T})
        self.layer.self_mask_value_float32.fill_(-200)
        self.rotations, self.w = rotations, parameters['w_o'].T.contiguous()
        self.first = torch.arange(ROUNDS)[:, None] * 2 * rotations.shape[3]

    @torch.inference_mode()
    def __call__(self, x):
        with unittest.mock.patch.object(torch, 'randn', lambda *_, **__: self.rotations):
            made = self.layer(x)
        buckets = (made.buckets - self.first).transpose(2, 3).int().contiguous()
        return {'out': torch.nn.functional.linear(made.hidden_states, self.w), 'buckets': buckets}
