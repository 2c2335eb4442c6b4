"""Log lines about the messages to a cluster's members."""

from __future__ import annotations

from dmesh_server.core.effects import BarrierResult, LivenessChange, MembershipChange, Message
from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.model import Liveness, Member
from dmesh_server.telemetry import logs

_BARRIER_FAILURES = (ErrorKind.BARRIER_TIMEOUT, ErrorKind.BARRIER_FAILED, ErrorKind.BARRIER_CANCELLED)


def log_message(message: Message, cluster: str) -> None:
    """Log a message to the sessions of `cluster`, once for all of them, if operators need it."""
    match message:
        case MembershipChange():
            for member in message.departed:
                logs.info(
                    "member_departed",
                    **_describe(member, cluster),
                    state=member.state.name,
                    reason=member.reason,
                    epoch=message.epoch,
                )
            for member in message.rejoined:
                logs.info("member_rejoined", **_describe(member, cluster), epoch=message.epoch)
        case LivenessChange():
            for member in message.members:
                live = member.liveness is Liveness.LIVE
                activity = member.activity
                (logs.info if live else logs.warning)(
                    "member_" + member.liveness.name.lower(),
                    **_describe(member, cluster),
                    reason=member.reason,
                    operation=activity.operation if activity else "",
                    innermost=activity.stack[-1] if activity and activity.stack else "",
                )
        case BarrierResult() if message.error is not None:
            # A client's own mistake is for the client to see; it must not be able to fill the log with it.
            log = logs.warning if message.error.kind in _BARRIER_FAILURES else logs.debug
            log(
                "barrier_failed",
                cluster=cluster,
                barrier=message.name,
                instance=message.instance,
                reason=message.error,
            )
        case _:
            pass


def _describe(member: Member, cluster: str) -> dict[str, object]:
    return {
        "cluster": cluster,
        "task": member.task,
        "host": member.process.host,
        "pid": member.process.pid,
    }
