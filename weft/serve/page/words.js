/** Formats numbers with units, and creates nodes without parsing markup. */

/** 0.00042 → "420 µs", 3.21 → "3.2 s", 125 → "2 min 5 s". */
export function seconds(value) {
  if (value == null) return "–";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${digits(value * 1e6)}\u00a0µs`;
  if (value < 0.995) return `${digits(value * 1e3)}\u00a0ms`;
  if (value < 59.5) return `${digits(value)}\u00a0s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min${whole % 60 ? ` ${whole % 60} s` : ""}`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** An estimate, rounded to what is known: 43.2 → "44 s", 125 → "2 min 10 s". */
export function roughly(value) {
  const grain = value < 60 ? 1 : value < 600 ? 10 : 60;
  return seconds(Math.ceil(value / grain) * grain);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const place = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log2(value || 1) / 10)));
  return `${digits(value / 1024 ** place)}\u00a0${units[place]}`;
}

const digits = (value) => (value >= 9.95 ? Math.round(value) : Number(value.toFixed(1)));

/** [0, 1, 2, 5] → "ranks 0–2, 5". */
export function ranks(list) {
  const runs = [];
  for (const rank of list) {
    if (runs.length && runs.at(-1)[1] === rank - 1) runs.at(-1)[1] = rank;
    else runs.push([rank, rank]);
  }
  return `rank${list.length > 1 ? "s" : ""} ${runs.map(([a, b]) => (a === b ? a : `${a}–${b}`)).join(", ")}`;
}

/** Creates an HTML element; its text is never parsed as markup. */
export function node(name, text = "", attributes = {}) {
  return fill(document.createElement(name), text, attributes);
}

export function shape(name, attributes = {}, text = "") {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), text, attributes);
}

function fill(element, text, attributes) {
  if (text !== "") element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

export const fromTemplate = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);

/** The CSS class of a rank's color: one each up to eight ranks, then one for each eighth of them. */
export const color = (rank, world) => `c${world <= 8 ? rank % 8 : Math.floor((rank * 8) / world)}`;
