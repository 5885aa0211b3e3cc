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

_get_pointer = pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_TensorPointer = POINTER(DLTensor)


def kind_of(array: Any) -> str:
    """Returns the top module of the array's type: "numpy", "torch", "jaxlib", ..."""
    return type(array).__module__.partition('.')[0]


def borrow(array: Any) -> Tuple[Any, Any]:
    """Returns a pointer to a DLTensor of the array's memory, and what must live as long as it is used."""
    if kind_of(array) == 'torch' and array.device.type == 'cpu':
        return _borrow_torch(array)
    if not hasattr(array, '__dlpack__'):
        raise TypeError('%s is no array: it has no __dlpack__' % type(array).__name__)
    # A capsule that nobody takes frees what it holds; the tensor is the first member of what it points to.
    capsule = array.__dlpack__()
    return cast(_get_pointer(capsule, b'dltensor'), _TensorPointer), capsule


def _borrow_torch(array: Any) -> Tuple[Any, Any]:
    """The same without a capsule, which costs more than a small layer."""
    if array.requires_grad:
        raise ValueError('the tensor requires a gradient, which tfb does not compute: detach() it')
    code, bits = _torch_dtype(array.dtype)
    rank = array.dim()
    sizes = (ctypes.c_int64 * rank)(*array.shape)
    strides = (ctypes.c_int64 * rank)(*array.stride())
    tensor = DLTensor(array.data_ptr(), DLDevice(CPU, 0), rank, DLDataType(code, bits, 1), sizes, strides, 0)
    return ctypes.pointer(tensor), (array, sizes, strides)


_torch_dtypes: dict = {}


def _torch_dtype(dtype: Any) -> Tuple[int, int]:
    if not _torch_dtypes:
        import torch
        for name, code_and_bits in DTYPES.items():
            _torch_dtypes[getattr(torch, ARRAY_DTYPES[name])] = code_and_bits
        _torch_dtypes[torch.bool] = DTYPES['u8']
    if dtype not in _torch_dtypes:
        raise TypeError('elements of %s; known are %s' % (dtype, ', '.join(sorted(ARRAY_DTYPES.values()))))
    return _torch_dtypes[dtype]


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
