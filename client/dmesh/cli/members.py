"""`dmesh members`: the members of a cluster, one a line."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmesh.coordination.members import Member, Task
    from dmesh.v1 import progress_pb2

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Shows the members of a cluster, including departed ones: host and process, last contact with the server, last
progress of the program, and the source line of the main thread."""
_EPILOG = """\
exit code: 0; 3 if --after timed out; 1 if the server does not answer; 2 for an invalid command line or
environment."""
_BAD = ("blocked", "stuck", "lost", "failed")


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.observing import add_target
    from dmesh.cli.output import add_json
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "members", _DESCRIPTION, _EPILOG, execute)
    add_target(parser)
    add_json(parser)
    parser.add_argument(
        "tasks", metavar="TASK", nargs="*", help="show only these: /job:NAME/task:N, or a rank of job worker"
    )
    parser.add_argument(
        "--after", metavar="EPOCH", type=int, help="wait until the cluster's epoch is larger than this"
    )
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=60.0, help="timeout of --after, seconds (default 60)"
    )


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: The command line or the environment cannot work.
        DMeshError: The server does not answer, or refuses.
    """
    from dmesh.cli.observing import Observer
    from dmesh.cli.output import BAD_NEWS, print_failure, print_json, print_table
    from dmesh.coordination.members import Task
    from dmesh.errors import WaitTimeoutError

    with Observer.of(args) as observer:
        if args.after is not None and not observer.wait_for_epoch(args.after, args.timeout):
            message = f"nobody came or went within {args.timeout:g} s"
            print_failure("members", message, WaitTimeoutError, as_json=args.json)
            return BAD_NEWS
        cluster = observer.cluster
        if args.tasks:  # cheap, however large the cluster is
            found = [observer.member(_task(name)) for name in args.tasks]
            taken = [_view(member, None) for member in found if member.incarnation]
            vacant = [_vacant(Task(member.job, member.index)) for member in found if not member.incarnation]
            epoch: dict[str, object] = {}
        else:
            picture = observer.look()
            taken = [
                _view(member, picture.reports.get(Task(member.job, member.index)))
                for member in picture.state.members
            ]
            vacant = [_vacant(task) for task in picture.state.vacant]
            epoch = {"epoch": picture.state.epoch}
    if args.json:
        print_json({"cluster": cluster, **epoch, "members": taken + vacant})
        return 0
    print_table(
        ("RANK", "STATE", "HOST", "PID", "SEEN", "GOT ON", "WHERE", "REASON"),
        [
            (
                view["rank"],
                view["state"],
                view.get("host", ""),
                view.get("pid", ""),
                _age(view.get("last_seen_age")),
                _age(view.get("idle")),
                short(str(view.get("where", ""))),
                view.get("reason", ""),
            )
            for view in (*taken, *vacant)
        ],
        [view["state"] in _BAD for view in (*taken, *vacant)],
    )
    return 0


def _task(name: str) -> Task:
    """Reads the name of a task; a number is a rank of job worker."""
    from dmesh.coordination.members import Task

    return Task("worker", int(name)) if name.isdecimal() else Task.parse(name)


def _vacant(task: Task) -> dict[str, object]:
    return {"rank": task.index, "task": str(task), "state": "vacant"}


def state_of(member: Member) -> str:
    """Returns a member's state or problem in one word."""
    from dmesh.coordination.members import Liveness

    if member.liveness in (Liveness.BLOCKED, Liveness.STUCK):
        return member.liveness.name.lower()
    return member.state.name.lower()


def short(where: str) -> str:
    """Returns `train.py:31 in step` for `/home/me/train.py:31 in step`."""
    path, separator, function = where.rpartition(" in ")
    return f"{path.rpartition('/')[2]}{separator}{function}" if separator else where


def _view(member: Member, said: progress_pb2.MemberProgress | None) -> dict[str, object]:
    view: dict[str, object] = {
        "rank": member.index,
        "task": member.task,
        "state": state_of(member),
        "reason": member.reason,
        "cause": member.cause.name.lower(),
        "code": member.code,
        "incarnation": f"{member.incarnation:016x}",
        "host": member.process.host,
        "pid": member.process.pid,
        "program": member.process.program,
        "dmesh_version": member.process.dmesh_version,
        "devices": [f"{device.type}:{device.index}" for device in member.devices],
        "last_seen_age": member.last_seen_age,
        "registered_age": member.registered_age,
    }
    if said is not None:
        age = said.age_ms / 1000
        view["said_age"] = age
        view["idle"] = said.report.idle_ms / 1000 + age
        view["where"] = said.report.where
        view["operation"] = said.report.operation
    return view


def _age(seconds: object) -> str:
    from dmesh.coordination.explanation import seconds_text

    return seconds_text(seconds) if isinstance(seconds, float) else "-"
