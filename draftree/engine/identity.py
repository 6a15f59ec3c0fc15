"""What decides the bits of an engine's keys and values, as a key for copies that outlive it.

Two engines with one key compute the same from the same tokens. Changes that might matter change the
key: then earlier copies are not found, and what they held is read again.
"""

from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from draftree.config import EngineConfig, Plan
from draftree.state.prefix_file import PrefixFolder
from draftree.weights.checkpoint import Checkpoint

_SAMPLE = 4096  # bytes of the first and the last row of a tensor
_SOURCES = ("kernels", "layers", "models", "drafts", "prefill", "state", "engine")
_LIBRARIES = ("numpy", "numba", "llvmlite", "torch")


def open_folder(
    config: EngineConfig, plan: Plan, checkpoint: Checkpoint, draft: Checkpoint | None
) -> PrefixFolder | None:
    if not config.prefix_dir or plan.prefix_bytes == 0:
        return None
    key = identify(config, plan, checkpoint, draft if config.budget != 0 else None)
    return PrefixFolder(Path(config.prefix_dir).expanduser(), key, plan.prefix_bytes)


def identify(
    config: EngineConfig, plan: Plan, checkpoint: Checkpoint, draft: Checkpoint | None
) -> str:
    words = (
        *(plan.kv_k, plan.kv_v, plan.is_exact, plan.chunk, plan.max_ctx, config.block),
        *(_name_device(plan), *map(_version, _LIBRARIES)),
    )
    digest = sha256(repr(words).encode())
    package = Path(__file__).parents[1]
    for part in _SOURCES:
        for path in sorted(package.glob(f"{part}/**/*")):
            if path.suffix in (".py", ".cu", ".cuh", ".h"):
                digest.update(path.read_bytes())
    for each in (checkpoint, draft):
        digest.update(_describe(each) if each is not None else b"none")
    return digest.hexdigest()


def _name_device(plan: Plan) -> str:
    if plan.gpu is not None:
        return plan.gpu.name
    from draftree.kernels.cpu.isa import current_isa

    return current_isa().name


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _describe(checkpoint: Checkpoint) -> bytes:
    """Its file's size and time, its scalars, and a sample of every tensor: two models of one shape
    differ in all of them.
    """
    digest = sha256()
    if checkpoint.path.exists():
        stat = checkpoint.path.stat()
        digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    scalars = {k: v for k, v in checkpoint.metadata.items() if isinstance(v, str | int | float)}
    digest.update(repr(sorted(scalars.items())).encode())
    for name, info in sorted(checkpoint.tensors.items()):
        rows = checkpoint.raw(name)
        digest.update(f"{name} {info.shape} {info.qtype}".encode())
        digest.update(rows[0][:_SAMPLE].tobytes() + rows[-1][-_SAMPLE:].tobytes())
    return digest.digest()
