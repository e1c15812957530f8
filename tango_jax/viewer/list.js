// The list of rollouts. Only visible rows exist in the DOM, so that 20,000 are as fast as 20.

const ROW_HEIGHT = 68; // pixels, as in style.css

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "class") element.className = value;
    else if (name === "style") element.style.cssText = value; // the Content-Security-Policy forbids style attributes
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const muted = (...children) => h("p", { class: "muted" }, ...children);
const hidden = (text) => h("span", { class: "hidden" }, text); // for screen readers

const MARKS = { good: "✓", bad: "✗", none: "–" };
const mark = (kind) => h("span", { class: `mark ${kind}`, "aria-hidden": "true" }, MARKS[kind]);
const verdictKind = (verdict) => ({ CORRECT: "good", INCORRECT: "bad" })[verdict] ?? "none";
const signed = (value, digits = 2) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
const VERDICTS = ["CORRECT", "INCORRECT", "INVALID", "no verdict"];

function makeList(box, space, columns, facts, advScale, onChoose) {
  let shown = [];
  let current = -1; // index into `shown`

  function option(place) {
    const i = shown[place];
    const verdict = VERDICTS[columns.verdict[i]];
    const adv = columns.adv[i] / 1000;
    // The run comes last: a long name would hide the turn.
    const run = facts.runs.length > 1 ? ` · ${facts.runs[columns.run[i]].name}` : "";
    const where = `turn ${columns.turn[i]} · ${ROLES[columns.role[i]]} · row ${columns.row[i]}${run}`;
    const wrong = flagsOf(columns, i).map((name) => columns.flagLabels[name]).join(", ");
    const label = readableParts(columns.labels[columns.label[i]]);
    const width = Math.min(1, Math.abs(adv) / advScale) * 50;
    const isGreedy = ROLES[columns.role[i]] === "evaluation"; // without an advantage
    const bar = h("span", { class: `minibar ${adv < 0 ? "neg" : "pos"}`, style: `--w:${width}%` });
    const grade = columns.correct[i] ? "good" : "bad";
    const spoken = hidden(`verdict ${verdict}, answer ${columns.correct[i] ? "right" : "wrong"}`);
    const row = h(
      "div",
      {
        role: "option",
        id: `option-${place}`,
        class: "row",
        style: `top:${place * ROW_HEIGHT}px`,
        "aria-selected": String(place === current),
        "aria-setsize": shown.length,
        "aria-posinset": place + 1,
      },
      h("span", { class: "pair" }, mark(columns.verdict[i] > 2 ? "none" : verdictKind(verdict)), mark(grade), spoken),
      h(
        "span",
        { class: "what" },
        h("span", { class: "label" }, ...label),
        h("span", { class: "wrong" }, wrong),
        h("span", { class: "where", title: where }, where),
      ),
      isGreedy ? h("span", { class: "much" }, "greedy") : h("span", { class: "much" }, signed(adv), bar),
    );
    row.addEventListener("click", () => choose(place));
    return row;
  }

  function render() {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW_HEIGHT) - 4);
    const last = Math.min(shown.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW_HEIGHT) + 4);
    space.replaceChildren(...Array.from({ length: Math.max(0, last - first) }, (_, k) => option(first + k)));
    if (current >= first && current < last) box.setAttribute("aria-activedescendant", `option-${current}`);
    else box.removeAttribute("aria-activedescendant");
  }

  const isInView = (place) =>
    place * ROW_HEIGHT >= box.scrollTop && (place + 1) * ROW_HEIGHT <= box.scrollTop + box.clientHeight;

  function intoView(place) {
    const top = place * ROW_HEIGHT;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + ROW_HEIGHT > box.scrollTop + box.clientHeight) box.scrollTop = top + ROW_HEIGHT - box.clientHeight;
  }

  function choose(place) {
    if (place < 0 || place >= shown.length) return;
    current = place;
    intoView(place);
    render();
    onChoose(shown[place]);
  }

  // Show other rollouts; the one with index `keep` stays selected if it is among them.
  function update(indices, keep) {
    shown = indices;
    current = shown.indexOf(keep);
    space.style.height = `${shown.length * ROW_HEIGHT}px`;
    if (current < 0) box.scrollTop = 0;
    else if (!isInView(current)) box.scrollTop = (current + 0.5) * ROW_HEIGHT - box.clientHeight / 2;
    render();
  }

  box.addEventListener("scroll", render, { passive: true });
  new ResizeObserver(render).observe(box);
  box.addEventListener("keydown", (event) => {
    const places = {
      ArrowDown: current + 1,
      ArrowUp: current - 1,
      PageDown: Math.min(current + 10, shown.length - 1),
      PageUp: Math.max(current - 10, 0),
      Home: 0,
      End: shown.length - 1,
    };
    if (!(event.key in places) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(places[event.key]);
  });
  return {
    update,
    move: (by) => {
      box.focus({ preventScroll: true }); // so that screen readers announce the selection
      choose(current < 0 ? 0 : current + by);
    },
    select: (index) => update(shown, index),
    current: () => (current < 0 ? null : shown[current]),
  };
}
