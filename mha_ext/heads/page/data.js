// The report as the page works with it. Nothing here touches the document, but for the element that carries the data.
//
// A place is {input, layer, head}: one head on one text.

const report = JSON.parse(document.getElementById("report").textContent);

const LEVELS = 254; // a weight is a byte, 254 sqrt(weight)
const MISSING = 255; // or this one, where it is not a number
const WEIGHTS = Float32Array.from({ length: 256 }, (_, level) => (level === MISSING ? NaN : (level / LEVELS) ** 2));

const isNumber = (value) => typeof value === "number" && !Number.isNaN(value);
const range = (count) => Array.from({ length: count }, (_, i) => i);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** The level of a number between low and high. */
function levelOf(value, low = 0, high = 1) {
  return isNumber(value) ? Math.round(clamp((value - low) / (high - low || 1), 0, 1) * LEVELS) : MISSING;
}

function attentionAt({ input, layer }) {
  return report.inputs[input].attention[layer];
}

function queriesAt(place) {
  return report.inputs[place.input].sequences[attentionAt(place).queries];
}

function keysAt(place) {
  return report.inputs[place.input].sequences[attentionAt(place).keys];
}

/** Whether queries and keys are the same tokens. */
function isSelfAttention(place) {
  return attentionAt(place).queries === attentionAt(place).keys;
}

function decode(text) {
  const characters = atob(text);
  const levels = new Uint8Array(characters.length);
  for (let i = 0; i < levels.length; i++) levels[i] = characters.charCodeAt(i);
  return levels;
}

/** Levels of one head, (queries, keys) in rows; decoded when a layer is first looked at. */
function levelsAt(place) {
  const attention = attentionAt(place);
  attention.levels ??= decode(attention.weights);
  const size = queriesAt(place).length * keysAt(place).length;
  return attention.levels.subarray(place.head * size, (place.head + 1) * size);
}

/** What is written beside each head: how it is called, and where the number comes from. */
const METRICS = [
  { name: "importance", label: "importance", short: "imp", of: (place) => attentionAt(place).importance },
  { name: "entropy", label: "relative entropy", short: "ent", of: (place) => attentionAt(place).relative_entropy },
  { name: "share", label: "W_o share", short: "W_o", of: (place) => report.layers[place.layer].output_share },
  { name: "distance", label: "distance", short: "dist", of: (place) => attentionAt(place).distance },
];

/** One of METRICS of one head; null where it is not known. */
function metricAt(metric, place) {
  return metric.of(place)?.[place.head] ?? null;
}

const importanceAt = (place) => metricAt(METRICS[0], place);

/** All heads of the model, or of one layer of it. */
function placesOf(input, layers = range(report.layers.length)) {
  return layers.flatMap((layer) => range(report.layers[layer].heads).map((head) => ({ input, layer, head })));
}

function largest(values) {
  return values.filter(isNumber).reduce((most, value) => Math.max(most, value), 0);
}

function mean(values) {
  const numbers = values.filter(isNumber);
  return numbers.length ? numbers.reduce((sum, value) => sum + value, 0) / numbers.length : null;
}

/** The entries above the diagonal of a matrix (H, H): each pair of different heads once. */
function pairs(matrix) {
  return (matrix ?? []).flatMap((row, i) => row.slice(i + 1));
}

/** The key with the largest level in row `query`; null if the row has no weights. */
function strongestKey(levels, query, keys) {
  let best = null;
  for (let key = 0; key < keys; key++) {
    const level = levels[query * keys + key];
    if (level !== MISSING && level > (best === null ? 0 : levels[query * keys + best])) best = key;
  }
  return best;
}

/** {query, key, weight} of the largest weight between different tokens that `allowed(token)` lets through; or null. */
function strongestLink(place, allowed = () => true) {
  const levels = levelsAt(place);
  const queries = queriesAt(place).map(allowed);
  const keys = keysAt(place).map(allowed);
  const self = isSelfAttention(place);
  let best = null;
  let most = 0;
  for (let query = 0, i = 0; query < queries.length; query++) {
    for (let key = 0; key < keys.length; key++, i++) {
      if (levels[i] <= most || levels[i] === MISSING) continue;
      if (!queries[query] || !keys[key] || (self && query === key)) continue;
      most = levels[i];
      best = { query, key, weight: WEIGHTS[most] };
    }
  }
  return best;
}

/** (keys,) The mean over the queries, as levels: what a head looks at on the whole. */
function meanLevels(levels, queries, keys) {
  return range(keys).map((key) => {
    const average = mean(range(queries).map((query) => WEIGHTS[levels[query * keys + key]]));
    return average === null ? MISSING : levelOf(Math.sqrt(average));
  });
}

/** [CLS], <s>, <|endoftext|> and the like: tokens that are no part of the text. */
function isSpecial(token) {
  return /^(\[[A-Z]+\d*\]|<[^<>\s]+>)$/.test(token.trim());
}

/** A token without what tokenizers put in front of words. */
function wordOf(token) {
  return token.replace(/^[\s\u0120\u2423\u2581]+/, "").toLowerCase();
}
