"""Speed of dmesh's collectives beside gloo and MPI. Prints a table, writes JSON and a plot.

    python benchmarks/collectives.py --prepare                  # make the peers' environments (once)
    python benchmarks/collectives.py                            # everything: about an hour
    python benchmarks/collectives.py --quick                    # fewer sizes and rounds: a few minutes
    python benchmarks/collectives.py --ops allreduce --worlds 2 --systems dmesh,dmesh-pure

Each rank of each system is a process that stays for the whole run. In every round each system has its turn,
in random order, so other activity of the machine hits all of them. An iteration lasts as long as on the
slowest rank. The ratio of a case is dmesh's time divided by that of the fastest peer in the same round; the
table has the median of all rounds. Below 1, dmesh is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
HARNESS = Path(os.environ.get("DMESH_BENCH_HARNESS") or ROOT.parent / "shared" / "bench")
PEERS = ("gloo", "ompi4", "ompi5", "mpich4", "mpich5", "ompi4-tcp", "ompi5-tcp")
DEFAULT = ("gloo", "ompi4", "ompi5", "mpich4", "mpich5", "dmesh", "dmesh-shared", "dmesh-results")
OURS = {
    "dmesh": "Dmesh",
    "dmesh-shared": "DmeshShared",
    "dmesh-results": "DmeshResults",
    "dmesh-pure": "DmeshPure",
    "dmesh-tcp": "DmeshTcp",
}
SIZES = (8, 1024, 65_536, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
QUICK = (8, 65_536, 1 << 20, 16 << 20)
COPYING = ("allgather", "alltoall", "sendrecv")
REDUCING = ("allreduce", "reduce_scatter")


def limit(op: str, size: int, ours: str) -> float:
    """The ratio to the best peer that dmesh is held to."""
    if ours in ("dmesh-shared", "dmesh-results") and size >= 1 << 20:
        return 0.35 if op in REDUCING else 0.6
    if ours in ("dmesh-pure", "dmesh-tcp"):
        return 1.0
    if op in REDUCING and size >= 65_536:
        return 0.5
    if op in COPYING and size >= 16 << 20:
        return 1.05
    return 1.0


def ratios(results: list[dict[str, Any]], ours: str) -> list[dict[str, Any]]:
    """One line for each case: dmesh's time over the fastest peer's, by round."""
    cases: dict[tuple[int, str, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for result in results:
        cases[result["world"], result["op"], result["size"]][result["backend"]] = result
    lines = []
    for (world, op, size), found in cases.items():
        peers = {name: found[name] for name in found if name in PEERS}
        if ours not in found or not peers:
            continue
        mine = found[ours]["round_medians_us"]
        rounds = range(min(len(mine), *(len(peer["round_medians_us"]) for peer in peers.values())))
        by_round = [mine[r] / min(peer["round_medians_us"][r] for peer in peers.values()) for r in rounds]
        best = min(peers, key=lambda name: peers[name]["median_us"])
        lines.append(
            {
                "world": world,
                "op": op,
                "size": size,
                "us": found[ours]["median_us"],
                "best": best,
                "best_us": peers[best]["median_us"],
                "gloo_us": peers.get("gloo", {}).get("median_us"),
                "ratio": statistics.median(by_round),
                "limit": limit(op, size, ours),
            }
        )
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """The ratios as Markdown."""
    out = ["| ranks | op | size | dmesh | best peer | ratio | limit | |", "|---|---|---|---|---|---|---|---|"]
    for line in lines:
        held = "" if line["ratio"] <= line["limit"] else "misses"
        out.append(
            f"| {line['world']} | {line['op']} | {_size(line['size'])} | {_time(line['us'])} | "
            f"{_time(line['best_us'])} ({line['best']}) | {line['ratio']:.2f} | {line['limit']:g} | {held} |"
        )
    return "\n".join(out)


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Draws the ratios over the sizes; needs matplotlib, which is told if it is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)
        return
    worlds = sorted({line["world"] for line in lines})
    figure, axes = pyplot.subplots(1, len(worlds), figsize=(6 * len(worlds), 4), squeeze=False, sharey=True)
    for axis, world in zip(axes[0], worlds, strict=True):
        for op in dict.fromkeys(line["op"] for line in lines):
            mine = [line for line in lines if line["world"] == world and line["op"] == op and line["size"]]
            axis.plot([line["size"] for line in mine], [line["ratio"] for line in mine], marker="o", label=op)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="bytes", title=f"{world} ranks")
    axes[0][0].set_ylabel("time / time of the best peer")
    axes[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Runs the harness, and says what its figures mean."""
    options = _options()
    if options.prepare:
        subprocess.run(["bash", str(options.harness / "setup_peers.sh")], check=True)
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    systems = options.systems.split(",")
    command = [sys.executable, str(options.harness / "bench_peers.py"), "--out", str(options.out)]
    command += ["--backends", ",".join(name for name in systems if name in PEERS)]
    for name in systems:
        if name in OURS:
            adapter = f"collectives_adapter:{OURS[name]}"
            command += ["--backend", f"{name}={sys.executable},{adapter},{HERE}:{ROOT / 'client'}"]
    command += ["--worlds", options.worlds, "--ops", options.ops, "--sizes", options.sizes]
    command += ["--rounds", str(options.rounds), "--budget", str(options.budget)]
    subprocess.run(command + (["--netns"] if options.netns else []), check=True)
    report = json.loads(options.out.with_suffix(".json").read_text())
    report["machine"] = {"cores": os.cpu_count(), "cpu": platform.processor(), "kernel": platform.release()}
    report["ratios"] = {}
    for name in systems:
        if name in OURS and (lines := ratios(report["results"], name)):
            report["ratios"][name] = lines
            missed = sum(line["ratio"] > line["limit"] for line in lines)
            print(f"\n## {name}: {missed} of {len(lines)} cases miss their limit\n\n{table(lines)}")
            plot(lines, options.out.with_name(f"{options.out.name}-{name}.png"))
    options.out.with_suffix(".json").write_text(json.dumps(report, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prepare", action="store_true", help="make the peers' environments; needs root")
    parser.add_argument("--harness", type=Path, default=HARNESS, help="directory of bench_peers.py")
    parser.add_argument("--systems", default=",".join(DEFAULT))
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument(
        "--ops", default="allreduce,allgather,reduce_scatter,broadcast,alltoall,sendrecv,barrier"
    )
    parser.add_argument("--sizes", help="sizes in bytes")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--budget", type=float, default=0.25, help="seconds for each system, case and round")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--netns", action="store_true", help="put each rank in a network namespace (netns.sh up N)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "collectives")
    options = parser.parse_args()
    options.sizes = options.sizes or ",".join(map(str, QUICK if options.quick else SIZES))
    options.rounds = options.rounds or (3 if options.quick else 5)
    if not (options.harness / "bench_peers.py").exists():
        parser.error(
            f"there is no bench_peers.py in {options.harness}: give --harness or DMESH_BENCH_HARNESS"
        )
    return options


def _size(nbytes: int) -> str:
    for unit, scale in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes // scale} {unit}"
    return f"{nbytes} B" if nbytes else "-"


def _time(us: float) -> str:
    return f"{us / 1000:.2f} ms" if us >= 1000 else f"{us:.1f} µs"


if __name__ == "__main__":
    main()
