// The panel beside the conversation: speed, acceptance length, and the trees of the last rounds.

import { find, make } from "./dom.js";
import { TreeView, countTokens, describeRound, drawStrip } from "./tree.js";

const NUM_KEPT = 400;
const NUM_BARS = 49;
const NUM_DRAWN = 9; // below each other
const METERS = ["speed", "ttft", "al"];
const node = (text, parent, source, accepted, chance) => ({ text, parent, source, accepted, chance });
const EXAMPLE = {
  nodes: [
    node(" the", -1, "bonus", true, 1),
    node(" mat", 0, "chain", false, 0.6),
    node(" and", 1, "chain", false, 0.3),
    node(" slept", 2, "chain", false, 0.18),
    node(" rug", 0, "sibling", true, 0.3),
    node(".", 1, "sibling", false, 0.24),
    node(" and", 4, "sibling", true, 0.15),
  ],
  bonus: { text: " purred" },
};
const WITHOUT_DRAFT =
  "This model runs without a draft, so there are no trees to show. With one, each pass of the model " +
  "writes several tokens: `draftree models` lists models that come with a draft, and `draftree train` " +
  "makes one for a model of yours.";

export class RoundsPanel {
  constructor() {
    this.hasDraft = true;
    this.tree = new TreeView(find("tree"), (words) => this.describe(words));
    find("earlier").addEventListener("click", () => this.step(-1));
    find("later").addEventListener("click", () => this.step(1));
    find("live").addEventListener("click", () => this.follow());
    find("tree").addEventListener("pointerleave", () => this.schedule());
    this.reset();
  }

  /** A new reply begins. */
  reset() {
    clearTimeout(this.timer);
    this.rounds = []; // oldest first
    Object.assign(this, { numRounds: 0, numTokens: 0, selected: null, isLive: true, timer: null });
    this.readyAt = 0; // when the picture may change again
    this.tree.clear();
    for (const id of METERS) find(id).textContent = "–";
    find("panel").classList.add("unmeasured");
    find("round-title").textContent = "Draft tree";
    find("detail").textContent = "";
    find("strip-box").hidden = true;
    find("legend").hidden = find("tree").hidden = !this.hasDraft;
    const parts = this.hasDraft ? [] : WITHOUT_DRAFT.split("`"); // words, a command, words, …
    find("detail").append(...parts.map((part, i) => (i % 2 ? make("code", "", part) : part)));
    this.showButtons();
  }

  /** Where there is no draft, the panel says what would make it useful. */
  setDraft(hasDraft) {
    if (this.hasDraft === hasDraft) return;
    this.hasDraft = hasDraft;
    if (!this.rounds.length) this.showExample();
  }

  /** A round that nobody asked for, to tell what will be seen. */
  showExample() {
    this.reset();
    if (!this.hasDraft) return;
    this.tree.draw([EXAMPLE], true);
    find("round-title").textContent = "How to read it";
    find("detail").textContent =
      "“The cat sat on the …”: the draft guessed six tokens. The model went along with “rug and” " +
      "and wrote “purred” itself: three tokens in one pass.";
  }

  add(rounds) {
    for (const round of rounds) {
      this.numRounds += 1;
      this.numTokens += countTokens(round);
      this.rounds.push({ ...round, number: this.numRounds });
    }
    this.rounds.splice(0, this.rounds.length - NUM_KEPT);
    find("panel").classList.remove("unmeasured");
    if (rounds.length) {
      find("legend").hidden = find("tree").hidden = false; // looking up draws trees as well
      find("al").textContent = (this.numTokens / this.numRounds).toFixed(2);
      this.schedule();
    }
  }

  showSpeed(tokensPerSecond, ttftMs) {
    const show = (id, value) => value && (find(id).textContent = round3(value));
    show("speed", tokensPerSecond);
    show("ttft", ttftMs);
  }

  /** The server's own account of a reply, which replaces what was counted here. */
  showStatistics(statistics, numTokens) {
    find("panel").classList.remove("unmeasured");
    this.showSpeed(statistics.tokens_per_second, statistics.ttft_ms);
    if (statistics.rounds) find("al").textContent = (numTokens / statistics.rounds).toFixed(2);
    const reason = statistics.speculation_off;
    if (reason && this.hasDraft && !this.rounds.length) find("detail").textContent = `No trees: ${reason}.`;
  }

  schedule() {
    if (this.timer !== null) return;
    const wait = Math.max(this.readyAt - performance.now(), 0);
    this.timer = setTimeout(() => {
      this.timer = null;
      this.drawNewest();
    }, wait);
  }

  drawNewest() {
    if (!this.rounds.length) return;
    this.drawBars();
    if (!this.isLive || this.tree.isHeld) return;
    // Rounds may come faster than they can be looked at; of the new ones, the last that drafted.
    const from = this.selected ? this.selected.number : 0;
    const fresh = this.rounds.filter((round) => round.number > from);
    const newest = fresh.findLast((round) => round.nodes.length > 1) ?? fresh.at(-1);
    if (newest) this.show(newest, true);
  }

  show(round, isAnimated) {
    this.selected = round;
    const index = this.rounds.indexOf(round);
    const drawn = this.rounds.slice(Math.max(index + 1 - NUM_DRAWN, 0), index + 1).reverse();
    this.readyAt = performance.now() + this.tree.draw(drawn, isAnimated);
    find("round-title").textContent = `Round ${round.number}`;
    this.describe(null);
    this.drawBars();
    this.showButtons();
  }

  describe(words) {
    if (this.selected) find("detail").textContent = words ?? describeRound(this.selected);
  }

  drawBars() {
    find("strip-box").hidden = false;
    const shown = this.rounds.slice(-NUM_BARS);
    drawStrip(find("strip"), shown, this.selected, (round) => this.pick(round));
    const mean = this.numTokens / this.numRounds;
    find("strip-note").textContent = `${mean.toFixed(2)} on average`;
  }

  pick(round) {
    this.isLive = false;
    this.show(round, false);
  }

  step(direction) {
    const next = this.rounds[this.rounds.indexOf(this.selected) + direction];
    if (next) this.pick(next);
  }

  follow() {
    this.isLive = true;
    const newest = this.rounds.at(-1);
    if (newest) this.show(newest, false);
    this.showButtons();
  }

  showButtons() {
    const index = this.rounds.indexOf(this.selected);
    find("steps").hidden = !this.rounds.length;
    find("earlier").disabled = index <= 0;
    find("later").disabled = index < 0 || index === this.rounds.length - 1;
    find("live").setAttribute("aria-pressed", this.isLive);
  }
}

const round3 = (value) => value < 9.95 ? value.toFixed(1) : Math.round(value).toString();
