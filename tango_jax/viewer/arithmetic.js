// Shows how a reward became an advantage, with the numbers of one rollout. The rules are those of rl/credit.py and
// rl/advantages.py; the results are the dumped values, and the left-hand sides show where they come from.

const number = (value, digits = 3) => (value < 0 ? "−" : "") + Math.abs(value).toFixed(digits);

// The value of a run-length encoded advantage at a token.
function valueAt(runs, token) {
  let end = 0;
  for (const [count, value] of runs) {
    end += count;
    if (token < end) return value;
  }
  return 0;
}

function groupStatistics(rewards) {
  const mean = rewards.reduce((sum, value) => sum + value, 0) / rewards.length;
  const squares = rewards.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return rewards.length > 1 ? { mean, std: Math.sqrt(squares / (rewards.length - 1)) } : { mean: 0, std: 1 };
}

// [left-hand side, result] of the outcome advantage for the run's algorithm.
function outcomeLine(rollout, loss) {
  const { mean, std } = groupStatistics(rollout.group_rewards);
  const M = rollout.group_rewards.length;
  const reward = number(rollout.reward.total);
  const result = rollout.advantage.outcome.length ? rollout.advantage.outcome[0][1] : 0;
  const learner = rollout.role === "generator" ? rollout.solution : rollout.verifications[0];
  if (loss.mask_overlong && learner.is_truncated) return ["truncated: masked out of the loss (mask_overlong)", 0];
  if (loss.algorithm === "reinforce_pp") return ["reward, whitened over all tokens of the batch", result];
  if (loss.algorithm === "rloo") {
    return [M > 1 ? `${M}/${M - 1} × (${reward} − ${number(mean)})` : `${reward}, the only sample`, result];
  }
  // Avoids showing 0 / 0: the published formula adds 1e-6 to the std.
  if (loss.use_std && new Set(rollout.group_rewards).size === 1 && M > 1) return ["all rewards are equal", result];
  return [loss.use_std ? `(${reward} − ${number(mean)}) / ${number(std)}` : `${reward} − ${number(mean)}`, result];
}

function groupLine(rollout, loss) {
  const { mean, std } = groupStatistics(rollout.group_rewards);
  const rewards = rollout.group_rewards.map((value) => Number(value.toFixed(3))).join(", ");
  const spread = loss.algorithm === "grpo" && loss.use_std ? `, std ${number(std)}` : "";
  return `${rewards}: mean ${number(mean)}${spread}`;
}

const equation = (name, left, right) =>
  h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, ...[left].flat()), h("td", { class: "num" }, right));

// The end of the sum that is a reward: the part from the user's function, which the settings name.
const ownReward = (reward, name) =>
  reward.own === undefined ? [] : [` + own reward ${number(reward.own)} (`, h("code", {}, ...readableParts(name)), ")"];

function generatorArithmetic(rollout, loss, ownName) {
  const { reward, advantage, alpha } = rollout;
  const graded = reward.outcome ? "1 (right)" : "0 (wrong)";
  const [left, outcome] = outcomeLine(rollout, loss);
  const rows = [
    equation(
      "reward",
      [
        `${reward.outcome_weight} × ${graded} + ${reward.format_weight} × format ${number(reward.format, 2)}`,
        ...ownReward(reward, ownName),
      ],
      number(reward.total),
    ),
    equation("group", groupLine(rollout, loss), ""),
    equation("A outcome", left, signed(outcome, 3)),
  ];
  const parts = [h("table", { class: "sums" }, h("tbody", {}, ...rows))];
  if (!advantage.step) {
    parts.push(muted("No step rewards in this arm: every token gets A = A outcome."));
  } else if (reward.steps.every((steps) => steps === null)) {
    const result = signed((1 - alpha) * outcome, 3);
    const reason = "No step rewards: the verification is not aligned with the steps.";
    parts.push(muted(`${reason} A step is 0 and A = (1 − ${number(alpha)}) × A outcome = ${result}.`));
  } else {
    parts.push(stepArithmetic(rollout, outcome));
  }
  return parts;
}

function stepArithmetic(rollout, outcome) {
  const { reward, advantage, alpha, solution } = rollout;
  const given = reward.steps.filter((steps) => steps !== null);
  const share =
    reward.steps.length > 1 ? `, mean of ${given.length} aligned verifications of ${reward.steps.length}` : "";
  const row = (name, r, token) => {
    const step = valueAt(advantage.step, token);
    const total = valueAt(advantage.total, token);
    const sum = `${number(1 - alpha)} × ${signed(outcome, 3)} + ${number(alpha)} × ${signed(step, 3)}`;
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, name),
      h("td", { class: "num" }, r),
      h("td", { class: "num" }, signed(step, 3)),
      h("td", { class: "num wide" }, sum),
      h("td", { class: "num" }, h("b", {}, signed(total, 3))),
    );
  };
  const rows = solution.step_ends.map((token, k) => {
    const mean = given.reduce((sum, steps) => sum + steps[k], 0) / given.length;
    return row(`step ${k + 1}`, signed(mean, 3), token);
  });
  const last = solution.step_ends.at(-1);
  if (last + 1 < solution.tokens) rows.push(row("after the last step", "", last + 1));
  const head = [
    "tokens up to the end of",
    `r = ±1/${solution.steps.length}${share}`,
    "A step, to go",
    `(1 − α) A outcome + α A step, α = ${number(alpha)}`,
    "A",
  ];
  return h(
    "table",
    { class: "sums steps-sums" },
    h(
      "thead",
      {},
      h("tr", {}, ...head.map((text, i) => h("th", { scope: "col", class: i === 3 ? "wide" : "" }, text))),
    ),
    h("tbody", {}, ...rows),
  );
}

function verifierArithmetic(rollout, loss, ownName) {
  const { reward, class_weight: weight, advantage, verifications, solution } = rollout;
  const [left, outcome] = outcomeLine(rollout, loss);
  const total = advantage.total.length ? advantage.total[0][1] : 0;
  const fact = solution.is_correct ? "right" : "wrong";
  const weighted = (reward.correctness_weight ?? 1) === 1 ? "" : `${reward.correctness_weight} × `;
  const agrees = `${weighted}${reward.correctness} (${verifications[0].verdict} on a ${fact} answer)`;
  return [
    h(
      "table",
      { class: "sums" },
      h(
        "tbody",
        {},
        equation(
          "reward",
          [`${agrees} + ${reward.gamma} × format ${number(reward.format, 2)}`, ...ownReward(reward, ownName)],
          number(reward.total),
        ),
        equation("group", groupLine(rollout, loss), ""),
        equation("A outcome", left, signed(outcome, 3)),
        equation(
          "A",
          `${number(weight)} (weight of ${fact} solutions) × ${signed(outcome, 3)}`,
          h("b", {}, signed(total, 3)),
        ),
      ),
    ),
  ];
}
