// Small things that every part of the page makes elements with.

const ICONS = {
  again: "M15.5 8A6 6 0 1 0 16 11.500M16 4.500V8.200H12.300",
  check: "M4.500 10.500L8.500 14.500L15.500 6",
  close: "M5.500 5.500L14.500 14.500M14.500 5.500L5.500 14.500",
  copy: "M7.500 7.500V4.500H15.500V12.500H12.500M4.500 7.500H12.500V15.500H4.500Z",
  edit: "M4.500 15.500L5.200 12.300L12.800 4.700L15.300 7.200L7.700 14.800ZM11.300 6.200L13.800 8.700",
  fork: "M6 4V16M6 12C6 9 14 11 14 6.500M14 4V6.500",
  next: "M8 5L13 10L8 15",
  previous: "M12 5L7 10L12 15",
  remove: "M4.500 6H15.500M8 6V4.500H12V6M6 6L6.700 15.500H13.300L14 6",
};
const SVG = "http://www.w3.org/2000/svg";
const SHOWN_MS = 1600; // how long a button says that something was copied

export const find = (id) => document.getElementById(id);

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

export function makeButton(label, onClick, className = "quiet") {
  const button = make("button", className, label);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
}

/** A button that shows an icon and is called by its label. */
export function makeIconButton(icon, label, onClick) {
  const button = makeButton("", onClick, "icon quiet");
  button.setAttribute("aria-label", label);
  button.title = label;
  button.append(makeIcon(icon));
  return button;
}

function makeIcon(name) {
  const icon = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  icon.setAttribute("viewBox", "0 0 20 20");
  icon.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  icon.append(path);
  return icon;
}

/** A button that copies what the function gives. */
export function makeCopyButton(getText, isIcon = false) {
  const face = (icon, words) => (isIcon ? makeIcon(icon) : words);
  const act = async () => {
    const isCopied = await copy(getText());
    announce(isCopied ? "Copied." : "Copying is not possible here.");
    button.replaceChildren(isCopied ? face("check", "Copied") : face("close", "Not possible"));
    setTimeout(() => button.replaceChildren(face("copy", "Copy")), SHOWN_MS);
  };
  const button = isIcon ? makeIconButton("copy", "Copy", act) : makeButton("Copy", act);
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without TLS there is no clipboard to write to, but there is the older way.
    const area = make("textarea", "hidden", text);
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}

/** Tells those who cannot see the page what happened. */
export const announce = (text) => (find("status").textContent = text);

export const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

/** Asks before something that cannot be taken back; true if it is to be done. */
export function confirm(question, verb) {
  const dialog = find("confirm");
  find("confirm-text").textContent = question;
  find("confirm-yes").textContent = verb;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

const TOAST_MS = 10_000;
let toastTimer = null;

/** Says what was done, and offers to take it back. */
export function showToast(text, onUndo) {
  find("toast-text").textContent = text;
  find("toast").hidden = false;
  find("undo").hidden = !onUndo;
  find("undo").onclick = () => {
    hideToast();
    onUndo();
  };
  clearTimeout(toastTimer);
  toastTimer = setTimeout(hideToast, TOAST_MS);
}

export function hideToast() {
  find("toast").hidden = true;
}
