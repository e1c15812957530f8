// Shows several rollouts side by side: the samples of a group, best first, or whatever the report holds of one problem,
// across runs, evaluations and turns.

const MAX_COLUMNS = 12;

// Evenly spaced places of a list, the first and the last among them.
function spread(items, count) {
  if (items.length <= count) return items;
  return Array.from({ length: count }, (_, k) => items[Math.round((k * (items.length - 1)) / (count - 1))]);
}

// Indices of the rollouts of the same problem as rollout `index`, run by run, in the order of training.
function sameProblem(columns, index) {
  const found = [];
  for (let i = 0; i < columns.count; i++) if (columns.problem[i] === columns.problem[index]) found.push(i);
  return found;
}

// Of too many, some of every run: its first, its last and some between.
function chosenOf(columns, indices) {
  if (indices.length <= MAX_COLUMNS) return indices;
  const runs = [...new Set(indices.map((i) => columns.run[i]))];
  const each = Math.max(2, Math.floor(MAX_COLUMNS / runs.length));
  return runs.flatMap((run) =>
    spread(
      indices.filter((i) => columns.run[i] === run),
      each,
    ),
  );
}

// The indices to show side by side, with what marks them: [index, "best" | "worst" | ""].
function columnsToShow(columns, facts, index, as) {
  if (as === "problem") return chosenOf(columns, sameProblem(columns, index)).map((i) => [i, ""]);
  const group = siblingsOf(columns, facts, index)
    .map((item) => item.index)
    .sort((a, b) => columns.reward[b] - columns.reward[a] || a - b);
  const [most, least] = [columns.reward[group[0]], columns.reward[group.at(-1)]];
  const markOf = (i) => (most === least ? "" : { [least]: "worst", [most]: "best" }[columns.reward[i]] ?? "");
  return spread(group, MAX_COLUMNS).map((i) => [i, markOf(i)]);
}

// The choice between one rollout, its group and its problem; the counts say how many there are of each.
function lookTabs(look, counts, setLook) {
  const names = {
    "": "This rollout",
    group: `Its group (${counts.group})`,
    problem: `The same problem (${counts.problem})`,
  };
  const keys = { "": "Esc", group: "g", problem: "p" };
  const buttons = Object.entries(names).map(([as, text]) => {
    const button = h(
      "button",
      {
        type: "button",
        id: `look-${as || "one"}`,
        class: "chip",
        "aria-pressed": String(look.as === as),
        disabled: as !== "" && counts[as] < 2 && look.as !== as,
        title: as === "" ? "One rollout in full" : `Side by side (${keys[as]})`,
      },
      text,
    );
    button.addEventListener("click", () => setLook({ as }));
    return button;
  });
  return h("nav", { class: "look-tabs", "aria-label": "Side by side" }, ...buttons);
}

// One column: whose words these are, verdict, grade and reward, and every step with what was said of it.
function compareColumn({ rollout, index, marked, isThis }, context) {
  const { facts, scale, look, choose } = context;
  const verification = rollout.verifications[0] ?? null;
  const paints = paintsOf(rollout, verification, look.colour, scale);
  const name = facts.runs[context.columns.run[index]].name;
  const place = `${rollout.phase === "eval" ? "after turn" : "turn"} ${rollout.turn}, ${phaseOf(rollout)}`;
  const open = h("a", { href: linkTo(keyOf(context.columns, facts, index)) }, place);
  open.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    context.setLook({ as: "" }, false);
    choose(index);
  });
  const reward = rollout.reward ? `reward ${number(rollout.reward.total, 2)}` : "greedy";
  const meaning = verification ? meaningOf(rollout.solution, verification) : null;
  const steps = rollout.solution.steps.map((span, k) => {
    const said = saidOf(rollout.solution, verification, k, paints.verifier);
    return h(
      "li",
      { class: `step ${said.kind}` },
      h(
        "div",
        { class: "wrote" },
        h("div", { class: "step-head" }, h("b", {}, `Step ${k + 1}`), truthOf(rollout.solution, verification, k)),
        h("pre", {}, ...inside(rollout.solution.text, span, "step", paints.generator)),
      ),
      h("div", { class: "said" }, ...said.content),
    );
  });
  const end = rollout.solution.steps.at(-1)?.[1] ?? 0;
  return h(
    "section",
    { class: `column ${isThis ? "chosen" : ""}`, "aria-label": `${readable(name)}, ${place}, sample ${rollout.sample + 1}` },
    h(
      "header",
      {},
      facts.runs.length > 1 ? h("small", {}, ...readableParts(name)) : null,
      h("h3", {}, open),
      h(
        "p",
        { class: "num" },
        rollout.reward ? `sample ${rollout.sample + 1} · ${reward}` : reward,
        marked ? " · " : null,
        marked ? h("b", { class: marked === "best" ? "good" : "bad" }, marked) : null,
      ),
      h("div", { class: "banner" }, verification && verdictBadge(verification), gradeBadge(rollout.solution)),
      meaning ? h("p", { class: meaning[1] ? "agree" : "disagree" }, meaning[0]) : null,
    ),
    h("ol", { class: "steps" }, ...steps),
    between(rollout.solution.text, end, lengthOf(rollout.solution.text), paints.generator),
  );
}

// context: that of renderRollout, and {facts, columns}. entries: [{rollout, index, marked, isThis}].
function renderCompare(box, entries, total, context) {
  const { look } = context;
  const first = entries[0].rollout;
  const what =
    look.as === "group"
      ? "The samples of this group, the highest reward first"
      : "All that this report holds of this problem, by run and turn";
  const part = `: ${entries.length} of ${total}, evenly, the first and the last among them.`;
  const note = entries.length < total ? part : ".";
  const columns = entries.map((entry) => compareColumn(entry, context));
  box.replaceChildren(
    h("header", {}, h("h2", {}, ...readableParts(first.problem.id))),
    context.tabs,
    problemCard(first.problem),
    h("div", { class: "banner-line" }, muted(what + note), colouringChoice(first, first.verifications[0], context)),
    h("div", { class: "compare", tabindex: 0, role: "group", "aria-label": what }, ...columns),
    shadeLegend(look.colour, context.scale, "learning role"),
  );
}
