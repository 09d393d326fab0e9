// @ts-check
/** The report on its node: head, shares, guard, remarks and the table of layers. */
import { aboutOf, el, firstOf, modeText, nameOf, paint, shareBar, swatch, verdictOf, verdictPill } from "./dom.mjs";
import { checkText, controlText, deviceText, filterLayers, happenedText, outcomeText, rowsOf, sortRows } from "./report.mjs";
import { following, said, t, together } from "./words.mjs";

/**
 * @typedef {import("./report.mjs").Report} Report
 * @typedef {import("./report.mjs").Row} Row
 * @typedef {import("./report.mjs").Layer} Layer
 * @typedef {import("./run.mjs").GuardMessage} GuardMessage
 * @typedef {"name" | "class" | "storage" | "mode" | "accumulation" | "stream" | "kernel"} Column
 */

/** Each with its head and what that means. @returns {[Column, string, string | null][]} */
const columns = () => [
  ["name", t("layer"), null], ["class", t("class"), null], ["storage", t("stored"), t("The dtype of the weights in memory.")], ["mode", t("computed"), t("The arithmetic of the layer's matrix product.")],
  ["accumulation", t("sums"), t("The dtype in which products are summed.")], ["stream", t("activations"), t("The dtype of values between layers.")],
  ["kernel", t("kernel"), t("For quantized weights. native: the device's own kernel. dequantized: unpacked before the product.")],
];
const COPIED_MS = 2500;
const BUILT_IN = "halfsafe_example.safetensors";

export class ReportPanel {
  /** @type {Report | null} */
  #report = null;
  /** @type {GuardMessage[] | null} */
  #live = null;
  #filter = "";
  /** @type {{column: Column, descending: boolean} | null} */
  #order = null;
  /** @type {Set<string>} */
  #open = new Set();

  /** @type {import("./measure.mjs").Use | null} */
  #use = null;

  /** @param {((rules: string) => void) | null} [keep] puts the report's rules into the graph; null where nothing takes them @param {(use: import("./measure.mjs").Use) => void} [use] puts what the node offers into it */
  constructor(keep = null, use = () => {}) {
    this.keepRules = keep;
    this.body = el("div", { class: "hs-scroll", tabindex: "0", role: "region", "aria-label": t("Precision report") });
    this.element = el("section", { class: "halfsafe hs-panel", "data-capture-wheel": "true" }, this.body);
    this.head = el("div", { class: "hs-head" });
    this.guard = el("div", { class: "hs-guard", role: "log", "aria-live": "polite" });
    this.remarks = el("div");
    this.copied = el("span", { class: "hs-copied", role: "status" });
    this.tools = this.#makeTools();
    this.table = el("table", { class: "hs-table", role: "table", "aria-label": t("Layers") });
    this.told = el("p", { class: "hs-sentence" });
    this.offer = el("button", { type: "button", class: "hs-button", text: t("Use this"), onclick: () => this.#use && use(this.#use) });
    this.said = el("div", { class: "hs-told", hidden: true }, this.told, this.offer);
    this.body.append(this.said, this.head, this.guard, this.remarks, this.tools, this.table);
    this.#drawAll();
  }

  /** @param {Report | null} report */
  show(report) {
    this.#report = report;
    this.#drawAll();
  }

  /** What the node says beside the report, with a button for what it offers; null where there is nothing. @param {import("./result.mjs").Result | null} result */
  tell(result) {
    this.said.hidden = !result;
    this.told.textContent = result ? said(result.sentence) : "";
    this.told.dataset.tone = result?.tone ?? "";
    this.#use = result?.use ?? null;
    this.offer.hidden = !this.#use;
  }

  /** Show a guard's messages during a run; null once the report has them. @param {GuardMessage[] | null} messages */
  showLive(messages) {
    this.#live = messages;
    this.#drawGuard();
    const [pill] = this.head.querySelectorAll(".hs-verdict"); // of the run before
    if (pill) pill.hidden = Boolean(messages);
  }

  #drawAll() {
    const report = this.#report;
    if (report) paint(this.element, report);
    this.head.replaceChildren(...(report ? headOf(report) : [emptyHint()]));
    this.remarks.replaceChildren(...(report ? remarksOf(report) : []));
    this.tools.hidden = this.table.hidden = !report;
    this.#drawGuard();
    if (report) this.#drawTable(report);
  }

  #drawGuard() {
    const lines = this.#live ? this.#live.map((message) => adviceLine(message, "")) : this.#report ? guardLines(this.#report) : [];
    this.guard.hidden = !this.#live && (this.#report?.guard.verdict ?? "off") === "off";
    const happened = this.#report && !this.#live ? happenedText(this.#report) : "";
    const calls = this.#live || !this.#report ? t("this run") : callsText(this.#report);
    this.guard.replaceChildren(el("h4", {}, t("Guard"), el("span", { class: "hs-dim", text: calls })), happened ? el("p", { class: "hs-happened", text: happened }) : "", ...firstOf(lines, this.guard));
  }

  #makeTools() {
    const input = el("input", {
      type: "search", class: "hs-filter", placeholder: t("Filter layers"), "aria-label": t("Filter layers"), spellcheck: "false",
      oninput: () => {
        this.#filter = input.value;
        if (this.#report) this.#drawTable(this.#report);
      },
    });
    this.count = el("span", { class: "hs-count", role: "status" });
    this.copy = el("button", { type: "button", class: "hs-button", text: t("Copy as rules"), onclick: () => this.#copyRules() });
    this.keep = el("button", { type: "button", class: "hs-button hs-keep", text: t("Keep for next run"), onclick: () => this.#keep() });
    this.manual = el("textarea", { class: "hs-manual", readonly: true, hidden: true, "aria-label": t("Rules"), rows: "4" });
    return el("div", { class: "hs-tools" }, input, this.count, this.copied, this.keepRules ? this.keep : null, this.copy, this.manual);
  }

  #keep() {
    if (!this.#report) return;
    this.keepRules?.(rulesText(this.#report));
    this.#say(t("Rules added: Ctrl+Z undoes it"));
  }

  /** @param {string} text */
  #say(text) {
    this.copied.textContent = text;
    setTimeout(() => this.copied.replaceChildren(), COPIED_MS);
  }

  async #copyRules() {
    if (!this.#report) return;
    const text = rulesText(this.#report);
    const count = this.#report.rules.split("\n").length;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      this.manual.hidden = false;
      this.manual.value = text;
      this.manual.select();
      return;
    }
    this.#say(count > 1 ? t("{count} lines copied", { count }) : t("1 line copied"));
  }

  /** @param {Report} report */
  #drawTable(report) {
    const layers = filterLayers(report.layers, this.#filter);
    const rows = sortRows(rowsOf(report, layers), this.#order);
    const [count, total] = [layers.length, report.layers.length];
    this.count.textContent = count < total ? t("{count} of {total}", { count, total }) : t("{count} layers", { count });
    const none = report.rules ? "" : t("All layers run the same way: there is no exception to copy");
    this.copy.disabled = this.keep.disabled = !report.rules;
    this.copy.title = none || t("Copies the layers that differ from the majority as lines for a Layer Rules node");
    this.keep.title = none || t("Writes the layers that differ from the majority into a Layer Rules node before this one");
    const body = el("tbody", { role: "rowgroup" }, ...rows.flatMap((row) => this.#rowElements(row, report)));
    if (!rows.length) body.append(emptyRow());
    this.table.replaceChildren(this.#headRow(), body);
  }

  #headRow() {
    const cells = columns().map(([column, label, title]) => {
      const sorted = this.#order?.column === column;
      const direction = sorted ? (this.#order?.descending ? "descending" : "ascending") : "none";
      const button = el("button", { type: "button", class: "hs-sort", text: label, onclick: () => this.#sortBy(column) });
      return el("th", { role: "columnheader", scope: "col", title, "data-column": column, "aria-sort": direction }, button);
    });
    return el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...cells));
  }

  /** Ascending, descending, then the model's own order again. @param {Column} column */
  #sortBy(column) {
    const again = this.#order?.column === column;
    if (!again) this.#order = { column, descending: false };
    else this.#order = this.#order?.descending ? null : { column, descending: true };
    if (this.#report) this.#drawTable(this.#report);
    this.table.querySelector(`th[data-column="${column}"] button`)?.focus();
  }

  /** @param {Row} row @param {Report} report */
  #rowElements(row, { guard, modes }) {
    const several = row.members.length > 1;
    const expandable = several || Boolean(row.reason);
    const key = `${row.name} ${row.storage} ${row.mode} ${row.reason}`;
    const open = this.#open.has(key);
    const toggle = () => {
      if (!this.#open.delete(key)) this.#open.add(key);
      if (this.#report) this.#drawTable(this.#report);
      this.table.querySelector(`button[data-key="${CSS.escape(key)}"]`)?.focus();
    };
    const name = nameOf(row.name);
    const count = several ? el("span", { class: "hs-times", text: `\u00d7${row.members.length}` }) : null;
    const label = expandable
      ? el("button", { type: "button", class: "hs-name", "aria-expanded": String(open), "data-key": key, onclick: toggle }, name, count)
      : el("span", { class: "hs-name" }, name);
    const main = layerRow(row, label, modes, row.members.some((layer) => layer.name in guard.escalations));
    return open ? [main, ...detailRows(row, several, modes)] : [main];
  }
}

/** @param {Row} row @param {boolean} several @param {Report["modes"]} modes */
function detailRows(row, several, modes) {
  const reason = el("td", { role: "cell", colspan: columns().length, text: said(row.reason) || t("The model's own dtype.") });
  return [
    el("tr", { role: "row", class: "hs-reason" }, reason),
    ...(several ? row.members : []).map((layer) => {
      const element = layerRow(layer, el("span", { class: "hs-name" }, nameOf(layer.name)), modes, false);
      element.classList.add("hs-member");
      return element;
    }),
  ];
}

/** @param {Layer} layer @param {HTMLElement} label @param {Report["modes"]} modes @param {boolean} escalated */
function layerRow(layer, label, modes, escalated) {
  const plain = modes[layer.mode]?.label;
  const note = [layer.name, layer.class, plain && t(plain), layer.kernel, said(layer.reason), escalated && t("escalated by the guard")].filter(Boolean).join("\n");
  const mode = el("td", { role: "cell", "data-column": "mode" }, swatch(layer.mode), modeText(layer.mode));
  if (escalated) mode.append(el("span", { class: "hs-up", "aria-label": t("escalated by the guard"), text: "\u2191" }));
  return el(
    "tr", { role: "row", title: note },
    el("td", { role: "rowheader", "data-column": "name" }, label),
    el("td", { role: "cell", "data-column": "class", text: layer.class }),
    el("td", { role: "cell", "data-column": "storage" }, swatch(layer.storage), layer.storage),
    mode,
    el("td", { role: "cell", "data-column": "accumulation", text: layer.accumulation }),
    el("td", { role: "cell", "data-column": "stream", text: layer.stream }),
    el("td", { role: "cell", "data-column": "kernel", text: layer.kernel }),
  );
}

/** @param {Report} report */
function rulesText({ model, rules }) {
  return `# ${model.class}\n${rules}\n`;
}

function emptyRow() {
  return el("tr", { role: "row" }, el("td", { role: "cell", class: "hs-none", colspan: columns().length, text: t("No layer matches the filter.") }));
}

function emptyHint() {
  return el("p", { class: "hs-hint", text: t("Run the workflow to see the storage and compute dtype of each layer, with the reason.") });
}

/** @param {Report} report */
export function headOf(report) {
  const { guard, model, view } = report;
  const size = t("{parameters} parameters, {size}", { parameters: view.parameters, size: view.size });
  return [
    el("div", { class: "hs-title" }, el("strong", { text: nameOfModel(report) }), verdictPill(verdictOf(guard, guard.events, guard.calls))),
    el("div", { class: "hs-sub", title: deviceText(report), text: deviceText(report) }),
    el("div", { class: "hs-sub", text: size }),
    shareBar(t("stored"), view.stored.map((part) => ({ ...part, detail: part.size }))),
    shareBar(report.guard.calls || report.ran ? t("computed") : t("planned"), view.computed.map((part) => ({ ...part, detail: t("{count} layers", { count: part.layers }) }))),
  ];
}

/** The class of a model, which says nothing of the pack's own. @param {Report} report */
function nameOfModel({ model, file }) {
  return file === BUILT_IN ? t("Halfsafe's built-in model") : model.class || t("unknown model");
}

/** @param {Report} report */
function guardLines(report) {
  const { guard } = report;
  const escalations = Object.entries(guard.escalations).map(([layer, mode]) =>
    el("div", { class: "hs-event" }, swatch(mode), el("span", {}, el("bdi", { text: layer }), ` \u2192 ${modeText(mode)}`)),
  );
  const checks = guard.checks.map((check) => el("div", { class: "hs-event" }, el("span", { class: "hs-dim", text: checkText(check) })));
  const events = guard.events.map((event) => eventLine(event.recovered && event.kind !== "drift", outcomeText(event), event.kind === "drift" ? event.advice : "", detailOf(event)));
  return [...escalations, ...events, ...checks];
}

/** @param {Report} report */
function callsText({ guard }) {
  return t("{calls} calls, {repeated} repeats", { calls: guard.calls, repeated: guard.extra_calls });
}

/** A line without the advice that was given already. @param {GuardMessage} message @param {string} given */
export function adviceLine(message, given) {
  const { event, advice } = message;
  return eventLine(event ? event.recovered : aboutOf(message).repaired, said(message.brief), advice === given ? "" : advice, message.message);
}

/** "sigma 0.7031, mul" @param {import("./report.mjs").GuardEvent} event */
function detailOf({ sigma, op }) {
  return [typeof sigma === "number" ? `sigma ${Number(sigma.toPrecision(4))}` : "", op].filter(Boolean).join(", ");
}

/** @param {boolean} recovered @param {string} text @param {string} advice @param {string} title */
function eventLine(recovered, text, advice, title) {
  const mark = el("span", { class: "hs-mark", "data-recovered": String(recovered), "aria-hidden": "true" });
  return el("div", { class: "hs-event", title: title || null }, mark, el("span", {}, text, advice ? el("span", { class: "hs-dim", text: following(text, said(advice)) }) : null));
}

/** @param {Report} report */
function remarksOf(report) {
  const without = report.without_effect.map(({ setting, reason }) => el("li", {}, el("code", { text: setting }), ` ${said(reason)}`));
  const notes = report.notes.map((note) => el("li", { text: said(note) }));
  const controls = report.control_nets.map((control) => el("li", { text: controlText(control) }));
  const why = Object.entries(report.decisions ?? {}).map(([what, text]) => el("li", {}, el("code", { text: what }), ` ${said(text)}`));
  const remarks = [
    remark(t("Why"), why),
    remark(t("Without effect here"), without),
    remark(t("Guards of VAEs and text encoders"), report.encoders.map(encoderLine), report.encoders.some((encoder) => ["warn", "bad"].includes(aboutOf(encoder).tone))),
    remark(t("ControlNets"), controls),
    remark(t("Notes"), notes),
  ];
  return remarks.filter((part) => part !== null);
}

/** @param {import("./report.mjs").Encoder} encoder */
function encoderLine({ kind, node, messages, advice, calls = 0, ...judged }) {
  return el("li", {}, `${said(kind)} (${t("node {node}", { node })}) `, verdictPill(verdictOf(judged, [null], calls)), ` ${together([...messages, advice].map(said))}`);
}

/** @param {string} title @param {HTMLElement[]} items */
function remark(title, items, open = false) {
  if (!items.length) return null;
  return el("details", { class: "hs-remark", open }, el("summary", { text: `${title} (${items.length})` }), el("ul", {}, ...items));
}
