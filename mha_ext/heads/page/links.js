// Two columns of tokens and the lines from those that ask to those that are looked at; opacity is weight.
//
// A token is {side: "query" or "key", index}.

const FAINT = 0.004; // less than one step of a screen's colour

class Links {
  /** pointed(token or null): under the pointer, or focused; picked(token): clicked, or Enter or Space. */
  constructor({ queries, keys, levels, pointed, picked }) {
    Object.assign(this, { levels, pointed, picked, shown: null, sizes: { query: queries.length, key: keys.length } });
    this.buttons = { query: this.#buttonsFor("query", queries), key: this.#buttonsFor("key", keys) };
    this.tints = { query: queries.map(() => 0), key: keys.map(() => 0) };
    this.all = element("canvas", { class: "lines-all" });
    this.one = element("canvas", { class: "lines-one" });
    const lines = element("div", { class: "lines", "aria-hidden": "true" }, this.all, this.one);
    this.element = element(
      "div",
      { class: `links scroll ${Math.max(queries.length, keys.length) > 40 ? "dense" : ""}` },
      this.#column("query", "Tokens that ask"),
      lines,
      this.#column("key", "Tokens that are looked at"),
    );
    vary(this.element, { rows: Math.max(queries.length, keys.length) });
    new ResizeObserver(() => this.#repaint()).observe(lines);
    painters.set(this.all, () => this.#paintAll());
    painters.set(this.one, () => this.#paintOne());
  }

  /** Shows the lines of one token, or those of all. */
  show(token) {
    this.#tint(token);
    this.shown = token;
    this.element.classList.toggle("single", token !== null);
    this.#paintOne();
  }

  pin(token) {
    this.element.querySelector('[aria-pressed="true"]')?.setAttribute("aria-pressed", "false");
    if (token) this.buttons[token.side][token.index].setAttribute("aria-pressed", "true");
  }

  /** The weight between a token and the one at `index` on the other side. */
  weight({ side, index }, other) {
    const [query, key] = side === "query" ? [index, other] : [other, index];
    return WEIGHTS[this.levels[query * this.sizes.key + key]];
  }

  #buttonsFor(side, tokens) {
    return tokens.map((token, index) =>
      element(
        "button",
        {
          type: "button",
          "data-index": index,
          tabindex: side === "query" && index === 0 ? 0 : -1,
          "aria-pressed": "false",
          "aria-label": `${side === "query" ? "asking" : "looked at"}, token ${index}: ${visible(token)}`,
        },
        shortNode(token),
      ),
    );
  }

  #column(side, name) {
    const attributes = { class: `tokens ${side}`, role: "group", "aria-label": name };
    const column = element("div", attributes, ...this.buttons[side]);
    const tokenOf = (event) => {
      const button = event.target.closest("button");
      return button && { side, index: Number(button.dataset.index) };
    };
    column.addEventListener("pointerover", (event) => {
      const token = tokenOf(event);
      if (token && event.pointerType !== "touch") this.pointed(token);
    });
    column.addEventListener("pointerleave", () => this.pointed(null));
    column.addEventListener("focusin", (event) => this.#focused(tokenOf(event)));
    column.addEventListener("focusout", () => this.pointed(null));
    column.addEventListener("click", (event) => tokenOf(event) && this.picked(tokenOf(event)));
    column.addEventListener("keydown", (event) => this.#keyPressed(event, tokenOf(event)));
    return column;
  }

  /** One token is in the order of the tab key: the one that had the focus last. */
  #focused(token) {
    for (const button of this.element.querySelectorAll('button[tabindex="0"]')) button.tabIndex = -1;
    this.buttons[token.side][token.index].tabIndex = 0;
    this.pointed(token);
  }

  #keyPressed(event, token) {
    const step = arrow(event);
    if (!step || !token) return;
    const side = step[1] < 0 ? "query" : step[1] > 0 ? "key" : token.side;
    this.buttons[side][clamp(token.index + step[0], 0, this.sizes[side] - 1)].focus();
    event.preventDefault();
  }

  /** Tokens on the other side get a ground as strong as their weight, in steps that the eye can tell apart. */
  #tint(token) {
    if (this.shown) this.buttons[this.shown.side][this.shown.index].classList.remove("active");
    if (token) this.buttons[token.side][token.index].classList.add("active");
    for (const side of ["query", "key"]) {
      this.buttons[side].forEach((button, i) => {
        const tint = token && token.side !== side ? Math.round(50 * (this.weight(token, i) || 0)) / 50 : 0;
        if (this.tints[side][i] !== tint) vary(button, { weight: (this.tints[side][i] = tint) });
      });
    }
  }

  /** Makes the canvases as many pixels as the screen has there, up to what browsers can hold. */
  #repaint() {
    const { clientWidth: width, clientHeight: height } = this.all.parentElement;
    if (!width || !height || (width === this.width && height === this.height)) return;
    this.ratio = Math.min(devicePixelRatio, Math.sqrt(16e6 / (width * height)));
    Object.assign(this, { width, height, rowHeight: height / Math.max(this.sizes.query, this.sizes.key) });
    for (const canvas of [this.all, this.one]) {
      canvas.width = Math.round(width * this.ratio);
      canvas.height = Math.round(height * this.ratio);
    }
    this.#paintAll();
    this.#paintOne();
  }

  #pen(canvas, thickness) {
    const context = canvas.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    Object.assign(context, { strokeStyle: scales().line, lineWidth: thickness });
    return context;
  }

  #line(context, query, key, weight) {
    const [from, to] = [(query + 0.5) * this.rowHeight, (key + 0.5) * this.rowHeight];
    context.globalAlpha = weight;
    context.beginPath();
    context.moveTo(0, from);
    context.bezierCurveTo(this.width * 0.45, from, this.width * 0.55, to, this.width, to);
    context.stroke();
  }

  #paintAll() {
    if (!this.width) return;
    const context = this.#pen(this.all, 1.5);
    for (let query = 0; query < this.sizes.query; query++) {
      for (let key = 0; key < this.sizes.key; key++) {
        const weight = WEIGHTS[this.levels[query * this.sizes.key + key]];
        if (weight >= FAINT) this.#line(context, query, key, weight);
      }
    }
  }

  #paintOne() {
    if (!this.width) return;
    const context = this.#pen(this.one, 2.5);
    if (!this.shown) return;
    for (let other = 0; other < this.sizes[otherSide(this.shown.side)]; other++) {
      const weight = this.weight(this.shown, other);
      const [query, key] = this.shown.side === "query" ? [this.shown.index, other] : [other, this.shown.index];
      if (weight >= FAINT) this.#line(context, query, key, weight);
    }
  }
}

function otherSide(side) {
  return side === "query" ? "key" : "query";
}
