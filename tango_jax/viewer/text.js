// Makes text of models and data files safe to read. It is only ever set as text, never as markup; characters that are
// invisible, or that would reorder or hide the rest, become visible escapes. The rules are those of model_text.py.

const HIDDEN =
  /(?![\n\t])[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]|[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\u{e0100}-\u{e01ef}]/gu;

function escapeOf(char) {
  const hex = char.codePointAt(0).toString(16);
  if (hex.length < 3) return `\\x${hex.padStart(2, "0")}`;
  return hex.length < 5 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`;
}

// For attributes and single lines.
const readable = (text) => text.replace(HIDDEN, escapeOf);

// For elements: escapes get their own style, since the text itself may contain a backslash and digits.
function readableParts(text) {
  const parts = [];
  let from = 0;
  for (const { 0: char, index } of text.matchAll(HIDDEN)) {
    if (index > from) parts.push(text.slice(from, index));
    parts.push(h("span", { class: "escape", title: "invisible character" }, escapeOf(char)));
    from = index + char.length;
  }
  if (from < text.length) parts.push(text.slice(from));
  return parts;
}

// Spans count code points, but JavaScript strings count an emoji as two.
const isPlain = (text) => !/[\ud800-\udbff]/.test(text);
const lengthOf = (text) => (isPlain(text) ? text.length : Array.from(text).length);
const cut = (text, start, end) =>
  isPlain(text) ? text.slice(start, end) : Array.from(text).slice(start, end).join("");
