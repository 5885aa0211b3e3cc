"""A layer: one technique with its options on one problem and one device."""

import ctypes
import json
import os
import signal
import threading
from collections import OrderedDict
from ctypes import byref, c_char_p, c_size_t, c_void_p
from typing import Any, Dict, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Tuple

from tfb import _arrays, _library
from tfb._library import LIBRARY, DLDataType, DLTensor, TfbBackwardCall, TfbProblem, TfbTensor, TfbTensors, check


class TensorSpec(NamedTuple):
    """A tensor that a layer reads or writes."""
    name: str
    dtype: str  # "f32", "f64", "f16", "bf16", "i32", "i64" or "u8"
    shape: Tuple[int, ...]  # -1: the tokens of a segment
    optional: bool
    noise: Optional[str]  # the distribution of an input that is noise: "normal", "uniform" or "gumbel"


class Gradients(NamedTuple):
    """Gradients of a loss L, by the names of what they are the gradients of, with the shapes of that."""
    inputs: Dict[str, Any]  # dL/d(input), of the input's dtype
    parameters: Dict[str, Any]  # dL/d(parameter), in float32


def _specs(given: Sequence[Mapping[str, Any]]) -> List[TensorSpec]:
    return [
        TensorSpec(one['name'], one['dtype'], tuple(one['shape']), one['optional'], one['noise']) for one in given
    ]


# Techniques by the option with which their setup reads the inputs' values, and by that with which each setup draws anew.
_FITS = {'linformer': 'projection=fit'}
_DRAWS = {'performer': 'redraw=true', 'rfa': 'redraw=true'}

_MOST = 2**40  # the largest size that the library takes; it checks the rest

# Tells, some ten times a second, whether Ctrl-C was pressed; no Python runs for it, in which its handler could raise.
_interrupted = _library.Interrupted(ctypes.pythonapi.PyOS_InterruptOccurred)


def _check(status: int) -> None:
    """Raises KeyboardInterrupt, or what else the handler of SIGINT raises, where the call was interrupted."""
    if status == 1:
        signal.raise_signal(signal.SIGINT)
    check(status)


class _Tensors:
    """Arrays as an argument of the library's functions, without those that are None.

    Tensors of PyTorch whose gradients autograd would compute are refused unless `may_require_grad`.
    """

    def __init__(self, arrays: Mapping[str, Any], may_require_grad: bool = False):
        arrays = _given(arrays)
        self.count = len(arrays)
        self.array = (TfbTensor * self.count)()
        self._kept = []
        for tensor, (name, array) in zip(self.array, arrays.items()):
            tensor.name = _library.encoded('name', name)
            tensor.tensor, kept = _arrays.borrow(array, may_require_grad)
            self._kept.append(kept)

    def argument(self) -> TfbTensors:
        return TfbTensors(self.array, self.count)


class Layer:
    """A technique with its options on one problem and one device, with its parameters.

    A layer serves one call at a time; use one a thread. Calls let go of the GIL, and Ctrl-C interrupts them. A layer
    cannot be copied or pickled. A fork of the process does not have the layer's threads, and calls there raise
    FailedPreconditionError. An optional input that is None is not given.

    Attributes:
      inputs, outputs: the tensors that `run` takes and gives (TensorSpec).
      streaming: of a layer that reads segments, a dict with "inputs", "outputs", "max_segment_tokens" and
        "split_tokens" (0: every split gives the result of the whole); else None.
    """

    def __init__(self,
                 technique: str,
                 *,
                 tokens: int,
                 heads: int = 8,
                 head_dim: int = 64,
                 batch: int = 1,
                 kv_heads: Optional[int] = None,
                 kv_tokens: Optional[int] = None,
                 value_dim: Optional[int] = None,
                 causal: bool = False,
                 dtype: str = 'f32',
                 device: str = 'cpu',
                 seed: int = 1,
                 threads: int = 0):
        """Creates a layer.

        Args:
          technique: a name with its options: "longformer:window=256,dilation=2".
          tokens: of the queries.
          heads: of the queries; hidden states have heads * head_dim channels.
          head_dim: channels of queries and keys, 1 to 256.
          batch: sequences.
          kv_heads: of keys and values, of which each serves heads / kv_heads query heads; by default `heads`.
          kv_tokens: of keys and values; by default `tokens`. A causal query i sees keys j <= i + kv_tokens - tokens.
          value_dim: channels of values and outputs; by default `head_dim`.
          causal: whether queries see no later keys.
          dtype: of inputs and outputs: "f32", "f16" or "bf16". Sums are in f32.
          device: "cpu" or "cuda".
          seed: of the parameters; inputs that are noise are the caller's.
          threads: that share the work of a CPU; 0 means one for each processor that the program may use.

        Raises:
          NotFoundError: there is no such technique.
          InvalidArgumentError: an option or a size that cannot be.
          UnimplementedError: the technique does not have this combination.
        """
        self._handle = c_void_p()
        self._process = os.getpid()
        if dtype not in ('f32', 'f16', 'bf16'):
            raise _library.InvalidArgumentError('dtype is "%s"; allowed are f32, f16, bf16' % dtype)
        code, bits = _arrays.DTYPES[dtype]
        kv_heads = heads if kv_heads is None else kv_heads
        kv_tokens = tokens if kv_tokens is None else kv_tokens
        sizes = [
            _library.integer(name, size, 0, _MOST) for name, size in (
                ('batch', batch), ('heads', heads), ('kv_heads', kv_heads), ('tokens', tokens), ('kv_tokens', kv_tokens),
                ('head_dim', head_dim), ('value_dim', head_dim if value_dim is None else value_dim))
        ]
        problem = TfbProblem(*sizes, 1 if causal else 0, DLDataType(code, bits, 1))
        check(
            LIBRARY.tfb_create(_library.encoded('technique', technique), byref(problem), _library.encoded('device', device),
                               _library.integer('seed', seed, 0, 2**64 - 1),
                               _library.integer('threads', threads, 0, 4096), byref(self._handle)))
        check(LIBRARY.tfb_set_interrupt(self._layer, _interrupted, None))
        self._weights_shape = (sizes[0], sizes[1], sizes[3], sizes[4])
        said = self.describe()
        self.inputs = _specs(said['inputs'])
        self.outputs = _specs(said['outputs'])
        self._input_names = frozenset(spec.name for spec in self.inputs)
        self.streaming = said['streaming']
        if self.streaming is not None:
            self.streaming.update(inputs=_specs(self.streaming['inputs']), outputs=_specs(self.streaming['outputs']))
        words = said['technique'].split()
        self._setup_fits = _FITS.get(words[0]) in words
        self._setup_draws = _DRAWS.get(words[0]) in words
        self._is_set_up = False
        self._is_backward_set_up = False
        self._has_lost_sequence = False  # a call was interrupted, and nothing has begun a new sequence
        self._backward: Optional[Dict[str, Any]] = None  # what describe_backward said

    @property
    def _layer(self) -> c_void_p:
        """The library's layer, for the process that made it: a fork does not have the layer's threads."""
        if self._process != os.getpid():
            raise _library.FailedPreconditionError(
                'the layer was made in process %d before a fork, whose threads this process does not have: make another' %
                self._process)
        return self._handle

    def __del__(self) -> None:
        # In a process that forked, destroying the layer would wait for threads that are not there.
        if getattr(self, '_process', None) == os.getpid() and self._handle.value:
            LIBRARY.tfb_destroy(self._handle)

    def _refuse_copy(self, *_: Any) -> NoReturn:
        raise TypeError('a tfb.Layer cannot be copied or pickled; keep its parameters()')

    __copy__ = __deepcopy__ = __reduce_ex__ = _refuse_copy

    def __repr__(self) -> str:
        if self._process != os.getpid():
            return '<tfb.Layer of process %d, before a fork>' % self._process
        said = self.describe()
        return '<tfb.Layer %s: %s, %s>' % (said['technique'], said['problem'], said['device'])

    def describe(self) -> Dict[str, Any]:
        """Returns what tfb_describe of harness/c/tfb.h says: tensors, cost, workspace, statistics of the last run."""
        return _library.text(LIBRARY.tfb_describe, self._layer)

    def setup(self, **inputs: Any) -> None:
        """Does the work that need not be repeated while the inputs' sizes and the parameters stay.

        `run` and `append` do it where it was not done.
        """
        self._set_up(_Tensors(inputs))

    def run(self, **inputs: Any) -> Any:
        """Returns the output "out", of the kind of the first input, with the shape that `outputs` tells."""
        return self.run_for(['out'], **inputs)['out']

    def run_for(self, names: Sequence[str], into: Optional[Mapping[str, Any]] = None, **inputs: Any) -> Dict[str, Any]:
        """Returns the named outputs, of which `into` may give arrays to write.

        No element of those may lie in another array of the call. InvalidArgumentError where they are read-only or JAX's,
        or overlap themselves.
        """
        self._set_up_with(inputs)
        return self._call(LIBRARY.tfb_run, self.outputs, names, into, inputs, 0)

    def check_backward(self) -> None:
        """Raises UnimplementedError, with the reason, where the layer has no backward pass."""
        check(LIBRARY.tfb_check_backward(self._layer))

    def describe_backward(self) -> Dict[str, Any]:
        """Returns what tfb_describe_backward of harness/c/tfb.h says.

        "input_gradients" and "parameter_gradients" are lists of TensorSpec, the gradients that `backward` can give;
        "output_gradients" are those that it takes. "stopped" has the reasons why others have none, by name. Raises
        UnimplementedError as check_backward.
        """
        said = _library.text(LIBRARY.tfb_describe_backward, self._layer)
        for gradients in ('output_gradients', 'input_gradients', 'parameter_gradients'):
            said[gradients] = _specs(said[gradients])
        return said

    def kept_bytes(self) -> int:
        """Returns the bytes that run_kept keeps for `backward`, beside inputs and outputs. Raises as check_backward."""
        size = c_size_t()
        check(LIBRARY.tfb_kept_bytes(self._layer, byref(size)))
        return size.value

    def run_kept(self, names: Sequence[str] = ('out',), **inputs: Any) -> Tuple[Dict[str, Any], Any]:
        """Returns the named outputs, as run_for, and the memory that `backward` needs: an array of bytes (uint8).

        Further runs may come before the backward pass of this one. Raises UnimplementedError as check_backward.
        """
        size = self.kept_bytes()
        self._set_up_with(inputs)
        kept = _arrays.new_memory(_first(inputs), size)
        return self._call(LIBRARY.tfb_run_kept, self.outputs, names, None, inputs, 0, kept), kept

    def backward(self,
                 kept: Any,
                 outputs: Mapping[str, Any],
                 output_gradients: Mapping[str, Any],
                 input_names: Optional[Sequence[str]] = None,
                 parameter_names: Optional[Sequence[str]] = None,
                 **inputs: Any) -> Gradients:
        """Returns the gradients of a loss L, dL/d(input) and dL/d(parameter), given dL/d(output).

        Args:
          kept: what run_kept gave beside the outputs. It may be used any number of times.
          outputs: those of run_kept. "out" must be there. The parameters must be those of the run, too.
          output_gradients: dL/d(output), by the outputs' names and of their shapes; one that is left out is 0.
          input_names: of the inputs whose gradients are computed; by default all that are given and have one.
          parameter_names: of the parameters whose gradients are computed; by default all that have one.
          **inputs: those of run_kept.

        Returns:
          Arrays of the kind of the first input.

        Raises:
          NotFoundError: there is no such gradient.
          UnimplementedError: as check_backward.
        """
        if self._backward is None:
            self._backward = self.describe_backward()
        of_inputs = self._new_gradients('input_gradients', input_names, inputs)
        of_parameters = self._new_gradients('parameter_gradients', parameter_names, inputs)
        given = _Tensors(inputs, may_require_grad=True)
        if not self._is_set_up:  # of a layer like the one that ran
            self._set_up(given)
        if not self._is_backward_set_up:
            self._check_call(LIBRARY.tfb_setup_backward(self._layer, given.array, given.count, None, 0, None))
            self._is_backward_set_up = True
        tensors = [given] + [
            _Tensors(arrays, may_require_grad=True) for arrays in (outputs, output_gradients, of_inputs, of_parameters)
        ]
        call = TfbBackwardCall(*(one.argument() for one in tensors))
        kept = _arrays.aligned_memory(kept)
        self._check_call(
            LIBRARY.tfb_backward(self._layer, byref(call), None, 0, _arrays.address_of(kept), kept.shape[0], None))
        return Gradients(*({
            name: _arrays.of_kind(_first(inputs), array) for name, array in made.items()
        } for made in (of_inputs, of_parameters)))

    def append(self, **segment: Any) -> Any:
        """Takes the next segment of a sequence, which `reset` begins, and returns the "out" of its tokens.

        On a new layer, and after `set_parameters`, it sets up, and the segment is the first of a sequence. After an
        interrupted call FailedPreconditionError is raised until `reset` or `setup` begins a sequence.
        """
        if self.streaming is None:
            raise _library.UnimplementedError('the layer reads no segments')
        if self._has_lost_sequence:
            raise _library.FailedPreconditionError('a call was interrupted, and the sequence is lost: reset() begins another')
        if not self._is_set_up:  # setup reads the whole sequence's sizes, and not its values
            self.setup(
                **{
                    spec.name: _arrays.zeros_like_kind(_first(segment), spec.shape, spec.dtype)
                    for spec in self.inputs
                    if not spec.optional
                })
            self.reset()
        first = self.streaming['inputs'][0]
        tokens = segment[first.name].shape[first.shape.index(-1)] if segment.get(first.name) is not None else 0
        return self._call(LIBRARY.tfb_append, self.streaming['outputs'], ['out'], None, segment, tokens)['out']

    def reset(self) -> None:
        """Begins a new sequence: forgets what has been appended or run."""
        check(LIBRARY.tfb_reset(self._layer))
        self._has_lost_sequence = False

    def parameters(self) -> Dict[str, Any]:
        """Returns copies of the parameters, as NumPy arrays: float32 for bfloat16 without the package ml_dtypes."""
        copies = {}
        for one in self.describe()['parameters']:
            tensor = DLTensor()
            check(LIBRARY.tfb_get_parameter(self._layer, _library.encoded('name', one['name']), byref(tensor)))
            copies[one['name']] = _arrays.copy_of(tensor)
        return copies

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Replaces the parameters that are given by copies of these arrays of the host, in the parameters' shapes."""
        tensors = _Tensors(parameters, may_require_grad=True)
        check(LIBRARY.tfb_set_parameters(self._layer, tensors.array, tensors.count))
        self._is_set_up = False

    def define(self, names: Sequence[str] = ('out',), **inputs: Any) -> Dict[str, Any]:
        """Returns outputs of the technique's float64 definition with the layer's parameters, as float64 arrays.

        They are NumPy's where the inputs are JAX's and JAX has no float64 (jax_enable_x64).
        "weights" [batch, heads, tokens, kv_tokens], attention weights, is an output of those that have them.
        """
        shapes = {spec.name: spec.shape for spec in self.outputs}
        made = {}
        for name in names:
            if name == 'weights':
                shapes[name] = self._weights_shape
            if name not in shapes:
                raise _library.NotFoundError('there is no output "%s"' % name)
            made[name] = _arrays.empty_like_kind(_first(inputs), shapes[name], 'f64')
        given, written = _Tensors(inputs), _Tensors(made)
        _check(LIBRARY.tfb_define(self._layer, given.array, given.count, written.array, written.count))
        return {name: _arrays.of_kind(_first(inputs), array) for name, array in made.items()}

    def evaluate(self, outputs: Optional[Mapping[str, Any]] = None, rows: int = 0, **inputs: Any) -> Dict[str, Any]:
        """Judges `outputs`, or those of the layer itself, against the definition and dense attention.

        Returns what tfb_evaluate of harness/c/tfb.h says. `rows` query tokens are checked; 0 means all.
        """
        given, judged = _Tensors(inputs), _Tensors(outputs or {})
        said = c_char_p()
        _check(
            LIBRARY.tfb_evaluate(self._layer, given.array, given.count, judged.array, judged.count,
                                 _library.integer('rows', rows, 0, 2**63 - 1), byref(said)))
        return json.loads(said.value.decode())

    def read_of(self, **arrays: Any) -> Dict[str, Any]:
        """Returns those of the arrays that are inputs of the layer."""
        return {name: array for name, array in arrays.items() if name in self._input_names}

    def workspace_bytes(self) -> int:
        """Returns the bytes of memory that a run needs beside its tensors, which the layer keeps."""
        size = c_size_t()
        check(LIBRARY.tfb_workspace_bytes(self._layer, byref(size)))
        return size.value

    def _set_up(self, tensors: _Tensors) -> None:
        self._check_call(LIBRARY.tfb_setup(self._layer, tensors.array, tensors.count, None, 0, None))
        self._is_set_up = True
        self._is_backward_set_up = False
        self._has_lost_sequence = False

    def _set_up_with(self, inputs: Mapping[str, Any]) -> None:
        if not self._is_set_up:
            self.setup(**inputs)

    def _new_gradients(self, which: str, names: Optional[Sequence[str]], inputs: Mapping[str, Any]) -> Dict[str, Any]:
        said = self._backward or {}
        there = {
            spec.name: spec
            for spec in said[which]
            if which == 'parameter_gradients' or inputs.get(spec.name) is not None
        }
        for name in names or ():
            if name not in there:
                reason = said['stopped'].get(name)
                raise _library.NotFoundError('there is no gradient of "%s"%s' % (name, ': ' + reason if reason else ''))
        return {
            name: _arrays.empty_like_kind(_first(inputs), there[name].shape, there[name].dtype)
            for name in (there if names is None else names)
        }

    def _call(self, function: Any, specs: Sequence[TensorSpec], names: Sequence[str], into: Optional[Mapping[str, Any]],
              inputs: Mapping[str, Any], tokens: int, kept: Any = None) -> Dict[str, Any]:
        made = _given(into or {})
        for name, array in made.items():
            _arrays.check_writable(name, array)
        for spec in specs:
            if spec.name in names and spec.name not in made:
                shape = [tokens if size == -1 else size for size in spec.shape]
                made[spec.name] = _arrays.empty_like_kind(_first(inputs), shape, spec.dtype)
        missing = [name for name in names if name not in made]
        if missing:
            raise _library.NotFoundError('there is no output "%s"; the layer writes %s' %
                                         (missing[0], ', '.join(spec.name for spec in specs)))
        given, written = _Tensors(inputs), _Tensors(made)
        for name in into or ():
            _arrays.note_write(made[name])
        kept_memory = () if kept is None else (_arrays.address_of(kept), kept.shape[0])
        self._check_call(
            function(self._layer, given.array, given.count, written.array, written.count, None, 0, *kept_memory, None))
        return {name: _arrays.of_kind(_first(inputs), made[name]) for name in names}

    def _check_call(self, status: int) -> None:
        if status != 0:
            if status == 1:
                self._is_set_up = False
                self._has_lost_sequence = True
            _check(status)


def _given(arrays: Mapping[str, Any]) -> Dict[str, Any]:
    return {name: array for name, array in arrays.items() if array is not None}


def _first(inputs: Mapping[str, Any]) -> Any:
    return next(iter(_given(inputs).values()), None)


class _Cache(threading.local):
    """The layers of a thread's last calls of `attention`."""
    kMost = 16

    def __init__(self) -> None:
        self._layers: 'OrderedDict[Any, Layer]' = OrderedDict()

    def layer(self, key: Any, **sizes: Any) -> Layer:
        layer = self._layers.get(key)
        if layer is None:
            layer = Layer(key[0], **sizes)
            self._layers[key] = layer
            if len(self._layers) > self.kMost:
                self._layers.popitem(last=False)
        else:
            self._layers.move_to_end(key)
        return layer


_cache = _Cache()


def _forget_layers() -> None:
    """Lets a process that forked make layers of its own, which have threads."""
    global _cache  # pylint: disable=global-statement
    _cache = _Cache()


os.register_at_fork(after_in_child=_forget_layers)

_DTYPE_NAMES = {name: short for short, name in _arrays.ARRAY_DTYPES.items()}


def layer_of(technique: str, q: Any, k: Any, v: Any, causal: bool, seed: int, threads: int, user: str = '') -> Layer:
    """Returns the calling thread's layer for arrays of these shapes and this dtype, which it keeps for later calls.

    Each `user` has layers of its own.
    """
    for name, array in (('q', q), ('k', k), ('v', v)):
        if len(array.shape) != 4:
            raise _library.InvalidArgumentError(
                '%s has shape %s; it must be [batch, heads, tokens, channels]' % (name, list(array.shape)))
    dtype = str(q.dtype).rpartition('.')[2]
    key = (technique, tuple(q.shape), tuple(k.shape), v.shape[3], dtype, causal, seed, threads, user)
    return _cache.layer(key,
                        batch=q.shape[0],
                        heads=q.shape[1],
                        kv_heads=k.shape[1],
                        tokens=q.shape[2],
                        kv_tokens=k.shape[2],
                        head_dim=q.shape[3],
                        value_dim=v.shape[3],
                        causal=causal,
                        dtype=_DTYPE_NAMES.get(dtype, dtype),
                        seed=seed,
                        threads=threads)


def set_up_for_values(layer: Layer, draws: bool, inputs: Mapping[str, Any]) -> None:
    """Sets a kept layer up once more where its setup reads the inputs' values or, if `draws`, draws at random."""
    # pylint: disable=protected-access
    if layer._setup_fits or (draws and layer._setup_draws):
        layer.setup(**inputs)


def attention(technique: str,
              q: Any,
              k: Any,
              v: Any,
              *,
              causal: bool = False,
              seed: int = 1,
              threads: int = 0,
              **inputs: Any) -> Any:
    """Returns the technique's attention of queries q to keys k and values v, as an array of q's kind.

    Args:
      technique: a name with its options: "longformer:window=256".
      q: [batch, heads, tokens, head_dim], float32, float16 or bfloat16.
      k: [batch, kv_heads, kv_tokens, head_dim]; kv_heads divides heads. Techniques whose queries are their keys, such
        as lsh, do not read it.
      v: [batch, kv_heads, kv_tokens, value_dim].
      causal: whether query i sees only keys j <= i + kv_tokens - tokens.
      seed: of the parameters; inputs that are noise are the caller's.
      threads: that share the work; 0 means one for each processor that the program may use.
      **inputs: further inputs of the technique, such as key_mask [batch, kv_tokens] of uint8 or bool, 1 for a token
        and 0 for padding.

    Returns:
      [batch, heads, tokens, value_dim] of q's dtype.

    The layers of the last calls are kept, so that a call like an earlier one does not set up again. linformer of
    projection=fit does, because it is fitted to the keys and values, and so do performer and rfa of redraw=true.
    """
    layer = layer_of(technique, q, k, v, causal, seed, threads)
    given = dict(layer.read_of(q=q, k=k, v=v), **inputs)
    set_up_for_values(layer, True, given)
    return layer.run(**given)


def gradients(technique: str,
              q: Any,
              k: Any,
              v: Any,
              grad_out: Any,
              *,
              causal: bool = False,
              seed: int = 1,
              threads: int = 0,
              **inputs: Any) -> Gradients:
    """Returns the gradients of a loss L with respect to what the technique's attention reads, given dL/d(out).

        found = tfb.gradients(technique, q, k, v, grad_out, causal=True)
        found.inputs["q"], found.inputs["k"], found.inputs["v"], found.parameters

    The arguments are those of `attention`.

    Args:
      grad_out: dL/d(out), [batch, heads, tokens, value_dim] of q's dtype.

    Returns:
      The gradients as arrays of q's kind: those of q, k, v and further inputs of floating dtype that are given, with
      their shapes and dtypes, and those of the technique's parameters, in float32. An input that the technique does not
      read, or at which its gradient stops, has none.

    Raises:
      UnimplementedError: the technique has no backward pass; the message says why.

    The function runs the technique, and then its backward pass. To use the result of the run, too, or for several
    gradients of one run, see Layer.run_kept and Layer.backward.
    """
    layer = layer_of(technique, q, k, v, causal, seed, threads)
    given = dict(layer.read_of(q=q, k=k, v=v), **inputs)
    set_up_for_values(layer, True, given)
    outputs, kept = layer.run_kept(**given)
    return layer.backward(kept, outputs, {'out': grad_out}, **given)


def error(technique: str,
          q: Any,
          k: Any,
          v: Any,
          *,
          out: Any = None,
          causal: bool = False,
          seed: int = 1,
          threads: int = 0,
          rows: int = 0,
          **inputs: Any) -> Dict[str, Any]:
    """Returns how far the technique's result, or `out`, is from its float64 definition and from dense attention.

    The arguments are those of `attention`; `out`, [batch, heads, tokens, value_dim], is the result of other code for the
    same formula. `rows` query tokens are checked; 0 means all. The result is that of Layer.evaluate: "definition" and
    "dense" with relative and largest errors, "kept_mass", "recall", "passed", ...
    """
    layer = layer_of(technique, q, k, v, causal, seed, threads)
    given = dict(layer.read_of(q=q, k=k, v=v), **inputs)
    set_up_for_values(layer, False, given)
    return layer.evaluate(None if out is None else {'out': out}, rows, **given)
