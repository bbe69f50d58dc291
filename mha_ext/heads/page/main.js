// What is shown, and who is told when it changes.

const app = { place: firstPlace() };

/** The head that best makes the link of examplePair(), if the text has its words; else the first. */
function firstPlace() {
  const place = { input: 0, layer: 0, head: 0 };
  const pair = examplePair(place);
  return pair ? (rankHeads(place, pair)[0]?.place ?? place) : place;
}

function showTop() {
  byId("model").textContent = report.model;
  const heads = report.layers.reduce((sum, layer) => sum + layer.heads, 0);
  const sizes = [count(report.layers.length, "layer"), count(heads, "head"), count(report.inputs.length, "input")];
  byId("size").textContent = sizes.join(", ");
  byId("left-out").hidden = !report.notes.length;
  byId("notes").append(...report.notes.map((note) => element("li", {}, note)));
}

/** [name, text] The model in a few numbers, means over its layers. */
function summaryOf(input) {
  const { attention } = report.inputs[input];
  const beside = (value, twin, read) => (isNumber(twin) ? `${read(value)}, random twin ${read(twin)}` : read(value));
  const rank = (name) => mean(attention.map((found, layer) => part(found[name], report.layers[layer].heads)));
  const alike = (name) => mean(attention.map((found) => mean(pairs(found[name]))));
  const ranks = beside(rank("effective_rank"), rank("random_effective_rank"), (share) => percent(share, 0));
  const facts = [
    ["different heads: effective rank, part of all", ranks],
    ["alike: mean CKA of two heads", beside(alike("similarity"), alike("random_similarity"), fraction)],
  ];
  const known = placesOf(input).map(importanceAt).filter(isNumber);
  if (known.length) facts.push(["heads that carry half of all importance", `${halfOf(known)} of ${known.length}`]);
  return facts;
}

function part(value, whole) {
  return isNumber(value) ? value / whole : null;
}

/** How few of the numbers make half of their sum. */
function halfOf(numbers) {
  let left = numbers.reduce((sum, value) => sum + value, 0) / 2;
  return [...numbers].sort((a, b) => b - a).filter((value) => left > 0 && ((left -= value), true)).length;
}

function inputView() {
  const show = ({ input }) => {
    const { text, note } = report.inputs[input];
    byId("text").replaceChildren(element("bdi", {}, text));
    byId("note").textContent = note;
    byId("note").hidden = !note;
    byId("summary").replaceChildren(...factNodes(summaryOf(input)));
  };
  return [[["input"], show]];
}

function choicesView() {
  const names = ["input", "layer", "head"];
  for (const name of names) {
    const select = byId(`choose-${name}`);
    select.addEventListener("change", () => app.show({ [name]: Number(select.value) }));
  }
  const show = ({ input, layer, head }) => {
    fill(byId("choose-input"), inputOptions(), input);
    fill(byId("choose-layer"), layerOptions(), layer);
    fill(byId("choose-head"), headOptions(layer), head);
  };
  return [[names, show]];
}

showTop();
const views = [inputView, choicesView, gridView, headView, redundancyView, mechanismsView, compareView];
const reactions = views.flatMap((view) => view(app)); // [names of what they depend on, function]

app.show = (change) => {
  const before = app.place;
  const next = { ...before, ...change };
  next.head = Math.min(next.head, report.layers[next.layer].heads - 1);
  app.place = next;
  for (const [names, react] of reactions) {
    if (names.some((name) => next[name] !== before[name])) react(next);
  }
};

app.open = (change) => {
  app.show(change);
  goTo(byId("head"), byId("head-title"));
};

for (const [, react] of reactions) react(app.place);
watchTheme(byId("theme"));
