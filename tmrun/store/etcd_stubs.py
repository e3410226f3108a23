"""The etcd v3 messages and gRPC stubs out of the unmodified ``etcd3==0.12.0`` package, beside any protobuf from 3.20.3 to 7.

Its generated ``*_pb2`` modules do not import with protobuf 4 or later. Pinning protobuf would harm the user's training
environment, so the three modules are built here instead, from the file descriptors that they carry, in a *private*
descriptor pool: nothing of it can collide with another package's ``rpc.proto``.
May not know: how the stubs are used.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

_SHIMMED_VERSION = "0.12.0"
_MODULES = ("kv", "auth", "rpc")  # in the order in which they import each other


def _serialized_descriptor(source: Path) -> bytes:
    """The ``serialized_pb=`` literal of a generated module, read without running the module."""
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            literal = node.value
            if isinstance(literal, ast.Call):  # _b('...'): latin-1 text in code meant for Python 2 and 3
                literal = literal.args[0]
            value = ast.literal_eval(literal)
            return value.encode("latin-1") if isinstance(value, str) else bytes(value)
    raise ImportError(f"no protobuf descriptor in {source}: reinstall etcd3=={_SHIMMED_VERSION}")


def _message_class(pool: Any, descriptor: Any) -> Any:
    from google.protobuf import message_factory

    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(pool).GetPrototype(descriptor)  # protobuf 3.20


def _module(pool: Any, name: str, source: Path) -> types.ModuleType:
    from google.protobuf import descriptor_pb2
    from google.protobuf.internal import enum_type_wrapper

    proto = descriptor_pb2.FileDescriptorProto.FromString(_serialized_descriptor(source))
    pool.AddSerializedFile(proto.SerializeToString())
    descriptor = pool.FindFileByName(proto.name)
    module = types.ModuleType(name)
    contents: dict[str, Any] = {"DESCRIPTOR": descriptor}
    contents |= {key: _message_class(pool, message) for key, message in descriptor.message_types_by_name.items()}
    for key, enum in descriptor.enum_types_by_name.items():
        contents[key] = enum_type_wrapper.EnumTypeWrapper(enum)
        contents |= {value.name: value.number for value in enum.values}
    vars(module).update(contents)
    return module


def _seed() -> None:
    """Put our modules where ``etcd3.etcdrpc`` will look for its own."""
    from google.protobuf import descriptor_pool

    spec = importlib.util.find_spec("etcd3")
    assert spec is not None and spec.submodule_search_locations, spec
    folder = Path(next(iter(spec.submodule_search_locations))) / "etcdrpc"
    pool = descriptor_pool.DescriptorPool()
    modules = {f"etcd3.etcdrpc.{stem}_pb2": _module(pool, f"etcd3.etcdrpc.{stem}_pb2", folder / f"{stem}_pb2.py") for stem in _MODULES}
    sys.modules.update(modules)


def load() -> Any:
    """Import and return ``etcd3.etcdrpc``."""
    if "etcd3" not in sys.modules and importlib.metadata.version("etcd3") == _SHIMMED_VERSION:
        _seed()
    return importlib.import_module("etcd3.etcdrpc")


rpc: Any = load()
"""Messages (``rpc.PutRequest``), enums (``rpc.Compare``) and stubs (``rpc.KVStub``)."""
