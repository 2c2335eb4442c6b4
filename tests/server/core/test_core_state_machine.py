"""The core against a simple model, in random histories with crashes of clients and of the server."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.server.core.barrier_model import Client
from tests.server.core.cluster_model import MARGIN, PARTICIPANTS, TASKS, WORKERS, ClusterModel
from tests.server.core.driving import worker

from dmesh_server.core.effects import (
    Attached,
    Done,
    Registered,
)
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import (
    Attach,
    EnterBarrier,
    Evidence,
    Heartbeat,
    Leave,
    ReportStatus,
    ReportWaiting,
    SessionClosed,
    Stalled,
    Tick,
)
from dmesh_server.core.model import (
    Activity,
    Liveness,
    MemberState,
)


class ClusterMachine(ClusterModel):
    """The rules of members, barriers, time and crashes."""

    # Membership.

    @rule(index=WORKERS)
    def register(self, index: int) -> None:
        client = self.clients.get(index)
        if client is not None:
            event = self.d.register(index, client.incarnation, settings=self.settings)
            answer = self.do(event)
            assert isinstance(answer, Registered)
            assert answer.rejoined == client.rejoined
            self.sign(client)
            return
        self.incarnations += 1
        answer = self.do(self.d.register(index, self.incarnations, settings=self.settings))
        state = self.departed.get(index)
        fallen = {i for i, state in self.departed.items() if state is not MemberState.LEFT}
        rejoins = bool(self.clients) and self.rejoin and index in fallen
        if state is not None and self.clients and not rejoins:
            assert isinstance(answer, CoreError)
            assert answer.kind is ErrorKind.CLUSTER_ENDING
            assert {member.task.index for member in answer.members} == self.clients.keys()
            return
        if self.clients and not self.rejoin and fallen:
            assert isinstance(answer, CoreError)
            assert answer.kind is ErrorKind.CLUSTER_ENDING
            assert {member.task.index for member in answer.members} == fallen
            return
        assert isinstance(answer, Registered)
        assert answer.rejoined == rejoins
        assert answer.settings.restart_policy is self.settings.restart_policy
        if not self.clients:
            self.generation += 1
            self.departed.clear()
            self.former.clear()
            self.begin_generation()
        self.departed.pop(index, None)
        born = self.barriers.now()
        self.clients[index] = Client(index, self.incarnations, self.served(), born, rejoins)

    @rule()
    def join_all(self) -> None:
        for index in range(TASKS):
            self.register(index)
            self.attach(index, again=False)

    @rule(index=WORKERS)
    def intrude(self, index: int) -> None:
        if index in self.clients:
            answer = self.do(self.d.register(index, 7, settings=self.settings))
            assert isinstance(answer, CoreError)
            assert answer.kind is ErrorKind.TASK_TAKEN

    @rule(index=WORKERS, again=st.booleans())
    def attach(self, index: int, again: bool) -> None:
        client = self.someone(index)
        if client is None or (client.session is not None and not again):
            return
        event = self.d.attach(index, client.incarnation)
        # What the old session is told, if anything, does not reach the client; the new one is told at once.
        client.session, client.closed_at = event.session, None
        client.troubled.clear()
        client.asked = None
        answer = self.do(event)
        assert isinstance(answer, Attached)
        self.sign(client)
        self.reconcile(client)
        for name in sorted(client.waits):
            self.present(client, name, 30.0)

    def reconcile(self, client: Client) -> None:
        """Presents what has succeeded, if the server is not the one that told the client."""
        if client.known_to not in (0, self.d.core.server_incarnation):
            event = self.d.present(client.index, client.passed.values(), client.incarnation)
            assert isinstance(self.do(event), Done)
        client.known_to, client.speaks = self.d.core.server_incarnation, True

    @rule(index=WORKERS)
    def break_session(self, index: int) -> None:
        client = self.someone(index)
        if client is not None and client.session is not None:
            session, client.session = client.session, None
            client.closed_at, client.vouched = self.served(), False
            self.take(self.d.apply(SessionClosed(session)))
            (self.probes[index],) = self.d.probes()

    @rule(index=WORKERS, gone=st.booleans())
    def look_for(self, index: int, gone: bool) -> None:
        """The process of somebody who is suspected, or was, is found, or found to be gone."""
        probe, client = self.probes.get(index), self.someone(index)
        if probe is None:
            return
        if client is not None and self.d.core.is_suspected(probe.lease):
            client.vouched, client.killed = client.vouched or not gone, gone
        self.take(self.d.apply(Evidence(probe.cluster, probe.task, probe.lease, gone, "it is gone")))
        self.note_departures()
        assert client is None or not client.killed or self.clients.get(index) is not client

    @rule(index=WORKERS, back=st.booleans())
    def replace_a_process(self, index: int, back: bool) -> None:
        """A process is killed, and another one started for its task slot."""
        self.break_session(index)
        self.look_for(index, gone=True)
        self.register(index)
        if back:
            self.attach(index, again=False)
        for incarnation in self.former.get(index, ()):
            self.stays_out(self.d.register(index, incarnation, request_id="new", settings=self.settings))

    @rule()
    def heartbeats(self) -> None:
        for client in list(self.clients.values()):
            if client.session is not None:
                self.sign(client)
                self.take(self.d.apply(Heartbeat(client.session, 1, client.progress)))

    @rule(index=WORKERS)
    def beat(self, index: int) -> None:
        client = self.someone(index)
        if client is not None and client.session is not None:
            client.progress += 1
            self.sign(client)
            self.take(self.d.apply(Heartbeat(client.session, 1, client.progress)))
            assert self.member(index).liveness is not Liveness.BLOCKED

    @rule(index=WORKERS, age=st.sampled_from([0.0, 3.0, 30.0]))
    def answer(self, index: int, age: float) -> None:
        client = self.someone(index)
        if client is not None and client.session is not None and client.asked is not None:
            self.sign(client)
            activity = Activity("all_reduce", age, ("train.py:9 in step",))
            self.take(self.d.apply(ReportStatus(client.session, client.asked, activity)))
            if age < 4.0:
                assert self.member(index).liveness is Liveness.LIVE, "it gets on, but is called stuck"

    @rule(index=WORKERS, others=st.sets(WORKERS), age=st.sampled_from([0.0, 9.0]))
    def wait_for(self, index: int, others: set[int], age: float) -> None:
        client = self.someone(index)
        if client is not None and client.session is not None:
            self.sign(client)
            tasks = tuple(map(worker, sorted(others)))
            self.take(self.d.apply(ReportWaiting(client.session, "all_reduce", tasks, age)))

    @rule(index=WORKERS, reason=st.sampled_from(["", "why"]), report=st.booleans())
    def go(self, index: int, reason: str, report: bool) -> None:
        client = self.someone(index)
        if client is None:
            return
        event: Any = self.d.report(index, "no") if report else self.d.leave(index, reason)
        event = dataclasses.replace(event, caller=self.d.caller(index, client.incarnation))
        if isinstance(event, Leave):
            self.reconcile(client)
            if not reason:
                client.session = None
        assert isinstance(self.do(event), Done)

    @rule(index=WORKERS, data=st.data())
    def rise_from_the_dead(self, index: int, data: st.DataObject) -> None:
        if self.former.get(index):
            incarnation = data.draw(st.sampled_from(self.former[index]))
            caller = self.d.caller(index, incarnation)
            self.stays_out(self.d.register(index, incarnation, request_id="new", settings=self.settings))
            self.stays_out(Attach(self.d.token(), caller, -1))
            self.stays_out(dataclasses.replace(self.d.set("a"), caller=caller))

    def stays_out(self, event: Any) -> None:
        answer = self.do(event)
        assert isinstance(answer, CoreError)
        assert answer.kind is ErrorKind.FENCED

    # Barriers.

    def present(self, client: Client, name: str, timeout: float | None) -> None:
        assert client.session is not None
        client.waits.add(name)
        client.arrived.add(name)
        self.sign(client)
        listed = tuple(map(worker, PARTICIPANTS[name]))
        instance = client.count(name)
        latest = self.barriers.latest(self.generation, name)
        self.take(self.d.apply(EnterBarrier(client.session, name, instance, listed, timeout)))
        if instance == latest:
            assert name not in client.waits, "whoever comes late was not told the result"
            assert client.finished[name] == instance + 1, "whoever comes late was refused"

    @rule(name=st.sampled_from(sorted(PARTICIPANTS)))
    def meet(self, name: str) -> None:
        for index in PARTICIPANTS[name] or range(TASKS):
            self.enter(index, name, None)

    @rule(
        index=WORKERS, name=st.sampled_from(sorted(PARTICIPANTS)), timeout=st.sampled_from([None, 1.0, 20.0])
    )
    def enter(self, index: int, name: str, timeout: float | None) -> None:
        client = self.someone(index)
        takes_part = not PARTICIPANTS[name] or index in PARTICIPANTS[name]
        if takes_part and client is not None and client.session is not None and name not in client.waits:
            self.present(client, name, timeout)

    @rule(name=st.sampled_from(sorted(PARTICIPANTS)), kill=st.booleans())
    def miss_the_result(self, name: str, kill: bool) -> None:
        """One participant's connection breaks before the last arrives; then, perhaps, the server dies."""
        first, *others = PARTICIPANTS[name] or range(TASKS)
        self.enter(first, name, None)
        self.break_session(first)
        for index in others:
            self.enter(index, name, None)
        if kill and self.generation:
            self.kill_server(0)
        for index in range(TASKS):
            self.attach(index, again=False)

    @rule(victim=WORKERS, name=st.sampled_from(sorted(PARTICIPANTS)), blind=st.booleans(), last=WORKERS)
    def replace_a_process_amid_a_crash(self, victim: int, name: str, blind: bool, last: int) -> None:
        """One participant does not hear of a success, the server forgets it, the process is replaced."""
        self.join_all()
        self.enter(victim, name, None)
        self.break_session(victim)
        self.meet(name)
        self.kill_server(0)
        self.attach(victim, again=False)
        if blind:
            self.replace_a_process(victim, back=True)
            self.enter(victim, name, None)
        for index in range(TASKS):
            if index != last:
                self.attach(index, again=False)

    @rule(index=WORKERS, name=st.sampled_from(sorted(PARTICIPANTS)))
    def cancel(self, index: int, name: str) -> None:
        client = self.someone(index)
        if client is not None:
            event = self.d.cancel(index, name)
            self.sign(client)
            answer = self.do(dataclasses.replace(event, caller=self.d.caller(index, client.incarnation)))
            assert isinstance(answer, Done | CoreError)
            if isinstance(answer, CoreError):
                assert answer.kind is ErrorKind.BARRIER_MISMATCH

    # Time and crashes.

    @rule(times=st.integers(1, 6))
    def live(self, times: int) -> None:
        for _ in range(times):
            self.wait(3.0)
            self.heartbeats()
            self.note_departures()

    @rule(seconds=st.sampled_from([0.01, 0.4, 3.0, 4.9, 5.1, 16.0]))
    def wait(self, seconds: float) -> None:
        end = self.d.now + seconds
        while (due := self.d.core.next_deadline()) is not None and due <= end:
            self.d.now = max(self.d.now, due)
            self.take(self.d.apply(Tick()))
            self.note_departures()
        self.d.now = end
        for client in self.clients.values():
            limits = self.d.limits
            silent = self.served() >= client.last_sign + limits.lease + MARGIN
            if client.session is not None:
                assert not silent or self.member(client.index).liveness is Liveness.BLOCKED
            elif client.closed_at is None:
                assert not silent, "nobody noticed that it is gone"
            else:
                window = limits.suspicion + TASKS * limits.suspicion_per_client
                window = limits.lease if client.vouched else window
                since = max(client.closed_at, client.last_sign)
                assert self.served() < since + window + MARGIN, "nobody noticed that it is gone"

    @rule()
    def stall(self) -> None:
        """The server does not run for a while: nobody is lost for that, and all have a second more."""
        self.stalled += 31.0
        self.d.now += 30.0
        self.take(self.d.apply(Stalled(30.0)))
        self.take(self.d.apply(Tick()))

    @precondition(lambda self: self.generation)
    @rule(kept=st.integers(0, 3))
    def kill_server(self, kept: int) -> None:
        before = self.d.state()
        self.barriers.lost(self.generation, [record.encoded() for record in self.d.lazy[kept:]])
        self.d.restart(kept)
        after = self.d.state()
        assert (after.incarnation, after.epoch, after.jobs, after.vacant) == (
            before.incarnation,
            before.epoch,
            before.jobs,
            before.vacant,
        )
        for old, new in zip(before.members, after.members, strict=True):
            connected = old.state is MemberState.CONNECTED
            assert new.state is (MemberState.REGISTERED if connected else old.state)
            assert (new.task, new.incarnation) == (old.task, old.incarnation)
            assert new.reason == (old.reason if old.state.departed else "")
            assert new.liveness is Liveness.LIVE
        self.unanswered.clear()
        self.watches.clear()
        for client in self.clients.values():
            client.session = client.closed_at = None
            client.last_sign = self.served()
            client.speaks = False
            client.arrived.clear()
            if not client.rejoined:
                # Who neither counts nor has a reason not to cannot say in which instance it was.
                client.waits -= {name for name in client.waits if client.count(name) < 0}


TestCluster = ClusterMachine.TestCase
TestCluster.settings = settings(max_examples=settings().max_examples, stateful_step_count=60)
