// The settings: a dialog, what of it goes into a request, and facts of the server.

import { find, make } from "./dom.js";
import { readKey, writeKey, writeSettings } from "./store.js";

// Fields that are numbers, by the name of the setting: where it stands, and what the API calls it.
const NUMBERS = {
  temperature: ["temperature", "temperature"],
  maxTokens: ["max-tokens", "max_completion_tokens"],
  topP: ["top-p", "top_p"],
  topK: ["top-k", "top_k"],
  minP: ["min-p", "min_p"],
  seed: ["seed", "seed"],
};

export class SettingsDialog {
  /** onKey: called when the API key has changed. */
  constructor(settings, onKey) {
    this.settings = settings;
    this.server = null;
    this.onKey = onKey;
    find("open-settings").addEventListener("click", () => this.open());
    find("settings").addEventListener("close", () => this.take());
    find("schema").addEventListener("input", () => this.checkSchema());
  }

  open() {
    const { settings } = this;
    for (const [name, [id]] of Object.entries(NUMBERS)) find(id).value = settings[name] ?? "";
    find("temperature").value ||= this.server?.about?.temperature ?? "";
    find("system").value = settings.system;
    find("stop-texts").value = settings.stop.join("\n");
    find("schema").value = settings.schema;
    this.checkSchema();
    find("think").checked = settings.think;
    find("key").value = readKey();
    find("key-row").hidden &&= !readKey();
    const isSampling = ["topP", "topK", "minP", "seed"].some((name) => settings[name] !== null);
    find("sampling").open = isSampling || settings.stop.length > 0 || settings.schema !== "";
    if (!find("settings").open) find("settings").showModal();
  }

  askForKey() {
    const note = readKey() ? "The API key is wrong." : "This server asks for an API key.";
    find("key-note").textContent = note;
    find("key-note").hidden = find("key-row").hidden = false;
    this.open();
    find("key").focus();
  }

  checkSchema() {
    const field = find("schema");
    field.setCustomValidity(parseSchema(field.value) === undefined ? "This is not a JSON object." : "");
  }

  take() {
    const { settings } = this;
    for (const [name, [id]] of Object.entries(NUMBERS)) {
      const field = find(id);
      settings[name] = field.value === "" || !field.validity.valid ? null : field.valueAsNumber;
    }
    if (settings.temperature === this.server?.about?.temperature) settings.temperature = null;
    settings.system = find("system").value;
    settings.stop = find("stop-texts").value.split("\n").filter(Boolean);
    if (find("schema").validity.valid) settings.schema = find("schema").value.trim();
    settings.think = find("think").checked;
    writeSettings(settings);
    const key = find("key").value.trim();
    if (key !== readKey() || !this.server) {
      writeKey(key);
      find("key-note").hidden = true;
      if (key) this.onKey();
    }
    find("prompt").focus();
  }

  /** The fields of a request that are set here. isBegun: of one that goes on with a reply, which cannot
   * think first. */
  requestFields(isBegun) {
    const { settings } = this;
    const fields = {};
    for (const [name, [, field]] of Object.entries(NUMBERS)) {
      if (settings[name] !== null) fields[field] = settings[name];
    }
    if (settings.stop.length) fields.stop = settings.stop;
    const schema = parseSchema(settings.schema);
    if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "reply", schema } };
    const canThink = this.server.about.can_think && !isBegun;
    if (canThink) fields.chat_template_kwargs = { enable_thinking: settings.think };
    return fields;
  }

  showFacts(server) {
    this.server = server;
    const { about } = server;
    find("think-row").hidden = !about.can_think;
    const budget = about.budget === "auto" ? `chosen each round, up to ${about.max_budget}` : about.budget;
    const facts = [
      ["Draft", about.has_draft ? "yes" : "none"],
      ["Budget", about.max_budget ? `${budget} nodes` : "0: no drafting"],
      ["Context", `${server.contextLength.toLocaleString("en")} tokens`],
      ["Server", `draftree ${about.version}`],
    ];
    find("facts").replaceChildren(
      ...facts.map(([name, value]) => {
        const row = make("div");
        row.append(make("dt", "", name), make("dd", "", String(value)));
        return row;
      }),
    );
  }
}

/** A JSON schema; null if there is none, undefined if it is none. */
function parseSchema(text) {
  if (!text.trim()) return null;
  try {
    const schema = JSON.parse(text);
    return schema && typeof schema === "object" && !Array.isArray(schema) ? schema : undefined;
  } catch {
    return undefined;
  }
}
