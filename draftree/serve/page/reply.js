// One reply from its request to its end: events of the server become text in a view and figures in the
// panel. Out: what it came to, or the error that ended it.

import { count, find } from "./dom.js";
import { readKey } from "./store.js";
import { ask } from "./stream.js";

const SETTLED_S = 0.25; // a speed of less time says nothing

/** Returns {note, tokens, isCut} or {error}. isCut: there may be more to say. */
export async function writeReply(request, view, panel, signal) {
  const progress = { start: performance.now(), first: 0, tokens: 0, usage: null, reason: null };
  try {
    for await (const event of ask(request, readKey(), signal)) read(event, view, panel, progress);
  } catch (error) {
    return error.name === "AbortError" ? { note: "Stopped", isCut: true } : { error };
  }
  const { usage, reason } = progress;
  const tokens = usage ? usage.prompt_tokens + usage.completion_tokens : undefined;
  return { note: describeEnd(usage, reason, panel), tokens, isCut: reason === "length" };
}

function read(event, view, panel, progress) {
  if (event.comment) view.showProgress(describeProgress(event.comment));
  if (event.rounds) {
    panel.add(event.rounds);
    progress.tokens = event.completion_tokens;
  }
  if (event.usage) progress.usage = event.usage;
  for (const { delta, finish_reason: reason } of event.choices) {
    if (reason) progress.reason = reason;
    if (!delta.content && !delta.reasoning_content) continue;
    const now = performance.now();
    progress.first ||= now;
    const seconds = (now - progress.first) / 1000;
    panel.showSpeed(seconds > SETTLED_S ? progress.tokens / seconds : 0, progress.first - progress.start);
    if (delta.reasoning_content) view.addReasoning(delta.reasoning_content);
    if (delta.content) view.add(delta.content);
  }
}

/** What a comment of the server says of a reply that has not begun; "" if nothing. */
function describeProgress(comment) {
  const [, place, wait] = /^queue (\d+)(.*)$/.exec(comment) ?? [];
  if (place) return `Waiting: number ${place} in the queue${wait}`;
  const [, ...numbers] = /^prefill (\d+)\/(\d+)$/.exec(comment) ?? [];
  const [read, all] = numbers.map((number) => Number(number).toLocaleString("en"));
  return all ? `Reading the prompt: ${read} of ${all} tokens` : "";
}

function describeEnd(usage, reason, panel) {
  const parts = [];
  const statistics = usage?.draftree;
  if (usage) parts.push(count(usage.completion_tokens, "token"));
  if (statistics) {
    panel.showStatistics(statistics, usage.completion_tokens);
    parts.push(`${statistics.tokens_per_second.toFixed(1)} tok/s`);
    if (statistics.rounds) parts.push(`AL ${find("al").textContent}`);
  }
  if (reason === "length") parts.push("ended by its limit");
  return parts.join(" · ");
}
