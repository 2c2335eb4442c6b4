"""Single-flight cache of slow answers: each is worked out once for all callers within its lifetime."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_MOST_KEPT = 16


def freshness(members: int, least: float = 1.0) -> float:
    """Return the lifetime in seconds of an answer read from this many members.

    The load that readers cause must not grow with the size of the clusters they look at.
    """
    return max(least, members / 150)


@dataclass(slots=True, eq=False)
class _Kept(Generic[V]):
    answer: V
    until: float
    end: asyncio.TimerHandle
    """Forgets it then; cancelled if it is not kept for so long."""


class Shared(Generic[K, V]):
    """Single-flight cache: one caller works an answer out, and all callers get it during its lifetime.

    Callers that come while an answer is being worked out wait for it. A caller that gives up does not stop
    the others. An expired answer is dropped; failures are not kept.
    """

    def __init__(self, now: Callable[[], float], work: Callable[[K], Awaitable[tuple[V, float]]]) -> None:
        """Have no answers yet.

        Args:
            now: The server's monotonic seconds.
            work: Works an answer out and says for how many seconds, from when it began, it is good.
        """
        self._now = now
        self._work = work
        self._kept: OrderedDict[K, _Kept[V]] = OrderedDict()
        self._under_way: dict[K, asyncio.Task[V]] = {}
        self._one_at_a_time = asyncio.Lock()

    async def of(self, asked: K) -> V:
        """Return an answer within its lifetime.

        Raises:
            CoreError: The subject does not exist.
        """
        kept = self._kept.get(asked)
        if kept is not None and self._now() < kept.until:
            self._kept.move_to_end(asked)
            return kept.answer
        task = self._under_way.get(asked)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._answer(asked), name="dmesh-shared-answer")
            self._under_way[asked] = task
            task.add_done_callback(lambda done: self._over(asked, done))
        await asyncio.wait((task,))  # a caller that gives up cancels its own waiting alone
        return task.result()

    async def _answer(self, asked: K) -> V:
        async with self._one_at_a_time:
            began = self._now()
            answer, good = await self._work(asked)
            self._keep(asked, answer, began + good)
        return answer

    def _keep(self, asked: K, answer: V, until: float) -> None:
        former = self._kept.pop(asked, None)
        if former is not None:
            former.end.cancel()
        loop, seconds = asyncio.get_running_loop(), max(0.0, until - self._now())
        self._kept[asked] = _Kept(answer, until, loop.call_later(seconds, self._kept.pop, asked, None))
        while len(self._kept) > _MOST_KEPT:
            _, oldest = self._kept.popitem(last=False)
            oldest.end.cancel()

    def _over(self, asked: K, task: asyncio.Task[V]) -> None:
        del self._under_way[asked]
        if not task.cancelled():
            task.exception()  # waiting callers get the exception; without any, nobody needs it
