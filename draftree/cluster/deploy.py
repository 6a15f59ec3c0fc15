"""Replicas and their ingress as an application of Ray Serve.

In: what a cluster is asked for. Out: a running application, or the file that Ray deploys it from.
Ray starts, restarts, scales and routes; this says what of, how many and where.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

import ray
import uvicorn
from grpc.aio import AioRpcError
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.util import get_node_ip_address
from starlette.routing import Router
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from draftree.chat import Engine
from draftree.cluster.connection import ReplyAddress, ReplyServer
from draftree.cluster.ingress import Ingress
from draftree.cluster.message import Relayed, ReplicaLost, Report, Unavailable
from draftree.cluster.replica import Replica, after_the_first
from draftree.cluster.scale import Scale
from draftree.serve.log import set_up_logs
from draftree.serve.server import bind, new_config
from draftree.serve.service import ServeOptions

APP, REPLICA = "draftree", "replica"
_HERE: Final = "127.0.0.1"
IMPORT_PATH: Final = "draftree.cluster.deploy:build"
_SURVEY_S: Final = 10.0
_MAX_REQUESTS: Final = 4096  # at a time, through one ingress
_END_S: Final = 900.0  # in which replies of a replica that is to end may come to their end
_STORE_BYTES: Final = 128 * 2**20  # next to nothing passes through it
_STARTS: Final = 3  # tries to start Ray
_BUSY: Final = 4  # requests a replica, above which another one is started: its engine's turns


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What was asked for. engine: fields of EngineConfig; server: fields of ServeOptions."""

    model: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)


class ReplicaActor(Replica):
    """A replica in a process of its own."""

    def __init__(self, model: str, engine: dict[str, Any], server: dict[str, Any]) -> None:
        set_up_logs()
        with after_the_first(model):
            super().__init__(
                serve.get_replica_context().replica_id.unique_id,
                partial(Engine.open, model, **{"warm_up": True, **engine}),
                ServeOptions(**server),
            )


class RayPool:
    """All replicas, by a handle of Serve. A call takes the request there, and lasts as long as the
    reply, which does not pass through Ray.
    """

    def __init__(self, handle: Any, replies: ReplyServer) -> None:
        self._handle, self._replies = handle, replies

    def ask(self, request: Relayed) -> AsyncGenerator[Any, None]:
        return self._replies.read(partial(self._call, request))

    async def _call(self, request: Relayed, address: ReplyAddress) -> None:
        response = self._handle.relay.remote(request, address)
        try:
            await response
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise Unavailable from error
        except (RayError, AioRpcError) as error:
            raise ReplicaLost from error
        except asyncio.CancelledError:
            response.cancel()
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ReplicaLost from None  # its end came while it wrote

    async def survey(self) -> list[Report]:
        """Of those that answer."""
        found: list[Any] = []
        with suppress(DeploymentUnavailableError, TimeoutError):
            asked = self._handle.broadcast("report")
            found = await asked.results_async(timeout_s=_SURVEY_S, return_exceptions=True)
        return [report for report in found if isinstance(report, Report)]


class Listener(uvicorn.Server):
    """Leaves signals to whose process it is in."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@serve.ingress()
class IngressActor:
    """address: to listen on, where no proxy of Serve's stands before it."""

    def __init__(
        self, handle: Any, server: dict[str, Any], address: tuple[str, int] | None = None
    ) -> None:
        self._options, self._address = ServeOptions(**server), address
        # Where all is on this machine, nobody else can connect.
        self._replies = ReplyServer(get_node_ip_address() if address is None else _HERE)
        pool = RayPool(handle, self._replies)
        self._ingress = Ingress(pool, self._options.max_body_bytes)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        app: ASGIApp = self._ingress
        if proxies := list(self._options.trusted_proxies):
            app = ProxyHeadersMiddleware(app, proxies)  # type: ignore[arg-type, assignment]
        return Router(default=app, lifespan=self._listen)

    @asynccontextmanager
    async def _listen(self, app: Any) -> AsyncGenerator[None, None]:
        """While the application lives; here a piece of a reply has one process less to pass."""
        async with self._replies.listen():
            if self._address is None:
                yield
                return
            server = Listener(new_config(self._ingress, self._options))
            serving = asyncio.create_task(server.serve([bind(*self._address)]))
            yield
            server.should_exit = True
            await serving


def build(args: dict[str, Any]) -> Any:
    """The application for a file, which says its scale. args: those of ClusterOptions."""
    return _bind(ClusterOptions(**args), {})


def _bind(
    options: ClusterOptions, scale: Mapping[str, Any], address: tuple[str, int] | None = None
) -> Any:
    server = ServeOptions(**options.server)
    replicas = serve.deployment(
        ReplicaActor,
        name=REPLICA,
        max_ongoing_requests=server.max_queue,
        request_router_config=RequestRouterConfig(
            request_router_class="draftree.cluster.router:ConversationRouter"
        ),
        health_check_period_s=5,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=_END_S,
        **scale,
    )
    ingress = serve.deployment(
        IngressActor,
        name="ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MAX_REQUESTS,
        graceful_shutdown_timeout_s=_END_S,
    )
    actor = replicas.bind(options.model, dict(options.engine), dict(options.server))
    # What only replicas read may change without another ingress.
    names = ("model_id", "max_body_bytes", "trusted_proxies", "tls_cert", "tls_key")
    own = {name: getattr(server, name) for name in names}
    return ingress.bind(actor, own, address)


def describe_scale(scale: Scale) -> dict[str, Any]:
    """In Serve's words, which can be changed without new replicas for all."""
    resources = {"ray_actor_options": scale.resources}
    if scale.num_max == scale.num_min:
        return {"num_replicas": scale.num_min, **resources}
    limits = {"min_replicas": scale.num_min, "max_replicas": scale.num_max}
    following = {**limits, "target_ongoing_requests": _BUSY, "upscale_delay_s": 5}
    return {"autoscaling_config": following, **resources}


def describe(options: ClusterOptions, scale: Scale, host: str, port: int) -> dict[str, Any]:
    """What `serve deploy` takes."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": APP,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": asdict(options),
                "deployments": [{"name": REPLICA, **describe_scale(scale)}],
            }
        ],
    }


def connect(address: str | None, num_cpus: float) -> dict[str, float]:
    """Join a Ray cluster, or start one on this machine; what it has."""
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    here: dict[str, Any] = {"num_cpus": num_cpus, "object_store_memory": _STORE_BYTES}
    here["include_dashboard"] = False
    here["_system_config"] = {"worker_niceness": 0}  # or any busy process would starve replicas
    options = here if address is None else {"address": address}
    options |= {"log_to_driver": False, "logging_level": logging.ERROR}
    _init(_STARTS if address is None else 1, **options)
    found: dict[str, float] = ray.cluster_resources()
    return found


def _init(num_tries: int, **options: Any) -> None:
    """Ray gives its own processes 15 seconds, in which a busy machine may not have read them from
    its disk; the next time it has.
    """
    for num_left in reversed(range(num_tries)):
        try:
            ray.init(**options)
            return
        except Exception:
            ray.shutdown()
            if not num_left:
                raise


def start(
    options: ClusterOptions, scale: Scale, host: str, port: int, *, is_local: bool = False
) -> None:
    """Deploy, and wait until every replica is ready. is_local: all of Ray is on this machine, so
    that the ingress can listen itself; elsewhere any node may have it, and all have a proxy.
    """
    config = describe(options, scale, host, port)
    serve.start(
        proxy_location="Disabled" if is_local else config["proxy_location"],
        http_options=config["http_options"],
        logging_config=config["logging_config"],
    )
    address = (host, port) if is_local else None
    serve.run(_bind(options, describe_scale(scale), address), name=APP, route_prefix="/")


def stop() -> None:
    """End what `start` and `connect` began on this machine."""
    with suppress(Exception):
        serve.shutdown()
    ray.shutdown()
