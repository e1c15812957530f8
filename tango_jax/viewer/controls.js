// The filter form: turns its controls into a state, and a state back into its controls.

const RANGES = { turns: ["turn-from", "turn-to"], steps: ["steps-from", "steps-to"] };
const CHOICES = ["role", "grade", "run", "order"];

function bindFilters(facts, columns, getState, setState) {
  const chips = columns.flagNames.map((name, bit) => {
    const count = h("span", { class: "count" });
    const chip = h(
      "button",
      { type: "button", class: "chip", "aria-pressed": "false", title: `${columns.flagLabels[name]} (${bit + 1})` },
      columns.flagLabels[name],
      " ",
      count,
    );
    chip.addEventListener("click", () => toggle(bit));
    $("chips").append(chip);
    return { chip, count, name };
  });
  facts.runs.forEach(({ name }) => $("run").append(h("option", { value: name }, name)));
  $("run-filter").hidden = facts.runs.length < 2;

  const change = (part) => setState({ ...getState(), ...part });
  function toggle(bit) {
    const flags = new Set(getState().flags);
    if (!flags.delete(chips[bit].name)) flags.add(chips[bit].name);
    change({ flags });
  }
  const clear = () => setState({ ...noFilters(), order: getState().order });

  for (const name of CHOICES) $(name).addEventListener("change", () => change({ [name]: $(name).value }));
  for (const [name, ids] of Object.entries(RANGES)) {
    const read = (id) => ($(id).value === "" ? null : Number($(id).value));
    for (const id of ids) $(id).addEventListener("input", () => change({ [name]: ids.map(read) }));
  }
  $("search").addEventListener("input", () => change({ query: $("search").value.trim() }));
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("clear").addEventListener("click", clear);

  function show(state, found, flagCounts) {
    chips.forEach(({ chip, count, name }, bit) => {
      chip.setAttribute("aria-pressed", String(state.flags.has(name)));
      count.textContent = flagCounts[bit].toLocaleString("en");
    });
    for (const name of CHOICES) $(name).value = state[name];
    for (const [name, ids] of Object.entries(RANGES))
      ids.forEach((id, i) => {
        $(id).value = state[name][i] ?? "";
      });
    if (document.activeElement !== $("search")) $("search").value = state.query;
    const all = columns.count.toLocaleString("en");
    $("found").textContent =
      found === columns.count ? `all ${all} rollouts` : `${found.toLocaleString("en")} of ${all} rollouts`;
    const more =
      CHOICES.slice(0, 3).filter((name) => state[name]).length +
      Object.keys(RANGES).filter((name) => state[name].some((value) => value !== null)).length;
    $("more-count").textContent = more ? `(${more} set)` : "";
    $("clear").disabled = !more && !state.flags.size && !state.query;
  }
  return { show, toggle, clear };
}
