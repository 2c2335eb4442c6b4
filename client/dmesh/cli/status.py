"""`dmesh status`: is a cluster well, who is there, how far are its groups."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmesh.cli.observing import Observer, Picture
    from dmesh.v1.progress_pb2 import ClusterSummary

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Shows a cluster: its members by state, what it is waiting for, and the progress of its groups' collectives. If
the server has several clusters, lists them; --cluster picks one. Clusters and groups whose members have all
departed are shown with --all only."""
_EPILOG = """\
exit code: 0 if the cluster is healthy; 3 if a member is lost, failed, blocked or stuck; 1 if the server does
not answer; 2 for an invalid command line or environment."""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the verb to the command line."""
    from dmesh.cli.observing import add_target
    from dmesh.cli.output import add_json, seconds
    from dmesh.cli.verb import add_verb

    parser = add_verb(subparsers, "status", _DESCRIPTION, _EPILOG, execute)
    add_target(parser)
    parser.add_argument("--all", action="store_true", help="also show clusters and groups that are over")
    parser.add_argument("--watch", action="store_true", help="repeat until Ctrl-C")
    parser.add_argument(
        "--interval",
        metavar="S",
        type=seconds,
        default=2.0,
        help="seconds between updates with --watch (default 2)",
    )
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the verb; returns the process's exit code.

    Raises:
        ConfigurationError: The command line or the environment cannot work.
        DMeshError: The server does not answer, or refuses.
    """
    from dmesh.cli.observing import Observer
    from dmesh.cli.output import repeat

    with Observer.of(args) as observer:
        is_one = observer.named or len(_listed(observer.clusters(), args)) == 1
        return repeat(
            partial(_show if is_one else _show_clusters, observer, args),
            args.interval,
            times=None if args.watch else 1,
        )


def _listed(clusters: Sequence[ClusterSummary], args: argparse.Namespace) -> list[ClusterSummary]:
    """Returns the clusters to list: the running ones, or all."""
    return [cluster for cluster in clusters if args.all or not _is_over(cluster)]


def _is_over(cluster: ClusterSummary) -> bool:
    return cluster.present == 0 and cluster.epoch > 0  # a declared one waits for its first member


def _show_clusters(observer: Observer, args: argparse.Namespace) -> int:
    from dmesh.cli.output import print_json, print_json_line, print_table, print_text

    known = observer.clusters()
    clusters = _listed(known, args)
    hidden = len(known) - len(clusters)
    if args.json:
        found = [
            {
                "name": cluster.name,
                "members": cluster.present,
                "tasks": cluster.tasks,
                "epoch": cluster.epoch,
                "over": _is_over(cluster),
            }
            for cluster in clusters
        ]
        answer = {"server": observer.address, "clusters": found, "hidden": hidden}
        (print_json_line if args.watch else print_json)(answer)
        return 0
    over = f"{hidden} cluster{' is' if hidden == 1 else 's are'} over; --all lists them." if hidden else ""
    if not known:
        print_text(
            f"The coordination server at {observer.address} has no cluster: no client has registered yet."
        )
    elif not clusters:
        print_text(f"No cluster is running at {observer.address}. {over}")
    else:
        print_table(
            ("CLUSTER", "MEMBERS", "EPOCH"),
            [(c.name, "over" if _is_over(c) else f"{c.present} of {c.tasks}", c.epoch) for c in clusters],
            [c.present < c.tasks and not _is_over(c) for c in clusters],
        )
        if over:
            print_text(over)
    return 0


def _show(observer: Observer, args: argparse.Namespace) -> int:
    from dmesh.cli.groups import group_views
    from dmesh.cli.loops import loop_views
    from dmesh.cli.output import BAD_NEWS, print_json, print_json_line, print_table, print_text
    from dmesh.coordination.explanation import describe, explain, judge

    picture = observer.look()
    counts, healthy = _health(picture)
    explanation = explain(picture)
    present = {(member.job, member.index) for member in picture.state.members if not member.state.departed}
    shown = picture.of({task for task in picture.reports if args.all or (task.job, task.index) in present})
    views, loops = group_views(shown), loop_views(picture)
    is_over = bool(picture.state.members) and not present
    held_up = {wait.group for wait in explanation.waits if wait.kind == "collective"}
    if args.json:
        (print_json_line if args.watch else print_json)(
            {
                "cluster": picture.cluster,
                "server": picture.address,
                "healthy": healthy,
                "over": is_over,
                "epoch": picture.state.epoch,
                "members": counts,
                "barriers": len(picture.state.barriers),
                "waits": judge(explanation, picture).headline if explanation.waits else None,
                "loops": [dataclasses.asdict(loop) for loop in loops],
                "groups": [dataclasses.asdict(view) for view in views],
            }
        )
        return 0 if healthy else BAD_NEWS
    there = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    how = "waiting" if explanation.waits else "well"
    how = "NOT WELL" if not healthy else "over" if is_over else how
    print_text(
        f"Cluster {picture.cluster!r} at {picture.address}: {how}. "
        f"Members: {there}. Epoch {picture.state.epoch}. {_barriers(picture)}"
    )
    if explanation.waits:
        print_text(describe(judge(explanation, picture)))
    for loop in loops:
        print_text(loop.describe())
    if views:
        print_text("")
        print_table(
            ("GROUP", "RANKS", "CALLS", "BEHIND", "WAITS", "STRAGGLER", "LAST CALL"),
            [
                (
                    view.name,
                    view.size,
                    view.last if view.first == view.last else f"{view.first}-{view.last}",
                    len(view.behind) or "-",
                    "-" if view.waited_share is None else f"{view.waited_share:.0%}",
                    "-" if view.straggler is None else f"rank {view.straggler}",
                    view.call,
                )
                for view in views
            ],
            [view.name in held_up for view in views],
        )
    return 0 if healthy else BAD_NEWS


def _barriers(picture: Picture) -> str:
    number = len(picture.state.barriers)
    return f"{number} pending barrier{'' if number == 1 else 's'}." if number else "No pending barriers."


def _health(picture: Picture) -> tuple[dict[str, int], bool]:
    """Returns how many members there are of each state, and whether none of them is a worry."""
    from dmesh.cli.members import state_of

    names = ("connected", "registered", "blocked", "stuck", "lost", "failed", "left", "vacant")
    counts = dict.fromkeys(names, 0)
    for member in picture.state.members:
        counts[state_of(member)] = counts.get(state_of(member), 0) + 1
    counts["vacant"] = len(picture.state.vacant)
    return counts, not any(counts[name] for name in ("blocked", "stuck", "lost", "failed"))
