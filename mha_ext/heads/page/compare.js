// Two heads side by side, or one head on two inputs, and what one has more than the other.

/** What to compare with a head at first: the one of its layer that is least like it, or itself on another input. */
function counterpart(place) {
  const { order, similarity } = attentionAt(place);
  if (order.length === 1) return { ...place, input: (place.input + 1) % report.inputs.length };
  const alike = (head) => similarity[place.head][head] ?? 1;
  return { ...place, head: order.reduce((least, head) => (alike(head) < alike(least) ? head : least)) };
}

/** (queries, keys) Levels of the signed square root of a - b: 127 is no difference. */
function differenceLevels(a, b) {
  return Uint8Array.from(a, (level, i) => {
    return levelOf(signedRoot(WEIGHTS[level] - WEIGHTS[b[i]]), -1, 1);
  });
}

function signedRoot(value) {
  return Math.sign(value) * Math.sqrt(Math.abs(value));
}

/** Half the sum of the absolute differences of two rows, mean over the rows: 0 the same, 1 entirely different. */
function totalVariation(a, b, keys) {
  const rows = range(a.length / keys).map((row) => {
    let sum = 0;
    for (let i = row * keys; i < (row + 1) * keys; i++) sum += Math.abs(WEIGHTS[a[i]] - WEIGHTS[b[i]]);
    return sum / 2;
  });
  return mean(rows);
}

function compareView(app) {
  const places = {}; // a and b
  const choices = { a: choicesIn("a"), b: choicesIn("b") };

  function choicesIn(side) {
    const selects = {};
    for (const [name, caption] of [["input", "Input"], ["layer", "Layer"], ["head", "Head"]]) {
      const select = element("select", { id: `compare-${side}-${name}` });
      select.addEventListener("change", () => choose(side, { ...places[side], [name]: Number(select.value) }));
      const hidden = name === "input" && report.inputs.length === 1;
      byId(`compare-${side}`).append(element("label", { hidden }, caption, " ", select));
      selects[name] = select;
    }
    const take = element("button", { type: "button" }, "Head above");
    take.addEventListener("click", () => choose(side, app.place));
    byId(`compare-${side}`).append(take);
    return selects;
  }

  function choose(side, { input, layer, head }) {
    places[side] = { input, layer, head: Math.min(head, report.layers[layer].heads - 1) };
    fill(choices[side].input, inputOptions(), input);
    fill(choices[side].layer, layerOptions(), layer);
    fill(choices[side].head, headOptions(layer), places[side].head);
    if (places.a && places.b) show();
  }

  function show() {
    const { a, b } = places;
    const [left, right] = [levelsAt(a), levelsAt(b)];
    const maps = [mapOf("A", a), mapOf("B", b)];
    const alike = queriesAt(a).length === queriesAt(b).length && keysAt(a).length === keysAt(b).length;
    if (alike) maps.push(differenceMap(a, left, right));
    link(maps.map(({ map }) => map), alike);
    byId("compare-maps").replaceChildren(...maps.map(({ figure }) => figure));
    byId("compare-about").textContent = alike
      ? differenceAbout(a, b, left, right)
      : "These have different numbers of tokens, so there is no map of their difference.";
    showNumbers(a, b);
  }

  function differenceAbout(a, b, left, right) {
    const elsewhere = percent(totalVariation(left, right, keysAt(a).length));
    const said = `On average ${elsewhere} of a token's attention lies elsewhere in B.`;
    const tokens = (place) => JSON.stringify([queriesAt(place), keysAt(place)]);
    if (tokens(a) === tokens(b)) return said;
    return `${said} The tokens differ; they are compared position by position, under the names of A.`;
  }

  function mapOf(name, place) {
    const map = weightMap(place);
    return { map, figure: figureOf(`${name}: ${headName(place)}`, map, weightLegend()) };
  }

  function differenceMap(a, left, right) {
    const [queries, keys] = [queriesAt(a), keysAt(a)];
    const map = new HeatMap({
      name: "A minus B: difference of the weights",
      rows: queries.map(shortNode),
      columns: keys.map(shortNode),
      scale: "diverging",
      describe: (query, key) => {
        const i = query * keys.length + key;
        return linkNodes(queries[query], keys[key], WEIGHTS[left[i]] - WEIGHTS[right[i]]);
      },
    }).paint(() => differenceLevels(left, right));
    const ticks = [-1, -0.25, 0, 0.25, 1].map((value) => [(signedRoot(value) + 1) / 2, tickText(value)]);
    return { map, figure: figureOf("A minus B", map, legend("diverging", "difference", ticks)) };
  }

  function figureOf(title, map, scale) {
    const caption = element("figcaption", {}, element("h3", {}, title));
    return element("figure", { class: "card" }, caption, map.element, scale);
  }

  /** The cursor of one map shows in the others, too. */
  function link(maps, alike) {
    if (!alike) return;
    for (const map of maps) {
      map.moved = (row, column) => {
        for (const other of maps) {
          if (other === map) continue;
          other.mark(row, column);
          other.say(...(row === null ? [] : other.describe(row, column)));
        }
      };
    }
  }

  function showNumbers(a, b) {
    const [left, right] = [factsOf(a), factsOf(b)].map((facts) => new Map(facts));
    const names = new Set([...left.keys(), ...right.keys()]);
    const rows = [...names].map((name) => [name, left.get(name) ?? DASH, right.get(name) ?? DASH]);
    if (a.input === b.input && a.layer === b.layer) {
      for (const { name, label } of MEASURES) {
        rows.push([`${label}, A and B`, fraction(attentionAt(a)[name][a.head][b.head])]);
      }
    }
    const head = element("tr", {}, element("td"), ...["A", "B"].map((name) => element("th", { scope: "col" }, name)));
    const body = rows.map(([name, ...values]) => {
      const cells = values.map((value) => element("td", { colspan: values.length === 1 ? 2 : null }, value));
      return element("tr", {}, element("th", { scope: "row" }, name), ...cells);
    });
    byId("compare-numbers").replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
  }

  app.compare = (a, b) => {
    choose("a", a);
    choose("b", b);
    goTo(byId("compare"), byId("compare-title"));
  };
  choose("a", app.place);
  choose("b", counterpart(app.place));
  return [];
}
