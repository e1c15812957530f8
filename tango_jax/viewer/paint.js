// Colours the tokens of a response: by their advantage, or by their log-prob when they were sampled. A paint is {runs,
// shade}: runs [count, value, end] of tokens with equal values, the end in characters of the text, and a function from
// the parts of such a run and its value to elements.

const COLOURINGS = { "": "advantage", logp: "log-prob" };
const MOST_SURPRISE = 4; // nats that get the strongest colour
const CODES = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"; // see tracking/rollout_rows.py

// Characters start..end of a text, split where the value of a paint changes, with each part shaded accordingly.
function shaded(text, start, end, paint) {
  const parts = [];
  let from = start;
  for (const [, value, until] of paint?.runs ?? []) {
    const to = Math.min(until, end);
    if (to > from) {
      parts.push(...paint.shade(readableParts(cut(text, from, to)), value));
      from = to;
    }
  }
  if (from < end) parts.push(...readableParts(cut(text, from, end)));
  return parts;
}

// The content of a tagged block without its tags, shaded.
const inside = (text, [start, end], tag, paint) =>
  shaded(text, start + tag.length + 2, end - tag.length - 3, paint);

function advantageShade(scale) {
  return (parts, value) => {
    if (value === 0) return parts;
    const alpha = Math.max(0.12, Math.min(1, Math.abs(value) / scale)).toFixed(2);
    const look = { class: `adv ${value < 0 ? "neg" : "pos"}`, style: `--a:${alpha}` };
    return [h("span", { ...look, title: `advantage ${signed(value, 3)}` }, ...parts)];
  };
}

function surpriseShade(parts, nats) {
  if (nats === 0) return parts;
  const most = (CODES.length - 1) / 10;
  const probability = Math.exp(-nats).toFixed(2);
  const told = nats >= most ? `${most} nats or more` : `${nats.toFixed(1)} nats, probability ${probability}`;
  const alpha = Math.max(0.08, Math.min(1, nats / MOST_SURPRISE)).toFixed(2);
  return [h("span", { class: "surprise", style: `--a:${alpha}`, title: `−log p = ${told}` }, ...parts)];
}

// -log p of each token in nats, with the end of the token in characters; null if the dump has none.
function surprises({ token_lengths: lengths, token_surprise: codes }) {
  if (codes === undefined) return null;
  const found = [];
  let end = 0;
  let at = 0;
  for (const code of codes) {
    let size;
    do {
      size = CODES.indexOf(lengths[at++]);
      end += size;
    } while (size === CODES.length - 1);
    found.push([1, CODES.indexOf(code) / 10, end]);
  }
  return found;
}

// The paints of both roles' texts of a rollout, null where there is nothing to show.
function paintsOf(rollout, verification, colouring, scale) {
  if (colouring === "logp") {
    const paint = (item) => {
      const runs = item && surprises(item);
      return runs && { runs, shade: surpriseShade };
    };
    return { generator: paint(rollout.solution), verifier: paint(verification) };
  }
  const own = rollout.advantage && { runs: rollout.advantage.total, shade: advantageShade(scale) };
  return {
    generator: rollout.role === "generator" ? own : null,
    verifier: rollout.role === "verifier" ? own : null,
  };
}

// Mean -log p of the tokens that end within a span, in nats: an estimate of the policy's entropy there, since the
// tokens were sampled from it.
function meanSurprise(paint, [start, end]) {
  const within = (paint?.runs ?? []).filter(([, , until]) => until > start && until <= end);
  return within.length ? within.reduce((sum, [, value]) => sum + value, 0) / within.length : null;
}

function shadeLegend(colouring, scale, role) {
  const line = (...content) => h("p", { class: "muted shade-legend" }, ...content);
  if (colouring === "logp") {
    const sample = (nats, text) => surpriseShade([text], nats);
    const mean = "The mean over the tokens of a step, beside its number, estimates the policy's entropy there.";
    const samples = [...sample(4, "4 nats or more"), " ", ...sample(1, "1 nat"), " none: 0. "];
    return line("−log p of each sampled token: ", ...samples, mean);
  }
  const shade = advantageShade(scale);
  return line(
    `Shading of the ${role}'s tokens: `,
    ...shade([`advantage ${signed(scale, 1)} or more`], scale),
    " ",
    ...shade([signed(scale / 4, 2)], scale / 4),
    " none: 0 ",
    ...shade([signed(-scale / 4, 2)], -scale / 4),
    " ",
    ...shade([`${signed(-scale, 1)} or less`], -scale),
  );
}
