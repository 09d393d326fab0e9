// @ts-check
/** Halfsafe in ComfyUI's page: the report on its node, badges, toasts and a sidebar tab. */
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { addStyles, markEarlier } from "./dom.mjs";
import { introduce, isPlannedAnew, keepRules, showWhole, upstream } from "./graph.mjs";
import { canBeHalved, isHalved, putLoadersBack, whyUnread } from "./memory.mjs";
import { isTaken } from "./measure.mjs";
import { locatorOf, Page, PREFIX, WATCH, WATCHED } from "./page.mjs";
import { ReportPanel } from "./panel.mjs";
import { readFlow } from "./flow.mjs";
import { contrastIn, isBlack, sampledIn } from "./pictures.mjs";
import { sayProgress } from "./progress.mjs";
import { reportIn } from "./report.mjs";
import { cardOf, noticesOf, ResultPanel, resultIn, toastsOf } from "./result.mjs";
import { RulesNote } from "./rules.mjs";
import { errorOf, isWider, toastFor, toastOf } from "./run.mjs";
import { Sidebar } from "./sidebar.mjs";
import { Timing } from "./timing.mjs";
import { ourToast } from "./toasts.mjs";
import { keep, loadWords, said, t } from "./words.mjs";

const EXTENSION = "halfsafe.page";
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
/** A storage of the widgets that offer some which older versions of ComfyUI do not run. */
const LOW_BITS = "w4a8";
const BADGE_COLORS = { fgColor: "#ffffff", bgColor: "#1d5c52" };
/** What the canvas leaves between badges, in pixels. */
const BADGE_GAP = 2;
const BETWEEN_WORDS = " \u00b7 ";
const PANEL_SIZE = [460, 360];
const PANEL_MIN_HEIGHT = 240;
const RESULT_SIZE = [420, 300];

const page = new Page(app, api, drawRun);

/** A badge's words, those with a translation in the page's language. @param {any} node @param {any} output */
function badgeText(node, output) {
  const words = [...(output?.halfsafe_badge?.[0] ?? [])];
  const [, other] = [...(page.ranIn.get(page.tab) ?? [])].find(([id]) => page.nodeById(id) === node) ?? [];
  if (words[0] && page.isEarlier(node, output)) words.unshift("of an earlier run");
  else if (isPlannedAnew(node)) words.splice(1, 1);
  else if (words[1] && other) words[1] = other(words[1]);
  else if (words[1] && page.log.of(page.tab)?.state === "running" && node.comfyClass !== SUMS) words[1] = t("plans {mode}", { mode: words[1] });
  return words.map(said).join(BETWEEN_WORDS);
}

function tabTooltip() {
  return t("Halfsafe: guards and precision reports");
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
  page.results.set(node, { panel, output: undefined });
}

/** Put what a node's result offers into the workflow. @param {any} node @param {import("./measure.mjs").Use} use */
async function useOf(node, use) {
  await answer(await page.use(node, use));
}

/** @param {any} node */
function addPanel(node) {
  const panel = new ReportPanel(node.comfyClass === ONE_NODE ? (rules) => keepRules(app, node, rules) : null, (use) => useOf(node, use));
  addWidget(node, "halfsafe_report", panel.element, PANEL_MIN_HEIGHT, PANEL_SIZE);
  page.panels.set(node, { panel, output: undefined, hasRun: false, report: null });
}

/** Give a node our badge, also a loader of ComfyUI's in whose place one of ours may stand. @param {any} node */
function addBadge(node) {
  const shown = new window.LGraphBadge({ text: "", ...BADGE_COLORS });
  let key = "";
  const badge = () => {
    void page.tabEntry.revision;
    if (node.graph) key = locatorOf(node);
    const text = app.extensionManager.setting.get(BADGES) ? page.badgeTexts.get(key) ?? "" : "";
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
  const texts = new Map(page.ownNodes.map((node) => [locatorOf(node), badgeText(node, app.nodeOutputs[locatorOf(node)])]));
  if (JSON.stringify([...texts]) === JSON.stringify([...page.badgeTexts])) return;
  page.badgeTexts.clear();
  for (const [key, text] of texts) page.badgeTexts.set(key, text);
  page.tabEntry.revision += 1;
}

/** Bring badges and panels to what `app.nodeOutputs` holds: after a run, a cached run, a change of the workflow or of the language. */
function showOutputs() {
  page.tabEntry.tooltip = tabTooltip();
  showBadges();
  for (const node of page.ownNodes) {
    const output = app.nodeOutputs[locatorOf(node)];
    keep(output?.halfsafe_messages?.[0]);
    showResult(node, output);
    putInPage(node);
    const entry = page.panels.get(node);
    const { body } = (entry ?? page.results.get(node))?.panel ?? {};
    if (body) markEarlier(body, page.isEarlier(node, output));
    const data = reportText(output);
    const hasRun = page.ran.has(output?.halfsafe_token?.[0]) || node.inputs.some((/** @type {any} */ { name, link }) => name === "after" && link !== null);
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
  const element = (page.panels.get(node) ?? page.results.get(node))?.panel.element;
  if (!element) return;
  const before = page.shownAt.get(locatorOf(node));
  if (before !== element && before?.isConnected) before.replaceWith(element);
  page.shownAt.set(locatorOf(node), element);
}

/** @param {any} node @param {any} output */
function showResult(node, output) {
  const entry = page.results.get(node);
  const data = output?.halfsafe_result?.[0];
  const result = resultIn(output);
  page.panels.get(node)?.panel.tell(isTaken(node, result) ? null : result);
  if (!entry || entry.output === data) return;
  entry.output = data;
  entry.panel.show(result);
}

/** The report in a node's output, or the one of the last run with it. @param {any} output @returns {string | undefined} */
function reportText(output) {
  return page.ran.get(output?.halfsafe_token?.[0])?.report ?? output?.halfsafe_report?.[0];
}

/** The run of a prompt, while it is the last one. @param {string} promptId */
function runOf(promptId) {
  return page.log.run?.promptId === promptId ? page.log.run : null;
}

/** @param {any} detail of an `executed` event */
function noteExecuted(detail) {
  const run = runOf(detail.prompt_id);
  const id = String(detail.node);
  const isAnew = !run?.cached.has(id);
  keep(detail.output?.halfsafe_messages?.[0]);
  const result = resultIn(detail.output);
  const notices = noticesOf(detail.output);
  if (run?.tab && isAnew) page.ranIn.get(run.tab)?.delete(id);
  run?.held.add(id);
  if (result) run?.results.set(id, result);
  if (notices.length) run?.notices.set(id, notices);
  if (isAnew) for (const toast of [...toastsOf(result), ...notices]) page.tell(toast);
  if (!detail.output?.halfsafe_token) noteTold(detail.prompt_id, detail.output?.halfsafe_report?.[0]);
  showOutputs();
}

/** @param {any} detail of a `halfsafe.report` event */
function noteRan({ prompt_id: promptId, token, report }) {
  page.ran.set(token, { report, promptId });
  noteTold(promptId, report);
  showOutputs();
}

/** @param {string} promptId @param {string | undefined} report */
function noteTold(promptId, report) {
  const run = runOf(promptId);
  if (report && run) page.told.set(report, { promptId, seen: run.events.length });
}

/** @param {any} detail of an `execution_start` event */
function noteStart(detail) {
  const tab = tabOf(detail.prompt_id);
  const wasBlack = tab && page.log.of(tab)?.isBlack;
  page.told.clear();
  page.toasts.clear();
  page.sidebar?.tell("");
  page.timing = new Timing();
  page.log.start(detail.prompt_id, tab).forEach((toast) => page.tell(toast));
  if (page.log.run && tab === page.tab && wasBlack) page.log.run.pictures = page.pictures;
  showOutputs();
}

/** Note the nodes of a prompt whose results come from ComfyUI's cache: they belong to its run all the same. @param {any} detail of an `execution_cached` event */
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
  return page.tabs.of(promptId) ?? (workflow && workflow !== graph ? null : page.tab);
}

/** Live guard lines on the reports whose model comes from that guard: those the report does not have yet. */
function drawRun() {
  const { promptId = "", events = [] } = page.log.of(page.tab) ?? {};
  for (const node of page.ownNodes) {
    const entry = page.panels.get(node);
    if (!entry) continue;
    const before = upstream(node);
    const report = page.told.get(entry.output);
    const unseen = events.slice(report?.promptId === promptId ? report.seen : 0);
    const live = unseen.filter(({ node_id: id }) => id === null || String(id).includes(":") || before.has(String(id)));
    entry.panel.showLive(live.length ? live : null);
  }
  page.draw();
}

/** @param {any} message a `halfsafe.guard` event's detail */
function onGuard(message) {
  const tab = tabOf(message.prompt_id, message.workflow);
  if (message.kind === "taken_back") {
    forgetRanIn(tab, [message.planner, message.node_id]);
    return;
  }
  const toast = toastFor(message, page.log.add(message, tab));
  if (toast) {
    page.log.run?.toasts.push(toast);
    page.tell(toast);
  }
  if (message.fell_back) noteRanIn(tab, message.fell_back, () => "fp16_safe");
  else if (isWider(message) && !WATCHED.test(message.node_id)) noteRanIn(tab, String(message.node_id), (mode) => t("{mode}, some layers wider", { mode }));
}

/** Let a node's badge name the mode that its model runs in from now on. @param {object | null} tab @param {string} id @param {(planned: string) => string} mode */
function noteRanIn(tab, id, mode) {
  if (!tab) return;
  page.ranIn.set(tab, (page.ranIn.get(tab) ?? new Map()).set(id, mode));
  showOutputs();
}

/** Let badges name the planned modes again, because the run that changed them failed. @param {object | null} tab @param {(string | null)[]} ids */
function forgetRanIn(tab, ids) {
  if (!tab) return;
  ids.forEach((id) => page.ranIn.get(tab)?.delete(String(id)));
  showOutputs();
}

/** @param {any} detail of the event that ends a run @param {"done" | "failed"} state @param {import("./run.mjs").RunError | null} [error] */
function noteEnd(detail, state, error = null) {
  page.log.end(detail.prompt_id, state, error).forEach((toast) => page.tell(toast));
  page.progress.clear(page.nodes);
  page.timing.begin("");
  showOutputs();
  if (page.sidebar?.element.isConnected) page.askHere();
  if (state === "done") lookAt(page.log.run);
}

/** Note whether all that a run drew is black, or what was drawn without a guard alone. @param {import("./run.mjs").Run | null} run */
async function lookAt(run) {
  if (!run || run.tab !== page.tab) return;
  const nodes = page.nodes.filter((node) => run.held.has(locatorOf(node)) && page.outputOf(node)?.images?.length && !page.outputOf(node).animated?.some(Boolean)); // of a film the first frame may be black
  const seen = await Promise.all(nodes.map(async (node) => {
    const { images } = page.outputOf(node);
    return { node, image: images[0], isBlack: (await Promise.all(images.map((/** @type {any} */ image) => isBlack(api, image)))).every(Boolean) };
  }));
  if (seen.some((one) => one.isBlack) && run.tab === page.tab) {
    const flow = await readFlow(app), drawn = sampledIn(flow, seen);
    run.isBlack = drawn.length > 0 && drawn.every((one) => one.isBlack);
    run.contrast = run.isBlack ? null : contrastIn(flow, drawn);
  }
  page.draw();
}

/** @param {any} detail of an `execution_error` event */
function onError(detail) {
  const error = errorOf(detail, runOf(detail.prompt_id));
  noteEnd(detail, "failed", error);
  if (!error.told) page.tell(toastOf(error));
  else if (!error.guard) explain(error, page.log.run?.tab);
}

/** Name the damaged file where ComfyUI's loader said only how reading it failed. @param {import("./run.mjs").RunError} error @param {object | null | undefined} tab */
async function explain(error, tab) {
  const node = tab === page.tab ? page.nodeById(error.node) : null;
  const why = node ? await whyUnread(api, node).catch(() => null) : null;
  if (!why) return;
  Object.assign(error, why);
  page.tell(toastOf(error));
  page.draw();
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
  const tab = page.tabs.asking;
  page.tabs.settle();
  page.tell(page.log.refuse(tab, message), tab);
}

/** Take away what is told of the past, and tell a server that may have been started since the last time. */
function notePress() {
  page.tabs.press(page.settings());
  if (page.log.press(page.tab)) page.toasts.clear();
  sendSetting(app.extensionManager.setting.get(WATCH));
}

function listen() {
  on("halfsafe.guard", onGuard);
  on("halfsafe.report", noteRan);
  on("halfsafe.badge", ({ node_id: id, words }) => noteRanIn(page.log.run?.tab ?? page.tab, String(id), (mode) => [mode, ...words.map(said)].join(BETWEEN_WORDS)));
  on("halfsafe.refused", noteRefused);
  on("halfsafe.messages", () => {});
  on("reconnected", () => {
    page.asking = null;  // it may have been started with other options
    askAll();
  });
  on("graphChanged", showOutputs);
  on("promptQueueing", notePress);
  on("promptQueued", () => page.tabs.settle());
  on("progress_text", () => sayProgress(page.nodes));
  on("execution_start", noteStart);
  on("executing", (id) => {
    if (id && page.log.run) page.log.run.computed = true;
    page.progress.clear(page.nodes.filter((node) => locatorOf(node) !== String(id)));
    page.progress.begin(id && page.nodeById(String(id)));
    page.timing.begin((id && page.nodeById(String(id))?.comfyClass) ?? "");
  });
  on("progress", ({ value }) => page.timing.step(value));
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
      page.drawSoon();
      return before?.apply(this, given);
    };
  }
}

/** Let a storage that this ComfyUI does not run say which one does. @param {any} node */
async function labelStorages({ widgets = [] }) {
  const offering = widgets.filter((/** @type {any} */ { options }) => options?.values?.includes?.(LOW_BITS));
  if (!offering.length) return;
  await page.askDevice();
  const label = (/** @type {string} */ storage) => {
    const needs = page.device?.later[storage];
    return needs ? t("{storage} (from ComfyUI {needs} on)", { storage, needs }) : storage;
  };
  if (Object.keys(page.device?.later ?? {}).length) for (const { options } of offering) options.getOptionLabel = label;
}

/** Show what an action outside of the sidebar did. If it offers choices, the sidebar is opened for them. @param {import("./result.mjs").Told} told */
async function answer(told) {
  if (cardOf(told).choices?.length && !page.sidebar?.element.isConnected) {
    await app.extensionManager.command.execute("Workspace.ToggleSidebarTab.halfsafe");
    await new Promise(requestAnimationFrame);
  }
  page.sidebar?.tell(told);
  page.tell(ourToast("success", cardOf(told).headline, "", 6000), page.tab);
  page.draw();
}

/** What the context menu of a loader offers. @param {any} node */
function loaderMenu(node) {
  const item = (/** @type {string} */ content, /** @type {() => Promise<import("./result.mjs").Told>} */ act) => ({ content, callback: async () => await answer(await act()) });
  if (isHalved(node)) return [item(t("Put ComfyUI's loader back"), () => putLoadersBack(app, node))];
  return canBeHalved(node) ? [item(t("Halve the memory"), () => page.halve(node))] : [];
}

function askAll() {
  page.askDevice();
  page.askHere();
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
      page.sidebar ??= new Sidebar();
      if (page.sidebar.element.parentElement !== container) container.replaceChildren(page.sidebar.element);
      askAll();
      page.sidebar.draw(page); // the page has not put it in yet
    },
  });
  page.tabEntry = app.extensionManager.getSidebarTabs().find((/** @type {any} */ tab) => tab.id === "halfsafe");
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
        page.draw();
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
    page.tabs.watch(showOutputs);
    addSidebarTab();
  },
  nodeCreated(/** @type {any} */ node) {
    redrawAt(node);
    if (canBeHalved(node)) addBadge(node);
    if (!node.comfyClass?.startsWith(PREFIX)) return;
    introduce(node);
    if (WITH_REPORT.includes(node.comfyClass)) addPanel(node);
    if (node.comfyClass in WITH_RESULT) addResult(node);
    if (node.widgets?.some((/** @type {any} */ widget) => widget.name === RULES)) new RulesNote(node, page, () => app.graph?.setDirtyCanvas(true, true));
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
