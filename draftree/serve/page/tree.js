// Rounds as pictures: the tree of one round, and how many tokens each of the last rounds wrote.
// A round is what the server sends: nodes (text, parent, source, accepted, chance) and the bonus.

const SVG = "http://www.w3.org/2000/svg";
const CHARACTER = 7.3; // width in the tree's typeface
const ROW = 29;
const GAP = 18;
const HEIGHT = 22;
const MAX_LABEL = 14;
const MIN_SCALE = 0.85; // wider trees are not shrunk further, but scrolled
const STEP_MS = 70; // between two nodes of a path
const SOURCES = {
  chain: "the draft’s first choice",
  sibling: "another choice of the draft",
  ngram: "looked up in the text so far",
  grammar: "what the grammar asks for",
};
const SIGNS = new Map([["\n", "↵"], ["\r", "␍"], ["\t", "⇥"], [" ", "·"]]);

/** A token so that it can be read: blanks at its ends and line ends become signs. */
export function showToken(text) {
  const shown = text
    .replace(/[\n\r\t]/g, (sign) => SIGNS.get(sign))
    .replace(/^ +| +$/g, (blanks) => "·".repeat(blanks.length));
  const letters = [...shown];
  return letters.length > MAX_LABEL ? `${letters.slice(0, MAX_LABEL - 1).join("")}…` : shown || "∅";
}

export function countTokens(round) {
  return round.nodes.filter((node) => node.accepted).length - (round.bonus ? 0 : 1); // without the root
}

/** What a round did, in a sentence. */
export function describeRound(round) {
  const drafted = round.nodes.length - 1;
  const total = countTokens(round);
  const accepted = total - (round.bonus ? 1 : 0);
  if (!drafted) return "Nothing guessed: one token of the model’s own.";
  const tokens = total > 1 ? `${total} tokens` : "1 token";
  return `${tokens} in one pass: ${accepted} of ${drafted} guesses${round.bonus ? ", and its own" : ""}.`;
}

/** All that is drawn: the nodes, and the bonus as the last of them, with their places. A guess that
 * ended the reply is a node, and there is no bonus. */
export function layOut(round) {
  const items = round.nodes.map((node, i) => ({
    ...node,
    kind: i === 0 ? "root" : node.accepted ? "accepted" : "dropped",
    children: [],
  }));
  const last = items.findLastIndex((item) => item.accepted);
  if (round.bonus) items.push({ ...round.bonus, parent: last, kind: "bonus", children: [], accepted: true });
  items.forEach((item, i) => {
    const parent = items[item.parent];
    item.label = showToken(item.text);
    item.width = Math.max([...item.label].length * CHARACTER + 13, 25);
    item.depth = i ? parent.depth + 1 : 0;
    item.x = i ? parent.x + parent.width + GAP : 1;
    parent?.children.push(item);
  });
  let rows = 0;
  const place = (item) => {
    item.y = rows * ROW + HEIGHT / 2 + 2;
    if (!item.children.length) rows += 1;
    item.children.forEach(place);
  };
  place(items[0]);
  const width = Math.max(...items.map((item) => item.x + item.width)) + 1;
  return { items, width, height: rows * ROW - (ROW - HEIGHT) + 4 };
}

function chanceOf(item, parent) {
  if (item.chance === undefined || item.chance === null) return "";
  const own = parent && parent.chance ? item.chance / parent.chance : item.chance;
  return own >= 0.995 ? ", over 99 % sure" : `, ${Math.max(Math.round(100 * own), 1)} % sure`;
}

function describeItem(item, parent) {
  const name = `“${item.text.replace(/\n/g, "↵")}”`;
  if (item.kind === "root") return `${name}: the last token so far, where the tree begins`;
  if (item.kind === "bonus") return `${name}: the model’s own choice after the path`;
  const who = `${SOURCES[item.source] ?? item.source}${chanceOf(item, parent)}`;
  return `${name}: ${item.kind}; ${who}`;
}

export class TreeView {
  /** onPoint: called with what there is to say about the node pointed at, or null. */
  constructor(element, onPoint) {
    this.element = element;
    this.onPoint = onPoint;
    this.items = []; // of the current tree
    this.width = 0;
    this.isHeld = false; // someone is looking closely
    element.addEventListener("pointerenter", () => (this.isHeld = true));
    element.addEventListener("pointerleave", () => this.release());
    element.addEventListener("focusout", () => this.release());
    element.addEventListener("keydown", (event) => this.walk(event));
  }

  clear() {
    this.items = [];
    this.element.replaceChildren();
  }

  release() {
    this.isHeld = this.element.matches(":hover, :focus-within");
    this.onPoint(null);
  }

  /** Draws rounds below each other, the one looked at first. Returns how long it will move. */
  draw(rounds, isAnimated) {
    this.items = [];
    const [current, ...earlier] = rounds;
    this.element.replaceChildren(this.drawRound(current, isAnimated));
    for (const round of earlier) {
      const caption = document.createElement("h3");
      caption.textContent = `Round ${round.number}`;
      this.element.append(caption, this.drawRound(round, false));
    }
    this.showBonus();
    return isAnimated ? STEP_MS * (countTokens(current) + 1) + 400 : 0;
  }

  /** Of a tree that is larger than its place, show what it came to. */
  showBonus() {
    const bonus = this.items.findLast((item) => item.accepted);
    const box = this.element.firstElementChild;
    const scale = box.firstElementChild.getBoundingClientRect().width / this.width;
    box.scrollTo((bonus.x + bonus.width) * scale - box.clientWidth, 0);
    this.element.scrollTo(0, (bonus.y + 2 * HEIGHT) * scale - this.element.clientHeight);
  }

  drawRound(round, isAnimated) {
    const { items, width, height } = layOut(round);
    const isCurrent = !this.items.length;
    if (isCurrent) Object.assign(this, { items, width });
    const links = make("g", {});
    const nodes = make("g", {});
    for (const item of items) {
      const parent = items[item.parent];
      if (parent) links.append(makeLink(item, parent));
      nodes.append(this.makeNode(item, parent, isCurrent));
    }
    const size = { viewBox: `0 0 ${width} ${height}`, width, height };
    const picture = make("svg", { ...size, class: isAnimated ? "animated" : "" });
    picture.append(links, nodes);
    picture.style.minWidth = `${MIN_SCALE * width}px`;
    const box = document.createElement("div");
    box.className = isCurrent ? "round current" : "round";
    box.append(picture);
    return box;
  }

  /** The keyboard enters the current tree at its root; earlier ones come with their buttons. */
  makeNode(item, parent, isCurrent) {
    const words = describeItem(item, parent);
    const group = make("g", { class: `node ${item.kind}`, role: "img" });
    if (isCurrent) group.setAttribute("tabindex", parent ? -1 : 0);
    group.setAttribute("aria-label", words);
    group.style.setProperty("--delay", `${STEP_MS * item.depth}ms`);
    const box = { x: item.x, y: item.y - HEIGHT / 2, width: item.width, height: HEIGHT, rx: 6 };
    const label = make("text", { x: item.x + item.width / 2, y: item.y });
    label.textContent = item.label;
    group.append(make("rect", box), label);
    group.addEventListener("pointerenter", () => this.onPoint(words));
    group.addEventListener("click", () => group.focus());
    group.addEventListener("focus", () => {
      this.isHeld = true;
      this.onPoint(words);
    });
    item.group = group;
    return group;
  }

  /** Arrow keys: along the branches, and up and down within a depth. */
  walk(event) {
    const item = this.items.find(({ group }) => group === document.activeElement);
    if (!item) return;
    const column = this.items.filter(({ depth }) => depth === item.depth).sort((a, b) => a.y - b.y);
    const index = column.indexOf(item);
    const next = {
      ArrowRight: item.children.find(({ accepted }) => accepted) ?? item.children[0],
      ArrowLeft: this.items[item.parent],
      ArrowUp: column[index - 1],
      ArrowDown: column[index + 1],
    }[event.key];
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    if (!next) return;
    item.group.setAttribute("tabindex", -1);
    next.group.setAttribute("tabindex", 0);
    next.group.focus();
  }
}

function makeLink(item, parent) {
  const [x, y] = [parent.x + parent.width, parent.y];
  const middle = x + GAP / 2;
  const curve = item.y === y ? `H${item.x}` : `C${middle} ${y} ${middle} ${item.y} ${item.x} ${item.y}`;
  const link = make("path", { d: `M${x} ${y}${curve}`, class: `link ${item.kind}` });
  link.style.setProperty("--delay", `${STEP_MS * item.depth}ms`);
  return link;
}

/** One bar a round: how deep its tree was, and how many tokens it wrote. */
export function drawStrip(element, rounds, selected, onSelect) {
  const [height, pitch, bar] = [56, 8, 5];
  const depths = rounds.map((round) => treeDepth(round) + 1);
  const unit = (height - 2) / Math.max(6, ...depths);
  const width = Math.max(rounds.length * pitch, pitch);
  const picture = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
  const tokens = rounds.map(countTokens);
  picture.setAttribute("aria-label", `Tokens in the last ${rounds.length} rounds: ${tokens.join(" ")}`);
  rounds.forEach((round, i) => {
    const x = i * pitch;
    const group = make("g", { class: round === selected ? "count selected" : "count" });
    const column = (className, count) =>
      make("rect", { class: className, x, width: bar, y: height - count * unit, height: count * unit, rx: 1 });
    const area = make("rect", { class: "area", x: x - (pitch - bar) / 2, y: 0, width: pitch, height });
    group.append(area, column("depth", depths[i]));
    group.append(column("tokens", tokens[i]));
    group.addEventListener("click", () => onSelect(round));
    picture.append(group);
  });
  element.replaceChildren(picture);
}

function treeDepth(round) {
  const depths = [];
  round.nodes.forEach((node, i) => (depths[i] = i ? depths[node.parent] + 1 : 0));
  return Math.max(...depths);
}

function make(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
