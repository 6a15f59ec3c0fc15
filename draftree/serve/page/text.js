// Text of a model as elements: paragraphs, lists, headings, code. The text only ever becomes text
// nodes, so nothing in it can become markup.

const FENCE = /^\s*(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^>\s?(.*)$/;
const TABLE = /^\s*\|/;
const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=[^\s*])([^*]*[^\s*])\*/g;

/** Shows a text that grows; only what has changed is made anew. */
export class TextView {
  constructor(element) {
    this.element = element;
    this.blocks = [];
  }

  update(source) {
    const blocks = splitBlocks(source);
    blocks.forEach((block, i) => {
      const old = this.blocks[i];
      const isSame = old && old.kind === block.kind && old.language === block.language;
      if (isSame && old.source === block.source) return;
      const present = this.element.children[i];
      if (isSame && block.kind === "code") {
        present.querySelector("code").textContent = block.source;
      } else if (present) {
        present.replaceWith(makeBlock(block));
      } else {
        this.element.append(makeBlock(block));
      }
    });
    while (this.element.children.length > blocks.length) this.element.lastElementChild.remove();
    this.blocks = blocks;
  }
}

export function splitBlocks(source) {
  const lines = source.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let i = 0;
  const take = (kind, test) => {
    const start = i;
    while (i < lines.length && test(lines[i])) i += 1;
    blocks.push({ kind, source: lines.slice(start, i).join("\n").trimEnd() });
  };
  while (i < lines.length) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    if (!line.trim()) i += 1;
    else if (fence) {
      const indent = line.search(/\S/);
      const inside = [];
      for (i += 1; i < lines.length && !isFenceEnd(lines[i], fence[1]); i += 1) {
        inside.push(stripIndent(lines[i], indent));
      }
      i += 1;
      blocks.push({ kind: "code", language: fence[2], source: inside.join("\n") });
    } else if (HEADING.test(line) || RULE.test(line)) {
      blocks.push({ kind: HEADING.test(line) ? "heading" : "rule", source: line });
      i += 1;
    } else if (ITEM.test(line)) {
      const [, indent, mark] = ITEM.exec(line);
      let isAfterBlank = false;
      take("list", (next) => {
        if (!next.trim()) return (isAfterBlank = true);
        const item = ITEM.exec(next);
        const isText = !item && (!isAfterBlank || /^\s/.test(next)) && !beginsBlock(next);
        isAfterBlank = false;
        return isText || (item && (item[1] > indent || isNumber(item[2]) === isNumber(mark)));
      });
    } else if (QUOTE.test(line)) take("quote", (next) => QUOTE.test(next));
    else if (TABLE.test(line)) take("table", (next) => TABLE.test(next));
    else take("paragraph", (next) => next.trim() && !beginsBlock(next));
  }
  return blocks;
}

function beginsBlock(line) {
  return [FENCE, HEADING, ITEM, RULE, QUOTE, TABLE].some((pattern) => pattern.test(line));
}

function isNumber(mark) {
  return /\d/.test(mark);
}

function isFenceEnd(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

function stripIndent(line, indent) {
  return line.slice(Math.min(indent, line.length - line.trimStart().length));
}

function makeBlock(block) {
  const { kind, source } = block;
  if (kind === "code") return makeCode(block);
  if (kind === "list") return makeList(source);
  if (kind === "rule") return document.createElement("hr");
  if (kind === "table") return make("pre", "table", source);
  if (kind === "heading") {
    const [, marks, words] = HEADING.exec(source);
    return fill(make("p", `heading level-${Math.min(marks.length, 4)}`), words);
  }
  if (kind === "quote") return fill(make("blockquote"), source.replace(/^>\s?/gm, ""));
  return fill(make("p"), source);
}

function makeList(source) {
  const lines = source.split("\n").filter((line) => line.trim());
  const list = make(isNumber(ITEM.exec(lines[0])[2]) ? "ol" : "ul");
  const texts = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (!match) {
      texts[texts.length - 1].text += `\n${line.trim()}`;
      continue;
    }
    const level = Math.min(Math.floor(match[1].replace(/\t/g, "    ").length / 2), 3);
    texts.push({ level, mark: match[2], text: match[3] });
  }
  for (const { level, mark, text } of texts) {
    const item = make("li", `level-${level}${isNumber(mark) ? " numbered" : ""}`);
    if (isNumber(mark)) item.value = parseInt(mark, 10);
    list.append(fill(item, text));
  }
  return list;
}

function makeCode({ language, source }) {
  const figure = make("figure", "code");
  const caption = make("figcaption");
  const pre = make("pre");
  pre.tabIndex = 0;
  const code = make("code", "", source);
  pre.append(code);
  caption.append(make("span", "", language || "text"), makeCopyButton(() => code.textContent));
  figure.append(caption, pre);
  return figure;
}

/** A button that copies what the function gives. */
export function makeCopyButton(getText) {
  const button = make("button", "quiet", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    button.textContent = (await copy(getText())) ? "Copied" : "Not possible";
    setTimeout(() => (button.textContent = "Copy"), 1600);
  });
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

/** Text with `code`, **bold** and *italic* parts. */
function fill(element, text) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    element.append(text.slice(end, match.index));
    if (match[2] !== undefined) element.append(make("code", "", match[2]));
    else if (match[3] !== undefined) element.append(fill(make("strong"), match[3]));
    else element.append(fill(make("em"), match[4]));
    end = match.index + match[0].length;
  }
  element.append(text.slice(end));
  return element;
}

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}
