"""`draftree cluster`: several replicas of a model behind one address, run by Ray Serve.

On this machine it stays in the foreground; on a Ray cluster it deploys, and Ray goes on.
"""

import contextlib
import functools
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from draftree import env
from draftree.cli.option import Model, Settings, with_settings
from draftree.cli.server_option import (
    ServerSettings,
    describe_server,
    server_option,
    server_url,
)
from draftree.errors import ServeError, require_packages

if TYPE_CHECKING:
    from draftree.cluster.deploy import ClusterOptions
    from draftree.cluster.scale import Scale

_NVIDIA: Final = Path("/proc/driver/nvidia/version")


def _cluster(help_text: str, *names: str, **details: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Cluster", **details)


Gpus = Annotated[
    float | None,
    _cluster("GPUs of a replica; one where there are any.", min=0.0, show_default=False),
]
Address = Annotated[
    str | None, _cluster("Ray cluster to deploy on, or `auto`; one of its own if not given.")
]


@functools.partial(with_settings, is_engine_only=True)
def cluster(
    settings: Settings,
    server: ServerSettings,
    model: Model = None,
    replicas: Annotated[
        str, _cluster("Number of replicas, or `auto`: as many as the load needs and there is room.")
    ] = "auto",
    gpus: Gpus = None,
    address: Address = None,
    print_config: Annotated[
        bool, _cluster("Print the file for `serve deploy`, and end.", "--print-config")
    ] = False,
    port: Annotated[int, server_option("Port to listen on.", min=1, max=65535)] = 8000,
) -> None:
    """Serve replicas of a model over HTTP, by Ray Serve."""
    require_packages("draftree cluster", "cluster", "ray")
    name = settings.choose_model(model)
    name = str(Path(name).resolve()) if Path(name).is_file() else name
    host, shared = server.host, server.serve_fields(name)
    if server.tls_cert is not None and (address is not None or print_config):
        raise typer.BadParameter(
            "--tls-cert is for replicas on this machine; put a proxy before a Ray cluster."
        )
    for file in ("tls_cert", "tls_key"):  # the ingress may run in another folder
        shared[file] = shared[file] and str(Path(shared[file]).resolve())
    env.prepare_ray()
    from draftree.cluster import deploy
    from draftree.cluster.scale import choose_scale
    from draftree.serve.server import bind

    here = {"CPU": float(os.cpu_count() or 1), "GPU": float(_NVIDIA.exists())}
    scale = choose_scale(replicas, settings.threads, gpus, here)
    engine = {**_engine_fields(settings), **server.engine_fields()}
    if print_config:
        options = _options(name, engine, shared, scale)
        return _print_yaml(deploy.describe(options, scale, host, port))
    if address is None:
        bind(host, port).close()  # or Ray would try a taken port again and again
    has = deploy.connect(address, max(here["CPU"], scale.num_min * scale.num_threads))
    scale = choose_scale(replicas, settings.threads, gpus, has)
    with contextlib.ExitStack() as stack:
        is_local = address is None
        if is_local:
            stack.callback(deploy.stop)
        _start(_options(name, engine, shared, scale), scale, host, port, is_local=is_local)
        if is_local:
            _wait()


def _options(
    name: str, engine: dict[str, Any], server: dict[str, Any], scale: "Scale"
) -> "ClusterOptions":
    from draftree.cluster.deploy import ClusterOptions

    threads = {} if scale.num_gpus else {"threads": scale.num_threads}
    return ClusterOptions(name, {**engine, **threads}, server)


def _start(
    options: "ClusterOptions", scale: "Scale", host: str, port: int, *, is_local: bool
) -> None:
    from draftree.cluster.deploy import start

    print(f"starting replicas of {options.model}", file=sys.stderr)
    try:
        start(options, scale, host, port, is_local=is_local)
    except RuntimeError as error:
        raise ServeError(f"Ray could not start the replicas: {error}") from error
    server = options.server
    url = server_url(host, port, is_secure=server["tls_cert"] is not None)
    print(describe_server(url, server["model_id"], bool(server["api_keys"])), file=sys.stderr)


def _engine_fields(settings: Settings) -> dict[str, Any]:
    """Those that were given, as an EngineConfig names them."""
    from draftree.config import EngineConfig

    config, plain = settings.read_config(), EngineConfig()
    given = {f.name: getattr(config, f.name) for f in fields(EngineConfig)}
    return {name: value for name, value in given.items() if value != getattr(plain, name)}


def _print_yaml(config: dict[str, Any]) -> None:
    import yaml

    print(yaml.safe_dump(config, sort_keys=False), end="")


def _wait() -> None:
    """Until a signal comes; Ray's processes get Ctrl-C as well, and know what to do."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    while True:
        signal.pause()
