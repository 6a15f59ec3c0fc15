// What outlives the page besides conversations: settings, and until the tab is closed the API key and
// which conversation is open. Storage may be switched off or full; then nothing is kept.

const DEFAULTS = {
  system: "",
  temperature: null, // null: the server's own, also below
  maxTokens: null,
  topP: null,
  topK: null,
  minP: null,
  seed: null,
  stop: [],
  schema: "",
  think: true,
  keepsNothing: false,
  history: false, // whether the list of conversations is open
  tree: null, // whether the trees are shown; null: where there is a draft
  hadDraft: true, // of the server seen last
};

function read(storage, name, fallback) {
  try {
    return JSON.parse(globalThis[storage].getItem(`draftree.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

function write(storage, name, value) {
  try {
    globalThis[storage].setItem(`draftree.${name}`, JSON.stringify(value));
  } catch {
    // Nothing is kept.
  }
}

export const readSettings = () => ({ ...DEFAULTS, ...read("localStorage", "settings", {}) });
export const writeSettings = (settings) => write("localStorage", "settings", settings);
export const readKey = () => read("sessionStorage", "key", "");
export const writeKey = (key) => write("sessionStorage", "key", key);
export const readCurrent = () => read("sessionStorage", "conversation", null);
export const writeCurrent = (id) => write("sessionStorage", "conversation", id);

/** Switches between light and dark; a choice that is the system's is not kept. */
export function toggleTheme() {
  const isSystemDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : isSystemDark;
  const chosen = isDark ? "light" : "dark";
  try {
    if (isDark === isSystemDark) {
      root.dataset.theme = chosen;
      localStorage.setItem("draftree.theme", chosen);
    } else {
      delete root.dataset.theme;
      localStorage.removeItem("draftree.theme");
    }
  } catch {
    root.dataset.theme = chosen;
  }
}
