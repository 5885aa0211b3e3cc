"""Python code beside the techniques of the bench, in the same sweep: `sweep --contestants=FILE.py:FUNCTION`.

    from tfb.contestant import definition

    @definition('longformer:window=256', arrays='torch', packages=['torch'])
    def mine(q, k, v, causal):
        ...
        return out          # [batch, heads, tokens, channels]

This file needs nothing but Python 3.9 and NumPy. It is also the program that the sweep starts: one process for each file of
contestants and number of threads, which reads tensors in shared memory, times its own calls, and answers requests until the
sweep ends.
"""

import functools
import gc
import importlib
import importlib.util
import inspect
import json
import mmap
import os
import re
import resource
import socket
import struct
import sys
import time
import traceback
import types
from typing import Any, Callable, Dict, List, Optional, Sequence

_MARK = '__tfb_contestant__'
_DTYPES = {'f32': 'float32', 'f64': 'float64', 'f16': 'float16', 'bf16': 'bfloat16', 'i32': 'int32', 'i64': 'int64', 'u8': 'uint8'}
# Threads of a library that waits for work may go on spinning for a while, beside the next sample of another technique.
_SETTLE_SECONDS = 0.003


def definition(technique: str,
               *,
               exact: bool = True,
               arrays: str = 'numpy',
               options: Sequence[str] = (),
               outputs: Sequence[str] = (),
               causal: Sequence[bool] = (False, True),
               packages: Sequence[str] = (),
               title: str = '',
               citation: str = '') -> Callable[[Any], Any]:
    """Says what a contestant computes, and how it is called.

    A function is called with those of the following that its parameters name, a class is constructed with them, which is the
    setup, and then called: the technique's inputs (q, k, v, x, key_mask, ...; None where an optional one is not there);
    `causal`; `problem` with batch, query_heads, kv_heads, query_tokens, kv_tokens, head_dim, value_dim, causal, dtype and
    threads; `parameters`, arrays by name, of the technique; `options` of the technique, texts by name. Inputs are given to
    calls alone. The result is an array of the shape and dtype of the technique's `out`, or a dict of `out` and `outputs`.

    What it cannot do it says by NotImplementedError(reason).

    Args:
      technique: whose float64 definition it computes, with options: "longformer:window=256".
      exact: False: it only approximates the definition, and its errors have no bound.
      arrays: "numpy", "torch" or "jax": the kind of the arrays that it is given.
      options: names of the technique's options that a sweep may vary, `mine@file:window=512`.
      outputs: names of the technique's outputs beside `out` that the result has, too: "buckets" of lsh, say, so that the
        definition takes the same choices where two are as good in float32.
      causal: the forms that it has.
      packages: distributions whose versions are recorded.
      title, citation: shown in reports.
    """
    if arrays not in ('numpy', 'torch', 'jax'):
        raise ValueError('arrays=%r: known are numpy, torch, jax' % (arrays,))
    said = dict(definition=technique, exact=exact, arrays=arrays, options=list(options), outputs=list(outputs),
                causal=list(causal), packages=list(packages), title=title, citation=citation)

    def mark(code: Any) -> Any:
        setattr(code, _MARK, said)
        return code

    return mark


def said_of(code: Any) -> Dict[str, Any]:
    """Returns what `definition` said. A function without one approximates dense attention."""
    said = getattr(code, _MARK, None)
    return said if said is not None else definition('dense', exact=False)(lambda: None).__dict__[_MARK]


class _Problem(types.SimpleNamespace):
    """The sizes of a case, `causal`, `dtype` ("f32", "bf16", "f16") and `threads`."""


class _Refused(Exception):
    """What is wrong with a contestant's result."""


class _Arrays:
    """Tensors in shared memory as arrays of one kind, by name."""

    def __init__(self, kind: str, memory: mmap.mmap, tensors: List[Dict[str, Any]]):
        self.kind = kind
        self.tensors = {tensor['name']: tensor for tensor in tensors}
        self._memory = memory
        self._views: Dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Returns a view of the memory; for JAX, whose arrays do not change, a copy of it."""
        if name not in self._views:
            self._views[name] = self._view(self.tensors[name])
        if self.kind != 'jax':
            return self._views[name]
        import jax
        return jax.block_until_ready(jax.numpy.array(self._views[name], copy=True))

    def _view(self, tensor: Dict[str, Any]) -> Any:
        dtype, shape, offset = _DTYPES[tensor['dtype']], tensor['shape'], tensor['offset']
        count = functools.reduce(lambda a, b: a * b, shape, 1)
        if self.kind == 'torch':
            import torch
            if count == 0:
                return torch.empty(shape, dtype=getattr(torch, dtype))
            return torch.frombuffer(self._memory, dtype=getattr(torch, dtype), count=count, offset=offset).view(shape)
        import numpy
        if dtype == 'bfloat16':
            try:
                import ml_dtypes
            except ImportError:
                raise NotImplementedError('NumPy has no bfloat16 without the package ml_dtypes')
            return numpy.frombuffer(self._memory, dtype=ml_dtypes.bfloat16, count=count, offset=offset).reshape(shape)
        return numpy.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).reshape(shape)

    def write(self, name: str, result: Any) -> None:
        """Copies a result to the memory. Raises _Refused where it is not what the tensor is."""
        tensor = self.tensors[name]
        shape, dtype = getattr(result, 'shape', None), getattr(result, 'dtype', None)
        if shape is None or dtype is None:
            raise _Refused('its result %s is no array but a %s' % (name, type(result).__name__))
        if list(shape) != tensor['shape']:
            raise _Refused('its result %s has shape %s; that of the definition is %s' % (name, list(shape), tensor['shape']))
        if str(dtype).rpartition('.')[2] != _DTYPES[tensor['dtype']]:
            raise _Refused('its result %s is of %s; that of the definition is %s' % (name, dtype, _DTYPES[tensor['dtype']]))
        device = getattr(result, 'device', None)
        if getattr(device, 'type', 'cpu') != 'cpu':
            raise _Refused('its result %s is on %s, not on the cpu' % (name, device))
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self._view(tensor)
        if type(result).__module__.partition('.')[0] == 'torch':
            import torch
            with torch.no_grad():
                (view if self.kind == 'torch' else torch.from_numpy(view)).copy_(result)
        else:
            import numpy
            (view.numpy() if self.kind == 'torch' else view)[...] = numpy.asarray(result)


def _bytes_of(result: Any) -> Optional[bytes]:
    """Returns the elements of an array that may change; None for others."""
    kind = type(result).__module__.partition('.')[0]
    if kind == 'torch':
        import torch
        return result.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return result.tobytes() if kind == 'numpy' else None


def _finish(result: Any) -> Any:
    """Waits for an array that is still being computed."""
    if isinstance(result, dict):
        for one in result.values():
            _finish(one)
    elif hasattr(result, 'block_until_ready'):
        result.block_until_ready()
    return result


def _flush(count: int, memory: Dict[str, Any] = {}) -> None:
    """Overwrites so many bytes, which takes the caches' place."""
    if memory.get('count') != count:
        memory.update(count=count, bytes=bytearray(count), fills=0)
    memory['fills'] += 1
    block = bytes([memory['fills'] % 256]) * (1 << 20)
    for begin in range(0, count, 1 << 20):
        end = min(begin + (1 << 20), count)
        memory['bytes'][begin:end] = block[:end - begin]


class _Layer:
    """A contestant on one problem."""

    def __init__(self, code: Any, request: Dict[str, Any], memory: mmap.mmap):
        self._code = code
        self._said = said_of(code)
        self._problem = _Problem(**request['problem'])
        self._options = request['options']
        kind = self._said['arrays']
        self._inputs = _Arrays(kind, memory, request['inputs'])
        self._outputs = _Arrays(kind, memory, request['outputs'])
        self._parameters = _Arrays(kind, memory, request['parameters'])
        self._call: Optional[Callable[[], Any]] = None
        self._made: Any = None
        self._last: Dict[str, Any] = {}

    def _named(self, code: Any, given: Dict[str, Any]) -> Dict[str, Any]:
        """Returns those of the given arguments that the code's parameters name."""
        try:
            parameters = inspect.signature(code).parameters.values()
        except (TypeError, ValueError):  # built in
            return {}
        if any(one.kind == one.VAR_KEYWORD for one in parameters):
            return given
        return {one.name: given[one.name] for one in parameters if one.name in given}

    def _bind(self, given: Sequence[str]) -> None:
        """Makes the call from the inputs as they are now."""
        tensors: Dict[str, Any] = {name: None for name in self._inputs.tensors}
        tensors.update((name, self._inputs[name]) for name in given)
        everything = dict(tensors, **self._everywhere)
        code = self._made if inspect.isclass(self._code) else self._code
        arguments = self._named(code, everything)
        unread = [name for name in given if name not in arguments]
        if any(name not in ('q', 'k', 'v', 'x') for name in unread):
            raise NotImplementedError('it does not read ' + ', '.join(unread))
        self._call = functools.partial(code, **arguments)

    def setup(self, given: Sequence[str]) -> float:
        """Constructs a class anew. Returns the seconds that this took."""
        self._call = self._made = None
        self._last = {}
        self._everywhere = dict(causal=bool(self._problem.causal), problem=self._problem, options=dict(self._options),
                                parameters={name: self._parameters[name] for name in self._parameters.tensors})
        seconds = 0.0
        if inspect.isclass(self._code):
            arguments = self._named(self._code, self._everywhere)
            begin = time.perf_counter()
            self._made = self._code(**arguments)
            seconds = time.perf_counter() - begin
        self._bind(given)
        return seconds

    def run(self, given: Sequence[str]) -> None:
        """Runs once on new inputs, and copies the result at once."""
        self._bind(given)
        result = self._results(_finish(self._call()))
        self._write(result)
        for name, (earlier, contents) in self._last.items():
            if _bytes_of(earlier) != contents:
                raise _Refused('its result %s of an earlier call changed with a later one' % name)
        kept = {name: (one, _bytes_of(one)) for name, one in result.items()}
        self._last = {name: one for name, one in kept.items() if one[1] is not None}

    def seconds(self, calls: int, warm_calls: int, flush_bytes: int) -> float:
        """Returns the seconds of so many calls, right behind others, and copies the result of the last."""
        call, clock = self._call, time.perf_counter
        gc.collect()
        gc.disable()
        try:
            for _ in range(warm_calls):
                _finish(call())
            if flush_bytes > 0:
                _flush(flush_bytes)
            begin = clock()
            for _ in range(calls):
                result = _finish(call())
            seconds = clock() - begin
        finally:
            gc.enable()
        self._write(self._results(result))
        time.sleep(_SETTLE_SECONDS if self._problem.threads > 1 else 0)
        return seconds

    def _write(self, results: Dict[str, Any]) -> None:
        for name in self._outputs.tensors:
            self._outputs.write(name, results[name])

    def _results(self, result: Any) -> Dict[str, Any]:
        results = result if isinstance(result, dict) else {'out': result}
        for name in self._outputs.tensors:
            if name not in results:
                raise _Refused('its result has no "%s"' % name)
        return results


def _pin(cpus: Sequence[int], pinned: Dict[str, Any] = {}) -> None:
    """Keeps all threads of this process on the processors."""
    if not cpus or pinned.get('cpus') == list(cpus):
        return
    pinned['cpus'] = list(cpus)
    for thread in os.listdir('/proc/self/task'):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except OSError:  # it has ended, or may not be moved
            pass


def _limit_memory(more: int) -> None:
    """Lets this process have so many bytes more than it has now; 0 is no limit."""
    if more <= 0:
        return
    with open('/proc/self/status') as status:
        held = int(re.search(r'VmData:\s+(\d+) kB', status.read()).group(1)) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + more, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _about(said: Dict[str, Any], threads: int) -> Dict[str, str]:
    """Returns versions and settings, and sets the number of threads of what has been imported."""
    about = {'python': '.'.join(map(str, sys.version_info[:3]))}
    from importlib import metadata
    for package in dict.fromkeys(['numpy'] + list(said['packages'])):
        try:
            about[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    torch = sys.modules.get('torch')
    if torch is not None and hasattr(torch, 'set_num_threads'):
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        about['torch threads'] = str(torch.get_num_threads())
        about.setdefault('torch', str(torch.__version__))
    about['OMP_NUM_THREADS'] = os.environ.get('OMP_NUM_THREADS', 'not set')
    return about


class Server:
    """Answers the requests of one sweep for a set of contestants, functions or classes by name."""

    def __init__(self, contestants: Dict[str, Any], memory_limit: int = 0):
        self._contestants = contestants
        self._memory_limit = memory_limit
        self._layers: Dict[int, _Layer] = {}

    def serve(self, connection: socket.socket, greet: bool = False) -> None:
        """Answers until the other side ends the connection. `greet` says first that the contestants are there."""
        before = os.sched_getaffinity(0)
        try:
            if greet:
                self._write(connection, {'loaded': True})
            self._serve(connection)
        except ConnectionError:  # the other side has ended
            pass
        self._layers.clear()
        _pin(sorted(before))

    def _serve(self, connection: socket.socket) -> None:
        while True:
            head = self._read(connection, 4)
            if head is None:
                break
            request = json.loads(self._read(connection, struct.unpack('=I', head)[0]))
            try:
                answer = self._answer(request, connection)
            except NotImplementedError as error:
                answer = {'error': 'unimplemented', 'message': str(error) or 'it is not implemented'}
            except _Refused as error:
                answer = {'error': 'internal', 'message': str(error)}
            except Exception as error:  # pylint: disable=broad-except
                answer = self._failure(error)
            self._write(connection, answer)

    @staticmethod
    def _write(connection: socket.socket, answer: Dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        connection.sendall(struct.pack('=I', len(text)) + text)

    @staticmethod
    def _read(connection: socket.socket, count: int) -> Optional[bytes]:
        read = b''
        while len(read) < count:
            more = connection.recv(count - len(read))
            if not more:
                return None
            read += more
        return read

    @staticmethod
    def _failure(error: Exception) -> Dict[str, str]:
        text = '%s: %s' % (type(error).__name__, ' '.join(str(error).split()))
        here = Server._failure.__code__.co_filename
        frames = [
            one for one in traceback.extract_tb(error.__traceback__)
            if one.filename != here and not one.filename.startswith('<frozen')
        ]
        if frames:
            text += ' (%s:%d)' % (os.path.basename(frames[0].filename), frames[0].lineno or 0)
        memory = isinstance(error, MemoryError) or re.search(r"can't allocate memory|out of memory|bad_alloc", text, re.I)
        return {'error': 'resource_exhausted' if memory else 'internal', 'message': text}

    def _answer(self, request: Dict[str, Any], connection: socket.socket) -> Dict[str, Any]:
        do = request['do']
        if do == 'list':
            return {'list': [dict(said_of(code), name=name) for name, code in self._contestants.items()]}
        if do == 'create':
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            memory = mmap.mmap(descriptors[0], request['bytes'])
            os.close(descriptors[0])
            _pin(request['cpus'])
            code = self._contestants[request['name']]
            about = _about(said_of(code), request['problem']['threads'])
            _limit_memory(self._memory_limit)
            self._layers[request['id']] = _Layer(code, request, memory)
            return {'about': about}
        if do == 'destroy':
            self._layers.pop(request['id'], None)
            return {}
        layer = self._layers[request['id']]
        if do == 'setup':
            return {'seconds': layer.setup(request['given'])}
        if do == 'run':
            return layer.run(request['given']) or {}
        return {'seconds': layer.seconds(request['calls'], request['warm_calls'], request['flush_bytes'])}


def _load(spec: str) -> Dict[str, Any]:
    """Returns the contestants of FILE.py:NAME,NAME, FILE.py or MODULE:NAME, by name."""
    path, _, name = spec.rpartition(':') if not spec.endswith('.py') else (spec, '', '')
    if path.endswith('.py'):
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        named = importlib.util.spec_from_file_location(re.sub(r'\W', '_', os.path.basename(path)[:-3]), path)
        module = importlib.util.module_from_spec(named)
        sys.modules[named.name] = module
        named.loader.exec_module(module)
    else:
        module = importlib.import_module(path)
    if name:
        for one in name.split(','):
            if not callable(getattr(module, one, None)):
                raise AttributeError('%s has no function %s' % (path, one))
        return {one: getattr(module, one) for one in name.split(',')}
    found = {name: code for name, code in vars(module).items() if hasattr(code, _MARK) and not name.startswith('_')}
    if not found:
        raise AttributeError('%s has no function with @definition' % path)
    return found


def _make_importable() -> None:
    """Lets the contestants import this program as tfb.contestant, whether or not the package is installed."""
    this = sys.modules['__main__']
    if importlib.util.find_spec('tfb') is None:
        package = types.ModuleType('tfb')
        package.__path__ = []
        package.definition = definition
        package.contestant = this
        sys.modules['tfb'] = package
    sys.modules['tfb.contestant'] = this


def main(descriptor: str, spec: str, memory_limit: str) -> None:
    """Serves the contestants of `spec` over the socket, whose first message is that they have been loaded."""
    os.dup2(2, 1)  # what contestants print is no answer
    _make_importable()
    connection = socket.socket(fileno=int(descriptor))
    try:
        contestants = _load(spec)
    except BaseException as error:  # pylint: disable=broad-except
        Server._write(connection, Server._failure(error))
        return
    Server(contestants, int(memory_limit)).serve(connection, greet=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
