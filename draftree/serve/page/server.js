// What the server does: asked every few seconds while the page is looked at, and shown by the light
// in the header. In: /health, and once it is ready what it says of itself and its models.

import { find } from "./dom.js";
import { readKey } from "./store.js";
import { getJson } from "./stream.js";

const READY_MS = 4000;
const WAITING_MS = 1000;
const BANNERS = {
  loading: "The server is loading the model.",
  recovering: "The engine failed and is being opened again.",
  stopping: "The server is stopping.",
  failed: "The server’s engine has failed.",
  unreachable: "The server cannot be reached. Trying again.",
};

export class Server {
  /** onReady: called whenever it has become ready or another model is chosen; onKey: when a key is
   * needed. */
  constructor(onReady, onKey) {
    this.about = null; // what the server says of itself, once it is ready
    this.models = []; // {id, context_length?}
    this.model = "";
    this.state = "connecting";
    this.timer = null;
    this.isAsking = false;
    this.isOurs = false; // whether it writes a reply for this page
    Object.assign(this, { onReady, onKey });
    document.addEventListener("visibilitychange", () => document.hidden || this.ask());
    find("model-choice").addEventListener("change", () => this.choose(find("model-choice").value));
  }

  get isReady() {
    return this.about !== null;
  }

  /** Most tokens of a conversation with the chosen model, or null if it is not known. */
  get contextLength() {
    const chosen = this.models.find(({ id }) => id === this.model);
    return chosen?.context_length ?? this.about?.max_ctx ?? null;
  }

  /** Asks now, and again after a while. */
  async ask() {
    if (this.isAsking) return;
    this.isAsking = true;
    clearTimeout(this.timer);
    const state = await this.look();
    this.isAsking = false;
    this.show(state);
    if (state !== "locked" && !document.hidden) {
      this.timer = setTimeout(() => this.ask(), this.isReady ? READY_MS : WAITING_MS);
    }
  }

  async look() {
    let health;
    try {
      health = await (await fetch("health")).json();
      if (health.status === "ok" && !this.isReady) await this.meet();
    } catch (error) {
      this.about = null;
      if (error.status === 401) this.onKey();
      return { 401: "locked", 503: "loading" }[error.status] ?? "unreachable";
    }
    this.numWaiting = health.queue;
    if (health.status !== "ok") {
      this.about = null;
      return health.status;
    }
    return health.running || health.queue ? "busy" : "ready";
  }

  /** What it says of itself; the model chosen before is kept if it is still there. */
  async meet() {
    const about = await getJson("v1/draftree/engine", readKey());
    const { data } = await getJson("v1/models", readKey());
    this.about = about;
    this.models = data;
    this.model = data.some(({ id }) => id === this.model) ? this.model : about.model;
    find("model-choice").replaceChildren(...data.map(({ id }) => new Option(id)));
    find("model-choice").value = this.model;
    this.choose(this.model);
  }

  choose(model) {
    this.model = model;
    find("prompt").placeholder = `Message ${model}`;
    this.onReady(this);
  }

  /** isOurs: whether this page's own reply is being written. */
  setOurs(isOurs) {
    this.isOurs = isOurs;
    if (this.state === "ready" || this.state === "busy") this.show(isOurs ? "busy" : "ready");
  }

  show(state) {
    this.state = this.isOurs && state === "ready" ? "busy" : state;
    document.body.dataset.state = this.state;
    document.body.classList.toggle("ready", this.isReady);
    const banner = BANNERS[this.state] ?? "";
    if (find("banner").textContent !== banner) find("banner").textContent = banner;
    find("banner").hidden = !banner;
    find("state").textContent = this.describe();
    find("model").title = `The server is ${this.describe() || "ready"}`;
    const isChoice = this.isReady && this.models.length > 1;
    find("model-choice").hidden = !isChoice;
    find("model-name").hidden = isChoice;
    const unknown = this.state === "locked" ? "API key needed" : this.state;
    find("model-name").textContent = this.isReady ? this.model : unknown;
  }

  describe() {
    if (this.state !== "busy") return this.isReady ? "" : this.state;
    return this.numWaiting ? `busy, ${this.numWaiting} waiting` : "busy";
  }
}
