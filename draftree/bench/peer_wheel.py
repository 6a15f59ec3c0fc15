"""The worker that runs llama.cpp, as the package xllamacpp carries it: its server, or its library
directly. Not both in one process: threads of two teams on the same cores make each several times
slower, even while one of them is idle.

In: token ids. Out: milliseconds. The server is timed by its own clock. Any interpreter with
xllamacpp and numpy can run it.
"""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from draftree.bench.worker import serve

_WINDOW: Final = 512  # the library's default context, batch and micro-batch
_WARM_TOKENS: Final = 4


class _Params(ctypes.Structure):
    """Model or context settings, of which only the defaults are used: larger than any version's."""

    _fields_ = (("words", ctypes.c_uint64 * 128),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("num_seq_ids", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


class Library:
    """libllama by its C functions, with default settings, for at most 512 positions."""

    def __init__(self, path: str, threads: int) -> None:
        import xllamacpp  # noqa: F401  (its import prepares the shared library)

        spec = find_spec("xllamacpp")
        assert spec is not None
        assert spec.origin is not None
        file = next(Path(spec.origin).parent.glob("xllamacpp*.so"))
        self._shared = ctypes.CDLL(str(file))
        pointer, integer = ctypes.c_void_p, ctypes.c_int32
        self._bind("llama_log_set", None, type(_SILENCE), pointer)(_SILENCE, None)
        self._bind("llama_backend_init", None)()
        load = self._bind("llama_model_load_from_file", pointer, ctypes.c_char_p, _Params)
        model = load(path.encode(), self._bind("llama_model_default_params", _Params)())
        make = self._bind("llama_init_from_model", pointer, pointer, _Params)
        self._context = make(model, self._bind("llama_context_default_params", _Params)())
        if not model or not self._context:
            raise RuntimeError(f"llama.cpp cannot open {path}")
        num_positions = self._bind("llama_n_ctx", ctypes.c_uint32, pointer)(self._context)
        if num_positions < _WINDOW:
            raise RuntimeError(f"the default context has {num_positions} positions, not {_WINDOW}")
        set_threads = self._bind("llama_set_n_threads", None, pointer, integer, integer)
        set_threads(self._context, threads, threads)
        vocabulary = self._bind("llama_model_get_vocab", pointer, pointer)(model)
        self._vocab_size = self._bind("llama_vocab_n_tokens", integer, pointer)(vocabulary)
        make_batch = self._bind("llama_batch_init", _Batch, integer, integer, integer)
        self._batch = make_batch(_WINDOW, 0, 1)
        self._decode = self._bind("llama_decode", integer, pointer, _Batch)
        floats = ctypes.POINTER(ctypes.c_float)
        self._get_logits = self._bind("llama_get_logits", floats, pointer)
        self._memory = self._bind("llama_get_memory", pointer, pointer)(self._context)
        self._clear = self._bind("llama_memory_clear", None, pointer, ctypes.c_bool)

    def reset(self) -> None:
        self._clear(self._memory, True)

    def forward(self, ids: Sequence[int], position: int, *, all_rows: bool) -> np.ndarray:
        """Logits [len(ids) or 1, vocab_size], a view that the next pass overwrites."""
        batch, last = self._batch, len(ids) - 1
        for i, token in enumerate(ids):
            batch.token[i] = token
            batch.pos[i] = position + i
            batch.num_seq_ids[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_rows or i == last
        batch.num_tokens = len(ids)
        status = self._decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode answered {status}")
        rows = len(ids) if all_rows else 1
        return np.ctypeslib.as_array(
            self._get_logits(self._context), shape=(rows, self._vocab_size)
        )

    def _bind(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._shared, name)
        function.restype, function.argtypes = result, arguments  # type: ignore[attr-defined]
        return function


class WheelWorker:
    """Verbs of the worker; load comes first, and says which of the two is used."""

    _server: Any = None
    library: Library

    def describe(self) -> dict[str, str]:
        from importlib.metadata import version

        import xllamacpp

        params = xllamacpp.CommonParams()
        kinds = dict.fromkeys((params.cache_type_k.name, params.cache_type_v.name))
        return {
            "version": version("xllamacpp"),
            "system": xllamacpp.get_system_info().strip(" |"),
            "kv": "/".join(kinds).replace("GGML_TYPE_", "").lower(),
        }

    def load(self, path: str, threads: int, max_ctx: int, use_server: bool) -> None:
        if not use_server:
            self.library = Library(path, threads)
            return
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = path, max_ctx, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.verbosity = -1
        self._server = xllamacpp.Server(params)

    def decode(self, ids: list[int], num_tokens: int) -> float:
        """Milliseconds of num_tokens decoded tokens after the prompt, without the prompt."""
        if self._server is not None:
            self._complete(ids, _WARM_TOKENS)
            # The server's clock starts when the first token is there.
            return float(self._complete(ids, num_tokens + 1)["predicted_ms"])
        self._decode_by_library(ids, _WARM_TOKENS)
        return self._decode_by_library(ids, num_tokens)

    def prefill(self, ids: list[int]) -> float:
        """Milliseconds from the prompt to its last logits."""
        if self._server is not None:
            self._complete(ids[:_WARM_TOKENS], _WARM_TOKENS)
            return float(self._complete(ids, 1)["prompt_ms"])
        self._decode_by_library(ids[:_WARM_TOKENS], _WARM_TOKENS)
        self.library.reset()
        start = time.perf_counter()
        self.library.forward(ids, 0, all_rows=False).argmax()
        return (time.perf_counter() - start) * 1000

    def _decode_by_library(self, ids: list[int], num_tokens: int) -> float:
        library = self.library
        library.reset()
        token = int(library.forward(ids, 0, all_rows=False)[0].argmax())
        start = time.perf_counter()
        for position in range(len(ids), len(ids) + num_tokens):
            token = int(library.forward([token], position, all_rows=False)[0].argmax())
        return (time.perf_counter() - start) * 1000

    def _complete(self, ids: list[int], num_tokens: int) -> dict[str, Any]:
        request = {
            "prompt": ids,
            "max_tokens": num_tokens,
            "cache_prompt": False,
            "ignore_eos": True,
            "temperature": 0.0,
            "top_k": 1,
            "samplers": ["top_k"],
        }
        timings: dict[str, Any] = self._server.handle_completions(request)["timings"]
        if timings["prompt_n"] != len(ids) or timings["predicted_n"] != num_tokens:
            raise RuntimeError(f"the server did not do what was asked: {timings}")
        return timings


def serve_wheel(worker: WheelWorker, *verbs: str) -> None:
    serve({verb: getattr(worker, verb) for verb in ("describe", "load", *verbs)})
    # The server's threads would keep the process; nothing is left to be saved.
    os._exit(0)


if __name__ == "__main__":
    serve_wheel(WheelWorker(), "decode", "prefill")
