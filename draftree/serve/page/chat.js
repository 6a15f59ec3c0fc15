// The conversation on the page: what is asked, the reply as it comes, and every way to change either.
// Holds a Conversation, the views of its path, and the reply that is being written.

import { Conversation, countCharacters, makeId, textOf } from "./conversation.js";
import { announce, count, find, make, makeButton, showToast } from "./dom.js";
import { charactersPerToken, showGauge } from "./gauge.js";
import { QuestionView, ReplyView, makeChunk } from "./message.js";
import { writeReply } from "./reply.js";
import { Scroll } from "./scroll.js";
import { writeCurrent } from "./store.js";
import { ApiError } from "./stream.js";

const CHUNK = 20; // messages that are drawn together, of a long conversation
const SHORTENED = 0.6; // of the context, when the oldest messages are left out

export class Chat {
  /** parts: settings, server, dialog (of the settings), panel, history, files; onChange: called when
   * the reply or the conversations are others. */
  constructor(parts, onChange) {
    Object.assign(this, parts);
    this.onChange = onChange;
    this.conversation = new Conversation();
    this.views = []; // of the conversation's path
    this.draft = null; // the view of a reply that is not part of it: being written, or failed
    this.running = null; // {controller, ended} of the reply being written
    this.scroll = new Scroll(find("log"), find("messages"));
  }

  // Conversations

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    writeCurrent(conversation.id);
    find("messages").replaceChildren();
    this.views = [];
    this.showPath();
    this.panel.showExample();
    this.scroll.follow();
    this.onChange();
  }

  /** An empty conversation; the one before stays in the list. */
  restart() {
    this.open(new Conversation());
    find("prompt").focus();
  }

  /** Writes a conversation down, or deletes one of which nothing is left. */
  async keep(conversation = this.conversation) {
    if (conversation.messages.size) await this.history.put(conversation.record);
    else await this.history.delete(conversation.id);
    this.onChange();
  }

  changed() {
    writeCurrent(this.conversation.id);
    this.showPath();
    this.keep();
  }

  // What is shown

  /** Views of the path: those that are there already stay. */
  showPath() {
    const { path } = this.conversation;
    if (this.draft && !this.views.includes(this.draft)) this.draft.element.remove();
    this.draft = null;
    let numSame = 0;
    while (numSame < path.length && this.views[numSame]?.message === path[numSame]) numSame += 1;
    for (const view of this.views.splice(numSame)) view.element.remove();
    const fresh = path.slice(numSame).map((message) => this.makeView(message));
    this.views.push(...fresh);
    while (fresh.length > 2 * CHUNK) find("messages").append(makeChunk(fresh.splice(0, CHUNK)));
    for (const view of fresh) {
      find("messages").append(view.element);
      view.end();
    }
    this.showState();
  }

  makeView(message) {
    const View = message.role === "user" ? QuestionView : ReplyView;
    return new View(message, this.actionsFor(message));
  }

  /** What depends on more than one message: an offer to send, where sending begins, the gauge. */
  showState() {
    const last = this.views.at(-1);
    for (const view of this.views.slice(-2).filter((one) => one instanceof QuestionView)) {
      view.offer(view === last && !this.draft ? () => this.answer() : null);
    }
    find("messages").querySelector(".left-out")?.remove();
    const first = this.views.findIndex(({ message }) => message.id === this.conversation.start);
    if (first > 0) this.views[first].element.prepend(this.makeLeftOut());
    find("welcome").hidden = this.views.length > 0;
    this.showGauge();
  }

  makeLeftOut() {
    const line = make("p", "left-out");
    const sendAll = () => {
      this.conversation.start = null;
      this.changed();
    };
    line.append(make("span", "", "The messages above are no longer sent."), makeButton("Send all", sendAll));
    return line;
  }

  showGauge() {
    const more = this.files.files.reduce((sum, { text }) => sum + text.length, find("prompt").value.length);
    showGauge(this.conversation.sent, more, this.server.contextLength);
  }

  // Asking

  /** Sends what is written and attached; false if that is not possible now. */
  submit(text) {
    const isEmpty = !text.trim() && !this.files.files.length;
    if (this.running || !this.server.isReady || isEmpty) return false;
    this.ask(text, this.files.take());
    return true;
  }

  /** A question, beside the last one where that got no reply. */
  ask(text, files = [], parent = this.conversation.leaf) {
    const above = this.conversation.messages.get(parent);
    const place = above?.role === "user" ? above.parent : parent;
    this.conversation.add({ role: "user", content: text, ...(files.length ? { files } : {}) }, place);
    this.changed();
    this.answer();
  }

  /** A reply to the question that stands last. */
  async answer() {
    if (this.running || !this.server.isReady) return;
    const { conversation } = this;
    const parent = conversation.leaf;
    const view = this.makeView({ id: makeId(), parent, role: "assistant", content: "" });
    this.showPath(); // without a reply that failed
    this.draft = view;
    find("messages").append(view.element);
    const outcome = await this.run(view, conversation.sent);
    if (outcome.error) return this.fail(view, outcome.error, () => this.answer());
    const isOpen = this.conversation === conversation;
    if (view.text || view.reasoning) {
      conversation.add(view.message, parent);
      if (isOpen) this.views.push(view);
      view.end();
    } else if (conversation.children.get(parent).length) conversation.select(parent);
    if (isOpen) this.showPath();
    this.keep(conversation);
  }

  /** More of a reply that was cut off: the last message is the assistant's, so the server goes on from it. */
  async resume(view) {
    if (this.running || !this.server.isReady) return;
    const outcome = await this.run(view, this.conversation.sent);
    if (outcome.error) this.fail(view, outcome.error, () => this.resume(view));
    else view.end();
    this.showState();
    this.keep();
  }

  /** Writes into a view; its message gets all there is to know of the reply. */
  async run(view, sent) {
    const controller = new AbortController();
    const { promise: ended, resolve } = Promise.withResolvers();
    this.running = { controller, ended };
    this.showState();
    this.panel.reset();
    this.scroll.follow();
    view.begin();
    find("log").setAttribute("aria-busy", "true");
    announce("Writing a reply.");
    this.server.setOurs(true);
    this.onChange();
    const outcome = await writeReply(this.makeRequest(sent), view, this.panel, controller.signal);
    this.running = null;
    find("log").setAttribute("aria-busy", "false");
    this.server.setOurs(false);
    const { note, tokens, isCut } = outcome;
    const known = Object.entries({ note, tokens, isCut }).filter(([, value]) => value !== undefined);
    Object.assign(view.message, { content: view.text, ...Object.fromEntries(known) });
    if (view.reasoning) view.message.reasoning = view.reasoning;
    if (!outcome.error) announce(`Reply finished. ${note}`);
    queueMicrotask(resolve); // after what is done with the outcome
    this.onChange();
    return outcome;
  }

  makeRequest(sent) {
    const system = this.settings.system.trim();
    return {
      model: this.server.model,
      messages: [
        ...(system ? [{ role: "system", content: system }] : []),
        ...sent.map((message) => ({ role: message.role, content: textOf(message) })),
      ],
      stream: true,
      draftree: { stats: true, rounds: !find("panel").hidden },
      ...this.dialog.requestFields(sent.at(-1)?.role === "assistant"),
    };
  }

  stop() {
    this.running?.controller.abort();
  }

  // What can be done with a message, and with an error

  actionsFor(message) {
    const { conversation } = this;
    /** Once nothing is being written. */
    const whenIdle = (act) => async (value) => {
      this.stop();
      await this.running?.ended;
      if (this.conversation === conversation) act(value);
    };
    return {
      get versions() {
        return conversation.siblings(message);
      },
      edit: whenIdle((text) => this.edit(message, text)),
      remove: whenIdle(() => this.remove(message)),
      fork: whenIdle(() => this.fork(message)),
      select: whenIdle((id) => {
        conversation.select(id);
        this.changed();
        find("messages").querySelector(".versions button:not(:disabled)")?.focus();
      }),
      again: whenIdle(() => {
        conversation.leaf = message.parent;
        this.answer();
      }),
      resume: whenIdle(() => this.resume(this.views.find((view) => view.message === message))),
    };
  }

  edit(message, text) {
    if (message.role === "user") return this.ask(text, message.files, message.parent);
    const edited = { role: "assistant", content: text, note: "Edited", isCut: true };
    this.conversation.add(edited, message.parent);
    this.changed();
  }

  remove(message) {
    const { conversation } = this;
    const putBack = conversation.remove(message);
    this.changed();
    find("prompt").focus();
    showToast("Message deleted.", () => {
      putBack();
      if (this.conversation === conversation) this.showPath();
      this.keep(conversation);
    });
  }

  fork(message) {
    this.open(this.conversation.fork(message));
    this.keep();
    showToast("A chat of its own, with all up to that message.");
    find("prompt").focus();
  }

  fail(view, error, onAgain) {
    if (!(error instanceof ApiError)) console.error(error);
    if (!this.panel.rounds.length) this.panel.showExample();
    if (error.status === 401) this.dialog.askForKey();
    if (error.code === "context_length_exceeded") return this.offerShorter(view, onAgain);
    const wait = error.retryAfter ? ` Try again in ${count(error.retryAfter, "second")}.` : "";
    const earlier = this.conversation.children.get(this.conversation.leaf)?.at(-1);
    const goBack = () => {
      this.conversation.select(earlier);
      this.changed();
    };
    const choices = [["Try again", onAgain], ...(earlier ? [["Show the earlier reply", goBack]] : [])];
    view.fail(`${error.message}${wait}`, choices);
  }

  offerShorter(view, onAgain) {
    const { conversation, server } = this;
    const limit = server.contextLength ?? 0;
    const question = this.views.findLast((one) => one instanceof QuestionView);
    const perToken = charactersPerToken(conversation.sent);
    const isFirst = conversation.sent.filter(({ role }) => role === "user").length < 2;
    const isOne = isFirst || countCharacters(question.message) > limit * perToken;
    const what = isOne ? "message" : "conversation";
    const words = `This ${what} is longer than the ${count(limit, "token")} that the model can read.`;
    const shorten = () => {
      conversation.shorten(SHORTENED * limit * perToken);
      onAgain();
    };
    const edit = () => {
      this.showPath();
      question.startEditing();
    };
    view.fail(words, [isOne ? ["Shorten the message", edit] : ["Leave out the oldest messages", shorten]]);
  }
}
