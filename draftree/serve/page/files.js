// Text files that go with the next message: chosen by a button or dropped on the page, shown above
// the message until it is sent.

import { announce, count, find, make, makeIconButton, showToast } from "./dom.js";

const MAX_BYTES = 4 * 2 ** 20;

export class Files {
  /** onChange: called when files were added or taken away. */
  constructor(onChange) {
    this.files = []; // {name, text}
    this.onChange = onChange;
    const chooser = find("file-input");
    find("attach").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", async () => {
      await this.add([...chooser.files]);
      chooser.value = "";
      find("prompt").focus();
    });
    document.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      document.body.classList.add("dropping");
    });
    const endDrop = () => document.body.classList.remove("dropping");
    document.addEventListener("dragleave", (event) => event.relatedTarget || endDrop());
    document.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      endDrop();
      this.add([...event.dataTransfer.files]);
    });
  }

  async add(chosen) {
    for (const file of chosen) {
      const text = file.size > MAX_BYTES ? null : await readText(file);
      if (text !== null) this.files.push({ name: file.name, text });
      else showToast(`${file.name} is not a text file of at most ${MAX_BYTES / 2 ** 20} MB.`);
    }
    this.show();
  }

  /** What there is, which is then no longer there. */
  take() {
    const taken = this.files;
    this.files = [];
    this.show();
    return taken;
  }

  show() {
    find("files").hidden = !this.files.length;
    find("files").replaceChildren(
      ...this.files.map((file) => {
        const item = make("li");
        const remove = makeIconButton("close", `Remove ${file.name}`, () => {
          this.files = this.files.filter((other) => other !== file);
          this.show();
          find("prompt").focus();
        });
        item.append(make("span", "", file.name), make("small", "", count(file.text.length, "character")), remove);
        return item;
      }),
    );
    if (this.files.length) announce(`${count(this.files.length, "file")} attached.`);
    this.onChange();
  }
}

/** null if it is no text. */
async function readText(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
