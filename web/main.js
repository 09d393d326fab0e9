// @ts-check
/** Halfsafe in ComfyUI's page: the report on its node, badges, toasts and a sidebar tab. */
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { addStyles, el } from "./dom.mjs";
import { ReportPanel } from "./panel.mjs";
import { clearProgress, noteSize, sayProgress } from "./progress.mjs";
import { reportIn } from "./report.mjs";
import { noticesOf, ResultPanel, resultIn, sentenceOf, toastsOf } from "./result.mjs";
import { RulesNote } from "./rules.mjs";
import { errorOf, isWider, RunLog, toastFor, toastOf } from "./run.mjs";
import { allNodes, isPlannedAnew, keepRules, showMe, showNodes, showWhole, upstream } from "./graph.mjs";
import { guardWorkflow, isGuard, unguardWorkflow } from "./guard.mjs";
import { isMeasure, measureWorkflow, unmeasureWorkflow } from "./measure.mjs";
import { canBeHalved, halveMemory, isHalved, putLoadersBack } from "./memory.mjs";
import { drawSidebar } from "./sidebar.mjs";
import { Timing } from "./timing.mjs";
import { Toasts } from "./toasts.mjs";
import { loadWords, said, t, together } from "./words.mjs";

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
/** The id of a guard that the setting puts behind a node, as watch.py names it. */
const WATCHED = /^halfsafe_(.+)_\d+$/;
const BADGE_COLORS = { fgColor: "#ffffff", bgColor: "#1d5c52" };
const BETWEEN_WORDS = " \u00b7 ";
const PANEL_SIZE = [460, 480];
const PANEL_MIN_HEIGHT = 240;
const RESULT_SIZE = [420, 300];

const log = new RunLog(drawRun);
/** @type {WeakMap<any, {panel: ReportPanel, output: any, hasRun: boolean, report: import("./report.mjs").Report | null}>} */
const panels = new WeakMap();
/** A report's text -> the run that made it, and how many of that run's events it tells: the page makes panels anew at any time.
 * @type {Map<string, {promptId: string, seen: number}>} */
const told = new Map();
/** @type {WeakMap<any, {panel: ResultPanel, output: any}>} */
const results = new WeakMap();
/** The nodes of the running prompt whose results are older. @type {Set<string>} */
let cached = new Set();
/** The token of a node's result -> the report of its last run, which takes the place of the one as planned.
 * @type {Map<string, string>} */
const ran = new Map();
/** A node whose model ran otherwise than planned -> in what, until it runs anew: what the server sends of a cached one says what was planned.
 * @type {Map<string, (mode: string) => string>} */
const ranIn = new Map();
/** The place of a node -> the element of ours that was last shown there. @type {Map<string, HTMLElement>} */
const shownAt = new Map();
const toasts = new Toasts(() => app.extensionManager, TOASTS);
/** @type {WeakMap<any, string>} */
const badgeTexts = new WeakMap();
/** @type {HTMLElement | null} */
let sidebar = null;
/** What the sidebar's last action did. The page makes the tab anew when the graph changes; this stays. */
const did = el("p", { class: "hs-hint", role: "status" });
/** What this device can do, to be said in the page's language. @type {import("./result.mjs").Result | null} */
let device = null;
/** What ComfyUI does here, as the server said when the sidebar was opened or a run ended. @type {import("./sidebar.mjs").Fact[]} */
let here = [];
let timing = new Timing();
/** Our sidebar tab as the page keeps it: Nodes 2.0 draws a badge again when what the badge read from here changes. */
let watched = { revision: 0, tooltip: "" };

/** A badge's words, those with a translation in the page's language. @param {any} node @param {any} output */
function badgeText(node, output) {
  const words = (output?.halfsafe_badge?.[0] ?? "").split(BETWEEN_WORDS), other = ranIn.get(placeOf(node));
  if (isPlannedAnew(node)) words.splice(1, 1);
  else if (words[1] && other) words[1] = other(words[1]);
  else if (words[1] && log.run?.state === "running" && node.comfyClass !== SUMS) words[1] = t("plans {mode}", { mode: words[1] });
  return words.map((/** @type {string} */ word) => t(word)).join(BETWEEN_WORDS);
}

function tabTooltip() {
  return t("Halfsafe: guards and precision reports");
}

/** The key of a node in `app.nodeOutputs`. @param {any} node */
function locatorOf(node) {
  const graph = node.graph;
  return !graph || graph.isRootGraph ? String(node.id) : `${graph.id}:${node.id}`;
}

/** The key of a node among those of all workflows. @param {any} node */
function placeOf(node) {
  return `${workflowId()} ${locatorOf(node)}`;
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
  const height = WITH_RESULT[node.comfyClass], panel = new ResultPanel(height);
  addWidget(node, "halfsafe_result", panel.element, height, RESULT_SIZE);
  results.set(node, { panel, output: undefined });
}

/** @param {any} node */
function addPanel(node) {
  const panel = new ReportPanel(node.comfyClass === ONE_NODE ? (rules) => keepRules(app, node, rules) : null);
  addWidget(node, "halfsafe_report", panel.element, PANEL_MIN_HEIGHT, PANEL_SIZE);
  panels.set(node, { panel, output: undefined, hasRun: false, report: null });
}

/** @param {any} node */
function addBadge(node) {
  const shown = new window.LGraphBadge({ text: "", ...BADGE_COLORS });
  node.badges.push(() => {
    void watched.revision;
    shown.text = app.extensionManager.setting.get(BADGES) ? badgeTexts.get(node) ?? "" : "";
    return shown;
  });
}

/** Bring badges and panels to what `app.nodeOutputs` holds: after a run, a cached run, a change of the workflow or of the language. */
function showOutputs() {
  watched.tooltip = tabTooltip();
  for (const node of ownNodes()) {
    const output = app.nodeOutputs[locatorOf(node)];
    const text = badgeText(node, output);
    if (text !== (badgeTexts.get(node) ?? "")) {
      badgeTexts.set(node, text);
      watched.revision += 1;
    }
    showResult(node, output);
    putInPage(node);
    const entry = panels.get(node);
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
  const before = shownAt.get(placeOf(node));
  if (before !== element && before?.isConnected) before.replaceWith(element);
  shownAt.set(placeOf(node), element);
}

/** @param {any} node @param {any} output */
function showResult(node, output) {
  const entry = results.get(node);
  const data = output?.halfsafe_result?.[0];
  panels.get(node)?.panel.tell(resultIn(output));
  if (!entry || entry.output === data) return;
  entry.output = data;
  entry.panel.show(resultIn(output));
}

/** The report in a node's output, or the one of the last run with it. @param {any} output @returns {string | undefined} */
function reportText(output) {
  return ran.get(output?.halfsafe_token?.[0]) ?? output?.halfsafe_report?.[0];
}

/** @param {any} detail of an `executed` event */
function noteExecuted(detail) {
  const node = isOfThisWorkflow() ? nodeById(String(detail.node)) : null;
  if (node && !cached.has(detail.node)) ranIn.delete(placeOf(node));
  const result = resultIn(detail.output);
  if (node && result) log.run?.results.set(String(detail.node), result);
  const notices = node ? noticesOf(detail.output) : [];
  if (notices.length) log.run?.notices.set(String(detail.node), notices);
  if (!cached.has(detail.node)) for (const toast of [...toastsOf(result), ...notices]) toasts.show(toast);
  if (!detail.output?.halfsafe_token) noteTold(detail.prompt_id, detail.output?.halfsafe_report?.[0]);
  showOutputs();
}

/** @param {any} detail of a `halfsafe.report` event */
function noteRan({ prompt_id: promptId, token, report }) {
  ran.set(token, report);
  noteTold(promptId, report);
  showOutputs();
}

/** @param {string} promptId @param {string | undefined} report */
function noteTold(promptId, report) {
  if (report && log.run?.promptId === promptId) told.set(report, { promptId, seen: log.run.events.length });
}

/** @param {any} detail of an `execution_start` event */
function noteStart(detail) {
  told.clear();
  toasts.clear();
  did.textContent = "";
  cached = new Set();
  timing = new Timing();
  log.start(detail.prompt_id, workflowId()).forEach((toast) => toasts.show(toast));
}

/** What the open workflow is known by. @returns {string} */
function workflowId() {
  return String((app.graph?.rootGraph ?? app.graph)?.id ?? "");
}

/** Whether the last run was of the workflow that is open. */
function isOfThisWorkflow() {
  return !log.run?.workflow || log.run.workflow === workflowId();
}

/** Live guard lines on the reports whose model comes from that guard: those the report does not have yet. */
function drawRun() {
  const { promptId = "" } = log.run ?? {};
  const events = isOfThisWorkflow() ? log.run?.events ?? [] : [];
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

function drawTab() {
  if (!sidebar) return;
  const run = isOfThisWorkflow() ? log.run : null;
  const reports = ownNodes().flatMap((node) => {
    const { report = null, output } = panels.get(node) ?? {};
    const isOfBefore = run?.state === "failed" && !told.has(output);
    return report && !isOfBefore ? [{ id: locatorOf(node), title: node.title, report }] : [];
  });
  const watching = app.extensionManager.setting.get(WATCH) ?? "off";
  const nodes = allNodes(app);
  const unguard = nodes.some(isGuard) ? () => unguardWorkflow(app) : null;
  const unmeasure = nodes.some(isMeasure) ? () => unmeasureWorkflow(app) : null;
  const unhalve = nodes.some(isHalved) ? () => putLoadersBack(app) : null;
  const actions = { showMe: () => showMe(app), guard: () => guardWorkflow(app), unguard, measure: () => measureWorkflow(app), unmeasure, halve: () => halveMemory(app, api), unhalve, watch: (/** @type {string} */ value) => app.extensionManager.setting.set(WATCH, value) };
  const about = { device: device ? together([...device.refused.map(said), t("Your device: {what}", { what: sentenceOf(device) })]) : "", here, took: timing.text };
  const waiting = { refused: log.refused, isWaiting: log.isWaiting };
  drawSidebar(sidebar, run, reports, { ...about, ...waiting, did, watching, nodes, elsewhere: !isOfThisWorkflow(), redraw: drawTab, ...actions }, {
    titleOf: (id) => nodeById(id)?.title ?? t("Guard"),
    goTo: (id) => {
      const node = nodeById(id);
      if (node) showNodes(app, [node]);
    },
  });
}

/** @param {any} message a `halfsafe.guard` event's detail */
function onGuard(message) {
  const toast = toastFor(message, log.add(message));
  if (toast) {
    log.run?.toasts.push(toast);
    toasts.show(toast);
  }
  if (message.fell_back) showRanIn(message.fell_back, () => "fp16_safe");
  else if (isWider(message) && !WATCHED.test(message.node_id)) showRanIn(String(message.node_id), (mode) => t("{mode}, some layers wider", { mode }));
}

/** Let a node's badge say what its model goes on in. @param {string} id @param {(planned: string) => string} mode */
function showRanIn(id, mode) {
  const node = isOfThisWorkflow() ? nodeById(id) : null;
  if (!node) return;
  ranIn.set(placeOf(node), mode);
  showOutputs();
}

/** @param {any} detail of the event that ends a run @param {"done" | "failed"} state @param {import("./run.mjs").RunError | null} [error] */
function noteEnd(detail, state, error = null) {
  log.end(detail.prompt_id, state, error).forEach((toast) => toasts.show(toast));
  clearProgress(allNodes(app));
  timing.begin("");
  showOutputs();
  if (sidebar) askHere();
}

/** @param {any} detail of an `execution_error` event */
function onError(detail) {
  const error = errorOf(detail, log.run);
  noteEnd(detail, "failed", error);
  if (!error.told) toasts.show(toastOf(error));
}

/** @param {string} event @param {(detail: any) => void} act */
function on(event, act) {
  api.addEventListener(event, (/** @type {CustomEvent} */ { detail }) => act(detail));
}

/** Tell the server the setting that guards every run, for the prompts that this page queues. @param {string} watch */
function sendSetting(watch) {
  const told = { client_id: api.clientId, on_nan: watch };
  if (api.clientId) api.fetchApi("/halfsafe/watch", { method: "POST", body: JSON.stringify(told) });
}

/** Take away what is told of the past, and tell a server that may have been started since the last time. */
function notePress() {
  if (log.press()) toasts.clear();
  sendSetting(app.extensionManager.setting.get(WATCH));
}

function listen() {
  on("halfsafe.guard", onGuard);
  on("halfsafe.report", noteRan);
  on("halfsafe.refused", ({ message }) => toasts.show(log.refuse(message)));
  on("promptQueueing", notePress);
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
  on("execution_cached", (detail) => { cached = new Set(detail.nodes.map(String)); });
  on("execution_interrupted", (detail) => noteEnd(detail, "failed"));
  on("executed", noteExecuted);
}

async function askDevice() {
  const response = await api.fetchApi("/halfsafe/device");
  device = response.ok ? await response.json() : null;
  drawTab();
}

/** What the context menu of a loader offers. @param {any} node */
function loaderMenu(node) {
  const item = (/** @type {string} */ content, /** @type {() => Promise<string>} */ act) => ({ content, callback: async () => toasts.show({ severity: "success", summary: `Halfsafe: ${await act()}`, life: 6000 }) });
  if (isHalved(node)) return [item(t("Put ComfyUI's loader back"), () => putLoadersBack(app, node))];
  return canBeHalved(node) ? [item(t("Halve the memory"), () => halveMemory(app, api, node))] : [];
}

async function askHere() {
  const response = await api.fetchApi("/halfsafe/here");
  here = response.ok ? await response.json() : [];
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
      sidebar = el("div", { class: "halfsafe hs-sidebar" });
      container.replaceChildren(/** @type {HTMLElement} */ (sidebar));
      drawTab();
      if (!device) askDevice();
      askHere();
    },
    destroy: () => {
      sidebar = null;
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
    addSidebarTab();
  },
  nodeCreated(/** @type {any} */ node) {
    if (!node.comfyClass?.startsWith(PREFIX)) return;
    if (WITH_REPORT.includes(node.comfyClass)) addPanel(node);
    if (node.comfyClass in WITH_RESULT) addResult(node);
    if (node.widgets?.some((/** @type {any} */ widget) => widget.name === RULES)) new RulesNote(node, api, () => app.graph?.setDirtyCanvas(true, true));
    addBadge(node);
  },
  getNodeMenuItems: loaderMenu,
  afterConfigureGraph: () => {
    showOutputs();
    return showWhole(app);
  },
  onNodeOutputsUpdated: showOutputs,
});
