// @ts-check
/** Halfsafe in ComfyUI's page: the report on its node, badges, toasts and a sidebar tab. */
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { addStyles, markEarlier } from "./dom.mjs";
import { ReportPanel } from "./panel.mjs";
import { clearProgress, noteSize, sayProgress } from "./progress.mjs";
import { reportIn } from "./report.mjs";
import { noticesOf, ResultPanel, resultIn, toastsOf } from "./result.mjs";
import { RulesNote } from "./rules.mjs";
import { errorOf, isWider, RunLog, toastFor, toastOf } from "./run.mjs";
import { allNodes, isPlannedAnew, keepRules, showMe, showNodes, showWhole, upstream } from "./graph.mjs";
import { guardWorkflow, isGuard, unguardWorkflow, whereText } from "./guard.mjs";
import { isMeasure, isTaken, measureWorkflow, unmeasureWorkflow, useMeasured } from "./measure.mjs";
import { canBeHalved, halveMemory, isHalved, putLoadersBack, whyUnread } from "./memory.mjs";
import { Sidebar } from "./sidebar.mjs";
import { Tabs } from "./tabs.mjs";
import { Timing } from "./timing.mjs";
import { ourToast, Toasts } from "./toasts.mjs";
import { answerIn, inTwo, keep, loadWords, said, t, together } from "./words.mjs";

const EXTENSION = "halfsafe.page";
const PREFIX = "Halfsafe";
const ONE_NODE = "HalfsafeAutoPrecision";
const SUMS = "HalfsafeAccumulation";
const WITH_REPORT = ["HalfsafeReport", ONE_NODE];
/** The nodes that show their result, and how high in pixels: a table more than a sentence. @type {Record<string, number>} */
const WITH_RESULT = {
  HalfsafeDeviceInfo: 120, HalfsafeCheckFinite: 120, HalfsafeSaveModel: 120, HalfsafeCalibrate: 120,
  HalfsafeAnalyzeLayers: 300, HalfsafeMeasurePrecisions: 300, HalfsafeCompareImages: 300,
};
const RULES = "rules";
const TOASTS = "halfsafe.toasts";
const BADGES = "halfsafe.badges";
const WATCH = "Halfsafe.WatchEveryRun";
/** A storage of the widgets that offer some which older versions of ComfyUI do not run. */
const LOW_BITS = "w4a8";
/** The id of a guard that the setting puts behind a node, as watch.py names it. */
const WATCHED = /^halfsafe_(.+)_\d+$/;
const BADGE_COLORS = { fgColor: "#ffffff", bgColor: "#1d5c52" };
/** What the canvas leaves between badges, in pixels. */
const BADGE_GAP = 2;
const BETWEEN_WORDS = " \u00b7 ";
const PANEL_SIZE = [460, 360];
const PANEL_MIN_HEIGHT = 240;
const RESULT_SIZE = [420, 300];

const tabs = new Tabs(app);
const log = new RunLog(drawRun);
/** @type {WeakMap<any, {panel: ReportPanel, output: any, hasRun: boolean, report: import("./report.mjs").Report | null}>} */
const panels = new WeakMap();
/** A report's text -> the run that made it, and how many of that run's events it tells: the page makes panels anew at any time.
 * @type {Map<string, {promptId: string, seen: number}>} */
const told = new Map();
/** @type {WeakMap<any, {panel: ResultPanel, output: any}>} */
const results = new WeakMap();
/** The token of a node's result -> the report of its last run, which takes the place of the one as planned, and the prompt of that run.
 * @type {Map<string, {report: string, promptId: string}>} */
const ran = new Map();
/** A tab -> a node whose model ran otherwise than planned -> in what, until it runs anew: what the server sends of a cached one says what was planned.
 * @type {WeakMap<object, Map<string, (mode: string) => string>>} */
const ranIn = new WeakMap();
/** A node's key in the open workflow -> the element of ours that was last shown there. @type {Map<string, HTMLElement>} */
const shownAt = new Map();
const toasts = new Toasts(() => app.extensionManager, TOASTS);
/** The words of badges by their nodes' keys. Nodes 2.0 keeps the badges of the node that had the same id before the workflow was opened anew. @type {Map<string, string>} */
const badgeTexts = new Map();
/** Our sidebar tab. The page asks for it at any time, and gets the same. @type {Sidebar | null} */
let sidebar = null;
/** Whether the sidebar is to be drawn in the next frame. */
let isDue = false;
/** What this device can do, to be said in the page's language, and the storages that this ComfyUI does not run with the version that does.
 * @type {(import("./result.mjs").Result & {refused: string[], later: Record<string, string>, int8_gains: boolean}) | null} */
let device = null;
/** The question what this device can do, until it has failed. @type {Promise<void> | null} */
let asking = null;
/** What ComfyUI does here, as the server said when the sidebar was opened or a run ended. @type {import("./sidebar.mjs").Fact[]} */
let here = [];
let timing = new Timing();
/** Our sidebar tab as the page keeps it: Nodes 2.0 draws a badge again when what the badge read from here changes. */
let watched = { revision: 0, tooltip: "" };

/** A badge's words, those with a translation in the page's language. @param {any} node @param {any} output */
function badgeText(node, output) {
  const words = (output?.halfsafe_badge?.[0] ?? "").split(BETWEEN_WORDS);
  const [, other] = [...(ranIn.get(tabs.open) ?? [])].find(([id]) => nodeById(id) === node) ?? [];
  if (words[0] && isEarlier(node, output)) words.unshift("of an earlier run");
  else if (isPlannedAnew(node)) words.splice(1, 1);
  else if (words[1] && other) words[1] = other(words[1]);
  else if (words[1] && log.of(tabs.open)?.state === "running" && node.comfyClass !== SUMS) words[1] = t("plans {mode}", { mode: words[1] });
  return words.map(said).join(BETWEEN_WORDS);
}

function tabTooltip() {
  return t("Halfsafe: guards and precision reports");
}

/** The key of a node in `app.nodeOutputs`. @param {any} node */
function locatorOf(node) {
  const graph = node.graph;
  return !graph || graph.isRootGraph ? String(node.id) : `${graph.id}:${node.id}`;
}

/** Every Halfsafe node of the workflow. */
function ownNodes() {
  return allNodes(app).filter((node) => node.comfyClass?.startsWith(PREFIX));
}

/** @param {any} node @param {string} name @param {HTMLElement} element @param {number} minHeight @param {number[]} size */
function addWidget(node, name, element, minHeight, size) {
  const widget = node.addDOMWidget(name, name, element, { serialize: false, hideInPanel: true, getMinHeight: () => minHeight });
  widget.serialize = false;
  const [width, height] = node.computeSize();
  node.setSize([Math.max(node.size[0], size[0], width), Math.max(node.size[1], size[1], height)]);
}

/** @param {any} node */
function addResult(node) {
  const height = WITH_RESULT[node.comfyClass];
  const panel = new ResultPanel(height, (use) => useOf(node, use));
  addWidget(node, "halfsafe_result", panel.element, height, RESULT_SIZE);
  results.set(node, { panel, output: undefined });
}

/** Put what a node's result offers into the workflow. @param {any} node @param {import("./measure.mjs").Use} use */
async function useOf(node, use) {
  answer(await useMeasured(app, node, use));
}

/** @param {any} node */
function addPanel(node) {
  const panel = new ReportPanel(node.comfyClass === ONE_NODE ? (rules) => keepRules(app, node, rules) : null, (use) => useOf(node, use));
  addWidget(node, "halfsafe_report", panel.element, PANEL_MIN_HEIGHT, PANEL_SIZE);
  panels.set(node, { panel, output: undefined, hasRun: false, report: null });
}

/** Give a node our badge, also a loader of ComfyUI's in whose place one of ours may stand. @param {any} node */
function addBadge(node) {
  const shown = new window.LGraphBadge({ text: "", ...BADGE_COLORS });
  let key = "";
  const badge = () => {
    void watched.revision;
    if (node.graph) key = locatorOf(node);
    const text = app.extensionManager.setting.get(BADGES) ? badgeTexts.get(key) ?? "" : "";
    shown.text = window.LiteGraph.vueNodesMode ? text : fitting(text, node, shown, badge);
    return shown;
  };
  node.badges.push(badge);
}

/** What of a badge's words fits over its node beside the other badges: the first ones. Nodes 2.0 breaks the line. @param {string} text @param {any} node @param {any} shown the badge @param {() => any} own */
function fitting(text, node, shown, own) {
  const { ctx } = app.canvas;
  const width = (/** @type {any} */ badge) => badge.getWidth(ctx) + BADGE_GAP;
  const others = node.badges.filter((/** @type {any} */ badge) => badge !== own).map((/** @type {any} */ badge) => width(badge instanceof window.LGraphBadge ? badge : badge()));
  const room = node.width - others.reduce((/** @type {number} */ sum, /** @type {number} */ one) => sum + one, 0);
  const fits = (/** @type {string} */ part) => {
    shown.text = part;
    return width(shown) <= room;
  };
  const words = text.split(BETWEEN_WORDS);
  const parts = words.map((_, dropped) => words.slice(0, words.length - dropped).join(BETWEEN_WORDS));
  return parts.find(fits) ?? "";
}

/** Put the words of badges on their nodes. */
function showBadges() {
  const texts = new Map(ownNodes().map((node) => [locatorOf(node), badgeText(node, app.nodeOutputs[locatorOf(node)])]));
  if (JSON.stringify([...texts]) === JSON.stringify([...badgeTexts])) return;
  badgeTexts.clear();
  for (const [key, text] of texts) badgeTexts.set(key, text);
  watched.revision += 1;
}

/** Bring badges and panels to what `app.nodeOutputs` holds: after a run, a cached run, a change of the workflow or of the language. */
function showOutputs() {
  watched.tooltip = tabTooltip();
  showBadges();
  for (const node of ownNodes()) {
    const output = app.nodeOutputs[locatorOf(node)];
    keep(output?.halfsafe_messages?.[0]);
    showResult(node, output);
    putInPage(node);
    const entry = panels.get(node);
    const { body } = (entry ?? results.get(node))?.panel ?? {};
    if (body) markEarlier(body, isEarlier(node, output));
    const data = reportText(output);
    const hasRun = ran.has(output?.halfsafe_token?.[0]) || node.inputs.some((/** @type {any} */ { name, link }) => name === "after" && link !== null);
    if (!entry || (entry.output === data && entry.hasRun === hasRun)) continue;
    Object.assign(entry, { output: data, hasRun, report: reportIn(data) });
    if (entry.report) entry.report.ran = hasRun;
    entry.panel.show(entry.report);
  }
  app.graph?.setDirtyCanvas(true, true);
  drawRun();
}

/** Put a node's element into the page: Nodes 2.0 keeps that of the node which had the same id before the workflow was opened anew, as by undo. @param {any} node */
function putInPage(node) {
  const element = (panels.get(node) ?? results.get(node))?.panel.element;
  if (!element) return;
  const before = shownAt.get(locatorOf(node));
  if (before !== element && before?.isConnected) before.replaceWith(element);
  shownAt.set(locatorOf(node), element);
}

/** @param {any} node @param {any} output */
function showResult(node, output) {
  const entry = results.get(node);
  const data = output?.halfsafe_result?.[0];
  const result = resultIn(output);
  panels.get(node)?.panel.tell(isTaken(node, result) ? null : result);
  if (!entry || entry.output === data) return;
  entry.output = data;
  entry.panel.show(result);
}

/** The report in a node's output, or the one of the last run with it. @param {any} output @returns {string | undefined} */
function reportText(output) {
  return ran.get(output?.halfsafe_token?.[0])?.report ?? output?.halfsafe_report?.[0];
}

/** What decides how a run computes: the values of the pack's nodes, except those that only show a result, and of ComfyUI's loaders. */
function settings() {
  const deciding = allNodes(app).filter((node) => canBeHalved(node) || (node.comfyClass?.startsWith(PREFIX) && !(node.comfyClass in WITH_RESULT)));
  const valuesOf = (/** @type {any} */ { widgets = [] }) => widgets.filter((/** @type {any} */ { serialize }) => serialize !== false).map((/** @type {any} */ { value }) => value);
  return JSON.stringify(deciding.map((node) => [locatorOf(node), node.comfyClass, node.mode, valuesOf(node)]).sort());
}

/** Whether what a node shows is of a run before the last one of its workflow, which ended before this node or did not include it, or of a run with other settings. @param {any} node @param {any} output */
function isEarlier(node, output) {
  const run = log.of(tabs.open);
  if (!run || !output) return false;
  const asked = tabs.settingsOf(run.promptId);
  if (asked !== undefined && asked !== settings() && !results.has(node)) return true;
  if (run.state === "done" && !run.computed) return false;
  const last = ran.get(output.halfsafe_token?.[0]);
  return last ? last.promptId !== run.promptId : ![...run.held].some((id) => nodeById(id) === node);
}

/** The run of a prompt, while it is the last one. @param {string} promptId */
function runOf(promptId) {
  return log.run?.promptId === promptId ? log.run : null;
}

/** @param {any} detail of an `executed` event */
function noteExecuted(detail) {
  const run = runOf(detail.prompt_id);
  const id = String(detail.node);
  const isAnew = !run?.cached.has(id);
  keep(detail.output?.halfsafe_messages?.[0]);
  const result = resultIn(detail.output);
  const notices = noticesOf(detail.output);
  if (run?.tab && isAnew) ranIn.get(run.tab)?.delete(id);
  run?.held.add(id);
  if (result) run?.results.set(id, result);
  if (notices.length) run?.notices.set(id, notices);
  if (isAnew) for (const toast of [...toastsOf(result), ...notices]) tell(toast);
  if (!detail.output?.halfsafe_token) noteTold(detail.prompt_id, detail.output?.halfsafe_report?.[0]);
  showOutputs();
}

/** @param {any} detail of a `halfsafe.report` event */
function noteRan({ prompt_id: promptId, token, report }) {
  ran.set(token, { report, promptId });
  noteTold(promptId, report);
  showOutputs();
}

/** @param {string} promptId @param {string | undefined} report */
function noteTold(promptId, report) {
  const run = runOf(promptId);
  if (report && run) told.set(report, { promptId, seen: run.events.length });
}

/** @param {any} detail of an `execution_start` event */
function noteStart(detail) {
  told.clear();
  toasts.clear();
  sidebar?.tell("");
  timing = new Timing();
  log.start(detail.prompt_id, tabOf(detail.prompt_id)).forEach((toast) => tell(toast));
  showOutputs();
}

/** The nodes of a prompt whose results are older, and of its run all the same. @param {any} detail of an `execution_cached` event */
function noteCached(detail) {
  const run = runOf(detail.prompt_id);
  for (const id of run ? detail.nodes.map(String) : []) {
    run?.cached.add(id);
    run?.held.add(id);
  }
}

/** The tab of a prompt. One of before this page was opened is of the open tab, unless it names another workflow. @param {string} promptId @param {string} [workflow] the id of its graph @returns {object | null} */
function tabOf(promptId, workflow = "") {
  const graph = String((app.graph?.rootGraph ?? app.graph)?.id ?? "");
  return tabs.of(promptId) ?? (workflow && workflow !== graph ? null : tabs.open);
}

/** Live guard lines on the reports whose model comes from that guard: those the report does not have yet. */
function drawRun() {
  const { promptId = "", events = [] } = log.of(tabs.open) ?? {};
  for (const node of ownNodes()) {
    const entry = panels.get(node);
    if (!entry) continue;
    const before = upstream(node);
    const report = told.get(entry.output);
    const unseen = events.slice(report?.promptId === promptId ? report.seen : 0);
    const live = unseen.filter(({ node_id: id }) => id === null || String(id).includes(":") || before.has(String(id)));
    entry.panel.showLive(live.length ? live : null);
  }
  drawTab();
}

/** @param {string} id */
function nodeById(id) {
  const [, watched] = WATCHED.exec(id) ?? [];
  if (watched) return allNodes(app).find((node) => String(node.id) === watched);
  return allNodes(app).find((node) => locatorOf(node) === id) ?? allNodes(app).find((node) => locatorOf(node).endsWith(`:${id.split(":").at(-1)}`));
}

/** Draw the sidebar in the next frame: nodes come and go by the dozen, and a tab is open only after its graph. */
function drawSoon() {
  if (isDue || !sidebar) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    drawTab();
  });
}

/** Draw the sidebar where it is seen. */
function drawTab() {
  if (sidebar?.element.isConnected) drawSidebar(sidebar);
}

/** @param {Sidebar} one */
function drawSidebar(one) {
  const tab = tabs.open;
  const isWaiting = log.isWaiting(tab);
  const reports = ownNodes().flatMap((node) => {
    const { report = null } = panels.get(node) ?? {};
    return report ? [{ id: locatorOf(node), title: node.title, report, earlier: isEarlier(node, app.nodeOutputs[locatorOf(node)]) }] : [];
  });
  const watching = app.extensionManager.setting.get(WATCH) ?? "off";
  const nodes = allNodes(app);
  const unguard = nodes.some(isGuard) ? () => unguardWorkflow(app) : null;
  const unmeasure = nodes.some(isMeasure) ? () => unmeasureWorkflow(app) : null;
  const unhalve = nodes.some(isHalved) ? () => putLoadersBack(app) : null;
  const actions = { showMe: () => showMe(app), guard: () => guardWorkflow(app), unguard, measure: () => measureWorkflow(app), unmeasure, halve: () => halveMemory(app, api), unhalve, watch: (/** @type {string} */ value) => app.extensionManager.setting.set(WATCH, value) };
  const ability = device ? together([...device.refused.map(said), said(device.sentence)]) : asking ? t("Detecting the device ...") : t("ComfyUI does not answer.");
  const about = { device: ability, gains: device?.int8_gains ?? false, here, took: timing.text };
  const waiting = { refused: log.refused(tab), isWaiting };
  one.draw(isWaiting ? null : log.of(tab), reports, { ...about, ...waiting, watching, tab, nodes, redraw: drawTab, ...actions }, { titleOf: (id) => nodeById(id)?.title ?? t("Guard"), has: (id, result) => Boolean(nodeById(id)) && !isTaken(nodeById(id), result), use: (id, use) => useMeasured(app, nodeById(id), use), goTo });
}

/** Show the node of a card, and say where that is if the page shows another graph then. @param {string} id */
async function goTo(id) {
  const node = nodeById(id);
  if (!node) return;
  const before = app.canvas.graph;
  await showNodes(app, [node]);
  sidebar?.tell(node.graph === before ? "" : whereText(node.graph));
  drawTab();
}

/** @param {any} message a `halfsafe.guard` event's detail */
function onGuard(message) {
  const tab = tabOf(message.prompt_id, message.workflow);
  if (message.kind === "taken_back") {
    forgetRanIn(tab, [message.planner, message.node_id]);
    return;
  }
  const toast = toastFor(message, log.add(message, tab));
  if (toast) {
    log.run?.toasts.push(toast);
    tell(toast);
  }
  if (message.fell_back) noteRanIn(tab, message.fell_back, () => "fp16_safe");
  else if (isWider(message) && !WATCHED.test(message.node_id)) noteRanIn(tab, String(message.node_id), (mode) => t("{mode}, some layers wider", { mode }));
}

/** Let a node's badge say what its model goes on in. @param {object | null} tab @param {string} id @param {(planned: string) => string} mode */
function noteRanIn(tab, id, mode) {
  if (!tab) return;
  ranIn.set(tab, (ranIn.get(tab) ?? new Map()).set(id, mode));
  showOutputs();
}

/** Let badges say again what was planned: what the model was to go on in failed. @param {object | null} tab @param {(string | null)[]} ids */
function forgetRanIn(tab, ids) {
  if (!tab) return;
  ids.forEach((id) => ranIn.get(tab)?.delete(String(id)));
  showOutputs();
}

/** Show a message beside the graph, where the sidebar does not say it. @param {import("./toasts.mjs").Toast} toast @param {object | null} [tab] that it is of */
function tell(toast, tab = log.run?.tab ?? tabs.open) {
  if (!sidebar?.element.isConnected || tab !== tabs.open) toasts.show(toast);
}

/** @param {any} detail of the event that ends a run @param {"done" | "failed"} state @param {import("./run.mjs").RunError | null} [error] */
function noteEnd(detail, state, error = null) {
  log.end(detail.prompt_id, state, error).forEach((toast) => tell(toast));
  clearProgress(allNodes(app));
  timing.begin("");
  showOutputs();
  if (sidebar?.element.isConnected) askHere();
}

/** @param {any} detail of an `execution_error` event */
function onError(detail) {
  const error = errorOf(detail, runOf(detail.prompt_id));
  noteEnd(detail, "failed", error);
  if (!error.told) tell(toastOf(error));
  else if (!error.guard) explain(error, log.run?.tab);
}

/** Name the damaged file where ComfyUI's loader said only how reading it failed. @param {import("./run.mjs").RunError} error @param {object | null | undefined} tab */
async function explain(error, tab) {
  const node = tab === tabs.open ? nodeById(error.node) : null;
  const why = node ? await whyUnread(api, node).catch(() => "") : "";
  if (!why) return;
  Object.assign(error, inTwo(why));
  tell(toastOf(error));
  drawTab();
}

/** @param {string} event @param {(detail: any) => void} act */
function on(event, act) {
  api.addEventListener(event, (/** @type {CustomEvent} */ { detail }) => {
    keep(detail?.messages);
    act(detail);
  });
}

/** Tell the server the setting that guards every run, for the prompts that this page queues. @param {string} watch */
function sendSetting(watch) {
  const told = { client_id: api.clientId, on_nan: watch };
  if (api.clientId) api.fetchApi("/halfsafe/watch", { method: "POST", body: JSON.stringify(told) });
}

/** @param {any} detail of a `halfsafe.refused` event */
function noteRefused({ message }) {
  const tab = tabs.asking;
  tabs.settle();
  tell(log.refuse(tab, message), tab);
}

/** Take away what is told of the past, and tell a server that may have been started since the last time. */
function notePress() {
  tabs.press(settings());
  if (log.press(tabs.open)) toasts.clear();
  sendSetting(app.extensionManager.setting.get(WATCH));
}

function listen() {
  on("halfsafe.guard", onGuard);
  on("halfsafe.report", noteRan);
  on("halfsafe.badge", ({ node_id: id, words }) => noteRanIn(log.run?.tab ?? tabs.open, String(id), (mode) => [mode, ...words.map(said)].join(BETWEEN_WORDS)));
  on("halfsafe.refused", noteRefused);
  on("halfsafe.messages", () => {});
  on("reconnected", () => {
    asking = null;  // it may have been started with other options
    askAll();
  });
  on("graphChanged", showOutputs);
  on("promptQueueing", notePress);
  on("promptQueued", () => tabs.settle());
  on("progress_text", () => sayProgress(allNodes(app)));
  on("execution_start", noteStart);
  on("executing", (id) => {
    if (id && log.run) log.run.computed = true;
    clearProgress(allNodes(app).filter((node) => locatorOf(node) !== String(id)));
    noteSize(id && nodeById(String(id)));
    timing.begin((id && nodeById(String(id))?.comfyClass) ?? "");
  });
  on("progress", ({ value }) => timing.step(value));
  on("execution_success", (detail) => noteEnd(detail, "done"));
  on("execution_error", onError);
  on("execution_cached", noteCached);
  on("execution_interrupted", (detail) => noteEnd(detail, "failed"));
  on("executed", noteExecuted);
}

/** Let the sidebar follow a node that comes and goes. @param {any} node */
function redrawAt(node) {
  for (const event of ["onAdded", "onRemoved"]) {
    const before = node[event];
    node[event] = function (/** @type {any[]} */ ...given) {
      drawSoon();
      return before?.apply(this, given);
    };
  }
}

/** What the server answers; null where it does not. @param {string} route @returns {Promise<any>} */
async function answerOf(route) {
  try {
    const response = await api.fetchApi(route);
    return response.ok ? await answerIn(response) : null;
  } catch {
    return null;
  }
}

/** Ask what this device can do: once, and again where ComfyUI did not answer. */
function askDevice() {
  asking ??= answerOf("/halfsafe/device").then((answer) => {
    device = answer;
    if (!answer) asking = null;
    drawTab();
  });
  return asking;
}

/** Let a storage that this ComfyUI does not run say which one does. @param {any} node */
async function labelStorages({ widgets = [] }) {
  const offering = widgets.filter((/** @type {any} */ { options }) => options?.values?.includes?.(LOW_BITS));
  if (!offering.length) return;
  await askDevice();
  const label = (/** @type {string} */ storage) => {
    const needs = device?.later[storage];
    return needs ? t("{storage} (from ComfyUI {needs} on)", { storage, needs }) : storage;
  };
  if (Object.keys(device?.later ?? {}).length) for (const { options } of offering) options.getOptionLabel = label;
}

/** Say what was done outside of the sidebar. @param {import("./measure.mjs").Told} told */
function answer(told) {
  const done = typeof told === "string" ? told : told.text;
  sidebar?.tell(done);
  tell(ourToast("success", done, "", 6000), tabs.open);
  drawTab();
}

/** What the context menu of a loader offers. @param {any} node */
function loaderMenu(node) {
  const item = (/** @type {string} */ content, /** @type {() => Promise<import("./measure.mjs").Told>} */ act) => ({ content, callback: async () => answer(await act()) });
  if (isHalved(node)) return [item(t("Put ComfyUI's loader back"), () => putLoadersBack(app, node))];
  return canBeHalved(node) ? [item(t("Halve the memory"), () => halveMemory(app, api, node))] : [];
}

function askAll() {
  askDevice();
  askHere();
}

async function askHere() {
  here = (await answerOf("/halfsafe/here"))?.facts ?? [];
  drawTab();
}

function addSidebarTab() {
  app.extensionManager.registerSidebarTab({
    id: "halfsafe",
    revision: 0,
    icon: "pi pi-shield",
    title: "Halfsafe",
    tooltip: tabTooltip(),
    type: "custom",
    render: (/** @type {HTMLElement} */ container) => {
      sidebar ??= new Sidebar();
      if (sidebar.element.parentElement !== container) container.replaceChildren(sidebar.element);
      askAll();
      drawSidebar(sidebar);
    },
  });
  watched = app.extensionManager.getSidebarTabs().find((/** @type {any} */ tab) => tab.id === "halfsafe");
}

app.registerExtension({
  name: EXTENSION,
  settings: [
    {
      id: TOASTS,
      category: [PREFIX, "Page", "Toasts"],
      name: "Show a message when a guard acts",
      tooltip: "One for each cause in a run.",
      type: "boolean",
      defaultValue: true,
    },
    {
      id: WATCH,
      category: [PREFIX, "Runs", "Watch"],
      name: "Guard every run, without a node",
      tooltip: "Watches the models and VAEs of every workflow that has no guard.",
      type: "combo",
      options: [
        { value: "off", text: "off" },
        { value: "report", text: "report: show NaN and Inf; a black picture stays black" },
        { value: "retry_higher", text: "retry_higher: repeat failed calls in a higher precision; stop if that cannot help" },
      ],
      defaultValue: "off",
      onChange: (/** @type {string} */ value) => {
        sendSetting(value);
        drawTab();
      },
    },
    {
      id: BADGES,
      category: [PREFIX, "Page", "Badges"],
      name: "Show the dtypes in use on Halfsafe's nodes",
      tooltip: "A badge on each loader and dtype node, after a run.",
      type: "boolean",
      defaultValue: true,
      onChange: () => app.graph?.setDirtyCanvas(true, true),
    },
  ],
  async setup() {
    await addStyles();
    await loadWords(api, () => app.extensionManager.setting.get("Comfy.Locale"));
    listen();
    tabs.watch(showOutputs);
    addSidebarTab();
  },
  nodeCreated(/** @type {any} */ node) {
    redrawAt(node);
    if (canBeHalved(node)) addBadge(node);
    if (!node.comfyClass?.startsWith(PREFIX)) return;
    if (WITH_REPORT.includes(node.comfyClass)) addPanel(node);
    if (node.comfyClass in WITH_RESULT) addResult(node);
    if (node.widgets?.some((/** @type {any} */ widget) => widget.name === RULES)) new RulesNote(node, api, () => app.graph?.setDirtyCanvas(true, true));
    addBadge(node);
    labelStorages(node);
  },
  getNodeMenuItems: loaderMenu,
  afterConfigureGraph: () => {
    showOutputs();
    return showWhole(app);
  },
  onNodeOutputsUpdated: showOutputs,
});
