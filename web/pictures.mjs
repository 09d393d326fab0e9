// @ts-check
/** Pictures that ComfyUI's page shows of a run: where they are, whether they are black, and which of them show what a guard does. */
import { hasPassed, loadersOf, samplingsOf, takesOf, typeOf } from "./flow.mjs";
import { guardsModel } from "./guard.mjs";

/**
 * @typedef {{before: any, after: any, names?: [string, string]}} Pair two pictures, and what they are called; else by their time
 * @typedef {{node: any, image: any, isBlack: boolean}} Drawn the first picture of a node, and whether all of its are black
 */
/** What calls a model. */
const SAMPLED = ["MODEL", "GUIDER"];

/** The mask of a pixel's colour bits, without its alpha. */
const COLOURS = 0xffffff;

/** The address of a picture in a node's output. @param {any} api @param {{filename: string, subfolder?: string, type?: string}} image */
export function addressOf(api, { filename, subfolder = "", type = "output" }) {
  return api.apiURL(`/view?${new URLSearchParams({ filename, subfolder, type })}`);
}

/** Whether every pixel is black; false where the picture cannot be read. @param {any} api @param {any} image */
export async function isBlack(api, image) {
  try {
    const picture = new Image();
    picture.src = addressOf(api, image);
    await picture.decode();
    const { naturalWidth: width, naturalHeight: height } = picture;
    const context = new OffscreenCanvas(width, height).getContext("2d");
    context?.drawImage(picture, 0, 0);
    const pixels = context?.getImageData(0, 0, width, height).data.buffer;
    return Boolean(pixels) && new Uint32Array(/** @type {ArrayBuffer} */ (pixels)).every((pixel) => (pixel & COLOURS) === 0);
  } catch {
    return false;
  }
}

/**
 * A black picture whose model passes no guard, and one that is not black whose model, from the same loaders, does: what a guard is shown by. Null where there are no such two.
 * @param {import("./flow.mjs").Flow} flow @param {Drawn[]} drawn @returns {Pair | null}
 */
export function contrastIn(flow, drawn) {
  const known = drawn.map((one) => ({ ...one, ...modelsOf(flow, one.node) })).filter(({ loaders }) => loaders);
  for (const before of known.filter(({ isBlack: black, guarded }) => black && guarded === 0)) {
    const after = known.find(({ isBlack: black, isGuarded, loaders }) => !black && isGuarded && loaders === before.loaders);
    if (after) return { before: before.image, after: after.image, names: [before.node.title, after.node.title] };
  }
  return null;
}

/** The pictures that a model made: what a workflow only loads, as a mask, may be black. @param {import("./flow.mjs").Flow} flow @param {Drawn[]} drawn */
export function sampledIn(flow, drawn) {
  return drawn.filter(({ node }) => stepsTo(flow, node).some((step) => takesOf(step).some((take) => SAMPLED.includes(typeOf(flow, take)))));
}

/** The steps of a node, and all that lead to them. @param {import("./flow.mjs").Flow} flow @param {any} node */
function stepsTo(flow, node) {
  const steps = new Set([...flow.values()].filter((step) => step.node === node));
  for (const step of steps) {
    for (const { from } of takesOf(step)) {
      const before = flow.get(from);
      if (before) steps.add(before);
    }
  }
  return [...steps];
}

/** The loaders of the models that a node's picture was sampled with, "" for none; how many of these passed a guard, and whether all did. @param {import("./flow.mjs").Flow} flow @param {any} node */
function modelsOf(flow, node) {
  const models = stepsTo(flow, node).flatMap((step) => samplingsOf(flow, step)).map(({ model }) => model.from);
  const guarded = models.filter((from) => hasPassed(flow, from, "MODEL", guardsModel)).length;
  return { loaders: [...new Set(models.flatMap((from) => loadersOf(flow, from, "MODEL")))].sort().join(), guarded, isGuarded: guarded === models.length };
}
