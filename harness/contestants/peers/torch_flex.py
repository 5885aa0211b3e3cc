"""PyTorch's FlexAttention, compiled, for techniques that are a mask of pairs, or a function of a score and its pair.

Tried with torch 2.15.0, which compiles for CPUs with the system's C++ compiler.
https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html

Each function below is one technique. It returns, where the technique has it, `mask`, whether query i of head h sees key
j; `score`, made of the scaled score s and its place; `per_head`, that the mask depends on h; `own_order`, that a causal
mask goes by another order than that of tokens; and `block`, where blocks of so many queries and keys, of which those that
see nothing are skipped, were faster at 4096 tokens than the default of 128. The results are the definitions', and 0
where a query sees no key. The constructor makes the block mask and compiles, some 10 seconds the first time. Padding is
left to torch_sdpa: its block mask would have to be made anew for each input. Left out, since a score and its place are
not enough for them: labels and positions that are products with the query (etc with vectors, shaw,
transformer_xl_relative, adaptive_span with positions).
"""

import math

import torch
from tfb.contestant import definition
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

# Each instance compiles for its sizes alone: together they have room for 8 compilations.
COMPILE = {'dynamic': False, 'fullgraph': True, 'isolate_recompiles': True}
UNCOMPILED = 2**25  # pairs up to which a block mask is made sooner, and in little memory, without being compiled


class Flex:

    def __init__(self, problem, options, parameters):
        made = self.technique(problem, options, parameters)
        self.score, mask = made.get('score'), made.get('mask')
        seen, first = mask, problem.kv_tokens - problem.query_tokens
        if problem.causal and 'own_order' not in made:
            seen = lambda b, h, i, j: (j <= i + first) & (mask is None or mask(b, h, i, j))
        self.blocks = None
        if seen is not None:
            heads, sizes = problem.query_heads if 'per_head' in made else None, (problem.query_tokens, problem.kv_tokens)
            make = create_block_mask
            if (heads or 1) * math.prod(sizes) > UNCOMPILED:
                make = torch.compile(make, **COMPILE)
            self.blocks = make(seen, None, heads, *sizes, device='cpu', BLOCK_SIZE=made.get('block', 128))
        self.more = {'enable_gqa': problem.query_heads != problem.kv_heads}
        if 'scale' in options:  # 0 stands for that of dense attention, 1 / sqrt(head_dim)
            self.more['scale'] = float(options['scale']) or None
        self.attend = torch.compile(flex_attention, **COMPILE)
        dtype = {'f32': torch.float32, 'bf16': torch.bfloat16, 'f16': torch.float16}[problem.dtype]
        self(torch.zeros(problem.batch, problem.query_heads, problem.query_tokens, problem.head_dim, dtype=dtype),
             torch.zeros(problem.batch, problem.kv_heads, problem.kv_tokens, problem.head_dim, dtype=dtype),
             torch.zeros(problem.batch, problem.kv_heads, problem.kv_tokens, problem.value_dim, dtype=dtype))

    @torch.inference_mode()
    def __call__(self, q, k, v):
        return self.attend(q, k, v, score_mod=self.score, block_mask=self.blocks, **self.more)


def flex(spec, **more):

    def of(technique):
        made = type(technique.__name__, (Flex,), {'technique': staticmethod(technique), '__module__': __name__})
        return definition(spec, arrays='torch', packages=('torch',), title='PyTorch FlexAttention', **more)(made)

    return of


def integers(text):
    return [int(number) for number in text.split('/')]


@flex('dense')
def dense(problem, options, parameters):
    return {}


@flex('longformer:window=256', options=('window', 'one_sided', 'dilation', 'globals'))
def longformer(problem, options, parameters):
    half, one_sided = int(options['window']) // 2, int(options['one_sided'])
    reach = one_sided if problem.causal and one_sided >= 0 else half
    dilation = integers(options['dilation'])
    of_all = [j for j in integers(options['globals']) if 0 <= j < problem.kv_tokens]
    steps = torch.tensor(dilation).repeat_interleave(problem.query_heads // len(dilation))
    is_global = torch.zeros(problem.kv_tokens, dtype=torch.bool)
    is_global[of_all] = True

    def near(b, h, i, j):
        if max(dilation) == 1:
            return (i - j).abs() <= reach
        return ((i - j).abs() <= reach * steps[h]) & ((i - j) % steps[h] == 0)

    mask = (lambda b, h, i, j: near(b, h, i, j) | is_global[i] | is_global[j]) if of_all else near
    return {'mask': mask, 'block': 64, **({'per_head': True} if len(dilation) > 1 else {})}


@flex('bigbird', options=('block', 'random'), causal=(False,))
def bigbird(problem, options, parameters):
    block = int(options['block'])
    blocks = -(-problem.kv_tokens // block)
    place = torch.arange(blocks)
    sees = ((place[:, None] - place).abs() <= 1).repeat(problem.query_heads, 1, 1)
    sees[:, [0, -1]] = True
    sees[:, :, [0, -1]] = True
    table = parameters['random'].long()
    rows = torch.nn.functional.one_hot(table + 1, blocks + 1).sum(2)[..., 1:]  # -1 stands for no block
    sees |= rows > 0
    return {'mask': lambda b, h, i, j: sees[h, i // block, j // block], 'per_head': True, 'block': min(block, 128)}


@flex('etc:labels=biases', options=('radius', 'global_tokens', 'max_distance'), causal=(False,))
def etc(problem, options, parameters):
    radius, first, most = (int(options[name]) for name in ('radius', 'global_tokens', 'max_distance'))
    mask = lambda b, h, i, j: (i < first) | (j < first) | ((i - j).abs() <= radius)
    if most < 0:
        return {'mask': mask, 'block': 64}
    scale = problem.head_dim**-0.5
    of_globals, of_long = parameters['g2g_bias'] * scale, parameters['l2l_bias'] * scale

    def score(s, b, h, i, j):
        row = torch.clamp(j - i, -most, most) + most
        bias = torch.where(i < first, of_globals[h, row], of_long[h, row])
        return s + torch.where((i < first) == (j < first), bias, 0.0)

    return {'mask': mask, 'score': score, 'block': 64}


def combined(problem, options, row, column):
    """The two factors of the Sparse Transformer as `combine` says."""
    group = problem.query_heads // problem.kv_heads
    if options['combine'] == 'interleaved':
        return {'mask': column if int(options['layer']) % 2 else row, 'block': 32}
    if options['combine'] == 'per_head':
        return {
            'mask': lambda b, h, i, j: torch.where(h // group % 2 == 0, row(b, h, i, j), column(b, h, i, j)),
            'per_head': True, 'block': 32
        }
    return {'mask': lambda b, h, i, j: row(b, h, i, j) | column(b, h, i, j), 'block': 32}


@flex('strided', options=('stride', 'combine', 'layer', 'bandwidth'), causal=(True,))
def strided(problem, options, parameters):
    stride = int(options['stride'])
    reach = stride if options['bandwidth'] == 'paper' else stride - 1
    return combined(problem, options, lambda b, h, i, j: i - j <= reach, lambda b, h, i, j: (i - j) % stride == 0)


@flex('fixed', options=('stride', 'summary', 'combine', 'layer'), causal=(True,))
def fixed(problem, options, parameters):
    stride, summary = int(options['stride']), int(options['summary'])
    return combined(problem, options, lambda b, h, i, j: i // stride == j // stride,
                    lambda b, h, i, j: j % stride >= stride - summary)


@flex('blockwise', options=('blocks',))
def blockwise(problem, options, parameters):
    blocks, heads = int(options['blocks']), problem.query_heads
    shares = [max(1, 7 - blocks)] + [1] * (blocks - 1)
    ends = torch.tensor(shares).cumsum(0)
    shift = torch.searchsorted(ends * heads, torch.arange(1, heads + 1) * sum(shares))

    def mask(b, h, i, j):
        return j * blocks // problem.kv_tokens == (i * blocks // problem.query_tokens + shift[h]) % blocks

    return {'mask': mask, 'per_head': True}


@flex('image_local', options=('query_block', 'memory'))
def image_local(problem, options, parameters):
    block, memory = int(options['query_block']), int(options['memory'])

    def mask(b, h, i, j):
        begin = i // block * block
        return (j >= begin - memory) & (j < begin + block + memory)

    return {'mask': mask}


@flex('image_local:form=2d', causal=(True,),
      options=('width', 'block_height', 'block_width', 'flange_height', 'flange_width'))
def image_local_2d(problem, options, parameters):
    width, height, across, up, aside = (int(options[name]) for name in (
        'width', 'block_height', 'block_width', 'flange_height', 'flange_width'))
    width = width or math.isqrt(problem.kv_tokens - 1) + 1

    def mask(b, h, i, j):
        row, column = j // width, j % width
        top, left = i // width // height * height, i % width // across * across
        near = (column >= left - aside) & (column < left + across + aside)
        above = (row >= top - up) & (row < top) & near
        beside = (row >= top) & (row < top + height) & (column >= left - aside) & (column < left)
        within = (row >= top) & (row < top + height) & (column >= left) & (column < left + across)
        return above | beside | (within & (j <= i))

    return {'mask': mask, 'own_order': True, 'block': 64}


@flex('alibi')
def alibi(problem, options, parameters):
    slopes, first = parameters['slopes'], problem.kv_tokens - problem.query_tokens
    return {'score': lambda s, b, h, i, j: s - slopes[h] * (i + first - j).abs()}


@flex('t5_bias', options=('max_distance',))
def t5_bias(problem, options, parameters):
    first, buckets = problem.kv_tokens - problem.query_tokens, int(options['buckets'])
    most, side = int(options['max_distance']), buckets if problem.causal else buckets // 2
    half = side // 2
    far = torch.arange(problem.kv_tokens).double()
    bucket = half + ((side - half) * torch.log(far.clamp(min=half) / half) / math.log(most / half) + 1e-9).long()
    bucket = torch.where(far < half, far.long(), bucket.clamp(max=side - 1))
    later, earlier = parameters['beta'][bucket + (side if not problem.causal else 0)].T, parameters['beta'][bucket].T

    def score(s, b, h, i, j):
        behind = i + first - j
        return s + torch.where(behind < 0, later[h, behind.abs()], earlier[h, behind.abs()])

    return {'score': score}


@flex('adaptive_span:positions=false', options=('max_span', 'span', 'ramp'), causal=(True,))
def adaptive_span(problem, options, parameters):
    first, ramp, most = problem.kv_tokens - problem.query_tokens, float(options['ramp']), int(options['max_span'])
    reach = parameters['span'] + ramp

    def mask(b, h, i, j):
        behind = i + first - j
        return (behind >= 1) & (behind <= most) & (behind < reach[h])

    def score(s, b, h, i, j):
        return s + torch.log(torch.clamp((reach[h] - (i + first - j)) / ramp, 1e-30, 1.0))

    return {'mask': mask, 'score': score, 'per_head': True, 'block': 64}


@flex('distance_aware')
def distance_aware(problem, options, parameters):
    first, alpha, beta = problem.kv_tokens - problem.query_tokens, parameters['alpha'], parameters['beta']

    def score(s, b, h, i, j):
        f = (1 + torch.exp(beta[h])) / (1 + torch.exp(beta[h] - alpha[h] * (i + first - j).abs()))
        return torch.relu(s) * f

    return {'score': score}
