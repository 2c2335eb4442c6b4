"""The mesh view: devices where programs said that they are, whichever and however many."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.browser.conftest import OpenPage
from tests.browser.members import keep_members
from tests.e2e.clients import DEADLINE, run_clients
from tests.faults.secured import Served

from dmesh.v1 import progress_pb2 as pb

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

PARTIAL = """
import sys
import dmesh
dmesh.initialize_accelerator_system("CPU")
mine = ["CPU:1", "CPU:0"] if dmesh.client_id() == 1 else ["CPU:0", "CPU:2"]
dmesh.create_distributed_mesh([("batch", 4), ("model", 2)], local_devices=mine, mesh_name="some")
print("made", flush=True)
sys.stdin.readline()
"""


def mesh_card(page: Page, name: str) -> Locator:
    return page.locator("section.mesh").filter(has=page.get_by_role("heading", name=re.compile(f"^{name} ")))


def readouts(card: Locator, count: int) -> list[str]:
    """Goes through the first cells of a mesh with the keyboard; returns what is said of each."""
    said: list[str] = []
    card.locator("canvas").focus()
    for _ in range(count):
        card.page.keyboard.press("ArrowRight")
        said.append(card.locator(".readout").inner_text())
    return said


def test_a_mesh_over_some_of_the_devices(served: Served, token: str, open_page: OpenPage) -> None:
    environ = {
        "DMESH_COORDINATOR": served.grpc, "DMESH_CLUSTER": "train", "DMESH_TOKEN": token,
        "DMESH_HEARTBEAT_INTERVAL": "0.5", "DMESH_NUM_CPU_DEVICES": "3",
    }  # fmt: skip
    with run_clients(4, PARTIAL, environ=environ, stdin=True) as clients:
        for client in clients.values():
            client.wait_for("made")
        page = open_page(served.http, "mesh")
        card = mesh_card(page, "some")
        card.get_by_text("announced by 4 members; 8 devices of 4 members").wait_for(timeout=DEADLINE * 1000)
        said = readouts(card, 8)
        places = [
            re.match(r"batch (\d), model (\d): device (\d) of /job:worker/task:(\d)", one) for one in said
        ]
        assert [one and tuple(map(int, one.groups())) for one in places] == [
            (0, 0, 0, 0), (0, 1, 2, 0), (1, 0, 1, 1), (1, 1, 0, 1),
            (2, 0, 0, 2), (2, 1, 2, 2), (3, 0, 0, 3), (3, 1, 2, 3),
        ], said  # fmt: skip
        assert all("CONNECTED" in one for one in said)
        assert said[2].endswith("neighbours on batch: rank 0 and rank 2, on model: rank 1")
        clients[2].signal(signal.SIGKILL)
        # The lost one's devices stay where they were, in another colour.
        card.get_by_text("announced by 3 members; 8 devices of 4 members").wait_for(timeout=DEADLINE * 1000)
        card.locator("canvas").blur()
        assert [("LOST" in one) for one in readouts(card, 8)] == [False] * 4 + [True] * 2 + [False] * 2


@pytest.fixture
def announcing(served: Served, token: str) -> Iterator[None]:
    """Four members that announce meshes of all kinds."""

    def mesh(name: str, owners: tuple[int, int, int, int], *sizes: int) -> pb.AnnouncedMesh:
        task, tasks, step, each = owners
        return pb.AnnouncedMesh(
            name=name, axes=[pb.MeshAxis(name=f"a{n}", size=size) for n, size in enumerate(sizes)],
            device_type="CPU", owners=[pb.OwnerRun(task=task, tasks=tasks, step=step, each=each)],
        )  # fmt: skip

    report = pb.ProgressReport(
        meshes=[
            mesh("flat", (0, 4, 1, 7500), 30_000),
            mesh("wide", (0, 4, 1, 2048), 2, 4096),
            mesh("deep", (3, 4, -1, 2000), 2000, 2, 2),
            mesh("huge", (0, 4, 1, 1 << 18), 1 << 10, 1 << 10),
            mesh("bad", (0, 4, 1, 1), -4),
        ],
        links=[pb.Link(rank=3, round_trip_us=42, bytes_per_second=3 << 29)],
        numa_nodes=[0, 1],
    )
    with keep_members(served.grpc, token, 4, report):
        yield


@pytest.mark.usefixtures("announcing")
@pytest.mark.parametrize("width", [1280, 390])
def test_large_meshes_are_few_cells(served: Served, open_page: OpenPage, width: int) -> None:
    page = open_page(served.http, "mesh", viewport={"width": width, "height": 844})
    for name, places in {
        "flat": "a0 0-",
        "wide": "a0 0, a1 0-",
        "deep": "a0 0, a1 0-1, a2 0-1: 4 devices",
    }.items():
        card = mesh_card(page, name)
        card.get_by_text("announced by 4 members").wait_for(timeout=DEADLINE * 1000)
        page.wait_for_function(
            "width => document.querySelector('.mesh canvas').clientWidth > width", arg=width * 0.6
        )
        [first] = readouts(card, 1)
        assert first.startswith(places), first
        box = card.locator("canvas").bounding_box()
        assert box is not None
        assert box["width"] <= width
        assert box["height"] <= 1200
    [said] = readouts(mesh_card(page, "flat"), 1)
    assert re.match(r"a0 0-7: 8 devices; the worst is of /job:worker/task:0", said), said
    huge = mesh_card(page, "huge")
    huge.get_by_text("which ones is not announced, or they are too many").wait_for()
    assert not huge.locator("canvas").is_visible()
    assert mesh_card(page, "bad").count() == 0
    assert page.locator("*").count() < 700
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.usefixtures("announcing")
def test_hosts_say_their_nodes_and_how_fast_the_links_between_them_are(
    served: Served, open_page: OpenPage
) -> None:
    page = open_page(served.http, "mesh", viewport={"width": 390, "height": 844})
    links = page.locator("ul.links li")
    links.first.wait_for(timeout=DEADLINE * 1000)
    assert links.all_inner_texts() == ["host0 ↔ host1 1.5 GiB/s, round trip 42 µs"]
    page.get_by_text("; 2 on NUMA node 0, 2 on NUMA node 1").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_machines_of_one_name_have_rows_of_their_own(served: Served, token: str, open_page: OpenPage) -> None:
    from playwright.sync_api import expect

    machines = [("pi", "3f2a9c1e-0001"), ("pi", "b81d2f00-0002"), ("pi", "3f2a9c1e-0001"), ("node", "c0")]
    labels = ["pi (boot 3f2a9c1e)", "pi (boot b81d2f00)", "node"]
    report = pb.ProgressReport(links=[pb.Link(rank=3, round_trip_us=42)], numa_nodes=range(40))
    with keep_members(served.grpc, token, 4, report, machines):
        page = open_page(served.http, "mesh")
        nodes = ", ".join(f"2 on NUMA node {node}" for node in range(8))
        said = page.locator(".host > span.quiet")
        ends = [re.compile(rf"^2 members.*; {nodes} and 32 more$"), *[re.compile("^1 member,")] * 2]
        expect(said).to_have_text(ends, timeout=DEADLINE * 1000)
        expect(page.locator(".host h3 bdi")).to_have_text(labels)
        ends = [re.compile(re.escape(f"node ↔ {label} ")) for label in labels[:2]]
        expect(page.locator("ul.links li")).to_have_text(ends)
        page.click("nav >> [data-view=members]")
        hosts = page.locator(".rows-inner .c-host")
        expect(hosts).to_have_text([labels[0], labels[1], labels[0], labels[2]])
        page.get_by_role("button", name="/job:worker/task:1", exact=True).click()
        page.locator("dialog").get_by_text(labels[1]).wait_for()
        page.get_by_role("button", name="Evict this member").click()
        page.get_by_text(f"Its process (host {labels[1]}, pid 101)").wait_for()
        page.keyboard.press("Escape")


def test_members_are_grouped_by_host_in_one_pass(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.http)
    # Copying the members so far for each one would take minutes.
    found = page.evaluate(
        """async () => {
          const { membersByHost } = await import("/static/views/mesh.js");
          const count = 200_000;
          const slots = { host: new Array(count).fill(0), hosts: ["a"], boot_ids: [""], machines: ["a"] };
          slots.conditions = "C".repeat(count - 1) + "X";
          slots.host[7] = -1;
          const began = performance.now();
          const [one] = membersByHost(slots);
          const seconds = (performance.now() - began) / 1000;
          return { members: one.places.length, worst: one.worst, seconds };
        }"""
    )
    assert (found["members"], found["seconds"] < 5) == (199_999, True), found
    assert found["worst"] < page.evaluate(
        "async () => (await import('/static/states.js')).ORDER.indexOf('CONNECTED')"
    )
