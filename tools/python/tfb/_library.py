"""The functions of libtfb.so (harness/c/tfb.h), by ctypes."""

import ctypes
import json
import operator
import os
from ctypes import POINTER, Structure, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any, List, Optional

INTERFACE_VERSION = 1
INTERFACE_REVISION = 2


class Error(Exception):
    """A failure that the library reports; its text is the library's message."""


class CancelledError(Error):
    """The call was interrupted."""


class InvalidArgumentError(Error, ValueError):
    """There is no such option, size or tensor."""


class NotFoundError(Error, KeyError):
    """There is no such technique, parameter or output."""

    def __str__(self) -> str:  # KeyError's would show it in quotes
        return Exception.__str__(self)


class ResourceExhaustedError(Error, MemoryError):
    """There is not enough memory."""


class FailedPreconditionError(Error, RuntimeError):
    """The call came before another that it needs, or while another one ran."""


class UnimplementedError(Error, NotImplementedError):
    """The technique does not have this combination, or there is no such device."""


class InternalError(Error, RuntimeError):
    """A kernel failed, or the library has a defect."""


_ERRORS = {
    1: CancelledError,
    3: InvalidArgumentError,
    5: NotFoundError,
    8: ResourceExhaustedError,
    9: FailedPreconditionError,
    12: UnimplementedError,
    13: InternalError,
}


class DLDevice(Structure):
    _fields_ = [('device_type', c_int32), ('device_id', c_int32)]


class DLDataType(Structure):
    _fields_ = [('code', c_uint8), ('bits', c_uint8), ('lanes', c_uint16)]


class DLTensor(Structure):  # pointers are addresses, which cost less than pointers of types
    _fields_ = [('data', c_void_p), ('device', DLDevice), ('ndim', c_int32), ('dtype', DLDataType),
                ('shape', c_void_p), ('strides', c_void_p), ('byte_offset', c_uint64)]


class TfbTensor(Structure):
    _fields_ = [('name', c_char_p), ('tensor', c_void_p)]


class TfbProblem(Structure):
    _fields_ = [('batch', c_int64), ('query_heads', c_int64), ('kv_heads', c_int64), ('query_tokens', c_int64),
                ('kv_tokens', c_int64), ('head_dim', c_int64), ('value_dim', c_int64), ('causal', c_int32),
                ('dtype', DLDataType)]


class TfbTensors(Structure):
    _fields_ = [('tensors', POINTER(TfbTensor)), ('count', c_size_t)]


class TfbBackwardCall(Structure):
    _fields_ = [('inputs', TfbTensors), ('outputs', TfbTensors), ('output_gradients', TfbTensors),
                ('input_gradients', TfbTensors), ('parameter_gradients', TfbTensors)]


Interrupted = ctypes.CFUNCTYPE(c_int32, c_void_p)

_TENSORS = [POINTER(TfbTensor), c_size_t]
_MEMORY = [c_void_p, c_size_t, c_void_p]  # workspace, its bytes, stream
_KEPT = [c_void_p, c_size_t] + _MEMORY  # workspace, kept memory, stream
_SIGNATURES = {
    'tfb_create': [c_char_p, POINTER(TfbProblem), c_char_p, c_uint64, c_int32, POINTER(c_void_p)],
    'tfb_describe': [c_void_p, POINTER(c_char_p)],
    'tfb_workspace_bytes': [c_void_p, POINTER(c_size_t)],
    'tfb_setup': [c_void_p] + _TENSORS + _MEMORY,
    'tfb_run': [c_void_p] + _TENSORS + _TENSORS + _MEMORY,
    'tfb_append': [c_void_p] + _TENSORS + _TENSORS + _MEMORY,
    'tfb_reset': [c_void_p],
    'tfb_get_parameter': [c_void_p, c_char_p, POINTER(DLTensor)],
    'tfb_set_parameters': [c_void_p] + _TENSORS,
    'tfb_define': [c_void_p] + _TENSORS + _TENSORS,
    'tfb_evaluate': [c_void_p] + _TENSORS + _TENSORS + [c_int64, POINTER(c_char_p)],
    'tfb_set_interrupt': [c_void_p, Interrupted, c_void_p],
    'tfb_check_backward': [c_void_p],
    'tfb_describe_backward': [c_void_p, POINTER(c_char_p)],
    'tfb_kept_bytes': [c_void_p, POINTER(c_size_t)],
    'tfb_setup_backward': [c_void_p] + _TENSORS + _MEMORY,
    'tfb_run_kept': [c_void_p] + _TENSORS + _TENSORS + _KEPT,
    'tfb_backward': [c_void_p, POINTER(TfbBackwardCall)] + _KEPT,
}


def _load() -> ctypes.CDLL:
    """Loads the library that lies beside this file, or the one that TFB_LIBRARY names."""
    path = os.environ.get('TFB_LIBRARY') or os.path.join(os.path.dirname(os.path.abspath(__file__)), 'libtfb.so')
    library = ctypes.CDLL(path)
    library.tfb_interface_version.restype = c_int32
    version = library.tfb_interface_version()
    if version != INTERFACE_VERSION:
        raise ImportError('%s has interface %d; this package needs %d' % (path, version, INTERFACE_VERSION))
    revision = library.tfb_interface_revision() if hasattr(library, 'tfb_interface_revision') else 1
    if revision < INTERFACE_REVISION:
        raise ImportError('%s has revision %d of the interface; this package needs %d' %
                          (path, revision, INTERFACE_REVISION))
    library.tfb_last_error.restype = c_char_p
    library.tfb_techniques.restype = c_char_p
    library.tfb_destroy.argtypes = [c_void_p]
    library.tfb_destroy.restype = None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int32
    return library


LIBRARY = _load()


def check(status: int) -> None:
    """Raises the exception of a TfbStatus that is not TFB_OK."""
    if status != 0:
        raise _ERRORS.get(status, InternalError)(LIBRARY.tfb_last_error().decode())


def encoded(what: str, text: str) -> bytes:
    """Returns a text as the library takes it, whose end is a NUL."""
    if not isinstance(text, str):
        raise TypeError('%s is %r; it must be a str' % (what, text))
    if '\0' in text:
        raise InvalidArgumentError('%s is %r; it must have no NUL' % (what, text))
    return text.encode()


def integer(what: str, number: Any, low: int, high: int) -> int:
    """Returns an integer that ctypes does not cut."""
    try:
        number = operator.index(number)
    except TypeError:
        raise TypeError('%s is %r; it must be an integer' % (what, number)) from None
    if not low <= number <= high:
        raise InvalidArgumentError('%s is %d; allowed are %d to %d' % (what, number, low, high))
    return number


def techniques() -> List[Any]:
    """Returns what the library says of its techniques (tfb_techniques in harness/c/tfb.h)."""
    return json.loads(LIBRARY.tfb_techniques().decode())


def text(function: Any, layer: c_void_p, *arguments: Any) -> Any:
    """Calls a function that writes JSON, and returns what it says."""
    written: Optional[c_char_p] = c_char_p()
    check(function(layer, *arguments, byref(written)))
    return json.loads(written.value.decode())
