// The page as a whole: its parts, and the keys and buttons that belong to none of them.

import { Chat } from "./chat.js";
import { Conversation } from "./conversation.js";
import { find, hideToast } from "./dom.js";
import { Files } from "./files.js";
import { History } from "./history.js";
import { loadMarkdown } from "./markdown.js";
import { RoundsPanel } from "./rounds.js";
import { Server } from "./server.js";
import { SettingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { readCurrent, readSettings, toggleTheme, writeSettings } from "./store.js";

const settings = readSettings();
const panel = new RoundsPanel();
const history = new History();
history.keepsNothing = settings.keepsNothing;
const dialog = new SettingsDialog(settings, () => server.ask());
const server = new Server(meetServer, () => dialog.askForKey());
const files = new Files(() => showSend());
const chat = new Chat({ settings, server, dialog, panel, history, files }, () => {
  showSend();
  sidebar.show();
});
const sidebar = new Sidebar(history, settings, chat);

function meetServer() {
  document.title = `${server.model} · draftree`;
  settings.hadDraft = server.about.has_draft;
  writeSettings(settings);
  dialog.showFacts(server);
  showTree();
  chat.showGauge();
  queueMicrotask(showSend);
}

function showSend() {
  const { running } = chat;
  const isEmpty = !find("prompt").value.trim() && !files.files.length;
  find("send").hidden = Boolean(running);
  find("stop").hidden = !running;
  find("send").disabled = !server.isReady || isEmpty;
  chat.showGauge();
}

function showTree() {
  const isShown = settings.tree ?? settings.hadDraft;
  find("panel").hidden = !isShown;
  document.body.classList.toggle("without-tree", !isShown);
  document.body.classList.toggle("without-draft", !settings.hadDraft);
  find("toggle-tree").setAttribute("aria-expanded", isShown);
  panel.setDraft(settings.hadDraft);
}

function fitPrompt() {
  const area = find("prompt");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
  showSend();
}

function send(text) {
  if (!chat.submit(text)) return;
  hideToast();
  find("prompt").value = "";
  fitPrompt();
}

/** The conversation that this tab had open. */
async function restore() {
  const current = readCurrent();
  if (!current && !settings.history) return;
  await history.load();
  const record = history.records.get(current);
  if (record && !chat.views.length) chat.open(new Conversation(record));
  sidebar.show();
}

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(find("prompt").value);
});
find("prompt").addEventListener("input", fitPrompt);
find("prompt").addEventListener("keydown", (event) => {
  const isEmpty = !find("prompt").value;
  if (event.key === "ArrowUp" && isEmpty && !chat.running) {
    event.preventDefault();
    chat.views.findLast((view) => view.startEditing)?.startEditing();
  }
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(find("prompt").value);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !find("settings").open) chat.stop();
  if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    sidebar.open(find("search"));
  }
});
find("stop").addEventListener("click", () => {
  chat.stop();
  find("prompt").focus();
});
find("examples").addEventListener("click", (event) => {
  if (event.target.matches("button")) send(event.target.textContent);
});
find("new-chat").addEventListener("click", () => chat.restart());
find("close-toast").addEventListener("click", hideToast);
find("toggle-theme").addEventListener("click", toggleTheme);
find("toggle-tree").addEventListener("click", () => {
  settings.tree = find("panel").hidden;
  writeSettings(settings);
  showTree();
});

showTree();
panel.showExample();
restore();
server.ask();
addEventListener("load", () => setTimeout(loadMarkdown)); // after the first paint
