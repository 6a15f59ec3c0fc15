// What outlives the page: settings, the API key (until the tab is closed), and, if it is wanted,
// the conversation. Storage may be switched off or full; then nothing is kept.

const DEFAULTS = {
  system: "",
  temperature: null, // null: the server's own
  maxTokens: null,
  think: true,
  keep: false,
  tree: true,
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
export const readMessages = () => read("localStorage", "messages", []);
export const writeMessages = (messages) => write("localStorage", "messages", messages);

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
