"""What a reply cost, in words for people and as a record for programs. In: Usage. Out: text."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftree.core import Compression, FinishReason, Usage


def summary_line(usage: "Usage") -> str:
    """One line: tokens, seconds, tokens per second, and AL when a draft was used."""
    words = f"{_tokens(usage.completion_tokens)} in {usage.decode_ms / 1000:.2f} s"
    words += f" ({usage.tokens_per_second:.1f} tokens per second)"
    if usage.rounds.num_drafted:
        words += f", AL {usage.acceptance_length:.2f}"
    words += f"; prompt of {_tokens(usage.prompt_tokens)} in {usage.prefill_ms / 1000:.2f} s"
    if usage.cached_tokens:
        words += f", {usage.cached_tokens} of them cached"
    if usage.window:
        words += f"; window of {usage.window} behind {_tokens(usage.sinks)}"
    if usage.compression is not None and usage.compression.num_texts:
        words += f"; {compression_words(usage.compression)}"
    if usage.rounds.off_reason:
        words += f"; speculation was off: {usage.rounds.off_reason}"
    if usage.rounds.host_reason:
        words += f"; rounds ran on the host: {usage.rounds.host_reason}"
    return words


def compression_words(compression: "Compression") -> str:
    before, kept = compression.tokens_before, compression.tokens_kept
    words = f"{kept:,} of {before:,} tokens kept of long messages"
    return f"{words}, scored in {compression.score_ms / 1000:.2f} s"


def round_lines(usage: "Usage") -> list[str]:
    """Where the time of the rounds went, and how deep the accepted paths were."""
    rounds = usage.rounds
    if not rounds.num_drafted:
        return [f"speculation was off: {rounds.off_reason or 'no draft'}"]
    lines = [
        f"{rounds.num_rounds} rounds, {rounds.num_accepted} of {rounds.num_drafted} nodes accepted"
    ]
    phases = ("draft", "tree", "verify", "accept", "commit")
    times = (f"{phase} {getattr(rounds, f'{phase}_ms'):.0f} ms" for phase in phases)
    lines.append(", ".join(times))
    depths = zip(rounds.accepted_by_depth, rounds.verified_by_depth, strict=False)
    shares = (f"{100 * accepted / reached:.0f}%" for accepted, reached in depths if reached)
    lines.append(f"accepted by depth: {' '.join(shares)}")
    return lines


def json_line(model: str, text: str, finish_reason: "FinishReason | None", usage: "Usage") -> str:
    return json.dumps(
        {
            "model": model,
            "text": text,
            "finish_reason": finish_reason,
            "usage": asdict(usage),
            "tokens_per_second": round(usage.tokens_per_second, 2),
            "acceptance_length": round(usage.acceptance_length, 3),
        }
    )


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"
