"""Parts of a TPU system, from the name of its type and the environment of its hosts."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dmesh.errors import ConfigurationError, TopologyError, TpuNotFoundError

if TYPE_CHECKING:
    from dmesh.tpu.topology import Topology

Coordinates = tuple[int, int, int, int]
"""x, y and z of a chip, and the number of one of its cores."""


@dataclass(frozen=True)
class Generation:
    """Common facts of all TPU systems of one generation."""

    cores_per_chip: int
    """Cores of a chip, each a device."""
    counts_cores: bool
    """True if the number in the type's name counts cores; otherwise it counts chips."""
    sizes: Mapping[int, tuple[int, int, int]]
    """Chips along x, y and z, by the number of chips, of the usual systems."""
    single_hosts: tuple[int, ...] = (1, 4)
    """Numbers of chips that one host can have."""
    cubes: bool = False
    """True if there are larger systems, too, of cubes of 4 * 4 * 4 chips."""


_FLAT = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1), 16: (4, 4, 1), 32: (4, 8, 1), 64: (8, 8, 1),
         128: (8, 16, 1), 256: (16, 16, 1), 512: (16, 32, 1), 1024: (32, 32, 1)}  # fmt: skip
_DEEP = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}


def _flat(*chips: int) -> dict[int, tuple[int, int, int]]:
    return {number: _FLAT[number] for number in chips}


_V5E = Generation(1, False, _flat(1, 4, 8, 16, 32, 64, 128, 256), (1, 4, 8))
_GENERATIONS = {
    "v2": Generation(2, True, _flat(4, 16, 32, 64, 128, 256)),
    "v3": Generation(2, True, _flat(4, 16, 32, 64, 128, 256, 512, 1024)),
    "v4": Generation(2, True, _DEEP, cubes=True),
    "v5litepod": _V5E,
    "v5e": _V5E,
    "v5p": Generation(2, True, _DEEP, cubes=True),
    "v6e": Generation(1, False, _flat(1, 4, 8, 16, 32, 64, 128, 256), (1, 4, 8)),
}
_CUBE = 4
_MOST_CHIPS = 16_384
_TYPE = re.compile(r"([a-z0-9]{1,16})-([0-9]{1,6})", re.ASCII)
_BOUNDS = re.compile(r"[1-9][0-9]{0,3}([x,][1-9][0-9]{0,3}){1,2}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,6}", re.ASCII)


@dataclass(frozen=True)
class TpuSystem:
    """A TPU system: its chips and their cores, and how many of them a host has.

    `TpuSystem.of("v4-32")` makes one from the name of its type, `TpuSystem.from_environment` from the
    `TPU_*` variables of its hosts.
    """

    accelerator_type: str
    """The name of its type, such as `v4-32`."""
    mesh_shape: Coordinates
    """Numbers of chips along x, y and z, and of cores of each."""
    host_shape: tuple[int, int, int]
    """Numbers of the chips along x, y and z that belong to one host."""
    worker: int | None = field(default=None, compare=False)
    """Number of this process's host; None if unknown."""
    num_workers: int | None = field(default=None, compare=False)
    """Number of hosts that the environment lists; None if it lists none."""

    @classmethod
    def of(cls, accelerator_type: str, topology: str | None = None) -> TpuSystem:
        """Returns the system of a type.

        Args:
            accelerator_type: `v2-8`, `v3-32`, `v4-16`, `v5litepod-8` or `v5e-8`, `v5p-128`, `v6e-4` and so
                on. The number is that of cores up to v4 and for v5p, and that of chips otherwise.
            topology: Chips along x, y and z, such as `2x2x4`, for a system of another shape than the usual
                one of the type.

        Raises:
            TopologyError: There is no such type, or it needs a topology.
        """
        name, generation, chips = _parse_type(accelerator_type)
        if topology is not None:
            shape = _bounds("topology", topology)
            if math.prod(shape) != chips:
                raise TopologyError(
                    f"topology is {topology!r}, which are {math.prod(shape)} chips, but a {name} has {chips}"
                )
        else:
            shape = _usual_shape(name, generation, chips)
        return cls(name, (*shape, generation.cores_per_chip), _usual_host(generation, shape))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> TpuSystem | None:
        """Returns the system that the variables of a TPU host describe; None if they describe none.

        `TPU_ACCELERATOR_TYPE` names its type. Its shape is `TPU_CHIPS_PER_HOST_BOUNDS` times
        `TPU_HOST_BOUNDS` where those are set, else `TPU_TOPOLOGY`, else the usual one of the type: as on a
        TPU host, where the variables can cut a smaller system out of a large one. `TPU_WORKER_ID` and
        `TPU_WORKER_HOSTNAMES` say which host this is, among how many.

        Raises:
            ConfigurationError: A variable is malformed, or they contradict each other.
        """
        accelerator_type = environ.get("TPU_ACCELERATOR_TYPE", "").strip()
        if not accelerator_type:
            return None
        try:
            name, generation, chips = _parse_type(accelerator_type)
            host = _read_bounds(environ, "TPU_CHIPS_PER_HOST_BOUNDS")
            hosts = _read_bounds(environ, "TPU_HOST_BOUNDS")
            shape = _read_bounds(environ, "TPU_TOPOLOGY")
            if host is not None and hosts is not None:
                bounds = _times(host, hosts)
                if shape is not None and shape != bounds:
                    raise TopologyError(
                        f"TPU_TOPOLOGY={environ['TPU_TOPOLOGY']} is another shape than "
                        f"TPU_CHIPS_PER_HOST_BOUNDS * TPU_HOST_BOUNDS, which is {_text(bounds)}; unset one"
                    )
                shape = bounds
            shape = shape or _usual_shape(name, generation, chips)
            host = host or _usual_host(generation, shape)
            if any(size % step for size, step in zip(shape, host, strict=True)):
                raise TopologyError(
                    f"hosts of {_text(host)} chips do not fill a TPU system of {_text(shape)}; check "
                    "TPU_CHIPS_PER_HOST_BOUNDS"
                )
            system = cls(name, (*shape, generation.cores_per_chip), host)
            worker, num_workers = _read_workers(environ, system.num_hosts)
        except TopologyError as error:
            raise ConfigurationError(
                f"TPU_ACCELERATOR_TYPE is {accelerator_type!r:.200}: {error}. To do without it, use "
                "device_type='CPU', or unset it"
            ) from error
        return cls(name, system.mesh_shape, host, worker, num_workers)

    @classmethod
    def find(cls, tpu: str | TpuSystem | None, environ: Mapping[str, str]) -> TpuSystem:
        """Returns the TPU system that a program describes.

        Args:
            tpu: The system, or its type; None for what the environment describes. Where the two name the same
                type, the environment says more.
            environ: Environment variables.

        Raises:
            TpuNotFoundError: Neither describes a system.
            TopologyError: There is no such type.
            ConfigurationError: The environment does not describe a system well.
        """
        if isinstance(tpu, TpuSystem):
            return tpu
        if tpu is not None:
            name, _, _ = _parse_type(tpu)
            if environ.get("TPU_ACCELERATOR_TYPE", "").strip().lower() != name:
                return cls.of(tpu)
        described = cls.from_environment(environ)
        if described is None:
            raise TpuNotFoundError(
                "device_type=TPU was asked for, but this machine has no TPU: TPU_ACCELERATOR_TYPE is not "
                "set. dmesh computes with NumPy on the host in any case; to have the logical devices of a "
                "TPU system, set it to a type such as v2-8, or pass tpu='v2-8'. Otherwise use "
                "device_type='CPU'"
            )
        return described

    @property
    def cores_per_chip(self) -> int:
        """Number of cores of a chip."""
        return self.mesh_shape[3]

    @property
    def num_chips(self) -> int:
        """Number of chips of the system."""
        return math.prod(self.mesh_shape[:3])

    @property
    def num_cores(self) -> int:
        """Number of cores of the system: that many devices."""
        return math.prod(self.mesh_shape)

    @property
    def chips_per_host(self) -> int:
        """Number of chips of a host."""
        return math.prod(self.host_shape)

    @property
    def num_hosts(self) -> int:
        """Number of hosts of the system."""
        return self.num_chips // self.chips_per_host

    def cores(self) -> Iterator[Coordinates]:
        """Yields the coordinates of all cores, host by host; the core varies fastest, then x, y and z."""
        width, height, depth, cores = self.mesh_shape
        dx, dy, dz = self.host_shape
        hosts = itertools.product(range(0, depth, dz), range(0, height, dy), range(0, width, dx))
        for z, y, x in hosts:
            for k, j, i, core in itertools.product(range(dz), range(dy), range(dx), range(cores)):
                yield x + i, y + j, z + k, core

    def share(self, task: int, num_tasks: int) -> tuple[Coordinates, ...]:
        """Returns the coordinates of one task's cores, by device.

        All tasks have equally many. Where the environment lists the system's hosts, each host has equally
        many tasks, and `worker` says whose cores are this task's.

        Args:
            task: The task.
            num_tasks: How many tasks share the system.

        Raises:
            TopologyError: So many tasks cannot share it.
        """
        size = self._share_size(num_tasks)
        workers = self.num_workers or 1
        if num_tasks % workers:
            raise TopologyError(
                f"TPU_WORKER_HOSTNAMES lists {workers} hosts, but there "
                f"{'is 1 client' if num_tasks == 1 else f'are {num_tasks} clients'}; start one client on "
                "each host, and tell them of each other with DTENSOR_JOBS or a cluster resolver. Without the "
                "TPU system, use device_type='CPU'"
            )
        position = task
        if self.worker is not None and workers > 1:
            clients = num_tasks // workers
            position = self.worker * clients + task % clients
        return tuple(itertools.islice(self.cores(), position * size, (position + 1) * size))

    def topology(self, num_tasks: int | None = None) -> Topology:
        """Returns the topology of the whole system.

        Args:
            num_tasks: How many tasks share it equally; as many as it has hosts if None.

        Raises:
            TopologyError: So many tasks cannot share it equally.
        """
        from dmesh.tpu.topology import Topology  # needs NumPy; who only counts devices does without

        size = self._share_size(self.num_hosts if num_tasks is None else num_tasks)
        cores = list(self.cores())
        return Topology(
            mesh_shape=self.mesh_shape,
            device_coordinates=[cores[first : first + size] for first in range(0, len(cores), size)],
        )

    def _share_size(self, num_tasks: int) -> int:
        if num_tasks < 1 or self.num_cores % num_tasks:
            raise TopologyError(
                f"the {self.num_cores} cores of a {self.accelerator_type} cannot be shared equally by "
                f"{num_tasks} clients; start as many as it has hosts ({self.num_hosts}), or another divisor"
            )
        return self.num_cores // num_tasks


def _parse_type(accelerator_type: object) -> tuple[str, Generation, int]:
    """Returns the name of a type as it is written, its generation, and its number of chips."""
    name = accelerator_type.strip().lower() if isinstance(accelerator_type, str) else ""
    match = _TYPE.fullmatch(name)
    generation = _GENERATIONS.get(match[1]) if match else None
    if match is None or generation is None:
        raise TopologyError(
            f"{accelerator_type!r:.200} is not a known type of TPU; expected a generation "
            f"({', '.join(_GENERATIONS)}), a dash and a number, such as v2-8"
        )
    number = int(match[2])
    chips = number // generation.cores_per_chip if generation.counts_cores else number
    whole = number % generation.cores_per_chip == 0 or not generation.counts_cores
    if not whole or not 1 <= chips <= _MOST_CHIPS:
        raise TopologyError(
            f"there is no {name}: expected a number from {generation.cores_per_chip}"
            f"{' up, even' if generation.counts_cores else ' up'}, and at most {_MOST_CHIPS} chips"
        )
    return name, generation, chips


def _usual_shape(name: str, generation: Generation, chips: int) -> tuple[int, int, int]:
    """Returns the number of chips along x, y and z of a system of which only the size is known."""
    if chips in generation.sizes:
        return generation.sizes[chips]
    cubes, rest = divmod(chips, _CUBE**3)
    if not generation.cubes or rest:
        usual = [
            number * (generation.cores_per_chip if generation.counts_cores else 1)
            for number in generation.sizes
        ]
        more = " and multiples of 128" if generation.cubes else ""
        raise TopologyError(
            f"a {name} is not usual (those are {', '.join(map(str, usual))}{more}); say how its chips lie, "
            "with TPU_TOPOLOGY or topology, as in 2x2x4"
        )
    sides = [
        (x, y, cubes // (x * y))
        for x in range(1, cubes + 1)
        if x**3 <= cubes and cubes % x == 0
        for y in range(x, cubes // x + 1)
        if x * y * y <= cubes and cubes % (x * y) == 0
    ]
    x, y, z = min(sides, key=sum)
    return x * _CUBE, y * _CUBE, z * _CUBE


def _usual_host(generation: Generation, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Returns how many chips along x, y and z one host has."""
    if math.prod(shape) in generation.single_hosts:
        return shape
    x, y, z = (math.gcd(size, most) for size, most in zip(shape, (2, 2, 1), strict=True))
    return x, y, z


def _bounds(what: str, text: object) -> tuple[int, int, int]:
    """Reads `2x2x4` or `2,2,4`; a third number that is left out is 1."""
    if not isinstance(text, str) or not _BOUNDS.fullmatch(text.strip()):
        raise TopologyError(f"{what} is {text!r:.200}; expected chips along x, y and z, as in 2x2x4 or 2,2,1")
    x, y, z, *_ = (*(int(number) for number in re.split("[x,]", text.strip())), 1)
    if x * y * z > _MOST_CHIPS:
        raise TopologyError(f"{what} is {text!r:.200}; at most {_MOST_CHIPS} chips are supported")
    return x, y, z


def _read_bounds(environ: Mapping[str, str], variable: str) -> tuple[int, int, int] | None:
    text = environ.get(variable, "").strip()
    return _bounds(variable, text) if text else None


def _read_workers(environ: Mapping[str, str], num_hosts: int) -> tuple[int | None, int | None]:
    """Returns on which host this process is, among how many, as far as the environment says."""
    names = [name.strip() for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
    if len(names) > 1 and len(names) != num_hosts:
        raise TopologyError(
            f"TPU_WORKER_HOSTNAMES lists {len(names)} hosts, but such a TPU system has {num_hosts}; check "
            "it, and TPU_TOPOLOGY, TPU_CHIPS_PER_HOST_BOUNDS and TPU_HOST_BOUNDS"
        )
    text = environ.get("TPU_WORKER_ID", "").strip()
    if not text:
        return None, len(names) or None
    if not _NUMBER.fullmatch(text) or int(text) >= num_hosts:
        raise TopologyError(
            f"TPU_WORKER_ID is {text!r:.200}; expected an integer from 0 to {num_hosts - 1}, the number of "
            "one of the hosts"
        )
    return int(text), len(names) or None


def _times(left: Sequence[int], right: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (a * b for a, b in zip(left, right, strict=True))
    if x * y * z > _MOST_CHIPS:
        raise TopologyError(f"{x}x{y}x{z} chips are more than the {_MOST_CHIPS} that are supported")
    return x, y, z


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
