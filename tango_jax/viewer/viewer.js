// The rollout viewer: connects filters, list and rollout, and stores the current selection in the address.

function setAddress(hash) {
  try {
    history.replaceState(null, "", `#${hash}`);
  } catch {
    location.hash = hash; // some browsers refuse replaceState for local files
  }
}

// Rollouts have keys that are stable when a report is rebuilt: run, turn and row.
const keyOf = (columns, facts, i) => `${facts.runs[columns.run[i]].name}:${columns.turn[i]}:${columns.row[i]}`;

function indexOfKey(columns, facts, key) {
  const [, name, turn, row] = /^(.*):(\d+):(\d+)$/.exec(key ?? "") ?? [];
  const run = facts.runs.findIndex((item) => item.name === name);
  for (let i = 0; i < columns.count; i++) {
    if (columns.run[i] === run && columns.turn[i] === Number(turn) && columns.row[i] === Number(row)) return i;
  }
  return -1;
}

// The samples of a rollout's group, which are adjacent in the columns.
function siblingsOf(columns, facts, index) {
  const same = (i) => ["run", "turn", "group"].every((name) => columns[name][i] === columns[name][index]);
  let first = index;
  while (first > 0 && same(first - 1)) first--;
  const found = [];
  for (let i = first; i < columns.count && same(i); i++) {
    found.push({ index: i, key: keyOf(columns, facts, i), sample: i - first, reward: columns.reward[i] / 1000 });
  }
  return found;
}

// The advantage that gets the strongest shade: the 95th percentile of the magnitudes.
function shadeScale(columns) {
  const sizes = Int32Array.from(columns.adv, Math.abs).sort();
  return Math.max(0.1, (sizes[Math.floor(0.95 * (sizes.length - 1))] ?? 0) / 1000);
}

function makeViewer(facts, columns) {
  const store = makeStore(columns);
  const scale = shadeScale(columns);
  let state = noFilters();
  let hits = null; // which rollouts match the search
  let chosen = -1;
  const list = makeList($("list"), $("list-space"), columns, facts, scale, choose);
  const controls = bindFilters(
    facts,
    columns,
    () => state,
    async (next) => {
      if (next.order !== state.order) chosen = -1; // after sorting, show the first rollout
      state = next;
      await refresh(true);
      writeHash();
    },
  );

  // `mayMove`: if the chosen rollout is filtered out, show the first remaining one instead.
  async function refresh(mayMove = false) {
    const started = performance.now();
    if (state.query) {
      const query = state.query;
      if (store.progress() < 1) $("found").textContent = "loading all texts …";
      const found = await store.search(query);
      if (query !== state.query) return; // the query has changed in the meantime
      hits = found;
    } else {
      hits = null;
    }
    const { shown, flagCounts } = select(columns, facts, state, hits);
    list.update(shown, chosen);
    controls.show(state, shown.length, flagCounts);
    performance.measure("filter", { start: started, end: performance.now() });
    if (shown.length && (chosen < 0 || (mayMove && list.current() === null))) await open(shown[0]);
  }

  async function open(index) {
    chosen = index;
    list.select(index);
    const rollout = await store.rollout(index);
    if (chosen !== index) return; // another rollout was chosen in the meantime
    const siblings = siblingsOf(columns, facts, index);
    $("rollout").scrollTop = 0;
    renderRollout($("rollout"), rollout, { fact: facts.runs[columns.run[index]], siblings, scale, copyLink, choose });
    if (performance.getEntriesByName("first-rollout").length === 0) performance.mark("first-rollout");
  }

  function choose(index) {
    $("problem").hidden = true; // the message was about another rollout
    open(index);
    writeHash();
  }

  function writeHash() {
    setAddress(toHash(state, chosen >= 0 ? keyOf(columns, facts, chosen) : null));
  }

  async function followHash() {
    const { state: wanted, rollout } = fromHash(location.hash);
    const index = rollout ? indexOfKey(columns, facts, rollout) : -1;
    state = wanted;
    $("problem").hidden = !rollout || index >= 0;
    $("problem").textContent =
      `This report does not contain the rollout ${rollout}: it was left out, or the dump of its turn was deleted.`;
    chosen = index;
    await refresh();
    if (index >= 0) await open(index);
  }

  async function copyLink(button = null) {
    const link = `${location.href.split("#")[0]}#r=${keyOf(columns, facts, chosen)}`;
    try {
      await navigator.clipboard.writeText(link);
    } catch {
      prompt("Link:", link);
      return;
    }
    if (button) button.textContent = "Copied";
  }

  function moveInGroup(by) {
    const siblings = siblingsOf(columns, facts, chosen);
    const next = siblings[siblings.findIndex((item) => item.index === chosen) + by];
    if (next) choose(next.index);
  }

  return {
    followHash,
    writeHash,
    moveInGroup,
    copyLink,
    move: list.move,
    preload: store.loadAll,
    toggle: controls.toggle,
    clear: controls.clear,
  };
}
