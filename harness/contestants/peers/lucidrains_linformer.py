"""linformer's LinformerSelfAttention with our weights, on hidden states.

Tried with linformer 0.2.3.
https://github.com/lucidrains/linformer

It computes multi_head with linformer inside, one matrix for the keys of all heads and one for their values, exactly.
The package has a bias behind the last projection, which is 0 here. It is not causal, knows no padding,
and has weights in float32 here.
"""

import torch
from linformer import LinformerSelfAttention
from tfb.contestant import definition


@definition('multi_head:inner=linformer[sharing=headwise]', arrays='torch', packages=('linformer', 'torch'), causal=(False,),
            title='linformer (lucidrains)')
class attention:

    def __init__(self, problem, parameters):
        if problem.kv_heads != problem.query_heads or problem.dtype != 'f32':
            raise NotImplementedError('kv_heads other than query_heads, or 16 bits')
        e, f = parameters['inner.e'], parameters['inner.f']
        self.layer = LinformerSelfAttention(problem.query_heads * problem.head_dim, problem.kv_tokens, k=e.shape[1],
                                            heads=problem.query_heads).eval()
        self.layer.load_state_dict({
            'to_q.weight': parameters['w_q'].T, 'to_k.weight': parameters['w_k'].T, 'to_v.weight': parameters['w_v'].T,
            'proj_k': e[0].T, 'proj_v': f[0].T, 'to_out.weight': parameters['w_o'].T,
            'to_out.bias': torch.zeros(len(parameters['w_o'].T)),
        })

    @torch.inference_mode()
    def __call__(self, x):
        return self.layer(x)
