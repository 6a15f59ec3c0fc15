// One message on the page. A reply grows while it is written, and ends with a note or an error.

import { TextView, make, makeCopyButton } from "./text.js";

export function makeQuestion(text) {
  const article = make("article", "question");
  article.setAttribute("aria-label", "You");
  article.append(make("p", "", text));
  return article;
}

export class ReplyView {
  /** index: its place among the messages. */
  constructor(index) {
    this.index = index;
    this.text = "";
    this.reasoning = "";
    this.element = make("article", "reply writing");
    this.element.setAttribute("aria-label", "Reply");
    this.body = make("div", "body");
    this.view = new TextView(this.body);
    this.element.append(this.body);
    this.frame = null;
  }

  /** While there is no text yet: what the server does, "" for nothing. */
  showProgress(text) {
    this.progress ??= this.element.insertBefore(make("p", "progress"), this.body);
    this.progress.textContent = text;
    this.progress.hidden = !text || Boolean(this.text || this.reasoning);
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
    this.view.update(this.text);
    if (this.thought) {
      this.thought.lastElementChild.textContent = this.reasoning.trim();
      if (this.text) this.thought.firstElementChild.textContent = "Thoughts";
    }
  }

  /** note: what it cost, or why it ended. onAgain: makes another reply in its place. */
  end(note, onAgain) {
    this.draw();
    this.element.classList.remove("writing");
    const footer = make("footer");
    footer.append(make("span", "", note));
    const actions = make("div", "actions");
    if (this.text) actions.append(makeCopyButton(() => this.text));
    if (onAgain) actions.append(makeButton("Again", onAgain));
    footer.append(actions);
    this.element.append(footer);
  }

  fail(message, onAgain) {
    this.draw();
    this.element.classList.remove("writing");
    const box = make("div", "error");
    box.setAttribute("role", "alert");
    box.append(make("p", "", message));
    if (onAgain) box.append(makeButton("Try again", onAgain));
    this.element.append(box);
  }
}

function makeButton(label, onClick) {
  const button = make("button", "quiet again", label);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
}
