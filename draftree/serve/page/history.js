// Conversations that are kept in this browser, in its database. Where that is switched off or full,
// or nothing is to be kept, they live as long as the page. Knows records, and nothing of the page.

const STORE = "conversations";
const NAME = "draftree";

export class History {
  constructor() {
    this.keepsNothing = false;
    this.records = new Map(); // all that are known, by their ids
    this.loading = null; // a promise, once they were asked for
    this.writing = Promise.resolve();
    this.channel = "BroadcastChannel" in globalThis ? new BroadcastChannel(NAME) : null;
  }

  /** onChange: called when another tab has changed something. */
  watch(onChange) {
    this.channel?.addEventListener("message", async () => {
      this.loading = null;
      await this.load();
      onChange();
    });
  }

  load() {
    this.loading ??= this.keepsNothing ? Promise.resolve() : this.read();
    return this.loading;
  }

  async read() {
    const found = await this.run("readonly", (store) => store.getAll());
    if (found) this.records = new Map(found.map((record) => [record.id, record]));
  }

  /** The newest first. */
  list() {
    return [...this.records.values()].sort((a, b) => b.updated - a.updated);
  }

  async put(record) {
    await this.load(); // which would forget it
    this.records.set(record.id, record);
    if (!this.keepsNothing) await this.run("readwrite", (store) => store.put(record));
  }

  async delete(id) {
    await this.load();
    this.records.delete(id);
    await this.run("readwrite", (store) => store.delete(id));
  }

  /** What is there is deleted as well, except the conversation on the page. */
  async keepNothing() {
    this.keepsNothing = true;
    this.records.clear();
    await this.run("readwrite", (store) => store.clear());
  }

  /** One request to the database; requests follow each other. undefined where it cannot be used. */
  run(mode, act) {
    const done = this.writing.then(() => request(mode, act)).catch(() => undefined);
    if (mode === "readwrite") done.then(() => this.channel?.postMessage("changed"));
    this.writing = done;
    return done;
  }
}

async function request(mode, act) {
  const database = await open();
  try {
    const transaction = database.transaction(STORE, mode);
    const result = settle(act(transaction.objectStore(STORE)));
    await Promise.all([
      result,
      new Promise((resolve, reject) => {
        transaction.addEventListener("complete", resolve);
        transaction.addEventListener("abort", () => reject(transaction.error));
      }),
    ]);
    return result;
  } finally {
    database.close();
  }
}

function open() {
  const opening = indexedDB.open(NAME, 1);
  opening.addEventListener("upgradeneeded", () => opening.result.createObjectStore(STORE, { keyPath: "id" }));
  return settle(opening);
}

function settle(asked) {
  return new Promise((resolve, reject) => {
    asked.addEventListener("success", () => resolve(asked.result));
    asked.addEventListener("error", () => reject(asked.error));
  });
}
