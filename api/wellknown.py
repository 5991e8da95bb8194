"""The messages of protobuf's own that are spoken here, made as :mod:`api.messages` makes all."""

from __future__ import annotations

from api.messages import well_known

TYPE_CHECKING = False
if TYPE_CHECKING:
    from google.protobuf.any_pb2 import Any
    from google.protobuf.empty_pb2 import Empty
else:
    Any, Empty = well_known("Any"), well_known("Empty")

__all__ = ["Any", "Empty"]
