// Renders one rollout: the problem, each step beside the verifier's judgement of it, the verdict against the grade, and
// how the reward became an advantage. All model text goes through text.js.

const JUDGED = { good: "approved", bad: "rejected", none: "not judged" };
const judgementKind = (value) => (value === true ? "good" : value === false ? "bad" : "none");

// Characters start..end of a text, split where the advantage changes, with each part shaded accordingly.
function shaded(text, start, end, runs, scale) {
  const parts = [];
  let from = start;
  for (const [, value, until] of runs ?? []) {
    const to = Math.min(until, end);
    if (to > from) {
      parts.push(...shade(cut(text, from, to), value, scale));
      from = to;
    }
  }
  if (from < end) parts.push(...readableParts(cut(text, from, end)));
  return parts;
}

function shade(text, value, scale) {
  const parts = readableParts(text);
  if (value === 0) return parts;
  const alpha = Math.max(0.12, Math.min(1, Math.abs(value) / scale)).toFixed(2);
  const look = { class: `adv ${value < 0 ? "neg" : "pos"}`, style: `--a:${alpha}` };
  return [h("span", { ...look, title: `advantage ${signed(value, 3)}` }, ...parts)];
}

// The content of a tagged block without its tags, shaded.
function inside(text, [start, end], tag, runs, scale) {
  return shaded(text, start + tag.length + 2, end - tag.length - 3, runs, scale);
}

function verdictBanner(rollout, verification) {
  const right = rollout.solution.is_correct;
  const grade = h(
    "span",
    { class: `badge ${right ? "good" : "bad"}` },
    mark(right ? "good" : "bad"),
    ` Answer is ${right ? "right" : "wrong"}`,
  );
  if (!verification) return h("div", { class: "banner" }, grade);
  const kind = verdictKind(verification.verdict);
  const verdict = h("span", { class: `badge ${kind}` }, mark(kind), ` Verdict ${verification.verdict}`);
  let meaning = "verdict and grade agree";
  if (kind === "none") meaning = "no usable verdict";
  else if (kind === "good" && !right) meaning = "false accept";
  else if (kind === "bad" && right) meaning = "false reject";
  const notes = [
    rollout.solution.is_truncated && "solution truncated",
    verification.is_truncated && "verification truncated",
    !verification.is_aligned && "misaligned",
  ].filter(Boolean);
  return h(
    "div",
    { class: "banner" },
    verdict,
    grade,
    h("span", { class: meaning === "verdict and grade agree" ? "agree" : "disagree" }, meaning),
    ...notes.map((note) => h("span", { class: "badge none" }, note)),
  );
}

// Text between, before and after steps: tags, the answer.
function between(text, start, end, runs, scale) {
  if (!cut(text, start, end).trim()) return null;
  return h("div", { class: "between" }, h("pre", {}, ...shaded(text, start, end, runs, scale)));
}

function stepCard(rollout, verification, k, runs, scale) {
  const { solution } = rollout;
  const aligned = Boolean(verification?.is_aligned);
  const kind = aligned ? judgementKind(verification.judgements[k]) : "none";
  const gold = solution.gold_steps ? solution.gold_steps[k] : null;
  const wrongly = aligned && gold !== null && gold !== verification.judgements[k];
  const block = verification?.blocks[k];
  const own = rollout.role === "generator" ? runs : null;
  const theirs = rollout.role === "verifier" ? runs : null;
  const words = block
    ? h("pre", {}, ...inside(verification.text, block, "step", theirs, scale))
    : muted(verification ? "no judgement of this step" : "no verifier in this arm");
  const raw = block && !aligned ? judgementKind(verification.judgements[k]) : null;
  const truth =
    gold === null
      ? null
      : h(
          "span",
          { class: `truth ${wrongly ? "wrongly" : ""}` },
          wrongly ? "⚠ " : "",
          `gold label: ${gold ? "right" : "wrong"}`,
        );
  return h(
    "li",
    { class: `step ${kind}` },
    h(
      "div",
      { class: "wrote" },
      h("div", { class: "step-head" }, h("b", {}, `Step ${k + 1}`), truth),
      h("pre", {}, ...inside(solution.text, solution.steps[k], "step", own, scale)),
    ),
    h(
      "div",
      { class: "said" },
      h(
        "div",
        { class: "step-head" },
        verification ? h("b", { class: kind }, mark(kind), ` ${JUDGED[kind]}`) : null,
        raw && h("span", { class: "muted" }, `(says ${JUDGED[raw]}, not used)`),
      ),
      words,
    ),
  );
}

function stepsOf(rollout, verification, scale) {
  const { solution } = rollout;
  const runs = rollout.advantage.total;
  const own = rollout.role === "generator" ? runs : null;
  const items = [];
  let at = 0;
  solution.steps.forEach((span, k) => {
    items.push(between(solution.text, at, span[0], own, scale), stepCard(rollout, verification, k, runs, scale));
    at = span[1];
  });
  items.push(between(solution.text, at, lengthOf(solution.text), own, scale));
  const spare = (verification?.blocks ?? []).slice(solution.steps.length);
  if (spare.length)
    items.push(muted(`and ${spare.length} more verification block${spare.length > 1 ? "s" : ""} without a step`));
  return h(
    "ol",
    { class: "steps" },
    ...items.filter(Boolean).map((item) => (item.tagName === "LI" ? item : h("li", { class: "plain" }, item))),
  );
}

function rawTexts(rollout, verification, scale) {
  const own = (role) => (rollout.role === role ? rollout.advantage.total : null);
  const text = (name, value, runs) => [
    h("h4", {}, name),
    h("pre", { class: "raw" }, ...shaded(value, 0, lengthOf(value), runs, scale)),
  ];
  return h(
    "details",
    { class: "card" },
    h("summary", {}, "Full texts, as sampled"),
    ...text(`Solution, ${rollout.solution.tokens} tokens`, rollout.solution.text, own("generator")),
    ...(verification ? text(`Verification, ${verification.tokens} tokens`, verification.text, own("verifier")) : []),
  );
}

function whereLine(rollout, fact) {
  const facts = [
    `turn ${rollout.turn} of ${fact.name}`,
    `${rollout.phase === "warmup" ? "verifier's warm-up" : `the ${rollout.role}'s turn`}`,
    `after ${rollout.generator_step} generator steps`,
    `task ${fact.task}`,
    `arm ${fact.arm}`,
  ];
  return h("p", { class: "muted where-line" }, facts.join(" · "));
}

// The group's samples with their rewards, each a link.
function groupRow(rollout, siblings, choose) {
  const links = siblings.map(({ key, index, sample, reward }) => {
    const isThis = sample === rollout.sample;
    const link = h(
      "a",
      { href: `#r=${key}`, class: isThis ? "chosen" : "", "aria-current": isThis ? "true" : null },
      hidden("sample "),
      `${sample + 1}`,
      h("small", {}, hidden("reward "), reward.toFixed(2)),
    );
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return; // let the browser open a new tab
      event.preventDefault(); // following the link would clear the filters
      choose(index);
    });
    return link;
  });
  return h(
    "nav",
    { class: "group", "aria-label": "Samples of the group" },
    h("span", { class: "muted" }, "Samples of this group, by reward"),
    ...links,
  );
}

// context {fact, siblings, scale, copyLink, choose}: facts about the run, the group's samples, the advantage with the
// strongest shade.
function renderRollout(box, rollout, context, choice = 0) {
  const { fact, siblings, scale, copyLink } = context;
  const verification = rollout.verifications[choice] ?? null;
  const copy = h("button", { title: "Copy a link to this rollout (y)" }, "Copy link");
  copy.addEventListener("click", () => copyLink(copy));
  const several =
    rollout.verifications.length > 1
      ? h(
          "select",
          { "aria-label": "Which verification" },
          ...rollout.verifications.map((item, i) =>
            h("option", { value: i, selected: i === choice }, `verification ${i + 1}: ${item.verdict}`),
          ),
        )
      : null;
  several?.addEventListener("change", () => {
    renderRollout(box, rollout, context, Number(several.value));
    box.querySelector("select").focus();
  });
  const loss = fact.loss[rollout.role];
  const arithmetic = rollout.role === "generator" ? generatorArithmetic : verifierArithmetic;
  const sums = arithmetic(rollout, loss, fact.own_reward[rollout.role]);
  box.replaceChildren(
    h("header", {}, h("h2", {}, ...readableParts(rollout.problem.id)), copy, whereLine(rollout, fact)),
    h(
      "div",
      { class: "card problem" },
      h("pre", {}, ...readableParts(rollout.problem.question)),
      h("p", {}, h("span", { class: "muted" }, "Gold answer "), h("code", {}, ...readableParts(rollout.problem.answer))),
    ),
    h("div", { class: "banner-line" }, verdictBanner(rollout, verification), several),
    h(
      "div",
      { class: "heads", "aria-hidden": "true" },
      h("span", {}, "The generator wrote"),
      h("span", {}, "The verifier said"),
    ),
    stepsOf(rollout, verification, scale),
    h(
      "section",
      { class: "card" },
      h("h3", {}, "From reward to advantage"),
      groupRow(rollout, siblings, context.choose),
      ...sums,
      shadeLegend(scale, rollout.role),
    ),
    rawTexts(rollout, verification, scale),
  );
}

const shadeLegend = (scale, role) =>
  h(
    "p",
    { class: "muted shade-legend" },
    `Shading of the ${role}'s tokens: `,
    ...shade(`advantage ${signed(scale, 1)} or more`, scale, scale),
    " ",
    ...shade(signed(scale / 4, 2), scale / 4, scale),
    " none: 0 ",
    ...shade(signed(-scale / 4, 2), -scale / 4, scale),
    " ",
    ...shade(`${signed(-scale, 1)} or less`, -scale, scale),
  );
