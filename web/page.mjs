// @ts-check
/** What the pack knows in ComfyUI's page, in one object: runs, results and reports of each tab, this device, and what can be done. The sidebar reads it; main.js keeps it. */
import { allNodes, listOf, RUNS, setWidget, showMe, showNodes, undoable } from "./graph.mjs";
import { guardsModel, guardWorkflow, isGuard, unguardWorkflow, whereText } from "./guard.mjs";
import { isMeasure, isTaken, measureWorkflow, unmeasureWorkflow, useMeasured } from "./measure.mjs";
import { canBeHalved, halveMemory, isHalved, putLoadersBack } from "./memory.mjs";
import { askForMissing, HOLDS, missingFiles, refusedFiles } from "./missing.mjs";
import { Progress } from "./progress.mjs";
import { RunLog } from "./run.mjs";
import { Tabs } from "./tabs.mjs";
import { Timing } from "./timing.mjs";
import { Toasts } from "./toasts.mjs";
import { answerIn, t } from "./words.mjs";

export const PREFIX = "Halfsafe";
const TOASTS = "halfsafe.toasts";
export const WATCH = "Halfsafe.WatchEveryRun";
/** What a guard is set to that repeats failed calls. */
const REPAIRS = "retry_higher";
const PAUSE_MS = 1000;
/** The id of a guard that the setting puts behind a node, as watch.py names it. */
export const WATCHED = /^halfsafe_(.+)_\d+$/;

/**
 * @typedef {import("./result.mjs").Told} Told
 * @typedef {import("./run.mjs").Run} Run
 * @typedef {import("./report.mjs").Report} Report
 * @typedef {{what: string, here: string, switch: string}} Fact what ComfyUI does here, and the switch that changes it
 * @typedef {{id: string, title: string, report: Report, earlier: boolean}} NamedReport
 * @typedef {import("./result.mjs").Result & {refused: string[], later: Record<string, string>, int8_gains: boolean, storages: Record<string, {colour: string}>}} Device
 *   in a sentence; why attention or a kernel of this ComfyUI is not used; the storages that it does not run with the version that does; whether int8 is faster than 16 bits
 * @typedef {"showMe" | "guard" | "halve" | "measure"} ActName
 */

/** The key of a node in `app.nodeOutputs`. @param {any} node */
export function locatorOf(node) {
  const graph = node.graph;
  return !graph || graph.isRootGraph ? String(node.id) : `${graph.id}:${node.id}`;
}

export class Page {
  /** Our sidebar tab. ComfyUI's page may render it at any time, and is given the same object. @type {import("./sidebar.mjs").Sidebar | null} */
  sidebar = null;
  /** What this device can do; null before the answer and where ComfyUI does not answer. @type {Device | null} */
  device = null;
  /** The question what this device can do, until it has failed. @type {Promise<void> | null} */
  asking = null;
  /** What ComfyUI does here, as the server said when the sidebar was opened or a run ended. @type {Fact[]} */
  here = [];
  timing = new Timing();
  progress = new Progress();
  /** What the server lists for nodes that name a file which the page's own list lacks. @type {import("./missing.mjs").Lists} */
  lists = new Map();
  /** A text of rules -> what the server read in it: the page makes nodes anew at any time. @type {Map<string, import("./rules.mjs").Reading>} */
  readings = new Map();
  /** Report panels by node, with what of `app.nodeOutputs` they show. @type {WeakMap<any, {panel: import("./panel.mjs").ReportPanel, output: any, hasRun: boolean, report: Report | null}>} */
  panels = new WeakMap();
  /** @type {WeakMap<any, {panel: import("./result.mjs").ResultPanel, output: any}>} */
  results = new WeakMap();
  /** A report's text -> the run that made it, and how many of that run's events it tells: the page makes panels anew at any time. @type {Map<string, {promptId: string, seen: number}>} */
  told = new Map();
  /** The token of a node's result -> the report of its last run, which takes the place of the one as planned, and the prompt of that run. @type {Map<string, {report: string, promptId: string}>} */
  ran = new Map();
  /** A tab -> a node whose model ran otherwise than planned -> in what, until it runs anew: what the server sends of a cached one says what was planned.
   * @type {WeakMap<object, Map<string, (mode: string) => string>>} */
  ranIn = new WeakMap();
  /** A node's key in the open workflow -> the element of ours that was last shown there. @type {Map<string, HTMLElement>} */
  shownAt = new Map();
  /** The words of badges by their nodes' keys. Nodes 2.0 keeps the badges of the node that had the same id before the workflow was opened anew. @type {Map<string, string>} */
  badgeTexts = new Map();
  /** Our sidebar tab as the page keeps it: Nodes 2.0 draws a badge again when what the badge read from here changes. */
  tabEntry = { revision: 0, tooltip: "" };
  /** Whether the sidebar is to be drawn in the next frame. */
  #isDue = false;
  /** The next question for files that were missing. @type {ReturnType<typeof setTimeout> | undefined} */
  #asksAgain;
  /** The next drawing while a run has not begun. */
  #again = 0;

  /** @param {any} app @param {any} api @param {() => void} onRun called on every change of a run */
  constructor(app, api, onRun) {
    this.app = app;
    this.api = api;
    this.tabs = new Tabs(app);
    this.log = new RunLog(onRun);
    this.toasts = new Toasts(() => app.extensionManager, TOASTS);
  }

  /** The tab that is open. */
  get tab() {
    return this.tabs.open;
  }

  /** The last run of the open tab; null where there was none, or Run was pressed since. */
  get run() {
    return this.isWaiting ? null : this.log.of(this.tab);
  }

  /** Whether Run was pressed and nothing has begun. */
  get isWaiting() {
    return this.log.isWaiting(this.tab);
  }

  /** Why what was pressed does not start. */
  get refused() {
    return this.log.refused(this.tab);
  }

  /** Every node of the open workflow. @returns {any[]} */
  get nodes() {
    return allNodes(this.app);
  }

  /** The files without which the workflow does not run. */
  get missing() {
    return missingFiles(this.lists, this.nodes, this.isWaiting ? refusedFiles(this.app.lastNodeErrors, this.nodes, (id) => this.nodeById(id)) : []);
  }

  /** The nodes that are Halfsafe's. */
  get ownNodes() {
    return this.nodes.filter(({ comfyClass }) => comfyClass?.startsWith(PREFIX));
  }

  /** The setting that guards every run. @returns {string} */
  get watching() {
    return this.app.extensionManager.setting.get(WATCH) ?? "off";
  }

  /** @param {string} value */
  watch(value) {
    this.app.extensionManager.setting.set(WATCH, value);
  }

  /** What lets a guard that only tells repair: the setting, or its node's widget; null where it repairs already, or cannot be set here. @param {string} id @returns {(() => Promise<Told>) | null} */
  repairBy(id) {
    const done = t("Set to retry_higher: run the workflow.");
    if (WATCHED.test(id)) return this.watching === REPAIRS ? null : async () => {
      this.watch(REPAIRS);
      return done;
    };
    const node = this.nodeById(id), widget = node?.widgets?.find((/** @type {any} */ one) => listOf(one).includes(REPAIRS));
    const isLinked = node?.inputs?.some((/** @type {any} */ { name, link }) => name === widget?.name && link != null);
    if (!widget || isLinked || widget.value === REPAIRS) return null;
    return async () => {
      await undoable(this.app, () => setWidget(node, widget.name, REPAIRS));
      return done;
    };
  }

  /** @returns {NamedReport[]} */
  get reports() {
    return this.ownNodes.flatMap((node) => {
      const { report = null } = this.panels.get(node) ?? {};
      return report ? [{ id: locatorOf(node), title: node.title, report, earlier: this.isEarlier(node, this.outputOf(node)) }] : [];
    });
  }

  /** What can be done with the open workflow, or undone where it is done. @returns {Record<ActName, {act: () => Promise<Told>, undo: (() => Promise<Told>) | null}>} */
  get acts() {
    const { app, api, nodes } = this;
    const undo = (/** @type {(node: any) => boolean} */ isIn, /** @type {() => Promise<Told>} */ act) => (nodes.some(isIn) ? act : null);
    return {
      showMe: { act: () => showMe(app), undo: null },
      guard: { act: () => guardWorkflow(app, this.run?.isBlack), undo: undo(isGuard, () => unguardWorkflow(app)) },
      halve: { act: () => this.halve(), undo: undo(isHalved, () => putLoadersBack(app)) },
      measure: { act: () => measureWorkflow(app), undo: undo(isMeasure, () => unmeasureWorkflow(app)) },
    };
  }

  /** Halve the memory, and show what that changed. @param {any} [only] one loader */
  async halve(only = null) {
    const before = new Set(this.nodes.filter(isHalved).map(locatorOf));
    const told = await halveMemory(this.app, this.api, only);
    const changed = this.nodes.filter((node) => isHalved(node) && !before.has(locatorOf(node)));
    if (changed.length) await showNodes(this.app, changed);
    return told;
  }

  /** Put what was measured best, or what the one node offers, into the workflow. @param {any} node of the result @param {import("./measure.mjs").Use} use */
  use(node, use) {
    return useMeasured(this.app, node, use);
  }

  /** @param {string} id @returns {any} */
  nodeById(id) {
    const [, watched] = WATCHED.exec(id) ?? [];
    if (watched) return this.nodes.find((node) => String(node.id) === watched);
    return this.nodes.find((node) => locatorOf(node) === id) ?? this.nodes.find((node) => locatorOf(node).endsWith(`:${id.split(":").at(-1)}`));
  }

  /** @param {string} id @returns {string} */
  titleOf(id) {
    return this.nodeById(id)?.title ?? t("Guard");
  }

  /** Whether a result of the last run is of a node that is there, and not taken. @param {string} id @param {import("./result.mjs").Result} result */
  has(id, result) {
    const node = this.nodeById(id);
    return Boolean(node) && !isTaken(node, result);
  }

  /** Show a node, and say where that is if the page shows another graph then. @param {string} id */
  async goTo(id) {
    const node = this.nodeById(id);
    if (!node) return;
    const before = this.app.canvas.graph;
    await showNodes(this.app, [node]);
    this.sidebar?.tell(node.graph === before ? "" : whereText(node.graph));
    this.draw();
  }

  /** @param {any} node */
  outputOf(node) {
    return this.app.nodeOutputs[locatorOf(node)];
  }

  /** The first picture of each node that shows one, by its key. @returns {Map<string, any>} */
  get pictures() {
    const found = this.nodes.map((node) => /** @type {[string, any]} */ ([locatorOf(node), this.outputOf(node)?.images?.[0]]));
    return new Map(found.filter(([, image]) => image?.filename));
  }

  /** The settings that decide how a run computes, as text: widget values of the pack's nodes, except nodes that only show a result, and of ComfyUI's loaders; without a guard node, also the setting *Guard every run*. */
  settings() {
    const deciding = this.nodes.filter((node) => canBeHalved(node) || (node.comfyClass?.startsWith(PREFIX) && !this.results.has(node)));
    const valuesOf = (/** @type {any} */ { widgets = [] }) => widgets.filter((/** @type {any} */ { serialize }) => serialize !== false).map((/** @type {any} */ { value }) => value);
    const watching = deciding.some((node) => guardsModel(node) && node.mode === RUNS) ? "" : this.watching;
    return JSON.stringify([watching, ...deciding.map((node) => [locatorOf(node), node.comfyClass, node.mode, valuesOf(node)]).sort()]);
  }

  /** Whether the last run was of other settings than the workflow has now. */
  get isPast() {
    const { run } = this, asked = run ? this.tabs.settingsOf(run.promptId) : undefined;
    return asked !== undefined && asked !== this.settings();
  }

  /** Whether what a node shows is of a run before the last one of its workflow, which ended before this node or did not include it, or of a run with other settings. @param {any} node @param {any} output */
  isEarlier(node, output) {
    const run = this.log.of(this.tab);
    if (!run || !output) return false;
    const asked = this.tabs.settingsOf(run.promptId);
    if (asked !== undefined && asked !== this.settings() && !this.results.has(node)) return true;
    if (run.state === "done" && !run.computed) return false;
    const last = this.ran.get(output.halfsafe_token?.[0]);
    return last ? last.promptId !== run.promptId : ![...run.held].some((id) => this.nodeById(id) === node);
  }

  /** Draw the sidebar where it is seen. */
  draw() {
    if (!this.sidebar?.element.isConnected) return;
    this.sidebar.draw(this);
    clearTimeout(this.#again);
    if (this.isWaiting) this.#again = window.setTimeout(() => this.draw(), PAUSE_MS); // no event tells that ComfyUI refused a run
    this.#askForMissing();
  }

  /** Draw the sidebar where the server says something new of missing files, and ask again while one is missing: it may be put there at any time. */
  async #askForMissing() {
    clearTimeout(this.#asksAgain);
    if (!this.sidebar?.element.isConnected) return;
    if (await askForMissing(this.api, this.lists, this.nodes)) return this.draw();
    if (this.missing.length) this.#asksAgain = setTimeout(() => this.#askForMissing(), HOLDS);
  }

  /** Draw it in the next frame: nodes come and go by the dozen, and a tab is open only after its graph. */
  drawSoon() {
    if (this.#isDue || !this.sidebar) return;
    this.#isDue = true;
    requestAnimationFrame(() => {
      this.#isDue = false;
      this.draw();
    });
  }

  /** Ask what this device can do: once, and again where ComfyUI did not answer. */
  askDevice() {
    this.asking ??= this.#answerOf("/halfsafe/device").then((answer) => {
      this.device = answer;
      if (!answer) this.asking = null;
      this.draw();
    });
    return this.asking;
  }

  async askHere() {
    this.here = (await this.#answerOf("/halfsafe/here"))?.facts ?? [];
    this.draw();
  }

  /** What the server answers; null where it does not. @param {string} route @returns {Promise<any>} */
  async #answerOf(route) {
    try {
      const response = await this.api.fetchApi(route);
      return response.ok ? await answerIn(response) : null;
    } catch {
      return null;
    }
  }

  /** Show a message beside the graph, where the sidebar does not say it. @param {import("./toasts.mjs").Toast} toast @param {object | null} [tab] that it is of */
  tell(toast, tab = this.log.run?.tab ?? this.tab) {
    if (!this.sidebar?.element.isConnected || tab !== this.tab) this.toasts.show(toast);
  }
}
