// Text of models and data files as a reader can trust it. It is only ever set as text, never as markup; here what has
// no shape of its own, or would reorder or hide the rest, becomes a visible escape. The same rules as model_text.py.

const HIDDEN =
  /(?![\n\t])[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]|[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\u{e0100}-\u{e01ef}]/gu;

function escapeOf(char) {
  const hex = char.codePointAt(0).toString(16);
  if (hex.length < 3) return `\\x${hex.padStart(2, "0")}`;
  return hex.length < 5 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`;
}

// For attributes, and where there is one line for it.
const readable = (text) => text.replace(HIDDEN, escapeOf);

// For elements: escapes look different from what was written, which may hold a backslash and digits of its own.
function readableParts(text) {
  const parts = [];
  let from = 0;
  for (const { 0: char, index } of text.matchAll(HIDDEN)) {
    if (index > from) parts.push(text.slice(from, index));
    parts.push(h("span", { class: "escape", title: "a character without a shape of its own" }, escapeOf(char)));
    from = index + char.length;
  }
  if (from < text.length) parts.push(text.slice(from));
  return parts;
}

// Spans count characters, and strings here count an emoji as two.
const isPlain = (text) => !/[\ud800-\udbff]/.test(text);
const lengthOf = (text) => (isPlain(text) ? text.length : Array.from(text).length);
const cut = (text, start, end) =>
  isPlain(text) ? text.slice(start, end) : Array.from(text).slice(start, end).join("");
