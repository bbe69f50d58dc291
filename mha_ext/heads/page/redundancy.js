// How alike the heads of a layer are: a matrix, its randomly initialised twin, and how many heads they are worth.

const MEASURES = [
  {
    name: "similarity",
    label: "Linear CKA",
    about: "Between what the heads hand to the output projection: 0 unrelated, 1 the same up to rotation and scale.",
    range: [0, 1],
    scale: "sequential",
    ticks: ["0 unrelated", "0.5", "1 the same"],
  },
  {
    name: "divergence",
    label: "Jensen\u2013Shannon",
    about: "Between where the heads look, in nats: 0 at the same tokens, ln 2 at entirely different ones.",
    range: [0, Math.LN2],
    scale: "sequential",
    ticks: ["0 the same", "0.35", "0.69 different"],
  },
  {
    name: "cosine",
    label: "Cosine",
    about: "Between what the heads hand to the output projection: 1 the same direction, \u22121 the opposite one.",
    range: [-1, 1],
    scale: "diverging",
    ticks: ["\u22121 opposite", "0", "1 the same"],
  },
];

/** A matrix (H, H) as a figure, its heads in the order given. */
function matrixMap(name, matrix, order, { range: [low, high], scale }, picked) {
  const labels = order.map(String);
  return new HeatMap({
    name: `${name}, ${count(order.length, "head")} by ${count(order.length, "head")}`,
    kind: "matrix",
    rows: labels,
    columns: labels,
    scale,
    describe: (row, column) => {
      const [a, b] = [order[row], order[column]];
      return [`head ${a} and head ${b}`, ...readNode(fraction(matrix[a][b]))];
    },
    picked: picked && ((row, column) => picked(order[row], order[column])),
  }).paint(() => order.flatMap((a) => order.map((b) => levelOf(matrix[a][b], low, high))));
}

/** How many heads a layer is worth, and how alike two of them are on average. */
function matrixFacts(heads, rank, similarity) {
  const alike = mean(pairs(similarity));
  return factNodes([
    ["effective rank", isNumber(rank) ? `${numeral(rank)} of ${heads}` : DASH, bar(rank / heads)],
    ["mean CKA of two heads", fraction(alike), bar(alike)],
  ]);
}

/** The two different heads with the highest value: {a, b, value}, or null where no pair has one. */
function mostAlike(matrix) {
  let best = null;
  for (let a = 0; a < (matrix ?? []).length; a++) {
    for (let b = a + 1; b < matrix.length; b++) {
      if (isNumber(matrix[a][b]) && (best === null || matrix[a][b] > best.value)) best = { a, b, value: matrix[a][b] };
    }
  }
  return best;
}

/** A row per layer: its most alike pair, which opens in the comparison, and the twin's for chance. */
function pairRow(app, layer) {
  const { similarity, random_similarity: random } = attentionAt({ ...app.place, layer });
  const [found, twin] = [mostAlike(similarity), mostAlike(random)];
  const name = element("th", { scope: "row" }, `Layer ${layer}`);
  if (!found) return element("tr", {}, name, element("td", {}, DASH), element("td", {}, DASH), element("td", {}, DASH));
  const { a, b, value } = found;
  const open = element("button", { type: "button", class: "chip" }, `heads ${a} and ${b}`);
  open.addEventListener("click", () => app.compare({ ...app.place, layer, head: a }, { ...app.place, layer, head: b }));
  const cells = [open, fraction(value), twin ? fraction(twin.value) : DASH].map((cell) => element("td", {}, cell));
  return element("tr", {}, name, ...cells);
}

function measureLegend({ label, scale, ticks }) {
  return legend(scale, label, ticks.map((text, i) => [i / (ticks.length - 1), text]));
}

function redundancyView(app) {
  let measure = MEASURES[0];

  function show(place) {
    const attention = attentionAt(place);
    const { layer } = place;
    const { heads } = report.layers[layer];
    const { random_similarity: twin, random_effective_rank: twinRank } = attention;
    const compare = (a, b) => app.compare({ ...app.place, head: a }, { ...app.place, head: b });
    byId("similarity-title").textContent = `Layer ${layer}: ${measure.label}`;
    byId("similarity-about").textContent = measure.about;
    const name = `Layer ${layer}, ${measure.label}`;
    const map = matrixMap(name, attention[measure.name], attention.order, measure, compare);
    byId("similarity-map").replaceChildren(map.element);
    byId("similarity-legend").replaceChildren(measureLegend(measure));
    byId("twin-map").replaceChildren(twin ? twinMap(layer, twin, attention.order) : unknown());
    byId("twin-legend").replaceChildren(twin ? measureLegend(MEASURES[0]) : "");
    byId("similarity-facts").replaceChildren(...matrixFacts(heads, attention.effective_rank, attention.similarity));
    byId("twin-facts").replaceChildren(...matrixFacts(heads, twinRank, twin));
    byId("alike-pairs").replaceChildren(...report.layers.map((_, each) => pairRow(app, each)));
  }

  const twinMap = (layer, twin, order) => matrixMap(`Layer ${layer}, random twin`, twin, order, MEASURES[0]).element;
  const unknown = () => element("p", { class: "readout" }, `${DASH} not known for this layer`);

  byId("redundancy-measure").append(
    ...MEASURES.map(({ name, label }) => {
      const choice = element("input", { type: "radio", name: "measure", value: name, checked: name === measure.name });
      return element("label", {}, choice, element("span", {}, label));
    }),
  );
  byId("redundancy-measure").addEventListener("change", (event) => {
    measure = MEASURES.find(({ name }) => name === event.target.value);
    show(app.place);
  });
  return [[["input", "layer"], show]];
}
