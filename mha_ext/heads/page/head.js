// One head large: its numbers, its map, its lines, and where all heads of the layer look.

const SHARES = [
  ["previous", "on previous token"],
  ["self", "on itself"],
  ["next", "on next token"],
  ["first", "on first token"],
];

/** [name, number as text] of one head. */
function factsOf(place) {
  const { head } = place;
  const attention = attentionAt(place);
  const others = attention.similarity[head].filter((_, other) => other !== head);
  return [
    ...METRICS.map((metric) => [metric.label, metricText(metric, metricAt(metric, place))]),
    ["entropy, nats", numeral(attention.entropy[head])],
    ...SHARES.filter(([name]) => name in attention.shares).map(([name, label]) => {
      return [label, percent(attention.shares[name][head])];
    }),
    ["CKA with others", fraction(mean(others))],
  ];
}

function headView(app) {
  let place, levels, queries, keys, map, links, strip, stripLabels;
  let [pointed, pinned, shown] = [null, null, null]; // tokens as in links.js

  function build(next) {
    place = { ...next };
    [pointed, pinned, shown] = [null, null, null];
    [levels, queries, keys] = [levelsAt(place), queriesAt(place), keysAt(place)];
    byId("head-title").textContent = headName(place);
    const kind = isSelfAttention(place) ? "" : ", cross-attention";
    byId("head-name").textContent = report.layers[place.layer].name + kind;
    byId("head-facts").replaceChildren(...factNodes(factsOf(place)));
    map = weightMap(place, {
      moved: (query) => point(query === null ? null : { side: "query", index: query }),
      picked: (query) => pin({ side: "query", index: query }),
    });
    links = new Links({ queries, keys, levels, pointed: point, picked: pin });
    byId("head-map").replaceChildren(map.element);
    byId("head-links").replaceChildren(links.element);
    stripLabels = null;
    showStrip(null);
  }

  function point(token) {
    pointed = token;
    refresh();
  }

  function pin(token) {
    const same = pinned && token && pinned.side === token.side && pinned.index === token.index;
    pinned = same ? null : token;
    links.pin(pinned);
    refresh();
  }

  function refresh() {
    const token = pinned ?? pointed;
    if (token?.side === shown?.side && token?.index === shown?.index) return;
    shown = token;
    links.show(token);
    if (!map.cursor) showOnMap(token);
    showStrip(token);
  }

  /** The token's row or column, and in words where its three largest weights are. */
  function showOnMap(token) {
    map.mark(token?.side === "query" ? token.index : null, token?.side === "key" ? token.index : null);
    if (!token) return map.say();
    const [own, others, to] = token.side === "query" ? [queries, keys, " \u2192 "] : [keys, queries, " \u2190 "];
    const ranked = others
      .map((other, i) => ({ other, weight: links.weight(token, i) }))
      .filter(({ weight }) => isNumber(weight))
      .sort((a, b) => b.weight - a.weight);
    const words = ranked.slice(0, 3).flatMap(({ other, weight }, i) => {
      return [i ? ", " : "", tokenNode(other), ` ${fraction(weight)}`];
    });
    map.say(tokenNode(own[token.index], { class: "token chosen" }), to, ...(words.length ? words : [DASH]));
  }

  /** (others,) What head `head` of the layer gives to (or, for a key, gets from) the other side. */
  function stripRow(head, token) {
    const of = levelsAt({ ...place, head });
    if (!token) return meanLevels(of, queries.length, keys.length);
    const { side, index } = token;
    if (side === "query") return of.subarray(index * keys.length, (index + 1) * keys.length);
    return queries.map((_, query) => of[query * keys.length + index]);
  }

  function showStrip(token) {
    const others = token?.side === "key" ? queries : keys;
    if (stripLabels !== others) buildStrip(others);
    const rows = range(report.layers[place.layer].heads).map((head) => stripRow(head, token));
    strip.levels = rows;
    const flat = new Uint8Array(rows.length * others.length);
    rows.forEach((row, head) => {
      flat.set(row, head * others.length);
      const best = strongestKey(row, 0, others.length);
      strip.notes[head].replaceChildren(
        best === null ? DASH : shortNode(others[best]),
        ...(best === null ? [] : readNode(fraction(WEIGHTS[row[best]]))),
      );
    });
    if (token) strip.paintNow(flat);
    else strip.paint(flat);
    byId("strip-about").replaceChildren(...stripAbout(token));
  }

  function stripAbout(token) {
    const where = `in each head of layer ${place.layer}, with the strongest named.`;
    if (!token) return [`The mean over all tokens that ask, ${where} Point at a token for that one.`];
    const name = element("b", {}, tokenNode((token.side === "query" ? queries : keys)[token.index]));
    return token.side === "query" ? ["What ", name, ` looks at, ${where}`] : ["Who looks at ", name, `, ${where}`];
  }

  function buildStrip(others) {
    stripLabels = others;
    const heads = range(report.layers[place.layer].heads);
    const notes = heads.map(() => element("span", { class: "strongest" }));
    const rows = heads.map((head) => {
      return element("span", { class: `strip-row ${head === place.head ? "current" : ""}` }, String(head), notes[head]);
    });
    const weight = (head, other) => fraction(WEIGHTS[strip.levels[head][other]]);
    strip = new HeatMap({
      name: `Layer ${place.layer}: where each head looks, ${heads.length} heads by ${others.length} tokens`,
      kind: "strip",
      rows,
      columns: others.map(shortNode),
      describe: (head, other) => [`head ${head}: `, tokenNode(others[other]), ...readNode(weight(head, other))],
      picked: (head) => app.show({ head }),
    });
    strip.notes = notes;
    byId("head-strip").replaceChildren(strip.element);
  }

  byId("head-legend").append(weightLegend());
  byId("head").addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (!pinned) return app.leaveHead();
    pin(null);
    point(null);
  });
  return [[["input", "layer", "head"], build]];
}
