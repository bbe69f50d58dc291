// Layers x heads, a small map and four numbers for each.

const MAP_PIXELS = 96; // more would not be seen at the size of a small map

const ORDERS = [
  ["model", "as in the model"],
  ["similar", "similar side by side"],
  ...METRICS.map(({ name, label }) => [name, `by ${label}`]),
];

/** The heads of a layer, left to right; those without a number last. */
function orderedHeads(input, layer, order) {
  const heads = range(report.layers[layer].heads);
  if (order === "similar") return attentionAt({ input, layer }).order;
  const metric = METRICS.find(({ name }) => name === order);
  if (!metric) return heads;
  const value = (head) => metricAt(metric, { input, layer, head }) ?? -Infinity;
  return heads.sort((a, b) => value(b) - value(a) || a - b);
}

/** {levels, rows, columns}: the largest of each block of weights, so that thin lines stay. */
function pooled(place, most = MAP_PIXELS) {
  const levels = levelsAt(place);
  const [queries, keys] = [queriesAt(place).length, keysAt(place).length];
  const [high, wide] = [queries, keys].map((length) => Math.ceil(length / most));
  const [rows, columns] = [Math.ceil(queries / high), Math.ceil(keys / wide)];
  if (high * wide === 1) return { levels, rows, columns };
  const maxima = new Uint8Array(rows * columns).fill(MISSING);
  for (let query = 0, i = 0; query < queries; query++) {
    for (let key = 0; key < keys; key++, i++) {
      const at = Math.floor(query / high) * columns + Math.floor(key / wide);
      if (levels[i] !== MISSING && (maxima[at] === MISSING || levels[i] > maxima[at])) maxima[at] = levels[i];
    }
  }
  return { levels: maxima, rows, columns };
}

function smallMap(place) {
  const canvas = element("canvas", { width: 1, height: 1 });
  paintWhenSeen(canvas, () => {
    const { levels, rows, columns } = pooled(place);
    if (canvas.width !== columns || canvas.height !== rows) Object.assign(canvas, { width: columns, height: rows });
    paintLevels(canvas, levels, "weight");
  });
  return canvas;
}

/** The name of a layer's module without what all layers share. */
function shortName(layer) {
  return report.layers[layer].name.split(".").filter((part) => !/^\d+$/.test(part)).slice(-2).join(".");
}

function gridView(app) {
  const [table, choice] = [byId("grid-table"), byId("grid-order")];
  let shown = null; // the place that is marked
  let cells = new Map(); // "layer head" -> button

  function cell(place, most) {
    const numbers = METRICS.map((metric) => metricAt(metric, place));
    const words = METRICS.map((metric, i) => `${metric.label} ${metricText(metric, numbers[i])}`);
    const lines = METRICS.map((metric, i) =>
      element(
        "span",
        { class: "metric", "data-metric": metric.name },
        element("span", {}, metric.short),
        bar(numbers[i] === null ? 0 : numbers[i] / (most[i] || 1)),
        element("span", { class: "number" }, metricText(metric, numbers[i], true)),
      ),
    );
    return element(
      "button",
      {
        type: "button",
        role: "gridcell",
        class: "cell",
        tabindex: -1,
        "data-layer": place.layer,
        "data-head": place.head,
        "aria-label": `${headName(place)}: ${words.join(", ")}`,
      },
      element("span", { class: "cell-name" }, String(place.head)),
      smallMap(place),
      ...lines,
    );
  }

  function build({ input, layer, head }) {
    const all = placesOf(input);
    const most = METRICS.map((metric) => {
      return metric.name === "entropy" ? 1 : largest(all.map((place) => metricAt(metric, place)));
    });
    cells = new Map();
    const rows = report.layers.map((_, layer) => {
      const buttons = orderedHeads(input, layer, choice.value).map((head) => {
        const button = cell({ input, layer, head }, most);
        cells.set(`${layer} ${head}`, button);
        return button;
      });
      const names = [element("b", {}, `Layer ${layer}`), element("span", {}, shortName(layer))];
      const title = element("div", { role: "rowheader", class: "layer-name" }, ...names);
      return element("div", { role: "row", class: "layer" }, title, ...buttons);
    });
    table.replaceChildren(...rows);
    table.dataset.order = choice.value;
    mark({ layer, head });
  }

  function mark({ layer, head }) {
    const old = shown && cells.get(`${shown.layer} ${shown.head}`);
    old?.removeAttribute("aria-current");
    if (old) old.tabIndex = -1;
    shown = { layer, head };
    const button = cells.get(`${layer} ${head}`);
    button.setAttribute("aria-current", "true");
    button.tabIndex = 0;
  }

  function focusOn(button) {
    table.querySelector('[tabindex="0"]').tabIndex = -1;
    button.tabIndex = 0;
    button.focus();
  }

  /** Arrows walk over the grid as it is drawn; rows may be of different lengths. */
  function keyPressed(event) {
    const rows = [...table.children].map((row) => [...row.querySelectorAll(".cell")]);
    const row = rows.findIndex((buttons) => buttons.includes(event.target));
    if (row < 0) return;
    const column = rows[row].indexOf(event.target);
    const ends = { Home: -Infinity, End: Infinity };
    const [down, right] = event.key in ends ? [0, ends[event.key]] : (arrow(event) ?? []);
    if (down === undefined) return;
    event.preventDefault();
    const goal = rows[clamp(row + down, 0, rows.length - 1)];
    focusOn(goal[clamp(column + right, 0, goal.length - 1)]);
  }

  fill(choice, ORDERS, "model");
  byId("grid-legend").append(weightLegend());
  byId("grid-key").textContent =
    "imp: importance, the longest bar is the model's largest. ent: relative entropy, 0 looks at one token, 1 at all " +
    "alike. W_o: the head's share of the output projection. dist: how many tokens away it looks, on average.";
  table.addEventListener("keydown", keyPressed);
  table.addEventListener("click", (event) => {
    const button = event.target.closest(".cell");
    if (button) app.open({ layer: Number(button.dataset.layer), head: Number(button.dataset.head) });
  });
  choice.addEventListener("change", () => build({ ...app.place }));
  app.leaveHead = () => {
    const button = cells.get(`${shown.layer} ${shown.head}`);
    focusOn(button);
  };
  return [
    [["input"], build],
    [["layer", "head"], mark],
  ];
}
