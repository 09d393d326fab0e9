// @ts-check
import { verdictText } from "./dom.mjs";
import { whatIn } from "./report.mjs";
import { t } from "./words.mjs";

/**
 * What the guards said in the last run. One run is kept: the newest.
 * @typedef {import("./report.mjs").GuardEvent} GuardEvent
 * @typedef {{node_id: string | null, prompt_id: string, kind: "event" | "verdict", verdict: string, message: string, advice: string, event: GuardEvent | null}} GuardMessage
 * @typedef {{verdict: string, message: string, advice: string, events: GuardMessage[]}} GuardState
 * @typedef {{promptId: string, state: "running" | "done" | "failed", guards: Map<string, GuardState>, events: GuardMessage[]}} Run
 */

const TOASTS_PER_RUN = 3;
const NOT_BAD = ["clean", "recovered"];

export class RunLog {
  /** @type {Run | null} */
  run = null;
  #onChange;

  /** @param {() => void} onChange called on every change */
  constructor(onChange) {
    this.#onChange = onChange;
  }

  /** @param {string} promptId */
  start(promptId) {
    this.run = { promptId, state: "running", guards: new Map(), events: [] };
    this.#onChange();
  }

  /** @param {string} promptId @param {"done" | "failed"} state */
  end(promptId, state) {
    if (this.run?.promptId !== promptId) return;
    this.run.state = state;
    this.#onChange();
  }

  /** @param {GuardMessage} message */
  add(message) {
    if (this.run?.promptId !== message.prompt_id) this.start(message.prompt_id);
    const run = /** @type {Run} */ (this.run);
    const id = String(message.node_id ?? "");
    const guard = run.guards.get(id) ?? { verdict: "", message: "", advice: "", events: [] };
    run.guards.set(id, guard);
    guard.verdict = message.verdict;
    if (message.kind === "event") {
      guard.events.push(message);
      run.events.push(message);
    } else Object.assign(guard, { message: message.message, advice: message.advice });
    this.#onChange();
  }
}

/** "overflow in blocks.0.ffn.2, step 3"; without a sigma there is no step. @param {import("./report.mjs").GuardEvent} event */
function placeText(event) {
  const what = whatIn(event);
  return typeof event.sigma === "number" ? t("{what}, step {step}", { what, step: event.step }) : what;
}

/**
 * The toast for a guard's message, or null: a few per run, then one that sums up.
 * @param {GuardMessage} message @param {number} events how many events this run has had, this one included
 */
export function toastFor(message, events) {
  const detail = [message.message, message.advice].filter(Boolean).join(" ");
  if (message.kind === "event") {
    const { event } = message;
    const summary = event ? placeText(event) : t("Guard");
    return events > TOASTS_PER_RUN ? null : { severity: "warn", summary: `Halfsafe: ${summary}`, detail, life: 8000 };
  }
  if (!NOT_BAD.includes(message.verdict)) {
    return { severity: "error", summary: `Halfsafe: ${verdictText(message.verdict)}`, detail, life: 20000 };
  }
  const count = events - TOASTS_PER_RUN;
  if (count <= 0) return null;
  const more = count > 1 ? t("{count} more guard events", { count }) : t("1 more guard event");
  return { severity: "info", summary: `Halfsafe: ${verdictText(message.verdict)}, ${more}`, detail, life: 8000 };
}
