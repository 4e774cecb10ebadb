"""What docs/build.md says of torch's DLPack C exchange API, called by ctypes: the reasons why no binding uses it."""

import ctypes
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)

import pytest
import torch

CAPSULE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
pytestmark = pytest.mark.skipif(CAPSULE is None, reason="this torch has no DLPack C exchange API")


class DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32),
        ("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)), ("byte_offset", c_uint64),
    ]  # fmt: skip


SetError = ctypes.CFUNCTYPE(None, c_void_p, c_char_p, c_char_p)
Allocator = ctypes.PYFUNCTYPE(c_int, POINTER(DLTensor), POINTER(c_void_p), c_void_p, SetError)


class ExchangeApi(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("prev_api", c_void_p),
        (
            "managed_tensor_allocator",
            ctypes.PYFUNCTYPE(c_int, POINTER(DLTensor), POINTER(c_void_p), c_void_p, SetError),
        ),
        ("managed_tensor_from_py_object_no_sync", c_void_p),
        ("managed_tensor_to_py_object_no_sync", ctypes.PYFUNCTYPE(c_int, c_void_p, POINTER(ctypes.py_object))),
        ("dltensor_from_py_object_no_sync", ctypes.PYFUNCTYPE(c_int, ctypes.py_object, POINTER(DLTensor))),
        ("current_work_stream", ctypes.PYFUNCTYPE(c_int, c_int32, c_int32, POINTER(c_void_p))),
    ]


@pytest.fixture(scope="module")
def api():
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = c_void_p, [ctypes.py_object, c_char_p]
    found = ExchangeApi.from_address(pointer(CAPSULE, b"dlpack_exchange_api"))
    assert found.major == 1, "another layout of the table"
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn])
def test_arguments_are_read_as_they_are(api, dtype):
    base = torch.zeros(3, 4, 8, dtype=dtype)
    tensor = base[1:, ::2].requires_grad_() if dtype == torch.float32 else base[1:, ::2]
    view = DLTensor()
    assert api.dltensor_from_py_object_no_sync(tensor, byref(view)) == 0
    assert view.data + view.byte_offset == tensor.data_ptr()
    assert view.shape[: view.ndim] == list(tensor.shape) and view.strides[: view.ndim] == list(tensor.stride())
    assert view.bits == 8 * tensor.element_size() and view.lanes == 1


def test_outputs_of_its_allocator_are_foreign_memory(api):
    """torch.empty's can be resized: their storage is the caching allocator's own, which record_stream asks for too."""
    shape = (c_int64 * 2)(3, 5)
    wanted = DLTensor(device_type=1, ndim=2, code=2, bits=32, lanes=1, shape=shape)
    managed, made = c_void_p(), ctypes.py_object()
    assert api.managed_tensor_allocator(byref(wanted), byref(managed), None, SetError(lambda *_: None)) == 0
    assert api.managed_tensor_to_py_object_no_sync(managed, byref(made)) == 0
    tensor = made.value
    assert (tensor.shape, tensor.dtype) == ((3, 5), torch.float32)
    assert not tensor.untyped_storage().resizable()
    assert torch.empty(3, 5).untyped_storage().resizable()


def test_generators_tell_their_state_in_python_only(api):
    """No entry of the table is about generators; get_offset and set_offset are what Python has."""
    assert not [name for name, _ in ExchangeApi._fields_ if "generator" in name or "seed" in name]
    assert hasattr(torch.Generator, "get_offset") and hasattr(torch.Generator, "set_offset")
