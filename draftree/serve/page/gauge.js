// How much of the model's context a conversation takes: what the server counted up to the last reply,
// and an estimate of what has come since.

import { countCharacters } from "./conversation.js";
import { find } from "./dom.js";

const PER_TOKEN = 4; // characters, until the server has counted some
const FULL = 0.9;

/** Tokens of the messages that are sent, and of more characters. */
export function countTokens(sent, numMore) {
  const last = sent.findLastIndex(({ tokens }) => tokens);
  const rest = numMore + countAll(sent.slice(last + 1));
  return (sent[last]?.tokens ?? 0) + Math.ceil(rest / charactersPerToken(sent));
}

/** As the server counted the messages so far. */
export function charactersPerToken(sent) {
  const last = sent.findLastIndex(({ tokens }) => tokens);
  if (last < 0) return PER_TOKEN;
  return Math.min(Math.max(countAll(sent.slice(0, last + 1)) / sent[last].tokens, 1), PER_TOKEN);
}

const countAll = (messages) => messages.reduce((sum, message) => sum + countCharacters(message), 0);

export function showGauge(sent, numMore, contextLength) {
  const gauge = find("gauge");
  gauge.hidden = !contextLength || (!sent.length && !numMore);
  if (gauge.hidden) return;
  const used = countTokens(sent, numMore);
  const share = Math.min(used / contextLength, 1);
  const words = `${used.toLocaleString("en")} of ${contextLength.toLocaleString("en")} tokens`;
  gauge.setAttribute("aria-valuenow", Math.round(100 * share));
  gauge.setAttribute("aria-valuetext", words);
  gauge.classList.toggle("full", share >= FULL);
  find("gauge-bar").style.width = `${100 * share}%`;
  find("gauge-text").textContent = words;
}
