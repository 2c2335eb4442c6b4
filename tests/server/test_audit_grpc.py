"""Changes of keys over gRPC in the audit log: those of callers without a task, and of nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from tests.server.raw_client import PATIENCE, PATIENT, RawClient

from dmesh.security.tokens import Role, Token, TokenSource, generate
from dmesh.v1 import key_value_pb2 as pb
from dmesh_server.listening import Address
from dmesh_server.rpc.server import RpcServer
from dmesh_server.runtime import Runtime
from dmesh_server.security.access import Access
from dmesh_server.security.audit import AuditEntry, AuditLog
from dmesh_server.store.memory import MemoryStore

TOKEN = generate()


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    return AuditLog(tmp_path)


@pytest.fixture
async def connect(tmp_path: Path, log: AuditLog) -> AsyncIterator[Callable[[int | None], RawClient]]:
    """Makes clients of a server with an audit log; None is one without a task."""
    path = tmp_path / "tokens"
    path.write_text(f"{TOKEN} role=admin name=ops\n")
    path.chmod(0o600)
    runtime, made = Runtime(MemoryStore(), PATIENT), []
    await runtime.start()
    rpc = RpcServer(runtime, access=Access(TokenSource("the test", path=path)), audit_log=log)
    address = await rpc.start(Address("127.0.0.1", 0))

    def make(index: int | None) -> RawClient:
        made.append(RawClient(str(address), index, token=TOKEN))
        return made[-1]

    yield make
    for client in made:
        await client.channel.close()
    await runtime.shutdown()
    await rpc.stop(0.0)
    await runtime.close()
    log.close()


async def change_keys(client: RawClient) -> None:
    """Makes every kind of change of keys, and some that change nothing."""
    own, kv = {"caller": client.caller}, client.key_value
    for at in range(2):
        await kv.Set(
            pb.SetRequest(request_id=f"s{at}", key=f"a{at}", value=b"secret", **own), timeout=PATIENCE
        )
    await kv.Increment(pb.IncrementRequest(request_id="i", key="n", amount=2, **own), timeout=PATIENCE)
    swap = pb.CompareAndSetRequest(request_id="c", key="a0", expected=b"other", value=b"secret", **own)
    assert not (await kv.CompareAndSet(swap, timeout=PATIENCE)).succeeded
    operations = [pb.Operation(set=pb.SetRequest(key=key, value=b"secret")) for key in ("t0", "t1")]
    await kv.Transaction(pb.TransactionRequest(request_id="t", then=operations, **own), timeout=PATIENCE)
    await kv.GrantLease(
        pb.GrantLeaseRequest(request_id="g", lease=255, ttl_ms=60_000, **own), timeout=PATIENCE
    )
    leased = pb.SetRequest(request_id="l", key="l", value=b"secret", lease=255, **own)
    await kv.Set(leased, timeout=PATIENCE)
    await kv.RevokeLease(pb.RevokeLeaseRequest(request_id="v", lease=255, **own), timeout=PATIENCE)
    await kv.Delete(pb.DeleteRequest(request_id="d", key="a0", **own), timeout=PATIENCE)
    await kv.Delete(pb.DeleteRequest(request_id="p", key="a", is_prefix=True, **own), timeout=PATIENCE)
    await kv.Delete(pb.DeleteRequest(request_id="q", key="a", is_prefix=True, **own), timeout=PATIENCE)


async def read_keys(client: RawClient) -> None:
    own, kv = {"caller": client.caller}, client.key_value
    await kv.Get(pb.GetRequest(key="n", **own), timeout=PATIENCE)
    await kv.List(pb.ListRequest(**own), timeout=PATIENCE)
    read = pb.TransactionRequest(request_id="r", then=[pb.Operation(list=pb.ListRequest())], **own)
    await kv.Transaction(read, timeout=PATIENCE)


async def entries(log: AuditLog) -> list[AuditEntry]:
    return (await log.latest(100))[::-1]


async def test_changes_by_callers_without_a_task_are_audited(
    connect: Callable[[int | None], RawClient], log: AuditLog
) -> None:
    member, operator = connect(0), connect(None)
    await member.register()
    await change_keys(operator)
    await read_keys(operator)
    found = await entries(log)
    assert [(entry.action, entry.target, entry.outcome) for entry in found] == [
        ("set_key", "c: a0", "done"),
        ("set_key", "c: a1", "done"),
        ("increment_key", "c: n", "done"),
        ("change_keys", "c: a0", "unchanged"),
        ("change_keys", "c: t0, t1", "done"),
        ("set_key", "c: l", "done"),
        ("revoke_lease", "c: 00000000000000ff", "done"),
        ("delete_key", "c: a0", "done"),
        ("delete_keys", "c: a*", "done"),
        ("delete_keys", "c: a*", "unchanged"),
    ]
    who = Token(TOKEN, Role.ADMIN, "ops").label
    assert {(entry.who, entry.remote) for entry in found} == {(who, "127.0.0.1")}
    assert "secret" not in repr(found)


async def test_changes_by_members_are_not_audited(
    connect: Callable[[int | None], RawClient], log: AuditLog
) -> None:
    member = connect(0)
    await member.register()
    await change_keys(member)
    assert await entries(log) == []


async def test_a_refused_change_is_audited_with_its_refusal(
    connect: Callable[[int | None], RawClient], log: AuditLog
) -> None:
    member, operator = connect(0), connect(None)
    await member.register()
    put = pb.SetRequest(caller=operator.caller, request_id="s", key="k" * 2000, value=b"v")
    with pytest.raises(grpc.aio.AioRpcError):
        await operator.key_value.Set(put, timeout=PATIENCE)
    (entry,) = await entries(log)
    assert (entry.action, entry.outcome) == ("set_key", "INVALID_ARGUMENT")
    assert len(entry.target) == 1000


async def test_backups_and_restores_are_audited(
    connect: Callable[[int | None], RawClient], log: AuditLog
) -> None:
    member, operator = connect(0), connect(None)
    await member.register()
    first = pb.RestoreRequest(caller=operator.caller, keys=1, kvs=[pb.KeyValue(key="k", value=b"v")])
    assert (await operator.key_value.Restore(iter([first]), timeout=PATIENCE)).set == 1
    async for _ in operator.key_value.Backup(pb.BackupRequest(caller=operator.caller)):
        pass
    assert [(entry.action, entry.target, entry.outcome) for entry in await entries(log)] == [
        ("restore_keys", "c: 1 keys set, 0 deleted (revision 1)", "done"),
        ("back_up_keys", "c: 1 keys (revision 1)", "done"),
    ]
