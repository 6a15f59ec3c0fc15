"""What a finished run says about itself: a model card and a plot, from its record alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftree.train.loop import CurvePoint


def make_card(record: dict[str, Any], name: str) -> str:
    """Markdown: what the draft is, what it learned from, how it went."""
    draft, text, config = record["draft"], record["text"], record["config"]
    plan, schedule, last = config["text"], config["schedule"], record["curve"][-1]
    sampled = last["sampled_acceptance_length"]
    sizes = sorted(set(schedule["block_sizes"])) or [draft["block_size"]]
    num_own = plan.get("num_own_prompts", 0)
    # What the target makes up itself, nobody has compared with test sets.
    promise = "" if num_own else "; the prompts hold no test set"
    block = len(last["accepted_by_depth"]) + 1
    rows = [
        ("target", f"{record['target']} ({record['target_file']})"),
        ("layers, width, feed-forward", _join(draft, "num_layers", "hidden_size", "ffn_size")),
        ("heads", f"{draft['num_heads']} / {draft['num_kv_heads']} × {draft['head_dim']}"),
        ("block", f"{draft['block_size']}, mask token {draft['mask_token']}"),
        ("blocks in training", ", ".join(map(str, sizes))),
        ("window in training", str(draft["sliding_window"] or "none")),
        ("features", f"after the target's layers {', '.join(map(str, draft['feature_layers']))}"),
    ]
    data = [
        ("prompts", _describe_prompts(text["source"], num_own)),
        ("sequences", f"{text['num_sequences']:,}, {text['num_held_out']:,} of them held out"),
        ("tokens written by the target", f"{text['num_written']:,}"),
        (
            "decoding",
            f"{text['num_greedy'] / text['num_sequences']:.0%} greedy, the rest at temperatures "
            f"{plan['temperatures'][0]} to {plan['temperatures'][1]}",
        ),
    ]
    result = [
        (
            f"acceptance length in blocks of {block}, first choices only, greedy text",
            f"{last['acceptance_length']:.2f}",
        ),
        ("the same, sampled text", "not measured" if sampled is None else f"{sampled:.2f}"),
        ("held-out loss", f"{last['held_out_loss']:.3f}"),
        ("right up to depth 1, 2, …", ", ".join(f"{s:.2f}" for s in last["accepted_by_depth"])),
    ]
    parts = [
        f"# {name}\n\nA DFlash draft: it fills a block of tokens in one pass, from hidden states "
        "of its target, whose embedding and head it shares. It learned from text that the target "
        f"wrote itself{promise}.\n",
        *(
            _table(title, table)
            for title, table in (
                ("Draft", rows),
                ("Data", data),
                ("Training", _training_rows(record)),
                ("On held-out prompts", result),
                ("Selector: before → after, on held-out prompts", _gains(record.get("selector"))),
            )
            if table
        ),
    ]
    return "\n".join(parts)


def make_selector_card(record: dict[str, Any], name: str) -> str:
    """Markdown: what a selector was added to, what it learned from, how it went."""
    text, config, curve = record["text"], record["config"], record["curve"]
    plan = config["plan"]
    data = [
        ("target", f"{record['target']} ({record['target_file']})"),
        ("draft", record["draft_file"]),
        ("prompts", _describe_prompts(text["source"], config["text"]["num_own_prompts"])),
        ("tokens written by the target", f"{text['num_written']:,}"),
        ("blocks read", f"{text['num_blocks']:,}"),
        ("rank, candidates", f"{plan['rank']}, {plan['top_k']}"),
        ("steps, learning rate", f"{curve[-1]['step']:,}, {plan['learning_rate']:g}"),
        ("minutes of training", f"{curve[-1]['seconds'] / 60:.1f}"),
    ]
    head = (
        f"# {name}\n\nA DFlash draft with a selector: what a candidate's chance gains or loses by "
        "the candidate before it. The draft's own weights are unchanged.\n"
    )
    tables = [
        _table("Selector", data),
        _table("Before → after, on held-out prompts", _gains(curve)),
    ]
    return "\n".join([head, *tables])


def _gains(curve: Sequence[dict[str, Any]] | None) -> list[tuple[str, str]]:
    """What a selector gained, from its curve; nothing where there is none."""
    if not curve:
        return []
    first, best = curve[0], min(curve, key=lambda point: point["held_out_loss"])
    return [
        (title, f"{first[key]:.2f} → {best[key]:.2f}")
        for title, key in (
            ("chain of best choices, greedy text", "acceptance_length"),
            ("the same, sampled text", "sampled_acceptance_length"),
            ("loss over the candidates", "held_out_loss"),
        )
        if first[key] is not None
    ]


def _training_rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    config, last = record["config"], record["curve"][-1]
    schedule = config["schedule"]
    start = [("started from", record["start"])] if record.get("start") else []
    if config.get("is_four_bit"):
        begin = schedule.get("four_bit_from", 0.0)
        when = f"after {begin:.0%} of the schedule" if begin else "in every pass"
        start.append(("matrices", f"rounded to four bits {when}, as in the file"))
    if schedule.get("round_anchor_share"):
        share = f"{schedule['round_anchor_share']:.0%} of the blocks"
        start.append(("anchors where the next round would begin", share))
    if schedule.get("num_loss_tokens"):
        start.append(("tokens in the loss", f"the {schedule['num_loss_tokens']:,} most frequent"))
    return [
        *start,
        ("steps", f"{last['step']:,}"),
        ("text read, with repetition", f"{last['num_tokens']:,} tokens"),
        ("block rows", f"{last['num_rows']:,}"),
        ("learning rate", f"{schedule['learning_rate']:g}, cosine"),
        ("depth decay", f"{schedule['depth_decay']:g}"),
        ("seed", str(config["seed"])),
        ("minutes of training", f"{last['seconds'] / 60:.1f}"),
    ]


def _describe_prompts(source: str, num_own: int) -> str:
    """source: where those come from that the target did not write."""
    if not num_own:
        return source or "not described"
    own = f"{num_own:,} that the target wrote itself"
    return f"{own}, and {source}" if source else own


def _join(values: dict[str, Any], *names: str) -> str:
    return ", ".join(str(values[name]) for name in names)


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"| {key} | {value} |" for key, value in rows]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines]) + "\n"


def draw_curve(curve: Sequence[CurvePoint], path: Path) -> bool:
    """Loss and acceptance length over steps; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    left = figure.subplots()
    steps = [point.step for point in curve]
    left.plot(steps, [point.held_out_loss for point in curve], color="tab:blue")
    left.set_xlabel("step")
    left.set_ylabel("held-out loss", color="tab:blue")
    right = left.twinx()
    right.plot(steps, [point.acceptance_length for point in curve], color="tab:orange")
    right.set_ylabel("acceptance length, first choices, greedy", color="tab:orange")
    figure.savefig(path, dpi=120)
    return True
