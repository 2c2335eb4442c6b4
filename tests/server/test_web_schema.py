"""The OpenAPI document, held against a server by schemathesis: nothing comes back that it does not tell."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.event_loops import entered
from tests.server.raw_client import PATIENCE, PATIENT
from tests.server.web_server import Web, join_all, serving_web

from dmesh_server.core.effects import KvRevision
from dmesh_server.core.events import EnterBarrier, KvSet
from dmesh_server.core.model import Caller, Task
from dmesh_server.runtime import Runtime
from dmesh_server.store.memory import MemoryStore

EXAMPLES = 40
"""Requests of each kind that are tried for each operation."""


@contextlib.asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Web]:
    runtime = Runtime(MemoryStore(), PATIENT)
    await runtime.start()
    async with serving_web(runtime, directory) as web:
        await join_all(runtime, 2, "train")
        caller = Caller("train", Task("worker", 0), 1000)
        await runtime.request(KvSet(runtime.next_number(), caller, "r", "k", b"v", True), KvRevision)
        session, _ = await runtime.open_session(caller)
        runtime.send(EnterBarrier(session.number, "b", 0, (), None))
        yield web
        await runtime.shutdown()
    await runtime.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    """A server in a thread of its own, with something to see."""
    with entered(serving(tmp_path_factory.mktemp("tokens"))) as web:
        yield web


def document(web: Web) -> dict:
    headers = {"Authorization": f"Bearer {web.tokens['admin']}"}
    return httpx.get(f"{web.url}/openapi.json", headers=headers, trust_env=False, timeout=PATIENCE).json()


def test_the_document_has_descriptions_and_examples(served: Web) -> None:
    described = document(served)
    operations = [
        (method, path, operation)
        for path, methods in described["paths"].items() if path.startswith("/api/v1/")
        for method, operation in methods.items()
    ]  # fmt: skip
    assert len(operations) >= 16
    for method, path, operation in operations:
        where = f"{method} {path}"
        assert operation["description"], where
        assert operation["security"], where
        assert {"200", "401", "403", "421", "422", "503"} <= set(operation["responses"]), where
        assert all(parameter["description"] for parameter in operation.get("parameters", ())), where
    schemas = described["components"]["schemas"]
    for name, schema in schemas.items():
        assert schema["description"], name
        assert all(prop.get("description") for prop in schema["properties"].values()), name
    without = {name for name in schemas if name.endswith("Page") and "examples" not in schemas[name]}
    assert without == {"BarrierPage", "EventPage", "ErrorPage", "MemberPage"}, "their items have them"


@pytest.mark.slow
@pytest.mark.timeout(600)  # some 1,500 requests, however busy the machine is
@pytest.mark.parametrize("good", [True, False], ids=["requests that make sense", "others"])
def test_nothing_undocumented_comes_back(served: Web, good: bool) -> None:
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import CHECKS

    described = document(served)
    # The page has no schema, a stream does not end: they have tests of their own. The token is ours to show.
    paths = described["paths"]
    described["paths"] = {
        path: {method: {**operation, "security": []} for method, operation in paths[path].items()}
        for path in paths
        if path.startswith(("/api/", "/metrics")) and not path.endswith("/stream")
    }
    schema = schemathesis.openapi.from_dict(described)
    schema.config.base_url = served.url
    mode = GenerationMode.POSITIVE if good else GenerationMode.NEGATIVE
    # Whoever deletes what is not there, or evicts who is gone already, is told that it is so: no failure.
    left_out = [CHECKS.get_one(name) for name in ("use_after_free", "ensure_resource_availability")]
    headers = {"Authorization": f"Bearer {served.tokens['admin']}"}
    tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if not good and not {"parameters", "requestBody"} & operation.definition.raw.keys():
            continue  # there is nothing to get wrong

        @settings(
            max_examples=EXAMPLES, deadline=None, database=None, phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=mode))
        def attempt(case: schemathesis.Case) -> None:
            nonlocal tried
            tried += 1
            case.call_and_validate(headers=headers, excluded_checks=left_out, timeout=PATIENCE)

        attempt()
    assert tried > 100


def test_any_text_is_answered(served: Web) -> None:
    headers = {"Authorization": f"Bearer {served.tokens['admin']}"}
    with httpx.Client(base_url=served.url, headers=headers, trust_env=False, timeout=PATIENCE) as http:

        @given(st.text(max_size=50), st.text(max_size=50))
        @settings(max_examples=20)
        def attempt(name: str, key: str) -> None:
            for path, query in (
                ("/api/v1/clusters/train/value", {"key": key}),
                ("/api/v1/clusters/train/keys", {"prefix": key, "after": name}),
                ("/api/v1/events", {"cluster": name, "task": key, "after": key}),
                ("/api/v1/clusters/train/members", {"after": key}),
            ):
                assert http.get(path, params=query).status_code in (200, 404, 422)

        attempt()
