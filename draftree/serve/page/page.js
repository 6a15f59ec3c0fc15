// The page as a whole: the conversation, the settings, and where they meet the server.

import { ReplyView, makeQuestion } from "./message.js";
import { RoundsPanel } from "./rounds.js";
import {
  readKey,
  readMessages,
  readSettings,
  toggleTheme,
  writeKey,
  writeMessages,
  writeSettings,
} from "./store.js";
import { ApiError, ask, getJson } from "./stream.js";
import { make } from "./text.js";

const find = (id) => document.getElementById(id);
const panel = new RoundsPanel();
const settings = readSettings();
let messages = []; // {role, content, note?} as they are sent, oldest first
let server = null; // what the server says of itself, once it is ready
let running = null; // the AbortController of the reply being written

// The server

async function connect() {
  try {
    const health = await (await fetch("health")).json();
    if (health.status !== "ok") {
      showBanner(`The server is ${health.status}.`);
      return setTimeout(connect, 1000);
    }
    server = await getJson("v1/draftree/engine", readKey());
  } catch (error) {
    if (error.status === 401) return askForKey();
    showBanner("The server cannot be reached. Trying again.");
    return setTimeout(connect, 2000);
  }
  showBanner("");
  document.body.classList.add("ready");
  document.title = `${server.model} · draftree`;
  find("model-name").textContent = server.model;
  find("prompt").placeholder = `Message ${server.model}`;
  showFacts();
  showSend();
}

function showBanner(text) {
  find("banner").textContent = text;
  find("banner").hidden = !text;
}

function askForKey() {
  const note = readKey() ? "The API key is wrong." : "This server asks for an API key.";
  find("key-note").textContent = note;
  find("key-note").hidden = find("key-row").hidden = false;
  find("model-name").textContent = "API key needed";
  openSettings();
  find("key").focus();
}

// The conversation

async function submit(text) {
  if (running || !server || !text.trim()) return;
  if (messages.at(-1)?.role === "user") messages.pop(); // it got no reply
  messages.push({ role: "user", content: text });
  show(makeQuestion(text));
  find("prompt").value = "";
  fitPrompt();
  await answer();
}

async function answer() {
  const conversation = messages;
  const reply = new ReplyView(messages.length);
  show(reply.element);
  panel.reset();
  running = new AbortController();
  showSend();
  find("log").setAttribute("aria-busy", "true");
  announce("Writing a reply.");
  const progress = { start: performance.now(), first: 0, tokens: 0, usage: null, reason: null };
  try {
    for await (const event of ask(makeRequest(), readKey(), running.signal)) {
      read(event, reply, progress);
    }
    finish(conversation, reply, noteOf(progress));
  } catch (error) {
    if (error.name === "AbortError") finish(conversation, reply, "Stopped");
    else fail(reply, error);
  }
  running = null;
  find("log").setAttribute("aria-busy", "false");
  scrollDown();
  showSend();
}

function makeRequest() {
  const system = settings.system.trim();
  const request = {
    model: server.model,
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...messages.map(({ role, content }) => ({ role, content })),
    ],
    stream: true,
    draftree: { stats: true, rounds: settings.tree },
  };
  if (settings.temperature !== null) request.temperature = settings.temperature;
  if (settings.maxTokens !== null) request.max_completion_tokens = settings.maxTokens;
  if (server.can_think) request.chat_template_kwargs = { enable_thinking: settings.think };
  return request;
}

/** What a comment of the server says of a reply that has not begun; "" if nothing. */
function describeProgress(comment) {
  const [kind, numbers] = comment.split(" ");
  const [first, last] = (numbers ?? "").split("/").map((number) => Number(number).toLocaleString("en"));
  if (kind === "queue") return `Waiting: number ${first} in the queue`;
  return kind === "prefill" ? `Reading the prompt: ${first} of ${last} tokens` : "";
}

function read(event, reply, progress) {
  if (event.comment) reply.showProgress(describeProgress(event.comment));
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
    panel.showSpeed(seconds > 0.25 ? progress.tokens / seconds : 0, progress.first - progress.start);
    if (delta.reasoning_content) reply.addReasoning(delta.reasoning_content);
    if (delta.content) reply.add(delta.content);
    scrollDown();
  }
}

function noteOf({ usage, reason }) {
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

function finish(conversation, reply, note) {
  reply.end(note, () => again(reply));
  announce(`Reply finished. ${note}`);
  if (reply.text) conversation.push({ role: "assistant", content: reply.text, note });
  if (conversation === messages) keepMessages();
}

function fail(reply, error) {
  if (!(error instanceof ApiError)) console.error(error);
  const wait = error.retryAfter ? ` Try again in ${count(error.retryAfter, "second")}.` : "";
  reply.fail(`${error.message}${wait}`, () => again(reply));
  if (error.status === 401) askForKey();
}

/** Another reply in the place of the last one. */
function again(reply) {
  if (running) return;
  messages.length = reply.index;
  reply.element.remove();
  answer();
}

function keepMessages() {
  writeMessages(settings.keep ? messages : []);
}

function restoreMessages() {
  if (settings.keep) messages = readMessages();
  messages.forEach(({ role, content, note }, index) => {
    if (role === "user") return show(makeQuestion(content));
    const reply = new ReplyView(index);
    reply.add(content);
    reply.end(note ?? "", () => again(reply));
    show(reply.element);
  });
}

function newChat() {
  running?.abort();
  messages = [];
  keepMessages();
  find("messages").replaceChildren();
  find("welcome").hidden = false;
  panel.showExample();
  find("prompt").focus();
}

function show(element) {
  find("welcome").hidden = true;
  find("messages").append(element);
  isAtEnd = true;
  scrollDown();
}

// What the reader sees

let isAtEnd = true; // follow the text, unless the reader has scrolled up

function scrollDown() {
  const log = find("log");
  if (isAtEnd) requestAnimationFrame(() => log.scrollTo(0, log.scrollHeight));
}

function showSend() {
  find("send").hidden = Boolean(running);
  find("stop").hidden = !running;
  find("send").disabled = !server || !find("prompt").value.trim();
}

function fitPrompt() {
  const area = find("prompt");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
  showSend();
}

function announce(text) {
  find("status").textContent = text;
}

function showTree() {
  document.body.classList.toggle("without-tree", !settings.tree);
  find("toggle-tree").setAttribute("aria-expanded", settings.tree);
}

function count(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

// Settings

function openSettings() {
  find("system").value = settings.system;
  find("temperature").value = settings.temperature ?? server?.temperature ?? "";
  find("max-tokens").value = settings.maxTokens ?? "";
  find("think").checked = settings.think;
  find("keep").checked = settings.keep;
  find("key").value = readKey();
  find("key-row").hidden &&= !readKey();
  if (!find("settings").open) find("settings").showModal();
}

function takeSettings() {
  const number = (id) => (find(id).value === "" || !find(id).validity.valid ? null : find(id).valueAsNumber);
  settings.system = find("system").value;
  const temperature = number("temperature");
  settings.temperature = temperature === server?.temperature ? null : temperature;
  settings.maxTokens = number("max-tokens");
  settings.think = find("think").checked;
  settings.keep = find("keep").checked;
  writeSettings(settings);
  keepMessages();
  const key = find("key").value.trim();
  if (key !== readKey() || !server) {
    writeKey(key);
    find("key-note").hidden = true;
    if (key) connect();
  }
  find("prompt").focus();
}

function showFacts() {
  find("think-row").hidden = !server.can_think;
  const budget = server.budget === "auto" ? `chosen each round, up to ${server.max_budget}` : server.budget;
  const facts = [
    ["Draft", server.has_draft ? "yes" : "none"],
    ["Budget", server.max_budget ? `${budget} nodes` : "0: no drafting"],
    ["Context", `${server.max_ctx.toLocaleString("en")} tokens`],
    ["Server", `draftree ${server.version}`],
  ];
  find("facts").replaceChildren(
    ...facts.map(([name, value]) => {
      const row = make("div");
      row.append(make("dt", "", name), make("dd", "", String(value)));
      return row;
    }),
  );
}

// Keys and buttons

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit(find("prompt").value);
});
find("prompt").addEventListener("input", fitPrompt);
find("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit(find("prompt").value);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !find("settings").open) running.abort();
});
find("stop").addEventListener("click", () => {
  running?.abort();
  find("prompt").focus();
});
find("examples").addEventListener("click", (event) => {
  if (event.target.matches("button")) submit(event.target.textContent);
});
find("log").addEventListener("scroll", () => {
  const log = find("log");
  isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
});
find("new-chat").addEventListener("click", newChat);
find("toggle-theme").addEventListener("click", toggleTheme);
find("toggle-tree").addEventListener("click", () => {
  settings.tree = !settings.tree;
  writeSettings(settings);
  showTree();
});
find("open-settings").addEventListener("click", openSettings);
find("settings").addEventListener("close", takeSettings);

showTree();
panel.showExample();
restoreMessages();
connect();
