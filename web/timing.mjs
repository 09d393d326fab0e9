// @ts-check
/** How long a run's parts took, as the page saw them: nodes that load, and a sampler's first step beside its later ones. */
import { t } from "./words.mjs";

const SECOND = 1000;

export class Timing {
  /** Nodes that load took so long, in seconds. */
  #loading = 0;
  /** What runs: its kind, since when, and the step it is at. */
  #running = { type: "", since: 0, step: 0 };
  /** The sampler with the slowest first step: seconds to its end, and seconds of each later step. @type {{first: number, later: number | null} | null} */
  #steps = null;

  /** Note that a node begins, or that none does. @param {string} type its class @param {number} [now] in milliseconds */
  begin(type, now = performance.now()) {
    if (/load/i.test(this.#running.type)) this.#loading += (now - this.#running.since) / SECOND;
    this.#running = { type, since: now, step: 0 };
  }

  /** Note that the node that runs has done a step. @param {number} step from 1 @param {number} [now] in milliseconds */
  step(step, now = performance.now()) {
    const seconds = (now - this.#running.since) / SECOND;
    if (step === 1 && this.#running.step === 0) this.#steps = { first: seconds, later: null };
    else if (this.#steps && step > this.#running.step) this.#steps.later = (seconds - this.#steps.first) / (step - 1);
    this.#running.step = step;
  }

  /** What took how long; empty where nothing was loaded or sampled. */
  get text() {
    const loading = this.#loading ? t("{seconds} s in loader nodes", { seconds: inSeconds(this.#loading) }) : "";
    if (!this.#steps) return loading;
    const { first, later } = this.#steps;
    const steps = later === null || later >= first ? t("{first} s to the end of the first step", { first: inSeconds(first) })
      : t("{first} s to the end of the first step, {later} s for each later step: the difference is loading", { first: inSeconds(first), later: inSeconds(later) });
    return [loading, steps].filter(Boolean).join(t("; "));
  }
}

/** @param {number} seconds */
function inSeconds(seconds) {
  return seconds < 10 ? seconds.toFixed(1) : seconds.toFixed(0);
}
