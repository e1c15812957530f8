// Selects the rollouts to list: takes the state of the filters and the columns, returns indices and counts. Independent
// of the page.

const FLAG_LABELS = {
  false_accept: "false accept",
  false_reject: "false reject",
  invalid: "INVALID",
  misaligned: "misaligned",
  truncated: "truncated",
  misjudged: "misjudged step",
};
const ROLES = ["generator", "verifier"];

const noFilters = () => ({
  flags: new Set(),
  role: "",
  grade: "",
  run: "",
  order: "",
  turns: [null, null],
  steps: [null, null],
  query: "",
});

// {shown, flagCounts}: indices that pass every filter, in order; and the number of rollouts with each flag among those
// that pass the other filters.
function select(columns, facts, state, hits) {
  const role = ROLES.indexOf(state.role);
  const grade = ["wrong", "right"].indexOf(state.grade);
  const run = facts.runs.findIndex((item) => item.name === state.run);
  const [turnFrom, turnTo] = [state.turns[0] ?? 0, state.turns[1] ?? Infinity];
  const [stepsFrom, stepsTo] = [state.steps[0] ?? 0, state.steps[1] ?? Infinity];
  let wanted = 0;
  columns.flagNames.forEach((name, bit) => {
    if (state.flags.has(name)) wanted |= 1 << bit;
  });
  const flagCounts = columns.flagNames.map(() => 0);
  const shown = [];
  for (let i = 0; i < columns.count; i++) {
    if ((role >= 0 && columns.role[i] !== role) || (grade >= 0 && columns.correct[i] !== grade)) continue;
    if (state.run && columns.run[i] !== run) continue; // a link may name an unknown run: show nothing then
    if (columns.turn[i] < turnFrom || columns.turn[i] > turnTo) continue;
    if (columns.steps[i] < stepsFrom || columns.steps[i] > stepsTo) continue;
    if (hits && !hits[i]) continue;
    const flags = columns.flags[i];
    for (let bit = 0; bit < flagCounts.length; bit++) flagCounts[bit] += (flags >> bit) & 1;
    if (!wanted || flags & wanted) shown.push(i);
  }
  const by = {
    advantage: (a, b) => Math.abs(columns.adv[b]) - Math.abs(columns.adv[a]),
    reward: (a, b) => columns.reward[a] - columns.reward[b],
    steps: (a, b) => columns.steps[b] - columns.steps[a],
  }[state.order];
  if (by) shown.sort((a, b) => by(a, b) || a - b);
  return { shown, flagCounts };
}

// Converts the state to the fragment of an address, and back.
function toHash(state, rollout) {
  const parts = new URLSearchParams();
  if (rollout) parts.set("r", rollout);
  if (state.flags.size) parts.set("only", [...state.flags].join(","));
  for (const name of ["role", "grade", "run", "order"]) if (state[name]) parts.set(name, state[name]);
  for (const name of ["turns", "steps"]) {
    if (state[name].some((value) => value !== null)) parts.set(name, state[name].map((value) => value ?? "").join("-"));
  }
  if (state.query) parts.set("q", state.query);
  // Colons, slashes and commas are allowed in a fragment.
  return parts.toString().replace(/%3A/g, ":").replace(/%2F/g, "/").replace(/%2C/g, ",");
}

function fromHash(hash) {
  const parts = new URLSearchParams(hash.replace(/^#/, ""));
  const state = noFilters();
  state.flags = new Set((parts.get("only") ?? "").split(",").filter((name) => name in FLAG_LABELS));
  for (const name of ["role", "grade", "run", "order"]) state[name] = parts.get(name) ?? "";
  for (const name of ["turns", "steps"]) {
    const [from, to] = (parts.get(name) ?? "").split("-");
    state[name] = [from, to].map((text) => (text ? Number(text) : null));
  }
  state.query = parts.get("q") ?? "";
  return { state, rollout: parts.get("r"), view: parts.get("view"), isEmpty: [...parts].length === 0 };
}
