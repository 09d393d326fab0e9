// @ts-check
/** The sidebar tab: the result of the last run, the next actions, and folded sections with the details. */
import { cardsBefore, cardsOf, isLost, QUIET } from "./cards.mjs";
import { el, paint, storageBar } from "./dom.mjs";
import { headOf } from "./panel.mjs";
import { addressOf } from "./pictures.mjs";
import { cardOf } from "./result.mjs";
import { said, sentencesOf, t } from "./words.mjs";

/**
 * @typedef {import("./page.mjs").Page} Page
 * @typedef {import("./page.mjs").ActName} ActName
 * @typedef {import("./cards.mjs").RunCard} RunCard
 * @typedef {import("./result.mjs").Card} Card
 * @typedef {import("./result.mjs").Told} Told
 */

/** What has the focus, or is given it by a key. */
const FOCUSABLE = "button, select, summary";

/** The order of actions that do not fit more than others. @type {ActName[]} */
const ORDER = ["measure", "halve", "guard", "showMe"];

/** The tab's parts stay in the page while it is open, so that a screen reader keeps its place, and the focus stays where it is. */
export class Sidebar {
  /** What the last action said, and the key of the tab and the nodes that it is true of; "" once they have changed. @type {Told} */
  #told = "";
  #toldOf = "";
  /** A tab -> its number in the key of an answer. @type {WeakMap<object, number>} */
  #numbers = new WeakMap();
  #tabs = 0;

  constructor() {
    this.device = el("div", { class: "hs-device" });
    this.run = el("section", { class: "hs-run" });
    this.actions = el("div", { class: "hs-actions" });
    this.did = el("div", { class: "hs-did", role: "status", tabindex: "-1" });
    this.watch = el("div");
    this.folds = el("div");
    this.element = el("div", { class: "halfsafe hs-sidebar" }, el("h2", { text: "Halfsafe" }), this.device, this.did, this.run, this.actions, this.watch, this.folds);
  }

  /** Say what was done, from the next drawing on. @param {Told} told */
  tell(told) {
    this.#told = told;
    this.#toldOf = "";
  }

  /** @param {Page} page */
  draw(page) {
    if (page.device) paint(this.element, { storages: page.device.storages ?? {}, modes: {} });
    fill(this.device, ...deviceOf(page));
    fill(this.did, ...this.#toldIn(page));
    fill(this.run, ...this.#answerOf(page));
    fill(this.actions, ...this.#actionsOf(page));
    fill(this.watch, watchSwitch(page));
    fill(this.folds, ...foldsOf(page));
  }

  /** What the last run said: its answer, lines beside it, and why. The answer is large unless something was done since. @param {Page} page */
  #answerOf(page) {
    const { isPast } = page, isLarge = !isPast && !this.#told, before = cardsBefore(page);
    const [answer, ...others] = cardsOf(page).filter(({ rank }) => isLarge || rank !== QUIET).map((card) => (isPast ? pastOf(card) : card));
    const ended = answer?.tone === "bad" ? "" : t("stopped");
    const state = page.isWaiting ? page.refused || page.missing.length ? "" : t("Nothing has begun yet. If ComfyUI refused the run, its own message says why.") : { running: t("running"), failed: ended, done: "" }[page.run?.state ?? "done"];
    const words = [isPast && answer ? t("of an earlier run") : "", state].filter(Boolean).join(t(", "));
    const status = words ? [el("p", { class: "hs-state", text: words })] : [];
    if (!answer && !before.length) return status;
    const large = answer ? [this.#card(page, answer, isLarge ? "hs-answer" : "")] : [];
    const earlier = before.length ? [el("h3", { text: t("Earlier in this queue") }), ...before.map((card) => this.#card(page, card))] : [];
    const all = [...(answer ? [answer] : []), ...others, ...before];
    return [...status, el("div", { class: "hs-box" }, ...large, ...others.filter(({ headline, rows }) => headline || rows).map((card) => this.#card(page, card)), ...earlier, whyOf(page, all))];
  }

  /** @param {Page} page @param {Card & Partial<RunCard>} card @param {string} [size] */
  #card(page, card, size = "") {
    const { headline, line, tone, bar, rows = [], pictures, choices = [], when } = card;
    const head = headline ? el("p", { class: bar ? "hs-headline hs-number" : "hs-headline", "data-tone": tone || null, text: headline }) : null;
    return el(
      "article", { class: `hs-card ${size} ${tone === "bad" ? "hs-error" : ""}`.trim() },
      when ? el("p", { class: "hs-dim", text: when }) : null, head, line ? el("p", { class: "hs-line", text: line }) : null,
      bar ? storageBar(bar) : null, pictures ? picturesOf(page, pictures) : null, rows.length ? this.#rows(page, rows) : null,
      ...choices.map(({ name, act }) => this.button(page, act, name)),
    );
  }

  /** Answers to choose from, with the figures of each as bars below the same heads. @param {Page} page @param {NonNullable<Card["rows"]>} rows */
  #rows(page, rows) {
    const heads = [t("Time"), t("Memory"), t("Error")].map((text) => el("span", { text }));
    const lines = rows.map(({ name, detail, figures, act }) => el(
      "div", { class: "hs-choice" }, el("span", { class: "hs-choice-name" }, name, " ", el("span", { class: "hs-dim", text: detail })), this.button(page, act, t("Use this")),
      el("div", { class: "hs-figs" }, ...figures.map(({ text, share }) => el("span", { class: share === null ? "hs-fig hs-dim" : "hs-fig" }, share === null ? null : track(share), text))),
    ));
    return el("div", { class: "hs-choices" }, el("div", { class: "hs-figs hs-dim" }, ...heads), ...lines);
  }

  /** The action that fits, large, and the others as lines. @param {Page} page */
  #actionsOf(page) {
    const { acts } = page, words = wordsOf(page);
    const fits = fitting(page), first = acts[fits].undo || page.missing.length ? null : fits; // what is done already is a line, and what is to do is Run
    const others = ORDER.filter((name) => name !== first);
    return [...(first ? [first] : []), ...others].map((name) => {
      const { act, undo } = acts[name], { title, hint, about, back } = words[name];
      const button = undo ? this.button(page, undo, el("b", { text: back })) : this.button(page, act, el("b", { text: title }), el("span", { text: hint }));
      button.dataset.act = name;
      button.classList.add(name === first ? "hs-first" : "hs-other");
      if (undo) button.classList.add("hs-on");
      button.title = undo ? "" : about;
      return button;
    });
  }

  /** What the last action said, with a button for each answer to a question. @param {Page} page */
  #toldIn(page) {
    const now = this.#stateOf(page);
    this.#toldOf ||= now;
    if (this.#toldOf !== now) this.#told = "";
    if (!this.#told) return [];
    const card = cardOf(this.#told), { why = [] } = card;
    return [this.#card(page, card, "hs-answer"), why.length ? el("details", { class: "hs-why" }, el("summary", { text: t("Why") }), ...why.map(paragraph)) : null];
  }

  /** What an answer is true of: the tab, and its nodes. @param {Page} page */
  #stateOf({ tab, nodes }) {
    if (!this.#numbers.has(tab)) this.#numbers.set(tab, (this.#tabs += 1));
    return [this.#numbers.get(tab), ...nodes.map(({ graph, id, type }) => `${graph.id} ${id} ${type}`)].join();
  }

  /** A button whose action says what it did. The button keeps the focus when it is drawn anew. @param {Page} page @param {() => Told | Promise<Told>} act @param {...(Node | string)} children */
  button(page, act, ...children) {
    const onclick = async () => {
      const part = made.closest(".hs-sidebar > *"), same = sameIn(part, made);
      const { run } = page.log, told = await act();
      if (page.log.run === run) this.tell(told); // a run that began meanwhile has its own answer
      page.draw();
      const { activeElement: focused } = document;
      if (focused === document.body || focused instanceof HTMLCanvasElement) (same() ?? this.did).focus({ preventScroll: true });
    };
    const made = el("button", { type: "button", class: "hs-button", onclick }, ...children);
    return made;
  }
}

/** A card of a run with other settings: its headline, and settings that were measured; the rest is behind *Why*. @param {RunCard} card @returns {RunCard} */
function pastOf({ line, why = [], bar, pictures, when, choices, ...kept }) {
  return { ...kept, why: [...(line ? [line] : []), ...why] };
}

/** Put children into an element, unless it has the same: what has the focus or is unfolded stays so. @param {HTMLElement} element @param {...(Node | string | null)} children */
function fill(element, ...children) {
  const next = el("div", {}, ...children);
  const unfolded = [...element.querySelectorAll("details")].map(({ open }) => open);
  for (const [place, fold] of [...next.querySelectorAll("details")].entries()) fold.open ||= unfolded[place] ?? false;
  const same = next.childNodes.length === element.childNodes.length && [...next.childNodes].every((child, place) => child.isEqualNode(element.childNodes[place]));
  if (same) return;
  const { activeElement: focused } = document, isIn = focused && element.contains(focused), after = sameIn(element, focused);
  element.replaceChildren(...next.childNodes);
  if (isIn) (after() ?? element).focus({ preventScroll: true });
}

/** What finds an element once its part is drawn anew: an action by its name, as it may move, another by its place. @param {Element} part @param {Element | null} element @returns {() => HTMLElement | undefined} */
function sameIn(part, element) {
  const all = () => /** @type {HTMLElement[]} */ ([...part.querySelectorAll(FOCUSABLE)]);
  const place = all().findIndex((one) => one === element), { act } = /** @type {HTMLElement | null} */ (element)?.dataset ?? {};
  return () => all().find((one) => act && one.dataset.act === act) ?? all()[place];
}

/** What this device computes in, and what of this ComfyUI is not used. @param {Page} page */
function deviceOf({ device, asking }) {
  if (!device) return [el("p", { class: "hs-dim", text: asking ? t("Detecting the device ...") : t("ComfyUI does not answer.") })];
  return [...device.refused.map((text) => el("p", { class: "hs-line hs-refused", text: said(text) })), el("p", { class: "hs-dim", text: sentencesOf(device.sentence)[0] })];
}

/** What fits what the open workflow did, or has. @param {Page} page @returns {ActName} */
function fitting({ run, nodes }) {
  if (run?.error?.memory) return "halve";
  if (isLost(run)) return "guard";
  return nodes.some(({ inputs }) => inputs?.some((/** @type {any} */ { type, link }) => type === "MODEL" && link !== null)) ? "measure" : "showMe";
}

/** What each action is called, what it gives, what it does, and what takes it back. @param {Page} page @returns {Record<ActName, {title: string, hint: string, about: string, back: string}>} */
function wordsOf({ device }) {
  return {
    showMe: { title: t("Show me"), hint: t("A black picture, and its cure"), about: t("A black picture, and the same one in a format that does not overflow. Nothing to download."), back: "" },
    guard: { title: t("Guard this workflow"), hint: t("Repairs black pictures"), about: t("Adds the Halfsafe node between loaders and sampler. Click again to remove it."), back: t("Take the guard out") },
    halve: {
      title: t("Halve the memory"), hint: device?.int8_gains ? t("8 bits, up to twice as fast") : t("Models in 8 bits"),
      about: t("Loads models and text encoders in 8 bits: replaces ComfyUI's loaders with Halfsafe's, with the same files and links. Click again to undo it."), back: t("Put ComfyUI's loaders back"),
    },
    measure: {
      title: t("Measure my card"), hint: t("Find the fastest, smallest and closest precision"),
      about: t("Adds a node that measures this workflow's model: about 30 sampler steps, then it names the best setting for this card."), back: t("Take Measure out"),
    },
  };
}

/** The values of the setting that guards every run, and what each does. @returns {[string, string][]} */
const watches = () => [["off", t("off")], ["report", t("report: show NaN and Inf")], ["retry_higher", t("retry_higher: repeat failed calls in a higher precision")]];

/** @param {Page} page */
function watchSwitch(page) {
  const options = watches().map(([value, text]) => el("option", { value, text, selected: value === page.watching }));
  const select = el("select", { onchange: () => page.watch(select.value) }, ...options);
  const chosen = page.watching === "off" ? t("off") : page.watching; // the open list says what each does, for which the closed one has no room
  return el("label", { class: "hs-watch" }, t("Guard every run"), el("span", { class: "hs-list" }, select, el("span", { "aria-hidden": "true", text: chosen })));
}

/** Two pictures: of a node in the run before and in this one, or of two nodes. @param {Page} page @param {import("./pictures.mjs").Pair} pictures */
function picturesOf({ api }, { before, after, names = [t("Before"), t("Now")] }) {
  const shown = (/** @type {any} */ image, /** @type {string} */ text) => el("figure", {}, el("img", { src: addressOf(api, image), alt: "", loading: "lazy" }), el("figcaption", { text }));
  return el("div", { class: "hs-pictures" }, shown(before, names[0]), shown(after, names[1]));
}

/** A bar of one share. @param {number} share */
function track(share) {
  return el("span", { class: "hs-track", "aria-hidden": "true" }, el("span", { style: `width: ${Math.round(100 * Math.max(0, Math.min(share, 1)))}%` }));
}

/** All that explains the cards, each with its node. @param {Page} page @param {RunCard[]} cards */
function whyOf(page, cards) {
  const told = cards.filter(({ why = [], ids }) => why.length || ids.length).map(({ ids, why = [] }) => el("div", { class: "hs-reason-of" }, ...ids.map((id) => nodeLink(page, id, page.titleOf(id))), ...why.map(paragraph)));
  return told.length ? el("details", { class: "hs-why" }, el("summary", { text: t("Why") }), ...told) : null;
}

/** @param {string | Node} text */
function paragraph(text) {
  return typeof text === "string" ? el("p", { class: "hs-lines", text }) : text;
}

/** @param {Page} page @param {string} id @param {string} title */
function nodeLink(page, id, title) {
  return el("button", { type: "button", class: "hs-link", title: t("Show this node"), onclick: () => page.goTo(id), text: title });
}

/** What can be looked up: reports, and what ComfyUI does here. @param {Page} page */
function foldsOf(page) {
  const reports = page.reports.map(({ id, title, report, earlier }) => {
    const when = earlier ? el("span", { class: "hs-dim", text: t("of an earlier run") }) : null;
    const card = el("article", { class: `hs-head${earlier ? " hs-earlier" : ""}` }, el("div", { class: "hs-title" }, nodeLink(page, id, title), when), ...headOf(report));
    paint(card, report);
    return card;
  });
  return [...(reports.length ? [fold(t("Reports"), ...reports)] : []), fold(t("What ComfyUI does here"), factsOf(page))];
}

/** @param {string} title @param {...Node} children */
function fold(title, ...children) {
  return el("details", { class: "hs-fold" }, el("summary", { text: title }), ...children);
}

/** What each fact is called. @returns {Record<string, string>} */
const facts = () => ({ kernels: t("8-bit kernels"), compiler: t("Comfy Compiler"), "dynamic VRAM": t("Dynamic VRAM"), attention: t("Attention"), loaded: t("Loaded") });

/** @param {Page} page */
function factsOf({ device, here, timing }) {
  const known = device ? [[el("dt", { text: t("Device") }), el("dd", { text: said(device.sentence) })]] : [];
  const lines = here.map((fact) => {
    const text = [said(fact.here), fact.what === "loaded" ? timing.text : ""].filter(Boolean).join(t("; "));
    return [el("dt", { text: facts()[fact.what] ?? fact.what }), el("dd", {}, text, fact.switch ? el("div", { class: "hs-dim", text: t("To change it: {switch}", { switch: said(fact.switch) }) }) : null)];
  });
  return el("dl", { class: "hs-facts" }, ...[...known, ...lines].flat());
}
