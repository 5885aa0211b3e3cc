"""Dense attention in NumPy, as somebody might write it, and the same with faults. TOY_LOAD in the environment makes loading
it fail: raise, exit, hang."""

import os
import threading
import time

import numpy
from tfb.contestant import definition

if os.environ.get('TOY_LOAD') == 'raise':
    raise RuntimeError('no such accelerator')
if os.environ.get('TOY_LOAD') == 'exit':
    os._exit(3)  # pylint: disable=protected-access
if os.environ.get('TOY_LOAD') == 'hang':
    time.sleep(3600)


def attend(q, k, v, causal, scale=1.0):
    scores = scale * (q @ k.swapaxes(2, 3)) / numpy.sqrt(numpy.float32(q.shape[3]))
    if causal:
        scores[:, :, ~numpy.tri(*scores.shape[2:], scores.shape[3] - scores.shape[2], dtype=bool)] = -numpy.inf
    weights = numpy.exp(scores - scores.max(3, keepdims=True))
    return (weights / weights.sum(3, keepdims=True)) @ v


@definition('dense', title='NumPy', packages=['numpy'])
def dense(q, k, v, causal):
    return attend(q, k, v, causal)


@definition('longformer:window=16', options=['window'])
class Window:
    """The mask is made in the setup. A query sees the keys at most window / 2 away."""

    def __init__(self, problem, options):
        if options['dilation'] != '1':
            raise NotImplementedError('no dilation')
        self.problem = problem
        distance = numpy.arange(problem.query_tokens)[:, None] - numpy.arange(problem.kv_tokens)[None]
        reach = int(options['window']) // 2
        self.hidden = abs(distance) > reach
        if problem.causal:
            self.hidden |= distance < 0

    def __call__(self, q, k, v):
        said = self.problem
        assert q.shape == (said.batch, said.query_heads, said.query_tokens, said.head_dim), q.shape
        assert k.shape == (said.batch, said.kv_heads, said.kv_tokens, said.head_dim), k.shape
        assert v.shape == (said.batch, said.kv_heads, said.kv_tokens, said.value_dim), v.shape
        k, v = (numpy.repeat(one, said.query_heads // said.kv_heads, axis=1) for one in (k, v))
        scores = (q @ k.swapaxes(2, 3)) / numpy.sqrt(numpy.float32(q.shape[3]))
        scores[:, :, self.hidden] = -numpy.inf
        weights = numpy.exp(scores - scores.max(3, keepdims=True))
        return (weights / weights.sum(3, keepdims=True)) @ v


def log_sum_exp(q, k, causal):
    scores = (q @ k.swapaxes(2, 3)) / numpy.sqrt(numpy.float32(q.shape[3]))
    if causal:
        scores = numpy.where(numpy.tri(*scores.shape[2:], dtype=bool), scores, -numpy.inf)
    most = scores.max(3)
    return most + numpy.log(numpy.exp(scores - most[..., None]).sum(3))


@definition('dense', outputs=['log_sum_exp'])
def two_results(q, k, v, causal):
    return {'out': attend(q, k, v, causal), 'log_sum_exp': log_sum_exp(q, k, causal)}


@definition('dense', outputs=['log_sum_exp'])
def lacks_a_result(q, k, v, causal):
    return attend(q, k, v, causal)


@definition('multi_head')
def network(x, problem, parameters):
    heads, tokens, size = problem.query_heads, problem.query_tokens, problem.head_dim
    q, k, v = ((x @ parameters[name]).reshape(problem.batch, tokens, heads, size).swapaxes(1, 2)
               for name in ('w_q', 'w_k', 'w_v'))
    return attend(q, k, v, problem.causal).swapaxes(1, 2).reshape(x.shape) @ parameters['w_o']


def uniform(v):
    """Approximates dense attention, badly: without a definition that is what a function claims."""
    return numpy.broadcast_to(v.mean(2, keepdims=True), v.shape).copy()


uniform = definition('dense', exact=False, causal=[False])(uniform)


@definition('dense')
def wrong(q, k, v, causal):
    return 1.01 * attend(q, k, v, causal)


@definition('dense')
def keeps_its_result(q, k, v, causal, kept=[]):
    if len(kept) < 3:  # right as long as it is checked
        kept.append(attend(q, k, v, causal))
    return kept[-1].copy()


@definition('dense')
class GivesOneBuffer:

    def __init__(self, problem):
        self.out = numpy.empty((problem.batch, problem.query_heads, problem.query_tokens, problem.value_dim), 'float32')

    def __call__(self, q, k, v, causal):
        self.out[...] = attend(q, k, v, causal)
        return self.out


@definition('dense')
def returns_early(q, k, v, causal):
    out = numpy.zeros(q.shape[:3] + v.shape[3:], 'float32')

    def finish():
        time.sleep(0.05)
        out[...] = attend(q, k, v, causal)

    threading.Thread(target=finish).start()
    return out


@definition('dense')
def writes_inputs(q, k, v, causal):
    out = attend(q, k, v, causal)
    v[0, 0, 0, 0] += 1
    return out


@definition('dense')
def another_shape(q, k, v, causal):
    return attend(q, k, v, causal)[:, :, 1:]


@definition('dense')
def another_type(q, k, v, causal):
    return attend(q, k, v, causal).astype('float64')


@definition('dense')
def no_array(q, k, v):
    return 'attention'


@definition('dense')
def raises(q, k, v):
    return q @ k


@definition('dense')
def refuses(q, k, v):
    raise NotImplementedError('not today')


@definition('dense')
def crashes(q, k, v):
    os.abort()


@definition('dense')
def hangs(q, k, v):
    time.sleep(3600)


@definition('dense')
def takes_all_memory(q, k, v, kept=[]):
    while True:
        kept.append(numpy.ones(1 << 28, 'uint8'))
