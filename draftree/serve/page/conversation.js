// A conversation: a tree of messages. An edited message or another reply is a branch beside the old
// one, so that nothing written is lost; the path from the first message to the leaf is what is shown.
// Knows nothing of the page and of the server.

const TITLE_LENGTH = 60;

export function makeId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Conversation {
  /** record: what `record` gave, of a conversation that was kept. */
  constructor(record = {}) {
    this.id = record.id ?? makeId();
    this.title = record.title ?? ""; // given by the user; "" is none
    this.created = record.created ?? Date.now();
    this.updated = record.updated ?? this.created;
    this.leaf = record.leaf ?? null;
    this.start = record.start ?? null; // the first message that is sent; null: all of them
    this.messages = new Map((record.messages ?? []).map((message) => [message.id, message]));
    this.children = new Map([[null, []]]);
    for (const { id } of this.messages.values()) this.children.set(id, []);
    for (const { id, parent } of this.messages.values()) this.children.get(parent).push(id);
  }

  /** For storage, as plain data. */
  get record() {
    const { id, title, created, updated, leaf, start } = this;
    return { id, title, created, updated, leaf, start, messages: [...this.messages.values()] };
  }

  get name() {
    const first = this.path[0];
    const text = this.title || first?.content || first?.files?.[0]?.name || "";
    const line = text.trim().split("\n")[0];
    return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH).trimEnd()}…` : line || "New chat";
  }

  /** The messages shown, oldest first. */
  get path() {
    const found = [];
    for (let id = this.leaf; id !== null; id = this.messages.get(id).parent) found.push(this.messages.get(id));
    return found.reverse();
  }

  /** Those of them that are sent. */
  get sent() {
    const path = this.path;
    return path.slice(Math.max(path.findIndex(({ id }) => id === this.start), 0));
  }

  get last() {
    return this.messages.get(this.leaf) ?? null;
  }

  /** A message after the leaf, or where it says; it becomes the leaf. */
  add(fields, parent = this.leaf) {
    const message = Object.assign(fields, { id: fields.id ?? makeId(), parent, created: Date.now() });
    this.messages.set(message.id, message);
    this.children.set(message.id, []);
    this.children.get(parent).push(message.id);
    this.leaf = message.id;
    this.updated = Date.now();
    return message;
  }

  /** A message and those it could be exchanged for, oldest first. */
  siblings(message) {
    return this.children.get(message.parent);
  }

  /** Shows the branch of a message, down to its newest end. */
  select(id) {
    this.leaf = id;
    for (let next = id; next !== undefined; next = this.children.get(next).at(-1)) this.leaf = next;
  }

  /** Takes a message away with all that follows it. Returns a function that puts them back. */
  remove(message) {
    const { leaf } = this;
    const gone = this.below(message.id);
    for (const { id } of gone) this.messages.delete(id);
    const siblings = this.siblings(message);
    const place = siblings.indexOf(message.id);
    siblings.splice(place, 1);
    if (siblings.length) this.select(siblings[Math.min(place, siblings.length - 1)]);
    else this.leaf = message.parent;
    return () => {
      for (const one of gone) this.messages.set(one.id, one);
      this.children.get(message.parent).splice(place, 0, message.id);
      this.leaf = leaf;
    };
  }

  below(id) {
    const found = [id];
    for (const one of found) found.push(...this.children.get(one)); // grows while it is walked through
    return found.map((one) => this.messages.get(one));
  }

  /** A conversation of its own that begins with this one's path up to a message. */
  fork(message) {
    const path = this.path;
    const copied = new Conversation();
    for (const { content, role, files, reasoning, note, tokens } of path.slice(0, path.indexOf(message) + 1)) {
      copied.add({ role, content, files, reasoning, note, tokens });
    }
    return copied;
  }

  /** Leaves out the oldest questions, with their replies, until at most this many characters are
   * sent; at least one question, but not the last. False if there is none to leave out. */
  shorten(maxCharacters) {
    const sent = this.sent;
    const starts = sent.flatMap(({ role }, i) => (role === "user" && i ? [i] : []));
    if (!starts.length) return false;
    const lengths = sent.map(countCharacters);
    const rest = (from) => lengths.slice(from).reduce((sum, length) => sum + length, 0);
    this.start = sent[starts.find((from) => rest(from) <= maxCharacters) ?? starts.at(-1)].id;
    return true;
  }

  /** Whether any message has these words, lower case. */
  has(words) {
    const texts = [this.name, ...[...this.messages.values()].map(({ content }) => content)];
    return texts.some((text) => text.toLowerCase().includes(words));
  }
}

/** What the model reads of a message: its files first, each with its name. */
export function textOf({ content, files = [] }) {
  const shown = files.map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length + 1)));
    return `${name}:\n${fence}\n${text}\n${fence}\n\n`;
  });
  return shown.join("") + content;
}

export function countCharacters(message) {
  return message.content.length + (message.files ?? []).reduce((sum, { text }) => sum + text.length, 0);
}

/** Conversations of a file that was exported, or an error that says what is wrong with it. */
export function readExport(text) {
  try {
    const { format, conversations } = JSON.parse(text);
    if (format === "draftree" && conversations.every(isWhole)) return conversations;
  } catch {
    // Of some other kind.
  }
  throw new Error("That file was not exported from this page.");
}

/** Whether every message has its fields, and comes after the one that it answers. */
function isWhole(record) {
  if (typeof record?.id !== "string" || !Array.isArray(record.messages)) return false;
  const seen = new Set([null]);
  for (const one of record.messages) {
    const isMessage = typeof one?.id === "string" && typeof one.content === "string";
    if (!isMessage || !["user", "assistant"].includes(one.role) || !seen.has(one.parent)) return false;
    if (seen.has(one.id) || !(one.files ?? []).every((file) => typeof file?.text === "string")) return false;
    seen.add(one.id);
  }
  return seen.has(record.leaf);
}

export function writeExport(records) {
  return JSON.stringify({ format: "draftree", version: 1, conversations: records }, null, 1);
}
