// Colour scales, and when canvases are painted.
//
// Sequential scales have one hue, and lightness goes one way; diverging ones go from orange over grey to blue, which
// the colour-blind tell apart. Either end of a scale stands out from the ground of its theme, so "more" is always
// "stronger", in light and in dark. The scale of weights is paler at its low end, because levels are square roots.

const SCALES = {
  light: {
    weight: ["#f2f5f9", "#e1ebfa", "#bdd7fc", "#85b3f7", "#3f7cd6", "#104792", "#0a2c5c"],
    sequential: ["#f2f5f9", "#b5d2fc", "#7daef6", "#4d8ae3", "#2867c1", "#104792", "#0a2c5c"],
    diverging: ["#a04400", "#c0805e", "#ddb9a7", "#f1f4f8", "#a4bbdd", "#5983c1", "#0047a1"],
    missing: "#d9d4cc",
    line: "#104792",
  },
  dark: {
    weight: ["#23272c", "#223449", "#1f4878", "#2d67b0", "#5a95e2", "#a8cfff", "#e3f3ff"],
    sequential: ["#23272c", "#1c4476", "#2b63aa", "#4985d5", "#73aaf3", "#a8cfff", "#e3f3ff"],
    diverging: ["#ffa372", "#b27758", "#6b4e40", "#27292c", "#48576c", "#6a89b5", "#8fc0ff"],
    missing: "#4a443c",
    line: "#8fc0ff",
  },
};

const darkWanted = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : darkWanted.matches;
}

const scales = () => SCALES[isDark() ? "dark" : "light"];
const bytesOf = (hex) => [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));

/** 256 pixels as ImageData has them in memory, for levels 0 to 254 and MISSING. */
function colourTable(stops, missing) {
  const pixels = new Uint8ClampedArray(4 * 256);
  for (let level = 0; level <= LEVELS; level++) {
    const place = (level / LEVELS) * (stops.length - 1);
    const from = Math.min(Math.floor(place), stops.length - 2);
    const [a, b] = [bytesOf(stops[from]), bytesOf(stops[from + 1])];
    pixels.set([...a.map((value, i) => value + (b[i] - value) * (place - from)), 255], 4 * level);
  }
  pixels.set([...bytesOf(missing), 255], 4 * MISSING);
  return new Uint32Array(pixels.buffer);
}

const tables = new Map();

function tableOf(scale) {
  const key = `${scale} ${isDark()}`;
  if (!tables.has(key)) tables.set(key, colourTable(scales()[scale], scales().missing));
  return tables.get(key);
}

/** One pixel for each level; CSS makes them large. */
function paintLevels(canvas, levels, scale) {
  const image = new ImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  const table = tableOf(scale);
  for (let i = 0; i < pixels.length; i++) pixels[i] = table[levels[i]];
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// Canvases are painted when they come near the window, and again when the colours change.

const painters = new WeakMap();
const nearby = new IntersectionObserver(
  (entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      nearby.unobserve(target);
      painters.get(target)();
    }
  },
  { rootMargin: "300px" },
);

function paintWhenSeen(canvas, paint) {
  painters.set(canvas, paint);
  nearby.unobserve(canvas);
  nearby.observe(canvas);
}

function repaint() {
  for (const canvas of document.querySelectorAll("canvas")) paintWhenSeen(canvas, painters.get(canvas));
}

/** Calls when(dark) now and whenever the system or the button changes the theme; every figure is painted anew then. */
function watchTheme(button) {
  const changed = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    repaint();
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    changed();
  });
  darkWanted.addEventListener("change", changed);
  changed();
}
