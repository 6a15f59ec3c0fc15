// One message on the page: a question with its files, or a reply that grows while it is written and
// ends with a remark or an error. What its buttons do, the conversation says: `actions`.

import { TextView } from "./markdown.js";
import { find, make, makeButton, makeCopyButton, makeIconButton } from "./dom.js";

const NEAR = "1200px";
let observer = null;

/** Messages of a long conversation, which are finished when they come near to being seen. */
export function makeChunk(views) {
  observer ??= new IntersectionObserver(
    (entries) => {
      for (const { target } of entries.filter(({ isIntersecting }) => isIntersecting)) {
        observer.unobserve(target);
        target.finish();
      }
    },
    { root: find("log"), rootMargin: NEAR },
  );
  const chunk = make("div", "chunk");
  for (const view of views) view.sketch?.();
  chunk.append(...views.map(({ element }) => element));
  chunk.finish = () => views.forEach((view) => view.end());
  observer.observe(chunk);
  return chunk;
}

class MessageView {
  /** actions: edit(text), remove(), fork(), select(id), and versions: the ids of all of them. */
  constructor(message, actions, className, label) {
    Object.assign(this, { message, actions });
    this.element = make("article", className);
    this.element.setAttribute("aria-label", label);
  }

  /** Where a message stands among its versions, if there are others, and buttons to see them. */
  makeSwitch() {
    const { versions: ids, select } = this.actions;
    if (ids.length < 2) return [];
    const place = ids.indexOf(this.message.id);
    const group = make("div", "versions");
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", "Versions");
    const step = (icon, label, to) => {
      const button = makeIconButton(icon, label, () => select(ids[to]));
      button.disabled = ids[to] === undefined;
      return button;
    };
    group.append(
      step("previous", "Earlier version", place - 1),
      make("span", "", `${place + 1}/${ids.length}`),
      step("next", "Later version", place + 1),
    );
    return [group];
  }

  /** In the place of the text, a field to change it. onDone gets the new text. */
  edit(verb, onDone) {
    if (this.element.querySelector(".editor")) return;
    const form = make("form", "editor");
    const area = make("textarea");
    area.value = this.message.content;
    area.setAttribute("aria-label", "Message, changed");
    const fit = () => {
      area.style.height = "auto";
      area.style.height = `${area.scrollHeight + 2}px`;
    };
    const close = () => {
      form.remove();
      this.element.classList.remove("editing");
      this.element.querySelector('[aria-label="Edit"]')?.focus();
    };
    const send = make("button", "main", verb);
    const row = make("div", "ends");
    row.append(makeButton("Cancel", close, ""), send);
    form.append(area, row);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = area.value;
      if (!text.trim() && !this.message.files?.length) return;
      close();
      onDone(text);
    });
    area.addEventListener("input", fit);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this.element.classList.add("editing");
    this.element.prepend(form);
    fit();
    area.focus();
  }
}

export class QuestionView extends MessageView {
  constructor(message, actions) {
    super(message, actions, "question", "You");
    const bubble = make("div", "bubble");
    for (const file of message.files ?? []) bubble.append(makeFile(file));
    if (message.content) bubble.append(make("p", "", message.content));
    this.element.append(bubble);
  }

  end() {
    const { message, actions } = this;
    const footer = make("footer");
    const buttons = make("div", "actions");
    buttons.append(
      makeCopyButton(() => message.content, true),
      makeIconButton("edit", "Edit", () => this.startEditing()),
      makeIconButton("fork", "Continue in a new chat", actions.fork),
      makeIconButton("remove", "Delete", actions.remove),
    );
    footer.append(...this.makeSwitch(), buttons);
    this.element.querySelector(".bubble").after(footer);
  }

  startEditing() {
    this.edit("Send", this.actions.edit);
  }

  /** There is no reply: offer to ask for one. null: there is one now. */
  offer(onSend) {
    this.element.querySelector(".unanswered")?.remove();
    if (!onSend) return;
    const box = make("div", "unanswered");
    box.append(make("span", "", "No reply yet."), makeButton("Send again", onSend));
    this.element.append(box);
  }
}

function makeFile({ name, text }) {
  const details = make("details", "file");
  const content = make("pre", "", text);
  content.tabIndex = 0;
  details.append(make("summary", "", name), content);
  return details;
}

export class ReplyView extends MessageView {
  constructor(message, actions) {
    super(message, actions, "reply", "Reply");
    this.text = message.content;
    this.reasoning = message.reasoning ?? "";
    this.isWriting = false;
    this.body = make("div", "body");
    this.view = new TextView(this.body);
    this.element.append(this.body);
    this.frame = null;
    if (this.reasoning) this.addReasoning("");
  }

  /** The reply grows from now on. */
  begin() {
    this.isWriting = true;
    this.element.classList.add("writing");
    for (const old of this.element.querySelectorAll("footer, .error")) old.remove();
  }

  /** While there is no text yet: what the server does, "" for nothing. */
  showProgress(text) {
    if (this.text || this.reasoning) return;
    this.progress ??= this.element.insertBefore(make("p", "progress"), this.body);
    this.progress.textContent = text;
    this.progress.hidden = !text;
  }

  add(text) {
    this.text += text;
    this.refresh();
  }

  addReasoning(text) {
    if (!this.thought) {
      this.thought = make("details", "reasoning");
      this.thought.append(make("summary", "", "Thinking"), make("p"));
      this.element.prepend(this.thought);
    }
    this.reasoning += text;
    this.refresh();
  }

  /** Draw at most once a frame, however fast the text comes. */
  refresh() {
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.progress?.remove();
    this.progress = undefined;
    cancelAnimationFrame(this.frame);
    this.frame = null;
    if (this.text) this.view.update(this.text, !this.isWriting);
    if (!this.thought) return;
    this.thought.lastElementChild.textContent = this.reasoning.trim();
    if (this.text) this.thought.firstElementChild.textContent = "Thoughts";
  }

  stop() {
    this.isWriting = false;
    this.draw();
    this.element.classList.remove("writing");
  }

  sketch() {
    this.body.classList.add("plain");
    this.body.textContent = this.text;
  }

  /** Text, note and buttons, of the message as it is now. */
  end() {
    this.stop();
    const { message, actions } = this;
    const footer = make("footer");
    footer.append(...this.makeSwitch());
    if (message.note) footer.append(make("span", "note", message.note));
    const buttons = make("div", "actions");
    buttons.append(
      makeCopyButton(() => this.text, true),
      makeIconButton("again", "Again", actions.again),
      makeIconButton("edit", "Edit", () => this.edit("Keep", actions.edit)),
      makeIconButton("fork", "Continue in a new chat", actions.fork),
      makeIconButton("remove", "Delete", actions.remove),
    );
    footer.append(buttons);
    if (message.isCut && this.text) footer.append(makeButton("Continue", actions.resume, "quiet resume"));
    this.element.append(footer);
  }

  /** choices: [label, function] of what can be done about it. */
  fail(text, choices) {
    this.stop();
    const box = make("div", "error");
    box.setAttribute("role", "alert");
    box.append(make("p", "", text));
    for (const [label, act] of choices) box.append(makeButton(label, act));
    this.element.append(box);
  }
}
