// Draws the charts: takes panels (viewer/charts.py) and renders plotly figures in the page's colours, once they are
// visible.

let plotly = null; // promise of the library, which is decoded when the first chart is needed
function loadPlotly() {
  plotly ??= payload("plotly").then((code) => {
    document.head.append(h("script", {}, code));
    return window.Plotly;
  });
  return plotly;
}

// On a dark page, colours with too little contrast are replaced by lighter ones.
const DARK_COLOURS = {
  "#0072B2": "#56B4E9",
  "#56B4E9": "#F0E442",
  "#6E6E6E": "#A8ADB3",
  "#000000": "#E7EAED",
  "rgba(0,114,178": "rgba(86,180,233",
  "rgba(86,180,233": "rgba(240,228,66",
};

// Colours of the style sheet in a form that plotly understands: a probe element resolves those that depend on the
// theme.
function pageColours(...names) {
  const probe = document.body.appendChild(h("span", { hidden: true }));
  const found = names.map((name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return found;
}

function themed(panel) {
  const [ink, line, background] = pageColours("ink", "line", "panel");
  let text = JSON.stringify({ data: panel.traces, layout: panel.layout });
  if (isDark.matches) {
    text = text.replace(/#0072B2|#56B4E9|#6E6E6E|#000000|rgba\((?:0,114,178|86,180,233)/g, (found) => DARK_COLOURS[found]);
  }
  const { data, layout } = JSON.parse(text);
  const axis = (given) => ({
    gridcolor: line,
    linecolor: line,
    zeroline: false,
    automargin: true,
    ...given,
    title: { ...given?.title, standoff: 6, font: { size: 12 } },
  });
  return {
    data,
    layout: {
      ...layout,
      height: 270,
      margin: { l: 44, r: 12, t: 8, b: 42 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, size: 12, family: getComputedStyle(document.body).fontFamily },
      hovermode: "x unified",
      hoverlabel: { bgcolor: background, bordercolor: line },
      showlegend: false,
      xaxis: axis(layout.xaxis),
      yaxis: axis(layout.yaxis),
    },
  };
}

// A legend that wraps at any width and repeats line style, marker or pattern, so that colour is not the only cue.
const STROKES = { solid: "", dash: "7 4", dashdot: "7 3 2 3", dot: "2 3" };
const SYMBOLS = {
  circle: "●",
  "circle-open": "○",
  square: "■",
  "triangle-up": "▲",
  "triangle-down": "▼",
  diamond: "◆",
  cross: "✚",
  x: "✖",
};

function legend(data) {
  const entries = data
    .filter((trace) => trace.name && trace.showlegend !== false)
    .sort((a, b) => (a.legendrank ?? 0) - (b.legendrank ?? 0))
    .map((trace) => {
      const key =
        trace.type === "bar"
          ? h("span", { class: "bar-key", style: `background:${trace.marker.color}` }, trace.marker.pattern.shape)
          : lineKey(trace);
      return h("li", {}, key, trace.name);
    });
  return h("ul", { class: "curves", "aria-hidden": "true" }, ...entries);
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function lineKey({ line, marker, mode }) {
  const key = h("span", { class: "line-key", style: `color:${line.color}` });
  const path = { d: "M1 6H33", stroke: "currentColor", "stroke-width": 2.2, "stroke-dasharray": STROKES[line.dash] };
  key.append(svg("svg", { width: 34, height: 12 }, svg("path", path)));
  if (mode.includes("markers")) key.append(h("span", {}, SYMBOLS[marker.symbol]));
  return key;
}

// Text description of a chart: where each curve begins and ends.
function inWords(panel) {
  const curves = panel.traces.filter((trace) => trace.name && trace.showlegend !== false);
  const ends = curves.map(({ name, y }) => `${name} from ${y[0]} to ${y[y.length - 1]}`);
  return `${panel.title}. ${panel.caption} ${ends.join("; ")}.`;
}

const drawn = new Set(); // elements of charts that have been drawn
const inSight = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting || drawn.has(target)) continue;
      drawn.add(target);
      draw(target);
    }
  },
  { rootMargin: "200px" },
);

async function draw(box) {
  const library = await loadPlotly();
  if (!box.isConnected) return;
  const { data, layout } = themed(box.panel);
  box.nextElementSibling.replaceChildren(...legend(data).children);
  await library.react(box, data, layout, { responsive: true, displayModeBar: false });
  box.classList.add("is-drawn");
  if (performance.getEntriesByName("first-chart").length === 0) performance.mark("first-chart");
}

// Redraws the charts, e.g. in other colours. Charts out of sight are redrawn later: a hidden element has no size.
function redrawCharts() {
  for (const box of [...drawn]) {
    drawn.delete(box);
    inSight.unobserve(box);
    inSight.observe(box);
  }
}

function figure(panel) {
  const box = h("div", { class: "plot", role: "img", "aria-label": inWords(panel) });
  box.panel = panel;
  inSight.observe(box);
  return h(
    "figure",
    {},
    h("figcaption", {}, h("h3", {}, panel.title), h("p", {}, panel.caption)),
    box,
    legend(panel.traces),
  );
}

// The first cell of a row is its head; a cell is a text, an element, or a list of them.
function dataTable({ caption = "", head, rows }, kind = "") {
  const cell = (content) => (content instanceof Element && content.tagName === "TD" ? content : h("td", {}, content));
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: `data ${kind}` },
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, ...head.map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, ...rows.map(([first, ...rest]) =>
        h("tr", {}, h("th", { scope: "row" }, ...[first].flat()), ...rest.map(cell)))),
    ),
  );
}

const linkToRun = (query, run) => `#${query}&run=${encodeURIComponent(run)}`;

// A matrix of verdicts by grade, or of judgements by gold label; each disagreement links to its rollouts.
function confusionTable({ caption, of, rows }, run) {
  const cellOf = ({ count, share, part, link }) =>
    h(
      "td",
      { style: `--share:${part}` },
      link && count ? h("a", { href: linkToRun(link, run) }, String(count)) : String(count),
      h("small", {}, ` ${share}`),
    );
  const body = rows.map(({ label, total, cells }) => [
    [`${label} `, h("small", {}, `n = ${total.toLocaleString("en")}`)],
    ...cells.map(cellOf),
  ]);
  return dataTable({ caption, head: [of, ...rows[0].cells.map(({ name }) => name)], rows: body }, "confusion");
}

// The alarms: what was observed, when, and what to try; the turns link to their rollouts.
function alarmsTable({ note, rows }, run) {
  const head = ["alarm", "turns", "observed at its first turn", "limit", "what to try"];
  const body = rows.map(({ name, turns, range, seen, limit, advice }) => [
    name,
    h("a", { href: linkToRun(`role=training&turns=${range.join("-")}`, run) }, turns),
    seen,
    limit,
    advice,
  ]);
  return [muted(note), rows.length ? dataTable({ head, rows: body }, "alarms") : null];
}

function section(id, title, ...content) {
  const kept = content.flat().filter(Boolean);
  return kept.length
    ? h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title), ...kept)
    : null;
}

const grid = (panels) => (panels.length ? h("div", { class: "panels" }, ...panels.map(figure)) : null);

// Charts that matter less, below a heading of their own.
const moreCharts = (panels) => (panels.length ? [h("h3", { class: "more" }, "Turn by turn"), grid(panels)] : null);

function headline(values, fact) {
  const cards = values.map(([name, first, last, note]) =>
    h(
      "div",
      { class: "stat" },
      h("span", {}, name),
      h("b", {}, last),
      h("small", {}, `from ${first}`),
      h("small", {}, note),
    ),
  );
  const state = fact.is_finished
    ? `${fact.turns} turns, finished`
    : `turn ${fact.turns}, still running when this report was written: run the command again and reload`;
  return h(
    "div",
    { class: "headline" },
    ...cards,
    muted(`${readable(fact.name)} · task ${readable(fact.task)} · arm ${fact.arm} · seed ${fact.seed} · ${state}`),
    ...fact.made_with.map((line) => muted(readable(line))),
  );
}

async function renderCharts(box, nav, facts, run) {
  const [all, own] = await Promise.all([payloadJson("comparison"), payloadJson(`charts-${run}`)]);
  const fact = facts.runs[run];
  const confusion = own.quality.confusion.map((table) => confusionTable(table, fact.name));
  const sections = [
    all.scores?.length + all.turns?.length > 0 &&
      section("compare", "Runs compared", grid(all.scores), all.table && dataTable(all.table), moreCharts(all.turns)),
    section("training", "Both roles over training", headline(own.headline, fact), grid(own.training)),
    section("alarms", "Alarms", alarmsTable(own.alarms, fact.name)),
    section(
      "quality",
      "The verifier's quality",
      muted(own.quality.note),
      confusion.length ? h("div", { class: "tables" }, ...confusion) : null,
      grid(own.quality.panels),
    ),
    section("speed", "Speed", grid(own.speed)),
  ].filter(Boolean);
  drawn.clear();
  box.replaceChildren(...sections);
  nav.replaceChildren(
    ...sections.map((item) => h("a", { href: `#${item.id}` }, item.querySelector("h2").textContent)),
  );
}
