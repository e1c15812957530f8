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
  if (document.documentElement.dataset.shade === "dark") {
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

// Paper is white and has its own width, and a printer does not wait: all charts of the page are drawn at once, also those
// out of sight, in light colours and in columns of a fixed width. The library, once loaded, draws before it returns.
const PRINTED_WIDTH = 316; // pixels; with their frames, two of them fit on A4 and on Letter

function drawForPrint() {
  if (!window.Plotly) return;
  const root = document.documentElement;
  root.dataset.before = root.dataset.theme;
  root.dataset.theme = root.dataset.shade = "light";
  for (const box of document.querySelectorAll("#charts .plot")) {
    const { data, layout } = themed(box.panel);
    box.nextElementSibling.replaceChildren(...legend(data).children);
    window.Plotly.react(box, data, { ...layout, width: PRINTED_WIDTH, height: 240 }, { displayModeBar: false });
    drawn.add(box);
  }
}

function bindPrinting() {
  window.addEventListener("beforeprint", drawForPrint);
  // Redraws the charts as they were.
  window.addEventListener("afterprint", () => setTheme(document.documentElement.dataset.before ?? storedTheme()));
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

function dataTable({ caption, head, rows }) {
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "data" },
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, ...head.map((text) => h("th", { scope: "col" }, text)))),
      h(
        "tbody",
        {},
        ...rows.map(([first, ...rest]) =>
          h("tr", {}, h("th", { scope: "row" }, first), ...rest.map((text) => h("td", {}, text))),
        ),
      ),
    ),
  );
}

// A matrix of verdicts by grade, or of judgements by gold label; each disagreement links to its rollouts.
function confusionTable({ caption, of, rows, role, turns }, run) {
  const link = (cell, label) => {
    const grade = of === "answer" ? `&grade=${label}` : ""; // steps have no filter of their own
    return `#only=${cell.filter}${grade}&role=${role}&run=${encodeURIComponent(run)}&turns=${turns.join("-")}`;
  };
  const cellOf = (cell, row) =>
    h(
      "td",
      { style: `--share:${row.total ? cell.count / row.total : 0}` },
      cell.filter && cell.count ? h("a", { href: link(cell, row.label) }, String(cell.count)) : String(cell.count),
      h("small", {}, ` ${cell.share}`),
    );
  const rowOf = (row) => {
    const total = h("small", {}, `n = ${row.total.toLocaleString("en")}`);
    const head = h("th", { scope: "row" }, `${row.label} `, total);
    return h("tr", {}, head, ...row.cells.map((cell) => cellOf(cell, row)));
  };
  const head = [of, ...rows[0].cells.map(({ name }) => name)];
  return h(
    "table",
    { class: "data confusion" },
    h("caption", {}, caption),
    h("thead", {}, h("tr", {}, ...head.map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, ...rows.map(rowOf)),
  );
}

// The alarms: what was observed, when, and what to try; the turns link to their rollouts.
function alarmsTable({ note, rows }, run) {
  const cells = ({ name, turns, range, seen, limit, advice }) => [
    h("th", { scope: "row" }, name),
    h("td", {}, h("a", { href: `#role=training&run=${encodeURIComponent(run)}&turns=${range.join("-")}` }, turns)),
    ...[seen, limit, advice].map((text) => h("td", {}, text)),
  ];
  const head = ["alarm", "turns", "observed at its first turn", "limit", "what to try"];
  return h(
    "div",
    { class: "scroll" },
    muted(note),
    rows.length
      ? h(
          "table",
          { class: "data alarms" },
          h("thead", {}, h("tr", {}, ...head.map((text) => h("th", { scope: "col" }, text)))),
          h("tbody", {}, ...rows.map((row) => h("tr", {}, ...cells(row)))),
        )
      : "",
  );
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
  const missing = own.confusion.length
    ? null
    : muted("No rollouts of a verifier were dumped by this run, so some charts and tables are missing.");
  const confusion = own.confusion.map((table) => h("div", { class: "scroll" }, confusionTable(table, fact.name)));
  const tables = h("div", { class: "tables" }, ...confusion);
  const sections = [
    all.scores?.length + all.turns?.length > 0 &&
      section("compare", "Runs compared", grid(all.scores), all.table && dataTable(all.table), moreCharts(all.turns)),
    section("training", "Both roles over training", headline(own.headline, fact), grid(own.training)),
    section("alarms", "Alarms", alarmsTable(own.alarms, fact.name)),
    section(
      "trust",
      "Can the verifier be trusted?",
      missing ?? muted(own.measured_on),
      own.confusion.length ? tables : null,
      own.kinds && dataTable(own.kinds),
      grid(own.trust),
    ),
    section("speed", "Speed and memory", grid(own.speed), own.speed_tables.map(dataTable)),
  ].filter(Boolean);
  drawn.clear();
  box.replaceChildren(...sections);
  nav.replaceChildren(
    ...sections.map((item) => {
      const link = h("a", { href: `#${item.id}` }, item.querySelector("h2").textContent);
      link.addEventListener("click", (event) => {
        event.preventDefault();
        setAddress(item.id);
        item.scrollIntoView();
      });
      return link;
    }),
  );
}
