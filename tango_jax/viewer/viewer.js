// The rollout viewer: connects filters, list and rollout, and stores the current selection in the address.

function setAddress(hash) {
  try {
    history.replaceState(null, "", `#${hash}`);
  } catch {
    location.hash = hash; // some browsers refuse replaceState for local files
  }
}

// Rollouts have keys that are stable when a report is rebuilt: run, turn and row, with an e for those of evaluations.
const isEvaluation = (columns, i) => ROLES[columns.role[i]] === "evaluation";
const keyOf = (columns, facts, i) =>
  `${facts.runs[columns.run[i]].name}:${columns.turn[i]}:${isEvaluation(columns, i) ? "e" : ""}${columns.row[i]}`;

function indexOfKey(columns, facts, key) {
  const [, name, turn, e, row] = /^(.*):(\d+):(e?)(\d+)$/.exec(key ?? "") ?? [];
  const run = facts.runs.findIndex((item) => item.name === name);
  for (let i = 0; i < columns.count; i++) {
    const isThere = columns.run[i] === run && columns.turn[i] === Number(turn) && columns.row[i] === Number(row);
    if (isThere && isEvaluation(columns, i) === (e === "e")) return i;
  }
  return -1;
}

// The samples of a rollout's group, which are adjacent in the columns.
function siblingsOf(columns, facts, index) {
  const same = (i) => ["run", "turn", "role", "group"].every((name) => columns[name][i] === columns[name][index]);
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
  let as = ""; // one rollout, its "group" or its "problem"
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

  async function hitsOf(query) {
    if (!query) return null;
    const id = idQuery(query);
    if (id !== null) return searchIds(columns, id);
    if (store.progress() < 1) $("found").textContent = "loading all texts …";
    return store.search(query);
  }

  // `mayMove`: if the chosen rollout is filtered out, show the first remaining one instead.
  async function refresh(mayMove = false) {
    const started = performance.now();
    const { query } = state;
    const found = await hitsOf(query);
    if (query !== state.query) return; // the query has changed in the meantime
    hits = found;
    const { shown, flagCounts } = select(columns, facts, state, hits);
    list.update(shown, chosen);
    controls.show(state, shown.length, flagCounts);
    $("nothing").hidden = shown.length > 0;
    performance.measure("filter", { start: started, end: performance.now() });
    if (shown.length && (chosen < 0 || (mayMove && list.current() === null))) await open(shown[0]);
  }

  async function open(index) {
    chosen = index;
    list.select(index);
    try {
      await display(index);
    } catch (error) {
      tell(`Cannot display this rollout: ${error.message}.`);
      throw error;
    }
  }

  // Draws the chosen rollout, or the columns beside it.
  async function display(index) {
    const siblings = siblingsOf(columns, facts, index);
    const places = { group: siblings, problem: sameProblem(columns, index) };
    const counts = { group: places.group.length, problem: places.problem.length };
    const tabs = lookTabs(as, counts, show);
    const fact = facts.runs[columns.run[index]];
    const context = { fact, facts, columns, siblings, scale, as, choose, tabs };
    const wanted = as ? columnsToShow(columns, facts, index, as) : [[index, ""]];
    const drawn = as;
    const rollouts = await Promise.all(wanted.map(([i]) => store.rollout(i)));
    if (chosen !== index || as !== drawn) return; // another rollout was chosen in the meantime
    $("rollout").scrollTop = 0;
    if (as) {
      const entries = wanted.map(([i, marked], k) => ({ rollout: rollouts[k], index: i, marked, isThis: i === index }));
      renderCompare($("rollout"), entries, counts[as], context);
    } else {
      renderRollout($("rollout"), rollouts[0], context);
    }
    if (performance.getEntriesByName("first-rollout").length === 0) performance.mark("first-rollout");
  }

  function tell(text) {
    $("problem").hidden = false;
    $("problem").textContent = text;
  }

  function choose(index, how = as) {
    as = how;
    $("problem").hidden = true; // the message was about another rollout
    open(index);
    writeHash();
  }

  // Displays in another way.
  function show(how) {
    as = how;
    const focused = document.activeElement?.id;
    display(chosen).then(() => focused && $(focused)?.focus());
    writeHash();
  }

  function writeHash() {
    setAddress(toHash(state, chosen >= 0 ? keyOf(columns, facts, chosen) : null, as));
  }

  async function followHash() {
    const { state: wanted, rollout, as: how } = fromHash(location.hash, columns);
    const index = rollout ? indexOfKey(columns, facts, rollout) : -1;
    state = wanted;
    as = how;
    $("problem").hidden = true;
    if (rollout && index < 0) {
      const reason = "it was left out, or the dump of its turn was deleted";
      tell(`This report does not contain the rollout ${rollout}: ${reason}.`);
    }
    chosen = index;
    await refresh();
    if (index >= 0) await open(index);
  }

  function moveInGroup(by) {
    const siblings = siblingsOf(columns, facts, chosen);
    const next = siblings[siblings.findIndex((item) => item.index === chosen) + by];
    if (next) choose(next.index);
  }

  // A key switches a way of displaying on, and off again.
  const toggleLook = (how) => show(as === how ? "" : how);

  return {
    followHash,
    writeHash,
    moveInGroup,
    toggleLook,
    move: list.move,
    // The texts of a bundle are loaded when they are first searched: there may be gigabytes of them.
    preload: columns.files ? () => {} : store.loadAll,
    toggle: controls.toggle,
    clear: controls.clear,
  };
}
