"""Message classes, each made when it is first asked for.

The modules that protoc writes import protobuf's Python implementation, also where its C one does
all the work, and make a class of every message there is. That is a third of a cold start, for the
ten classes that a container needs. The modules of :mod:`api.proto` leave it to this one instead: it
gives the files' descriptors to the pool of the C implementation, and makes a class when a module is
asked for it. Who imports protobuf's own modules besides gets the same classes.

In a process that is ours alone (:data:`api.alone`), what protobuf adds to its own messages in
Python is left out but for the nanoseconds of a timestamp.

Where protobuf runs on another implementation, everything is made as protoc's modules make it.

Source: protobuf, python/google/protobuf/internal/builder.py; PEP 562.
"""

from __future__ import annotations

import sys

from google.protobuf.internal import api_implementation
from google.protobuf.message import Message

import api

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

    from google.protobuf.descriptor import (
        Descriptor,
        EnumDescriptor,
        FileDescriptor,
    )

# As protobuf's own modules get at it.
_C: Any = getattr(api_implementation, "_c_module", None)
if api_implementation.Type() != "upb":
    _C = None

_WELL_KNOWN: Final = "google/protobuf/"
_HELPERS: Final = "google.protobuf.internal.well_known_types"
_BILLION: Final = 10**9

_classes: dict[str, type[Message]] = {}
# The Python module of each file that was loaded here.
_modules: dict[str, str] = {}


def _forgo_helpers() -> None:
    """Do without most of what protobuf adds to its own messages in Python, ``ToDatetime`` and such.

    The module that has it imports typing, calendar and datetime, for nanoseconds.
    """
    if _HELPERS not in sys.modules:
        lean = type(sys)(_HELPERS, "See api.messages.")
        lean.WKTBASES = {"google.protobuf.Timestamp": _Timestamp}  # type: ignore[attr-defined]
        sys.modules[_HELPERS] = lean


class _Timestamp:
    """What is left of the helpers: a timestamp's nanoseconds since the epoch."""

    __slots__ = ()
    seconds: int
    nanos: int

    def FromNanoseconds(self, nanos: int) -> None:  # noqa: N802 - protobuf's name
        """Set it."""
        self.seconds, self.nanos = divmod(nanos, _BILLION)  # type: ignore[misc]

    def ToNanoseconds(self) -> int:  # noqa: N802 - protobuf's name
        """Read it."""
        return self.seconds * _BILLION + self.nanos


if api.alone and _C is not None:
    _forgo_helpers()


def load(
    module: str, serialized: bytes, well_known: tuple[str, ...] = ()
) -> tuple[FileDescriptor, Callable[[str], Any]]:
    """Load the file that a module was made from. Those that it imports have been loaded.

    Args:
        module: the module's name.
        serialized: the file's descriptor.
        well_known: which of protobuf's own files it imports: ``any``, ``empty`` and the like.

    Returns:
        The descriptor, and the module's ``__getattr__``.
    """
    for name in well_known:
        _load_well_known(name)
    names = sys.modules[module].__dict__
    if _C is None:
        return _load_whole(module, serialized, names)
    file: FileDescriptor = _C.default_pool.AddSerializedFile(serialized)
    _modules[file.name] = module

    def find(name: str) -> Any:
        value = _find(file, name)
        if value is None:
            message = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(message)
        names[name] = value
        return value

    return file, find


def well_known(name: str) -> type[Message]:
    """A message class of protobuf's own.

    Args:
        name: its name, which is that of its file: ``Any``, ``Empty``, ``Timestamp``.
    """
    _load_well_known(name.lower())
    if _C is None:
        kind: type[Message] = getattr(sys.modules[_module_of(name.lower())], name)
        return kind
    return message_class(_C.default_pool.FindMessageTypeByName(f"google.protobuf.{name}"))


def message_class(descriptor: Descriptor) -> type[Message]:
    """The class of a message.

    Args:
        descriptor: what describes it.
    """
    known = _classes.get(descriptor.full_name)
    if known is not None and known.DESCRIPTOR is descriptor:
        return known
    if descriptor.file.name not in _modules:
        from google.protobuf.message_factory import GetMessageClass  # noqa: PLC0415 - not ours

        return GetMessageClass(descriptor)
    return _make(descriptor)


def _find(file: FileDescriptor, name: str) -> Any:
    """The message, the enumeration, or the value of one, that has a name in a file."""
    if name in file.message_types_by_name:
        return message_class(file.message_types_by_name[name])
    if name in file.enum_types_by_name:
        from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper  # noqa: PLC0415

        return EnumTypeWrapper(file.enum_types_by_name[name])
    for kind in file.enum_types_by_name.values():
        if name in kind.values_by_name:
            return _number(kind, name)
    return None


def _number(kind: EnumDescriptor, name: str) -> int:
    return kind.values_by_name[name].number


def _make(descriptor: Descriptor) -> type[Message]:
    """Make a class, with those of all messages that can be in it: the C code needs them."""
    made: type[Message] = _C.MessageMeta(
        descriptor.name,
        (Message,),
        {
            "DESCRIPTOR": descriptor,
            "__module__": _modules[descriptor.file.name],
            "__qualname__": _qualified_name(descriptor),
            **{inner.name: message_class(inner) for inner in descriptor.nested_types},
        },
    )
    _classes[descriptor.full_name] = made
    for field in descriptor.fields:
        if field.message_type is not None:
            message_class(field.message_type)
    return made


def _qualified_name(descriptor: Descriptor) -> str:
    outer = descriptor.containing_type
    return f"{_qualified_name(outer)}.{descriptor.name}" if outer else descriptor.name


def _load_well_known(name: str) -> None:
    """Let the pool know one of protobuf's own files, byte for byte as its module has it."""
    module, file = _module_of(name), f"{_WELL_KNOWN}{name}.proto"
    if file in _modules or (_C is None and module in sys.modules):
        return
    serialized = _serialized(module, file) if _C is not None and module not in sys.modules else b""
    if serialized:
        _C.default_pool.AddSerializedFile(serialized)
    else:
        __import__(module)
    _modules[file] = module


def _serialized(module: str, file: str) -> bytes:
    """What one of protobuf's modules would give to the pool, without running it; or nothing."""
    from importlib.machinery import PathFinder  # noqa: PLC0415 - has the interpreter's own finder

    spec = PathFinder.find_spec(module, sys.modules["google.protobuf"].__path__)
    if spec is None or spec.loader is None:
        return b""
    code = spec.loader.get_code(module)  # type: ignore[attr-defined]
    begin = b"\n" + bytes([len(file)]) + file.encode()  # its first field: the name
    for constant in code.co_consts if code is not None else ():
        if isinstance(constant, bytes) and constant.startswith(begin):
            return constant
    return b""


def _module_of(name: str) -> str:
    return f"google.protobuf.{name}_pb2"


def _load_whole(
    module: str, serialized: bytes, names: dict[str, Any]
) -> tuple[FileDescriptor, Callable[[str], Any]]:
    from google.protobuf import descriptor_pool  # noqa: PLC0415 - see the module
    from google.protobuf.internal import builder  # noqa: PLC0415

    file = descriptor_pool.Default().AddSerializedFile(serialized)
    builder.BuildMessageAndEnumDescriptors(file, names)
    builder.BuildTopDescriptorsAndMessages(file, module, names)

    def find(name: str) -> Any:
        message = f"module {module!r} has no attribute {name!r}"
        raise AttributeError(message)

    return file, find
