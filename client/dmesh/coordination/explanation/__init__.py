"""Explanation of a waiting cluster: which call it waits in, and which members hold it up.

Drawn from the server's view of the cluster and its members' progress reports, without IO. `dmesh why` and the
server's REST API share it.
"""

from __future__ import annotations

from dmesh.coordination.explanation.causes import Explanation, Suspect, Wait, explain, explain_in_steps
from dmesh.coordination.explanation.evidence import Evidence, line_of
from dmesh.coordination.explanation.text import ranks_text, seconds_text
from dmesh.coordination.explanation.verdict import (
    Verdict,
    describe,
    judge,
    judge_in_steps,
    slowest,
)

__all__ = [
    "describe",
    "Evidence",
    "explain",
    "explain_in_steps",
    "Explanation",
    "judge",
    "judge_in_steps",
    "line_of",
    "ranks_text",
    "seconds_text",
    "slowest",
    "Suspect",
    "Verdict",
    "Wait",
]
