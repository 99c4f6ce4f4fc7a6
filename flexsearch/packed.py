"""Records of arrays that compiled code takes by one pointer.

numba passes a named tuple of arrays by value, at least seven words for each array: functions that hand on 170 arrays
take seconds to compile, and every call from Python types and unpacks them all. A class marked :func:`packed` is passed
as a pointer to a block of array descriptors instead, which is made once for each record; a field is read from the block
where it is used. Descriptors do not change while compiled code runs, and LLVM is told so: it moves their loads out of
loops.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any, Final, TypeVar, cast, get_args, get_type_hints

import numpy as np
from llvmlite import ir
from numba import typeof, types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed, lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import NativeValue, models, register_model, typeof_impl, unbox

T = TypeVar("T", bound=tuple[Any, ...])

_WORD: Final = 8


class PackedType(types.Type):
    """Type of a record in compiled code. ``fields``: name -> (its type, place of its first word in the block)."""

    def __init__(self, name: str, fields: dict[str, tuple[Any, int]]) -> None:
        self.fields = fields
        super().__init__(name=name)


def packed(cls: type[T]) -> type[T]:
    """Class decorator for a ``NamedTuple`` whose fields are C-contiguous arrays or packed records: compiled code takes
    instances by pointer. Fields keep their types: arrays are not resized in place while a record is in use."""
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    record = type(cls.__name__, (_Record, cls), namespace)
    typeof_impl.register(record)(lambda value, context: value.packed_type)
    return cast(type[T], record)


@cache
def dtypes(record: type[Any]) -> dict[str, Any]:
    """Types of the elements of a record's arrays, by field, as the class says."""
    arrays = {name: get_args(hint) for name, hint in get_type_hints(record).items()}
    return {name: get_args(of[1])[0] for name, of in arrays.items() if of}


def zeros(record: type[T], shape: Any = 1, /, **fields: Any) -> T:
    """A record of zeros. ``fields``: shapes of its arrays, or what they are; all others are of ``shape``."""
    values = {name: fields.get(name, shape) for name in cast(Any, record)._fields}
    plain = {name for name, value in values.items() if type(value) in (int, tuple)}
    return record(**{n: np.zeros(value, dtypes(record)[n]) if n in plain else value for n, value in values.items()})


class _Record:
    """What :func:`packed` adds. numba asks for the type of the first record of a kind only, but for the address of
    each: whichever comes first makes the block."""

    def __getattr__(self, name: str) -> Any:
        """``packed_type``, the record's type in compiled code, and ``packed_address``, where the block of its
        descriptors is. They become plain attributes: every call from Python asks for the address of every record."""
        if name not in ("packed_type", "packed_address"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._pack()
        return self.__dict__[name]

    def __reduce__(self) -> tuple[Any, ...]:
        """Of its fields alone: a copy, here or in another process, has descriptors of its own."""
        return type(self), tuple(cast(tuple[Any, ...], self))

    def _pack(self) -> None:
        fields = cast(tuple[Any, ...], self)
        key = (type(self), *(_field_key(value) for value in fields))
        if (packed_type := _TYPES.get(key)) is None:
            packed_type = _TYPES[key] = _make_type(type(self), fields)
        block = np.array([word for value in fields for word in _descriptor(value)], np.uint64)
        self.__dict__.update(packed_type=packed_type, _block=block, packed_address=block.__array_interface__["data"][0])


_TYPES: Final[dict[Any, PackedType]] = {}


def _field_key(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype, value.ndim, value.flags.carray
    return value.packed_type


def _make_type(cls: type, record: Any) -> PackedType:
    fields: dict[str, tuple[Any, int]] = {}
    place = 0
    for name, value in zip(record._fields, record, strict=True):
        field = typeof(value)
        if isinstance(field, types.Array) and not (field.layout == "C" and field.mutable and field.aligned):
            raise TypeError(f"{cls.__name__}.{name} must be a C-contiguous, writable array, not {field}")
        fields[name] = field, place
        place += len(_descriptor(value))
    digest = hashlib.sha256(repr([(n, str(t)) for n, (t, _) in fields.items()]).encode()).hexdigest()
    return PackedType(f"{cls.__name__}_{digest[:12]}", fields)


def _descriptor(value: Any) -> list[int]:
    """Words of a field: of an array its address, number of elements, shape and strides; of a record its block."""
    if isinstance(value, np.ndarray):
        address: int = value.__array_interface__["data"][0]
        return [address, value.size, *value.shape, *value.strides]
    return [value.packed_address]


register_model(PackedType)(models.OpaqueModel)


@unbox(PackedType)
def _unbox(typ: PackedType, value: Any, c: Any) -> NativeValue:
    """The address. Asking for it runs Python code, in which a signal's handler may raise."""
    number = c.pyapi.object_getattr_string(value, "packed_address")
    address = cgutils.alloca_once_value(c.builder, ir.Constant(c.context.get_value_type(typ), None))
    with c.builder.if_then(cgutils.is_not_null(c.builder, number)):
        c.builder.store(c.pyapi.long_as_voidptr(number), address)
        c.pyapi.decref(number)
    return NativeValue(c.builder.load(address), is_error=cgutils.is_null(c.builder, number))


@infer_getattr
class _Fields(AttributeTemplate):
    key = PackedType

    def generic_resolve(self, typ: PackedType, attr: str) -> Any:  # type: ignore[override]  # the base only raises
        field = typ.fields.get(attr)
        return field[0] if field is not None else None


def read_word(builder: Any, block: Any, place: int, kind: Any) -> Any:
    """Code that reads one word of a block. ``kind``: LLVM's type of it."""
    pointer = builder.gep(block, [ir.Constant(ir.IntType(64), _WORD * place)])
    load = builder.load(pointer, typ=kind)
    load.set_metadata("invariant.load", builder.module.add_metadata([]))
    return load


def read_data(context: Any, builder: Any, block: Any, array: Any, place: int) -> Any:
    """Code that reads where the elements of an array are whose descriptor begins at ``place``."""
    return read_word(builder, block, place, context.get_data_type(array.dtype).as_pointer())


def read_size(context: Any, builder: Any, block: Any, place: int, dimension: int) -> Any:
    """Code that reads a dimension's extent of an array whose descriptor begins at ``place``."""
    return read_word(builder, block, place + 2 + dimension, context.get_value_type(types.intp))


@lower_getattr_generic(PackedType)
def read_field(context: Any, builder: Any, typ: PackedType, block: Any, attr: str) -> Any:
    """Code that makes the value of a field from the words of the block."""
    field, place = typ.fields[attr]
    if isinstance(field, PackedType):
        return read_word(builder, block, place, context.get_value_type(field))
    # A value, not numba's structure in memory: LLVM would have to find out that it need not be there.
    size, array = context.get_value_type(types.intp), context.data_model_manager[field]
    item = context.get_constant(types.intp, field.dtype.bitwidth // 8)
    value = ir.Constant(context.get_value_type(field), None)
    value = array.set(builder, value, item, "itemsize")
    value = array.set(builder, value, read_word(builder, block, place + 1, size), "nitems")
    value = array.set(builder, value, read_data(context, builder, block, field, place), "data")
    for k, name in enumerate(("shape", "strides")):
        words = [read_word(builder, block, place + 2 + k * field.ndim + i, size) for i in range(field.ndim)]
        value = array.set(builder, value, cgutils.pack_array(builder, words), name)
    return impl_ret_borrowed(context, builder, field, value)
