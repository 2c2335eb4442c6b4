"""Animated picture of `dmesh why` for the README, from a real run.

python docs/_site/recording.py        # writes docs/images/why.svg
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

IMAGE = Path(__file__).parents[1] / "images" / "why.svg"
RANKS = 6
PROGRAM = """\
import time

import numpy as np

import dmesh


def load_batch(step, rank):
    if step == 49 and rank == 3:
        time.sleep(3600)  # a file server that does not answer
    return np.ones(20_000)


with dmesh.session("CPU") as me:
    for step in range(50):
        dmesh.collectives.all_reduce(load_batch(step, me.rank))
        if me.rank == 0 and step % 16 == 0:
            print(f"step {step}")
"""
LIMIT = 60.0
"""Seconds within which `dmesh why` must have found the culprit."""

_LINE, _COLUMN, _MARGIN = 20, 8.43, 16
_HOLD = 6.0
"""Seconds for which the last line stays."""
_PAUSE = 2.0
"""Seconds between two lines at most."""
_STYLE = """\
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #c9d1d9; white-space: pre; }
.command { fill: #7ee787; font-weight: 600; }
.headline { fill: #ff7b72; font-weight: 600; }
.line { opacity: 0; }
@media (prefers-reduced-motion: reduce) { .line { opacity: 1 !important; animation: none !important; } }
"""


def record() -> list[tuple[float, str]]:
    """Run the program until `dmesh why` names the culprit; return each line with its time in seconds."""
    dmesh = [sys.executable, "-m", "dmesh"]
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "train.py").write_text(PROGRAM)
        began = time.monotonic()
        shown = [(0.0, f"$ dmesh run -n {RANKS} train.py")]
        command = [*dmesh, "run", "-n", str(RANKS), "train.py"]
        job = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True)  # noqa: S603
        try:
            assert job.stdout is not None
            while not shown[-1][1].endswith("step 48"):
                text = job.stdout.readline().rstrip()
                shown.append((time.monotonic() - began, text))
            while True:
                asked = time.monotonic() - began
                why = subprocess.run(  # noqa: S603
                    [*dmesh, "why", "--after=4"], cwd=directory, capture_output=True, text=True, check=False
                )
                if why.returncode == 3:
                    break
                if asked > LIMIT:
                    raise SystemExit(f"dmesh why found nothing in {LIMIT:g} s: {why.stdout}{why.stderr}")
                time.sleep(0.5)
        finally:
            job.terminate()
            job.wait()
        answered = time.monotonic() - began
        shown += [(asked, ""), (asked, "$ dmesh why")]
        shown += [(answered, line.replace(directory, "~")) for line in why.stdout.splitlines()]
    return shown


def draw(lines: Sequence[tuple[float, str]]) -> str:
    """Return an SVG that shows the lines of a terminal as they came, over and over, without long pauses."""
    lines = list(_without_pauses(lines))
    total = lines[-1][0] + _HOLD
    width = round(max(len(text) for _, text in lines) * _COLUMN + 2 * _MARGIN)
    height = (len(lines) + 1) * _LINE + _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(' '.join(text for _, text in lines if text))}</title>",
            f"<style>{_STYLE}{''.join(_keyframes({when for when, _ in lines}, total))}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
            *(_text(number, when, text, total) for number, (when, text) in enumerate(lines, 1) if text),
            "</svg>",
            "",
        ]
    )


def _without_pauses(lines: Iterable[tuple[float, str]]) -> Iterable[tuple[float, str]]:
    before = shown = 0.0
    for when, text in lines:
        shown += min(when - before, _PAUSE)
        before = when
        yield shown, text


def _keyframes(times: Iterable[float], total: float) -> Iterable[str]:
    for when in sorted(times):
        share = 100 * when / total
        before = f"0%, {share:.2f}% {{ opacity: 0; }} " if share else ""
        yield f"@keyframes {_name(when)} {{ {before}{share + 0.01:.2f}%, 100% {{ opacity: 1; }} }}\n"


def _name(when: float) -> str:
    return f"at{round(1000 * when)}"


def _text(number: int, when: float, text: str, total: float) -> str:
    kind = "command" if text.startswith("$") else "headline" if "is holding up" in text else ""
    style = f"animation: {_name(when)} {total:.2f}s infinite"
    place = f'x="{_MARGIN}" y="{number * _LINE + _MARGIN // 2}"'
    look = f'class="{f"line {kind}".strip()}" {place} style="{style}" xml:space="preserve"'
    return f"<text {look}>{escape(text)}</text>"


if __name__ == "__main__":
    IMAGE.write_text(draw(record()))
