// Renders one rollout: the problem, each step beside the verifier's judgement of it, the verdict against the grade, and
// how the reward became an advantage. All model text goes through text.js.

const JUDGED = { good: "approved", bad: "rejected", none: "not judged" };
const judgementKind = (value) => (value === true ? "good" : value === false ? "bad" : "none");
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

function gradeBadge(solution) {
  const kind = solution.is_correct ? "good" : "bad";
  return h("span", { class: `badge ${kind}` }, mark(kind), ` Answer is ${solution.is_correct ? "right" : "wrong"}`);
}

function verdictBadge(verification) {
  const kind = verdictKind(verification.verdict);
  return h("span", { class: `badge ${kind}` }, mark(kind), ` Verdict ${verification.verdict}`);
}

function verdictBanner({ solution }, verification) {
  if (!verification) return h("div", { class: "banner" }, gradeBadge(solution));
  const { meaning, agrees, why } = verification.told;
  const notes = [
    solution.is_truncated && "solution truncated",
    verification.is_truncated && "verification truncated",
    why && `misaligned: ${why}`,
  ].filter(Boolean);
  return h(
    "div",
    { class: "banner" },
    verdictBadge(verification),
    gradeBadge(solution),
    meaning === verification.verdict ? null : h("span", { class: agrees ? "agree" : "disagree" }, meaning),
    ...notes.map((note) => h("span", { class: "badge none" }, note)),
  );
}

// Text between, before and after steps: tags, the answer.
function between(text, start, end, paint) {
  if (!cut(text, start, end).trim()) return null;
  return h("div", { class: "between" }, h("pre", {}, ...shaded(text, start, end, paint)));
}

// With what probability the verifier would have written CORRECT.
function probabilityBar(p) {
  if (p === null || p === undefined) return null;
  const told = `P(CORRECT) ${p.toFixed(2)}`;
  return h("span", { class: "probability" }, told, h("meter", { value: p, title: told, "aria-label": told }));
}

// [step head, words] of what the verifier said of a step.
function saidOf(solution, verification, k, paint) {
  const aligned = Boolean(verification?.is_aligned);
  const kind = aligned ? judgementKind(verification.judgements[k]) : "none";
  const block = verification?.blocks[k];
  const words = block
    ? h("pre", {}, ...inside(verification.text, block, "step", paint))
    : muted(verification ? "no judgement of this step" : "the verifier was not asked");
  const head = h(
    "div",
    { class: "step-head" },
    verification ? h("b", { class: kind }, mark(kind), ` ${JUDGED[kind]}`) : null,
    probabilityBar(verification?.p_steps?.[k]),
  );
  return { kind, content: [head, words] };
}

// The gold label of a step, and the kind that the task names it by.
function truthOf(solution, verification, k) {
  const gold = solution.gold_steps ? solution.gold_steps[k] : null;
  if (gold === null) return null;
  const judgement = verification?.is_aligned ? verification.judgements[k] : null;
  const wrongly = judgement !== null && gold !== judgement;
  const named = solution.step_kinds ? ` (${readable(solution.step_kinds[k])})` : "";
  return h(
    "span",
    { class: `truth ${wrongly ? "wrongly" : ""}` },
    `${wrongly ? "⚠ " : ""}gold label: ${gold ? "right" : "wrong"}${named}`,
  );
}

function stepCard({ solution }, verification, k, paints) {
  const said = saidOf(solution, verification, k, paints.verifier);
  return h(
    "li",
    { class: `step ${said.kind}` },
    h(
      "div",
      { class: "wrote" },
      h("div", { class: "step-head" }, h("b", {}, `Step ${k + 1}`), truthOf(solution, verification, k)),
      h("pre", {}, ...inside(solution.text, solution.steps[k], "step", paints.generator)),
    ),
    h("div", { class: "said" }, ...said.content),
  );
}

function stepsOf(rollout, verification, paints) {
  const { solution } = rollout;
  const items = [];
  let at = 0;
  solution.steps.forEach((span, k) => {
    items.push(between(solution.text, at, span[0], paints.generator), stepCard(rollout, verification, k, paints));
    at = span[1];
  });
  items.push(between(solution.text, at, lengthOf(solution.text), paints.generator));
  const spare = (verification?.blocks ?? []).slice(solution.steps.length);
  if (verification && !solution.steps.length) items.push(muted("The solution has no steps to judge: see the full texts"));
  if (spare.length) items.push(muted(`and ${plural(spare.length, "more verification block")} without a step`));
  return h(
    "ol",
    { class: "steps" },
    ...items.filter(Boolean).map((item) => (item.tagName === "LI" ? item : h("li", { class: "plain" }, item))),
  );
}

function rawTexts(rollout, verification, paints) {
  const text = (name, value, paint) => [
    h("h4", {}, name),
    h("pre", { class: "raw" }, ...shaded(value, 0, lengthOf(value), paint)),
  ];
  const { solution } = rollout;
  const length = verification?.tokens ? `, ${verification.tokens} tokens` : ""; // none of a process reward model
  return h(
    "details",
    { class: "card" },
    h("summary", {}, "Full texts"),
    ...text(`Solution, ${solution.tokens} tokens`, solution.text, paints.generator),
    ...(verification ? text(`Verification${length}`, verification.text, paints.verifier) : []),
  );
}

// A second try of the problem, and what the verifier said of its own verification, where an arm has them.
function furtherCards({ second_try: second, later_tries: later = [], second_judgement: again }) {
  const card = (title, badges, text) =>
    h(
      "section",
      { class: "card further" },
      h("h3", {}, title),
      h("div", { class: "banner" }, ...badges.filter(Boolean)),
      h("pre", {}, ...readableParts(text)),
    );
  const note = (text) => h("span", { class: "badge none" }, text);
  const accepted = again?.judgements.filter(Boolean).length;
  const tryCard = (title, one) =>
    card(
      one.after_verdict ? `${title}, after the verdict ${one.after_verdict}` : title,
      [gradeBadge(one), one.reward && note(`reward ${one.reward.total.toFixed(2)}`)],
      one.text,
    );
  return [
    second && tryCard("Second try", second),
    ...later.map((one) => tryCard("A further try", one)),
    again &&
      card(
        "The verification, judged once more",
        [verdictBadge(again), note(`accepts ${accepted} of ${plural(again.judgements.length, "remark")}`)],
        again.text,
      ),
  ];
}

const phaseOf = ({ phase, role }) =>
  ({ warmup: "verifier's warm-up", eval: "evaluation" })[phase] ?? `the ${role}'s turn`;

function whereLine(rollout, fact) {
  const after = rollout.turn ? `after turn ${rollout.turn}` : "before the first turn";
  const where = `${rollout.phase === "eval" ? after : `turn ${rollout.turn}`} of ${readable(fact.name)}`;
  const steps = fact.trains_generator && `after ${rollout.generator_step} generator steps`;
  const facts = [where, phaseOf(rollout), steps, `arm ${fact.arm}`].filter(Boolean);
  return h("p", { class: "muted where-line" }, facts.join(" · "));
}

// A link to a rollout that keeps the filters; in a new tab its address opens the rollout alone.
function rolloutLink(key, choose, attributes, ...content) {
  const link = h("a", { href: linkTo(key), ...attributes }, ...content);
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    choose();
  });
  return link;
}

// The group's samples with their rewards, each a link.
function groupRow(rollout, siblings, choose) {
  const links = siblings.map(({ key, index, sample, reward }) => {
    const isThis = sample === rollout.sample;
    const look = { class: isThis ? "chosen" : "", "aria-current": isThis ? "true" : null };
    const told = h("small", {}, hidden("reward "), reward.toFixed(2));
    return rolloutLink(key, () => choose(index), look, hidden("sample "), `${sample + 1}`, told);
  });
  return h(
    "nav",
    { class: "group", "aria-label": "Samples of the group" },
    h("span", { class: "muted" }, "Samples of this group, by reward"),
    ...links,
  );
}

// How the reward became an advantage; of an evaluation, that there is none.
function rewardCard(rollout, context) {
  const { siblings, choose } = context;
  if (!rollout.reward) {
    return h("section", { class: "card" }, muted("Greedy, in an evaluation: no reward, and no update from it."));
  }
  return h(
    "section",
    { class: "card" },
    h("h3", {}, "From reward to advantage"),
    groupRow(rollout, siblings, choose),
    rewardTable(rollout),
    advantageTable(rollout),
    ...rollout.notes.map((note) => muted(note)),
  );
}

// context {fact, siblings, scale, choose, tabs}: facts about the run, the group's samples, the advantage with the
// strongest shade, and what is displayed.
function renderRollout(box, rollout, context, choice = 0) {
  const verification = rollout.verifications[choice] ?? null;
  const paints = paintsOf(rollout, context.scale);
  const several =
    rollout.verifications.length > 1
      ? h(
          "select",
          { id: "which", "aria-label": "Which verification" },
          ...rollout.verifications.map((item, i) =>
            h("option", { value: i, selected: i === choice }, `verification ${i + 1}: ${item.verdict}`),
          ),
        )
      : null;
  several?.addEventListener("change", () => {
    renderRollout(box, rollout, context, Number(several.value));
    box.querySelector("#which").focus();
  });
  const content = [
    h("header", {}, h("h2", {}, ...readableParts(rollout.problem.id)), whereLine(rollout, context.fact)),
    context.tabs,
    problemCard(rollout.problem),
    h("div", { class: "banner-line" }, verdictBanner(rollout, verification), several),
    h(
      "div",
      { class: "heads", "aria-hidden": "true" },
      h("span", {}, "The generator wrote"),
      h("span", {}, "The verifier said"),
    ),
    stepsOf(rollout, verification, paints),
    ...furtherCards(rollout),
    rewardCard(rollout, context),
    rawTexts(rollout, verification, paints),
  ];
  box.replaceChildren(...content.filter(Boolean));
}

const problemCard = ({ question, answer }) =>
  h(
    "div",
    { class: "card problem" },
    h("pre", {}, ...readableParts(question)),
    h("p", {}, h("span", { class: "muted" }, "Gold answer "), h("code", {}, ...readableParts(answer))),
  );
