"""reformer-pytorch's LSHAttention with our rotations.

Tried with reformer-pytorch 1.4.4.
https://github.com/lucidrains/reformer-pytorch

The package has keys of length 1 and the factor 1 / sqrt(head_dim) on scores besides, draws its rotations in each call,
and has as many buckets as chunks. Here the drawing gives our rotations, which are of twice as many buckets, as in
the paper. With its defaults tokens see all of two chunks, the first of them the last one of the round before, and a key
as often as rounds find it (across_buckets); it can also keep to buckets and count a key once (own_bucket). It computes
lsh with these options exactly, for its own buckets, which it returns, but for one number: it puts -5e4 in the place of a
token's score with itself. Sums of rounds are then rounded to 0.004, which makes the result of a token that sees nothing
else wrong by some 3e-4; so -200 stands here, which hides a token beside others as well. Tokens fill pairs of
chunks. In 16 bits it does not run.
"""

import unittest.mock

import torch
from reformer_pytorch import reformer_pytorch as package
from tfb.contestant import definition

ABOUT = {'arrays': 'torch', 'packages': ('reformer-pytorch', 'torch'), 'title': 'reformer-pytorch', 'outputs': ('buckets',)}
package.TOKEN_SELF_ATTN_VALUE = -200


class OurRotations(package.LSHAttention):

    def hash_vectors(self, n_buckets, vecs, **more):
        with unittest.mock.patch.object(torch, 'randn', lambda shape, **_: self.rotations):
            return super().hash_vectors(2 * n_buckets, vecs, **more)


@definition('lsh:scale=0,factorize=false,bucket_mask=false,wrap=true,dedup=false', options=('rounds', 'chunk'), **ABOUT)
class across_buckets:
    across = True

    def __init__(self, problem, options, parameters):
        self.rounds, chunk, tokens = int(options['rounds']), int(options['chunk']), problem.query_tokens
        if tokens % (2 * chunk) or problem.dtype != 'f32':
            raise NotImplementedError('tokens that do not fill pairs of chunks of %d, or 16 bits' % chunk)
        self.attention = OurRotations(bucket_size=chunk, n_hashes=self.rounds, causal=problem.causal,
                                      attend_across_buckets=self.across, allow_duplicate_attention=self.across).eval()
        self.attention.rotations = parameters['rotations'][None]
        self.first = torch.arange(self.rounds)[:, None] * (2 * tokens // chunk)

    @torch.inference_mode()
    def __call__(self, q, v):
        out, _, buckets = self.attention(q.flatten(0, 1), v.flatten(0, 1))
        by_round = buckets.reshape(*q.shape[:2], self.rounds, q.shape[2]) - self.first
        return {'out': out.reshape(v.shape), 'buckets': by_round.transpose(2, 3).int().contiguous()}


@definition('lsh:scale=0,factorize=false', options=('rounds', 'chunk'), **ABOUT)
class own_bucket(across_buckets):
    across = False
