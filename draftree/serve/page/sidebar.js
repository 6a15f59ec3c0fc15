// The list of conversations: search, open, rename, delete, export, import, and the switch that keeps
// nothing. Beside the chat where there is room, over it where there is not.

import { Conversation, makeId, readExport, writeExport } from "./conversation.js";
import { confirm, count, find, make, makeButton, makeIconButton, showToast } from "./dom.js";
import { writeSettings } from "./store.js";

const NUM_SHOWN = 200;

const findRow = (id) => [...find("list").children].find((row) => row.dataset.id === id);

export class Sidebar {
  /** chat: has `conversation`, `open(conversation)` and `restart()`. */
  constructor(history, settings, chat) {
    Object.assign(this, { history, settings, chat });
    this.narrow = matchMedia("(max-width: 60rem)");
    find("toggle-history").addEventListener("click", () => this.toggle());
    find("close-history").addEventListener("click", () => this.close());
    find("veil").addEventListener("click", () => this.close());
    find("search").addEventListener("input", () => this.show());
    find("export").addEventListener("click", () => this.export());
    find("import").addEventListener("click", () => find("import-input").click());
    find("import-input").addEventListener("change", () => this.import());
    find("keep-nothing").addEventListener("change", () => this.switchKeeping());
    find("history").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.target.matches(".rename")) return;
      event.stopPropagation();
      this.close();
    });
    this.narrow.addEventListener("change", () => this.lay());
    history.watch(() => this.show());
    find("keep-nothing").checked = settings.keepsNothing;
    this.isOpen = settings.history && !this.narrow.matches;
    this.lay();
  }

  toggle() {
    if (this.isOpen) this.close();
    else this.open(find("close-history"));
  }

  async open(focused) {
    this.isOpen = true;
    this.lay();
    await this.history.load();
    this.show();
    focused.focus();
  }

  close() {
    this.isOpen = false;
    this.lay();
    find("toggle-history").focus();
  }

  /** What lies under the list cannot be reached while it is there. */
  lay() {
    find("history").hidden = !this.isOpen;
    find("toggle-history").setAttribute("aria-expanded", this.isOpen);
    const isOver = this.isOpen && this.narrow.matches;
    find("veil").hidden = !isOver;
    for (const id of ["chat", "panel"]) find(id).inert = isOver;
    if (!this.narrow.matches && this.settings.history !== this.isOpen) {
      this.settings.history = this.isOpen;
      writeSettings(this.settings);
    }
  }

  /** The rows anew, at any time: what is focused stays so, and a name that is being written stays as it is. */
  show() {
    const list = find("list");
    if (!this.isOpen || list.querySelector(".rename")) return;
    const focused = document.activeElement;
    const row = focused.closest("#list > li");
    const place = row && [...row.children].indexOf(focused);
    const words = find("search").value.trim().toLowerCase();
    const all = this.history.list().map((record) => new Conversation(record));
    const found = words ? all.filter((conversation) => conversation.has(words)) : all;
    list.replaceChildren(...found.slice(0, NUM_SHOWN).map((one) => this.makeRow(one)));
    if (row) findRow(row.dataset.id)?.children[place].focus();
    find("list-note").hidden = found.length > 0;
    const keeping = `Conversations ${this.settings.keepsNothing ? "end with this tab" : "are kept in this browser"}.`;
    find("list-note").textContent = words ? "Nothing was found." : keeping;
    find("export").disabled = !all.length;
  }

  makeRow(conversation) {
    const row = make("li");
    row.dataset.id = conversation.id;
    const open = makeButton("", () => this.choose(conversation), "open");
    open.append(make("span", "", conversation.name), make("small", "", describeTime(conversation.updated)));
    if (conversation.id === this.chat.conversation.id) open.setAttribute("aria-current", "true");
    row.append(
      open,
      makeIconButton("edit", `Rename ${conversation.name}`, () => this.rename(row, conversation)),
      makeIconButton("remove", `Delete ${conversation.name}`, () => this.delete(conversation)),
    );
    return row;
  }

  choose(conversation) {
    this.chat.open(conversation);
    if (this.narrow.matches) this.close();
    else this.show();
    find("prompt").focus();
  }

  rename(row, conversation) {
    const field = make("input", "rename");
    field.value = conversation.name;
    field.setAttribute("aria-label", "Name of the conversation");
    const end = async (isKept) => {
      field.onblur = null;
      const target = conversation.id === this.chat.conversation.id ? this.chat.conversation : conversation;
      if (isKept) {
        target.title = field.value.trim();
        await this.history.put(target.record);
      }
      field.remove();
      this.show();
      findRow(target.id)?.children[1].focus();
    };
    field.onblur = () => end(true);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === "Escape") end(event.key === "Enter");
    });
    row.replaceChildren(field);
    field.select();
  }

  async delete(conversation) {
    const { record } = conversation;
    const isShown = conversation.id === this.chat.conversation.id;
    const row = findRow(conversation.id);
    const neighbour = (row.nextElementSibling ?? row.previousElementSibling)?.dataset.id;
    if (isShown) this.chat.restart();
    await this.history.delete(conversation.id);
    this.show();
    (findRow(neighbour)?.firstChild ?? find("search")).focus();
    showToast("Conversation deleted.", async () => {
      await this.history.put(record);
      if (isShown) this.chat.open(new Conversation(record));
      this.show();
    });
  }

  async export() {
    await this.history.load();
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([writeExport(this.history.list())], { type: "application/json" }));
    link.download = `draftree-${new Date().toISOString().slice(0, 10)}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  async import() {
    const [file] = find("import-input").files;
    find("import-input").value = "";
    let records;
    try {
      records = readExport(await file.text());
    } catch (error) {
      return showToast(error.message);
    }
    // One that is here already stays, and the other comes beside it unless they are the same.
    for (const record of records) {
      const known = this.history.records.get(record.id);
      if (known && JSON.stringify(known) === JSON.stringify(record)) continue;
      await this.history.put({ ...record, id: known ? makeId() : record.id });
    }
    this.show();
    showToast(`${count(records.length, "conversation")} imported.`);
  }

  async switchKeeping() {
    const box = find("keep-nothing");
    await this.history.load();
    const numKept = this.history.records.size;
    const question = `Delete ${count(numKept, "conversation")} that ${numKept === 1 ? "is" : "are"} kept in this browser?`;
    if (box.checked && numKept && !(await confirm(question, "Delete"))) box.checked = false;
    this.settings.keepsNothing = box.checked;
    writeSettings(this.settings);
    if (box.checked) await this.history.keepNothing();
    else {
      this.history.keepsNothing = false;
      await this.chat.keep();
    }
    this.show();
  }
}

function describeTime(time) {
  const then = new Date(time);
  const isToday = then.toDateString() === new Date().toDateString();
  if (!isToday) return then.toLocaleDateString("en", { day: "numeric", month: "short" });
  return then.toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", hour12: false });
}
