"""Arrays of NumPy, PyTorch, JAX and whatever else has __dlpack__, as DLTensors over the same memory."""

import ctypes
import sys
from ctypes import addressof, pythonapi
from typing import Any, Dict, Sequence, Tuple

from tfb._library import DLDataType, DLDevice, DLTensor, InvalidArgumentError

# DLPack's code and bits by the names that the library gives to dtypes.
DTYPES = {
    'f32': (2, 32),
    'f64': (2, 64),
    'f16': (2, 16),
    'bf16': (4, 16),
    'i32': (0, 32),
    'i64': (0, 64),
    'u8': (1, 8),
}
# The names that NumPy, PyTorch and JAX give to them.
ARRAY_DTYPES = {
    'f32': 'float32',
    'f64': 'float64',
    'f16': 'float16',
    'bf16': 'bfloat16',
    'i32': 'int32',
    'i64': 'int64',
    'u8': 'uint8',
}

_NUMPY_DTYPES = {name: DLDataType(*DTYPES[short], 1) for short, name in ARRAY_DTYPES.items()}
_NUMPY_DTYPES['bool'] = _NUMPY_DTYPES['uint8']
_KNOWN = ', '.join(sorted(_NUMPY_DTYPES))

_get_pointer = pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_HOST = DLDevice(1, 0)  # kDLCPU
_ALIGNMENT = 64  # bytes, of memory that is not a tensor's
_NUMBERS = [ctypes.c_int64 * (2 * rank) for rank in range(65)]  # NumPy's arrays have at most 64 dimensions

_kinds: Dict[type, str] = {}


def kind_of(array: Any) -> str:
    """Returns whose array it is, "numpy", "torch", "jaxlib", ...: the top module of its type, or of the class above it."""
    kind = _kinds.get(type(array))
    if kind is None:
        kind = type(array).__module__.partition('.')[0]
        for package, name in (('torch', 'Tensor'), ('numpy', 'ndarray')):
            if isinstance(array, getattr(sys.modules.get(package), name, ())):
                kind = package
        _kinds[type(array)] = kind
    return kind


def borrow(array: Any, may_require_grad: bool = False) -> Tuple[int, Any]:
    """Returns the address of a DLTensor of the array's memory, and what must live as long as it is used.

    A tensor of PyTorch whose gradient autograd would compute is refused unless `may_require_grad`.
    """
    kind = kind_of(array)
    if kind == 'torch':
        return _borrow_torch(array, may_require_grad)
    return _borrow_numpy(array) if kind == 'numpy' else _borrow(array)


def _borrow(array: Any) -> Tuple[int, Any]:
    if not hasattr(array, '__dlpack__'):
        raise TypeError('%s is no array: it has no __dlpack__' % type(array).__name__)
    # A capsule that nobody takes frees what it holds; the tensor is the first member of what it points to.
    capsule = array.__dlpack__()
    return _get_pointer(capsule, b'dltensor'), capsule


def _host_tensor(array: Any, address: int, sizes: Sequence[int], strides: Sequence[int],
                 dtype: DLDataType) -> Tuple[int, Any]:
    rank = len(sizes)
    numbers = _NUMBERS[rank](*sizes, *strides)
    begin = addressof(numbers)
    tensor = DLTensor(address, _HOST, rank, dtype, begin, begin + 8 * rank, 0)
    return addressof(tensor), (array, numbers, tensor)


def _borrow_numpy(array: Any) -> Tuple[int, Any]:
    try:
        capsule = array.__dlpack__()
        return _get_pointer(capsule, b'dltensor'), capsule
    # NumPy gives none for read-only arrays, bool and bfloat16, and none at all before 1.22.
    except (AttributeError, BufferError, RuntimeError, TypeError):
        pass
    dtype = _NUMPY_DTYPES.get(array.dtype.name)
    if dtype is None or not array.dtype.isnative:
        raise TypeError('elements of %s; known are %s' % (array.dtype, _KNOWN))
    size = array.dtype.itemsize
    if any(stride % size for stride in array.strides):
        raise ValueError('elements that do not lie on multiples of their size')
    return _host_tensor(array, array.__array_interface__['data'][0], array.shape,
                        [stride // size for stride in array.strides], dtype)


def _borrow_torch(array: Any, may_require_grad: bool) -> Tuple[int, Any]:
    if array.requires_grad:
        import torch
        if torch.is_grad_enabled() and not may_require_grad:
            raise ValueError('the tensor requires a gradient, which tfb.torch.attention computes and this call does not: '
                             'detach() it')
        array = array.detach()
    array = array.resolve_neg()  # a copy where the memory has the elements with the other sign
    if array.device.type != 'cpu':
        return _borrow(array)
    # A capsule of PyTorch's costs more than a small layer.
    dtype = _NUMPY_DTYPES.get(str(array.dtype)[len('torch.'):])
    if dtype is None:
        raise TypeError('elements of %s; known are %s' % (array.dtype, _KNOWN))
    return _host_tensor(array, array.data_ptr(), array.shape, array.stride(), dtype)


def check_writable(name: str, array: Any) -> None:
    """Raises InvalidArgumentError where the memory of a caller's array must not be written or is too small for its shape."""
    kind = kind_of(array)
    if kind in ('jax', 'jaxlib'):
        raise InvalidArgumentError('output %s is an array of JAX, which does not change' % name)
    if kind == 'numpy':
        if not array.flags.writeable:
            raise InvalidArgumentError('output %s is read-only' % name)
        strides = array.strides
    elif kind == 'torch':
        if array.is_neg():
            raise InvalidArgumentError('output %s is a negated view, whose memory has the elements with the other sign' % name)
        strides = array.stride()
    else:
        return
    reach = 0  # from the first element to the last one, in the dimensions so far
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, array.shape) if size != 1):
        if stride <= reach and 0 not in array.shape:
            raise InvalidArgumentError('output %s overlaps itself: elements of shape %s with strides %s share memory' %
                                       (name, list(array.shape), list(strides)))
        reach += stride * (size - 1)


def note_write(array: Any) -> None:
    """Tells PyTorch that an array of the caller's changes, so that autograd refuses an earlier use of it."""
    if kind_of(array) == 'torch' and not array.is_inference():
        import torch
        if hasattr(torch.autograd.graph, 'increment_version'):
            torch.autograd.graph.increment_version(array)


def empty_like_kind(array: Any, shape: Sequence[int], dtype: str) -> Any:
    """Returns a new array of the kind and device of `array`; one of NumPy for a kind that cannot be written."""
    if kind_of(array) == 'torch':
        import torch
        return torch.empty(tuple(shape), dtype=getattr(torch, ARRAY_DTYPES[dtype]), device=array.device)
    import numpy
    return numpy.empty(tuple(shape), dtype=ARRAY_DTYPES[dtype])


def zeros_like_kind(array: Any, shape: Sequence[int], dtype: str) -> Any:
    """Returns an array of zeros of the kind and device that empty_like_kind gives."""
    made = empty_like_kind(array, shape, dtype)
    made[...] = 0
    return made


def new_memory(array: Any, size: int) -> Any:
    """Returns a uint8 array of so many zeros, of the kind that empty_like_kind gives, at an address that 64 divides."""
    # What is kept is then the same for the same run, gaps between its tensors included.
    memory = zeros_like_kind(array, (size + _ALIGNMENT,), 'u8')
    begin = -address_of(memory) % _ALIGNMENT
    return memory[begin:begin + size]


def aligned_memory(memory: Any) -> Any:
    """Returns a contiguous uint8 array, or a copy of it at an address that 64 divides."""
    if address_of(memory) % _ALIGNMENT == 0 or memory.shape[0] == 0:
        return memory
    copy = new_memory(memory, memory.shape[0])
    copy[:] = memory
    return copy


def address_of(memory: Any) -> int:
    """Returns where the elements of an array that empty_like_kind made begin."""
    return memory.data_ptr() if kind_of(memory) == 'torch' else memory.__array_interface__['data'][0]


def of_kind(array: Any, made: Any) -> Any:
    """Returns what empty_like_kind made, now written, as the kind of `array`; float64 without JAX's x64 stays NumPy's."""
    if kind_of(array) in ('jax', 'jaxlib'):
        import jax
        if made.dtype.itemsize < 8 or jax.config.jax_enable_x64:
            return jax.numpy.asarray(made)
    return made


def copy_of(tensor: DLTensor) -> Any:
    """Returns a NumPy array with a copy of a contiguous tensor of the host; float32 for bfloat16 where NumPy has none."""
    import numpy
    names = {code_and_bits: name for name, code_and_bits in DTYPES.items()}
    name = ARRAY_DTYPES[names[(tensor.dtype.code, tensor.dtype.bits)]]
    shape = tuple(_NUMBERS[tensor.ndim].from_address(tensor.shape)[:tensor.ndim])
    size = tensor.dtype.bits // 8
    for dimension in shape:
        size *= dimension
    contents = bytearray(ctypes.string_at(tensor.data, size))
    try:
        return numpy.frombuffer(contents, dtype=numpy.dtype(name)).reshape(shape)
    except TypeError:  # bfloat16, the upper half of a float32, without the package ml_dtypes
        return (numpy.frombuffer(contents, dtype='uint16').astype('uint32') << 16).view('float32').reshape(shape)
