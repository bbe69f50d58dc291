// The five mechanisms that keep heads apart, each with a figure of this model.

const layerLabel = (layer) => `Layer ${layer}`;

/** A row of dotRows for each layer; `row(layer)` gives its marks and text. */
function layerRows(row) {
  return report.layers.map((_, layer) => ({ label: layerLabel(layer), ...row(layer) }));
}

function versus(model, twin, read) {
  return isNumber(twin) ? `${read(model)} / ${read(twin)}` : read(model);
}

function initialisationFigures({ input, layer: current }) {
  const similarity = layerRows((layer) => {
    const { similarity, random_similarity } = attentionAt({ input, layer });
    const [model, twin] = [mean(pairs(similarity)), mean(pairs(random_similarity))];
    return { model: [model], twin: [twin], text: versus(model, twin, fraction) };
  });
  const rank = layerRows((layer) => {
    const { effective_rank: model, random_effective_rank: twin } = attentionAt({ input, layer });
    return { model: [model], twin: [twin], text: versus(model, twin, numeral) };
  });
  const heads = Math.max(...report.layers.map((layer) => layer.heads));
  return [
    dotRows("Mean CKA of two heads", similarity, { high: 1, current }),
    dotRows("Effective rank", rank, { low: 1, high: Math.max(heads, 2), current }),
  ];
}

/** Importance of every head; where there is no loss, how sharply the heads look against the twin's. */
function gradientsFigures(app, { input, layer: current }) {
  if (placesOf(input).map(importanceAt).some(isNumber)) return [importanceFigure(app, input)];
  const rows = layerRows((layer) => {
    const { relative_entropy: model, random_relative_entropy } = attentionAt({ input, layer });
    const twin = random_relative_entropy ?? [];
    return { model, twin, text: versus(mean(model), mean(twin), fraction) };
  });
  return [dotRows("Relative entropy of the heads", rows, { high: 1, current })];
}

function gradientsAbout({ input }) {
  if (placesOf(input).map(importanceAt).some(isNumber)) {
    return (
      "Importance is the size of the loss's derivative by a gate in front of the head. Near zero, the loss would " +
      `hardly notice if the head fell silent.${report.loss ? ` The loss here: ${report.loss}.` : ""}`
    );
  }
  return (
    "There is no loss here, so importance is not known. What training did shows in how sharply the heads look; " +
    "random heads look at everything alike, which is 1."
  );
}

function importanceFigure(app, input) {
  const ranked = placesOf(input).filter((place) => isNumber(importanceAt(place)));
  ranked.sort((a, b) => importanceAt(b) - importanceAt(a));
  const most = importanceAt(ranked[0]);
  const columns = range(Math.max(...report.layers.map(({ heads }) => heads)));
  const valueAt = (layer, head) => importanceAt({ input, layer, head });
  const map = new HeatMap({
    name: "Importance of each head, layers by heads",
    kind: "matrix layers",
    scale: "sequential",
    rows: report.layers.map((_, layer) => layerLabel(layer)),
    columns: columns.map(String),
    describe: (layer, head) => [headName({ layer, head }), ...readNode(numeral(valueAt(layer, head)))],
    picked: (layer, head) => head < report.layers[layer].heads && app.open({ layer, head }),
  }).paint(() => report.layers.flatMap((_, layer) => columns.map((head) => levelOf(valueAt(layer, head), 0, most))));
  const first = ranked.slice(0, 3).map((place) => `${headName(place)} (${numeral(importanceAt(place))})`);
  const scale = legend("sequential", "importance", [0, 0.5, 1].map((part) => [part, tickText(part * most)]));
  return card("Importance of each head", [`Largest: ${first.join("; ")}.`], map.element, scale);
}

const OVERLAP = { label: "overlap", range: [0, 1], scale: "sequential", ticks: ["0", "0.5", "1 the same"] };

function subspacesFigures({ layer: current }) {
  const unread = (title, what) => card(title, [`The projections of ${what} could not be read.`]);
  const layers = report.layers;
  if (!layers.some((layer) => layer.subspace_overlap)) return [unread("Overlap of subspaces", "these layers")];
  const means = layers.map((layer) => mean(pairs(layer.subspace_overlap)));
  const expected = layers.map((layer) => layer.expected_overlap);
  const rows = layerRows((layer) => {
    const text = versus(means[layer], expected[layer], fraction);
    return { model: [means[layer]], reference: expected[layer], text };
  });
  const high = Math.min(1, 1.25 * largest([...means, ...expected])) || 1;
  const names = { reference: "expected of random subspaces" };
  const title = `Layer ${current}: overlap of subspaces`;
  const overlap = layers[current].subspace_overlap;
  const map = () => matrixMap(title, overlap, range(overlap.length), OVERLAP).element;
  return [
    dotRows("Mean overlap of two heads", rows, { high, current, names }),
    overlap ? card(title, [], map(), measureLegend(OVERLAP)) : unread(title, "this layer"),
  ];
}

function sharesFigures({ layer: current }) {
  const shares = report.layers.map(({ output_share: share }) => share ?? []);
  const title = "Share of each head, and the loudest";
  const unread = "The output projections of these layers could not be read.";
  if (!shares.flat().some(isNumber)) return [card(title, [unread])];
  const equal = report.layers.map(({ heads }) => 1 / heads);
  const rows = layerRows((layer) => {
    const most = largest(shares[layer]);
    const text = most ? `head ${shares[layer].indexOf(most)}: ${percent(most)}` : DASH;
    return { model: shares[layer], reference: equal[layer], text };
  });
  const high = Math.min(1, 1.1 * largest([...shares.flat(), ...equal]));
  return [dotRows(title, rows, { high, current, names: { model: "a head", reference: "1/H" } })];
}

/** [{query, key, weight, heads: [{head, weight}]}]: the strongest links of a layer's heads, each named once. */
function linksOfLayer(place, allowed) {
  const links = new Map();
  for (const { head } of placesOf(place.input, [place.layer])) {
    const link = strongestLink({ ...place, head }, allowed);
    if (!link) continue;
    const name = `${link.query} ${link.key}`;
    if (!links.has(name)) links.set(name, { ...link, heads: [] });
    links.get(name).heads.push({ head, weight: link.weight });
  }
  const strength = (link) => Math.max(...link.heads.map(({ weight }) => weight));
  return [...links.values()].sort((a, b) => strength(b) - strength(a));
}

/** it -> animal, the example of every text about heads, where these tokens are; else null. */
function examplePair(place) {
  const find = (tokens, word) => tokens.findIndex((token) => wordOf(token) === word);
  const [query, key] = [find(queriesAt(place), "it"), find(keysAt(place), "animal")];
  return query >= 0 && key >= 0 ? { query, key } : null;
}

/** Heads of layers with the same queries and keys, the largest weight first. */
function rankHeads(place, { query, key }) {
  const { queries, keys } = attentionAt(place);
  const layers = range(report.layers.length).filter((layer) => {
    const attention = attentionAt({ input: place.input, layer });
    return attention.queries === queries && attention.keys === keys;
  });
  const i = query * keysAt(place).length + key;
  const ranked = placesOf(place.input, layers).map((other) => ({ place: other, weight: WEIGHTS[levelsAt(other)[i]] }));
  return ranked.filter(({ weight }) => isNumber(weight)).sort((a, b) => b.weight - a.weight);
}

function semanticsView(app) {
  const [queryChoice, keyChoice, skip] = [byId("pair-query"), byId("pair-key"), byId("skip-special")];
  const allowed = (token) => !(skip.checked && isSpecial(token));

  function headButton(place, ...text) {
    const attributes = { type: "button", class: "chip", "aria-label": `Open ${headName(place)}` };
    const button = element("button", attributes, ...text);
    button.addEventListener("click", () => app.open({ layer: place.layer, head: place.head }));
    return button;
  }

  function show(place) {
    const tokens = [queriesAt(place), keysAt(place)];
    byId("special-choice").hidden = !tokens.flat().some(isSpecial);
    const links = linksOfLayer(place, allowed);
    showLinks(place, links);
    const pair = examplePair(place) ?? links[0] ?? { query: 0, key: 0 };
    fill(queryChoice, tokenOptions(tokens[0]), pair.query);
    fill(keyChoice, tokenOptions(tokens[1]), pair.key);
    rank(place);
  }

  function showLinks(place, links) {
    const heads = count(report.layers[place.layer].heads, "head");
    const alone = links.filter((link) => link.heads.length === 1).length;
    const different = count(links.length, "different strongest link");
    byId("strongest-title").textContent = `Layer ${place.layer}: what each head does`;
    byId("strongest-about").textContent = `${heads}, ${different}; ${alone} of them in one head only.`;
    const rows = links.map((link) => linkRow(place, link));
    byId("strongest-links").replaceChildren(element("ul", { class: "strongest-list" }, ...rows));
  }

  function linkRow(place, { query, key, heads }) {
    const words = [tokenNode(queriesAt(place)[query]), " \u2192 ", tokenNode(keysAt(place)[key])];
    const chips = heads.map(({ head, weight }) => {
      return headButton({ ...place, head }, `head ${head}`, ...readNode(fraction(weight)));
    });
    const link = element("span", { class: "link" }, ...words);
    return element("li", {}, link, element("span", { class: "chips" }, ...chips));
  }

  function rank(place) {
    const pair = { query: Number(queryChoice.value), key: Number(keyChoice.value) };
    const rows = rankHeads(place, pair).slice(0, 12).map(({ place: other, weight }) => {
      const number = element("span", { class: "number" }, fraction(weight));
      return element("li", {}, headButton(other, headName(other)), bar(weight), number);
    });
    const none = element("p", { class: "readout" }, DASH);
    byId("pair-ranking").replaceChildren(rows.length ? element("ol", { class: "ranking" }, ...rows) : none);
  }

  skip.addEventListener("change", () => showLinks(app.place, linksOfLayer(app.place, allowed)));
  for (const choice of [queryChoice, keyChoice]) choice.addEventListener("change", () => rank(app.place));
  return [[["input", "layer"], show]];
}

function mechanismsView(app) {
  const show = (place) => {
    byId("initialisation-figure").replaceChildren(...initialisationFigures(place));
    byId("gradients-about").textContent = gradientsAbout(place);
    byId("gradients-figure").replaceChildren(...gradientsFigures(app, place));
    byId("subspaces-figure").replaceChildren(...subspacesFigures(place));
    byId("shares-figure").replaceChildren(...sharesFigures(place));
  };
  return [[["input", "layer"], show], ...semanticsView(app)];
}
