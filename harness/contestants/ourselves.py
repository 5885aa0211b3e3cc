"""The techniques of this suite as contestants, through the Python package: the same code twice in one sweep.

    bazel build //tools/python:wheel && pip install bazel-bin/tools/python/wheel/*.whl
    python harness/contestants/ourselves.py [FILE.pb]

measures them for five minutes into that file, or reads it where it is there, and prints how often the two times of one
piece of code differ by more than 3 %. That is how far a time of somebody else's code can be trusted: what the way through
Python costs is in it, and so is another process's luck with its memory.

Each function below has a technique's name, its default options, and the parameters of ours.
"""

import inspect
import os
import sys

import tfb
from tfb.contestant import definition

MOST = 0.03  # of the time of ours


def ours(technique):

    class Ours:

        def __init__(self, problem, parameters):
            self.layer = tfb.Layer(technique, batch=problem.batch, heads=problem.query_heads, kv_heads=problem.kv_heads,
                                   tokens=problem.query_tokens, kv_tokens=problem.kv_tokens, head_dim=problem.head_dim,
                                   value_dim=problem.value_dim, causal=problem.causal, dtype=problem.dtype,
                                   threads=problem.threads)
            self.layer.set_parameters(parameters)
            # A call has the tensors that the layer reads, None for optional ones that are not there.
            self.__signature__ = inspect.Signature(
                [inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY) for one in self.layer.inputs])

        def __call__(self, **inputs):
            return self.layer.run(**{name: array for name, array in inputs.items() if array is not None})

    return Ours


TECHNIQUES = {one['name']: one for one in tfb.techniques() if one['input_kind'] != 'tokens'}
for _name, _one in TECHNIQUES.items():
    globals()[_name] = definition(_name, causal=_one['causal'], packages=('tfb',), title='tfb')(ours(_name))


def pairs_of(records):
    """Returns the median times of one technique on one problem, of ours and of the contestant: {case: {is_ours: ns}}."""
    pairs = {}
    for record in records:
        key = record['key']
        name, _, file = key['technique'].partition('@')
        if record['technique']['display_name'] != key['technique'] or 'run_median_ns' not in record['times']:
            continue  # a counterpart with options of its own, or one without times
        case = (name, '%d tokens' % key['query_tokens'], '%d threads' % key['threads'], 'causal' if key['causal'] else 'full')
        pairs.setdefault(case, {})[not file] = record['times']['run_median_ns']
    return {case: pair for case, pair in pairs.items() if len(pair) == 2}


def measure(path):
    names = [name + '@ourselves' for name, one in TECHNIQUES.items() if one['input_kind'] == 'qkv']
    return tfb.sweep(names, '2048,4096', path, contestants=__file__, heads=4, threads='1,2', causal='true,false',
                     input='gaussian', accuracy=False, counterparts=False, repetitions=21)


def main(path=None):
    records = tfb.read(path) if path and os.path.exists(path) else measure(path)
    pairs = pairs_of(records)
    changes = {case: pair[False] / pair[True] - 1 for case, pair in pairs.items()}
    apart = sorted(case for case, change in changes.items() if abs(change) > MOST)
    for case in apart:
        print('%+.1f %%: %s' % (100 * changes[case], ', '.join(case)))
    print('%d of %d times differ by more than %g %%' % (len(apart), len(pairs), 100 * MOST))


if __name__ == '__main__':
    main(*sys.argv[1:])
