// Shades the tokens of a response by their advantage. A paint is {runs, scale}: runs [count, value, end] of tokens with
// equal advantages, the end in characters of the text, and the advantage that gets the strongest shade.

// Characters start..end of a text, split where the advantage changes.
function shaded(text, start, end, paint) {
  const parts = [];
  let from = start;
  for (const [, value, until] of paint?.runs ?? []) {
    const to = Math.min(until, end);
    if (to > from) {
      parts.push(...shade(readableParts(cut(text, from, to)), value, paint.scale));
      from = to;
    }
  }
  if (from < end) parts.push(...readableParts(cut(text, from, end)));
  return parts;
}

// The content of a tagged block without its tags, shaded.
const inside = (text, [start, end], tag, paint) =>
  shaded(text, start + tag.length + 2, end - tag.length - 3, paint);

function shade(parts, value, scale) {
  if (value === 0) return parts;
  const alpha = Math.max(0.12, Math.min(1, Math.abs(value) / scale)).toFixed(2);
  const look = { class: `adv ${value < 0 ? "neg" : "pos"}`, style: `--a:${alpha}` };
  return [h("span", { ...look, title: `advantage ${signed(value, 3)}` }, ...parts)];
}

// The paints of both roles' texts of a rollout; only the tokens of the role that learns have advantages.
const paintsOf = ({ role, advantage }, scale) => (advantage ? { [role]: { runs: advantage.total, scale } } : {});
