"""performer-pytorch's FastAttention with our matrix of random features.

Tried with performer-pytorch 1.1.4.
https://github.com/lucidrains/performer-pytorch

It computes performer with the package's constants exactly: 1e-4 added to features of softmax, 1e-3 to those of relu, the
keys' maximum over the whole sequence, and where causal 1e-6 added to the sums in the denominator. Causally it runs the
package's form in PyTorch, of 128 chunks, since that of fast_transformers is for GPUs alone; the package prints so. It
has as many key-value heads as query heads. In 16 bits it rounds features and sums, and is farther off than its definition
allows.
"""

import torch
from performer_pytorch import FastAttention
from tfb.contestant import definition

ABOUT = {'arrays': 'torch', 'packages': ('performer-pytorch', 'torch'), 'title': 'performer-pytorch', 'options': ('features',)}


@definition('performer:epsilon=1e-4', causal=(False,), **ABOUT)
class softmax:
    relu = False

    def __init__(self, problem, parameters):
        if problem.kv_heads != problem.query_heads or problem.dtype != 'f32':
            raise NotImplementedError('kv_heads other than query_heads, or 16 bits')
        w = parameters['w']
        self.attention = FastAttention(problem.head_dim, len(w), causal=problem.causal, generalized_attention=self.relu)
        self.attention.projection_matrix.copy_(w)

    @torch.inference_mode()
    def __call__(self, q, k, v):
        return self.attention(q, k, v)


@definition('performer:epsilon=1e-4,key_maximum=sequence,denominator_epsilon=1e-6', causal=(True,), **ABOUT)
class causal_softmax(softmax):
    pass


@definition('performer:kernel=relu', causal=(False,), **ABOUT)
class relu(softmax):
    relu = True


@definition('performer:kernel=relu,denominator_epsilon=1e-6', causal=(True,), **ABOUT)
class causal_relu(relu):
    pass
