// Selects the rollouts to list: takes the state of the filters and the columns, returns indices and counts. Independent
// of the page.

const ROLES = ["generator", "verifier", "evaluation"];

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

// Names of the flags of a rollout.
const flagsOf = (columns, i) => columns.flagNames.filter((_, bit) => (columns.flagged[i] >> bit) & 1);

// Indices in the order of their turns, the latest first; within a turn as they were dumped.
function latestFirst(columns) {
  columns.latest ??= Int32Array.from({ length: columns.count }, (_, i) => i).sort(
    (a, b) => columns.turn[b] - columns.turn[a] || a - b,
  );
  return columns.latest;
}

const ORDERS = {
  worst: (columns) => (a, b) => columns.severity[b] - columns.severity[a] || columns.turn[b] - columns.turn[a],
  advantage: (columns) => (a, b) => Math.abs(columns.adv[b]) - Math.abs(columns.adv[a]),
  reward: (columns) => (a, b) => columns.reward[a] - columns.reward[b],
  steps: (columns) => (a, b) => columns.steps[b] - columns.steps[a],
};

// {shown, flagCounts}: indices that pass every filter, in order; and the number of rollouts with each flag among those
// that pass the other filters.
function select(columns, facts, state, hits) {
  const role = ROLES.indexOf(state.role); // -1 for "training", too, which is all but evaluations
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
  const latest = state.order ? null : latestFirst(columns);
  for (let place = 0; place < columns.count; place++) {
    const i = latest ? latest[place] : place;
    if (role >= 0 && columns.role[i] !== role) continue;
    if (state.role === "training" && ROLES[columns.role[i]] === "evaluation") continue;
    if (grade >= 0 && columns.correct[i] !== grade) continue;
    if (state.run && columns.run[i] !== run) continue; // a link may name an unknown run: show nothing then
    if (columns.turn[i] < turnFrom || columns.turn[i] > turnTo) continue;
    if (columns.steps[i] < stepsFrom || columns.steps[i] > stepsTo) continue;
    if (hits && !hits[i]) continue;
    const flags = columns.flagged[i];
    for (let bit = 0; bit < flagCounts.length; bit++) flagCounts[bit] += (flags >> bit) & 1;
    if (!wanted || flags & wanted) shown.push(i);
  }
  const by = ORDERS[state.order]?.(columns);
  if (by) shown.sort((a, b) => by(a, b) || a - b);
  return { shown, flagCounts };
}

// The query `id:17` finds problems by their id alone, without reading any text: those whose id is 17 or ends in /17, or
// else those whose id contains it.
const idQuery = (query) => (/^id:\s*\S/i.test(query) ? query.slice(3).trim().toLowerCase() : null);

function searchIds(columns, wanted) {
  const ids = columns.ids.map((id) => id.toLowerCase());
  const isIt = (id) => id === wanted || id.endsWith(`/${wanted}`);
  const matches = ids.some(isIt) ? ids.map(isIt) : ids.map((id) => id.includes(wanted));
  return Uint8Array.from(columns.problem, (problem) => (matches[problem] ? 1 : 0));
}

// Converts the state to the fragment of an address, and back. `as`: how the rollout is displayed (see viewer.js).
function toHash(state, rollout, as) {
  const parts = new URLSearchParams();
  if (rollout) parts.set("r", rollout);
  if (as) parts.set("as", as);
  if (state.flags.size) parts.set("only", [...state.flags].join(","));
  for (const name of ["role", "grade", "run", "order"]) if (state[name]) parts.set(name, state[name]);
  for (const name of ["turns", "steps"]) {
    if (state[name].some((value) => value !== null)) parts.set(name, state[name].map((value) => value ?? "").join("-"));
  }
  if (state.query) parts.set("q", state.query);
  // Colons, slashes and commas are allowed in a fragment.
  return parts.toString().replace(/%3A/g, ":").replace(/%2F/g, "/").replace(/%2C/g, ",");
}

// The address of a rollout alone; its key has the name of the run's folder, which may contain anything: lr+kl, a&b.
const linkTo = (key) => `#${toHash(noFilters(), key, "")}`;

function fromHash(hash, columns) {
  const parts = new URLSearchParams(hash.replace(/^#/, ""));
  const state = noFilters();
  state.flags = new Set((parts.get("only") ?? "").split(",").filter((name) => name in columns.flagLabels));
  for (const name of ["role", "grade", "run", "order"]) state[name] = parts.get(name) ?? "";
  for (const name of ["turns", "steps"]) {
    const [from, to] = (parts.get(name) ?? "").split("-");
    state[name] = [from, to].map((text) => (text ? Number(text) : null));
  }
  state.query = parts.get("q") ?? "";
  const as = ["group", "problem"].find((name) => name === parts.get("as")) ?? "";
  return { state, rollout: parts.get("r"), as };
}
