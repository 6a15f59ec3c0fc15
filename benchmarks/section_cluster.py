"""The section of replicas on Ray Serve. In: a record. Out: lines of Markdown."""

from benchmarks.markdown import spread, table
from draftree.bench.record import Json


def cluster(record: Json) -> list[str]:
    measures, settings = record["measures"], record["settings"]
    routing, chaos, ratio = measures["routing"], measures["chaos"], measures["two_over_one"]
    rows = [
        [words, spread(measures[name])]
        for name, words in (
            ("one_replica", "one replica, tok/s"),
            ("two_replicas", "two replicas, tok/s"),
            ("first_token_s", "`draftree cluster` to the first token, s"),
        )
    ]
    note = (
        f"Two replicas have {ratio['value']:.2f} times the rate of one; one thread each, "
        f"{settings['num_clients']} clients, {settings['num_tokens']} tokens a reply. "
        f"{_describe_turns(measures)}{_describe_alone(measures)}{_describe_window(record)}"
        f"{_describe_kept(settings)}Of "
        f"{routing['num_conversations']} conversations of {routing['num_turns']} turns, "
        f"{100 * routing['hit_rate']:.1f} % of the later turns went where their beginning had been "
        f"read, and {100 * routing['cached_share']:.0f} % of all prompts' tokens came from a "
        f"cache. In {chaos['seconds']:.0f} s with {chaos['num_streams']} streams over "
        f"{chaos['num_replicas']} replicas and {chaos['num_kills']} kills, "
        f"{chaos['num_whole']} replies came whole and equal to a single engine's, "
        f"{chaos['num_left']} clients left, {chaos['num_repeats']} requests were given to another "
        f"replica, {chaos['num_refused']} were refused before they began, and "
        f"{chaos['num_faults']} replies were lost or mixed up."
    )
    return [*table(["", "median [low to high]"], rows), "", note]


def _describe_turns(measures: Json) -> str:
    """Replicas whose requests share no passes, where they were measured."""
    ratio = measures.get("turns_over_one")
    if ratio is None:
        return ""
    one, two = (spread(measures["turns"][count]) for count in "12")
    return (
        "One replica shares its passes among all clients, each of two among half of them, and a "
        "pass of more rows gives more for its time. Where no pass is shared (`--batching off`), "
        f"two have {ratio['value']:.2f} times the rate of one ({two} and {one} tok/s). "
    )


def _describe_alone(measures: Json) -> str:
    """What the machine would allow, where it was measured."""
    alone = measures.get("alone_over_one")
    if alone is None:
        return ""
    ours = measures.get("turns_over_one") or measures["two_over_one"]
    return (
        f"Two engines at once without a cluster, in turns with it, have {alone['value']:.2f} times "
        f"the rate of one ({alone['low']:.2f} to {alone['high']:.2f}), so replicas reach "
        f"{100 * ours['value'] / alone['value']:.0f} % of what these cores allow. "
    )


def _describe_window(record: Json) -> str:
    """What a rate counts. Older records count whole runs, and say nothing of it."""
    if "counted" not in record["settings"]:
        return "Rates are of whole runs, at whose end not every client has a request. "
    measures = record["measures"]
    one_s, two_s = (f"{measures['windows_s'][count]['median']:.0f} s" for count in "12")
    return (
        "Every client asks again as soon as it is answered. Rates count the tokens that came "
        "between the first text of the last client to get any and the moment the first client "
        f"found no request left ({one_s} with one replica, {two_s} with two); whole runs with "
        f"their beginning and end give {measures['whole_runs']['value']:.2f}. "
    )


def _describe_kept(settings: Json) -> str:
    kept = settings.get("kept")
    if kept is None:
        return ""
    return (
        "Conversations and killed replicas are of an earlier run, of "
        f"{kept['timestamp'].partition('T')[0]}. "
    )
