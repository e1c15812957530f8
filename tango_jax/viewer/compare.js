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

// The indices to show side by side, with what marks them: [index, "best" | "worst" | ""].
function columnsToShow(columns, facts, index, as) {
  if (as === "problem") return spread(sameProblem(columns, index), MAX_COLUMNS).map((i) => [i, ""]);
  const group = siblingsOf(columns, facts, index)
    .map((item) => item.index)
    .sort((a, b) => columns.reward[b] - columns.reward[a] || a - b);
  const [most, least] = [columns.reward[group[0]], columns.reward[group.at(-1)]];
  const markOf = (i) => (most === least ? "" : { [least]: "worst", [most]: "best" }[columns.reward[i]] ?? "");
  return spread(group, MAX_COLUMNS).map((i) => [i, markOf(i)]);
}

// The choice between one rollout, its group and its problem; the counts say how many there are of each.
function lookTabs(shown, counts, show) {
  const names = {
    "": "This rollout",
    group: `Its group (${counts.group})`,
    problem: `The same problem (${counts.problem})`,
  };
  const buttons = Object.entries(names).map(([as, text]) => {
    const button = h(
      "button",
      {
        type: "button",
        id: `look-${as || "one"}`,
        class: "chip",
        "aria-pressed": String(shown === as),
        disabled: as !== "" && counts[as] < 2 && shown !== as,
      },
      text,
    );
    button.addEventListener("click", () => show(as));
    return button;
  });
  return h("nav", { class: "look-tabs", "aria-label": "Side by side" }, ...buttons);
}

// One column: whose words these are, verdict, grade and reward, and every step with what was said of it.
function compareColumn({ rollout, index, marked, isThis }, context) {
  const { facts, scale, choose } = context;
  const verification = rollout.verifications[0] ?? null;
  const paints = paintsOf(rollout, scale);
  const name = facts.runs[context.columns.run[index]].name;
  const place = `${rollout.phase === "eval" ? "after turn" : "turn"} ${rollout.turn}, ${phaseOf(rollout)}`;
  const open = rolloutLink(keyOf(context.columns, facts, index), () => choose(index, ""), {}, place);
  const reward = rollout.reward ? `reward ${number(rollout.reward.total, 2)}` : "greedy";
  const steps = rollout.solution.steps.map((_, k) => stepCard(rollout, verification, k, paints));
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
      verdictBanner(rollout, verification),
    ),
    h("ol", { class: "steps" }, ...steps),
    between(rollout.solution.text, end, lengthOf(rollout.solution.text), paints.generator),
  );
}

// context: that of renderRollout, and {facts, columns}. entries: [{rollout, index, marked, isThis}].
function renderCompare(box, entries, total, context) {
  const first = entries[0].rollout;
  const what =
    context.as === "group"
      ? "The samples of this group, the highest reward first"
      : "All rollouts of this problem in this report, by run and turn";
  const part = `: ${entries.length} of ${total}, spread evenly, with the first and the last.`;
  const note = entries.length < total ? part : ".";
  const columns = entries.map((entry) => compareColumn(entry, context));
  box.replaceChildren(
    h("header", {}, h("h2", {}, ...readableParts(first.problem.id))),
    context.tabs,
    problemCard(first.problem),
    muted(what + note),
    h("div", { class: "compare", tabindex: 0, role: "group", "aria-label": what }, ...columns),
  );
}
