"""Tables of the results of `coordination.py`: medians, ranges and ratios."""

from __future__ import annotations

import statistics
from typing import Any

Key = tuple[str, int, str]
"""System, clients, figure."""
Results = dict[Key, list[tuple[int, float]]]
"""Of each figure, the values and their rounds."""

TABLES: tuple[tuple[str, str, bool], ...] = (
    ("join/all_ms", "connect + register + meet, all clients (ms)", False),
    ("barrier/p50_ms", "barrier back to back: last arrival to last release, p50 (ms)", False),
    ("barrier/p99_ms", "... p99 (ms)", False),
    ("barrier/call_p50_ms", "... one call, p50 (ms)", False),
    ("barrier/server_cpu_us_per_call", "... CPU of the server per call (us)", False),
    ("spread/p50_ms", "barrier, arrivals spread over 20 ms: last to last, p50 (ms)", False),
    ("spread/p99_ms", "... p99 (ms)", False),
    ("set/per_s", "sets of 64 bytes, closed loop (calls/s)", True),
    ("set/p50_ms", "... p50 (ms)", False),
    ("set/p99_ms", "... p99 (ms)", False),
    ("set/server_cpu_us_per_call", "... CPU of the server per call (us)", False),
    ("set/client_cpu_us_per_call", "... CPU of the client per call (us)", False),
    ("get/per_s", "gets of 64 bytes, closed loop (calls/s)", True),
    ("get/p50_ms", "... p50 (ms)", False),
    ("get/server_cpu_us_per_call", "... CPU of the server per call (us)", False),
    ("memory/per_client_kib", "server memory per client (KiB, growth since idle)", False),
    ("memory/server_mib", "server memory, all of it (MiB)", False),
    ("detect/all_s", "kill -9 of a client to all others told (s)", False),
    ("machine/foreign_cores", "cores used by other processes meanwhile", False),
)
"""Figures of the tables, their titles, and whether more is better."""


def short(value: float) -> str:
    """Formats with three digits."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def summarize(results: Results) -> list[dict[str, Any]]:
    """Medians, ranges, and ratios within a round."""
    rows = []
    for (system, count, figure), values in results.items():
        numbers = [value for _, value in values]
        row: dict[str, Any] = {
            "system": system,
            "clients": count,
            "figure": figure,
            "median": statistics.median(numbers),
            "min": min(numbers),
            "max": max(numbers),
            "rounds": len(numbers),
        }
        theirs = dict(results.get(("jax", count, figure), []))
        ratios = [value / theirs[turn] for turn, value in values if theirs.get(turn)]
        if ratios and system != "jax":
            row["ratio_to_jax"] = statistics.median(ratios)
        rows.append(row)
    return rows


def print_tables(rows: list[dict[str, Any]], names: list[str]) -> None:
    by = {(row["system"], row["clients"], row["figure"]): row for row in rows}
    for figure, title, more in TABLES:
        counts = sorted({row["clients"] for row in rows if row["figure"] == figure})
        if not counts:
            continue
        compared = [
            name for name in names if name != "jax" and "jax" in names and not figure.startswith("machine")
        ]
        print(f"\n{title}{'; more is better' if more else ''}")
        print(
            f"{'clients':>8} "
            + " ".join(f"{name:>26}" for name in names)
            + " "
            + " ".join(f"{name + '/jax':>14}" for name in compared)
        )
        for count in counts:
            line = f"{count:>8} "
            for name in names:
                row = by.get((name, count, figure))
                cell = f"{short(row['median'])} ({short(row['min'])}-{short(row['max'])})" if row else "-"
                line += f"{cell:>26} "
            for name in compared:
                ratio = by.get((name, count, figure), {}).get("ratio_to_jax")
                line += f"{short(ratio) if ratio is not None else '-':>14} "
            print(line.rstrip())
