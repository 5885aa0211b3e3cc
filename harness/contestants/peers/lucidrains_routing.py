"""routing-transformer's KmeansAttention with our centroids.

Tried with routing-transformer 1.6.1.
https://github.com/lucidrains/routing-transformer

The package chooses clusters by vectors of length 1 and scores queries and keys as they are, with 1 / sqrt(head_dim).
Where causal, keys are queries of length 1, and a token sees itself only where it sees nothing else. It computes routing
with these options, up to 1e-5 of a result: it divides by the number of a token's clusters + 1e-5. All heads are
clustered; its learned keys are left out. In 16 bits it rounds scores, and is farther off than its definition allows.
"""

import torch
from routing_transformer import routing_transformer as package
from tfb.contestant import definition

ABOUT = {
    'arrays': 'torch', 'packages': ('routing-transformer', 'torch'), 'title': 'routing-transformer', 'options': ('clusters',)
}


@definition('routing:local_heads=0,norm=unit,scored=given,scale=0', causal=(False,), **ABOUT)
class clusters:

    def __init__(self, problem, parameters):
        if problem.value_dim != problem.head_dim or problem.dtype != 'f32':
            raise NotImplementedError('value_dim other than head_dim, or 16 bits')
        heads, count, channels = parameters['centroids'].shape
        self.attention = package.KmeansAttention(count, -(-problem.query_tokens // count), heads, channels,
                                                 causal=problem.causal, shared_qk=problem.causal).eval()
        self.attention.kmeans.means.copy_(parameters['centroids'])
        self.attention.kmeans.initted.fill_(True)

    @torch.inference_mode()
    def __call__(self, q, v, k=None):
        return self.attention(q, q if self.attention.causal else k, v)[0]


@definition('routing:local_heads=0,norm=unit,scored=given,scale=0,self_bias=-5e4', causal=(True,), **ABOUT)
class causal_clusters(clusters):
    pass
