// The figures that views are made of.

/**
 * A matrix in colours with labels on both axes and a cursor that follows pointer and arrow keys.
 *
 * name      what it shows, for those who do not see it
 * rows, columns   nodes or text, the labels
 * scale     of SCALES
 * describe  (row, column) -> nodes and text: the entry in words
 * moved     (row, column), or (null, null) when the cursor leaves
 * picked    (row, column): clicked, or Enter or Space
 * kind      a class for the looks
 */
class HeatMap {
  constructor({ name, rows, columns, scale = "weight", describe, moved, picked, kind = "" }) {
    Object.assign(this, { describe, moved, picked, scale, cursor: null });
    this.size = [rows.length, columns.length];
    this.canvas = element("canvas", { width: columns.length, height: rows.length });
    this.bands = [element("i", { class: "band row" }), element("i", { class: "band column" })];
    this.labels = [rows, columns].map((labels) => labels.map((label) => element("span", {}, label)));
    this.body = element("div", { class: "heat-body" }, this.canvas, ...this.bands);
    this.area = element(
      "div",
      {
        class: "heat-area scroll",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "heat map",
        "aria-label": name,
      },
      element("div", { class: "heat-corner" }),
      element("div", { class: "heat-columns", "aria-hidden": "true" }, ...this.labels[1]),
      element("div", { class: "heat-rows", "aria-hidden": "true" }, ...this.labels[0]),
      this.body,
    );
    this.readout = element("output", { class: "readout" });
    this.element = element("div", { class: `heat ${kind}` }, this.area, this.readout);
    vary(this.element, { rows: rows.length, columns: columns.length });
    this.#listen();
  }

  /** Paints levels (rows, columns), or what `levels()` gives when the figure comes into sight. */
  paint(levels) {
    const found = () => (typeof levels === "function" ? levels() : levels);
    paintWhenSeen(this.canvas, () => paintLevels(this.canvas, found(), this.scale));
    return this;
  }

  /** Paints at once: for figures that follow the pointer. */
  paintNow(levels) {
    painters.set(this.canvas, () => paintLevels(this.canvas, levels, this.scale));
    paintLevels(this.canvas, levels, this.scale);
  }

  /** Sets row and column off; null for neither. */
  mark(...place) {
    place.forEach((index, axis) => {
      this.labels[axis][this.marked?.[axis]]?.classList.remove("marked");
      this.labels[axis][index]?.classList.add("marked");
      this.bands[axis].classList.toggle("shown", index !== null);
      if (index !== null) vary(this.bands[axis], { at: index });
    });
    this.marked = place;
  }

  say(...words) {
    this.readout.replaceChildren(...words);
  }

  #moveTo(row, column) {
    if (this.cursor?.[0] === row && this.cursor?.[1] === column) return;
    this.cursor = row === null ? null : [row, column];
    this.mark(row, column);
    this.say(...(row === null || !this.describe ? [] : this.describe(row, column)));
    this.moved?.(row, column);
  }

  #placeOf(event) {
    const { clientWidth, clientHeight } = this.body;
    return [
      clamp(Math.floor((event.offsetY / clientHeight) * this.size[0]), 0, this.size[0] - 1),
      clamp(Math.floor((event.offsetX / clientWidth) * this.size[1]), 0, this.size[1] - 1),
    ];
  }

  #listen() {
    this.canvas.addEventListener("pointermove", (event) => this.#moveTo(...this.#placeOf(event)));
    this.canvas.addEventListener("pointerleave", () => this.#moveTo(null, null));
    this.canvas.addEventListener("click", (event) => {
      const place = this.#placeOf(event);
      this.#moveTo(...place);
      this.picked?.(...place);
    });
    this.area.addEventListener("blur", () => this.#moveTo(null, null));
    this.area.addEventListener("keydown", (event) => this.#keyPressed(event));
  }

  #keyPressed(event) {
    const step = arrow(event);
    if (step) {
      const from = this.cursor ?? step.map((way) => (way > 0 ? -1 : 0));
      const to = from.map((index, axis) => clamp(index + step[axis], 0, this.size[axis] - 1));
      this.#moveTo(...to);
      this.#keepInSight();
    } else if ((event.key === "Enter" || event.key === " ") && this.cursor) {
      this.picked?.(...this.cursor);
    } else {
      return;
    }
    event.preventDefault();
  }

  /** Scrolls the area, not the page, to the cursor. */
  #keepInSight() {
    const { area, body, cursor, size } = this;
    const [height, width] = [body.clientHeight / size[0], body.clientWidth / size[1]];
    const [top, left] = [cursor[0] * height, cursor[1] * width];
    const [high, wide] = [area.clientHeight - body.offsetTop, area.clientWidth - body.offsetLeft];
    area.scrollTop = clamp(area.scrollTop, top + height - high, top);
    area.scrollLeft = clamp(area.scrollLeft, left + width - wide, left);
  }
}

/** The map of one head. */
function weightMap(place, handlers = {}) {
  const [levels, queries, keys] = [levelsAt(place), queriesAt(place), keysAt(place)];
  return new HeatMap({
    name: `${headName(place)}: weights, ${queries.length} tokens that ask by ${keys.length} that are looked at`,
    rows: queries.map(shortNode),
    columns: keys.map(shortNode),
    describe: (query, key) => linkNodes(queries[query], keys[key], WEIGHTS[levels[query * keys.length + key]]),
    ...handlers,
  }).paint(levels);
}

/** A colour scale with [part of its length, text] written under it. */
function legend(scale, name, ticks) {
  const canvas = element("canvas", { width: LEVELS + 1, height: 1, class: "legend-scale" });
  paintWhenSeen(canvas, () => paintLevels(canvas, range(LEVELS + 1), scale));
  const texts = ticks.map(([at, text]) => vary(element("span", {}, text), { at }));
  return element(
    "div",
    { class: "legend", role: "img", "aria-label": `Colours: ${name}, ${ticks.map(([, text]) => text).join(", ")}` },
    element("span", { class: "legend-name" }, name),
    element("div", { class: "legend-body" }, canvas, element("div", { class: "legend-ticks" }, ...texts)),
  );
}

/** A number under an axis: two digits, no zeros after them. */
const tickText = (value) => String(Number(value.toPrecision(2))).replace("-", "\u2212");

function weightLegend() {
  const ticks = [0, 0.05, 0.25, 0.5, 1].map((weight) => [Math.sqrt(weight), String(weight)]);
  return legend("weight", "weight", ticks);
}

const MARKS = { model: "this model", twin: "random twin", reference: "mark" };

/**
 * Numbers on one axis, a row for each layer.
 *
 * rows      [{ label, model: numbers, twin: numbers, reference: number, text }]
 * names     { twin: "twin", ... }: what the key calls the marks that occur
 */
function dotRows(title, rows, { low = 0, high, current = null, names = {} }) {
  const at = (value) => clamp((value - low) / (high - low || 1), 0, 1);
  const mark = (kind) => element("i", { class: `dot ${kind}` });
  const marks = (kind, values) => values.filter(isNumber).map((value) => vary(mark(kind), { at: at(value) }));
  const lines = rows.map(({ label, model = [], twin = [], reference = null, text }, i) =>
    element(
      "tr",
      { class: i === current ? "current" : null },
      element("th", { scope: "row" }, label),
      element(
        "td",
        { class: "track", "aria-hidden": "true" },
        element("div", {}, ...marks("reference", [reference]), ...marks("twin", twin), ...marks("model", model)),
      ),
      element("td", { class: "number" }, text),
    ),
  );
  const ticks = [0, 0.5, 1].map((part) => vary(element("span", {}, tickText(low + part * (high - low))), { at: part }));
  const kinds = Object.keys(MARKS).filter((kind) => rows.some((row) => [row[kind] ?? []].flat().some(isNumber)));
  const key = kinds.map((kind) => element("span", {}, mark(kind), names[kind] ?? MARKS[kind]));
  const axis = element("td", { class: "ticks" }, element("div", {}, ...ticks));
  const table = element(
    "table",
    { class: "dots" },
    element("tbody", {}, ...lines),
    element("tfoot", { "aria-hidden": "true" }, element("tr", {}, element("td"), axis, element("td"))),
  );
  return card(title, [element("span", { class: "marks" }, ...key)], table);
}

/** A figure with its title, and what there is to say about it: nodes and text. */
function card(title, about, ...content) {
  const caption = element("figcaption", {}, element("h4", {}, title), about.length ? element("p", {}, ...about) : "");
  return element("figure", { class: "card" }, caption, ...content);
}

/** A bar of a part from 0 to 1. */
function bar(part) {
  const length = isNumber(part) ? clamp(part, 0, 1) : 0;
  return vary(element("span", { class: "meter", "aria-hidden": "true" }), { part: length });
}
