// @ts-check
/**
 * What the page derives from a report of version 1; no DOM here.
 * @typedef {{name: string, class: string, storage: string, mode: string, accumulation: string, stream: string, reason: string}} Layer
 * @typedef {{call: number, step: number, sigma: number | null, layer: string, op: string, kind: string, from: string, to: string, recovered: boolean}} GuardEvent
 * @typedef {{verdict: string, calls: number, extra_calls: number, escalations: Record<string, string>, events: GuardEvent[], rules?: string}} Guard
 * @typedef {{version: number, device: any, model: any, layers: Layer[], without_effect: {setting: string, reason: string}[], notes?: string[], guard: Guard}} Report
 * @typedef {Layer & {members: Layer[]}} Row
 */

const BLOCK_WORDS = ["block", "blocks", "layer", "layers"];
const COMPUTE_OF = {
  fp8: "compute=fp8",
  fp16_acc16: "compute=fp16 accumulation=fp16",
  fp16: "compute=fp16",
  fp16_wide: "compute=fp16_safe",
  fp16_scaled: "compute=fp16_safe",
  bf16: "compute=bf16",
  fp32: "compute=fp32",
};

/**
 * The report in a node's output; null where there is none.
 * @param {any} output
 * @returns {Report | null}
 */
export function reportIn(output) {
  const text = output?.halfsafe_report?.[0];
  const report = text ? JSON.parse(text) : null;
  return report?.version === 1 ? report : null;
}

/** The name with block numbers as `*`: the first number, and any that follows a word like blocks or layers. */
export function patternOf(/** @type {string} */ name) {
  const parts = name.split(".");
  let seen = false;
  parts.forEach((part, place) => {
    const before = place ? parts[place - 1].split("_").at(-1) ?? "" : "";
    if (!/^\d+$/.test(part) || (seen && !BLOCK_WORDS.includes(before))) return;
    parts[place] = "*";
    seen = true;
  });
  return parts.join(".");
}

/** [0, 1, 2, 39] -> "0-2,39" */
function ranges(/** @type {number[]} */ numbers) {
  /** @type {[number, number][]} */
  const runs = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    const last = runs.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([first, last]) => (last > first ? `${first}-${last}` : `${first}`)).join(",");
}

/**
 * Layers that differ in their block number alone as one row, in the model's order.
 * @param {Layer[]} layers those to show
 * @param {Layer[]} all every layer of the model
 * @returns {Row[]}
 */
export function groupRows(layers, all) {
  const totals = countBy(all, (layer) => patternOf(layer.name));
  /** @type {Map<string, Layer[]>} */
  const groups = new Map();
  for (const layer of layers) {
    const { name, ...setup } = layer;
    const key = JSON.stringify([patternOf(name), setup]);
    groups.set(key, [...(groups.get(key) ?? []), layer]);
  }
  return [...groups.values()].map((members) => ({ ...members[0], name: groupName(members, totals), members }));
}

/** @param {Layer[]} members @param {Map<string, number>} totals */
function groupName(members, totals) {
  if (members.length === 1) return members[0].name;
  const pattern = patternOf(members[0].name);
  if (members.length === totals.get(pattern) || pattern.split("*").length !== 2) return pattern;
  const start = pattern.indexOf("*");
  const numbers = members.map((member) => parseInt(member.name.slice(start), 10));
  return pattern.replace("*", `[${ranges(numbers)}]`);
}

/**
 * Layers whose name, class, dtypes or reason hold every word of the text.
 * @param {Layer[]} layers @param {string} text
 */
export function filterLayers(layers, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return layers.filter((layer) => {
    const held = Object.values(layer).join("\n").toLowerCase();
    return words.every((word) => held.includes(word));
  });
}

/**
 * Rows by one column, numbers in names by their value; without a column, as they come.
 * @param {Row[]} rows @param {{column: keyof Layer, descending: boolean} | null} order
 */
export function sortRows(rows, order) {
  if (!order) return rows;
  const sign = order.descending ? -1 : 1;
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  return [...rows].sort((a, b) => sign * compare(a[order.column], b[order.column]));
}

/** @param {Report} report */
export function storageShares(report) {
  return shares(new Map(Object.entries(report.model.bytes_by_storage)), sizeText);
}

/** The modes of the layers that multiply. @param {Report} report */
export function modeShares(report) {
  const counts = countBy(report.layers.filter(multiplies), (layer) => layer.mode);
  return shares(counts, (count) => `${count} layers`);
}

/** @param {Map<string, number>} amounts @param {(amount: number) => string} text */
function shares(amounts, text) {
  const total = [...amounts.values()].reduce((sum, amount) => sum + amount, 0) || 1;
  const parts = [...amounts].map(([name, amount]) => ({ name, share: amount / total, detail: text(amount) }));
  return parts.sort((a, b) => b.share - a.share);
}

/** @param {Layer} layer */
function multiplies(layer) {
  return /Linear|Conv/.test(layer.class);
}

/**
 * Rule lines that repeat what the report found: layers that multiply in another mode than most, then the guard's
 * escalations, which win.
 * @param {Report} report
 * @returns {string[]}
 */
export function ruleLines(report) {
  const layers = report.layers.filter(multiplies);
  const usual = modeShares(report)[0]?.name;
  const escalated = report.guard.escalations;
  const differing = layers.filter((layer) => layer.mode !== usual && !(layer.name in escalated));
  const names = report.layers.map((layer) => layer.name);
  const raised = report.guard.rules ? report.guard.rules.split("\n") : [];
  return [
    ...linesFor(differing.map((layer) => [layer.name, layer.mode]), names),
    ...raised.map((line) => `${line}  # escalated by the guard`),
  ];
}

/** @param {[string, string][]} entries @param {string[]} all */
function linesFor(entries, all) {
  /** @type {Map<string, string[]>} */
  const groups = new Map();
  for (const [name, mode] of entries) {
    const key = JSON.stringify([patternOf(name), mode]);
    groups.set(key, [...(groups.get(key) ?? []), name]);
  }
  return [...groups].flatMap(([key, members]) => {
    const [pattern, mode] = JSON.parse(key);
    const settings = COMPUTE_OF[/** @type {keyof typeof COMPUTE_OF} */ (mode)];
    if (!settings) return [];
    const means = (members.length > 1 && matchedBy(pattern, all).length === members.length) ? [pattern] : members;
    return means.map((name) => `${name} ${settings}`);
  });
}

/** The names a rule's glob matches: its `*` crosses dots. @param {string} glob @param {string[]} names */
function matchedBy(glob, names) {
  const parts = glob.split("*").map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const matcher = new RegExp(`^${parts.join(".*")}$`);
  return names.filter((name) => matcher.test(name));
}

/** One line on a guard event. @param {GuardEvent} event */
export function eventText(event) {
  const sigma = typeof event.sigma === "number" ? `, sigma ${Number(event.sigma.toPrecision(4))}` : "";
  return `step ${event.step}${sigma}: ${whatIn(event)}`;
}

/** "overflow in blocks.0.ffn.2" @param {GuardEvent} event */
export function whatIn(event) {
  const what = event.kind === "unknown" ? "NaN or Inf" : event.kind;
  return event.layer ? `${what} in ${event.layer}` : what;
}

/** "NVIDIA GeForce RTX 3090 (sm_86)" @param {Report} report */
export function deviceText(report) {
  const { name, profile, simulated } = report.device;
  return `${name} (${profile}${simulated ? ", simulated" : ""})`;
}

/** Bytes as GiB, MiB or KiB. @param {number} count */
export function sizeText(count) {
  for (const [unit, size] of /** @type {[string, number][]} */ ([["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])) {
    if (count >= size) return `${(count / size).toFixed(2)} ${unit}`;
  }
  return `${count} B`;
}

/** A count in billions or millions: 1.42 B, 35 M. @param {number} count */
export function amountText(count) {
  if (count >= 1e9) return `${(count / 1e9).toFixed(2)} B`;
  return count >= 1e6 ? `${(count / 1e6).toFixed(1)} M` : `${count}`;
}

/**
 * @template T
 * @param {T[]} items @param {(item: T) => string} key
 */
function countBy(items, key) {
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const item of items) counts.set(key(item), (counts.get(key(item)) ?? 0) + 1);
  return counts;
}
