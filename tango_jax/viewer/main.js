// The page as a whole: decodes the payloads, switches views and themes, handles keys and the address.

const isDark = matchMedia("(prefers-color-scheme: dark)");

function showView(name) {
  for (const view of ["charts", "rollouts"]) {
    $(`view-${view}`).hidden = view !== name;
    $(`tab-${view}`).setAttribute("aria-selected", String(view === name));
    $(`tab-${view}`).tabIndex = view === name ? 0 : -1;
  }
  document.body.dataset.view = name;
}

const shownView = () => document.body.dataset.view;

// The charts and their sections have addresses too; every other address is about rollouts.
const SECTIONS = ["charts", "compare", "training", "alarms", "quality", "speed"];

function followAddress(viewer) {
  const name = location.hash.slice(1);
  if (!viewer || name === "" || SECTIONS.includes(name)) {
    showView("charts");
    return null;
  }
  showView("rollouts");
  return viewer.followHash();
}

// The user switched views: update the address, so that a reload shows the same view.
function switchView(name, viewer) {
  showView(name);
  if (name === "rollouts") viewer?.writeHash();
  else setAddress("charts");
}

function bindKeys(viewer, numFilters) {
  const always = { "?": () => $("help").showModal(), c: () => switchView("charts", viewer) };
  const withRollouts = {
    r: () => switchView("rollouts", viewer),
    j: () => viewer.move(1),
    k: () => viewer.move(-1),
    "]": () => viewer.moveInGroup(1),
    "[": () => viewer.moveInGroup(-1),
    g: () => viewer.toggleLook("group"),
    p: () => viewer.toggleLook("problem"),
    "/": () => {
      showView("rollouts");
      $("search").focus();
    },
    0: () => viewer.clear(),
  };
  for (let bit = 0; bit < numFilters; bit++) withRollouts[bit + 1] = () => viewer.toggle(bit);
  const everywhere = ["r", "/"];
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches("input, select, textarea");
    if (event.key === "Escape" && isTyping) event.target.blur();
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
    const action = always[event.key] ?? (viewer ? withRollouts[event.key] : null);
    const isOfRollouts = event.key in withRollouts && !everywhere.includes(event.key);
    if (!action || (isOfRollouts && shownView() === "charts")) return;
    event.preventDefault();
    action();
  });
}

function bindTabs(viewer) {
  const tabs = ["charts", "rollouts"];
  for (const name of tabs) {
    $(`tab-${name}`).addEventListener("click", () => switchView(name, viewer));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
      const other = tabs[1 - tabs.indexOf(name)];
      switchView(other, viewer);
      $(`tab-${other}`).focus();
    });
  }
}

// Inside a notebook's iframe, a link that is only a fragment would lead to the notebook itself.
function keepLinksInside() {
  if (location.protocol !== "about:") return;
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (!link || event.defaultPrevented) return;
    event.preventDefault();
    location.hash = link.getAttribute("href");
  });
}

async function bindCharts(facts) {
  const choice = $("chart-run");
  facts.runs.forEach(({ name }, i) => choice.append(h("option", { value: i }, name)));
  $("run-choice").hidden = facts.runs.length < 2;
  const show = () => renderCharts($("charts"), $("chart-nav"), facts, Number(choice.value));
  choice.addEventListener("change", show);
  choice.value = Math.max(0, facts.runs.findIndex((run) => run.is_default_arm)); // start with the default arm
  await show();
  if (SECTIONS.includes(location.hash.slice(1))) $(location.hash.slice(1))?.scrollIntoView();
}

function describeCount(facts, columns) {
  const all = columns.count.toLocaleString("en");
  $("rollout-count").textContent = all;
  if (facts.dumped > columns.count) {
    const part = `${all} of the ${facts.dumped.toLocaleString("en")} dumped rollouts are in this file`;
    const rest = "spread evenly over training, with the same problems of every evaluation";
    const note = `${part}: ${rest}. The charts use all of them; --bundle=DIR writes all.`;
    $("viewer").before(h("p", { class: "note" }, note));
  }
}

async function start() {
  isDark.addEventListener("change", redrawCharts);
  $("help-button").addEventListener("click", () => $("help").showModal());
  const [facts, raw] = await Promise.all([payloadJson("facts"), payloadJson("columns")]);
  const columns = typedColumns(raw);
  describeCount(facts, columns);
  for (const text of facts.warnings) $("charts").before(h("p", { class: "note" }, readable(text)));
  $("viewer").hidden = columns.count === 0;
  $("no-rollouts").hidden = columns.count > 0;
  const viewer = columns.count ? makeViewer(facts, columns) : null;
  bindKeys(viewer, columns.flagNames.length);
  bindTabs(viewer);
  keepLinksInside();
  window.addEventListener("hashchange", () => followAddress(viewer));
  const opened = followAddress(viewer);
  await Promise.all([bindCharts(facts), opened ?? viewer?.followHash()]);
  performance.mark("usable");
  document.body.dataset.ready = "true";
  // While the page is idle: the texts, so that the first search is fast.
  (window.requestIdleCallback ?? setTimeout)(() => viewer?.preload());
}

if ("DecompressionStream" in window) {
  start().catch((error) => {
    $("problem").hidden = false;
    $("problem").textContent = `Cannot display this report: ${error}. Create it again with the report command.`;
    throw error;
  });
} else {
  $("problem").hidden = false;
  $("problem").textContent = "This browser cannot decode the report: use Chrome 80, Firefox 113, Safari 16.4 or newer.";
}
