// @ts-check
/** Pictures that ComfyUI's page shows of a run: where they are, and whether they are black. */

/** The bits of a pixel's colours beside its alpha. */
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
