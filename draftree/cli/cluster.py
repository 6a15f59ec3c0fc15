"""`draftree cluster`: several replicas of a model behind one address, run by Ray Serve.

On this machine it stays in the foreground; on a Ray cluster it deploys, and Ray goes on.
"""

import functools
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from draftree import __version__, env
from draftree.cli.option import Model, Settings, with_settings
from draftree.cli.serve import check_keys, describe_server, several_option
from draftree.errors import ServeError, require_packages

if TYPE_CHECKING:
    from draftree.cluster.deploy import ClusterOptions
    from draftree.cluster.scale import Scale

_NVIDIA: Final = Path("/proc/driver/nvidia/version")


def _cluster(help_text: str, *names: str, **details: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Cluster", **details)


@functools.partial(with_settings, is_engine_only=True)
def cluster(
    settings: Settings,
    model: Model = None,
    replicas: Annotated[
        str, _cluster("Number of replicas, or `auto`: as many as the load needs and there is room.")
    ] = "auto",
    gpus: Annotated[
        float | None,
        _cluster("GPUs of a replica; one where there are any.", min=0.0, show_default=False),
    ] = None,
    address: Annotated[
        str | None,
        _cluster("Ray cluster to deploy on, or `auto`; one of its own if not given."),
    ] = None,
    print_config: Annotated[
        bool, _cluster("Print the file for `serve deploy`, and end.", "--print-config")
    ] = False,
    host: Annotated[str, _cluster("Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, _cluster("Port to listen on.", min=1, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None, several_option("Key that clients must send, or DRAFTREE_API_KEY")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, several_option("Name that clients may call the server by, or *")
    ] = None,
    alias: Annotated[list[str] | None, several_option("Another name for the model")] = None,
    cors: Annotated[
        list[str] | None, several_option("Origin whose pages may connect, or *")
    ] = None,
    trust_proxy: Annotated[
        list[str] | None,
        several_option("Address of a proxy whose X-Forwarded-For names the client, or *"),
    ] = None,
    temperature: Annotated[float, _cluster("For requests that give none.", min=0.0, max=2.0)] = 1.0,
    parallel: Annotated[
        int, _cluster("Requests that take turns on a replica; 0 is 4.", min=0, max=256)
    ] = 0,
) -> None:
    """Serve replicas of a model over HTTP, by Ray Serve."""
    require_packages("draftree cluster", "cluster", "ray")
    name = settings.choose_model(model)
    name = str(Path(name).resolve()) if Path(name).is_file() else name
    server: dict[str, Any] = {
        "model_id": Path(name).stem if name.endswith(".gguf") else name,
        "version": __version__,
        "aliases": alias or [],
        "api_keys": list(check_keys(tuple(api_key or ()) or env.api_keys())),
        "allowed_hosts": [host, *(allowed_host or [])],
        "cors_origins": cors or [],
        "trusted_proxies": trust_proxy or [],
        "temperature": temperature,
    }
    engine = _engine_fields(settings, parallel)
    env.disable_ray_reports()
    from draftree.cluster import deploy
    from draftree.cluster.scale import choose_scale

    def options_for(scale: "Scale") -> "ClusterOptions":
        threads = {} if scale.num_gpus else {"threads": scale.num_threads}
        return deploy.ClusterOptions(name, {**engine, **threads}, server)

    here = {"CPU": float(os.cpu_count() or 1), "GPU": float(_NVIDIA.exists())}
    wanted = choose_scale(replicas, settings.threads, gpus, here)
    if print_config:
        _print_yaml(deploy.describe(options_for(wanted), wanted, host, port))
        return
    print(f"starting replicas of {name}", file=sys.stderr)
    has = deploy.connect(address, max(here["CPU"], wanted.num_min * wanted.num_threads))
    scale = choose_scale(replicas, settings.threads, gpus, has)
    try:
        try:
            deploy.start(options_for(scale), scale, host, port)
        except RuntimeError as error:
            raise ServeError(f"Ray could not start the replicas: {error}") from error
        url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
        print(describe_server(url, server["model_id"], bool(server["api_keys"])), file=sys.stderr)
        if address is None:
            _wait()
    finally:
        if address is None:
            deploy.stop()


def _engine_fields(settings: Settings, parallel: int) -> dict[str, Any]:
    """Those that were given, as an EngineConfig names them."""
    from draftree.config import EngineConfig

    config, plain = settings.read_config(), EngineConfig()
    given = {f.name: getattr(config, f.name) for f in fields(EngineConfig)}
    changed = {name: value for name, value in given.items() if value != getattr(plain, name)}
    return {**changed, **({"parallel": parallel} if parallel else {})}


def _print_yaml(config: dict[str, Any]) -> None:
    import yaml

    print(yaml.safe_dump(config, sort_keys=False), end="")


def _wait() -> None:
    """Until a signal comes; Ray's processes get Ctrl-C as well, and know what to do."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    while True:
        signal.pause()
