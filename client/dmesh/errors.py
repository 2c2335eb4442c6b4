"""Every exception of dmesh. Each also derives from the built-in that a user would catch.

```
DMeshError
├── ConfigurationError (ValueError)
│   ├── JobMismatchError
│   └── BackupFileError
├── AlreadyInitializedError (ValueError), NotInitializedError (ValueError)
├── DeviceError (ValueError), MeshError (ValueError), LayoutError (ValueError)
├── ArgumentTypeError (TypeError)
├── ClusterSpecError (ValueError), DuplicateTaskError (KeyError)
├── ResolverError (RuntimeError)
│   ├── ClusterNotReadyError
│   └── ClusterLookupError (ValueError)
│       ├── ClusterLookupDeniedError (PermissionError)
│       └── ClusterLookupUnavailableError (ConnectionError)
├── TopologyError (ValueError)
│   └── CoordinateError (IndexError)
├── TpuNotFoundError (RuntimeError), a DeviceError
├── CheckpointError (ValueError, OSError)
│   └── RestoreMismatchError (AssertionError)
├── DatasetError (ValueError)
│   ├── FileFormatError
│   └── ShardingError: ShardHintError (RuntimeError), UnshardableSourceError (LookupError)
├── ArrayError (RuntimeError)
│   ├── ImplicitGatherError (TypeError), UnshardableError (TypeError)
│   └── MeshMismatchError (ValueError)
├── InputModeError (NotImplementedError), OutOfRangeError (IndexError), RemoteInputError (RuntimeError)
├── MissingExtraError (ImportError), NativeCoreError (ImportError)
├── AddressInUseError (OSError), HostError (ConnectionError), SharedMemoryError (MemoryError)
├── EngineError (RuntimeError), RankFailedError (RuntimeError)
├── KeptClientsError (RuntimeError), CellError (RuntimeError)
├── CoordinationError (RuntimeError)
│   ├── CoordinatorUnavailableError (ConnectionError)
│   ├── InitializationTimeoutError (TimeoutError)
│   ├── ClientIdTakenError, FencedError, LimitExceededError, StoreUnavailableError, VersionMismatchError
│   ├── AuthenticationError (PermissionError), PermissionDeniedError (PermissionError)
│   ├── StoreLostError (LookupError)
│   ├── BarrierError: BarrierTimeoutError (TimeoutError), BarrierCancelledError,
│   │   BarrierMismatchError (ValueError)
│   ├── KeyExistsError (ValueError), KeyNotFoundError (KeyError), KeyTypeError (TypeError),
│   │   KeyWaitTimeoutError (TimeoutError), WatchCompactedError
│   └── LeaseExpiredError, LockLostError, LockTimeoutError (TimeoutError), WaitTimeoutError (TimeoutError)
├── CollectiveError (RuntimeError)
│   ├── CollectiveMismatchError (ValueError), CollectiveTimeoutError (TimeoutError)
│   ├── CollectiveTypeError (TypeError), CollectiveValueError (ValueError)
│   ├── PeerLostError (ConnectionError)
│   └── PeerAuthenticationError (ConnectionError)
└── StrategyError (RuntimeError)
    ├── StrategyTypeError (TypeError), StrategyValueError (ValueError)
    ├── RemoteFunctionError, FunctionCancelledError
    └── ReplicaError: ReplicaMismatchError (ValueError), ReplicaTimeoutError (TimeoutError)
```
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class DMeshError(Exception):
    """Base of all errors of dmesh."""

    def __str__(self) -> str:
        # KeyError would show the repr of its message, OSError would look for an errno.
        return str(self.args[0]) if self.args else ""


class ConfigurationError(DMeshError, ValueError):
    """A setting, an environment variable or an argument is not usable."""


class JobMismatchError(ConfigurationError):
    """This client's job list or job name differs from the other clients'."""


class BackupFileError(ConfigurationError):
    """A file is not a backup of keys, is damaged, or is of a newer version; nothing was restored."""


class AlreadyInitializedError(DMeshError, ValueError):
    """`initialize_accelerator_system` was called twice, or after devices were already in use."""


class NotInitializedError(DMeshError, ValueError):
    """`initialize_accelerator_system` has not been called."""


class CheckpointError(DMeshError, ValueError, OSError):
    """A checkpoint is missing or damaged, does not match the objects to restore, or cannot be written.

    Nothing that was there before was changed.
    """


class RestoreMismatchError(CheckpointError, AssertionError):
    """What was restored from a checkpoint is less than was asserted; it stays restored."""


class DatasetError(DMeshError, ValueError):
    """A dataset cannot be created, or its elements cannot be batched, split or distributed."""


class FileFormatError(DatasetError):
    """A data file does not have the expected content.

    Attributes:
        path: The file.
        line: The line, counted from 1; None if the file has no lines, or all of it is wrong.
    """

    def __init__(self, message: str, path: str = "", line: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


class ShardingError(DatasetError):
    """A dataset cannot be divided among the workers as its options ask."""


class ShardHintError(ShardingError, RuntimeError):
    """`shard(SHARD_HINT, SHARD_HINT)` is in a dataset that is not distributed with `AutoShardPolicy.HINT`."""


class UnshardableSourceError(ShardingError, LookupError):
    """`AutoShardPolicy.FILE` is asked for, but the dataset does not come from files."""


class InputModeError(DMeshError, NotImplementedError):
    """This kind of strategy or function does not support an option of distributed input."""


class OutOfRangeError(DMeshError, IndexError):
    """A distributed dataset has no more elements."""


class RemoteInputError(DMeshError, RuntimeError):
    """Another worker's input failed, so no worker can go on.

    Attributes:
        worker: Index of the worker.
    """

    def __init__(self, message: str, worker: int = -1) -> None:
        super().__init__(message)
        self.worker = worker


class DeviceError(DMeshError, ValueError):
    """A device or device type does not exist or cannot be used."""


class MeshError(DMeshError, ValueError):
    """A mesh cannot be made, or has no such dimension."""


class LayoutError(DMeshError, ValueError):
    """A layout cannot be made, or does not fit an array."""


class ArrayError(DMeshError, RuntimeError):
    """An operation on a sharded array is not possible as it was asked for; nothing was moved."""


class ImplicitGatherError(ArrayError, TypeError):
    """An operation would make an array larger on each device than its layout says, and was not asked to."""


class UnshardableError(ArrayError, TypeError):
    """Sharded arrays do not support an operation, an argument or a device."""


class MeshMismatchError(ArrayError, ValueError):
    """Arrays of different meshes meet in one operation."""


class ArgumentTypeError(DMeshError, TypeError):
    """An argument has the wrong type."""


class ClusterSpecError(DMeshError, ValueError):
    """A cluster spec cannot be made, or has no such job or task."""


class DuplicateTaskError(DMeshError, KeyError):
    """Two cluster specs that are to be merged have the same task."""


class ResolverError(DMeshError, RuntimeError):
    """A cluster resolver cannot tell who belongs to the cluster: its system is missing, or not ready."""


class ClusterNotReadyError(ResolverError):
    """A member of the cluster, such as a pod or a TPU, is there but does not run."""


class ClusterLookupError(ResolverError, ValueError):
    """The service that manages the cluster does not know the requested object, or its reply is malformed."""


class ClusterLookupDeniedError(ClusterLookupError, PermissionError):
    """The service that manages the cluster refused this program's credentials, or got none."""


class ClusterLookupUnavailableError(ClusterLookupError, ConnectionError):
    """The service that manages the cluster cannot be reached, or is too busy, after several attempts."""


class TopologyError(DMeshError, ValueError):
    """A TPU system, or the use of one, is not as described or does not fit."""


class CoordinateError(TopologyError, IndexError):
    """No device of a TPU system is at these coordinates."""


class TpuNotFoundError(DeviceError, RuntimeError):
    """A TPU system was requested, but none is described or initialized."""


class MissingExtraError(DMeshError, ImportError):
    """An optional part of dmesh is not installed."""


class SharedMemoryError(DMeshError, MemoryError):
    """There is no more memory that could be shared with other processes."""


class NativeCoreError(DMeshError, ImportError):
    """`DMESH_NATIVE=1` asks for the native core, which this installation does not have or cannot load."""


class AddressInUseError(DMeshError, OSError):
    """A port that this process must listen on is taken."""


class EngineError(DMeshError, RuntimeError):
    """Dask or Ray cannot run the ranks of a `dmesh.launch`: too few workers, or no dmesh on them."""


class RankFailedError(DMeshError, RuntimeError):
    """A rank of a `dmesh.launch` failed: its function raised an exception, or its process ended.

    The exception that the function raised is the `__cause__`, if there is one that can be sent.

    Attributes:
        rank: The rank at which the failure began.
        host: Name of its host.
        pid: Its process id there.
        failures: All ranks that failed, each as an error of its own: this one first, then its consequences.
    """

    def __init__(self, message: str, rank: int = -1, host: str = "", pid: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.pid = pid
        self.failures: tuple[RankFailedError, ...] = (self,)


class HostError(DMeshError, ConnectionError):
    """`dmesh run` cannot start clients on one of its hosts: no connection, no dmesh, or another version."""


class ProcessInfo(Protocol):
    """Process of a client that an error names: see `dmesh.coordination.Process`."""

    @property
    def host(self) -> str:
        """Host name, as the process sees it."""

    @property
    def pid(self) -> int:
        """Process id on that host."""


class MemberInfo(Protocol):
    """Client that an error names, a `dmesh.coordination.Member`: this module imports no other one."""

    @property
    def job(self) -> str:
        """Name of the job."""

    @property
    def index(self) -> int:
        """Index within the job: the client id."""

    @property
    def incarnation(self) -> int:
        """Random number of the process; 0 if it never registered."""

    @property
    def state(self) -> Enum:
        """State of the membership: a `dmesh.coordination.MemberState`."""

    @property
    def process(self) -> ProcessInfo:
        """Its process."""

    @property
    def reason(self) -> str:
        """Cause of a loss or failure, in words."""

    @property
    def cause(self) -> Enum:
        """Cause of a departure: a `dmesh.coordination.DepartureCause`."""

    @property
    def code(self) -> int:
        """Code with which it reported an error of its own; 0 for none."""

    @property
    def rank(self) -> int:
        """The client id, by which collectives know it."""

    @property
    def task(self) -> str:
        """Name of the task: `/job:worker/task:2`."""

    def describe(self) -> str:
        """Return its name for people: `/job:worker/task:2 (host h, pid 9)`."""


class CoordinationError(DMeshError, RuntimeError):
    """The coordination server refused a request, or the state of the cluster does not allow it.

    Attributes:
        members: The clients that are missing, were lost, or are in the way.
    """

    def __init__(self, message: str, members: Sequence[MemberInfo] = ()) -> None:
        super().__init__(message)
        self.members = tuple(members)

    @property
    def failures(self) -> tuple[MemberInfo, ...]:
        """The members among `members` that were lost or failed: each with `cause`, `code` and `reason`."""
        return tuple(member for member in self.members if member.state.name in ("LOST", "FAILED"))


class CoordinatorUnavailableError(CoordinationError, ConnectionError):
    """The coordination server does not answer."""


class InitializationTimeoutError(CoordinationError, TimeoutError):
    """Not all clients joined within the time limit; `members` has the missing ones."""


class ClientIdTakenError(CoordinationError):
    """Another process holds this client id; `members` has it."""


class FencedError(CoordinationError):
    """This process was declared lost or failed and may not act for its client id any more."""


class LimitExceededError(CoordinationError):
    """A limit of the server (size, count, quota) would be exceeded."""


class StoreUnavailableError(CoordinationError):
    """The coordination server cannot write to its store, for example because its disk is full.

    Acknowledged changes are safe and reads go on, but nothing can be changed until there is room again.
    """


class StoreLostError(CoordinationError, LookupError):
    """The coordination server came back with a store that lacks data that this process has seen.

    The store is empty, an older copy, or another cluster's: keys, counters and revisions are gone or older.
    Raised once by the next key-value call of each thread, by each that was under way, and by every watch.
    Later calls use the new store. The error is final only if another cluster holds this process's task slot.
    """


class AuthenticationError(CoordinationError, PermissionError):
    """The coordination server wants a token, and got none or an invalid one."""


class PermissionDeniedError(CoordinationError, PermissionError):
    """The role of this process's token does not allow the request."""


class VersionMismatchError(CoordinationError):
    """This client and the coordination server speak no common version of the protocol."""


class BarrierError(CoordinationError):
    """A barrier failed for all participants; `members` has who left, failed or was lost."""


class BarrierTimeoutError(BarrierError, TimeoutError):
    """A barrier's time ran out; `members` has everyone who did not arrive."""


class BarrierCancelledError(BarrierError):
    """A participant cancelled the barrier."""


class BarrierMismatchError(BarrierError, ValueError):
    """The participants do not agree on the barrier."""


class KeyExistsError(CoordinationError, ValueError):
    """The key has a value already."""


class KeyNotFoundError(CoordinationError, KeyError):
    """There is no such key."""


class KeyTypeError(CoordinationError, TypeError):
    """The key's value is not a decimal integer."""


class KeyWaitTimeoutError(CoordinationError, TimeoutError):
    """The key did not appear in time."""


class LeaseExpiredError(CoordinationError):
    """A lease of keys has ended: it was not renewed in time, or revoked; its keys are deleted."""


class LockLostError(CoordinationError):
    """This process no longer holds a lock, a place or leadership: its key's lease has ended."""


class LockTimeoutError(CoordinationError, TimeoutError):
    """A lock, a place or leadership did not become free in time."""


class WaitTimeoutError(CoordinationError, TimeoutError):
    """A wait ended by its time-out."""


class WatchCompactedError(CoordinationError):
    """The server no longer keeps the revision that the watch should start from.

    Attributes:
        oldest_revision: The first revision from which a watch can start; 0 if it is not known.
        revision: The current revision of the key-value store; 0 if it is not known.
    """

    def __init__(self, message: str, oldest_revision: int = 0, revision: int = 0) -> None:
        super().__init__(message)
        self.oldest_revision = oldest_revision
        self.revision = revision


class CollectiveError(DMeshError, RuntimeError):
    """A collective failed."""


class CollectiveMismatchError(CollectiveError, ValueError):
    """The ranks of a group called different collectives, or with different dtypes, shapes or arguments."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A collective's time ran out.

    Attributes:
        missing: Ranks (client ids) that were waited for.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class CollectiveTypeError(CollectiveError, TypeError):
    """The operation is not defined for an array's dtype."""


class CollectiveValueError(CollectiveError, ValueError):
    """An argument of a collective is out of its range; nothing was sent."""


class PeerLostError(CollectiveError, ConnectionError):
    """A peer died, left or failed while it was needed.

    Attributes:
        rank: The peer's client id.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class PeerAuthenticationError(CollectiveError, ConnectionError):
    """A peer could not prove that it belongs to the cluster."""


class KeptClientsError(DMeshError, RuntimeError):
    """A notebook's clients are not running, have ended, or are of another number than requested."""


class CellError(DMeshError, RuntimeError):
    """A notebook's cell, or a request for its variables, failed on a client.

    Attributes:
        ranks: Ranks that failed, the one where it began first.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the ranks' tracebacks, which the message has, and not our own frames."""
        return str(self).splitlines()


class StrategyError(DMeshError, RuntimeError):
    """A function of `dmesh.distribute` was called where it cannot be, or a replica failed."""


class StrategyTypeError(StrategyError, TypeError):
    """An argument of a function of `dmesh.distribute` has the wrong type."""


class StrategyValueError(StrategyError, ValueError):
    """An argument of a function of `dmesh.distribute` has an impossible value; nothing was changed."""


class RemoteFunctionError(StrategyError):
    """A function that a `ClusterCoordinator` had scheduled failed on a worker.

    It is also an instance of the built-in or dmesh error that the function raised, such as `ValueError`.

    Attributes:
        client: The worker's client id.
        kind: Name of the error's class there, such as `builtins.ValueError`.
        traceback: The traceback there, as text.
    """

    def __init__(self, message: str, client: int = -1, kind: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.client = client
        self.kind = kind
        self.traceback = traceback


class FunctionCancelledError(StrategyError):
    """A scheduled function was not run: another one failed, or the `ClusterCoordinator` was closed."""


class ReplicaError(StrategyError):
    """A replica failed, which ends the step of all replicas on all clients.

    Attributes:
        replicas: Ids of the replicas that failed, or that differ from the others.
    """

    def __init__(self, message: str, replicas: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.replicas = tuple(replicas)


class ReplicaMismatchError(ReplicaError, ValueError):
    """The replicas called different collectives, or one ended while the others waited for it."""


class ReplicaTimeoutError(ReplicaError, TimeoutError):
    """A replica did not arrive where the others waited for it."""


__all__ = sorted(
    (name for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, DMeshError)),
    key=str.lower,
)
