// Elements, and what people read in them. Text enters the document as text only: as children, never as HTML.

const DASH = "\u2013";
const byId = (id) => document.getElementById(id);

/** element("td", { class: "number" }, "0.5"): attributes, and children that are nodes or text. */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** Sets CSS variables. */
function vary(node, variables) {
  for (const [name, value] of Object.entries(variables)) node.style.setProperty(`--${name}`, value);
  return node;
}

/** A token set apart from what surrounds it, also where it is written from right to left. */
function tokenNode(token, attributes = {}) {
  return element("bdi", { class: "token", ...attributes }, visible(token));
}

/** A token where room is short. Cut here, not by CSS: hundreds of clipped boxes are slow to paint. */
function shortNode(token) {
  const characters = [...visible(token)];
  return tokenNode(characters.length > 14 ? `${characters.slice(0, 13).join("")}\u2026` : token);
}

/** Tokens of white space only, as something to see. */
function visible(token) {
  if (token === "") return "\u2205";
  return /\S/.test(token) ? token : token.replace(/\n/g, "\u23ce").replace(/\t/g, "\u21e5").replace(/\s/g, "\u2423");
}

/** A number after words. */
function readNode(text) {
  return [" ", element("b", {}, text)];
}

/** "it -> animal 0.83" */
function linkNodes(query, key, value) {
  return [tokenNode(query), " \u2192 ", tokenNode(key), ...readNode(fraction(value))];
}

/** Entries of a <dl> for [name, nodes or text]. */
function factNodes(facts) {
  return facts.map(([name, ...value]) => element("div", {}, element("dt", {}, name), element("dd", {}, ...value)));
}

/** A number with two or three digits. */
function numeral(value) {
  if (!isNumber(value)) return DASH;
  const size = Math.abs(value);
  if (size === 0) return "0";
  const text = size < 0.001 ? value.toExponential(1) : size < 0.1 ? value.toPrecision(2) : value.toPrecision(3);
  return (size >= 100 ? value.toFixed(0) : text).replaceAll("-", "\u2212");
}

/** A number in little room. */
function briefNumeral(value) {
  const size = Math.abs(value);
  if (!isNumber(value) || size === 0 || size >= 10) return isNumber(value) ? value.toFixed(0) : DASH;
  const text = size < 0.001 ? value.toExponential(0) : size < 0.1 ? value.toFixed(3) : value.toPrecision(2);
  return text.replaceAll("-", "\u2212");
}

/** A weight or another number from 0 to 1 (or -1 to 1), with two decimals unless it is very small. */
function fraction(value) {
  if (!isNumber(value)) return DASH;
  const size = Math.abs(value);
  const text = size >= 0.00995 || size < 0.0005 ? value.toFixed(2) : value.toFixed(3);
  return (Number(text) === 0 ? "0" : text).replace("-", "\u2212");
}

function percent(value, digits = 1) {
  return isNumber(value) ? `${(100 * value).toFixed(digits)}\u202f%` : DASH;
}

/** A number of METRICS as people read it, or with less room. */
function metricText(metric, value, brief = false) {
  if (metric.name === "entropy") return fraction(value);
  if (metric.name === "share") return percent(value, brief && value > 0.0995 ? 0 : 1);
  return brief ? briefNumeral(value) : numeral(value);
}

function headName({ layer, head }) {
  return `Layer ${layer}, head ${head}`;
}

/** "1 head", "2 heads" */
function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

/** Fills a <select> with [value, text] and chooses one. */
function fill(select, options, chosen) {
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  select.value = String(chosen);
}

const tokenOptions = (tokens) => tokens.map((token, i) => [i, `${i}  ${visible(token)}`]);
const layerOptions = () => report.layers.map((_, i) => [i, `${i}  ${shortName(i)}`]);
const headOptions = (layer) => range(report.layers[layer].heads).map((head) => [head, String(head)]);
const inputOptions = () => report.inputs.map((input, i) => [i, `${i + 1}  ${input.text.slice(0, 60)}`]);

/** [rows, columns] that an arrow key goes; null for other keys. */
function arrow(event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return null;
  return { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? null;
}

function goTo(section, focused) {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  section.scrollIntoView({ behavior: still ? "auto" : "smooth", block: "start" });
  focused.focus({ preventScroll: true });
}
