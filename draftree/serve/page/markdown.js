// Text of a model as elements: Markdown, code with its colours, formulas. The libraries are loaded when
// there is something to show; until then, and where they fail, the text is shown as it is. Markup in a
// text stays text: markdown-it escapes it, and what comes of it passes DOMPurify.

import { make, makeCopyButton } from "./dom.js";

const HIGHLIGHTED = 4096; // longer code gets its colours now and then while it grows
const HIGHLIGHT_STEP = 1024;
const MAX_HIGHLIGHTED = 200_000;
const CLEAN = {
  RETURN_DOM_FRAGMENT: true,
  FORBID_TAGS: ["style", "img", "form", "input", "video", "audio", "source"],
  FORBID_ATTR: ["style", "id", "name"],
  ALLOWED_URI_REGEXP: /^(?:(?:https?|mailto):|[^a-z]|[a-z+.-]+(?:[^a-z+.:-]|$))/i, // or no scheme
};
const FORMULA = { strict: "ignore", maxExpand: 500, maxSize: 40 };

let markdown = null; // {parser, purifier} once loaded
let loading = null;
const extras = new Map(); // libraries that not every text needs, by name

export function loadMarkdown() {
  loading ??= Promise.all([
    import("./vendor/markdown-it.js"),
    import("./vendor/tex.js"),
    import("./vendor/purify.js"),
  ]).then(([{ default: MarkdownIt }, { tex }]) => {
    const parser = setUp(new MarkdownIt({ html: false, linkify: true, breaks: true }), tex);
    markdown = { parser, purifier: globalThis.DOMPurify };
  });
  return loading;
}

const LOADERS = {
  highlight: async () => (await import("./vendor/highlight.js")).default,
  katex: async () => {
    const style = make("link");
    style.rel = "stylesheet";
    style.href = new URL("./vendor/katex.css", import.meta.url).href;
    document.head.append(style);
    await import("./vendor/katex.js");
    return globalThis.katex;
  },
};

/** Calls with a library: at once if it is there already, so that nothing flickers. */
function withLibrary(name, act) {
  const library = extras.get(name);
  if (library && !(library instanceof Promise)) return act(library);
  if (!library) {
    const promise = LOADERS[name]().then((loaded) => extras.set(name, loaded));
    extras.set(name, promise);
  }
  extras.get(name).then(() => act(extras.get(name)), () => {});
}

function setUp(parser, tex) {
  const { escapeHtml } = parser.utils;
  const { rules } = parser.renderer;
  parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // file.py is no address
  const render = (text, isDisplay) => {
    const [tag, kind] = isDisplay ? ["p", "display"] : ["span", "inline"];
    return `<${tag} class="math ${kind}">${escapeHtml(text.trim())}</${tag}>`;
  };
  parser.use(tex, { delimiters: "all", render });
  const code = (text, language) =>
    `<figure class="code"><figcaption><span>${escapeHtml(language || "text")}</span></figcaption>` +
    `<pre tabindex="0" role="group" aria-label="Code"><code>${escapeHtml(text.replace(/\n$/, ""))}</code></pre></figure>`;
  rules.fence = (tokens, i) => code(tokens[i].content, languageOf(tokens[i]));
  rules.code_block = (tokens, i) => code(tokens[i].content, "");
  rules.table_open = () => '<div class="table" tabindex="0" role="group" aria-label="Table"><table>';
  rules.table_close = () => "</table></div>";
  // Pictures would be fetched from elsewhere, and tell whoever is there.
  rules.image = (tokens, i) => {
    const words = tokens[i].content || "picture";
    return `<a href="${escapeHtml(tokens[i].attrGet("src"))}">${escapeHtml(words)}</a>`;
  };
  parser.core.ruler.push("page", ({ tokens }) => {
    for (const token of tokens) {
      const [, side] = /text-align:(\w+)/.exec(token.attrGet("style") ?? "") ?? [];
      if (side) token.attrs = [["class", `align-${side}`]]; // the page's policy allows no styles
      if (!token.type.startsWith("heading_")) continue;
      if (token.nesting > 0) token.attrSet("class", `level-${token.tag[1]}`);
      token.tag = "h3"; // below the page's own headings
    }
  });
  return parser;
}

const languageOf = (token) => token.info.trim().split(/\s+/)[0];

/** Shows a text that grows; only what has changed is made anew. */
export class TextView {
  constructor(element) {
    this.element = element;
    this.source = "";
    this.isDone = false;
    this.blocks = []; // {html, token}, one for each child
    this.numFixed = 0; // of them, those that further text cannot change
    this.offset = 0; // where the others begin in the source
  }

  /** isDone: whether nothing will be added. */
  update(source, isDone = false) {
    this.source = source.replace(/\r\n?/g, "\n");
    this.isDone = isDone;
    if (markdown) return this.draw();
    this.element.classList.add("plain");
    this.element.textContent = source;
    loadMarkdown().then(() => this.draw(), () => {});
  }

  draw() {
    if (this.element.classList.contains("plain")) {
      this.element.classList.remove("plain");
      this.element.replaceChildren();
    }
    if (this.isDone) [this.numFixed, this.offset] = [0, 0]; // what is said last may be a link's address
    const text = this.source.slice(this.offset);
    const fresh = splitBlocks(text);
    fresh.forEach((block, i) => this.show(block, this.numFixed + i));
    const numBlocks = this.numFixed + fresh.length;
    while (this.element.children.length > numBlocks) this.element.lastElementChild.remove();
    this.blocks.length = numBlocks;
    if (this.isDone) this.colourRest();
    else this.fix(fresh, text);
  }

  show(block, index) {
    const old = this.blocks[index];
    if (old?.html === block.html) return;
    const present = this.element.children[index];
    const isGrown = isCode(old) && isCode(block) && languageOf(old.token) === languageOf(block.token);
    this.blocks[index] = block;
    if (isGrown) return this.growCode(present.querySelector("code"), block);
    const made = sanitize(block.html).firstElementChild ?? make("p");
    finish(made);
    if (present) present.replaceWith(made);
    else this.element.append(made);
    if (isCode(block)) colour(made.querySelector("code"), languageOf(block.token));
  }

  growCode(code, { token }) {
    const text = token.content.replace(/\n$/, "");
    const shown = code.textContent;
    if (text.startsWith(shown)) code.append(text.slice(shown.length));
    else code.textContent = text;
    const isDue = text.length < HIGHLIGHTED || text.length - (code.numColoured ?? 0) > HIGHLIGHT_STEP;
    if (isDue) colour(code, languageOf(token));
  }

  /** Long code that has grown since it got its colours. */
  colourRest() {
    this.blocks.forEach((block, i) => {
      const code = isCode(block) && this.element.children[i].querySelector("code");
      if (code && code.numColoured !== code.textContent.length) colour(code, languageOf(block.token));
    });
  }

  /** Blocks before the last one stay as they are, once that one's first line is whole. */
  fix(fresh, text) {
    const last = fresh.at(-1);
    if (fresh.length < 2) return;
    const lines = text.split("\n");
    if (lines.length <= last.line + 1) return;
    this.numFixed += fresh.length - 1;
    this.offset += lines.slice(0, last.line).join("\n").length + 1;
  }
}

const isCode = (block) => block?.token.type === "fence";

/** The blocks of a text that stand for themselves. */
function splitBlocks(text) {
  const { parser } = markdown;
  const env = {};
  const tokens = parser.parse(text, env);
  const blocks = [];
  let first = 0;
  tokens.forEach((token, i) => {
    if (token.level !== 0 || token.nesting > 0) return;
    const group = tokens.slice(first, i + 1);
    const html = parser.renderer.render(group, parser.options, env);
    blocks.push({ html, token: group[0], line: group[0].map?.[0] ?? 0 });
    first = i + 1;
  });
  return blocks;
}

const sanitize = (html) => markdown.purifier.sanitize(html, CLEAN);

/** What markup alone cannot say: buttons, links that open elsewhere, formulas. */
function finish(block) {
  const all = (selector) => [...(block.matches(selector) ? [block] : []), ...block.querySelectorAll(selector)];
  for (const link of all("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const figure of all("figure.code")) {
    const code = figure.querySelector("code");
    figure.querySelector("figcaption").append(makeCopyButton(() => code.textContent));
    if (figure !== block) colour(code, figure.querySelector("figcaption span").textContent);
  }
  for (const formula of all(".math")) typeset(formula);
}

function colour(code, language) {
  const text = code.textContent;
  if (!language || text.length > MAX_HIGHLIGHTED) return;
  withLibrary("highlight", (highlight) => {
    if (!highlight.getLanguage(language) || code.textContent !== text) return;
    code.numColoured = text.length;
    const { value } = highlight.highlight(text, { language, ignoreIllegals: true });
    code.replaceChildren(sanitize(value));
  });
}

function typeset(formula) {
  const text = formula.textContent;
  const displayMode = formula.classList.contains("display");
  withLibrary("katex", (katex) => {
    try {
      katex.render(text, formula, { ...FORMULA, displayMode });
    } catch {
      formula.textContent = text; // not finished, or not a formula
    }
  });
}
