// @ts-check
/** A run as cards: its answer as a headline, and what is behind *Why*. */
import { aboutOf, el, firstOf, verdictOf } from "./dom.mjs";
import { RUNS } from "./graph.mjs";
import { missingCard } from "./missing.mjs";
import { locatorOf } from "./page.mjs";
import { adviceLine } from "./panel.mjs";
import { culpritOf } from "./run.mjs";
import { saidIn } from "./toasts.mjs";
import { partsOf, said, sentencesOf, sizeText, t, together } from "./words.mjs";

/**
 * @typedef {import("./page.mjs").Page} Page
 * @typedef {import("./run.mjs").Run} Run
 * @typedef {import("./run.mjs").GuardState} GuardState
 * @typedef {import("./result.mjs").Card} Card
 * @typedef {Card & {rank: number, ids: string[], when?: string, isCached?: boolean, pictures?: import("./pictures.mjs").Pair | null}} RunCard `rank`: the lowest is the answer; `ids`: the nodes that it is of; `when`: it is older; `isCached`: its nodes did not run anew
 */

const GUARDS = ["HalfsafeNaNGuard", "HalfsafeGuardVAE", "HalfsafeGuardCLIP", "HalfsafeAutoPrecision"];
/** A workflow with one of these is there to measure or to make a file: a guard is no part of that. */
const TOOLS = ["HalfsafeMeasurePrecisions", "HalfsafeAnalyzeLayers", "HalfsafeCalibrate", "HalfsafeSaveModel", "HalfsafeCompareImages"];
/** The order of cards: what stops a run, what was asked for, what was found. */
const STOPS = 0, FAILED = 1, ASKED = 2, FOUND = 3, NOTED = 4;
/** The rank of a card that is shown only without any other. */
export const QUIET = 5;
/** The most words of an error that are drawn large: it names tensors and paths of any length, or is another program's. A longer one is behind *Why*. */
const MOST_WORDS = 14;

/** The cards of the open tab's last run, the main one first. @param {Page} page @returns {RunCard[]} */
export function cardsOf(page) {
  const { run, refused } = page;
  if (refused) {
    const [line, more] = fitting(refused.message);
    return [{ rank: STOPS, ids: [], headline: t("The run did not start"), tone: "bad", line, why: filled(more, together(refused.advice)) }];
  }
  const missing = missingCards(page);
  if (!run) return missing;
  const cards = [...missing, ...errorCards(page, run), ...blackCard(run), ...measuredCards(page, run), ...halvedCard(page, run), ...resultCards(page, run), ...guardCards(page, run), ...noticeCards(page, run), ...quietCard(page, run)];
  const isFresh = cards.some(({ rank, isCached }) => !isCached && rank < NOTED); // what was found anew is the answer
  return cards.map((card) => (isFresh && card.isCached ? foldedOf(card) : card)).sort((a, b) => a.rank - b.rank);
}

/** Fold a card: its headline moves behind *Why*. @param {RunCard} card @returns {RunCard} */
function foldedOf({ ids, headline, when, why = [] }) {
  return { rank: NOTED, ids, headline: "", why: [[when, headline].filter(Boolean).join(t(", ")), ...why] };
}

/** Files that a run would not find. @param {Page} page @returns {RunCard[]} */
function missingCards({ missing }) {
  const card = missingCard(missing);
  return card ? [{ rank: STOPS, ids: [...new Set(missing.map(({ node }) => locatorOf(node)))], ...card }] : [];
}

/** The cards of the runs before this one in its queue. @param {Page} page @returns {RunCard[]} */
export function cardsBefore(page) {
  const before = page.run?.before;
  return before ? guardCards(page, before) : [];
}

/** Whether the last run was black or NaN, so that a guard is what fits. @param {Run | null} run */
export function isLost(run) {
  return run !== null && (run.isBlack || hasLost(run));
}

/** Whether a guard found NaN or Inf that it did not repair. @param {Run} run */
function hasLost({ events }) {
  return events.some(({ event }) => event && !event.recovered && event.kind !== "drift");
}

/** The first sentence of an error where it has room, else nothing, and the rest. @param {string[]} parts @returns {string[]} */
function fitting([first, rest]) {
  return countOf(first) <= MOST_WORDS ? [first, rest] : ["", together([first, rest])];
}

/** How many words a text has; in Chinese two characters are one. @param {string} text */
function countOf(text) {
  const wide = text.match(/[\u3400-\u9fff]/g)?.length ?? 0;
  return wide / 2 + text.replace(/[\u3400-\u9fff]/g, " ").split(/\s+/).filter(Boolean).length;
}

/** @param {Page} page @param {Run} run @returns {RunCard[]} */
function errorCards(page, { error }) {
  if (!error || error.guard) return [];
  const { node, memory } = error;
  const isLeft = memory && page.acts.halve.undo; // what can be pressed is done
  const [headline, more = ""] = memory ?? fitting(error.message), all = together(error.advice);
  const [line, advice] = isLeft ? [t("Halved already: fewer pixels, frames or images need less."), all] : memory ? ["", all] : fitting(error.advice);
  return [{ rank: FAILED, ids: [node], tone: "bad", headline: headline || t("The run stopped"), line, why: filled(more, memory ? together(error.message) : "", advice) }];
}

/** @param {...string} texts */
function filled(...texts) {
  return texts.filter(Boolean);
}

/** @param {Run} run @returns {RunCard[]} */
function blackCard(run) {
  return run.isBlack && !hasLost(run) ? [{ rank: FAILED, ids: [], tone: "bad", headline: t("The picture is black") }] : [];
}

/** The fastest, the smallest and the closest setting, each with its figures as bars. @param {Page} page @param {Run} run @returns {RunCard[]} */
function measuredCards(page, run) {
  return resultsOf(page, run).filter(([, { best }]) => best?.length).map(([id, result]) => {
    const best = result.best ?? [];
    const most = (/** @type {(one: import("./result.mjs").Best) => number} */ of) => Math.max(...best.map(of), Number.MIN_VALUE);
    const [seconds, bytes, error] = [most((one) => one.seconds), most((one) => one.bytes), most((one) => one.error)];
    const isRanked = best.some(({ goals }) => goals.includes("speed")); // times of which none is clearly less have no bars to compare
    const rows = best.map((one) => ({
      name: one.goals.map((goal) => goalText(goal)).join(t(", ")), detail: one.name, act: () => page.use(page.nodeById(id), one.use),
      figures: [
        { text: `${figureOf(one.seconds)}\u00a0s`, share: isRanked ? one.seconds / seconds : null }, { text: sizeText(one.bytes), share: one.bytes / bytes },
        { text: one.error > 0 ? `${figureOf(100 * one.error)}\u00a0%` : "0", share: one.error / error },
      ],
    }));
    return { rank: ASKED, ids: [id], tone: result.tone, headline: isRanked ? "" : t("None is clearly faster"), rows, why: [said(result.sentence)], when: whenOf(run, id), isCached: run.cached.has(id) };
  });
}

/** @param {string} goal */
function goalText(goal) {
  return { speed: t("Fastest"), memory: t("Smallest"), quality: t("Closest") }[goal] ?? goal;
}

/** A number in two figures, with no more zeros than it needs. @param {number} value */
function figureOf(value) {
  return value >= 10 ? value.toFixed(0) : Number(value.toPrecision(2)).toString();
}

/** The bytes of all loaders that were to save some, in one bar. @param {Page} page @param {Run} run @returns {RunCard[]} */
function halvedCard(page, run) {
  const halved = resultsOf(page, run).filter(([, { sizes, use }]) => sizes && !use);
  if (!halved.length) return [];
  /** @type {Record<string, number>} */
  const stored = {};
  for (const [, result] of halved) for (const [name, size] of Object.entries(result.stored ?? {})) stored[name] = (stored[name] ?? 0) + size;
  const [before, after] = [0, 1].map((place) => halved.reduce((sum, [, { sizes }]) => sum + (sizes?.[place] ?? 0), 0));
  const saves = halved.some(([, { tone }]) => tone === "good");
  const headline = saves ? fromTo(before, after) : t("{size}, no smaller", { size: sizeText(after) });
  const bar = saves ? { before: Math.max(before, after), stored } : null;
  const ids = halved.map(([id]) => id), faster = stored.int8 && page.device?.int8_gains ? said(page.device.speed) : "";
  return [{
    rank: ASKED, ids, tone: saves ? "good" : "warn", headline, line: faster, bar, why: halved.map(([, { sentence }]) => said(sentence)),
    when: run.computed ? "" : whenOf(run, ...ids), isCached: ids.every((id) => run.cached.has(id)), // the loaded models that it is of are those of this run
  }];
}

/** "236 -> 155 MiB", or each with its unit where these differ. @param {number} before @param {number} after */
function fromTo(before, after) {
  const [from, to] = [before, after].map((size) => sizeText(size));
  const [number, unit] = from.split("\u00a0");
  return `${unit === to.split("\u00a0")[1] ? number : from} \u2192 ${to}`;
}

/** Results that are sentences. @param {Page} page @param {Run} run @returns {RunCard[]} */
function resultCards(page, run) {
  return resultsOf(page, run).filter(([, { sizes, best, use }]) => (!sizes || use) && !best?.length).map(([id, { sentence, tone, use, sizes, speed }]) => {
    const [headline, line, rest] = use && sizes ? [t("{storage} would take {size}", { storage: use.storage, size: sizeText(sizes[1]) }), said(speed), said(sentence)] : sentencesOf(sentence, 2);
    const choices = use ? [{ name: t("Use this"), act: () => page.use(page.nodeById(id), use) }] : [];
    return { rank: FOUND, ids: [id], tone, headline, line, choices, why: filled(rest), when: whenOf(run, id), isCached: run.cached.has(id) };
  });
}

/** @param {Page} page @param {Run} run */
function resultsOf(page, run) {
  return [...run.results].filter(([id, result]) => page.has(id, result));
}

/** @param {Run} run @param {...string} ids */
function whenOf(run, ...ids) {
  return ids.every((id) => run.cached.has(id)) ? t("of an earlier run") : "";
}

/** @param {Page} page @param {Run} run @returns {RunCard[]} */
function guardCards(page, { guards, reached, pictures, contrast }) {
  const names = [...reached].filter((id) => !guards.has(id)).map((id) => page.titleOf(id));
  const also = names.length ? t("This NaN also reached {names}.", { names: names.join(t(", ")) }) : "";
  return [...guards].map(([id, guard]) => {
    const isCured = aboutOf(guard).repaired;
    const card = guardCard(page, id, guard, guard.events.some(({ event }) => event && !event.recovered) ? also : "");
    return { ...card, rank: card.tone === "good" ? FOUND : FAILED, ...(isCured ? { pictures: contrast ?? beforeAndAfter(page, pictures) } : {}) };
  });
}

/** The picture of the first node that showed another one before this run. @param {Page} page @param {Map<string, any>} before */
function beforeAndAfter(page, before) {
  const pair = [...page.pictures].map(([key, after]) => ({ before: before.get(key), after })).find(({ before: earlier, after }) => earlier && earlier.filename !== after.filename);
  return pair;
}

/** The button that sets a guard from report to retry_higher; without a widget to set, a line that says so; neither if that would not help. @param {Page} page @param {string} id @param {string} advice @returns {Pick<RunCard, "line" | "choices">} */
function repairOf(page, id, advice) {
  const { switch: name } = partsOf(advice), act = page.repairBy(id);
  const line = name ? t("Set {switch} to retry_higher", { switch: said(String(name)) }) : "";
  return name && act ? { choices: [{ name: line, act }] } : { line };
}

/** @param {Page} page @param {string} id @param {GuardState} guard @param {string} also where else its NaN came @returns {Omit<RunCard, "rank">} */
function guardCard(page, id, guard, also) {
  const events = guard.events.map(({ event }) => event).filter((event) => event !== null);
  const [first] = guard.events, advice = guard.advice || (first?.advice ?? "");
  const seen = verdictOf(guard, events);
  const { culprit, cure, line: short } = culpritOf({ ...guard, advice, line: guard.advice ? guard.line : first?.line, event: first?.event });
  const repeated = events.filter(({ recovered, kind }) => recovered && kind !== "drift");
  const text = said(guard.brief);
  const lines = el("div", { class: "hs-events" }, ...firstOf(guard.events.map((event) => adviceLine(event, advice))));
  const repair = seen.unexplained ? repairOf(page, id, advice) : {};
  const line = seen.repaired || seen.tone === "good" || repair.line || repair.choices ? "" : short;
  const more = line && line === cure[0] ? cure[1] : together(cure);
  const why = [...filled(guard.events.some(({ brief }) => brief === guard.brief) ? "" : text, more), lines, ...filled(also)];
  const steps = new Set(repeated.map(({ step }) => step)).size;
  if (seen.repaired) return { ids: [id], tone: "good", headline: t(seen.cause), line: steps === 1 ? t("1 step was repeated.") : t("{count} steps were repeated.", { count: steps }), why };
  const headline = culprit || (seen.cause ? t(seen.cause) : seen.text);
  return { ids: [id], tone: seen.tone || aboutOf(guard).tone, headline, line, why, ...repair };
}

/** The card of a run whose picture was cured without a repeat, with the reason that none was needed. @param {Run} run @param {string} headline @param {import("./pictures.mjs").Pair} pictures @returns {RunCard} */
function curedCard({ notices, computed, calls }, headline, pictures) {
  const cures = [...notices].flatMap(([id, told]) => told.filter(isCure).map((notice) => ({ id, notice })));
  const quiet = t("No NaN in {calls} calls of the model", { calls: calls.model });
  const [line = quiet] = cures.map(({ notice }) => saidIn(notice));
  const why = cures.flatMap(({ notice }) => filled(detailIn(notice)));
  const one = { rank: FOUND, ids: cures.map(({ id }) => id), tone: "good", headline, pictures };
  return computed ? { ...one, line, why } : { ...one, why: [line, ...why], when: t("of an earlier run") };
}

/** What the sidebar has beside the summary of a notice. @param {import("./toasts.mjs").Toast} notice */
function detailIn({ detail, more = "" }) {
  return together([detail, more]);
}

/** Whether a notice says in what else a model was computed. @param {import("./toasts.mjs").Toast} notice */
function isCure({ severity }) {
  return severity === "success";
}

/** @param {Page} page @param {Run} run @returns {RunCard[]} */
function noticeCards(page, run) {
  const isTold = curesOf(page, run) !== undefined;
  return [...run.notices].filter(([id]) => page.nodeById(id)).flatMap(([id, told]) => told.filter((notice) => !isTold || !isCure(notice)).map((notice) => {
    return { rank: NOTED, ids: [id], tone: notice.severity === "success" ? "good" : "warn", headline: saidIn(notice), why: filled(detailIn(notice)) };
  }));
}

/** The two pictures of a run that a guard cured without a repeat. @param {Page} page @param {Run} run */
function curesOf(page, { state, guards, error, calls, contrast, isBlack, pictures }) {
  if (state !== "done" || guards.size || error) return undefined;
  return contrast ?? (calls.model && !isBlack ? beforeAndAfter(page, pictures) : undefined);
}

/** The card of a run in which no guard reported anything. @param {Page} page @param {Run} run @returns {RunCard[]} */
function quietCard(page, run) {
  const { state, computed, results, guards, error, calls: { model, encoder } } = run;
  if (guards.size || error) return [];
  const isOfNow = !page.isPast; // else the nodes of now say nothing of the run
  const cured = curesOf(page, run);
  if (cured) return [curedCard(run, run.contrast ? t("Not black with the guard") : t("The picture is no longer black"), cured)];
  const one = (/** @type {string} */ headline, tone = "") => [{ rank: FOUND, ids: [], tone, headline }];
  if (state === "done" && !computed) return results.size ? [] : one(t("Nothing was computed: ComfyUI kept the results of an earlier run."));
  const has = (/** @type {string[]} */ types) => page.nodes.some(({ comfyClass, mode }) => types.includes(comfyClass) && mode === RUNS);
  if (page.watching !== "off" || has(GUARDS) || model || encoder) {
    const tone = state === "done" ? "good" : ""; // without a result there is nothing to be good
    if (model) return one(t("No NaN in {calls} calls of the model", { calls: model }), tone);
    if (encoder) return one(t("No NaN in {calls} calls of VAE and text encoder", { calls: encoder }), tone);
    const isMeasured = [...results.values()].some(({ best }) => best?.length); // which runs without the guard
    return state === "done" && isOfNow && !isMeasured ? [{ rank: QUIET, ids: [], headline: t("Nothing was checked"), why: [t("No guarded model ran.")] }] : [];
  }
  const samples = page.nodes.some(({ inputs }) => inputs?.some((/** @type {any} */ { type, link }) => type === "MODEL" && link !== null));
  return state === "done" && isOfNow && samples && !results.size && !run.isBlack && !has(TOOLS) ? [{ rank: QUIET, ids: [], tone: "", headline: t("This workflow has no guard") }] : [];
}
