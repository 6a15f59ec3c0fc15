"""An engine on a GPU, real or emulated."""

from typing import TYPE_CHECKING, Any

import pytest

from draftree.config import EngineConfig, GpuInfo
from tests.tiny import tiny_path

if TYPE_CHECKING:
    from draftree.engine.engine import TokenEngine
    from draftree.kernels.cuda.compile import Gpu


@pytest.fixture
def open_engine(any_gpu: "Gpu", monkeypatch: pytest.MonkeyPatch):
    """TokenEngine on that GPU, with the tiny hybrid model and its draft of random weights."""
    from draftree.engine import parts as parts_module
    from draftree.engine.engine import TokenEngine
    from draftree.kernels.cuda import compile as compile_module
    from tests.made import make_draft

    gpu = GpuInfo(0, "a GPU", 2**36)
    monkeypatch.setattr(parts_module, "find_gpu", lambda device: gpu)
    monkeypatch.setattr(compile_module, "gpu", lambda index: any_gpu)

    def open_one(
        budget: int | str,
        qtype: str = "F16",
        ngram: str = "auto",
        relative: str = "",
        **options: Any,
    ) -> "TokenEngine":
        usual = {"max_ctx": 256, "chunk": 64, "warm_up": False, "batching": "off"}
        config = EngineConfig(budget=budget, ngram=ngram, **usual | options)
        draft = make_draft(qtype, relative=relative)
        return TokenEngine.open(tiny_path("qwen35-mtp"), config, draft=draft)

    return open_one
