// Shows what the reward and the advantages of one rollout are the sum of. Every number, name and formula is one of the
// dump (tracking/rollout_rows.py) and none is computed here, so any reward and any advantage are shown as they were.

const MAX_PLACES = 24; // rows of the table of advantages; the shading of the text shows all of them

const number = (value, digits = 3) => (value < 0 ? "−" : "") + Math.abs(value).toFixed(digits);

// The value of run-length encoded numbers at a token.
function valueAt(runs, token) {
  let end = 0;
  for (const [count, value] of runs) {
    end += count;
    if (token < end) return value;
  }
  return 0;
}

const row = (name, content, total = null) =>
  h(
    "tr",
    {},
    h("th", { scope: "row" }, name),
    h("td", total === null ? { colspan: 2 } : {}, ...content),
    total === null ? null : h("td", { class: "num" }, total),
  );

const rewardTerm = ({ name, weight, value }, i) => [
  `${i ? " + " : ""}${String(weight).replace("-", "−")} × `,
  ...readableParts(name),
  ` ${number(value)}`,
];

function groupLine({ group_rewards: rewards, group_mean: mean, group_std: std }) {
  const shown = rewards.map((value) => Number(value.toFixed(3))).join(", ");
  return std === null ? `${shown}, the only sample` : `${shown}: mean ${number(mean)}, std ${number(std)}`;
}

function rewardTable(rollout) {
  const { reward, formula } = rollout;
  const rows = [
    row("reward", reward.terms.flatMap(rewardTerm), number(reward.total)),
    row("group", [groupLine(rollout)]),
    formula ? row("outcome advantage", readableParts(formula)) : null,
  ];
  return h("table", { class: "sums" }, h("tbody", {}, ...rows));
}

// The tokens whose advantages are listed, [name, token, step]: the ends of the steps where the advantages of a solution
// differ within it, or else one of each run of equal advantages.
function placesOf({ role, solution, verifications, advantage }) {
  const allRuns = [advantage.total, ...advantage.terms.map((term) => term.runs)];
  if (role === "generator" && solution.step_ends.length && allRuns.some((runs) => runs.length > 1)) {
    const places = solution.step_ends.map((token, k) => [`end of step ${k + 1}`, token, k]);
    const last = solution.step_ends.at(-1);
    if (last >= 0 && last + 1 < solution.tokens) places.push(["after the last step", last + 1, null]);
    return places.filter(([, token]) => token >= 0);
  }
  const { tokens } = role === "generator" ? solution : verifications[0];
  let first = 0;
  return advantage.total.map(([count]) => {
    const name = count === 1 ? `token ${first + 1}` : `tokens ${first + 1} to ${first + count}`;
    const place = [count === tokens ? "every token" : name, first, null];
    first += count;
    return place;
  });
}

function advantageTable(rollout) {
  const { advantage, step_rewards: rewards, step_formula: formula } = rollout;
  const places = placesOf(rollout);
  const hasSteps = places.some(([, , k]) => k !== null) && rewards.some((steps) => steps !== null);
  const told = (value) => (value === null || value === undefined ? "–" : signed(value, 3)); // –: no reward
  const rewardsAt = (k) => (k === null ? "" : rewards.map((steps) => told(steps?.[k])).join(", "));
  const rows = places.slice(0, MAX_PLACES).map(([name, token, k]) => {
    const terms = advantage.terms.map(
      ({ weight, runs }) => `${number(weight)} × ${signed(valueAt(runs, token), 3)}`,
    );
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, name),
      ...[...(hasSteps ? [rewardsAt(k)] : []), ...terms].map((text) => h("td", { class: "num" }, text)),
      h("td", { class: "num" }, h("b", {}, signed(valueAt(advantage.total, token), 3))),
    );
  });
  const names = advantage.terms.map(({ name }) => readableParts(name));
  const head = [["tokens"], ...(hasSteps ? [[`step reward ${formula}`]] : []), ...names, ["advantage"]];
  const more = places.length > MAX_PLACES ? muted(`The first ${MAX_PLACES} of ${places.length}.`) : null;
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "sums steps-sums" },
      h("thead", {}, h("tr", {}, ...head.map((parts) => h("th", { scope: "col" }, ...parts)))),
      h("tbody", {}, ...rows),
    ),
    more,
  );
}
