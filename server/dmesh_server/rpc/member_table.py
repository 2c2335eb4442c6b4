"""The encoded table of members, kept per epoch: a thousand clients ask for the same one when a job starts."""

from __future__ import annotations

from dataclasses import dataclass

from dmesh.v1 import coordination_pb2
from dmesh_server.core.model import ClusterState
from dmesh_server.rpc import convert

_FRESH = 1.0
"""Seconds that an encoded table is served; its ages are at most this much behind."""


@dataclass(frozen=True, slots=True)
class _Entry:
    incarnation: int
    epoch: int
    made_at: float
    encoded: bytes


class MemberTable:
    """Encodes the members of clusters, once per epoch and second."""

    def __init__(self) -> None:
        """Make an empty cache."""
        self._entries: dict[str, _Entry] = {}

    def encode(self, state: ClusterState, now: float) -> bytes:
        """Return the `members` of a `GetClusterStateResponse`, encoded.

        Protobuf messages may be concatenated: these bytes are put behind the response's other fields.
        """
        entry = self._entries.get(state.name)
        if (
            entry is None
            or (entry.incarnation, entry.epoch) != (state.incarnation, state.epoch)
            or now - entry.made_at > _FRESH
        ):
            members = (convert.member_to_proto(member, now) for member in state.members)
            encoded = coordination_pb2.GetClusterStateResponse(members=members).SerializeToString()
            entry = _Entry(state.incarnation, state.epoch, now, encoded)
            # Only busy clusters are worth remembering.
            if len(self._entries) >= 64 and state.name not in self._entries:
                self._entries.clear()
            self._entries[state.name] = entry
        return entry.encoded
