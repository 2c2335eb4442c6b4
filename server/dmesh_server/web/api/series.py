"""Time series for charts: the last 15 minutes of a cluster, and of the server."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from dmesh_server.runtime import Runtime
from dmesh_server.web.api.answers import ClusterName, encode, encoded, hexadecimal, refusals
from dmesh_server.web.series import KEPT, STEP, ClusterColumn, Recorder, ServerColumn, columns_after

After = Annotated[
    int, Query(ge=0, lt=1 << 53, description="only columns after this number; 0 for all that are kept")
]


class ClusterSeriesView(BaseModel):
    """The last columns of a cluster."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "cluster": "train", "server_incarnation": "9f3c0a51d2e47b86", "step": 5.0, "kept": 180,
                    "tasks": 4, "band": 1, "loop": "train",
                    "columns": [
                        {
                            "n": 17, "t": 1767225600.0, "calls": 12.5, "bytes": 100000.0, "pace": 0.08,
                            "done": 1190, "silence": 1.2, "wait": "0a0bff0c",
                        }
                    ],
                }
            ]
        }
    )  # fmt: skip

    cluster: str = Field(description="name of the cluster")
    server_incarnation: str = Field(
        description="random number of this start of the server: columns are its own"
    )
    step: float = Field(description="seconds from one column to the next")
    kept: int = Field(description="columns that are kept")
    tasks: int = Field(description="number of task slots of the cluster")
    band: int = Field(description="task slots that one row of the heat map stands for")
    loop: str = Field(description="name of the program's loop; empty if it has none")
    columns: list[ClusterColumn] = Field(description="oldest first")


class ServerSeriesView(BaseModel):
    """The last columns of the server."""

    server_incarnation: str = Field(description="random number of this start of the server")
    step: float = Field(description="seconds from one column to the next")
    kept: int = Field(description="columns that are kept")
    columns: list[ServerColumn] = Field(description="oldest first")


def router(runtime: Runtime, recorder: Recorder) -> APIRouter:
    """Return the routes of the resource.

    Args:
        runtime: The server's state.
        recorder: Keeps the columns.
    """
    routes = APIRouter(tags=["series"])

    @routes.get("/clusters/{cluster}/series", response_model=ClusterSeriesView, responses=refusals(404))
    async def show_cluster_series(cluster: ClusterName, after: After = 0) -> Response:
        """Show what a cluster did in the last 15 minutes, in steps of 5 s."""
        runtime.views.version(cluster)  # refuses names of no cluster
        series = recorder.clusters.get(cluster)
        view = ClusterSeriesView(
            cluster=cluster,
            server_incarnation=hexadecimal(runtime.server_incarnation),
            step=STEP,
            kept=KEPT,
            tasks=0 if series is None else series.tasks,
            band=1 if series is None else series.band,
            loop="" if series is None else series.loop,
            columns=[],
        )
        return encoded(_filled(view, () if series is None else tuple(columns_after(series.columns, after))))

    @routes.get("/series", response_model=ServerSeriesView, responses=refusals())
    async def show_server_series(after: After = 0) -> Response:
        """Show what the server did in the last 15 minutes, in steps of 5 s."""
        view = ServerSeriesView(
            server_incarnation=hexadecimal(runtime.server_incarnation), step=STEP, kept=KEPT, columns=[]
        )
        return encoded(_filled(view, tuple(columns_after(recorder.server, after))))

    return routes


def _filled(view: BaseModel, columns: tuple[bytes, ...]) -> bytes:
    """Return an answer with columns that were encoded when they were made."""
    return encode(view).removesuffix(b'"columns":[]}') + b'"columns":[%b]}' % b",".join(columns)
