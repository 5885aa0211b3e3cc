"""Arrays of NumPy, PyTorch, JAX and whatever else has __dlpack__, as DLTensors over the same memory."""

import ctypes
from ctypes import POINTER, cast, pythonapi
from typing import Any, Sequence, Tuple

from tfb._library import DLDataType, DLDevice, DLTensor

CPU, CUDA = 1, 2  # DLPack's types of devices

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

_NUMPY_DTYPES = {name: DTYPES[short] for short, name in ARRAY_DTYPES.items()}
_NUMPY_DTYPES['bool'] = DTYPES['u8']
_KNOWN = ', '.join(sorted(_NUMPY_DTYPES))

_get_pointer = pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_TensorPointer = POINTER(DLTensor)
_SizesPointer = POINTER(ctypes.c_int64)
_HOST = DLDevice(CPU, 0)


def kind_of(array: Any) -> str:
    """Returns the top module of the array's type: "numpy", "torch", "jaxlib", ..."""
    return type(array).__module__.partition('.')[0]


def borrow(array: Any) -> Tuple[Any, Any]:
    """Returns a pointer to a DLTensor of the array's memory, and what must live as long as it is used."""
    kind = kind_of(array)
    if kind == 'numpy':
        return _borrow_numpy(array)
    if kind == 'torch' and array.device.type == 'cpu':
        return _borrow_torch(array)
    if not hasattr(array, '__dlpack__'):
        raise TypeError('%s is no array: it has no __dlpack__' % type(array).__name__)
    # A capsule that nobody takes frees what it holds; the tensor is the first member of what it points to.
    capsule = array.__dlpack__()
    return cast(_get_pointer(capsule, b'dltensor'), _TensorPointer), capsule


def _host_tensor(array: Any, address: int, sizes: Sequence[int], strides: Sequence[int], dtype: Tuple[int, int]) -> Any:
    rank = len(sizes)
    numbers = (ctypes.c_int64 * (2 * rank))(*sizes, *strides)
    begin = ctypes.addressof(numbers)
    tensor = DLTensor(address, _HOST, rank, DLDataType(dtype[0], dtype[1], 1), cast(begin, _SizesPointer),
                      cast(begin + 8 * rank, _SizesPointer), 0)
    return ctypes.pointer(tensor), (array, numbers)


# These two go without a capsule, which NumPy does not give for bool, bfloat16 and read-only arrays, and which costs more
# than a small layer for a tensor of PyTorch.


def _borrow_numpy(array: Any) -> Tuple[Any, Any]:
    dtype = _NUMPY_DTYPES.get(array.dtype.name)
    if dtype is None or not array.dtype.isnative:
        raise TypeError('elements of %s; known are %s' % (array.dtype, _KNOWN))
    size = array.dtype.itemsize
    if any(stride % size for stride in array.strides):
        raise ValueError('elements that do not lie on multiples of their size')
    return _host_tensor(array, array.__array_interface__['data'][0], array.shape,
                        [stride // size for stride in array.strides], dtype)


def _borrow_torch(array: Any) -> Tuple[Any, Any]:
    if array.requires_grad:
        raise ValueError('the tensor requires a gradient, which tfb does not compute: detach() it')
    dtype = _NUMPY_DTYPES.get(str(array.dtype)[len('torch.'):])
    if dtype is None:
        raise TypeError('elements of %s; known are %s' % (array.dtype, _KNOWN))
    return _host_tensor(array, array.data_ptr(), array.shape, array.stride(), dtype)


def empty_like_kind(array: Any, shape: Sequence[int], dtype: str) -> Any:
    """Returns a new array of the kind and device of `array`; one of NumPy for a kind that cannot be written."""
    if kind_of(array) == 'torch':
        import torch
        return torch.empty(tuple(shape), dtype=getattr(torch, ARRAY_DTYPES[dtype]), device=array.device)
    import numpy
    return numpy.empty(tuple(shape), dtype=ARRAY_DTYPES[dtype])


def of_kind(array: Any, made: Any) -> Any:
    """Returns what empty_like_kind made, now written, as the kind of `array`."""
    if kind_of(array) in ('jax', 'jaxlib'):
        import jax.numpy
        return jax.numpy.asarray(made)
    return made


def copy_of(tensor: DLTensor) -> Any:
    """Returns a NumPy array with a copy of a contiguous tensor of the host."""
    import numpy
    names = {code_and_bits: name for name, code_and_bits in DTYPES.items()}
    dtype = numpy.dtype(ARRAY_DTYPES[names[(tensor.dtype.code, tensor.dtype.bits)]])
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    size = dtype.itemsize
    for dimension in shape:
        size *= dimension
    return numpy.frombuffer(bytearray(ctypes.string_at(tensor.data, size)), dtype=dtype).reshape(shape)
