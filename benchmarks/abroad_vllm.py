"""What vLLM accepts of a draft: run by abroad.py in a Python that has vLLM, and nothing of ours.

In: JSON on stdin: the target's folder, the draft's, token ids, numbers. Out: one line of JSON.
"""

import json
import sys
from importlib import import_module


def main() -> None:
    given = json.load(sys.stdin)
    vllm = import_module("vllm")

    settings = {"method": "dflash", "model": given["draft"]}
    model = vllm.LLM(
        model=given["model"],
        dtype="float32",
        max_model_len=given["max_ctx"],
        max_num_seqs=1,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={**settings, "num_speculative_tokens": given["num_drafted"]},
    )
    prompts = [{"prompt_token_ids": ids} for ids in given["ids"]]
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=given["num_tokens"])
    model.generate(prompts, sampling)
    counts = {metric.name: getattr(metric, "value", 0) for metric in model.get_metrics()}
    found = {
        "version": vllm.__version__,
        "num_rounds": int(counts["vllm:spec_decode_num_drafts"]),
        "num_accepted": int(counts["vllm:spec_decode_num_accepted_tokens"]),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
